"""Rows of a killed process run again at once: the lease of five minutes is for those whose death nobody can see.

Why processes: they are killed with SIGKILL, alone or with their supervisor.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from databases import Db
from farm import JOBS
from quick_processes import QuickProcess
from waiting import eventually

APP = """
import asyncio, os
from pathlib import Path
from rowmill import Mill

mill = Mill(os.environ["DATABASE"])

@mill.lane(
    "jobs", name="jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
    dead={"status": "dead"}, concurrency=int(os.environ["CONCURRENCY"]),
)
async def work(job):
    with open("starts", "a") as file:
        file.write(f"{job.id} {os.getpid()}\\n")
    if job["note"] == "kill":
        os._exit(9)
    while job["note"] != "quick" and not Path("go").exists():
        await asyncio.sleep(0.02)
"""


class Supervised:
    """One ``rowmill run`` with its children."""

    def __init__(self, folder: Path, db: Db, name: str, processes: int, concurrency: int) -> None:
        self.log = folder / f"log-{name}"
        self.log.touch()
        self.process = QuickProcess(
            ["rowmill", "run", "app:mill", "--log", "json", "--log-level", "debug", "--worker-id", name,
             "--processes", str(processes), "--grace", "60"],
            module="rowmill", folder=folder, errors=self.log, output=folder / "out",
            environment={**os.environ, "DATABASE": db.url, "CONCURRENCY": str(concurrency)},
        )  # fmt: skip

    def events(self, *names: str) -> list[dict[str, Any]]:
        """What was logged under these names."""
        whole = [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in map(json.loads, whole) if event["event"] in names]

    def children(self) -> dict[str, int]:
        """The process of each worker id."""
        return {event["worker"]: event["pid"] for event in self.events("process_started")}

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.children().values():
            kill(pid)


def kill(pid: int) -> None:
    """SIGKILL, where it is still a worker of ours."""
    path = Path(f"/proc/{pid}/cmdline")
    if path.exists() and b"--child" in path.read_bytes():
        os.kill(pid, signal.SIGKILL)


Start = Callable[..., Supervised]


@pytest.fixture
def start(db: Db, tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "app.py").write_text(APP)
    db.execute(JOBS[db.dialect])
    made: list[Supervised] = []

    def run(name: str, processes: int = 1, concurrency: int = 20) -> Supervised:
        made.append(Supervised(tmp_path, db, name, processes, concurrency))
        return made[-1]

    yield run
    for each in made:
        each.close()


def starts(folder: Path) -> list[tuple[int, int]]:
    """Every start of a handler: row and process."""
    file = folder / "starts"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(row), int(pid)) for row, pid in map(str.split, lines)]


def done(db: Db) -> int:
    return int(db.value("select count(*) from jobs where status = 'done'"))


def test_rows_of_a_killed_child_run_again_in_another_child_at_once(db: Db, start: Start, tmp_path: Path) -> None:
    """The supervisor reports the death. Rows that ran are counted as taken back, and nothing waits for a successor."""
    here = start("w", processes=2, concurrency=8)
    eventually(lambda: len(here.events("worker_started")) == 2, 60)
    db.insert("jobs", [{"note": "hold"} for _ in range(8)])
    eventually(lambda: len(starts(tmp_path)) == 8, 60)
    children = here.children()
    held = {worker: {row for row, by in starts(tmp_path) if by == pid} for worker, pid in children.items()}
    worker = max(held, key=lambda worker: len(held[worker]))  # the other one has as many places free
    rows, pid = held[worker], children[worker]
    os.kill(pid, signal.SIGKILL)
    (other,) = set(children.values()) - {pid}
    eventually(lambda: {row for row, holder in starts(tmp_path) if holder == other} == set(range(1, 9)), 60)
    (dead,) = here.events("worker_dead")
    assert (dead["worker"], dead["presumed"]) == (worker, False)
    assert {event["id"] for event in here.events("row_swept")} == rows
    (tmp_path / "go").touch()
    eventually(lambda: done(db) == 8, 60)
    assert not here.events("claim_lost")


def test_a_killed_host_loses_nothing_where_another_run_is_alive_on_it(db: Db, start: Start, tmp_path: Path) -> None:
    """Supervisor and children at once: the kernel tells the other run, long before the lease."""
    victims = start("victim", processes=2, concurrency=3)
    eventually(lambda: len(victims.events("worker_started")) == 2, 60)
    db.insert("jobs", [{"note": "hold"} for _ in range(6)])
    eventually(lambda: len(starts(tmp_path)) == 6, 60)
    other = start("other", concurrency=10)
    eventually(lambda: other.events("worker_started"), 60)
    victims.process.kill()
    pids = victims.children().values()
    for pid in pids:
        kill(pid)
    (tmp_path / "go").touch()
    eventually(lambda: done(db) == 6, 60)
    assert {event["worker"] for event in other.events("worker_dead")} == {"victim-1", "victim-2"}


def test_a_row_that_kills_its_process_ends_dead_over_time_and_holds_up_no_other(
    db: Db, start: Start, tmp_path: Path
) -> None:
    """Poison stays poison: from the third time on it waits before it runs, longer each time."""
    here = start("w", processes=2, concurrency=4)
    eventually(lambda: len(here.events("worker_started")) == 2, 60)
    db.insert("jobs", [{"note": "kill"}])
    eventually(lambda: len(here.events("row_swept")) >= 3, 60)
    waits = f"select {wait_of(db)} as wait from jobs where id = 1"
    eventually(lambda: (db.value(waits) or 0) > 1.0, 60)  # of the five seconds
    db.insert("jobs", [{"note": "quick"} for _ in range(20)])
    eventually(lambda: done(db) == 20, 60)
    assert len([row for row, _ in starts(tmp_path) if row == 1]) <= 4


def wait_of(db: Db) -> str:
    """Seconds until the row may run."""
    if db.dialect == "postgresql":
        return "extract(epoch from run_after - now())::float8"
    return "(julianday(run_after) - julianday('now')) * 86400"
