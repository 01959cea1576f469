"""Run statements in the caller's own transaction, from any supported library.

Statements are written once, with ``:names``. A verb is a generator: it yields a statement with its values, and receives
the rows. So the same verb runs in async and in sync transactions.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from ..errors import RowmillError
from .dialect import POSTGRES, SQLITE, Dialect, dialect_named, formatted, numbered
from .transactions import PlainTx, Tx

T = TypeVar("T")
Values = Mapping[str, Any]
Rows = Sequence[Any]
#: A verb: yields statements, receives rows, and returns an answer.
Verb = Generator[tuple[str, Values], Rows, T]


@dataclass(frozen=True)
class Caller:
    """The caller's transaction: its dialect, and ``run(sql, values)``, which may return an awaitable."""

    sql: Dialect
    run: Callable[[str, Values], Any]
    awaited: bool


def drive(verb: Verb[T], run: Callable[[str, Values], Rows]) -> T:
    """Run a verb to its end, synchronously."""
    rows: Any = None
    try:
        while True:
            rows = run(*verb.send(rows))
    except StopIteration as end:
        value: T = end.value
        return value


async def drive_async(verb: Verb[T], run: Callable[[str, Values], Awaitable[Rows]]) -> T:
    """Run a verb to its end, awaiting each statement."""
    rows: Any = None
    try:
        while True:
            rows = await run(*verb.send(rows))
    except StopIteration as end:
        value: T = end.value
        return value


def caller(tx: Any) -> Caller:
    """How to run statements in the transaction ``tx``."""
    own = next((one for one in (tx, getattr(tx, "_tx", None)) if isinstance(one, (Tx, PlainTx))), None)
    if own is not None:  # a finish block, including one in a thread, or an on_settled hook
        return _in_own(own, tx)
    if isinstance(tx, async_scoped_session):
        tx = tx()
    if isinstance(tx, scoped_session):
        tx = tx()
    if isinstance(tx, (Session, sa.Connection)):
        return Caller(_bound(tx), lambda sql, values: _fetched(tx.execute(_text(sql), dict(values))), False)
    if isinstance(tx, (AsyncSession, AsyncConnection)):
        return Caller(_bound(tx), _sqlalchemy(tx), True)
    if isinstance(tx, sqlite3.Connection):
        return Caller(SQLITE, lambda sql, values: _tupled(tx.cursor()).execute(sql, values).fetchall(), False)
    package = type(tx).__module__.partition(".")[0]
    if package == "aiosqlite":
        return Caller(SQLITE, _aiosqlite(tx), True)
    if package == "asyncpg":
        return Caller(POSTGRES, _asyncpg(tx), True)
    if package in ("psycopg", "psycopg2", "psycopg_pool"):
        return _psycopg(tx)
    if hasattr(tx, "settings_dict") or package == "django":
        return _django(tx)
    raise RowmillError(
        f"tx={tx!r}: not a connection or session that rowmill knows",
        hint="a psycopg, asyncpg, sqlite3 or aiosqlite connection, a SQLAlchemy connection or session, or Django's"
        " connection; for others insert into rowmill_jobs by SQL",
    )


def _in_own(own: Tx | PlainTx, tx: Any) -> Caller:
    """Run in rowmill's own transaction. From a handler's thread, statements go through the transaction's event loop."""
    if tx is own:
        return caller(own.connection)
    return Caller(
        _dialect(own.connection.dialect.name),
        lambda sql, values: _fetched(tx.execute(_text(sql), dict(values))),
        False,
    )


def _text(sql: str) -> sa.TextClause:
    return sa.text(sql)


def _fetched(result: Any) -> Rows:
    return result.fetchall() if result.returns_rows else []


def _dialect(name: str) -> Dialect:
    try:
        return dialect_named(name)
    except KeyError:
        raise RowmillError(f"tx is a connection to {name}, but rowmill_jobs is in PostgreSQL or SQLite") from None


def _bound(tx: Any) -> Dialect:
    """The dialect of the engine that a SQLAlchemy connection or session uses."""
    bind = tx.get_bind() if hasattr(tx, "get_bind") else tx
    return _dialect(bind.dialect.name)


def _sqlalchemy(tx: Any) -> Callable[[str, Values], Awaitable[Rows]]:
    async def run(sql: str, values: Values) -> Rows:
        return _fetched(await tx.execute(_text(sql), dict(values)))

    return run


def _aiosqlite(tx: Any) -> Callable[[str, Values], Awaitable[Rows]]:
    async def run(sql: str, values: Values) -> Rows:
        async with tx.cursor() as cursor:
            _tupled(cursor)
            await cursor.execute(sql, values)
            return list(await cursor.fetchall())

    return run


def _tupled(cursor: Any) -> Any:
    """A cursor that returns rows by position, whatever row type the connection uses."""
    cursor.row_factory = None
    return cursor


def _asyncpg(tx: Any) -> Callable[[str, Values], Awaitable[Rows]]:
    if not hasattr(tx, "fetch") or hasattr(tx, "acquire"):
        raise RowmillError(
            f"tx={tx!r} is not a connection", hint="async with pool.acquire() as connection: ... tx=connection"
        )

    async def run(sql: str, values: Values) -> Rows:
        text, given = numbered(sql, values)
        return list(await tx.fetch(text, *given))

    return run


def _psycopg(tx: Any) -> Caller:
    connection = getattr(tx, "connection", tx)  # a cursor has a connection
    if not hasattr(connection, "cursor"):
        raise RowmillError(
            f"tx={tx!r} is not a connection", hint="with pool.connection() as connection: ... tx=connection"
        )

    async def run_async(sql: str, values: Values) -> Rows:
        async with connection.cursor(row_factory=_tuples()) as cursor:
            await cursor.execute(*formatted(sql, values))
            return list(await cursor.fetchall()) if cursor.description else []

    def run(sql: str, values: Values) -> Rows:
        options = {} if type(connection).__module__.startswith("psycopg2") else {"row_factory": _tuples()}
        with connection.cursor(**options) as cursor:
            cursor.execute(*formatted(sql, values))
            return list(cursor.fetchall()) if cursor.description else []

    awaited = inspect.iscoroutinefunction(getattr(connection, "commit", None))
    return Caller(POSTGRES, run_async if awaited else run, awaited)


def _tuples() -> Any:
    from psycopg.rows import tuple_row

    return tuple_row


def _django(tx: Any) -> Caller:
    def run(sql: str, values: Values) -> Rows:
        with tx.cursor() as cursor:
            cursor.execute(*formatted(sql, values))
            return list(cursor.fetchall()) if cursor.description else []

    return Caller(_dialect(tx.vendor), run, False)
