"""PostgreSQL with points: before each statement, before each commit, and now and then inside a statement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import asyncpg

from ..store.database import Run
from ..store.postgres_database import Postgres
from .schedules import Actor
from .statement_points import FIRST, StatementLocks, stoppable
from .stepped import CACHED, SteppedDatabase, named

T = TypeVar("T")
#: How often a statement is stopped once more inside.
_INSIDE = 0.3


class SteppedPostgres(SteppedDatabase, Postgres):
    """PostgreSQL, one connection of the actor's own."""

    def __init__(self, url: str, actor: Actor, schema: str | None = None) -> None:
        Postgres.__init__(self, url, pool=1, patience=30.0)
        self.actor, self.schema = actor, schema
        self._own: Any = None
        #: Who can stop a statement between its snapshot and its locks.
        self.doorman: StatementLocks | None = None

    async def connect(self) -> None:
        """Connect, where the last connection is gone."""
        if self._own is None or self._own.is_closed():
            self._own = await connect_postgres(self.dsn)
            if self.doorman is not None:
                await self._own.execute(FIRST)
            self.actor.pid = self._own.get_server_pid()

    async def _rollback(self) -> None:
        if self._own.is_in_transaction():
            await self._own.execute("rollback")
        self._freed()

    async def _run(self, sql: str, parameters: Sequence[Any]) -> Sequence[Any]:
        rows: Sequence[Any] = await self._own.fetch(sql, *parameters)
        return rows

    async def write(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        async def send(sql: str, parameters: Sequence[Any]) -> Sequence[Any]:
            async with self._transaction():
                chance = self.schedule.random.random() if self.schedule is not None else 1.0
                if self.doorman is None or chance > _INSIDE or not stoppable(sql):
                    return await self._run(sql, parameters)
                went_on = f"goes on with {named(sql)}, which it began before"
                rows: Sequence[Any] = await self.doorman.stop(
                    self._own, sql, parameters, lambda: self._point("inside", went_on)
                )
                return rows

        return await self._spawn(verb, "sends", send)

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

    async def drop(self) -> None:
        """Close the connection as a process does that is killed: without a word."""
        self._own.terminate()

    async def close(self) -> None:
        if self._own is not None:
            self._own.terminate()
        await Postgres.close(self)


async def connect_postgres(dsn: str) -> Any:
    """A connection for short transactions on rows that nobody will miss."""
    connection = await asyncpg.connect(dsn, timeout=10, statement_cache_size=CACHED, max_cached_statement_lifetime=0)
    await connection.execute("set synchronous_commit = off")
    return connection
