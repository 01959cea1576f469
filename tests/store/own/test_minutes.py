"""rowmill_minutes: what each lane did in each minute, written beside the work."""

from __future__ import annotations

import asyncio
from datetime import timedelta as td
from typing import Any

import pytest

import farm
from databases import Db
from rowmill import Cancel, Dead, Mill, Snooze, fixed
from rowmill.clock import Clock
from rowmill.errors import Busy
from rowmill.store import Database
from rowmill.store.own import schema
from rowmill.store.own.minutes import Minutes


def mill_over(db: Db, handler: Any, **options: Any) -> Mill:
    db.execute(farm.JOBS[db.dialect])
    mill = Mill(db.url)
    mill.lane(
        "jobs", name="jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
        dead={"status": "dead"}, canceled={"status": "canceled"}, max_attempts=2, poll=td(seconds=0.2),
        **{"backoff": fixed(td(0)), **options},
    )(handler)  # fmt: skip
    return mill


async def history(db: Db, hours: float = 1.0, clock: Clock | None = None) -> Any:
    database = Database.open(db.url)
    try:
        return (await Minutes(database, clock or Clock()).history(["jobs"], hours))["jobs"]
    finally:
        await database.close()


async def test_each_outcome_is_counted_in_its_minute_once(db: Db) -> None:
    """The charts, the rates on the edges and the forecast are made of these counts."""
    seen: set[int] = set()

    async def work(job: Any) -> None:
        match job["note"]:
            case "dead":
                raise Dead("no")
            case "cancel":
                raise Cancel("no")
            case "snooze" if job.id not in seen:
                seen.add(job.id)
                raise Snooze(td(0))
            case "retry" if job.attempt == 1:
                raise ConnectionError("again")

    mill = mill_over(db, work)
    notes = ["ok"] * 5 + ["dead"] * 2 + ["cancel"] + ["snooze"] + ["retry"] * 3
    db.insert("jobs", [{"status": "queued", "note": note} for note in notes])
    await mill.worker(drain=True).run()
    found = (await history(db)).recent
    counted = {name: found[name] for name in ("started", "done", "retried", "dead", "snoozed", "canceled", "lost")}
    assert counted == {
        "started": 16, "done": 9, "retried": 3, "dead": 2, "snoozed": 1, "canceled": 1, "lost": 0,
    }  # fmt: skip
    assert found.runs == 16
    assert found.rate("done") > 0


async def test_counts_that_could_not_be_written_are_written_later(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    added, tries, refused = Minutes.add, 0, asyncio.Event()

    async def refuse_first(self: Minutes, counts: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            refused.set()
            raise Busy("not now")
        await added(self, counts)

    monkeypatch.setattr(Minutes, "add", refuse_first)
    monkeypatch.setattr("rowmill.engine.counters._WRITE_EVERY", 0.05)
    monkeypatch.setattr("rowmill.engine.counters._LAST_WRITE", 60.0)

    async def work(job: Any) -> None:
        if job["note"] == "slow":  # the last one ends when the others' counts have been refused
            await asyncio.wait_for(refused.wait(), 60)

    mill = mill_over(lite, work)
    lite.insert("jobs", [{"status": "queued", "note": note} for note in ["quick"] * 4 + ["slow"]])
    await mill.worker(drain=True).run()
    assert tries >= 2
    assert (await history(lite)).recent["done"] == 5


async def test_counts_that_are_being_written_when_the_worker_stops_are_written(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, begun = Minutes.add, asyncio.Event()

    async def add_slowly(self: Minutes, counts: Any) -> None:
        begun.set()
        await asyncio.sleep(0.5)  # the worker stops meanwhile
        await added(self, counts)

    monkeypatch.setattr(Minutes, "add", add_slowly)
    monkeypatch.setattr("rowmill.engine.counters._WRITE_EVERY", 0.05)
    monkeypatch.setattr("rowmill.engine.counters._LAST_WRITE", 60.0)

    async def work(job: Any) -> None:
        if job["note"] == "slow":
            await asyncio.wait_for(begun.wait(), 60)

    mill = mill_over(lite, work)
    lite.insert("jobs", [{"status": "queued", "note": note} for note in ["quick"] * 4 + ["slow"]])
    await mill.worker(drain=True).run()
    assert (await history(lite)).recent["done"] == 5


async def test_the_settle_path_writes_no_minutes(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many batches are settled, the counts go in one statement every few seconds, and one at the end."""
    added, calls = Minutes.add, 0

    async def count(self: Minutes, counts: Any) -> None:
        nonlocal calls
        calls += 1
        await added(self, counts)

    monkeypatch.setattr(Minutes, "add", count)

    async def work(job: Any) -> None: ...

    mill = mill_over(lite, work, batch=5, concurrency=1)
    lite.insert("jobs", [{"status": "queued"}] * 300)
    await mill.worker(drain=True).run()
    assert (await history(lite)).recent["done"] == 300
    assert calls <= 4


async def test_workers_without_the_table_work_on_and_the_charts_know(pg: Db) -> None:
    async def work(job: Any) -> None: ...

    mill = mill_over(pg, work)
    pg.execute("""insert into jobs (status) values ('queued');
        revoke create on schema public from public; create role lowly_minutes login;
        grant select, update on jobs to lowly_minutes""")
    try:
        low = Mill(pg.url.replace("postgres:", "lowly_minutes:", 1))
        low.lanes = mill.lanes
        await low.worker(drain=True).run()
        assert pg.value("select status from jobs") == "done"
        database = Database.open(low.environments["default"])
        assert not await Minutes(database, Clock()).exists()
        await database.close()
    finally:
        pg.execute("drop owned by lowly_minutes; drop role lowly_minutes")


async def test_old_minutes_are_pruned_and_long_times_are_told_in_steps(db: Db) -> None:
    database, clock = Database.open(db.url), Clock()
    await schema.ensure(database)
    clock.advance(-td(days=9))
    await Minutes(database, clock).add({"jobs": {"done": 7}})
    for _ in range(30):
        clock.advance(td(hours=1))
        await Minutes(database, clock).add({"jobs": {"done": 1, "run_us": 2_000_000, "t7": 1}, "other": {"done": 99}})
    found = await history(db, 30, clock)
    assert len(found.spans) <= 73
    assert sum(span["done"] for span in found.spans) in (29, 30)
    assert 0.5 < next(span for span in found.spans if span["done"]).quantile(0.5) <= 1.0
    await Minutes(database, Clock()).prune()
    assert (
        db.value("select min(minute) from rowmill_minutes") > db.value("select max(minute) from rowmill_minutes") - 1440
    )
    await database.close()


async def test_minutes_that_a_clock_ran_ahead_to_count_when_they_come(db: Db) -> None:
    """Issue 9.1: a database whose clock was set back tells no rate of what has not happened yet."""
    database = Database.open(db.url)
    await schema.ensure(database)
    minutes = Minutes(database, Clock())
    await minutes.add({"a": {"done": 2}})
    await minutes.add({"b": {"done": 1}})
    db.execute("insert into rowmill_minutes (lane, minute, done) select lane, minute + 600, 500 from rowmill_minutes")
    found = await minutes.history(["a", "b"])
    await database.close()
    assert [found[lane].recent.numbers.get("done") for lane in ("a", "b")] == [2, 1]
