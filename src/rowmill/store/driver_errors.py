"""Translate the drivers' errors into rowmill's own. This is the only place that does so."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING

import asyncpg
import sqlalchemy as sa

from ..errors import Busy, DatabaseError, Refused, TooManyConnections, Unreachable, UnreadableReply, Unserved
from .urls import redact

if TYPE_CHECKING:
    from .database import Database


#: Error classes that no row can cause: the statement, permissions, the transaction, the system, the server itself.
_OF_NO_ROW = ("42", "0A", "25", "26", "34", "3F", "55", "58", "F0", "XX")
#: A column, a table, a type or a function has changed since the lane was bound.
_ALTERED = ("42703", "42P01", "42804", "42883", "42846", "0A000", "3F000")

#: PgBouncer, Supavisor and PgCat report too many connections with their own code (08P01). A server uses 53300.
_POOLER_FULL = ("no more connections allowed", "max client connections reached", "MaxClientsInSessionMode")


class translated:
    """Raise rowmill's errors instead of the driver's."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            known = translate(error, self._database)
            if known is not None and known is not error:
                raise known from error


def translate(error: BaseException, database: Database) -> DatabaseError | None:
    """Translate a driver's error; None if the database is not the cause."""
    if isinstance(error, DatabaseError):
        return error
    cause: BaseException = error
    if isinstance(error, sa.exc.DBAPIError) and error.orig is not None:
        cause = error.orig
    state = getattr(cause, "sqlstate", None) or getattr(cause.__cause__, "sqlstate", None)
    text = _first_line(cause)
    where = redact(database.url)
    if isinstance(state, str):
        # a prepared statement that does not exist, or already exists
        if not database.pooled and (state in ("26000", "42P05") or "unsupported startup parameter" in text):
            mark = "&" if "?" in database.url else "?"
            return Unreachable(
                f"cannot use {where}: {text}",
                hint=f"if a transaction pooler (PgBouncer, Supavisor) is in between, add {mark}pgbouncer=true to the"
                " database URL",
            )
        if state == "3D000" and (named := re.search('"(.*)"', text)):
            quoted = database.dialect.identifier_preparer.quote_identifier(named[1])
            hint = f"create database {quoted}, or correct the name in the URL"
            return Unreachable(f"there is no database {named[1]!r} on {where}", hint=hint)
        if state == "53300" or any(words in text for words in _POOLER_FULL):
            hint = "raise max_connections (or the pooler's, role's or database's limit), or run fewer worker processes"
            return TooManyConnections(f"no connection left at {where}: {text}", hint=hint)
        # 08 connection, 57P0x shutdown, 28 login
        if state.startswith(("08", "57P0", "533", "28", "3D")):
            return Unreachable(f"cannot reach {where}: {text}", hint="check that the server is up and the URL is right")
        if state.startswith(("40", "55P03", "57014", "53", "25006")):
            return Busy(text)
        if _of_no_row(state, text):
            return _unserved(text, altered=state in _ALTERED)
        return _refused(text, in_the_way=state in ("23505", "23P01"))
    if isinstance(cause, sqlite3.OperationalError):
        if "locked" in text or "busy" in text or "full" in text or "interrupted" in text:
            return Busy(text)
        if "unable to open" in text or "disk I/O" in text or "malformed" in text or "readonly" in text:
            return Unreachable(
                f"cannot use {where}: {text}",
                hint="check that the file's folder exists and may be written to",
            )
        if "Could not decode to UTF-8" in text:
            return UnreadableReply(f"a value that Python cannot hold: {text}")
        if "no such column" in text or "no such table" in text or "has no column" in text:
            return _unserved(text, altered=True)
        return Refused(text)
    if isinstance(cause, sqlite3.DatabaseError) and "not a database" in text:
        return Unreachable(f"cannot use {where}: {text}", hint="check that the URL names the right file")
    if isinstance(cause, (sqlite3.Error, OverflowError)) and database.dialect.name == "sqlite":
        return _refused(text, in_the_way=text.startswith("UNIQUE constraint"))
    if isinstance(cause, asyncpg.InterfaceError) and "the server expects" in text:
        return Refused(text)  # too many or too few values: the statement is wrong, not the connection
    lost = isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    away = (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError, sa.exc.TimeoutError)
    if lost or (isinstance(cause, away) and not isinstance(cause, ValueError)):
        return Unreachable(f"cannot reach {where}: {text}", hint="check that the server is up and the URL is right")
    if isinstance(error, (sa.exc.DBAPIError, asyncpg.PostgresError)):
        return Refused(text)
    if isinstance(cause, (ValueError, OverflowError, RecursionError)) and database.dialect.name == "postgresql":
        kind = (
            Refused if isinstance(cause, asyncpg.InterfaceError) else UnreadableReply
        )  # for example a date before the year 1
        return kind(f"a value that the driver cannot read or send: {text}")
    return None


def from_standby(error: BaseException | None) -> bool:
    """Whether the error, or its cause, comes from a read-only server (25006): a primary until a switchover."""
    while error is not None:
        if (
            getattr(error, "sqlstate", None) == "25006"
            or getattr(getattr(error, "orig", None), "sqlstate", "") == "25006"
        ):
            return True
        error = error.__cause__
    return False


def _of_no_row(state: str, text: str) -> bool:
    # A row-level security policy reads the row's values, and fails with the code for a missing privilege.
    return state.startswith(_OF_NO_ROW) and not (state == "42501" and "row-level security" in text)


def _refused(text: str, *, in_the_way: bool) -> Refused:
    error = Refused(text)
    error.in_the_way = in_the_way
    return error


def _unserved(text: str, *, altered: bool) -> Unserved:
    error = Unserved(text)
    error.altered = altered
    return error


def _first_line(error: BaseException) -> str:
    """The database's own message, without the driver's class names."""
    text = str(error) or type(error).__name__
    text = re.sub(r"^<class '[^']*'>: ", "", text)
    return text.splitlines()[0]
