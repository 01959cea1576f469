"""A database whose every statement and every commit waits for its turn. The verbs above it are the engine's own.

What the engine sends outside a transaction is a transaction all the same, and others may come between its statement
and its commit: so it is sent as one here, with a point before the commit.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import asyncpg
from sqlalchemy.util import await_only, greenlet_spawn

from ..store.database import Postgres, Run, Sqlite
from ..store.translate import translated
from .points import CUT, DIE, UNHEARD, Actor, Died, Schedule

T = TypeVar("T")
Seen = Callable[[Actor], Awaitable[None]]
_CACHED = 2000


class _Lost(ConnectionError):
    """The connection is gone."""


class _Stepped:
    """What both databases share: the points."""

    actor: Actor
    schedule: Schedule | None = None
    #: Told after every commit, and before anybody else goes on.
    seen: Seen | None = None

    async def _point(self, where: str, what: str) -> str:
        if self.schedule is None:
            return ""
        happens = await self.schedule.point(self.actor, where, what)
        if happens in (DIE, CUT) or (happens == UNHEARD and where != "commit"):
            await self._rollback()
            raise Died if happens == DIE else _Lost("the connection is gone")
        return happens

    def _freed(self) -> None:
        """The transaction has ended, and its locks with it."""
        if self.schedule is not None:
            self.schedule.freed = True
            if self.schedule.writer is self.actor:
                self.schedule.writer = None

    async def _committed(self, happens: str) -> None:
        self._freed()
        if self.seen is not None:
            await self.seen(self.actor)
        if happens == UNHEARD:
            raise _Lost("the connection is gone")

    async def _rollback(self) -> None:
        raise NotImplementedError


class SteppedPostgres(_Stepped, Postgres):
    """PostgreSQL, one connection of the actor's own."""

    def __init__(self, url: str, actor: Actor, schema: str | None = None) -> None:
        Postgres.__init__(self, url, pool=1, patience=30.0)
        self.actor, self.schema = actor, schema
        self._own: Any = None

    async def connect(self) -> None:
        """Connect, where the last connection is gone."""
        if self._own is None or self._own.is_closed():
            self._own = await connect_postgres(self.dsn)
            self.actor.pid = self._own.get_server_pid()

    async def _rollback(self) -> None:
        if self._own.is_in_transaction():
            await self._own.execute("rollback")
        self._freed()

    async def _run(self, sql: str, parameters: Sequence[Any]) -> Sequence[Any]:
        rows: Sequence[Any] = await self._own.fetch(sql, *parameters)
        return rows

    async def read(self, verb: Callable[[Run], T]) -> T:
        async def run(sql: str, parameters: Sequence[Any]) -> Sequence[Any]:
            await self._point("send", f"reads {named(sql)}")
            return await self._run(sql, parameters)

        return await self._spawn(verb, run)

    async def write(self, verb: Callable[[Run], T]) -> T:
        async def run(sql: str, parameters: Sequence[Any]) -> Sequence[Any]:
            await self._point("send", f"sends {named(sql)}")
            async with self._transaction():
                return await self._run(sql, parameters)

        return await self._spawn(verb, run)

    async def transact(self, verb: Callable[[Run], T]) -> T:
        async def run(sql: str, parameters: Sequence[Any]) -> Sequence[Any]:
            await self._point("send", f"sends {named(sql)}")
            return await self._run(sql, parameters)

        with translated(self):
            async with self._transaction():
                return await self._spawn(verb, run)

    async def _spawn(self, verb: Callable[[Run], T], step: Callable[..., Coroutine[Any, Any, Sequence[Any]]]) -> T:
        with translated(self):
            return await greenlet_spawn(verb, lambda sql, parameters=(): await_only(step(sql, parameters)))

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        await self._own.execute("begin")
        try:
            yield
            happens = await self._point("commit", "commits")
            await self._own.execute("commit")
        except BaseException:
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._rollback()
            raise
        await self._committed(happens)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        with translated(self):
            async with self._transaction():
                yield _Connection(self)

    async def drop(self) -> None:
        """Close the connection as a process does that is killed: without a word."""
        self._own.terminate()

    async def close(self) -> None:
        if self._own is not None:
            self._own.terminate()
        await Postgres.close(self)


class _Connection:
    """As much of SQLAlchemy's connection as the engine's own statements ask for."""

    def __init__(self, database: SteppedPostgres | SteppedSqlite) -> None:
        self._database = database

    async def run_sync(self, work: Callable[[Any], T]) -> T:
        return await greenlet_spawn(work, self)

    def exec_driver_sql(self, sql: str, parameters: Sequence[Any] = ()) -> _Rows:
        return _Rows(await_only(self._send(sql, parameters)))

    async def _send(self, sql: str, parameters: Sequence[Any]) -> Sequence[Any]:
        await self._database._point("send", f"sends {named(sql)}")
        return await self._database._run(sql, parameters)


class _Rows:
    returns_rows = True

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def fetchall(self) -> Sequence[Any]:
        return self._rows


class SteppedSqlite(_Stepped, Sqlite):
    """One SQLite file, a connection of the actor's own. Who wants to write while another does waits for his turn."""

    def __init__(self, url: str, actor: Actor, schema: str | None = None) -> None:
        Sqlite.__init__(self, url)
        self.actor = actor
        self._own: sqlite3.Connection | None = None

    async def connect(self) -> None:
        """Connect, where the last connection is gone."""
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

    async def read(self, verb: Callable[[Run], T]) -> T:
        async def run(sql: str, parameters: Any) -> Sequence[Any]:
            await self._point("send", f"reads {named(sql)}")
            return self._open.execute(sql, parameters).fetchall()

        return await self._spawn(verb, run)

    async def read_within(self, verb: Callable[[Run], T], seconds: float) -> T:
        return await self.read(verb)

    async def write(self, verb: Callable[[Run], T]) -> T:
        async def run(sql: str, parameters: Any) -> Sequence[Any]:
            await self._point("send", f"sends {named(sql)}")
            return self._open.execute(sql, parameters).fetchall()

        with translated(self):
            async with self._transaction():
                return await self._spawn(verb, run)

    async def _run(self, sql: str, parameters: Any) -> Sequence[Any]:
        return self._open.execute(sql, parameters).fetchall()

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

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        with translated(self):
            async with self._transaction():
                yield _Connection(self)

    async def _begin(self) -> None:
        await self._point("send", "begins to write")
        while True:
            try:
                self._open.execute("begin immediate")
            except sqlite3.OperationalError as error:
                if self.schedule is None or "locked" not in str(error):
                    raise
                self.schedule.waits += 1
                await self._point("locked", "begins to write, at last")
                continue
            if self.schedule is not None:
                self.schedule.writer = self.actor
            self.actor.fresh = True  # what comes next is sent in the same breath
            return

    async def _spawn(self, verb: Callable[[Run], T], step: Callable[..., Coroutine[Any, Any, Sequence[Any]]]) -> T:
        with translated(self):
            return await greenlet_spawn(verb, lambda sql, parameters=(): await_only(step(sql, parameters)))

    async def drop(self) -> None:
        """Close the connection; what was not committed is gone."""
        if self._own is not None:
            self._own.close()
            self._own = None

    async def close(self) -> None:
        await self.drop()
        await Sqlite.close(self)


async def connect_postgres(dsn: str) -> Any:
    """A connection for short transactions on rows that nobody will miss."""
    connection = await asyncpg.connect(dsn, timeout=10, statement_cache_size=_CACHED, max_cached_statement_lifetime=0)
    await connection.execute("set synchronous_commit = off")
    return connection


def connect_sqlite(path: str) -> sqlite3.Connection:
    """The same on SQLite: says at once when another one writes."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=0, cached_statements=_CACHED)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = off")
    return connection


def named(sql: str) -> str:
    """A statement in a word or two, for the list of steps."""
    words = sql.split()
    head = words[0].lower() if words else ""
    if head == "with":
        told = "update" if "update" in words else "select"
        return f"{told} with {words[2] if words[1] == 'recursive' else words[1]}"
    return f"{head} {words[1]}" if head in ("update", "insert", "delete") and len(words) > 1 else head
