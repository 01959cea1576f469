"""A point inside a PostgreSQL statement: after it took its snapshot, before it locks anything.

A statement sees the rows as they were when it began, and takes its locks a moment later. The races of a claim happen in
between. Only the server itself can stop a statement there. So the test database has its own ``now()``, which PostgreSQL
resolves before the built-in one. Every claim and sweep calls it. It reports the call, and waits until it may continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

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
