"""The lane, step by step, on the real database against the stand-in sites."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta as td
from typing import Any

import httpx
import pytest

from apps.prices import worker
from apps.prices.worker import mill, scrape
from databases import Row
from rowmill.testing import Kit

from .conftest import App

pytestmark = pytest.mark.usefixtures("app")


async def stepped(app: App, job: int) -> Row:
    """The row after one run."""
    async with Kit(mill) as kit:
        assert await kit.step() is not None
    return app.row(job)


# -- D1: states


async def test_a_collection_that_succeeds_keeps_points_and_worker(app: App) -> None:
    """D1, D6, D11: pending, running, succeeded; points and valuation are written with the outcome."""
    job = app.job(app.source("auction"))
    row = await stepped(app, job)
    assert (row["status"], row["locked_by"], row["error_message"]) == ("succeeded", "test-worker", None)
    assert row["completed_at"] is not None
    assert app.db.value("select count(*) from price_points where price_type = 'sold'") > 3
    assert app.db.value("select points from valuations") == app.db.value("select count(*) from price_points")


@pytest.mark.parametrize("status", [500, 502, 429, 503])
async def test_a_transient_error_makes_a_job_retryable(app: App, status: int) -> None:
    """D1: server errors and rate limits; claimable again once next_retry_at has passed."""
    job = app.job(app.source("api"))
    app.sites.moods["api"].failing, app.sites.moods["api"].status = True, status
    async with Kit(mill) as kit:
        await kit.step()
        row = app.row(job)
        assert (row["status"], row["retry_count"], row["locked_by"]) == ("retryable", 1, None)
        assert str(status) in row["error_message"]
        assert await kit.step() is None, "not before next_retry_at"
        app.sites.moods["api"].failing = False
        kit.advance(td(seconds=61))
        await kit.step()
    assert app.row(job)["status"] == "succeeded"


async def test_a_timeout_and_a_lost_connection_are_transient(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: timeout, connection."""
    slow, gone = app.source("api"), app.source("auction", base_url="http://127.0.0.1:1")
    jobs = [app.job(slow), app.job(gone)]
    app.sites.moods["api"].latency = 60.0
    monkeypatch.setattr(worker, "settings", replace(worker.settings, http_timeout_seconds=1.0))
    async with Kit(mill) as kit:
        assert [(await kit.step()).outcome for _ in jobs] == ["retry", "retry"]  # type: ignore[union-attr]
    errors = [app.row(job)["error_message"] for job in jobs]
    assert errors[0].startswith(("ReadTimeout", "ConnectTimeout")), "a busy machine may need a second to connect"
    assert errors[1].startswith("ConnectError")


@pytest.mark.parametrize("status", [404, 403, 200])
async def test_a_permanent_error_fails_a_job_at_once(app: App, status: int) -> None:
    """D1: an answer that will be the same the next time; also one that cannot be read (200: not a listing)."""
    job = app.job(app.source("listing"))
    app.sites.moods["listing"].failing, app.sites.moods["listing"].status = True, status
    row = await stepped(app, job)
    assert (row["status"], row["next_retry_at"]) == ("failed", None)
    assert row["error_message"]


async def test_a_retryable_job_fails_after_five_retries_and_waits_twice_as_long_each_time(app: App) -> None:
    """D1, D4: base_delay_minutes * 2^retry_count: 1, 2, 4, 8 and 16 minutes, and then failed."""
    app.sites.moods["api"].failing = True
    job, waits = app.job(app.source("api")), []
    async with Kit(mill) as kit:
        for _ in range(20):
            stepped = await kit.step()
            row = app.row(job)
            if stepped is not None and row["status"] == "failed":
                break
            if stepped is not None:
                now = app.db.value("select now()") + mill.clock.shift
                waits.append(round((row["next_retry_at"] - now).total_seconds() / 60))
            kit.advance(td(minutes=20))  # past any of these, and past the breaker's pause
    assert waits == [1, 2, 4, 8, 16]
    assert row["status"] == "failed"
    assert len(app.sites.seen("api")) == 6


def test_no_wait_is_longer_than_a_day() -> None:
    """D4: at most 24 hours."""
    assert [scrape.backoff(n) for n in (1, 2, 11, 12, 40)] == [
        td(minutes=1), td(minutes=2), td(minutes=1024), td(hours=24), td(hours=24),
    ]  # fmt: skip


async def test_a_disabled_source_is_not_worked_on(app: App) -> None:
    """D1: its jobs stay as they are until it is enabled."""
    source = app.source("api", enabled=False)
    job = app.job(source)
    async with Kit(mill) as kit:
        assert await kit.step() is None
        assert app.row(job)["status"] == "pending"
        app.db.execute("update sources set enabled = true")
        assert await kit.step() is not None
    assert app.row(job)["status"] == "succeeded"


async def test_what_a_job_lacks_comes_from_its_intake(app: App) -> None:
    """D1, D9: `query_params` of {} ask for the coin that was taken in; what they name themselves goes first."""
    source = app.source("api")
    row = {"title": "1921-D Morgan Dollar", "year": 1921, "mintmark": "D", "series": "Morgan"}
    (intake,) = app.db.insert("coin_intakes", [row])
    jobs = [app.job(source, intake_id=intake, query_params=given) for given in ({}, {"title": "1921 Dollar"})]
    for job in jobs:
        assert (await stepped(app, job))["status"] == "succeeded"
    assert [seen.query for seen in app.sites.seen("api")] == ["1921-D Morgan Dollar", "1921 Dollar"]
    assert app.db.value("select count(*) from price_points") > 0


async def test_a_job_that_names_no_coin_fails_and_is_not_the_sources_fault(app: App) -> None:
    """D1, D8: no request is made, the streak stays, and the failure is counted."""
    (intake,) = app.db.insert("coin_intakes", [{"title": ""}])
    job = app.job(app.source("api"), intake_id=intake, query_params={})
    tally = await mill.worker(drain=True).run()
    assert (tally.failures, tally.died) == (1, 1)
    row = app.row(job)
    assert (row["status"], "says which coin" in row["error_message"]) == ("failed", True)
    assert app.db.value("select failure_streak from sources") == 0
    assert app.sites.log == []


# -- D3: lease


async def test_a_silent_workers_job_goes_back_with_one_more_attempt(app: App) -> None:
    """D3: no heartbeat since a claim, or one older than 300 s: pending, attempts + 1; a younger one is left alone."""
    assert (scrape.heartbeat, scrape.sweep_every, scrape.lease) == (td(seconds=20), td(seconds=60), td(seconds=300))
    source = app.source("api")
    old, never, alive = (app.job(source, n, status="running", locked_by=f"w-{n}") for n in range(3))
    app.db.execute("update scrape_jobs set locked_at = now() - interval '1 hour' where id = ?", never)
    for job, seconds in ((old, 301), (alive, 200)):
        app.db.execute("update scrape_jobs set locked_at = now() - interval '1 hour',"
                       " heartbeat_at = now() - ? * interval '1 second' where id = ?", seconds, job)  # fmt: skip
    async with Kit(mill) as kit:
        swept = {each.id: each.worker for each in await kit.sweep()}
    assert swept == {old: "w-0", never: "w-1"}, "and who held them is known"
    for job in (old, never):
        row = app.row(job)
        assert (row["status"], row["attempts"], row["locked_by"], row["retry_count"]) == ("pending", 1, None, 0)
    assert app.row(alive)["status"] == "running"


# -- D7, D8: gates from the sources table


async def test_a_source_gives_no_more_than_its_rate(app: App) -> None:
    """D7: one every ten seconds at 6 a minute, in the first minute, too; a changed rate is followed."""
    source = app.source("api", rate=6)
    for n in range(12):
        app.job(source, n)
    async with Kit(mill) as kit:
        for _ in range(20):
            await kit.claim(count=12)
            kit.advance(td(seconds=4))
        text = "select locked_at - min(locked_at) over () as after from scrape_jobs where locked_at is not null"
        times = app.db.query(text)
        assert 4 <= sum(row["after"] < td(minutes=1) for row in times) <= 6
        app.db.execute("update sources set rate_limit_per_minute = null")
        assert len(await kit.claim(count=12)) == 12 - len(times)


async def test_five_failures_in_a_row_pause_a_source_for_five_minutes(app: App) -> None:
    """D8: failure_streak and paused_until stand in the sources table; others go on; one probe ends it."""
    broken, well = app.source("api"), app.source("auction")
    app.sites.moods["api"].failing = True
    for n in range(8):
        app.job(broken, n)
    async with Kit(mill) as kit:
        for n in range(1, 6):
            await kit.step()
            row = app.db.one("select * from sources where id = ?", broken)
            assert row["failure_streak"] == n
            assert (row["paused_until"] is not None) is (n == 5)
        left = row["paused_until"] - app.db.value("select now()")
        assert td(minutes=3) < left < td(minutes=5, seconds=1)
        assert (row["last_failure_at"] is not None, row["last_success_at"]) == (True, None)
        other = app.job(well, 9)
        stepped = await kit.step()
        assert stepped is not None
        assert stepped.id == other
        assert await kit.step() is None, "five jobs are due, and none is tried"
        assert len(app.sites.seen("api")) == 5
        app.sites.moods["api"].failing = False
        kit.advance(td(minutes=5, seconds=1))
        (probe,) = await kit.claim(count=9)
        assert (await kit.run(probe)).outcome == "done"
        row = app.db.one("select * from sources where id = ?", broken)
        assert (row["failure_streak"], row["paused_until"]) == (0, None)
        assert row["last_success_at"] is not None
        assert len(await kit.claim(count=9)) > 1


async def test_a_refusal_with_a_time_keeps_everybody_away_until_then(app: App) -> None:
    """D1, D7: 429 with Retry-After."""
    app.sites.moods["api"].most_per_second, app.sites.moods["api"].retry_after = 0, 30
    source = app.source("api")
    jobs = [app.job(source, n) for n in range(3)]
    async with Kit(mill) as kit:
        assert (await kit.step()).outcome == "retry"  # type: ignore[union-attr]
        wait = app.row(jobs[0])["next_retry_at"] - app.db.value("select now()")
        assert td(seconds=3) < wait < td(seconds=31)
        assert await kit.claim(count=3) == []
        kit.advance(td(seconds=31))
        assert len(await kit.claim(count=3)) == 3


# -- D9: cache


def with_cache(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(worker, "settings", replace(worker.settings, cache_enabled=True, **changes))


async def test_answers_survive_a_restart_and_are_asked_for_again_when_old(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9: the same coin of the same source is not asked for twice within the TTL, also by the next process."""
    with_cache(monkeypatch, cache_ttl_seconds=3600)
    source, other = app.source("listing"), app.source("auction")
    first = app.job(source, 1)
    await stepped(app, first)
    again = app.job(source, 1)
    await stepped(app, again)  # with another Kit the file was closed and opened again
    assert len(app.sites.seen("listing")) == 1
    points = "select dedupe_key, title, price_cents, observed_on from price_points where intake_id = ? order by 1"
    kept = [app.db.query(points, app.row(job)["intake_id"]) for job in (first, again)]
    assert kept[0] == kept[1] != []
    await stepped(app, app.job(source, 2))
    await stepped(app, app.job(other, 1))
    assert [len(app.sites.seen(name)) for name in ("listing", "auction")] == [2, 1], "another coin, another source"
    with_cache(monkeypatch, cache_ttl_seconds=0.01)
    await stepped(app, app.job(source, 3))
    await asyncio.sleep(0.05)
    await stepped(app, app.job(source, 3))
    assert len(app.sites.seen("listing")) == 4, "too old"


async def test_a_cache_that_is_switched_off_keeps_nothing(app: App) -> None:
    """D9: CACHE_ENABLED=false."""
    source = app.source("listing")
    for _ in range(2):
        await stepped(app, app.job(source, 1))
    assert len(app.sites.seen("listing")) == 2
    assert not (app.folder / "cache").exists()


async def test_a_broken_cache_costs_requests_and_no_job(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """D9, D8: it is not the source's fault."""
    with_cache(monkeypatch)
    source = app.source("listing")
    await stepped(app, app.job(source, 1))
    for file in (app.folder / "cache").glob("cache.db*"):
        file.write_bytes(b"nonsense" * 1000)
    row = await stepped(app, app.job(source, 1))
    assert (row["status"], len(app.sites.seen("listing"))) == ("succeeded", 2)


@pytest.mark.parametrize(
    ("asked", "hours"), [("7200", 2), ("999999999999", 24), ("Fri, 01 Jan 2999 00:00:00 GMT", 24), ("soon", None)]
)
def test_nobody_is_left_alone_for_longer_than_a_day(asked: str, hours: int | None) -> None:
    """D4: also where a source asks for it: in seconds, by a date, or with nonsense."""
    response = httpx.Response(429, headers={"retry-after": asked}, request=httpx.Request("GET", "http://x.example"))
    error = httpx.HTTPStatusError("", request=response.request, response=response)
    assert worker.classify(error) == (("rate", td(hours=hours)) if hours else None)


def test_a_run_has_a_limit_as_a_whole() -> None:
    """D1: a source that never stops talking would have a worker for ever, heartbeats and all."""
    assert scrape.timeout == 4 * td(seconds=worker.settings.http_timeout_seconds)


def test_classify_leaves_what_it_does_not_know_to_the_engine() -> None:
    """D1: only what is permanent for certain is called so."""
    request = httpx.Request("GET", "http://x.example")
    verdicts = {
        code: worker.classify(httpx.HTTPStatusError("", request=request, response=httpx.Response(code)))
        for code in (404, 410, 429, 500, 503)
    }
    assert verdicts == {404: "permanent", 410: "permanent", 429: None, 500: None, 503: None}
