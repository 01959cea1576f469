"""Crons: every tick once, over changes of the clock, however many workers there are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from databases import Db, as_time
from rowmill import DeclarationError, Mill
from rowmill.declare.cron import Cron
from rowmill.store.jobs.cron_ticks import Ticks
from rowmill.testing import Kit

td = timedelta


def ticks(expression: str, since: str, count: int, tz: str = "America/Montreal") -> list[str]:
    found = []
    for tick in Cron(expression, tz).after(datetime.fromisoformat(since)):
        found.append(f"{tick:%d %H:%M}")
        if len(found) == count:
            break
    return found


def test_a_change_of_the_clock_neither_loses_nor_doubles_a_tick() -> None:
    """Montreal, 2026: 8 March 02:00 becomes 03:00 (07:00 UTC); 1 November 02:00 becomes 01:00 (06:00 UTC)."""
    assert ticks("30 2 * * *", "2026-03-07T00:00+00:00", 3) == ["07 07:30", "08 07:00", "09 06:30"]
    assert ticks("30 1 * * *", "2026-10-31T00:00+00:00", 3) == ["31 05:30", "01 05:30", "02 06:30"]
    assert ticks("30 1 * * *", "2026-11-01T06:10+00:00", 1) == ["02 06:30"], "not in the hour that comes again"
    half_hours = ["01 05:00", "01 05:30", "01 06:00", "01 06:30", "01 07:00"]
    assert ticks("*/30 * * * *", "2026-11-01T04:40+00:00", 5) == half_hours
    assert ticks("*/30 * * * *", "2026-11-01T06:10+00:00", 2) == half_hours[3:]
    assert ticks("*/30 * * * *", "2026-03-08T06:40+00:00", 2) == ["08 07:00", "08 07:30"]


@pytest.mark.parametrize(
    ("missed", "wanted"),
    [("skip", ["10:00"]), ("once", ["10:00"]), ("all", ["08:00", "09:00", "10:00"])],
)
def test_missed_ticks_while_the_newest_is_timely(missed: str, wanted: list[str]) -> None:
    cron = Cron("0 * * * *", missed=missed)
    since, now = datetime(2026, 1, 1, 7, 30, tzinfo=UTC), datetime(2026, 1, 1, 10, 0, 20, tzinfo=UTC)
    found, until = cron.due(since, now)
    assert [f"{t:%H:%M}" for t in found] == wanted
    assert until == datetime(2026, 1, 1, 10, tzinfo=UTC)
    assert cron.due(until, now) == ([], until)


@pytest.mark.parametrize(("missed", "wanted"), [("skip", 0), ("once", 1), ("all", 3)])
def test_missed_ticks_that_are_all_late(missed: str, wanted: int) -> None:
    since, now = datetime(2026, 1, 1, 7, 30, tzinfo=UTC), datetime(2026, 1, 1, 10, 30, tzinfo=UTC)
    found, until = Cron("0 * * * *", missed=missed).due(since, now)
    assert len(found) == wanted
    assert until.hour == 10


def test_wrong_crons_are_told() -> None:
    mill = Mill("sqlite:///x.db")
    with pytest.raises(DeclarationError, match="cannot be read"):
        mill.cron("61 * * * *")
    with pytest.raises(DeclarationError, match="no time zone"):
        mill.cron("0 3 * * *", tz="America/Montréal")
    with pytest.raises(DeclarationError, match="missed="):
        mill.cron("0 3 * * *", missed="maybe")
    with pytest.raises(DeclarationError, match="its handler needs to"):
        mill.cron("0 3 * * *")(_needs)


def _needs(to: str) -> None: ...


async def test_a_cron_is_enqueued_by_the_worker_at_its_tick(db: Db) -> None:
    mill, ran = Mill(db.url), list[int]()

    @mill.cron("0 * * * *", tz="UTC")
    async def hourly(n: int = 3) -> None:
        ran.append(n)

    async with Kit(mill) as kit:
        await kit.store("default")
        await kit.tick()  # known from here on
        await kit.tick()
        assert await kit.step() is None
        now = datetime.now(UTC)
        kit.advance(now.replace(minute=0, second=0, microsecond=0) + td(hours=1, seconds=5) - now)
        for _ in range(3):
            await kit.tick()
        await kit.step()
        assert await kit.step() is None
    assert ran == [3]
    row = db.one("select run_after, created_at from rowmill_jobs")
    assert as_time(row["run_after"]).minute == as_time(row["run_after"]).second == 0, "the job knows its tick"
    await mill.close()


async def test_of_two_that_saw_the_same_last_tick_one_enqueues(db: Db) -> None:
    mill = Mill(db.url)

    @mill.cron("0 * * * *", missed="all")
    async def hourly() -> None: ...

    await mill.prepare()
    counters = [(await mill._client.connection()).database for _ in range(2)]
    one, other = (Ticks(database, mill.clock) for database in counters)
    await one.register([hourly])
    now, last = await one.now(["hourly"])
    later = now + td(hours=3)
    assert hourly.cron is not None
    found = [await t.enqueue(hourly, hourly.cron, last["hourly"], later) for t in (one, other, one)]
    assert found == [3, 0, 0]
    assert db.value("select count(*) from rowmill_jobs") == 3
    await mill.close()
