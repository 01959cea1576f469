"""One environment's database: how to get there, how to run something there, and what its errors mean.

The store's verbs are plain functions over ``run(sql, parameters) -> rows``. This file decides where they run:
on PostgreSQL on one of a few connections of its own (``direct``), on SQLite in the one thread that owns the connection,
inside ``BEGIN IMMEDIATE``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from ..errors import DeclarationError
from .connection_limit import ConnectionShares
from .dialect import Dialect
from .driver_errors import translated
from .handler_connections import shielded
from .urls import FORMS, redact

if TYPE_CHECKING:
    from .postgres_database import AsyncpgPool
    from .sqlite_file import SqliteFile

T = TypeVar("T")
Run = Callable[[str, Any], Sequence[Any]]


class RolledBack(Exception):
    """Ends a trial's transaction without a commit."""


class Database:
    """A database by URL. ``open`` gives the right kind; nothing connects before the first use."""

    #: The dialect as SQLAlchemy has it: names and types. And the pieces of rowmill's own statements.
    dialect: sa.Dialect
    sql: Dialect
    #: What text is stored in, by Python's name for it; known once a connection was made.
    encoding = "utf-8"
    #: The URL goes through a transaction pooler: no LISTEN, no prepared statements.
    pooled = False
    #: What the driver connects to, where that is a server; and the file, where the database is one.
    dsn: str = ""
    #: The same for all schemas of one database: their connections differ in nothing else.
    place: str = ""
    file: SqliteFile | None = None
    #: Where rowmill's own tables live; None: where unqualified names lead.
    schema: str | None = None
    #: The bound on connections that it shares with a worker's other databases; None: only its own pools' sizes.
    shares: ConnectionShares | None = None

    def __init__(self, url: str) -> None:
        self.url = url

    def needs_sessions(self, why: str) -> None:
        """Refuse what cannot be done through a transaction pooler."""
        if self.pooled:
            raise DeclarationError(
                f"the URL goes through a transaction pooler, and {why}",
                hint="use the database's direct address for this: --env, or ROWMILL_DATABASE_URL",
            )

    def own(self, table: str) -> str:
        """The name of one of rowmill's own tables, as SQL."""
        return self.sql.own(self.schema, table)

    @staticmethod
    def open(url: str, *, schema: str | None = None, pool: int = 2, patience: float = 30.0) -> Database:
        """The database behind a URL as people have it: postgres://, postgresql://, sqlite:///."""
        scheme = url.split(":", 1)[0].split("+")[0]
        if scheme in ("postgres", "postgresql"):
            from .postgres_database import Postgres

            database = Postgres(url, pool=pool, patience=patience)
            database.schema = schema
            return database
        if scheme == "sqlite":
            from .sqlite_database import Sqlite

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

    async def notify(self, channel: str, payload: str = "") -> None:
        """Send a word to those who listen on a channel; nothing where nobody can listen."""
        if text := self.sql.notify:
            await self.write(lambda run: run(text, (channel, payload)))

    def client_pool(self) -> AsyncpgPool | None:
        """Connections of the driver's own for a client that adds jobs; None where the verbs above are the fastest."""
        return None

    def session(self) -> Any:
        """An async context manager: a connection of its own, outside any transaction, for what takes long."""
        raise NotImplementedError

    def begin(self) -> Any:
        """An async context manager: a SQLAlchemy connection inside a transaction, from a bounded pool."""
        raise NotImplementedError

    async def long_transaction(self, verb: Callable[[Run], T]) -> T:
        """Run a verb in one transaction that may take its time: not on one of the engine's own connections."""
        async with self.begin() as connection:
            with translated(self):
                answer: T = await shielded(connection.run_sync(lambda c: verb(runner(c))))
        return answer

    async def trial(self, verb: Callable[[Run], T]) -> T:
        """Run a verb in a transaction that is rolled back: to see what the database says to it."""
        try:
            async with self.begin() as connection:
                with translated(self):
                    answer: T = await shielded(connection.run_sync(lambda c: verb(runner(c))))
                raise RolledBack
        except RolledBack:
            return answer

    @property
    def missing_file(self) -> str | None:
        """The path of the SQLite file, where there is no such file."""
        return None

    def must_exist(self) -> None:
        """Raises DeclarationError where there is no SQLite file."""
        if (path := self.missing_file) is not None:
            raise DeclarationError(
                f"cannot use {self.url}: there is no file {path}",
                hint="check the path in the URL: sqlite:///relative.db, sqlite:////absolute.db",
            )

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

    #: The server's ``max_connections``, where it has one and was asked.
    max_connections: int | None = None

    async def ask_limit(self) -> None:
        """Learn the server's ``max_connections``."""

    def release_idle(self) -> None:
        """Close the engine's connections that nobody uses now, so that others can have them."""

    async def rest(self) -> None:
        """Close every connection that nobody uses; the next use opens others."""
        raise NotImplementedError

    @property
    def needs(self) -> int:
        """How many connections a worker opens here at most, those of its heartbeat and handlers included."""
        return 0

    async def reflect(self, verb: Callable[[sa.Connection], T]) -> T:
        """Run something that needs a SQLAlchemy connection, such as reflection."""
        raise NotImplementedError

    async def read_only(self, verb: Callable[[sa.Connection], T], seconds: int = 8) -> T:
        """Like ``reflect``, in a transaction that cannot write, waits for no lock and ends within a time limit."""
        return await self.reflect(verb)

    async def close(self) -> None:
        """Close every connection."""
        raise NotImplementedError


def runner(connection: sa.Connection) -> Run:
    """The store's ``run`` over a SQLAlchemy connection, for verbs inside somebody's transaction."""

    def run(sql: str, parameters: Any = ()) -> Sequence[Any]:
        result = connection.exec_driver_sql(sql, parameters)
        return result.fetchall() if result.returns_rows else []

    return run
