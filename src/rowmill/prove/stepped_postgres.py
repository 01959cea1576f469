"""PostgreSQL with points: before each statement, before each commit, and sometimes inside a statement.

A statement sees the rows as they were when it began, and takes its locks a moment later. The races of a claim happen in
between. Only the server itself can stop a statement there. So the test database has its own ``now()``, which PostgreSQL
resolves before the built-in one. Every claim and sweep calls it. It reports the call, and waits until it may continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import asyncpg

from ..store.database import Database, Run
from ..store.postgres_database import Postgres
from .schedules import Actor
from .stepped import CACHED, SteppedDatabase, named

T = TypeVar("T")
#: The share of statements that are also stopped inside.
_INSIDE = 0.3


class SteppedPostgres(SteppedDatabase, Postgres):
    """PostgreSQL, with a connection for one actor."""

    def __init__(self, url: str, actor: Actor, schema: str | None = None) -> None:
        Postgres.__init__(self, url, pool=1, patience=30.0)
        self.actor, self.schema = actor, schema
        self._own: Any = None
        #: Stops a statement between its snapshot and its locks.
        self.statement_locks: StatementLocks | None = None

    async def connect(self) -> None:
        """Connect, if the last connection is gone."""
        if self._own is None or self._own.is_closed():
            self._own = await connect_postgres(self.dsn)
            if self.statement_locks is not None:
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
                if self.statement_locks is None or chance > _INSIDE or not stoppable(sql):
                    return await self._run(sql, parameters)
                went_on = f"continues {named(sql)}"
                rows: Sequence[Any] = await self.statement_locks.stop(
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
        """Close the connection as a killed process does: the server gets no goodbye."""
        self._own.terminate()

    async def close(self) -> None:
        if self._own is not None:
            self._own.terminate()
        await Postgres.close(self)


async def connect_postgres(dsn: str) -> Any:
    """Open a connection for short transactions on disposable rows."""
    connection = await asyncpg.connect(dsn, timeout=10, statement_cache_size=CACHED, max_cached_statement_lifetime=0)
    await connection.execute("set synchronous_commit = off")
    return connection


class PostgresMonitor:
    """Observes a schedule from outside its workers: reads rows, and reports which process waits for which."""

    _own: Any
    _statement_locks: StatementLocks

    async def open(self, database: Database) -> None:
        """Connect, and prepare to stop statements inside."""
        self._own, self._lock_holder = await connect_postgres(database.dsn), await connect_postgres(database.dsn)
        await self._own.execute(INSTALL)
        self._statement_locks = StatementLocks(self._lock_holder)

    def worker_database(self, url: str, actor: Actor, schema: str | None) -> SteppedPostgres:
        """The database as one worker uses it."""
        database = SteppedPostgres(url, actor, schema)
        database.statement_locks = self._statement_locks
        return database

    async def run(self, sql: str) -> Sequence[Any]:
        rows: Sequence[Any] = await self._own.fetch(sql)
        return rows

    async def write(self, sql: str) -> None:
        """Run several statements in one transaction."""
        await self._own.execute(sql)

    async def vacuum(self, table: str) -> None:
        """Remove dead rows."""
        await self._own.execute(f"vacuum {table}")

    async def blocked(self, pids: Sequence[int]) -> set[int]:
        """Which of these processes wait for a lock that another process holds."""
        rows = await self._statement_locks.ask(
            # A process that waits for one of these locks is at a point, and waits for no other process.
            "select p from unnest($1::int[]) p"
            " where cardinality(array_remove(pg_blocking_pids(p), pg_backend_pid())) > 0",
            pids,
        )
        return {row[0] for row in rows}

    def close(self) -> None:
        self._own.terminate()
        self._lock_holder.terminate()


_CLASS = 7_077_201  # of the advisory locks: any number that nothing else uses
INSTALL = f"""create schema if not exists rowmill_points;
create or replace function rowmill_points.now() returns timestamptz language plpgsql volatile as $$
begin
  if current_setting('rowmill_points.stop', true) = '1' then
    perform set_config('rowmill_points.stop', '0', false);
    raise notice 'rowmill_points';
    perform pg_advisory_lock_shared({_CLASS}, pg_backend_pid());
    perform pg_advisory_unlock_shared({_CLASS}, pg_backend_pid());
  end if;
  return pg_catalog.now();
end $$"""
FIRST = "select set_config('search_path', 'rowmill_points, pg_catalog, ' || current_setting('search_path'), false)"


def stoppable(sql: str) -> bool:
    """Whether a statement locks rows and calls ``now()`` before it does."""
    return "skip locked" in sql and "now()" in sql.partition("skip locked")[0]


class StatementLocks:
    """Holds the locks that statements wait for."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._one = connection, asyncio.Lock()

    async def ask(self, sql: str, *parameters: Any) -> Sequence[Any]:
        """Run a statement on the connection that holds the locks, one at a time."""
        async with self._one:
            rows: Sequence[Any] = await self._connection.fetch(sql, *parameters)
            return rows

    async def stop(
        self, connection: Any, sql: str, parameters: Sequence[Any], turn: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Run a statement that also waits for a turn where it calls ``now()``."""
        pid, asked = connection.get_server_pid(), asyncio.get_running_loop().create_future()

        def hear(_: Any, message: Any) -> None:
            if message.message == "rowmill_points" and not asked.done():
                asked.set_result(None)

        await self.ask(f"select pg_advisory_lock({_CLASS}, {pid})")
        held = True
        connection.add_log_listener(hear)
        sent: asyncio.Future[Any] | None = None
        try:
            await connection.execute("set rowmill_points.stop = '1'")
            sent = asyncio.ensure_future(connection.fetch(sql, *parameters))
            await asyncio.wait({sent, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not sent.done():
                await turn()
            held = False
            await self.ask(f"select pg_advisory_unlock({_CLASS}, {pid})")
            rows = await sent
            if not asked.done():
                await connection.execute("set rowmill_points.stop = '0'")
            return rows
        finally:
            if held:
                await self.ask(f"select pg_advisory_unlock({_CLASS}, {pid})")
            if sent is not None and not sent.done():
                sent.cancel()
            connection.remove_log_listener(hear)
