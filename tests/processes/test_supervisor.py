"""``rowmill run``: worker processes under a supervisor, killed, stopped, drained, and declared wrongly.

Why processes: the supervisor starts them, and its own signals and exit codes are what is tested.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from databases import Db
from quick_processes import QuickProcess

JOBS = """
create table jobs (
  id integer primary key, what text not null, status text not null default 'queued',
  attempts integer not null default 0, worker text, claimed_at datetime, heartbeat_at datetime, error text
);
"""

APP = """
import asyncio, os, threading, time
from datetime import timedelta as td
from pathlib import Path
from rowmill import Cancel, Dead, Mill

mill = Mill(os.environ["DATABASE"])
OPTIONS = dict(
    running={"status": "running"}, done={"status": "done"}, dead={"status": "dead"},
    lease=td(seconds=1), sweep_every=td(seconds=0.3), poll=td(seconds=0.5),
)

@mill.lane("jobs", name="work", ready={"status": "queued"}, concurrency=2, **OPTIONS)
async def work(job):
    Path(f"began-{job.id}").touch()
    if job["what"] == "die":
        raise Dead("it is no good")
    if job["what"] == "cancel":
        raise Cancel("not wanted")
    if job["what"] == "block":
        time.sleep(600)
    while job["what"] == "hold" and not Path(f"go-{job.id}").exists():
        await asyncio.sleep(0.02)

THREADED = {**OPTIONS, "running": {"status": "in a thread"}}

@mill.lane("jobs", name="threads", ready={"status": "threaded"}, concurrency=1, timeout=td(seconds=0.3), **THREADED)
def threads(job):
    if job.attempt == 1:
        threading.Event().wait()
"""


class Run:
    """One ``rowmill run`` with debug logs; ended, with its children, by their ids."""

    def __init__(self, folder: Path, db: Db, *options: str, app: str = "app:mill", form: str = "json") -> None:
        self.db, self.folder = db, folder
        self.log, self.out = folder / f"log-{os.urandom(3).hex()}", folder / "out"
        self.log.touch()
        self.process = QuickProcess(
            ["rowmill", "run", app, "--log", form, "--log-level", "debug", *options], module="rowmill",
            folder=folder, environment={**os.environ, "DATABASE": db.url}, errors=self.log, output=self.out,
        )  # fmt: skip

    def events(self, name: str) -> list[dict[str, Any]]:
        """What was logged under that name."""
        whole = [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in map(json.loads, whole) if event["event"] == name]

    def pids(self) -> list[int]:
        """The children, as they were started."""
        return [event["pid"] for event in self.events("process_started")]

    def at_work(self, count: int = 1) -> None:
        """Wait until that many children have begun to serve, in all."""
        self.until(lambda: len(self.events("worker_started")) >= count)

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"did not come true in time; the log:\n{self.log.read_text()}"
            time.sleep(0.02)

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(timeout=seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for line in self.log.read_text().splitlines():
            if '"process_started"' in line and lives(pid := json.loads(line)["pid"]):
                os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    """Whether that child is a process, and not only one that nobody has buried."""
    try:
        return b"--child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def heard(pid: int) -> bool:
    """Whether no SIGTERM waits to be delivered: a second one would melt into it."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return not any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


@pytest.fixture
def jobs(lite: Db, tmp_path: Path) -> Db:
    lite.execute(JOBS)
    (tmp_path / "app.py").write_text(APP)
    return lite


MakeRun = Callable[..., Run]


@pytest.fixture
def run(jobs: Db, tmp_path: Path) -> Iterator[MakeRun]:
    made: list[Run] = []

    def make(*options: str, **others: str) -> Run:
        made.append(Run(tmp_path, jobs, *options, **others))
        return made[-1]

    yield make
    for each in made:
        each.close()


def add(db: Db, *what: str, **columns: Any) -> list[int]:
    return db.insert("jobs", [{"what": kind, **columns} for kind in what])


def statuses(db: Db) -> list[str]:
    return [row["status"] for row in db.query("select status from jobs order by id")]


def workers(db: Db) -> dict[str, tuple[int, str]]:
    return {row["id"]: (row["pid"], row["state"]) for row in db.query("select id, pid, state from rowmill_workers")}


def test_a_killed_child_is_started_again_under_its_id_and_its_rows_are_finished(
    jobs: Db, run: MakeRun, tmp_path: Path
) -> None:
    """A13, X2: the successor takes the id at once; what the dead one held comes back with its lease."""
    add(jobs, "hold", "hold", "hold", "hold")
    here = run("--processes", "2", "--worker-id", "w")
    here.until(lambda: statuses(jobs) == ["running"] * 4)
    first, second = here.pids()
    ids = {pid: name for name, (pid, _) in workers(jobs).items()}
    assert set(ids.values()) == {"w-1", "w-2"}
    os.kill(first, signal.SIGKILL)
    here.at_work(3)
    (died,) = here.events("process_died")
    assert (died["worker"], died["how"], died["restart_in"]) == (ids[first], "killed by SIGKILL", 0.5)
    third = here.pids()[2]
    assert {name: pid for name, (pid, _) in workers(jobs).items()} == {ids[first]: third, ids[second]: second}
    for n in range(1, 5):
        (tmp_path / f"go-{n}").touch()
    here.until(lambda: statuses(jobs) == ["done"] * 4)
    here.process.send_signal(signal.SIGTERM)
    assert here.wait() == 0
    assert {state for _, state in workers(jobs).values()} == {"stopped"}
    (ended,) = here.events("run_ended")
    assert (ended["done"], ended["dead"]) == (4, 0)


def test_the_first_sigterm_lets_runs_finish_and_gives_the_rest_back_unharmed(
    jobs: Db, run: MakeRun, tmp_path: Path
) -> None:
    """No attempt is lost by a stop."""
    add(jobs, *["hold"] * 5)
    here = run("--grace", "1.5")
    here.until(lambda: statuses(jobs)[:2] == ["running"] * 2 and (tmp_path / "began-2").exists())
    here.process.send_signal(signal.SIGTERM)
    here.until(lambda: here.events("stopping"))
    (tmp_path / "go-1").touch()
    assert here.wait() == 0
    assert statuses(jobs) == ["done", "queued", "queued", "queued", "queued"]
    back = jobs.query("select attempts, worker, claimed_at from jobs where status = 'queued'")
    assert all(row == {"attempts": 0, "worker": None, "claimed_at": None} for row in back)
    assert not here.events("process_killed")


def test_the_second_sigterm_stops_at_once_and_still_gives_back(jobs: Db, run: MakeRun) -> None:
    """At once, in good order; and by its exit code no script takes a stopped drain for a finished one."""
    add(jobs, "hold", "hold")
    here = run("--drain", "--grace", "600")
    here.until(lambda: statuses(jobs) == ["running"] * 2)
    here.process.send_signal(signal.SIGTERM)
    (child,) = here.pids()
    here.until(lambda: here.events("stopping") and heard(child))
    assert here.process.poll() is None
    here.process.send_signal(signal.SIGTERM)
    assert here.wait(60) == 128 + signal.SIGTERM
    assert jobs.query("select distinct status, attempts from jobs") == [{"status": "queued", "attempts": 0}]


def test_the_third_signal_kills_what_does_not_listen(jobs: Db, run: MakeRun) -> None:
    """A handler that blocks its event loop cannot be asked."""
    add(jobs, "block")
    here = run("--grace", "600")
    here.until(lambda: (here.folder / "began-1").exists())
    for count in (1, 2):
        here.process.send_signal(signal.SIGINT)
        here.until(lambda count=count: len(here.events("stopping")) == count)
    here.process.send_signal(signal.SIGINT)
    assert here.wait(60) == 0
    (child,) = here.pids()
    assert [event["pid"] for event in here.events("process_killed")] == [child]
    assert not lives(child)


def test_a_drain_ends_with_0_and_says_what_was_done(jobs: Db, run: MakeRun) -> None:
    """A person gets a sentence, a script a document."""
    add(jobs, "quick", "quick")
    here = run("--drain", "--processes", "2", "--json", form="console")
    assert here.wait() == 0
    assert json.loads(here.out.read_text()) == {
        "drained": True, "done": 2, "failed": 0, "dead": 0, "canceled": 0, "held_back": [], "waiting": [],
        "elsewhere": [],
    }  # fmt: skip
    assert "Drained: 2 done, 0 failed attempts, 0 dead; nothing is ready or running.\n" in here.log.read_text()
    assert all(re.fullmatch(rf".+-{here.process.pid}-[0-9a-z]{{4}}", name) for name in workers(jobs))


def test_a_drain_that_found_nothing_says_so_and_where_the_rows_are(jobs: Db, run: MakeRun) -> None:
    """A misspelled state is no success."""
    add(jobs, "quick", "quick", status="quueued")
    here = run("--drain", "--json", form="console")
    assert here.wait() == 0
    hint = "2 rows of table 'jobs' are in no state of any lane (status = 'quueued': 2)"
    assert here.log.read_text().endswith(f"\nNothing was ready.\n{hint}\n")
    (elsewhere,) = json.loads(here.out.read_text())["elsewhere"]
    assert (elsewhere["table"], elsewhere["rows"]) == ("jobs", 2)
    logged = run("--drain")
    assert logged.wait() == 0
    assert logged.events("run_ended")[0]["hint"] == hint


def test_a_drain_that_only_canceled_counts_it(jobs: Db, run: MakeRun) -> None:
    """Without a state for it a canceled row is dead: logged with its reason, counted, and in the exit code."""
    add(jobs, "cancel")
    here = run("--drain", form="console")
    assert here.wait() == 3
    log = here.log.read_text()
    assert "Drained: 0 done, 1 failed attempt, 1 dead; nothing is ready or running.\n" in log
    (line,) = [line for line in log.splitlines() if "job_failed" in line]
    assert "outcome=canceled" in line
    assert 'error="not wanted"' in line


def test_a_child_killed_in_a_drain_is_started_again_so_that_its_rows_are_finished(
    jobs: Db, run: MakeRun, tmp_path: Path
) -> None:
    """X2: 3 says that rows died, also those that a child settled before it was killed."""
    add(jobs, "die", "hold")
    here = run("--drain", "--concurrency", "1")
    here.until(lambda: (tmp_path / "began-2").exists())  # one at a time: the first is settled, and counted
    os.kill(here.pids()[0], signal.SIGKILL)
    (tmp_path / "go-2").touch()
    assert here.wait() == 3
    assert statuses(jobs) == ["dead", "done"]
    assert len(here.pids()) == 2


def test_a_wrong_declaration_is_said_once_and_ends_everything(jobs: Db, run: MakeRun, tmp_path: Path) -> None:
    """Two lines, no traceback, whichever of the children found it."""
    (tmp_path / "app.py").write_text(APP.replace('mill.lane("jobs"', 'mill.lane("job"'))
    here = run("--processes", "2", form="console")
    assert here.wait() == 1
    text = here.log.read_text()
    assert text.count("Error: ") == 1
    assert "there is no table 'job'" in text
    assert "Try: did you mean 'jobs'?" in text
    assert "Traceback" not in text


def test_an_application_that_cannot_be_loaded_starts_nothing(jobs: Db, run: MakeRun) -> None:
    """It is looked at before any process is started."""
    here = run(app="app:miller", form="console")
    assert here.wait() == 1
    assert here.log.read_text() == "Error: 'app:miller': 'miller' does not exist\nTry: did you mean 'mill'?\n"


def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on(jobs: Db, run: MakeRun) -> None:
    """A13: the second run ends; the first does not notice."""
    first = run("--worker-id", "same")
    first.at_work()
    second = run("--worker-id", "same")
    assert second.wait() == 1
    (failed,) = second.events("run_failed")
    assert f"pid {first.pids()[0]}" in failed["error"]
    assert lives(first.pids()[0])
    assert not first.events("process_died")


def test_children_stop_by_themselves_when_their_supervisor_is_killed(jobs: Db, run: MakeRun, tmp_path: Path) -> None:
    """X2: the line to the supervisor ends; runs finish, and nothing new is claimed."""
    add(jobs, *["hold"] * 3)
    here = run("--worker-id", "w")
    here.until(lambda: (tmp_path / "began-1").exists() and (tmp_path / "began-2").exists())
    (child,) = here.pids()
    here.process.kill()
    here.until(lambda: here.events("supervisor_gone"))
    for n in (1, 2):
        (tmp_path / f"go-{n}").touch()
    here.until(lambda: not lives(child))
    assert statuses(jobs) == ["done", "done", "queued"]
    assert workers(jobs) == {"w": (child, "stopped")}


def test_a_run_that_cannot_be_stopped_costs_its_process_and_the_successor_finishes_the_row(
    jobs: Db, run: MakeRun
) -> None:
    """Recycled at once, although a thread would have kept the process for ever."""
    add(jobs, "stuck", status="threaded")
    here = run("--lanes", "threads", "--grace", "0.3")
    here.until(lambda: statuses(jobs) == ["done"])
    (died,) = here.events("process_died")
    assert (died["how"], died["restart_in"]) == ("recycled", 0.0)
    here.process.send_signal(signal.SIGTERM)
    assert here.wait() == 0
