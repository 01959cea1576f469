"""asyncpg as it is, for what is done thousands of times a second: claims, settles, and jobs that come in.

SQLAlchemy's pool and cursor cost more CPU than a small statement itself: measured 280 µs a call against 85 here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

from ..errors import Refused, Unreachable
from .driver_errors import translate, translated
from .unreadable_values import parse_json, tolerate
from .urls import redact

if TYPE_CHECKING:
    from .database import Postgres, Run

T = TypeVar("T")
#: Whatever the database's default. A gate counts what was committed before it had its lock, not before it began, and
#: a row that somebody else has just written to is looked at once more, not refused.
ISOLATION = "read committed"


class SingleStatement(Generic[T]):
    """A verb that is one statement, and what is read from its rows. As any other it can be called with a ``run``; but a
    verb that has to wait between its statements needs a greenlet to do so in, and that costs 60 µs.
    """

    __slots__ = ("parameters", "read", "sql")

    def __init__(self, sql: str, parameters: tuple[Any, ...], read: Callable[[Any], T]) -> None:
        self.sql, self.parameters, self.read = sql, parameters, read

    def __call__(self, run: Run) -> T:
        return self.read(run(self.sql, self.parameters))


def rows_of(sql: str, parameters: tuple[Any, ...] = ()) -> SingleStatement[Sequence[Any]]:
    """A statement and its rows as they come."""
    return SingleStatement(sql, parameters, lambda rows: rows)


class AsyncpgPool:
    """A few connections of one event loop's own. One that raised anything but a refusal is thrown away.

    ``parsed``: JSON comes as what it says. ``patience``: what a statement may take, and the wait for a connection.
    ``tolerant``: values that Python cannot hold come as Unreadable.
    """

    def __init__(
        self,
        database: Postgres,
        most: int = 3,
        patience: float = 30.0,
        *,
        parsed: bool = False,
        tolerant: bool = False,
    ) -> None:
        self._database, self._patience, self._parsed, self._tolerant = database, patience, parsed, tolerant
        self._idle: list[Any] = []
        self._free = asyncio.Semaphore(most)
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A connection that is not in a transaction; behind a pooler it is in one, so that what belongs together
        reaches the same server.
        """
        with translated(self._database):
            connection = await self._lend()
            try:
                if self._database.pooled:
                    async with connection.transaction(isolation=ISOLATION.replace(" ", "_")):
                        yield connection
                else:
                    yield connection
            except BaseException as error:
                self._put_away(connection, error)
                raise
            self._put_back(connection)

    async def fetch(self, sql: str, parameters: Sequence[Any]) -> Any:
        """The rows of one statement by itself."""
        if self._database.pooled:
            async with self.connection() as connection:
                return await connection.fetch(sql, *parameters)
        with translated(self._database):
            connection = await self._lend()
            try:
                rows = await connection.fetch(sql, *parameters)
            except BaseException as error:
                self._put_away(connection, error)
                raise
            self._put_back(connection)
            return rows

    async def _lend(self) -> Any:
        await self._wait()
        try:
            return await self._open()
        except BaseException:
            self._free.release()
            raise

    async def _wait(self) -> None:
        if not self._free.locked():
            await self._free.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise Unreachable(f"no connection to {redact(self._database.url)} came free") from None

    def _put_away(self, connection: Any, error: BaseException) -> None:
        """Whatever was not a plain refusal leaves the connection in a state nobody knows."""
        known = translate(error, self._database)
        if isinstance(known, Refused):
            self._put_back(connection)
            return
        self._free.release()
        connection.terminate()
        if isinstance(known, Unreachable):  # the others went with it
            while self._idle:
                self._idle.pop().terminate()

    def _put_back(self, connection: Any) -> None:
        self._free.release()
        if self._closed:
            connection.terminate()  # nobody comes for it any more
        else:
            self._idle.append(connection)

    async def run(self, verb: Callable[[Run], T], *, together: bool = False) -> T:
        """A verb over ``run(sql, parameters)``, on one connection; ``together``: in one transaction."""
        if isinstance(verb, SingleStatement):
            one: SingleStatement[T] = verb
            return one.read(await self.fetch(one.sql, one.parameters))
        async with self.connection() as connection:

            def run(sql: str, parameters: Any = ()) -> Any:
                return await_only(connection.fetch(sql, *parameters))

            if not together or self._database.pooled:
                return await greenlet_spawn(verb, run)
            async with connection.transaction():
                return await greenlet_spawn(verb, run)

    async def _open(self) -> Any:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        connection = await self._database.raw_connection(self._patience)
        try:
            if self._parsed:
                await _parse(connection)
            if self._tolerant:
                await tolerate(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def close(self) -> None:
        """Close those that nobody uses; the others when they come back."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close(timeout=5)


async def _parse(connection: Any) -> None:
    """JSON as what it says, as through SQLAlchemy."""
    for name, skip in (("json", 0), ("jsonb", 1)):  # a jsonb begins with the number of its version
        await connection.set_type_codec(
            name,
            schema="pg_catalog",
            format="binary",
            encoder=lambda text, skip=skip: b"\x01" * skip + text.encode(),
            decoder=lambda value, skip=skip: parse_json(value[skip:].decode()),
        )
