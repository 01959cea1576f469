"""The whole application in real processes: 200 sites, a worker killed in each phase, a model that throttles."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from apps.analysis.phases import PHASES
from apps.analysis.tests import world
from apps.analysis.tests.world import Workers
from apps.standins import sites
from apps.standins.internet import Internet
from apps.standins.model import Model, throttling
from databases import Db, as_time
from waiting import eventually

SITES = 200
#: These fail by rule: given up at once, or after three tries.
BAD = {"gone.example": 404, "broken.example": 500, "shut.example": 403, "sick.example": 502}


def kill_in_the_middle(db: Db, workers: Workers, name: str, status: str) -> set[str]:
    """kill -9 while the worker holds rows of a phase: which ones. It stands still for the look, so it holds them; but
    not those whose outcome was on its way to the server just then, which is why there is a second look.
    """
    pid = workers.pid(db, name)
    held = 'select id from "AnalysisJob" where "inProgress" and status = ? and "lockedBy" like ?'
    deadline = time.monotonic() + 60
    while True:
        os.kill(pid, signal.SIGSTOP)
        rows = db.query(held, status, f"{name}%")
        if rows:
            time.sleep(0.1)
            rows = db.query(held, status, f"{name}%")
        if rows:
            os.kill(pid, signal.SIGKILL)
            workers.killed.add(pid)
            return {row["id"] for row in rows}
        os.kill(pid, signal.SIGCONT)
        assert time.monotonic() < deadline, f"{name} was never seen in {status}: {world.counts(db)}"
        time.sleep(0.005)


@pytest.mark.timeout(400)  # beside others on a busy machine; alone it takes some 20 s
def test_two_hundred_sites_with_a_worker_killed_in_each_phase_and_a_model_that_throttles(
    pg_jobs: Db, net: Internet, tmp_path: Path
) -> None:
    """E1, E6, E7: all are completed or failed by rule; no model call is repeated for a phase that had succeeded, and
    the budget is never exceeded, both by the model's own log.
    """
    net.default = lambda request: world.page(request.host, latency=0.1)(request)
    net.sites |= {host: sites.refusing(status) for host, status in BAD.items()}
    with Model(behave=throttling(every=9, after=1, latency=0.15)) as model:
        settings = world.settings_of(
            net, model, pace_starts=16, pace_seconds=0.5, stuck_seconds=10, sweep_seconds=1, answer_tokens=100,
            prompt_tokens=900, tokens_per_minute=20_000, minute_seconds=5, tokens_per_day=150_000,
        )  # fmt: skip
        with Workers(pg_jobs, settings, tmp_path / "workers.log") as workers:
            workers.start("w", processes=2)
            eventually(lambda: workers.up(pg_jobs) == 2, 120, every=0.2)
            for host in BAD:
                world.insert(pg_jobs, url=f"https://{host}/")
            keys = world.insert(pg_jobs, SITES - len(BAD))
            killed = {}
            for name, phase in zip(("w-1", "w-2", "w-1"), PHASES, strict=True):
                killed[phase.name] = kill_in_the_middle(pg_jobs, workers, name, phase.takes)
            ended = (
                "select count(*) from \"AnalysisJob\" where status = 'completed' or"
                ' ("retryCount" >= 3 and not "inProgress")'
            )
            eventually(lambda: pg_jobs.value(ended) == SITES, 150, every=0.2)
            workers.stop()
        check_rows(pg_jobs, keys, tmp_path / "workers.log")
        check_calls(pg_jobs, model, workers)
    assert all(killed.values())
    assert model.most_within(settings.minute_seconds) <= settings.tokens_per_minute
    assert model.tokens > 1.5 * settings.tokens_per_minute  # the budget did hold something back
    assert model.tokens <= settings.tokens_per_day
    assert model.statuses()[429] >= 10


def check_rows(db: Db, keys: list[str], log: Path) -> None:
    rows = {row["id"]: row for row in db.query('select * from "AnalysisJob"')}
    assert all(row["status"] == row["currentStep"] and not row["inProgress"] for row in rows.values())
    failed = {key: row for key, row in rows.items() if row["status"] != "completed"}
    assert {row["url"] for row in failed.values()} >= {f"https://{host}/" for host in BAD}
    for key, row in failed.items():  # by rule: three failures, or three times the victim
        assert row["retryCount"] == 3, row
        assert key not in keys or "taken back" in row["error"], row
    # Rows that the killed process had claimed and not started are given back, those that ran are swept.
    back = ("row_swept", "rows_given_back")
    swept = [line for line in log.read_text().splitlines() if any(event in line for event in back)]
    assert {phase.name for phase in PHASES} <= {match[1] for line in swept if (match := re.search(r"lane=(\S+)", line))}


def check_calls(db: Db, model: Model, workers: Workers) -> None:
    """Nothing was asked again once its answer was stored. Asked twice were only rows of a killed process: rows it ran,
    which are swept, and rows whose answer it had but had not stored yet, which are given back.
    """
    stored = {row["jobId"]: as_time(row["createdAt"]).timestamp() for row in db.query('select * from "ModelAnswer"')}
    completed = {row["id"] for row in db.query("select id from \"AnalysisJob\" where status = 'completed'")}
    assert completed <= stored.keys()
    answered = Counter[str]()
    for call in model.calls:
        job = call.key.rpartition("-")[0]
        assert job not in stored or call.at <= stored[job], f"{job} was asked again"
        answered[job] += call.status == 200
    assert set(answered) == set(stored)
    swept = [line for line in workers.events("row_swept") if "lane=model-analysis" in line]
    twice = {job: count for job, count in answered.items() if count > 1}
    unswept = [job for job in twice if not any(f"id={job} " in f"{line} " for line in swept)]
    given_back = [line for line in workers.events("rows_given_back") if "lane=model-analysis" in line]
    assert len(unswept) <= sum(int(line.rpartition("count=")[2].split()[0]) for line in given_back), twice
    assert all(count <= 2 for count in twice.values()), twice
