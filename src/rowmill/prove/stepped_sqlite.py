"""SQLite with points: a connection that wants to write while another one writes waits for its commit."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

from ..store.database import Database, Run
from ..store.sqlite_database import Sqlite
from .schedules import Actor
from .stepped import CACHED, SteppedDatabase

T = TypeVar("T")


class SteppedSqlite(SteppedDatabase, Sqlite):
    """One SQLite file, with a connection for one actor. Writers take turns."""

    #: The last millisecond that any actor's statement may have read.
    _read_at: ClassVar[int] = 0

    def __init__(self, url: str, actor: Actor, schema: str | None = None) -> None:
        Sqlite.__init__(self, url)
        self.actor = actor
        self._own: sqlite3.Connection | None = None

    async def connect(self) -> None:
        """Connect, if the last connection is gone."""
        if self._own is None:
            self._own = connect_sqlite(self.path)

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._own is not None
        return self._own

    async def _rollback(self) -> None:
        if self._open.in_transaction:
            self._open.execute("rollback")
        self._freed()

    async def read_within(self, verb: Callable[[Run], T], seconds: float) -> T:
        return await self.read(verb)

    async def write(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        return await self.transact(verb)

    async def _run(self, sql: str, parameters: Any) -> Sequence[Any]:
        self._tick()
        try:
            return self._open.execute(sql, parameters).fetchall()
        finally:
            SteppedSqlite._read_at = _millisecond()

    def _tick(self) -> None:
        """Wait until the millisecond of the last statement is over.

        SQLite's times have no finer resolution. Otherwise the machine's speed would decide which rows share a time, and
        so their order, and a seed would not repeat its schedule.
        """
        while _millisecond() == self._read_at:
            time.sleep(0.0001)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        await self._begin()
        try:
            yield
            happens = await self._point("commit", "commits")
            self._open.execute("commit")
        except BaseException:
            await self._rollback()
            raise
        await self._committed(happens)

    async def _begin(self) -> None:
        await self._point("send", "begins to write")
        while True:
            try:
                self._open.execute("begin immediate")
            except sqlite3.OperationalError as error:
                if self.schedule is None or "locked" not in str(error):
                    raise
                self.schedule.waits += 1
                await self._point("locked", "begins to write, after a wait")
                continue
            if self.schedule is not None:
                self.schedule.writer = self.actor
            self.actor.fresh = True  # the next statement belongs to the same step
            return

    async def drop(self) -> None:
        """Close the connection; uncommitted changes are lost."""
        if self._own is not None:
            self._own.close()
            self._own = None

    async def close(self) -> None:
        await self.drop()
        await Sqlite.close(self)


def _millisecond() -> int:
    return time.time_ns() // 1_000_000


def connect_sqlite(path: str) -> sqlite3.Connection:
    """The same for SQLite: raises at once if another connection writes."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=0, cached_statements=CACHED)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = off")
    return connection


class SqliteMonitor:
    """Observes a schedule from outside its workers: reads rows."""

    #: No statement waits for a lock on SQLite.
    blocked = None

    async def open(self, database: Database) -> None:
        assert database.file is not None
        self._own = connect_sqlite(database.file.path)

    def worker_database(self, url: str, actor: Actor, schema: str | None) -> SteppedSqlite:
        """The database as one worker uses it."""
        return SteppedSqlite(url, actor, schema)

    async def run(self, sql: str) -> Sequence[Any]:
        return self._own.execute(sql).fetchall()

    async def write(self, sql: str) -> None:
        """Run several statements in one transaction."""
        self._own.executescript(f"begin immediate; {sql}; commit")

    async def vacuum(self, table: str) -> None:
        """Do nothing: SQLite reuses deleted space."""

    def close(self) -> None:
        self._own.close()
