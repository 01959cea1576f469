"""Connections of handlers' own transactions, at the edges: nobody waits for them any more, and all is closed."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from typing import Any

import pytest

from databases import Db
from rowmill.store import Database
from test_attacks import until


def driver_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_connection_worker_thread" in thread.name]


async def test_a_connection_that_comes_too_late_is_closed_with_the_others(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1: a worker is stopped while a finish block waits for its connection; no thread answers a loop that is gone."""
    connect, asked, may_come = sqlite3.connect, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> sqlite3.Connection:
        asked.set()
        may_come.wait(10)
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
        thread.join(5)
    assert driver_threads() == before
