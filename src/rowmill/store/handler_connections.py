"""Connections for handlers' own transactions: SQLAlchemy's, which is what people write their statements for."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import aiosqlite
from aiosqlite.core import _STOP_RUNNING_SENTINEL, set_exception, set_result
from sqlalchemy import QueuePool
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncTransaction
from sqlalchemy.util import greenlet_spawn

from .connection_limit import ConnectionLimit
from .driver_errors import from_standby, translated

if TYPE_CHECKING:
    from .database import Database

T = TypeVar("T")
#: How the pool is made: a few connections for finish blocks, however many slots; the others wait.
POOL: dict[str, Any] = {"pool_size": 4, "max_overflow": 0, "pool_timeout": 300.0}


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await something to its end, also where the waiting task is cancelled meanwhile; the cancellation comes after.

    A SQLite connection that is dropped between a statement and its last row keeps the file's write lock for good.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen
        raise


class HandlerConnections:
    """A pool of them, for one database."""

    def __init__(self, database: Database, engine: AsyncEngine, limit: ConnectionLimit | None = None) -> None:
        self._database, self._engine, self._limit = database, engine, limit
        #: Connections that come for somebody who has stopped waiting, and go back by themselves.
        self._late: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Begin, and commit or roll back. What the block itself raises is its own affair and passes as it is."""
        if self._limit is not None:
            self._limit.used(self)
        with translated(self._database):
            connection = await self._connected()
        try:
            with translated(self._database):
                transaction = await shielded(_begun(connection))
            try:
                yield connection
            except BaseException as error:
                await shielded(transaction.rollback())
                if from_standby(error):  # the server is the primary no more: the next connection finds the new one
                    await shielded(connection.invalidate())
                raise
            with translated(self._database):
                await shielded(transaction.commit())
        finally:
            await shielded(connection.close())
            if self._limit is not None and self._limit.contended:
                self._limit.close_soon(self)

    @property
    def has_idle(self) -> bool:
        """Whether there is a connection that nobody uses."""
        pool = self._engine.pool
        return isinstance(pool, QueuePool) and pool.checkedin() > 0

    async def close_one(self) -> None:
        """Close those that nobody uses."""
        if self.has_idle:
            # Not the engine's dispose: that makes a new pool, and the connections in use would go back to the old one.
            await greenlet_spawn(self._engine.pool.dispose)

    def lend(self, kind: object) -> Any:
        """Handlers' connections are never lent: SQLAlchemy knows what it has prepared in each."""
        return None

    async def _connected(self) -> AsyncConnection:
        """A connection from the pool. Who stops waiting for it leaves at once."""

        async def connect() -> AsyncConnection:
            return await self._engine.connect()

        task = asyncio.ensure_future(connect())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            late = asyncio.ensure_future(_given_back(task))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            raise

    async def close(self) -> None:
        """Close them all, also those that are still on their way: a driver's thread would find its loop closed."""
        if self._limit is not None:
            self._limit.forget(self)
        if self._late:
            await asyncio.wait(self._late)
        await self._engine.dispose()


async def _begun(connection: AsyncConnection) -> AsyncTransaction:
    return await connection.begin()


async def _given_back(task: asyncio.Task[AsyncConnection]) -> None:
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None:
        await task.result().close()


class SqliteHandlerConnection(aiosqlite.Connection):
    """A SQLite connection whose thread survives the loop that asked it: at the end of a command, or of a test, the loop
    may be closed while a statement is under way, and the driver's own thread would end with a traceback. (Of the driver
    it takes more than it shows: hence its narrow range in pyproject.toml.)
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connect, 64)
        self._thread = threading.Thread(target=_serve, args=(self._tx,), daemon=True, name="rowmill-sqlite-handlers")


def _serve(asked: Any) -> None:
    """Do what is asked, until it is to stop; whether or not anybody still waits for the answer."""
    result: Any = None
    while result is not _STOP_RUNNING_SENTINEL:
        future, function = asked.get()
        answer: Any = set_result
        try:
            result = function()
        except BaseException as error:
            result, answer = error, set_exception
        if future is not None:
            with suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(answer, future, result)
