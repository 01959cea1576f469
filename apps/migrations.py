"""Numbered SQL migrations: what an application's set-up makes, as text for those who run SQL themselves.

Each may be run again: what is there stays. ``python -m apps sql analysis``, and the same of the other four.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable


@dataclass(frozen=True)
class Migration:
    """One step: a title and its statements, for PostgreSQL."""

    title: str
    sql: str


def listing(application: str, migrations: Sequence[Migration]) -> str:
    """All of them, numbered, ready for psql."""
    parts = [
        f"-- {application} {number:03}: {each.title}\n{each.sql.strip()}\n" for number, each in enumerate(migrations, 1)
    ]
    return "\n".join(parts)


def of_tables(metadata: sa.MetaData) -> list[Migration]:
    """Tables, the columns that tables made by somebody else lack, and indexes."""
    tables = metadata.sorted_tables
    columns = (text for table in tables for column in table.columns if (text := _added(column)))
    indexes = (index for table in tables for index in sorted(table.indexes, key=lambda index: str(index.name)))
    return [
        Migration("tables", _joined(CreateTable(table, if_not_exists=True) for table in tables)),
        Migration("columns that tables made before lack", "\n".join(f"{text};" for text in columns)),
        *(
            [Migration("indexes", _joined(CreateIndex(index, if_not_exists=True) for index in indexes))]
            if any(table.indexes for table in tables)
            else []
        ),
    ]


def _added(column: sa.Column[Any]) -> str:
    if column.primary_key:
        return ""
    table = postgresql.dialect().identifier_preparer.format_table(column.table)
    return f"alter table {table} add column if not exists {definition(column, postgresql.dialect())}"


def definition(column: sa.Column[Any], dialect: Any) -> str:
    """A column as a table that has rows can get it: without what old rows could not fulfil."""
    copy = sa.Column(column.name, column.type, server_default=column.server_default)
    copy.nullable = column.nullable or column.server_default is None
    return str(CreateColumn(copy).compile(dialect=dialect))


def _joined(statements: Iterable[Any]) -> str:
    return "\n".join(f"{str(each.compile(dialect=postgresql.dialect())).strip()};" for each in statements)
