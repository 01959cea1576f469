"""Metrics: what Prometheus would read, from a worker's own process and from the port that stands for several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from command import NOWHERE, register
from databases import Db
from farm import JOBS
from rowmill import Concurrency, Dead, Mill, Rate, RowmillError, fixed
from rowmill.prometheus import Standing, observe
from workers import until, working

STATES: dict[str, Any] = {
    "ready": {"status": "queued"}, "running": {"status": "running"}, "done": {"status": "done"},
    "dead": {"status": "dead"},
}  # fmt: skip


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels, in the order of their names."""
    return {
        (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def mill_over(db: Db, **options: Any) -> Mill:
    mill = Mill({"prod": db.url})

    @mill.lane("jobs", name="fetch", max_attempts=2, backoff=fixed(td(0)), **STATES, **options)
    async def fetch(job: Any) -> None:
        if job["note"] == "bad":
            raise Dead("bad")
        if job["note"] == "flaky":
            raise ConnectionError("flaky")

    return mill


async def test_what_a_worker_does_is_counted_by_lane_and_environment(db: Db) -> None:
    """A14, E8: claims, outcomes, run times."""
    db.execute(JOBS[db.dialect])
    for note in ("fine", "fine", "fine", "bad", "flaky"):
        db.execute("insert into jobs (note) values (?)", note)
    mill, registry = mill_over(db), CollectorRegistry()
    observe(mill, registry)
    await mill.worker(drain=True).run()
    standing = Standing(mill)
    found = samples((await standing.exposition(registry)).decode())
    await standing.close()
    where = ("prod", "fetch")
    assert found["rowmill_claims_total", *where] == 6
    assert found["rowmill_outcomes_total", *where, "done"] == 3
    assert found["rowmill_outcomes_total", *where, "dead"] == 2
    assert found["rowmill_outcomes_total", *where, "retry"] == 1
    assert found["rowmill_run_seconds_count", *where] == 6
    assert found["rowmill_rows", *where, "dead"] == 2
    assert found["rowmill_rows", *where, "ready"] == 0
    assert found["rowmill_oldest_ready_seconds", *where] == 0


async def test_runs_whose_inputs_changed_are_counted(db: Db) -> None:
    """Issue 23: by lane and environment, and apart from them outcomes that are final although inputs kept changing."""
    db.execute(JOBS[db.dialect])
    db.execute("alter table jobs add column body integer; update jobs set body = 0")
    db.execute("insert into jobs (note, body) values ('x', 0)")
    mill, registry = Mill({"prod": db.url}), CollectorRegistry()

    @mill.lane("jobs", name="fetch", inputs=["body"], settle_after=2, **STATES)
    async def fetch(job: Any) -> None:
        db.execute("update jobs set body = body + 1")

    observe(mill, registry)
    await mill.worker(drain=True).run()
    standing = Standing(mill)
    found = samples((await standing.exposition(registry)).decode())
    await standing.close()
    where = ("prod", "fetch")
    assert found["rowmill_inputs_changed_total", *where] == 2
    assert found["rowmill_inputs_kept_changing_total", *where] == 1
    assert (found["rowmill_outcomes_total", *where, "stale"], found["rowmill_outcomes_total", *where, "done"]) == (2, 1)


async def test_how_the_lanes_stand_is_asked_of_the_database(db: Db) -> None:
    """E8, D10: rows by state, the oldest ready one, keys that a gate holds back, and workers of every process."""
    db.execute(JOBS[db.dialect])
    past = "now() - interval '90 seconds'" if db.dialect == "postgresql" else (
        "strftime('%Y-%m-%d %H:%M:%f', 'now', '-90 seconds')")  # fmt: skip
    db.execute(f"insert into jobs (note, run_after) values ('a', {past}), ('b', {past}), ('c', {past})")
    db.execute(f"insert into jobs (note, status, worker, claimed_at) values ('a', 'running', 'w', {past})")
    mill = mill_over(db, gates=[Concurrency(1, by="note")])
    await mill.prepare()
    await mill.close()
    _registered(db, "w-1", state="busy")
    _registered(db, "w-2", silent=300)
    standing = Standing(mill)
    found = samples((await standing.exposition(CollectorRegistry())).decode())
    await standing.close()
    where = ("prod", "fetch")
    assert {state: found["rowmill_rows", *where, state] for state in ("ready", "running", "waiting", "dead")} == {
        "ready": 3, "running": 1, "waiting": 0, "dead": 0,
    }  # fmt: skip
    assert 90 <= found["rowmill_oldest_ready_seconds", *where] < 600
    assert found["rowmill_held_keys", "note", *where] == 1
    assert found["rowmill_workers", "prod", "busy"] == 1
    assert found["rowmill_workers", "prod", "dead"] == 1
    assert found["rowmill_up", "prod"] == 1


async def test_waits_silence_and_budgets_are_told(db: Db) -> None:
    """Issue 25, point 4: how long gates hold back, how long dead workers' rows stay, what a budget has left."""
    db.execute(JOBS[db.dialect])
    db.execute("insert into jobs (note) values ('a'), ('a')")
    past = "now() - interval '90 seconds'" if db.dialect == "postgresql" else (
        "strftime('%Y-%m-%d %H:%M:%f', 'now', '-90 seconds')")  # fmt: skip
    db.execute(f"insert into jobs (note, status, worker, claimed_at) values ('b', 'running', 'w', {past})")
    mill = Mill({"prod": db.url})
    mill.budget("model", tokens=[(1000, td(minutes=1)), (50_000, td(days=1))])
    gates = [Rate(1, per=td(hours=1), by="note")]

    @mill.lane("jobs", name="fetch", gates=gates, lease=td(seconds=30), sweep_every=td(hours=1), **STATES)
    async def fetch(job: Any) -> None:
        await job.spend("model", tokens=300)

    async with working(mill):
        await until(lambda: db.value("select count(*) from jobs where status = 'done'") >= 1)
    silent = f"claimed_at = {past}, heartbeat_at = {past}"
    db.execute(f"update jobs set status = 'running', worker = 'w', {silent} where note = 'b'")
    standing = Standing(mill)
    found = samples((await standing.exposition(CollectorRegistry())).decode())
    await standing.close()
    await mill.close()
    where = ("prod", "fetch")
    assert 0 < found["rowmill_gate_wait_seconds", "note", *where] <= 3600
    assert 90 <= found["rowmill_stuck_seconds", *where] < 600
    spent = found["rowmill_budget_used", "model", "prod", "60", "tokens"]
    assert spent in (300, 600)
    assert found["rowmill_budget_used", "model", "prod", "86400", "tokens"] == spent
    assert found["rowmill_budget_limit", "model", "prod", "86400", "tokens"] == 50_000


def _registered(db: Db, name: str, **said: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(register, db, name, **said).result()


async def test_an_environment_that_is_away_is_told_and_does_not_hide_the_others(lite: Db) -> None:
    """A2: the others' numbers are there all the same."""
    lite.execute(JOBS[lite.dialect])
    mill = Mill({"prod": NOWHERE, "dev": lite.url})
    mill.lane("jobs", name="fetch", **STATES)(lambda job: None)
    standing = Standing(mill)
    found = samples((await standing.exposition(CollectorRegistry())).decode())
    await standing.close()
    assert found["rowmill_up", "prod"] == 0
    assert found["rowmill_up", "dev"] == 1
    assert ("rowmill_rows", "dev", "fetch", "ready") in found


APP = """
import os
from rowmill import Mill
mill = Mill({"prod": os.environ["DATABASE"]})

@mill.lane("jobs", name="fetch", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
           dead={"status": "dead"}, concurrency=1, batch=1)
async def fetch(job): ...
"""


def test_one_port_stands_for_all_processes(lite: Db, tmp_path: Path) -> None:
    """A14, B1: what they count together, and how the lanes stand; the folder they count in is gone at the end."""
    lite.execute(JOBS["sqlite"])
    for _ in range(40):
        lite.execute("insert into jobs (note) values ('a')")
    (tmp_path / "shop.py").write_text(APP)
    made = tmp_path / "tmp"
    made.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "rowmill", "run", "shop:mill", "--processes", "2", "--metrics-port", "0"],
        cwd=tmp_path, env={**os.environ, "DATABASE": lite.url, "TMPDIR": str(made)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "metrics_served" in line)
        url = re.findall(r"http://[^\s\"]+", line)[0]
        deadline, found = time.monotonic() + 40, dict[tuple[str, ...], float]()
        workers = [("rowmill_workers", "prod", state) for state in ("idle", "busy")]
        while (
            found.get(("rowmill_outcomes_total", "prod", "fetch", "done")) != 40
            or sum(found.get(name, 0) for name in workers) != 2
        ):
            assert time.monotonic() < deadline, found
            with urllib.request.urlopen(url, timeout=60) as answer:
                found = samples(answer.read().decode())
            time.sleep(0.1)
        assert found["rowmill_claims_total", "prod", "fetch"] == 40
        assert found["rowmill_up", "prod"] == 1
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert not list(made.glob("rowmill-metrics-*"))


async def test_a_port_that_is_taken_is_said_plainly(lite: Db) -> None:
    """X3: with what to do."""
    import socket

    from rowmill.prometheus import listen

    with socket.create_server(("127.0.0.1", 0)) as taken:
        lite.execute(JOBS["sqlite"])
        with pytest.raises(RowmillError, match="cannot listen on") as caught:
            listen(Standing(mill_over(lite)), taken.getsockname()[1], "127.0.0.1", str(Path.cwd()))
    assert "--metrics-port" in str(caught.value.hint)
