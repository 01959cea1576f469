"""Connections at the edges: nobody waits for them any more, and all is closed."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from typing import Any

import pytest

from databases import Db
from rowmill.store import Database
from rowmill.store.handler_connections import SqliteHandlerConnection
from workers import until


def driver_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rowmill-sqlite-handlers"]


async def test_a_connection_that_comes_too_late_is_closed_with_the_others(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1: a worker is stopped while a finish block waits for its connection; no thread answers a loop that is gone."""
    connect, asked, may_come = sqlite3.connect, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> sqlite3.Connection:
        asked.set()
        may_come.wait(60)
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", slow)
    database = Database.open(lite.url)

    async def finish() -> None:
        async with database.begin():
            pass

    before = driver_threads()
    waiting = asyncio.create_task(finish())
    await until(asked.is_set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting  # at once: the connection has not come yet
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    may_come.set()
    await closing
    for thread in driver_threads():
        thread.join(60)
    assert driver_threads() == before


def test_a_loop_that_is_closed_under_a_statement_ends_no_thread_with_a_traceback(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails in one environment does not wait for what it asked of another."""
    said: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    may_answer = threading.Event()

    async def leave() -> SqliteHandlerConnection:
        path = lite.url.removeprefix("sqlite:///")
        connection = SqliteHandlerConnection(lambda: sqlite3.connect(path, check_same_thread=False))
        await connection
        await connection.create_function("waits", 0, lambda: int(may_answer.wait(60)))
        asking = asyncio.ensure_future(connection.execute_fetchall("select waits()"))
        await asyncio.wait([asking], timeout=0.05)
        return connection

    connection = asyncio.run(leave())
    may_answer.set()
    connection.stop()
    connection._thread.join(60)
    assert not connection._thread.is_alive()
    assert said == []


async def test_a_connection_in_use_while_all_are_closed_is_closed_when_it_comes_back(pg: Db) -> None:
    """A claim that is on its way while its worker ends."""
    database = Database.open(pg.url)
    asking = asyncio.create_task(database.write(lambda run: run("select pg_sleep(0.3)", ())))
    others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    await until(lambda: pg.value(f"{others} and query like '%pg_sleep%'") == 1)
    await database.close()
    await asking
    await until(lambda: pg.value(others) == 0)
