"""One environment's database: how to get there, how to run something there, and what its errors mean.

The store's verbs are plain functions over ``run(sql, parameters) -> rows``. This file decides where they run:
on PostgreSQL on one of a few connections of its own (``direct``), on SQLite in the one thread that owns the connection,
inside ``BEGIN IMMEDIATE``.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects.postgresql.asyncpg import dialect as PostgresDialect
from sqlalchemy.dialects.sqlite import dialect as SqliteDialect
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from ..errors import DeclarationError, Unreachable, UnreadableReply
from .asyncpg_pool import ISOLATION, AsyncpgPool
from .driver_errors import translated
from .handler_connections import POOL, HandlerConnections, SqliteHandlerConnection
from .sqlite_file import Identity, SqliteConnection, SqliteFile
from .urls import FORMS, postgres_url, redact, sqlite_path, unreadable

T = TypeVar("T")
Run = Callable[[str, Any], Sequence[Any]]

_STEPS = 10_000


class Database:
    """A database by URL. ``open`` gives the right kind; nothing connects before the first use."""

    dialect: sa.Dialect
    #: What text is stored in, by Python's name for it; known once a connection was made.
    encoding = "utf-8"
    #: A transaction pooler stands in between: no LISTEN, no prepared statements.
    pooled = False
    #: Where rowmill's own tables live; None: where unqualified names lead.
    schema: str | None = None

    def __init__(self, url: str) -> None:
        self.url = url

    def needs_sessions(self, why: str) -> None:
        """Refuse what cannot be done through a transaction pooler."""
        if self.pooled:
            raise DeclarationError(
                f"a transaction pooler stands in between, and {why}",
                hint="use the database's direct address for this: --env, or ROWMILL_DATABASE_URL",
            )

    def own(self, table: str) -> str:
        """The name of one of rowmill's own tables, as it stands in SQL."""
        if self.schema is None or self.dialect.name == "sqlite":
            return table
        return f"{self.dialect.identifier_preparer.quote(self.schema)}.{table}"

    @staticmethod
    def open(url: str, *, schema: str | None = None, pool: int = 2, patience: float = 30.0) -> Database:
        """The database behind a URL as people have it: postgres://, postgresql://, sqlite:///."""
        scheme = url.split(":", 1)[0].split("+")[0]
        if scheme in ("postgres", "postgresql"):
            database = Postgres(url, pool=pool, patience=patience)
            database.schema = schema
            return database
        if scheme == "sqlite":
            return Sqlite(url)
        raise DeclarationError(
            f"cannot use the database URL {redact(url)!r}",
            hint=FORMS,
        )

    async def read(self, verb: Callable[[Run], T]) -> T:
        """Run a verb that only reads."""
        raise NotImplementedError

    async def read_within(self, verb: Callable[[Run], T], seconds: float) -> T:
        """Run a verb that only reads, each of its statements within a time limit; Busy when that ran out."""
        raise NotImplementedError

    async def write(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        """Run a verb that writes; it is committed when this returns. ``tolerant``: values that Python cannot hold come
        as Unreadable; otherwise the error of that name is raised, and on PostgreSQL the write stands all the same.
        """
        raise NotImplementedError

    async def transact(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        """Run a verb of several statements in one transaction of the engine's own."""
        raise NotImplementedError

    def begin(self) -> Any:
        """An async context manager: a SQLAlchemy connection inside a transaction, from a bounded pool."""
        raise NotImplementedError

    def must_exist(self) -> None:
        """Raises DeclarationError where there is no SQLite file."""

    async def create(self) -> None:
        """Create the SQLite file, unless there is one."""

    async def pin(self) -> None:
        """Once the SQLite file was deleted or replaced, refuse everything: until the next call of this."""

    @property
    def replaced(self) -> bool:
        """The SQLite file was deleted or replaced since ``pin``."""
        return False

    async def reach(self) -> None:
        """Raises Unreachable while nothing answers at this address."""
        await self.read(lambda run: run("select 1", ()))

    async def reflect(self, verb: Callable[[sa.Connection], T]) -> T:
        """Run something that needs a SQLAlchemy connection, such as reflection."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close every connection."""
        raise NotImplementedError


class Postgres(Database):
    """PostgreSQL through SQLAlchemy's async engine on asyncpg."""

    def __init__(self, url: str, *, pool: int, patience: float) -> None:
        super().__init__(url)
        self.dialect = PostgresDialect()  # type: ignore[no-untyped-call]
        self.dsn, self.pooled = postgres_url(url)
        self.patience = patience
        self._pool = pool
        self._direct: AsyncpgPool | None = None
        self._tolerant: AsyncpgPool | None = None
        self._handlers: HandlerConnections | None = None

    def _make(self, command_timeout: float | None, **options: Any) -> AsyncEngine:
        # Behind a transaction pooler a statement must not outlive its round trip: unnamed, and never cached.
        adapted: dict[str, Any] = (
            {"prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: ""} if self.pooled else {}
        )

        async def connect(**_: Any) -> asyncpg.Connection:
            return await self.raw_connection(command_timeout)

        # Not async_creator: with that, SQLAlchemy drops what its own adapter has to know about the pooler.
        dbapi = self.dialect.import_dbapi()
        return create_async_engine(
            "postgresql+asyncpg://",
            creator=lambda: dbapi.connect(async_creator_fn=connect, **adapted),
            **options,
        )

    async def raw_connection(self, command_timeout: float | None = None) -> asyncpg.Connection:
        """A connection as the driver makes it."""
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
            self._direct = AsyncpgPool(self, self._pool, self.patience, parsed=True)
        return self._direct

    @property
    def tolerant(self) -> AsyncpgPool:
        """Connections for replies with values that Python cannot hold."""
        if self._tolerant is None:
            self._tolerant = AsyncpgPool(self, self._pool, self.patience, parsed=True, tolerant=True)
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

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        if self._handlers is None:
            self._handlers = HandlerConnections(self, self._make(None, isolation_level=ISOLATION.upper(), **POOL))
        async with self._handlers.begin() as connection:
            yield connection

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncConnection]:
        """A connection of its own, outside any transaction and without a time limit: for builds that take long."""
        engine = self._make(None, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with translated(self):
            connection = await engine.connect()
        try:
            yield connection
        finally:
            await connection.close()

    async def reflect(self, verb: Callable[[sa.Connection], T]) -> T:
        engine = self._make(self.patience, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with translated(self):
            async with engine.connect() as connection:
                return await connection.run_sync(verb)

    async def close(self) -> None:
        for direct in (self._direct, self._tolerant):
            if direct is not None:
                await direct.close()
        if self._handlers is not None:
            await self._handlers.close()


class Sqlite(Database):
    """One SQLite file: one thread owns the engine's connection, handlers' transactions have their own.

    What only reads has a line of its own. Behind a write that waits for the file's only lock it could wait for whoever
    holds that: a finish block that asks whether its claim still holds, and has the lock, would wait for itself.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.dialect = SqliteDialect()
        self.file = SqliteFile(sqlite_path(url))
        self.path = self.file.path
        self._writer = SqliteConnection(self.file, "write", self.file.open_to_write)
        self._reader = SqliteConnection(self.file, "read", self.file.open_to_read)
        self._handlers: HandlerConnections | None = None
        self._handlers_file: Identity | None = None

    async def read(self, verb: Callable[[Run], T]) -> T:
        return await self._read(lambda: verb(self._reader.run))

    async def _read(self, work: Callable[[], T]) -> T:
        def tolerant() -> T:
            with self._reader.tolerant():
                return work()

        try:
            with translated(self):
                return await self._reader.do(work)
        except UnreadableReply:
            return await self._reader.do(tolerant)

    async def read_within(self, verb: Callable[[Run], T], seconds: float) -> T:
        def work() -> T:
            connection, ends = self._reader.connection(), time.monotonic() + seconds
            # Asked every so many steps of SQLite's machine: "interrupted" is what a statement over time ends with.
            connection.set_progress_handler(lambda: int(time.monotonic() > ends), _STEPS)
            try:
                return verb(self._reader.run)
            finally:
                connection.set_progress_handler(None, _STEPS)

        return await self._read(work)

    async def write(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        def work() -> T:
            with self._writer.tolerant(tolerant), self._writer.transaction() as run:
                return verb(run)

        with translated(self):
            return await self._writer.do(work)

    async def transact(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        return await self.write(verb, tolerant=tolerant)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        if self._handlers is None:
            self._handlers, self._handlers_file = HandlerConnections(self, self._make()), self.file.identity()
        handlers = self._handlers
        await self._check(handlers)
        async with handlers.begin() as connection:
            yield connection
        await self._check(handlers)  # else it may have been written to a file that nobody will ever read

    async def _check(self, handlers: HandlerConnections) -> None:
        """Raise Unreachable if the file of these connections was deleted or replaced."""
        if handlers is not self._handlers:
            raise Unreachable(f"the file {self.path} was replaced while it was in use")
        try:
            self.file.check(self._handlers_file)
        except Unreachable:
            await self._drop_handlers()
            raise

    async def _drop_handlers(self) -> None:
        handlers, self._handlers, self._handlers_file = self._handlers, None, None
        if handlers is not None:
            await handlers.close()

    async def _drop(self) -> None:
        """Close all connections; the next use opens others."""
        await self._drop_handlers()
        for line in (self._writer, self._reader):
            await line.drop()

    def _make(self) -> AsyncEngine:
        def connect(_path: str, **options: Any) -> SqliteHandlerConnection:
            return SqliteHandlerConnection(lambda: self.file.connect(self.file.to_write, **options))

        url = sa.URL.create("sqlite+aiosqlite", database=self.path)
        engine = create_async_engine(url, connect_args={"async_creator_fn": connect}, **POOL)
        event.listen(engine.sync_engine, "connect", _no_implicit_begin)
        # A transaction that reads first and then writes fails at once when another wrote in between.
        event.listen(engine.sync_engine, "begin", lambda c: c.exec_driver_sql("BEGIN IMMEDIATE") and None)
        return engine

    def must_exist(self) -> None:
        if not os.path.exists(self.path):
            raise DeclarationError(
                f"cannot use {self.url}: there is no file {self.path}",
                hint="check the path in the URL: sqlite:///relative.db, sqlite:////absolute.db",
            )

    async def create(self) -> None:
        if self.file.identity() is None:
            with translated(self):
                await self._writer.do(self.file.create)

    async def pin(self) -> None:
        if self.replaced:
            await self._drop()
        self.file.pinned, self.file.lost = True, None

    @property
    def replaced(self) -> bool:
        return self.file.lost is not None

    async def reach(self) -> None:
        if not self.replaced:
            await super().reach()
        else:
            with translated(self):
                self.file.open_to_read().close()

    async def reflect(self, verb: Callable[[sa.Connection], T]) -> T:
        def work() -> T:
            self.must_exist()
            engine = sa.create_engine("sqlite://", creator=self.file.open_to_read, poolclass=NullPool)
            with engine.connect() as connection:
                return verb(connection)

        with translated(self):
            return await self._reader.do(work)

    async def close(self) -> None:
        await self._drop_handlers()
        for line in (self._writer, self._reader):
            await line.close()


def runner(connection: sa.Connection) -> Run:
    """The store's ``run`` over a SQLAlchemy connection, for verbs inside somebody's transaction."""

    def run(sql: str, parameters: Any = ()) -> Sequence[Any]:
        result = connection.exec_driver_sql(sql, parameters)
        return result.fetchall() if result.returns_rows else []

    return run


def _codec(encoding: str) -> str:
    """Python's name for a server's encoding; UTF-8 where Python has none, and for SQL_ASCII, which holds any bytes."""
    try:
        return codecs.lookup(encoding.replace("WIN", "cp").replace("KOI8", "koi8-")).name
    except LookupError:
        return "utf-8"


def _no_implicit_begin(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("pragma foreign_keys = on")
    cursor.close()
