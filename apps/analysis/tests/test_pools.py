"""Queues and processors: who works on what, never two on one, and a health check that sets things right."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from apps.analysis.phases import PHASES
from apps.analysis.processors import Processor, Processors
from apps.analysis.settings import Settings
from apps.analysis.tests import world
from apps.standins import sites
from apps.standins.internet import Internet
from databases import Db
from rowmill import Event, Job, Mill
from waiting import eventually

NAMES = [phase.name for phase in PHASES]


@dataclass
class Run:
    """One run, as its processor saw it."""

    job: str
    phase: str
    worker: str
    slot: str
    start: float
    end: float = 0.0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Every run from now on."""
    seen: list[Run] = []
    original = Processors.working

    @contextmanager
    def working(self: Processors, job: Job) -> Iterator[Processor]:
        run = Run(str(job.id), job.lane, job.worker, job.slot, time.monotonic())
        seen.append(run)
        try:
            with original(self, job) as processor:
                yield processor
        finally:
            run.end = time.monotonic()

    monkeypatch.setattr(Processors, "working", working)
    return seen


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until something holds."""
    await asyncio.to_thread(eventually, condition, seconds)


@contextmanager
def heard(mill: Mill, name: str) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []

    @mill.on_event
    def hear(event: Event) -> None:
        if event.name == name:
            found.append(dict(event.fields))

    yield found


def overlap(spans: list[Run]) -> bool:
    ordered = sorted(spans, key=lambda run: run.start)
    return any(later.start < earlier.end for earlier, later in pairwise(ordered))


async def test_a_job_is_in_one_queue_once_and_with_one_processor_at_a_time(
    jobs: Db, settings: Settings, net: Internet, runs: list[Run]
) -> None:
    """E3: with two workers at the same rows no job is run twice in a phase, in two phases at once, or by two
    processors; and no processor has two jobs.
    """
    # A run that times out is rightly run again: here none may, however busy the machine is.
    settings = replace(settings, stuck_seconds=120)
    net.default = sites.page(latency=0.3)  # so that the first worker cannot take all
    keys = world.insert(jobs, 25)
    workers = [world.mill_on(jobs, settings).worker(worker_id=f"w{n}") for n in (1, 2)]
    working = asyncio.gather(*(worker.run() for worker in workers))
    await until(lambda: world.counts(jobs) == {"completed": 25})
    for worker in workers:
        worker.stop()
    await working
    by_job, by_processor = defaultdict(list), defaultdict(list)
    for run in runs:
        by_job[run.job].append(run)
        by_processor[run.worker, run.slot].append(run)
    assert {job: [run.phase for run in found] for job, found in by_job.items()} == dict.fromkeys(keys, NAMES)
    assert not any(overlap(found) for found in (*by_job.values(), *by_processor.values()))
    assert {run.worker for run in runs} == {"w1", "w2"}


async def test_ten_processors_a_phase_and_it_is_known_which_has_which_job(
    pg_jobs: Db, settings: Settings, net: Internet, runs: list[Run]
) -> None:
    """E3, E4: 10 at once and no more, named ``{phase}-processor-{n}``; a job that is released goes back."""
    net.default = sites.page(latency=20)
    keys = world.insert(pg_jobs, 13)
    mill = world.mill_on(pg_jobs, settings)
    worker = mill.worker(worker_id="w1", grace=0.1)
    working = asyncio.create_task(worker.run())
    await until(lambda: len(runs) == 10)
    reported = "select count(*) from \"AnalysisWorker\" where report::text like '%busy%'"
    await until(lambda: pg_jobs.value(reported))
    assert len(runs) == 10  # the other three wait in the table, free for others
    assert sorted(run.slot for run in runs) == sorted(f"{NAMES[0]}-processor-{n}" for n in range(1, 11))
    held = pg_jobs.query('select id, "lockedBy" as worker from "AnalysisJob" where "inProgress"')
    assert {row["id"] for row in held} == {run.job for run in runs} == set(keys[:10])
    assert all(row["worker"].startswith("w1") for row in held)
    worker.stop()
    await working
    free = 'select count(*) from "AnalysisJob" where not "inProgress" and "retryCount" = 0 and status = \'not-started\''
    assert pg_jobs.value(free) == 13


async def test_the_health_check_resets_processors_in_error_and_reports(
    jobs: Db, settings: Settings, net: Internet
) -> None:
    """E4: idle, busy, error; the check, every so often, makes those in error idle again, and says so."""
    assert Settings().health_seconds == 30
    net.sites["broken.example"] = sites.refusing(500)
    world.insert(jobs, url="https://broken.example/")
    mill = world.mill_on(jobs, replace(settings, backoff_seconds=60))
    worker = mill.worker(worker_id="w1")
    with heard(mill, "health_checked") as checks:
        working = asyncio.create_task(worker.run())
        name = f"{NAMES[0]}-processor-1"
        await until(lambda: any(check["reset"] for check in checks))
        await until(lambda: checks[-1]["reset"] == [])
        worker.stop()
        await working
    (reset,) = [check["reset"] for check in checks if check["reset"]]
    assert reset == [name]
    assert checks[-1]["idle"] == 30


@pytest.mark.parametrize(("batch", "starts", "taken"), [(10, 20, [10]), (4, 20, [4, 4, 2]), (10, 3, [3])])
async def test_a_discovery_takes_a_batch_as_far_as_the_pace_lets_it(
    jobs: Db, settings: Settings, net: Internet, batch: int, starts: int, taken: list[int]
) -> None:
    """E2, E3: with a batch of 10 and a pace that allows them, ten rows in one claim; the others stay free."""
    net.default = sites.page(latency=60)
    world.insert(jobs, 13)
    mill = world.mill_on(jobs, replace(settings, batch=batch, pace_starts=starts, pace_seconds=600, stuck_seconds=120))
    worker = mill.worker(worker_id="w1", grace=0.1)
    with heard(mill, "batch_claimed") as claims:
        working = asyncio.create_task(worker.run())
        await until(lambda: sum(claim["batch_claimed_count"] for claim in claims) == sum(taken))
        held = jobs.value('select count(*) from "AnalysisJob" where "inProgress" and "lockedBy" is not null')
        worker.stop()
        await working
    assert [claim["batch_claimed_count"] for claim in claims] == taken
    assert held == sum(taken)
    assert jobs.value('select count(*) from "AnalysisJob" where not "inProgress" and "retryCount" = 0') == 13


async def test_a_worker_without_a_job_reports_its_health_until_it_stops(jobs: Db, settings: Settings) -> None:
    """E4, E8: every so often from its start on; and no longer than it lives."""
    mill = world.mill_on(jobs, replace(settings, health_seconds=0.05))
    with heard(mill, "health_checked") as checks:
        worker = mill.worker(worker_id="w1")
        working = asyncio.create_task(worker.run())
        await until(lambda: len(checks) > 2)
        worker.stop()
        await working
        names = {task.get_coro().__qualname__ for task in asyncio.all_tasks() if not task.cancelling()}
    assert checks[0] == {"worker": "w1", "idle": 30, "busy": 0, "error": 0, "reset": [], "stuck": []}
    assert "Processors.check_on" not in names


async def test_a_stuck_processor_is_freed_and_its_job_goes_back(
    jobs: Db, settings: Settings, net: Internet, runs: list[Run]
) -> None:
    """E4, E6: a run that does not end within the limit is stopped, its row released with retryCount + 1."""
    net.sites["slow.example"] = sites.page(latency=60)
    (key,) = world.insert(jobs, url="https://slow.example/")
    hurried = replace(settings, stuck_seconds=1, fetch_seconds=50, backoff_seconds=60)
    mill = world.mill_on(jobs, hurried)
    worker = mill.worker(worker_id="w1")
    with heard(mill, "health_checked") as checks:
        working = asyncio.create_task(worker.run())
        await until(lambda: world.row(jobs, key)["retryCount"] == 1)
        await until(lambda: any(check["reset"] for check in checks))
        worker.stop()
        await working
    found = world.row(jobs, key)
    assert (found["inProgress"], found["status"]) == (False, "not-started")
    assert [(run.job, run.slot) for run in runs] == [(key, f"{NAMES[0]}-processor-1")]
    assert 0.9 < runs[0].end - runs[0].start < 20


def test_what_a_processor_does_is_told_at_every_moment() -> None:
    """E4: idle, busy with a job, in error with the reason; an outcome of a handler's own is no error."""
    from types import SimpleNamespace

    from rowmill import Snooze
    from rowmill.events import Events

    async def main() -> None:
        pool = Processors("w", ["a", "b"], 2, stuck=0.0, every=30, events=Events())
        job: Any = SimpleNamespace(worker="w", slot="b-processor-2", id=7)
        told = lambda: next(p for p in pool.report()["processors"] if p["name"] == job.slot)  # noqa: E731
        assert len(pool.all) == 4
        with pool.working(job):
            assert (told()["state"], told()["job"]) == ("busy", "7")
            assert pool.check()["stuck"] == ["b-processor-2"]
        assert told()["state"] == "idle"
        with pytest.raises(Snooze), pool.working(job):
            raise Snooze(1)
        assert told()["state"] == "idle"
        with pytest.raises(OSError, match="down"), pool.working(job):
            raise OSError("down")
        assert (told()["state"], told()["error"], told()["job"]) == ("error", "OSError: down", None)
        assert pool.check() == {"idle": 4, "busy": 0, "error": 0, "reset": ["b-processor-2"], "stuck": []}

    asyncio.run(main())
