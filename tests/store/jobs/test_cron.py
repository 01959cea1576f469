"""Crons: every tick once, over changes of the clock, however many workers there are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

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
    counters = [(await mill._desk.counter()).database for _ in range(2)]
    one, other = (Ticks(database, mill.clock) for database in counters)
    await one.register([hourly])
    now, last = await one.now(["hourly"])
    later = now + td(hours=3)
    assert hourly.cron is not None
    found = [await t.enqueue(hourly, hourly.cron, last["hourly"], later) for t in (one, other, one)]
    assert found == [3, 0, 0]
    assert db.value("select count(*) from rowmill_jobs") == 3
    await mill.close()


PROCESS = """
import asyncio, os, sys
from datetime import datetime, timedelta as td, UTC
from rowmill import Mill
from rowmill.engine.cron_scheduler import Scheduler
from rowmill.store.jobs.cron_ticks import Ticks

mill = Mill(os.environ["DATABASE"])
seen = Ticks.now

async def slowly(self, names):
    found = await seen(self, names)
    await asyncio.sleep(0.01)  # what was read is old by now: the others have read it, too
    return found

Ticks.now = slowly

@mill.cron("*/30 * * * *", tz="America/Montreal", missed="all")
async def half_hourly(): ...

@mill.cron("30 2 * * *", tz="America/Montreal", missed="all")
async def in_the_gap(): ...

@mill.cron("30 1 * * *", tz="America/Montreal", missed="all")
async def in_the_fold(): ...

async def main():
    begin, end = (datetime.fromisoformat(text) for text in sys.argv[1:3])
    await mill.prepare()
    ((_, database),) = mill.databases()
    mill.clock.advance(begin - datetime.now(UTC))
    scheduler = Scheduler(database, mill.clock, mill.events, list(mill.tasks.values()))
    await scheduler.start()
    sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
    while datetime.now(UTC) + mill.clock.shift < end:
        await scheduler.tick()
        mill.clock.advance(td(minutes=int(sys.argv[3])))
    await scheduler.tick()
    await database.close()
    await mill.close()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("begin", "end", "wanted"),
    [
        # From a quarter past midnight to noon: the gap is at 07:00 UTC, the fold from 05:00 to 07:00 UTC.
        ("2026-03-08T05:15+00:00", "2026-03-08T16:15+00:00", {"half_hourly": 22, "in_the_gap": 1, "in_the_fold": 1}),
        ("2026-11-01T04:15+00:00", "2026-11-01T16:15+00:00", {"half_hourly": 24, "in_the_gap": 1, "in_the_fold": 1}),
    ],
)
def test_three_processes_over_a_change_of_the_clock_enqueue_each_tick_once(
    db: Db, tmp_path: Path, begin: str, end: str, wanted: dict[str, int]
) -> None:
    (tmp_path / "crons.py").write_text(PROCESS)
    environment = {**os.environ, "DATABASE": db.url}
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "crons.py"), begin, end, pace],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for pace in ("10", "10", "10")
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    rows = db.query("select task, run_after from rowmill_jobs")
    assert Counter(row["task"] for row in rows) == wanted
    assert set(Counter((row["task"], row["run_after"]) for row in rows).values()) == {1}
