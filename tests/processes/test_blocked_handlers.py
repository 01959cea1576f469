"""Handlers that block their process's event loop, and handlers whose own process starts slowly.

Why processes: a blocked loop can be seen, and ended, from outside alone.
"""

from __future__ import annotations

import glob
import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from test_supervisor import JOBS, Run

from databases import Db
from workers import events_of

HEAD = """
import os, time
from datetime import timedelta as td
from rowmill import Mill, fixed

mill = Mill(os.environ["DATABASE"])
STATES = {
    kind: {"status": name} for kind, name in dict(ready="queued", running="running", done="done", dead="dead").items()
}
"""

BLOCKS = """
@mill.lane("jobs", name="work", concurrency=1, timeout=td(seconds=0.5), lease=td(seconds=2),
           sweep_every=td(seconds=0.3), poll=td(seconds=0.3), **STATES)
async def work(job):
    while job.id == 1 and job.attempt == 1:
        pass
"""

#: What a handler's module imports takes its time, in the handler's process alone.
SLOW = """
if os.environ["PARENT"] != str(os.getpid()):
    time.sleep(60)

@mill.lane("jobs", name="slow", isolation="process", roles={"heartbeat_at": None}, lease=td(seconds=6),
           max_attempts=1, **STATES)
def slow(job):
    (job.workdir / "begun").touch()
    time.sleep(60)
"""

MakeApp = Callable[[Db, str], ModuleType]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeApp:
    """An application that a handler's process can import, too."""

    def make(db: Db, lanes: str) -> ModuleType:
        monkeypatch.setenv("DATABASE", db.url)
        monkeypatch.setenv("PARENT", str(__import__("os").getpid()))
        name = f"attacked_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(HEAD + lanes)
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module(name)

    return make


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(db: Db, lanes: str, *options: str) -> Run:
        (tmp_path / "app.py").write_text(HEAD + lanes)
        runs.append(Run(tmp_path, db, *options))
        return runs[-1]

    yield start
    for each in runs:
        each.close()


def test_a_process_whose_loop_is_blocked_for_good_is_started_again(lite: Db, run: Callable[..., Run]) -> None:
    """X1: past timeout and grace; with its heartbeat it would hold its row for ever."""
    lite.execute(JOBS)
    lite.insert("jobs", [{"what": "block"}, {"what": "wait"}])
    here = run(lite, BLOCKS, "--grace", "0.5")
    here.until(lambda: lite.value("select count(*) from jobs where status = 'done'") == 2)
    (told,) = here.events("worker_recycled")
    assert "blocks the event loop" in json.dumps(told)
    assert len(here.pids()) == 2


async def test_a_slow_start_of_a_handlers_process_is_the_leases_time(lite: Db, app: MakeApp) -> None:
    """X1: a lease that nobody renews began with the claim; the run ends before it does, and leaves nothing behind."""
    lite.execute(JOBS)
    lite.insert("jobs", [{"what": "wait"}])
    mill = app(lite, SLOW).mill
    seen, times = events_of(mill), dict[str, float]()
    mill.on_event(lambda event: times.setdefault(event.name, time.monotonic()) and None)
    before = set(glob.glob(f"{tempfile.gettempdir()}/rowmill-slow-*"))
    await mill.worker(drain=True).run()
    assert lite.value("select error from jobs") == "timed out after 5.4 s"
    (failed,) = [event for event in seen if event.name == "job_failed"]
    assert failed
    assert times["job_failed"] - times["batch_claimed"] < 60, "nobody waited for the process to begin"
    assert set(glob.glob(f"{tempfile.gettempdir()}/rowmill-slow-*")) == before
