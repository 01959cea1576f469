"""Wake triggers in tests: a table with one, a connection that hears its notifications, and tokens that are spent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg

from databases import Db
from rowmill import Mill
from rowmill.ops.migrate import migrate

TABLE = (
    "create table {} (id bigint generated always as identity primary key, status text not null default 'queued',"
    " note text, worker text, claimed_at timestamptz, run_after timestamptz)"
)
_numbers = itertools.count(1)


async def install(mill: Mill) -> list[dict[str, Any]]:
    """``rowmill migrate --wake --apply``: the statements of the one environment."""
    times = (timedelta(seconds=1), timedelta(seconds=60))
    document = await migrate(mill, None, lambda *_: None, apply=True, detach=False, times=times, wake=True)
    assert not document["errors"], document
    statements: list[dict[str, Any]] = document["environments"][0]["statements"]
    return statements


class Listener:
    """Counts what the trigger notified."""

    def __init__(self, connection: Any) -> None:
        self._words: asyncio.Queue[str] = asyncio.Queue()
        self.connection = connection

    def hear(self, _connection: Any, _pid: int, _channel: str, word: str) -> None:
        self._words.put_nowait(word)

    async def count(self) -> int:
        """Notifications of triggers since the last time; all that were committed before have come by then."""
        mark = f"mark {next(_numbers)}"
        await self.connection.execute("select pg_notify('rowmill', $1)", mark)
        times = 0
        while (word := await asyncio.wait_for(self._words.get(), 60)) != mark:
            times += word == "again"
        return times


@asynccontextmanager
async def listening(db: Db) -> AsyncIterator[Listener]:
    """A listener on a connection of its own."""
    connection = await asyncpg.connect(db.direct)
    listener = Listener(connection)
    try:
        await connection.add_listener("rowmill", listener.hear)
        yield listener
    finally:
        await connection.close()


@asynccontextmanager
async def connected(db: Db) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(db.direct)
    try:
        yield connection
    finally:
        await connection.close()


async def insert_unheard(connection: Any, table: str = "jobs") -> None:
    """Insert a row in the open transaction, so that its trigger leaves the notification out: the tokens are spent."""
    for _ in range(500):
        await connection.execute("savepoint unheard")
        # In one statement: the tokens are spent for twenty milliseconds only.
        await connection.execute(
            "do $$ begin perform setval('rowmill_wake', (extract(epoch from clock_timestamp()) * 1000)::bigint + 4020);"
            f" insert into {table} default values; end $$"
        )
        rows = await connection.fetch(
            "select 1 from pg_locks where locktype = 'advisory' and classid = 1919906669 and objid = 0"
            " and pid = pg_backend_pid()"
        )
        notified = await connection.fetchval("select current_setting('rowmill.notified', true)")
        if rows and notified != "yes":
            return
        await connection.execute("rollback to savepoint unheard")
    raise AssertionError("no insert was left unheard, or it holds no lock")
