"""SQLite files: looking at one leaves it as it is, and a worker notices that its file was deleted or replaced."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from command import Command, fill_enrichment
from databases import Db
from rowmill import Job, Mill, RowmillError, Unreachable
from rowmill.store import Database
from rowmill.store.own import schema
from workers import STATES, add, events_of, jobs, until, working

LOOKS = [
    ["status"], ["check"], ["workers"], ["stuck"], ["jobs"], ["errors"], ["gates"], ["sql", "enrichment"],
    ["top", "--once"], ["why", "enrichment", "{id}"], ["migrate"], ["audit"], ["adopt", "{url}", "enrichment_jobs"],
]  # fmt: skip


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    folder = tmp_path / "app"
    folder.mkdir()
    return Command(folder, monkeypatch, capsys)


def made(folder: Path, mode: str, *, own: bool) -> Db:
    """A file with rows in every state, in that journal mode; with rowmill's own tables or without."""
    folder.mkdir()
    db = Db(f"sqlite:///{folder}/jobs.db")
    fill_enrichment(db)
    if own:
        asyncio.run(own_tables(db))
    db.execute(f"pragma journal_mode = {mode}")
    return db


async def own_tables(db: Db) -> None:
    database = Database.open(db.url)
    await schema.ensure(database)
    await database.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def looks(db: Db) -> list[list[str]]:
    with closing(sqlite3.connect(db.url.removeprefix("sqlite:///"))) as connection:
        (id,) = connection.execute("select id from enrichment_jobs limit 1").fetchone()
    return [[word.format(id=id, url=db.url) for word in words] for words in LOOKS]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_looking_changes_nothing_in_a_file_or_beside_it(tmp_path: Path, command: Command, mode: str, own: bool) -> None:
    db = made(tmp_path / "data", mode, own=own)
    command.app(db.url, "enrichment")
    words = looks(db)
    before = contents(tmp_path / "data")
    assert list(before) == ["jobs.db"]
    for each in words:
        ended = command(*each)
        assert ended.code in (0, 1, 3), (each, ended)  # check and stuck end with what they see
        assert contents(tmp_path / "data") == before, each


@contextmanager
def read_only(folder: Path) -> Iterator[list[str]]:
    """Makes a folder read-only; the words that go before a command. Permissions do not stop root, a mount does."""
    if os.geteuid() == 0:
        mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
        words = ["unshare", "-m", "sh", "-c", mount, str(folder)]
        if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
            pytest.skip("root without the right to mount: nothing is read-only here")
        yield words
        return
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555)
    try:
        yield []
    finally:
        folder.chmod(0o755)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


ALL = """
import json, sys
from rowmill.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["rowmill", *words]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    print("ENDED", words[0], code, flush=True)
"""


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_looking_works_on_read_only_media(tmp_path: Path, command: Command, mode: str, own: bool) -> None:
    db = made(tmp_path / "data", mode, own=own)
    command.app(db.url, "enrichment")
    words = looks(db)
    expected = [f"ENDED {each[0]} {command(*each).code or 0}" for each in words]
    with read_only(tmp_path / "data") as before:
        done = subprocess.run(
            [*before, sys.executable, "-c", ALL, json.dumps(words)],
            capture_output=True, text=True, timeout=120, env=environment(),
        )  # fmt: skip
    ended = [line for line in done.stdout.splitlines() if line.startswith("ENDED")]
    assert ended == expected, done.stdout + done.stderr


def test_a_log_that_cannot_be_read_without_writing_is_told(tmp_path: Path, command: Command) -> None:
    """Passing over the log would show rows as they were before it."""
    db = made(tmp_path / "data", "wal", own=False)
    command.app(db.url, "enrichment")
    with closing(sqlite3.connect(tmp_path / "data" / "jobs.db", isolation_level=None)) as open_:
        open_.execute("update enrichment_jobs set status = 'dead'")
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "copy" / "jobs.db-shm").unlink()
    command.app(f"sqlite:///{tmp_path}/copy/jobs.db", "enrichment")
    with read_only(tmp_path / "copy") as before:
        done = subprocess.run(
            [*before, sys.executable, "-m", "rowmill", "status"],
            capture_output=True, text=True, timeout=60, env=environment(),
        )  # fmt: skip
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1
    assert "jobs.db-wal" in told
    assert "Try:" in told


# -- a file that is deleted or replaced under a worker


async def _returns(_job: Job) -> None: ...


async def _finishes(job: Job) -> None:
    async with job.finish() as tx:
        await tx.execute("insert into runs (job_id, worker, attempt) values (1, 'x', 1)")


def file_of(db: Db) -> Path:
    return Path(db.url.removeprefix("sqlite:///"))


def there(db: Db) -> bool:
    return file_of(db).exists()


def take_away(db: Db, folder: Path) -> Path:
    """Moves the file out of the way, as a careless restore does; where it is now."""
    path = file_of(db)
    for each in path.parent.glob(f"{path.name}*"):
        each.rename(folder / each.name)
    return folder / path.name


@pytest.mark.parametrize("options", [{}, {"unfenced": True, "roles": {"worker": None, "claimed_at": None}}])
@pytest.mark.parametrize("way", [_returns, _finishes, "hook"])
@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
async def test_outcomes_do_not_go_to_a_file_that_is_gone(
    lite: Db, tmp_path: Path, replaced: bool, way: Any, options: dict[str, Any]
) -> None:
    """The run's outcome is lost, not written: neither to the old file nor to the new one, and it is not called done."""
    jobs(lite)
    mill = Mill(lite.url)
    seen = events_of(mill)
    running, go_on = asyncio.Event(), asyncio.Event()
    ran: list[Any] = []

    async def work(job: Job) -> None:
        ran.append(job["note"])
        if len(ran) == 1:
            running.set()
            await go_on.wait()
        await (_finishes if way is _finishes else _returns)(job)

    lane = mill.lane("jobs", name="jobs", **STATES, **options)(work)
    if way == "hook":
        lane.on_settled(lambda tx, settled: None)
    (tmp_path / "away").mkdir()
    (tmp_path / "new").mkdir()
    other = Db(f"sqlite:///{tmp_path}/new/other.db")
    jobs(other)  # a row with the same key: as if it were claimed, but not by this worker
    other.execute("update jobs set note = 'other', status = 'running', worker = 'w', heartbeat_at = '2999-01-01'")
    other.execute("pragma journal_mode = delete")
    async with working(mill) as worker:
        await asyncio.wait_for(running.wait(), 60)
        old = take_away(lite, tmp_path / "away")
        path = file_of(lite)
        if replaced:
            (tmp_path / "new" / "other.db").rename(path)
        go_on.set()
        await until(lambda: any(e.name == "environment_down" for e in seen))
        # A claim and an outcome that were under way at the same time both tell of it.
        for down in [e.fields for e in seen if e.name == "environment_down"]:
            assert str(path) in down["error"]
            assert ("replaced" if replaced else "deleted") in down["error"]
        if not replaced:
            assert not there(lite), "nothing makes an empty file of it"
            (tmp_path / "new" / "other.db").rename(path)
        await until(lambda: any(e.name == "environment_back" for e in seen))
        await asyncio.to_thread(add, lite)  # the worker may have the lock, and needs the loop to give it back
        await until(lambda: lite.query("select status from jobs where id = 2") == [{"status": "done"}])
        await until(lambda: (worker.counters.completed, worker.counters.losses) == (1, 1))
    assert worker.counters.completed == 1, "the row of the new file alone"
    names = [e.name for e in seen if e.name in ("environment_down", "environment_back")]
    assert names.index("environment_back") == len(names) - 1, "it is down once, and not again after it came back"
    row = lite.one("select * from jobs where id = 1")
    assert (row["status"], row["worker"], row["note"]) == ("running", "w", "other")
    assert lite.value("select count(*) from runs") == (1 if way is _finishes else 0)
    with closing(sqlite3.connect(old)) as connection:
        if way is not _finishes:
            assert connection.execute("select status from jobs").fetchall() == [("running",)]
    assert ran == [None, None]


async def test_an_idle_worker_notices_and_takes_up_the_rows_of_the_new_file(lite: Db, tmp_path: Path) -> None:
    """Without a poll: the watch sees that the file is another."""
    jobs(lite)
    mill = Mill(lite.url)
    seen = events_of(mill)
    mill.lane("jobs", name="jobs", **STATES)(_returns)
    async with working(mill) as worker:
        worker.environments[0]._poll = 3600.0
        await until(lambda: worker.counters.completed == 1)
        (tmp_path / "away").mkdir()
        take_away(lite, tmp_path / "away")
        await until(lambda: any(e.name == "environment_down" for e in seen))
        await asyncio.to_thread(jobs, lite, 3)
        await until(lambda: worker.counters.completed == 4)
    assert worker.counters.losses == 0
    assert lite.value("select count(*) from rowmill_workers") == 1


async def test_a_new_file_without_the_table_is_told_until_it_has_it(lite: Db, tmp_path: Path) -> None:
    jobs(lite)
    mill = Mill(lite.url)
    seen = events_of(mill)
    mill.lane("jobs", name="jobs", **STATES)(_returns)
    async with working(mill) as worker:
        await until(lambda: worker.counters.completed == 1)
        (tmp_path / "away").mkdir()
        take_away(lite, tmp_path / "away")
        lite.execute("create table other (id integer)")
        await until(lambda: any(e.name == "environment_wrong" for e in seen))
        await asyncio.to_thread(jobs, lite)
        await until(lambda: worker.counters.completed == 2)


async def test_a_client_goes_on_with_the_file_that_is_there(lite: Db, tmp_path: Path) -> None:
    """It holds no rows: it says so once, and then takes the new file."""
    jobs(lite)
    database = Database.open(lite.url)
    insert = "insert into jobs (note) values ('x')"
    await database.write(lambda run: run(insert, ()))
    (tmp_path / "away").mkdir()
    old = take_away(lite, tmp_path / "away")
    jobs(lite)
    with pytest.raises(Unreachable, match="was replaced"):
        await database.write(lambda run: run(insert, ()))
    await database.write(lambda run: run(insert, ()))
    await database.close()
    assert lite.value("select count(*) from jobs where note = 'x'") == 1
    with closing(sqlite3.connect(old)) as connection:
        assert connection.execute("select count(*) from jobs where note = 'x'").fetchone() == (1,)


async def test_a_commit_into_a_file_deleted_at_that_moment_is_not_believed(lite: Db, tmp_path: Path) -> None:
    jobs(lite)
    database = Database.open(lite.url)
    (tmp_path / "away").mkdir()

    def write(run: Any) -> None:
        run("update jobs set status = 'done'", ())
        take_away(lite, tmp_path / "away")

    with pytest.raises(Unreachable, match="was deleted"):
        await database.write(write)
    with pytest.raises(RowmillError, match="unable to open"):
        await database.write(lambda run: run("update jobs set status = 'done'", ()))
    assert not there(lite)
    await database.close()
