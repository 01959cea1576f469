"""A row that kills its process ends as dead by itself; the rows that were in the same process are done.

Why processes: the row kills the one that runs it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from test_supervisor import Run

from databases import Db
from quick_processes import QuickProcess
from rowmill import Mill
from rowmill.engine.recovery.running_marks import mark

COLUMNS = {
    "attempts": "worker text, claimed_at $time, heartbeat_at $time, attempts integer not null default 0",
    "reclaims": "worker text, claimed_at $time, heartbeat_at $time, reclaims integer, failures integer",
    "no counter": "worker text, heartbeat_at $time",
}
APP = """
import asyncio, os, sys
from datetime import timedelta as td
from rowmill import Mill

from rowmill.store.lane import row_watch
row_watch.BACKOFF = row_watch.LONGEST_BACKOFF = 0.1
mill = Mill(os.environ["DATABASE"])
STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}

@mill.lane("jobs", name="jobs", lease=td(seconds=1), sweep_every=td(seconds=0.2), poll=td(seconds=0.1),
           max_attempts=1, max_reclaims=2, **STATES, **OPTIONS)
async def work(job):
    with open(f"starts-{job.id}", "a") as starts:
        starts.write("x")
    if job.id == int(os.environ.get("KILLER", "300")):
        os._exit(9)
    await asyncio.sleep(TAKES)

if os.environ.get("CHUNK"):
    del mill.lanes["jobs"]

    @mill.lane("jobs", name="jobs", lease=td(seconds=1), sweep_every=td(seconds=0.2), poll=td(seconds=0.1),
               max_attempts=1, max_reclaims=2, chunk=int(os.environ["CHUNK"]), **STATES, **OPTIONS)
    async def chunked(jobs):
        with open("calls", "a") as calls:
            print(len(jobs), file=calls)
        if any(job.id == 300 for job in jobs):
            os._exit(9)
        await asyncio.sleep(TAKES)

@mill.task(max_attempts=1, max_reclaims=2, lease=td(seconds=1), heartbeat=td(seconds=0.2),
           sweep_every=td(seconds=0.2), poll=td(seconds=0.1))
async def tasked(n: int):
    if n == 20:
        os._exit(9)

if __name__ == "__main__":
    mill.run(worker_id=os.environ.get("WORKER"), drain=True, lanes=sys.argv[1:] or None)
"""


def prepare(db: Db, folder: Path, columns: str, rows: int, *, takes: float = 0, options: str = "") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text not null default 'ready', error text,"
        f" {COLUMNS[columns].replace('$time', time)})"
    )
    db.insert("jobs", [{"id": n} for n in range(1, rows + 1)])
    head = f"OPTIONS, TAKES = dict({options}), {takes}\n"
    (folder / "app.py").write_text(head + APP)


def restart_until_drained(db: Db, folder: Path, *lanes: str) -> int:
    """A worker that nobody supervises, started again by its operator; how often it died."""
    environment = {**os.environ, "DATABASE": db.url}
    words = [str(folder / "app.py"), *lanes]
    for deaths in range(20):
        worker = QuickProcess(words, errors=folder / "errors.log", folder=folder, environment=environment)
        if worker.wait(timeout=60) == 0:
            return deaths
    raise AssertionError("its rows never end")


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_row_that_kills_its_process_ends_alone(db: Db, tmp_path: Path, columns: str) -> None:
    """X1: 599 of 600 are done, and the killer is dead with a message that says why."""
    prepare(db, tmp_path, columns, 600)
    deaths = restart_until_drained(db, tmp_path, "jobs")
    assert db.query("select id from jobs where status <> 'done'") == [{"id": 300}]
    killer = db.one("select status, error from jobs where id = 300")
    assert killer["status"] == "dead"
    assert "taken back too often" in killer["error"]
    assert deaths <= 5


@pytest.mark.parametrize("columns", ["attempts", "reclaims"])
def test_a_row_that_kills_its_process_takes_no_row_of_its_chunk_along(
    db: Db, tmp_path: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 23: 100 rows are in the call that dies; fewer each time, until the killer is alone."""
    monkeypatch.setenv("CHUNK", "100")
    prepare(db, tmp_path, columns, 600)
    deaths = restart_until_drained(db, tmp_path, "jobs")
    assert db.query("select id from jobs where status <> 'done'") == [{"id": 300}]
    killer = db.one("select status, error from jobs where id = 300")
    assert killer["status"] == "dead"
    assert "taken back too often" in killer["error"]
    assert deaths <= 5
    sizes = [int(size) for size in (tmp_path / "calls").read_text().split()]
    assert max(sizes) == 100
    assert 1 in sizes


def test_rows_that_ran_beside_a_killer_are_done(db: Db, tmp_path: Path) -> None:
    """X1: with many runs at a time that all take a while."""
    prepare(db, tmp_path, "attempts", 60, takes=0.05, options="concurrency=20")
    (tmp_path / "app.py").write_text((tmp_path / "app.py").read_text().replace('"300"', '"30"'))
    restart_until_drained(db, tmp_path, "jobs")
    assert db.query("select id from jobs where status <> 'done'") == [{"id": 30}]


def test_a_task_that_kills_its_process_ends_alone(db: Db, tmp_path: Path) -> None:
    """X1: on rowmill_jobs, too."""
    prepare(db, tmp_path, "attempts", 0)
    code = (
        "import asyncio, app\n"
        "async def main():\n"
        "    await app.mill.prepare()\n"
        "    for n in range(40):\n"
        "        await app.tasked.enqueue(n=n)\n"
        "    await app.mill.close()\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "DATABASE": db.url}, check=True)
    restart_until_drained(db, tmp_path)
    states = {row["state"]: row["n"] for row in db.query("select state, count(*) as n from rowmill_jobs group by 1")}
    assert states == {"done": 39, "dead": 1}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(db: Db, *options: str) -> Run:
        runs.append(Run(tmp_path, db, *options))
        return runs[-1]

    yield start
    for each in runs:
        each.close()


def test_under_a_supervisor_rows_that_had_not_started_are_not_counted(
    db: Db, tmp_path: Path, run: Callable[..., Run]
) -> None:
    """X1: they go back at once, as if they had never been claimed."""
    prepare(db, tmp_path, "reclaims", 600, options="concurrency=2")
    assert run(db, "--drain", "--lanes", "jobs").wait(120) == 3  # rows died
    assert db.query("select id from jobs where status <> 'done'") == [{"id": 300}]
    counted = db.query("select id from jobs where reclaims > 0 and id <> 300")
    assert len(counted) <= 1, "only what ran beside it"


def test_under_a_supervisor_only_the_rows_of_the_call_are_counted(
    db: Db, tmp_path: Path, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 23: of a chunk, those whose call was under way; of two at most, what waited for a slot not at all."""
    monkeypatch.setenv("CHUNK", "50")
    prepare(db, tmp_path, "reclaims", 600, options="concurrency=1")
    assert run(db, "--drain", "--lanes", "jobs").wait(120) == 3  # rows died
    assert db.query("select id from jobs where status <> 'done'") == [{"id": 300}]
    counted = db.value("select count(*) from jobs where reclaims > 0 and id <> 300")
    assert 0 < counted <= 49, "only what was in the same call"


def test_every_process_gives_a_row_the_same_mark() -> None:
    """What one process wrote down before it died, the next one reads: not Python's hash, which differs by process."""
    keys: list[tuple[Any, ...]] = [(7,), (-7,), (UUID(int=3**70),), ("a",), ("a", 1), (b"x",)]
    assert [mark(key, 5) for key in keys] == [2, -4, 2294155578956035164, 3904355910, 2745452494, 3219774993]


async def test_rows_of_a_dead_worker_get_through_a_pace(db: Db) -> None:
    """A claim that gives suspects back has used up the pace: they must run by that very claim, or never would."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text, worker text, reclaims integer default 0,"
        f" claimed_at {time}, heartbeat_at {time})"
    )
    long_ago = datetime.now(UTC) - td(hours=1)
    gone = {"status": "running", "worker": "gone", "claimed_at": long_ago, "heartbeat_at": long_ago}
    db.insert("jobs", [{"id": i, **gone} for i in range(1, 4)])
    mill = Mill(db.url)
    states = {state: {"status": state} for state in ("ready", "running", "done", "dead")}

    @mill.lane("jobs", name="jobs", max_attempts=1, pace=(3, td(seconds=1)), **states)
    async def handle(job: Any) -> None: ...

    async with asyncio.timeout(60):
        await mill.worker(drain=True).run()
    assert db.value("select count(*) from jobs where status = 'done'") == 3
