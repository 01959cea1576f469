"""What a test says about rows: read one whole, and name what changed in it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import distributed
from databases import Db, Row, as_time

#: A database and a test that look at the clock one after the other differ by less than this.
LEEWAY = timedelta(seconds=20)


class Shown:
    """Equal to any value that passes a test: for columns whose exact value a test cannot know."""

    def __init__(self, words: str, test: Callable[[Any], bool]) -> None:
        self.words, self.test = words, test

    def __eq__(self, other: object) -> bool:
        return self.test(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.words}>"


def after(delay: timedelta) -> Shown:
    """About this long from now, by the database's own time."""
    wanted = datetime.now(UTC) + delay
    return Shown(f"about {wanted}", lambda v: v is not None and abs(as_time(v) - wanted) < LEEWAY)


def starting(text: str) -> Shown:
    """Text that begins like this."""
    return Shown(f"{text}...", lambda v: isinstance(v, str) and v.startswith(text))


def having(text: str) -> Shown:
    """Text that has this in it."""
    return Shown(f"...{text}...", lambda v: isinstance(v, str) and text in v)


def whole(db: Db, table: str, key: Any) -> Row:
    """All columns of one row."""
    return db.one(f'select * from "{table}" where id = ?', key)


def changed(before: Row, now: Row) -> Row:
    """The columns that differ, as they are now."""
    return {column: value for column, value in now.items() if value != before[column]}


def empty(request: pytest.FixtureRequest, tmp_path: Path, dialect: str) -> Db:
    """An empty database that a file's own ``db`` fixture can be made of, where ``fresh`` would cost most of the time:
    on SQLite a new file, on PostgreSQL one database for all such tests, cleared of what the last one left.
    """
    if dialect == "sqlite":
        return Db(f"sqlite:///{tmp_path / 'jobs.db'}")
    server = request.getfixturevalue("server")
    if id(server) not in _shared:
        _shared[id(server)] = server.create_database("test_shared")
    distributed.check_later(request, _shared[id(server)])
    db = Db(_shared[id(server)])
    kept = "('information_schema', 'public') and nspname not like 'pg\\_%'"
    for row in db.query(f"select nspname from pg_namespace where nspname not in {kept}"):
        name = row["nspname"].replace('"', '""')
        db.execute(f'drop schema "{name}" cascade')
    db.execute("drop schema public cascade; create schema public")
    if server.schema is not None:
        db.execute(server.make_schema)
    return db


_shared: dict[int, str] = {}
