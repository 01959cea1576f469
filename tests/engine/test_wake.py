"""On SQLite a commit by anybody wakes a worker at once: the kernel tells of the write, and no poll is needed."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from rowmill.engine import wake
from rowmill.store import Database
from rowmill.store.file_watch import FileWatch
from rowmill.store.sqlite_file import SqliteCommits
from workers import STATES, jobs, until, working

HOUR = 3600.0
needs_inotify = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")

_WRITER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
for line in sys.stdin:
    for statement in line.split(";"):
        connection.execute(statement).fetchall()
    print("done", flush=True)
"""


@contextmanager
def another_process(path: str) -> Iterator[Callable[[str], None]]:
    """Statements run by a process of their own, on one connection."""
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(statements: str) -> None:
            process.stdin.write(statements + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

        yield run
        process.stdin.close()


class Heard:
    """A listener on one file: how often it rang, and how often it looked."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task, self.rings, self.looks = task, 0, 0

    async def after(self, step: Callable[[], object]) -> None:
        """It rings once more after this step."""
        before = self.rings
        await asyncio.to_thread(step)
        await until(lambda: self.rings > before or self.task.done(), 60)
        assert not self.task.done()


@asynccontextmanager
async def listening(path: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Heard]:
    moved = SqliteCommits.moved

    def counted(commits: SqliteCommits) -> bool:
        heard.looks += 1
        return moved(commits)

    def ring() -> None:
        heard.rings += 1

    monkeypatch.setattr(SqliteCommits, "moved", counted)
    database = Database.open(f"sqlite:///{path}")
    heard = Heard(asyncio.create_task(wake.listen(database, ring)))
    try:
        await until(lambda: heard.rings or heard.task.done(), 60)
        yield heard
    finally:
        heard.task.cancel()
        await asyncio.gather(heard.task, return_exceptions=True)
        await database.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    return str(tmp_path / "data" / "jobs.db")


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the kernel's word leads to a look."""
    monkeypatch.setattr(wake, "_POLL", HOUR)
    monkeypatch.setattr(wake, "_SAFETY_POLL", HOUR)


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[FileWatch]:
    """Those that are made."""
    made: list[FileWatch] = []

    def make(path: str) -> FileWatch:
        made.append(FileWatch(path))
        return made[-1]

    monkeypatch.setattr(wake, "FileWatch", make)
    return made


def create(path: str, mode: str = "wal") -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"pragma journal_mode = {mode}")
        connection.execute("create table notes (note text)")


def log_size(path: str) -> int:
    return os.path.getsize(f"{path}-wal")


# -- a worker


@needs_inotify
@pytest.mark.usefixtures("no_poll")
async def test_a_row_from_another_process_is_run_without_any_poll(lite: Db) -> None:
    """A3: the lane's poll and the file's poll are an hour away."""
    jobs(lite, 0)
    mill, ran = Mill(lite.url), asyncio.Event()

    @mill.lane("jobs", poll=td(hours=1), **STATES)
    async def work(job: Any) -> None:
        ran.set()

    with another_process(lite.url.removeprefix("sqlite:///")) as run:
        async with working(mill) as worker:
            await until(lambda: worker.environments[0].opened and not worker.environments[0].look, 60)
            await asyncio.to_thread(run, "insert into jobs (note) values (null)")
            await asyncio.wait_for(ran.wait(), 60)


# -- commits


@needs_inotify
@pytest.mark.usefixtures("no_poll")
@pytest.mark.parametrize("mode", ["wal", "delete", "truncate", "persist"])
@pytest.mark.parametrize("synchronous", ["normal", "full"])
async def test_every_commit_rings(path: str, monkeypatch: pytest.MonkeyPatch, mode: str, synchronous: str) -> None:
    """In each journal mode, and also where an fsync comes between the write and the commit."""
    create(path, mode)
    with another_process(path) as run:
        run(f"pragma journal_mode = {mode}; pragma synchronous = {synchronous}")
        async with listening(path, monkeypatch) as heard:
            for _ in range(3):
                await heard.after(lambda: run("insert into notes values ('new')"))


@needs_inotify
@pytest.mark.usefixtures("no_poll")
async def test_a_commit_rings_after_the_log_began_from_the_start(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(path)
    with another_process(path) as run:
        async with listening(path, monkeypatch) as heard:
            await heard.after(lambda: run("insert into notes values ('before')"))
            run("pragma wal_checkpoint(truncate)")
            await heard.after(lambda: run("insert into notes values ('after')"))


@needs_inotify
@pytest.mark.usefixtures("no_poll")
async def test_a_commit_rings_through_a_symbolic_link(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(path)
    (tmp_path / "link.db").symlink_to(path)
    with another_process(path) as run:
        async with listening(str(tmp_path / "link.db"), monkeypatch) as heard:
            await heard.after(lambda: run("insert into notes values ('new')"))


@needs_inotify
@pytest.mark.usefixtures("no_poll")
async def test_what_is_written_before_its_commit_does_not_ring(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large transaction writes to the log long before it commits."""
    create(path)
    rows = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 3000)"
    with another_process(path) as run:
        run("pragma cache_size = 5")
        async with listening(path, monkeypatch) as heard:
            rings, looks, size = heard.rings, heard.looks, log_size(path)
            await asyncio.to_thread(run, f"begin; insert into notes {rows} select hex(zeroblob(200)) from n")
            assert log_size(path) > size
            await until(lambda: heard.looks > looks + 3, 60)
            assert heard.rings == rings
            await heard.after(lambda: run("commit"))


@needs_inotify
@pytest.mark.usefixtures("no_poll")
async def test_a_commit_that_becomes_visible_late_still_rings(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is told of, then an fsync takes its time, and nobody tells when the commit is visible."""
    create(path)
    moved, hidden = SqliteCommits.moved, 0

    def late(commits: SqliteCommits) -> bool:
        nonlocal hidden
        hidden -= 1
        return hidden < 0 and moved(commits)

    monkeypatch.setattr(SqliteCommits, "moved", late)
    with another_process(path) as run:
        async with listening(path, monkeypatch) as heard:
            hidden = 8
            await heard.after(lambda: run("insert into notes values ('new')"))


@needs_inotify
@pytest.mark.usefixtures("no_poll")
async def test_a_file_that_is_replaced_or_deleted_rings(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's next statement then finds out what happened; commits to the new file ring as well."""
    create(path)
    create(f"{path}.new", "delete")
    async with listening(path, monkeypatch) as heard:
        await heard.after(lambda: os.rename(f"{path}.new", path))
        with another_process(path) as run:
            await heard.after(lambda: run("insert into notes values ('new')"))
        await heard.after(lambda: os.unlink(path))


# -- without inotify


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ENOSYS])
async def test_a_poll_finds_commits_where_inotify_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch, watches: list[FileWatch], number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileWatch, "_call", refuse)
    create(path)
    with another_process(path) as run:
        async with listening(path, monkeypatch) as heard:
            assert not watches[0].works
            await heard.after(lambda: run("insert into notes values ('new')"))


@needs_inotify
async def test_a_watch_that_missed_a_commit_is_not_relied_on_again(
    path: str, monkeypatch: pytest.MonkeyPatch, watches: list[FileWatch]
) -> None:
    """A file system whose writes the kernel does not see: the safety poll finds the first commit, the poll the rest."""
    create(path)
    monkeypatch.setattr(wake, "_SAFETY_POLL", 0.1)
    with another_process(path) as run:
        async with listening(path, monkeypatch) as heard:
            assert watches[0].works
            monkeypatch.setattr(FileWatch, "told", lambda _: False)
            await heard.after(lambda: run("insert into notes values ('missed')"))
            await until(lambda: not watches[0].works, 60)
            monkeypatch.setattr(wake, "_SAFETY_POLL", HOUR)
            await heard.after(lambda: run("insert into notes values ('found')"))


@needs_inotify
async def test_the_watch_ends_with_the_listener(
    path: str, monkeypatch: pytest.MonkeyPatch, watches: list[FileWatch]
) -> None:
    """And no other program inherits it."""
    create(path)
    async with listening(path, monkeypatch):
        assert watches[0].works
        assert not os.get_inheritable(watches[0]._inotify)
    assert not watches[0].works
