"""Breakers over real workers: open at exactly the streak, one probe at a time, through restarts, at no row's cost.

Why processes: four workers share one breaker by the database alone, and it outlives them all being killed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

import gated
from databases import Db
from gate_farm import GateFarm, events, most_at_once
from rowmill import Breaker, Concurrency, Mill, fixed
from waiting import eventually

SHAPES: dict[str, list[Any]] = {"turns": [], "walk": [Concurrency(1000)]}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_worker_opens_the_breaker_at_exactly_the_streak(db: Db, shape: str) -> None:
    """D8: with one slot not one run more is started; a restart starts none; rows that wait lose no attempt."""
    gated.make(db)
    gated.fill(db, ["a"] * 9)
    starts, told = [], Counter[str]()

    async def crawl(job: Any) -> None:
        starts.append(job.id)
        raise RuntimeError("down")

    for life in range(2):
        mill = Mill(db.url)
        mill.events.subscribe(lambda event: told.update([event.name]))
        gated.lane(
            mill, crawl, gates=[Breaker(3, td(minutes=5), by="domain"), *SHAPES[shape]],
            concurrency=1, backoff=fixed(td(0)), poll=td(seconds=0.2), max_attempts=99,
        )  # fmt: skip
        worker = mill.worker(worker_id=f"w{life}")
        task = asyncio.create_task(worker.run())
        while told["breaker_opened"] == 0:  # noqa: ASYNC110 - told by a subscriber
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # what would be started too much, would be by now
        worker.stop()
        await task
        assert len(starts) == 3
    assert told["breaker_opened"] == 1
    assert told["breaker_closed"] == 0
    assert db.value("select sum(attempts) from pages") == 3
    assert db.value("select count(*) from pages where status = 'queued'") == 9


async def test_a_lane_below_does_not_take_the_place_of_a_run_whose_end_its_breaker_has_not_heard_of(db: Db) -> None:
    """DESIGN, strict order: with one place for all lanes, nothing below starts while something above is ready."""
    gated.make(db)
    gated.fill(db, ["a"] * 6)
    db.execute("create table notes (id integer primary key, status text not null default 'ready', worker text)")
    db.execute("insert into notes (id) values (1), (2), (3)")
    order: list[str] = []
    mill = Mill(db.url)

    async def crawl(job: Any) -> None:
        order.append("page")

    @mill.lane("notes", name="notes", priority=9, **{s: {"status": s} for s in ("ready", "running", "done", "dead")})
    async def note(job: Any) -> None:
        order.append("note")

    gated.lane(mill, crawl, gates=[Breaker(3, td(minutes=5), by="domain")], priority=1)
    await mill.worker(drain=True, concurrency=1).run()
    assert order == ["page"] * 6 + ["note"] * 3


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Callable[..., GateFarm]]:
    farms: list[GateFarm] = []

    def make(db: Db, gates: str, **environment: str) -> GateFarm:
        farms.append(GateFarm(tmp_path, db, gates, **environment))
        return farms[-1]

    yield make
    for each in farms:
        each.close()


def test_four_processes_share_one_breaker(db: Db, farm: Callable[..., GateFarm]) -> None:
    """D8; issue: opens at the streak, then one probe for each cooldown; all restarted, it still stands; closes once."""
    here = farm(db, '[Breaker(5, td(seconds=3), by="domain"), Concurrency(1, by="domain")]', TAKES="0.01", BACKOFF="0")
    here.down.touch()
    here.fill(40, 1)
    workers = [here.start(f"w{n}") for n in range(4)]
    eventually(here.working)

    def opened() -> int:
        return Counter(event["event"] for event in events(here.events))["breaker_opened"]

    def told_of_all() -> bool:  # a process that is killed between its write and its word says nothing of it
        streak = db.value("select max(streak) from rowmill_gates") or 0
        return streak >= 7 and opened() == streak - 4

    eventually(told_of_all, 60, every=0.1)
    for worker in workers:
        here.kill(worker)
    runs = sorted(here.runs(), key=lambda run: run[1])
    assert most_at_once(runs) == {"d0": 1}
    gaps = [(later[1] - earlier[2]) / 1e9 for earlier, later in itertools.pairwise(runs)]
    # The breaker opened at the fifth end, as the events say; from then on each run waits for the cooldown.
    assert min(gaps[4:]) > 2.98
    row = db.one("select streak, open_until from rowmill_gates where dim = 'domain' and key = 'd0'")
    assert row["streak"] == len(runs)
    assert db.value("select sum(attempts) from pages") == len(runs)
    here.down.unlink()
    for n in range(4):
        here.start(f"v{n}")
    eventually(lambda: here.counts() == {"done": 40}, 60, every=0.2)
    here.stop()
    after = sorted(here.runs(), key=lambda run: run[1])
    assert len(after) == len(runs) + 40
    assert (after[len(runs)][1] - after[len(runs) - 1][2]) / 1e9 > 2.98
    assert opened() == len(runs) - 4
    assert Counter(event["event"] for event in events(here.events))["breaker_closed"] == 1
