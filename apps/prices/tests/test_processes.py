"""Worker processes over one database: nothing twice, nothing lost, no rate exceeded, one breaker for all."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

import pytest

from .conftest import App, eventually

#: Up to five processes each: seconds on a quiet machine, minutes on a busy one.
pytestmark = pytest.mark.timeout(300)


def most_within(times: Sequence[float], seconds: float) -> int:
    """The most requests in any window of that length."""
    times = sorted(times)
    return max((sum(1 for later in times[i:] if later < at + seconds) for i, at in enumerate(times)), default=0)


def assert_no_rate_exceeded(app: App, site: str, per_minute: int, burst: int) -> None:
    """From the site's own log: over any window, no more than the bucket and what flowed into it; and by the database's
    own times of the claims, to which no stall adds anything.
    """
    text = """select query_params->>'title' as title, extract(epoch from locked_at)::float8 as at from scrape_jobs
              where source_id = (select id from sources where name = ?)"""
    by_title = {row["title"]: row["at"] for row in app.db.query(text, site)}
    claimed, answered = list(by_title.values()), [seen for seen in app.sites.seen(site) if seen.status == 200]
    # How long a busy machine let pass between a claim and its request.
    stall = max(seen.at - by_title[seen.query] for seen in answered) + 0.5
    for window in (0.2, 0.5, 1.0, 2.0, 5.0):
        flow = per_minute / 60
        assert most_within([seen.at for seen in app.sites.seen(site)], window) <= burst + flow * (window + stall)
        assert most_within(claimed, window) <= burst + flow * window + 0.01, f"{site}: claims within {window} s"


def test_four_processes_share_rates_and_one_breaker_while_a_source_fails_for_a_while(app: App) -> None:
    """D1, D5, D7, D8, X1: the breaker opens once for all and closes once; no request while it is open; rates hold by
    the sites' own logs; no duplicate price points; all jobs final.
    """
    rates = {"listing": 300, "api": 360, "auction": 360}
    for kind, rate in rates.items():
        app.source(kind, rate)
    app.coins(24)
    app.sites.moods["auction"].failing = True
    for n in range(4):
        app.start(f"w-{n}", BREAKER_PAUSE_SECONDS="60", BASE_DELAY_MINUTES="0.02")
    opened = "select paused_until from sources where name = 'auction' and paused_until is not null"
    eventually(lambda: bool(app.db.query(opened)))
    # Those that were under way when it opened shall meet the site as it was.
    under_way = "select count(*) from scrape_jobs where source_id = 3 and status = 'running'"
    eventually(lambda: app.db.value(under_way) == 0, 50)
    app.sites.moods["auction"].failing = False
    # By hand, as the README says: the test need not wait for the minute to end.
    app.db.execute("update sources set paused_until = now() + interval '2 seconds' where name = 'auction'")
    until: datetime = app.db.value(opened)
    app.all_final()

    assert app.statuses() == {"succeeded": 72}
    eventually(lambda: len(app.events("breaker_closed")) == 1)
    assert [event["key"] for event in app.events("breaker_opened")] == ["3"], "once, by one of the four"
    answers = app.sites.seen("auction")
    failed = [seen for seen in answers if seen.status == 500]
    assert 5 <= len(failed) < 5 + 4 * 4, "those that were under way when it opened, and no more"
    well = [seen.at for seen in answers if seen.status == 200]
    assert min(well) >= until.timestamp() - 0.05, "nobody asked while it was paused"
    for kind, rate in rates.items():
        assert_no_rate_exceeded(app, kind, rate, burst=1)
        assert Counter(seen.status for seen in app.sites.seen(kind))[200] == 24, f"{kind}: each job collected once"
    points = app.db.one(
        "select count(*) as n, count(distinct (intake_id, source_id, dedupe_key)) as d from price_points"
    )
    assert points["n"] == points["d"] > 24 * 15
    assert app.db.value("select count(*) from valuations where value_cents > 0") == 24
    holders = app.db.query("select locked_by, count(*) as n from scrape_jobs group by 1")
    assert {row["locked_by"] for row in holders} == {f"w-{n}" for n in range(4)}, "all four had a part"


def test_two_named_workers_process_each_of_many_jobs_exactly_once(app: App) -> None:
    """D11: WORKER_ID; counted by status and locked_by; no duplicate price points."""
    for kind in ("api", "auction"):
        app.source(kind)
        app.sites.moods[kind].latency = 0.15
    app.coins(20)
    workers = [app.start(name, "--drain", WORKER_CONCURRENCY="2") for name in ("worker-a", "worker-b")]
    assert [worker.wait(200) for worker in workers] == [0, 0]
    counted = app.db.query("select status, locked_by, count(*) as n from scrape_jobs group by 1, 2 order by 2")
    assert [(row["status"], row["locked_by"]) for row in counted] == [
        ("succeeded", "worker-a"), ("succeeded", "worker-b"),
    ]  # fmt: skip
    assert sum(row["n"] for row in counted) == 40
    asked = Counter((seen.site, seen.query) for seen in app.sites.log)
    assert len(asked) == 40
    assert set(asked.values()) == {1}, "each job made its one request"
    assert app.db.value("select max(attempts) + max(retry_count) from scrape_jobs") == 0
    text = "select count(*) - count(distinct (intake_id, source_id, dedupe_key)) from price_points"
    assert app.db.value(text) == 0


def test_a_killed_workers_job_is_finished_by_another(app: App) -> None:
    """D11, D3, X2: SIGKILL in mid-job; the log says who held it, attempts + 1. No timeout passes: its process is known
    to be gone.
    """
    app.source("api")
    app.coins(1)
    app.sites.moods["api"].latency = 50
    short = {"JOB_LOCK_TIMEOUT_SECONDS": "400", "HEARTBEAT_SECONDS": "0.5", "SWEEP_SECONDS": "0.5"}
    victim = app.start("victim", **short)
    eventually(lambda: len(app.sites.seen("api")) == 1)
    beat = "select heartbeat_at from scrape_jobs"
    first = app.db.value(beat)
    eventually(lambda: app.db.value(beat) > first)  # it is alive, and says so
    victim.send_signal(signal.SIGKILL)
    victim.wait(60)
    app.sites.moods["api"].latency = 0
    app.start("rescuer", **short)
    app.all_final()
    row = app.db.one("select * from scrape_jobs")
    assert (row["status"], row["locked_by"], row["attempts"], row["retry_count"]) == ("succeeded", "rescuer", 1, 0)
    (swept,) = app.events("row_swept")
    assert (swept["previous_worker"], swept["id"]) == ("victim", row["id"])
    assert app.db.value("select count(*) from price_points") > 0
