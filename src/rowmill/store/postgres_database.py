"""PostgreSQL: its connections, and the pool for what is done thousands of times a second.

Claims, settles and jobs that come in run on asyncpg as it is. SQLAlchemy's pool and cursor cost more CPU than a small
statement itself: measured 280 µs a call against 85 here.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import asyncpg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import asyncpg as sqlalchemy_asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only, greenlet_spawn

from ..errors import Refused, Unreachable, UnreadableReply
from .connection_limit import ConnectionLimit
from .database import Database, Run, runner
from .dialect import POSTGRES
from .driver_errors import translate, translated
from .handler_connections import POOL, HandlerConnections
from .unreadable_values import parse_json, tolerate
from .urls import postgres_url, redact, search_path, unreadable

T = TypeVar("T")
#: Whatever the database's default. A gate counts what was committed before it had its lock, not before it began, and
#: a row that somebody else has just written to is looked at once more, not refused.
ISOLATION = "read committed"

_SMALLER = 10.0  # seconds for which a pool that got no further connection does with those it has


class SingleStatement(Generic[T]):
    """A verb that is one statement, and what is read from its rows. As any other it can be called with a ``run``; but a
    verb that has to wait between its statements needs a greenlet to do so in, and that costs 60 µs.
    """

    __slots__ = ("parameters", "read", "sql")

    def __init__(self, sql: str, parameters: tuple[Any, ...], read: Callable[[Any], T]) -> None:
        self.sql, self.parameters, self.read = sql, parameters, read

    def __call__(self, run: Run) -> T:
        return self.read(run(self.sql, self.parameters))


class Together(Generic[T]):
    """A verb of several statements that are written in one transaction, or not at all."""

    __slots__ = ("verb",)

    def __init__(self, verb: Callable[[Run], T]) -> None:
        self.verb = verb

    def __call__(self, run: Run) -> T:
        return self.verb(run)


def rows_of(sql: str, parameters: tuple[Any, ...] = ()) -> SingleStatement[Sequence[Any]]:
    """A statement and its rows as they come."""
    return SingleStatement(sql, parameters, lambda rows: rows)


class Postgres(Database):
    """PostgreSQL through SQLAlchemy's async engine on asyncpg."""

    sql = POSTGRES

    def __init__(self, url: str, *, pool: int, patience: float) -> None:
        super().__init__(url)
        self.dialect = sqlalchemy_asyncpg.dialect()  # type: ignore[no-untyped-call]
        self.dsn, self.pooled = postgres_url(url)
        #: Where it is, and the schemas that unqualified names lead to there. Without the latter there is no telling to
        #: what a connection must be set back, so it is lent to nobody.
        self.place, self.search_path = search_path(self.dsn)
        self.patience = patience
        self._pool = pool
        self._direct: AsyncpgPool | None = None
        self._tolerant: AsyncpgPool | None = None
        self._handlers: HandlerConnections | None = None
        #: The last attempt to connect went well.
        self._proven = False
        # Kept: an engine asks the server for its version first, and remembers the queries that it has compiled.
        self._reflection: AsyncEngine | None = None

    def _make(self, command_timeout: float | None, share: str = "engine", **options: Any) -> AsyncEngine:
        # Behind a transaction pooler a statement must not outlive its round trip: unnamed, and never cached.
        adapted: dict[str, Any] = (
            {"prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: ""} if self.pooled else {}
        )

        async def connect(**_: Any) -> asyncpg.Connection:
            return await self.raw_connection(command_timeout, self._limit(share))

        # Not async_creator: with that, SQLAlchemy drops what its own adapter has to know about the pooler.
        dbapi = self.dialect.import_dbapi()
        return create_async_engine(
            "postgresql+asyncpg://",
            creator=lambda: dbapi.connect(async_creator_fn=connect, **adapted),
            **options,
        )

    def _limit(self, share: str) -> ConnectionLimit | None:
        return None if self.shares is None else getattr(self.shares, share)

    async def raw_connection(
        self, command_timeout: float | None = None, limit: ConnectionLimit | None = None
    ) -> asyncpg.Connection:
        """A connection as the driver makes it; with a ``limit``, once there is a place for it."""
        if limit is None:
            return await self._connect(command_timeout)
        # A finish block may wait for others as long as for its pool; the engine's own statements are short.
        patience = self.patience if command_timeout is not None else float(POOL["pool_timeout"])
        async with limit.place(self._proven, patience):
            self._proven = False
            connection = await self._connect(command_timeout)
            self._proven = True
            connection.add_termination_listener(lambda _: limit.give_back())
        return connection

    async def _connect(self, command_timeout: float | None) -> asyncpg.Connection:
        # Behind a transaction pooler a statement must not outlive its transaction: unnamed, and never cached. Nor can
        # a session be told its isolation there: transactions say it themselves.
        options: dict[str, Any] = (
            {"statement_cache_size": 0}
            if self.pooled
            else {"max_cacheable_statement_size": 0, "server_settings": {"default_transaction_isolation": ISOLATION}}
        )
        try:
            connection = await asyncpg.connect(self.dsn, timeout=10, command_timeout=command_timeout, **options)
        except ValueError:  # the URL itself cannot be read; the driver's words repeat parts of it
            raise unreadable(self.url) from None
        self.encoding = _codec(getattr(connection.get_settings(), "server_encoding", "UTF8"))
        return connection

    @property
    def direct(self) -> AsyncpgPool:
        """Connections for what is done thousands of times a second."""
        if self._direct is None:
            # A statement of the engine's own that takes longer than this is a lost connection, not a slow one.
            self._direct = AsyncpgPool(self, self._pool, self.patience, parsed=True, limit=self._limit("engine"))
        return self._direct

    @property
    def tolerant(self) -> AsyncpgPool:
        """Connections for replies with values that Python cannot hold."""
        if self._tolerant is None:
            self._tolerant = AsyncpgPool(
                self, self._pool, self.patience, parsed=True, tolerant=True, limit=self._limit("engine")
            )
        return self._tolerant

    async def read(self, verb: Callable[[Run], T]) -> T:
        try:
            return await self.direct.run(verb)
        except UnreadableReply:
            return await self.tolerant.run(verb)

    async def read_within(self, verb: Callable[[Run], T], seconds: float) -> T:
        def limited(run: Run) -> T:
            run(f"set local statement_timeout = {max(int(seconds * 1000), 1)}", ())
            return verb(run)

        # Not one of the engine's own connections: what is asked may take its time.
        try:
            async with self.begin() as connection:
                with translated(self):
                    return await connection.run_sync(lambda c: limited(runner(c)))
        except UnreadableReply:
            return await self.tolerant.run(limited, together=True)

    async def write(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        return await (self.tolerant if tolerant else self.direct).run(verb)

    async def transact(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        return await (self.tolerant if tolerant else self.direct).run(verb, together=True)

    def client_pool(self) -> AsyncpgPool:
        return AsyncpgPool(self)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        if self._handlers is None:
            engine = self._make(None, "handlers", isolation_level=ISOLATION.upper(), **POOL)
            self._handlers = HandlerConnections(self, engine, self._limit("handlers"))
        async with self._handlers.begin() as connection:
            yield connection

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncConnection]:
        engine = self._make(None, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with translated(self):
            connection = await engine.connect()
        try:
            yield connection
        finally:
            await connection.close()

    async def reflect(self, verb: Callable[[sa.Connection], T]) -> T:
        if self._reflection is None:
            self._reflection = self._make(self.patience, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with translated(self):
            async with self._reflection.connect() as connection:
                return await connection.run_sync(verb)

    async def read_only(self, verb: Callable[[sa.Connection], T], seconds: int = 8) -> T:
        def work(connection: sa.Connection) -> T:
            run = runner(connection)
            for text in ("set transaction read only", *self.sql.time_limits(seconds, 2)):
                run(text, ())
            return verb(connection)

        async with self.begin() as connection:
            with translated(self):
                return await connection.run_sync(work)

    async def ask_limit(self) -> None:
        if self.max_connections is None and not self.pooled:  # behind a pooler its own limit counts
            text = "select current_setting('max_connections')::int"
            self.max_connections = (await self.direct.fetch(text, ()))[0][0]

    def release_idle(self) -> None:
        for direct in (self._direct, self._tolerant):
            if direct is not None:
                direct.release_idle()

    @property
    def needs(self) -> int:
        heartbeat, listens = 1, 0 if self.pooled else 1
        return self._pool + heartbeat + listens + int(POOL["pool_size"])

    async def rest(self) -> None:
        for direct in (self._direct, self._tolerant):
            while direct is not None and direct.has_idle:
                await direct.close_one()
        if self._handlers is not None:
            await self._handlers.close_one()

    async def close(self) -> None:
        for direct in (self._direct, self._tolerant):
            if direct is not None:
                await direct.close()
        if self._handlers is not None:
            await self._handlers.close()


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
        limit: ConnectionLimit | None = None,
    ) -> None:
        self._limit = limit
        #: Connections of pools of the same kind differ in nothing but the schema that unqualified names lead to.
        self._kind = (database.place, parsed, tolerant, patience)
        self._database, self._patience, self._parsed, self._tolerant = database, patience, parsed, tolerant
        self._idle: list[Any] = []
        self._free = asyncio.Semaphore(most)
        self._lent = 0
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A connection that is not in a transaction; behind a pooler it is in one, so that what belongs together
        reaches the same server.
        """
        connection = None
        try:
            connection = await self._lend()
            if self._database.pooled:
                async with connection.transaction(isolation=ISOLATION.replace(" ", "_")):
                    yield connection
            else:
                yield connection
        except BaseException as error:
            self._failed(connection, error)
            raise
        self._put_back(connection)

    async def fetch(self, sql: str, parameters: Sequence[Any]) -> Any:
        """The rows of one statement by itself."""
        if self._database.pooled:
            async with self.connection() as connection:
                return await connection.fetch(sql, *parameters)
        connection = None
        try:
            connection = await self._lend()
            rows = await connection.fetch(sql, *parameters)
        except BaseException as error:
            self._failed(connection, error)
            raise
        self._put_back(connection)
        return rows

    async def _lend(self) -> Any:
        await self._wait()
        try:
            connection = await self._open()
        except asyncpg.TooManyConnectionsError:
            if not self._lent:
                self._free.release()
                raise
            # Make do with the connections that there are: this pool is smaller for a while.
            asyncio.get_running_loop().call_later(_SMALLER, self._free.release)
            return await self._lend()
        except BaseException:
            self._free.release()
            raise
        self._lent += 1
        return connection

    async def _wait(self) -> None:
        if not self._free.locked():
            await self._free.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise Unreachable(f"no connection to {redact(self._database.url)} became free in time") from None

    def _failed(self, connection: Any, error: BaseException) -> None:
        """Raise what a driver's error means. What was no plain refusal leaves the connection in an unknown state."""
        known = translate(error, self._database)
        if connection is not None and isinstance(known, Refused):
            self._put_back(connection)
        elif connection is not None:
            self._lent -= 1
            self._free.release()
            connection.terminate()
            if isinstance(known, Unreachable):
                self.release_idle()  # the others went with it
        if known is not None and known is not error:
            raise known from error

    def release_idle(self) -> None:
        """Close those that nobody uses now."""
        while self._idle:
            self._idle.pop().terminate()

    def _put_back(self, connection: Any) -> None:
        self._lent -= 1
        self._free.release()
        if self._closed:
            connection.terminate()  # nobody comes for it any more
            return
        self._idle.append(connection)
        if self._limit is not None and self._limit.contended:
            self._limit.close_soon(self)

    @property
    def has_idle(self) -> bool:
        """Whether there is a connection that nobody uses."""
        return bool(self._idle)

    def lend(self, kind: object) -> Any:
        """One that nobody uses, for a pool of this kind."""
        if kind != self._kind or self._database.pooled:
            return None
        while self._idle:
            connection = self._idle.pop(0)
            if not connection.is_closed():
                return connection
        return None

    async def close_one(self) -> None:
        """Close one that nobody uses. It is gone from the server, too, when this returns."""
        if self._idle:
            connection = self._idle.pop(0)
            try:
                await connection.close(timeout=5)
            except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()

    async def run(self, verb: Callable[[Run], T], *, together: bool = False) -> T:
        """A verb over ``run(sql, parameters)``, on one connection; ``together``: in one transaction."""
        if isinstance(verb, SingleStatement):
            one: SingleStatement[T] = verb
            return one.read(await self.fetch(one.sql, one.parameters))
        async with self.connection() as connection:

            def run(sql: str, parameters: Any = ()) -> Any:
                return await_only(connection.fetch(sql, *parameters))

            if not (together or isinstance(verb, Together)) or self._database.pooled:
                return await greenlet_spawn(verb, run)
            async with connection.transaction():
                return await greenlet_spawn(verb, run)

    async def _open(self) -> Any:
        if self._limit is not None:
            self._limit.used(self)
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        if self._limit is not None and (connection := self._limit.borrow(self, self._kind)) is not None:
            try:
                await connection.execute("select set_config('search_path', $1, false)", self._database.search_path)
            except BaseException:
                connection.terminate()
                raise
            return connection
        connection = await self._database.raw_connection(self._patience, self._limit)
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
        if self._limit is not None:
            self._limit.forget(self)
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


def _codec(encoding: str) -> str:
    """Python's name for a server's encoding; UTF-8 where Python has none, and for SQL_ASCII, which holds any bytes."""
    try:
        return codecs.lookup(encoding.replace("WIN", "cp").replace("KOI8", "koi8-")).name
    except LookupError:
        return "utf-8"
