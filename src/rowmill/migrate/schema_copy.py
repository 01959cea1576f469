"""A copy of a user's schema, in a separate database: only the structure, never the rows.

On PostgreSQL a database of its own on the same server, on SQLite a temporary file. Foreign keys and triggers are left
out: rows are made up for one table at a time. His own database is only ever read.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import sqlalchemy as sa

from ..errors import DatabaseError, DeclarationError, Refused
from ..store.database import Database, Run, runner
from ..store.postgres_database import Postgres
from ..store.sqlite_database import Sqlite

Names = Sequence[tuple[str | None, str]]
_OTHERS = "nspname !~ '^pg_' and nspname <> 'information_schema'"
#: Of a CREATE TABLE: what says that a column, or several, stand for rows of another table.
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/"""
    r"""|,?\s*(?:\bconstraint\s+(?:"[^"]*"|\S+)\s+)?\bforeign\s+key\s*\([^)]*\)\s*(?=references\b)"""
    r"""|\s*\breferences\s+(?:"[^"]*"|`[^`]*`|\[[^\]]*\]|\w+)\s*(?:\([^)]*\))?"""
    r"""(?:\s*\bon\s+(?:delete|update)\s+(?:set\s+null|set\s+default|cascade|restrict|no\s+action)"""
    r"""|\s*\bmatch\s+\w+|\s*(?:\bnot\s+)?\bdeferrable(?:\s+initially\s+\w+)?)*""",
    re.IGNORECASE | re.DOTALL,
)


@asynccontextmanager
async def copied(source: Database, tables: Names, texts: Iterable[str], on: str | None) -> AsyncIterator[str]:
    """The URL of a database with these tables, and with those that the lane's SQL refers to."""
    async with _BY_DIALECT[source.dialect.name](source, tables, texts, on) as url:
        yield url


# -- PostgreSQL


@asynccontextmanager
async def _copied_postgres(source: Postgres, tables: Names, texts: Iterable[str], on: str | None) -> AsyncIterator[str]:
    statements = await source.read_only(lambda c: _structure(runner(c), tables, " ".join(texts)))
    url, made = (on, None) if on else await _fresh(source)
    try:
        copy = Database.open(url)
        try:
            await _fill(copy, statements, [name for _, name in tables])
        finally:
            await copy.close()
        yield url
    finally:
        if made is not None:
            await _run(source, f'drop database if exists "{made}" with (force)')


async def _fresh(source: Postgres) -> tuple[str, str]:
    """A separate database on the same server: its URL and its name."""
    name = f"rowmill_prove_{secrets.token_hex(4)}"
    try:
        await _run(source, f'create database "{name}" template template0')
    except DatabaseError as error:
        raise DeclarationError(
            f"cannot create a copy on this server: {error.message}",
            hint="--on URL of an empty database, for example on a local PostgreSQL",
        ) from error
    parts = urlsplit(source.url)
    return urlunsplit((parts.scheme, parts.netloc, "/" + quote(name), parts.query, "")), name


async def _run(database: Postgres, text: str) -> None:
    async with database.session() as connection:
        try:
            await connection.exec_driver_sql(text)
        except sa.exc.DBAPIError as error:
            raise Refused(str(error.orig).split(": ", 1)[-1].splitlines()[0]) from error


def _structure(run: Run, tables: Names, text: str) -> list[tuple[bool, str]]:
    """The statements that create the tables, each with whether it must succeed."""
    words = set(re.findall(r"\w+", text))
    rows = run(
        f"""select c.oid::bigint, n.nspname, c.relname, pg_table_is_visible(c.oid) from pg_class c
join pg_namespace n on n.oid = c.relnamespace where c.relkind in ('r', 'p') and n.{_OTHERS} order by 1""",
        (),
    )
    chosen = []
    for oid, schema, name, visible in rows:
        needed = any(name == n and (schema == s if s else visible) for s, n in tables)
        if needed or (name in words and not name.startswith("rowmill_")):
            chosen.append((oid, schema, name, needed))
    made = [
        (False, f'create extension if not exists "{row[0]}"') for row in run("select extname from pg_extension", ())
    ]
    made += [(False, f'create schema if not exists "{row[0]}"') for row in run(
        f"select nspname from pg_namespace where {_OTHERS}", ())]  # fmt: skip
    made += [(False, row[0]) for row in run(_TYPES, ())]
    for oid, schema, name, needed in chosen:
        made.append((needed, _table(run, oid, _quoted(schema, name))))
        made += [(False, row[0]) for row in run(_CONSTRAINTS, (oid,))]
        made += [(False, row[0]) for row in run(_INDEXES, (oid,))]
    return made


#: Enums and domains.
_TYPES = f"""select format('create type %I.%I as enum (%s)', nspname, typname,
  (select string_agg(quote_literal(enumlabel), ', ' order by enumsortorder) from pg_enum where enumtypid = t.oid))
from pg_type t join pg_namespace n on n.oid = typnamespace where typtype = 'e' and {_OTHERS}
union all
select format('create domain %I.%I as %s', nspname, typname, concat_ws(' ', format_type(typbasetype, typtypmod),
  (select string_agg(pg_get_constraintdef(oid), ' ') from pg_constraint where contypid = t.oid)))
from pg_type t join pg_namespace n on n.oid = typnamespace where typtype = 'd' and {_OTHERS}"""
_CONSTRAINTS = """select format('alter table %s add constraint %I %s', conrelid::regclass, conname,
  pg_get_constraintdef(oid)) from pg_constraint where conrelid = $1::bigint::oid and contype in ('p', 'u', 'c', 'x')
order by contype desc, conname"""
_INDEXES = """select pg_get_indexdef(indexrelid) from pg_index where indrelid = $1::bigint::oid
and not exists (select 1 from pg_constraint where conindid = indexrelid) order by indexrelid"""


def _table(run: Run, oid: int, name: str) -> str:
    rows = run(
        """select quote_ident(attname), format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid),
  attgenerated::text, attidentity::text
from pg_attribute a left join pg_attrdef d on adrelid = attrelid and adnum = attnum
where attrelid = $1::bigint::oid and attnum > 0 and not attisdropped order by attnum""",
        (oid,),
    )
    columns = []
    for column, kind, needed, default, generated, identity in rows:
        text = f"{column} {kind}"
        if generated == "s":
            text += f" generated always as ({default}) stored"
        elif identity:
            text += " generated by default as identity"
        elif default is not None and "nextval(" not in default:  # his own sequence is not counted up
            text += f" default {default}"
        columns.append(text + (" not null" if needed else ""))
    return f"create table {name} (\n  {', '.join(columns)}\n)"


def _quoted(*names: str) -> str:
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


async def _fill(copy: Database, statements: Sequence[tuple[bool, str]], names: Sequence[str]) -> None:
    taken = await copy.read(lambda run: run("select relname from pg_class where relkind in ('r', 'p')", ()))
    if there := {row[0] for row in taken} & set(names):
        raise DeclarationError(
            f"the database given with --on has a table {min(there)!r} already", hint="--on URL of an empty database"
        )
    for needed, text in statements:
        try:
            await copy.write(lambda run, text=text: run(text, ()))  # type: ignore[misc]
        except Refused as error:
            if needed:
                raise DeclarationError(
                    f"the table could not be copied: {error.message}: {text.splitlines()[0]}",
                    hint="--on URL of an empty database that has the types and functions that the table needs",
                ) from error


# -- SQLite


_STRUCTURE = """select type, sql from sqlite_master
where sql is not null and name not like 'sqlite_%' and tbl_name not like 'rowmill_%' order by rowid"""


@asynccontextmanager
async def _copied_sqlite(source: Sqlite, _tables: Names, _texts: Iterable[str], on: str | None) -> AsyncIterator[str]:
    texts = await source.reflect(lambda connection: connection.exec_driver_sql(_STRUCTURE).fetchall())
    folder = tempfile.mkdtemp(prefix="rowmill-copy-")
    try:
        url = on or f"sqlite:///{os.path.join(folder, 'copy.db')}"
        with sqlite3.connect(Database.open(url).path) as connection:  # type: ignore[attr-defined]
            if connection.execute("select count(*) from sqlite_master").fetchone()[0]:
                raise DeclarationError("the database given with --on is not empty", hint="--on URL of an empty one")
            for kind, sql in texts:
                if kind == "table":
                    connection.execute(without_foreign_keys(sql))
                elif kind in ("index", "view"):
                    with suppress(sqlite3.Error):
                        connection.execute(sql)
        connection.close()
        yield url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def without_foreign_keys(sql: str) -> str:
    """A CREATE TABLE of SQLite without its foreign keys."""

    def told(match: re.Match[str]) -> str:
        text: Any = match.group()
        return text if text[0] in "'\"`[" or text[:2] in ("--", "/*") else ""

    return _TOKEN.sub(told, sql)


_BY_DIALECT: dict[str, Any] = {"postgresql": _copied_postgres, "sqlite": _copied_sqlite}
