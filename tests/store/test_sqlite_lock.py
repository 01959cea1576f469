"""SQLite's only lock: a writer waits for it, and takes it as soon as it is free."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from rowmill.errors import DatabaseError
from rowmill.store import Database, sqlite_file


async def test_a_write_waits_for_the_lock_and_finds_it_free(tmp_path: Path) -> None:
    """X2, DESIGN, traps: no "database is locked" because somebody else writes."""
    path = tmp_path / "jobs.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("pragma journal_mode = wal")
        other.execute("create table jobs (id integer)")
        other.execute("begin immediate")
        other.execute("insert into jobs values (1)")
        threading.Timer(0.2, other.commit).start()
        database = Database.open(f"sqlite:///{path}")
        try:
            began = time.monotonic()
            await database.write(lambda run: run("insert into jobs values (2)", ()))
            assert time.monotonic() - began >= 0.15
            assert await database.read(lambda run: run("select id from jobs order by id", ())) == [(1,), (2,)]
        finally:
            await database.close()


async def test_a_write_that_waited_for_long_enough_says_so_and_the_next_one_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad luck gets a clear error and loses nothing: not even the patience of the statements behind it."""
    monkeypatch.setattr(sqlite_file, "LOCK_WAIT", 0.3)
    path = tmp_path / "jobs.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("pragma journal_mode = wal")
        other.execute("create table jobs (id integer)")
        database = Database.open(f"sqlite:///{path}")
        try:
            other.execute("begin immediate")
            with pytest.raises(DatabaseError, match="locked"):
                await database.write(lambda run: run("insert into jobs values (1)", ()))
            other.rollback()
            patience = await database.write(
                lambda run: [run("insert into jobs values (2)", ()), run("pragma busy_timeout", ())]
            )
            assert patience[1] == [(300,)]
            assert await database.read(lambda run: run("select id from jobs", ())) == [(2,)]
        finally:
            await database.close()
