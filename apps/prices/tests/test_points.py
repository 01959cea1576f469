"""Price points and valuations, views, and the claim as a function: on the real database."""

from __future__ import annotations

import asyncio
import json
from datetime import date
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa

from apps.prices.points import UPSERT, Found
from apps.prices.worker import mill, opened
from rowmill.testing import Kit

from .conftest import App, coin

DAY = date(2026, 5, 4)


@pytest.fixture
def intake(app: App) -> dict[str, int]:
    """A coin and a source."""
    (coin_id,) = app.db.insert("coin_intakes", [{"title": "x", "condition": "proof"}])
    return {"intake_id": coin_id, "source_id": app.source("api")}


async def put(where: dict[str, int], *found: tuple[Found, float]) -> None:
    """As the handler does."""
    points = [item.point(strength, place) for place, (item, strength) in enumerate(found)]
    async with opened() as database, database.begin() as tx:
        await tx.execute(sa.text(UPSERT), where | {"points": json.dumps(points)})


async def value(app: App, intake_id: int) -> dict[str, Any]:
    """The valuation as it now is."""
    app.db.execute("select refresh_valuation(?)", intake_id)
    row = app.db.one("select * from valuations where intake_id = ?", intake_id)
    return row | {"by_condition": json.loads(row["by_condition"])}


def item(price: int, **changes: Any) -> Found:
    plain = {"title": "t", "url": "https://x.example/1", "price_cents": price, "price_type": "ask", "day": DAY,
             "condition": "proof", "external_id": None}  # fmt: skip
    return Found(**plain | changes)  # type: ignore[arg-type]


# -- D5


async def test_the_stronger_match_stays_and_at_equal_strength_the_old_one(app: App, intake: dict[str, int]) -> None:
    """D5: decided by match_strength, in whichever order they come; within one answer, too."""

    def kept() -> tuple[str, float]:
        row = app.db.one("select title, match_strength from price_points")
        return row["title"], round(row["match_strength"], 2)

    def known(title: str) -> Found:
        return item(100, title=title, external_id="7")

    await put(intake, (known("poor"), 0.5), (known("better"), 0.6), (known("as good"), 0.6))
    assert kept() == ("better", 0.6)
    await put(intake, (known("weaker"), 0.55))
    await put(intake, (known("equal"), 0.6))
    assert kept() == ("better", 0.6)
    await put(intake, (known("best"), 0.9))
    assert kept() == ("best", 0.9)


async def test_points_are_unique_by_coin_source_and_key_however_many_write_at_once(
    app: App, intake: dict[str, int]
) -> None:
    """D5: ten writers, the same twenty items: twenty rows, each with the strongest match."""
    several = [item(n, external_id=str(n)) for n in range(20)]
    await asyncio.gather(*(put(intake, *((each, strength / 10) for each in several)) for strength in range(1, 11)))
    assert app.db.one("select count(*) as n, min(match_strength)::float8 as least from price_points") == {
        "n": 20,
        "least": 1.0,
    }
    with pytest.raises(asyncpg.UniqueViolationError):
        app.db.execute("""
            insert into price_points
              (intake_id, source_id, dedupe_key, url, title, price_cents, price_type, observed_on, match_strength)
            select intake_id, source_id, dedupe_key, '', '', 1, 'ask', now(), 1 from price_points limit 1""")


# -- D6


async def test_a_valuation_leaves_out_mad_prices_and_weighs_sales_above_hopes(app: App, intake: dict[str, int]) -> None:
    """D6: by median absolute deviation; sold three times ask; for the coin's own condition, and each other one."""
    sold = [(item(price, price_type="sold", external_id=f"s{price}"), 1.0) for price in (10_000, 10_200, 9_800)]
    asks = [(item(price, external_id=f"a{price}"), 1.0) for price in (12_000, 11_800, 990_000, 3)]
    poor = [(item(2_000, condition="circulated", external_id=f"p{n}"), 1.0) for n in range(9)]
    await put(intake, *sold, *asks, *poor)
    found = await value(app, intake["intake_id"])
    assert found["value_cents"] == round((3 * (10_000 + 10_200 + 9_800) + 12_000 + 11_800) / 11)
    assert (found["low_cents"], found["high_cents"], found["condition"]) == (9_800, 12_000, "proof")
    assert (found["points"], found["outliers"]) == (16, 2)
    assert found["by_condition"]["circulated"]["value_cents"] == 2_000
    assert found["by_condition"]["proof"]["sold"] == 3


async def test_prices_that_are_nearly_all_the_same_still_show_the_odd_one(app: App, intake: dict[str, int]) -> None:
    """D6: where the median absolute deviation is nothing, the mean deviation stands in."""
    await put(intake, *((item(1_000, external_id=str(n)), 1.0) for n in range(9)), (item(90_000), 1.0))
    found = await value(app, intake["intake_id"])
    assert (found["value_cents"], found["outliers"]) == (1_000, 1)


async def test_a_coin_without_prices_has_a_valuation_that_says_so(app: App, intake: dict[str, int]) -> None:
    """D6: one row per intake, upserted: also the second time, and when prices come."""
    for _ in range(2):
        found = await value(app, intake["intake_id"])
        assert (found["value_cents"], found["points"]) == (None, 0)
    await put(intake, (item(500, condition="fine"), 1.0))
    found = await value(app, intake["intake_id"])
    assert (found["value_cents"], found["condition"]) == (500, "fine"), "of the condition that there is"
    assert app.db.value("select count(*) from valuations") == 1


async def test_sources_that_finish_at_the_same_time_are_all_in_the_valuation(app: App) -> None:
    """D6, X1: three jobs of one coin end together; the last valuation has seen the points of all."""
    (coin_id,) = app.db.insert("coin_intakes", [{"title": coin(1)["title"]}])
    for kind in ("listing", "api", "auction"):
        app.job(app.source(kind), 1, intake_id=coin_id)
    async with Kit(mill) as kit:
        claims = await kit.claim(count=3)
        ended = await asyncio.gather(*map(kit.run, claims))
    assert [each.outcome for each in ended] == ["done"] * 3
    assert app.db.value("select count(distinct source_id) from price_points") == 3
    assert app.db.value("select points from valuations") == app.db.value("select count(*) from price_points") > 15


async def test_a_valuation_waits_for_one_that_is_not_committed_and_sees_its_points(
    app: App, intake: dict[str, int]
) -> None:
    """D6, X1: without the wait, the second run values the coin without the first one's points."""
    other = {**intake, "source_id": app.source("auction")}

    async def write(tx: Any, where: dict[str, int]) -> None:
        await tx.execute(sa.text(UPSERT), where | {"points": json.dumps([item(500).point(1.0)])})
        await tx.execute(sa.text("select refresh_valuation(:intake_id)"), {"intake_id": where["intake_id"]})

    async def second() -> None:
        async with database.begin() as tx:
            await write(tx, other)

    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    async with opened() as database:
        async with database.begin() as first:
            await write(first, intake)
            racing = asyncio.create_task(second())
            async with asyncio.timeout(60):
                while not await asyncio.to_thread(app.db.value, waiting):
                    assert not racing.done(), "it did not wait"
                    await asyncio.sleep(0.05)
        await racing
    assert app.db.one("select points, value_cents from valuations") == {"points": 2, "value_cents": 500}


# -- D10


def test_the_views_show_recent_jobs_source_health_and_what_is_stuck(app: App) -> None:
    """D10: newest 20; health by name; stuck, also without any heartbeat, with the time since the last."""
    source = app.source("listing")
    app.source("api", failure_streak=2)
    jobs = [app.job(source, n) for n in range(22)]
    app.db.execute("update scrape_jobs set created_at = now() + id * interval '1 second'")
    recent = app.db.query("select * from recent_jobs")
    assert [row["id"] for row in recent] == sorted(jobs, reverse=True)[:20]
    assert list(recent[0]) == ["id", "status", "locked_by", "heartbeat_at", "created_at", "completed_at",
                               "error_message"]  # fmt: skip
    health = app.db.query("select * from source_health")
    assert [(row["name"], row["failure_streak"]) for row in health] == [("api", 2), ("listing", 0)]
    assert list(health[0]) == ["name", "enabled", "failure_streak", "last_success_at", "last_failure_at",
                               "paused_until"]  # fmt: skip
    app.db.execute("update scrape_jobs set status = 'running', locked_by = 'w' where id = any(?)", jobs[:3])
    for job, seconds in ((jobs[0], 200), (jobs[1], 400)):
        app.db.execute(
            "update scrape_jobs set heartbeat_at = now() - ? * interval '1 second' where id = ?", seconds, job
        )
    stuck = app.db.query("select id, locked_by, extract(epoch from since_heartbeat)::integer as s from stuck_jobs")
    assert [(row["id"], row["locked_by"]) for row in stuck] == [(jobs[2], "w"), (jobs[1], "w")]
    assert stuck[0]["s"] is None
    assert 400 <= stuck[1]["s"] < 430


# -- D2


def test_the_claim_function_takes_pending_due_and_stuck_jobs_of_sources_that_may_be_asked(app: App) -> None:
    """D2, D1, D3, D8: running and locked in one call; not before time, not of a disabled or paused source."""
    source = app.source("api")
    disabled = app.source("listing", enabled=False)
    paused = app.source("auction", failure_streak=5)
    app.db.execute("update sources set paused_until = now() + interval '1 minute' where id = ?", paused)
    fresh = app.job(source, 1)
    due, early = (app.job(source, n, status="retryable") for n in (2, 3))
    stuck = app.job(source, 4, status="running", locked_by="gone")
    app.job(disabled, 5)
    app.job(paused, 6)
    later = "update scrape_jobs set next_retry_at = now() + ? * interval '1 minute' where id = ?"
    app.db.execute(later, -1, due)
    app.db.execute(later, 9, early)
    claim = "select * from claim_next_pending_job(worker => ?)"
    got = [app.db.query(claim, f"w-{n}") for n in range(5)]
    assert [[row["id"] for row in rows] for rows in got] == [[fresh], [due], [stuck], [], []]
    (row,) = got[0]
    assert (row["status"], row["locked_by"], row["intake_id"]) == ("running", "w-0", app.row(fresh)["intake_id"])
    assert row["locked_at"] is not None
    assert row["heartbeat_at"] is not None
    assert (got[2][0]["attempts"], got[2][0]["locked_by"]) == (1, "w-2"), "taken back, and then claimed"
    with pytest.raises(asyncpg.PostgresError, match="name of its worker"):
        app.db.query(claim, "")


async def test_a_job_that_somebody_is_claiming_is_passed_over(app: App) -> None:
    """D2: SKIP LOCKED: nobody waits, and nobody gets a row twice."""
    source = app.source("api")
    first, second = (app.job(source, n) for n in (1, 2))
    connection = await asyncpg.connect(app.db.direct)
    async with connection.transaction():
        await connection.execute("select 1 from scrape_jobs where id = $1 for update", first)
        claim = "select id from claim_next_pending_job(worker => ?)"
        assert await asyncio.to_thread(app.db.query, claim, "w") == [{"id": second}]
    await connection.close()
