"""Which running rows a sweep may take: another program's claims, shortened leases, and columns that tell nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta as td
from typing import Any

import pytest

import systems
from databases import Db, as_time
from rowmill import Mill
from rowmill.clock import Clock
from rowmill.store import open_lane
from rowmill.store.lane import row_watch
from rowmill.store.lane.sweep import take_over
from rowmill.store.own.schema import ensure
from rowmill.store.own.workers import WorkersTable, WorkerState
from rowmill.testing import Kit
from workers import until, working

NOW = {"postgresql": "now()", "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now')"}
STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


async def handle(job: Any) -> None:
    return None


#: A lane, a row for it, and the literal claim of the program that used the table before: A6, B2, C6, D2, E2.
FOREIGN: dict[str, tuple[Callable[..., list[Any]], str]] = {
    "extraction": (
        systems.insert_extraction,
        "update extraction_queue set status_id = 2, worker_id = 'theirs', processing_started_at = {now}",
    ),
    "req": (systems.insert_req, "update search_sessions set status = 'scraping_company_data', updated_at = {now}"),
    "rdprm": (systems.insert_rdprm, "update rdprm_searches set status = 'in_progress'"),
    "ocr": (
        systems.insert_ocr,
        "update extraction_queue set status_id = 6, ocr_worker_id = 'theirs', ocr_started_at = {now},"
        " ocr_attempts = ocr_attempts + 1",
    ),
    "enrichment": (
        systems.insert_enrichment,
        "update enrichment_jobs set status = 'running', locked_at = {now}, locked_by = 'theirs',"
        " attempts = attempts + 1, updated_at = {now}",
    ),
    "scrape": (
        systems.insert_scrape,
        "update scrape_jobs set status = 'running', locked_by = 'theirs', locked_at = {now}, heartbeat_at = {now}",
    ),
    "website_analysis": (
        systems.insert_analysis,
        'update "AnalysisJob" set "inProgress" = true, "updatedAt" = {now}',
    ),
}


@pytest.mark.parametrize("lane", FOREIGN)
async def test_a_row_that_another_program_claimed_is_left_alone_until_the_lease_is_over(
    db: Db, mill: Mill, lane: str
) -> None:
    """A6, A12, B2, B7, C6, D2, D3, E2, E6: its claim writes no heartbeat, or no time at all."""
    insert, claim = FOREIGN[lane]
    systems.create(db)
    insert(db)
    declared = getattr(systems, lane)(mill, handle)
    await mill.prepare()
    db.execute(claim.format(now=NOW[db.dialect]))
    async with Kit(mill) as kit:
        for lease in (td(seconds=10), declared.lease - td(seconds=30)):
            assert await kit.sweep() == []
            mill.clock.shift = lease
        assert await kit.sweep() == []
        mill.clock.shift = declared.lease + td(seconds=30)
        (swept,) = await kit.sweep()
        assert not swept.poison


def table(db: Db, *columns: str) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    listed = ", ".join(["id integer primary key", "status text not null default 'ready'", *columns])
    db.execute(f"create table jobs ({listed.replace('$time', time)}); insert into jobs (id) values (1)")


@pytest.mark.parametrize("columns", [("heartbeat_at",), ("claimed_at", "heartbeat_at"), ("claimed_at",)])
async def test_a_sign_of_life_in_the_far_future_does_not_keep_a_row_for_ever(
    db: Db, mill: Mill, columns: tuple[str, ...]
) -> None:
    """X1: such a time tells nothing; the row is judged by its other times, or by when it was first seen running."""
    table(db, "worker text", *(f"{column} $time" for column in columns))
    mill.lane("jobs", name="jobs", lease=td(minutes=5), **STATES)(handle)
    await mill.prepare()
    far = "'2999-01-01 00:00:00+00'"
    async with Kit(mill) as kit:
        await kit.claim()
        db.execute("update jobs set " + ", ".join(f"{column} = {far}" for column in columns))
        assert await kit.sweep() == []
        kit.advance(td(minutes=4))
        assert await kit.sweep() == []
        kit.advance(td(minutes=2))
        assert len(await kit.sweep()) == 1


async def test_a_row_that_was_seen_running_and_ended_is_not_remembered(db: Db, mill: Mill) -> None:
    """X1: when it runs again, its time begins again."""
    table(db, "claimed_at $time")
    mill.lane("jobs", name="jobs", lease=td(minutes=5), **STATES)(handle)
    await mill.prepare()
    async with Kit(mill) as kit:
        for _ in range(2):
            db.execute("update jobs set status = 'running'")
            assert await kit.sweep() == []
            kit.advance(td(minutes=4))
            assert await kit.sweep() == []
            db.execute("update jobs set status = 'done'")
            assert await kit.sweep() == []


@pytest.mark.parametrize("kind", ["smallint", "integer", "bigint"])
@pytest.mark.parametrize("dead", [True, False])
async def test_a_count_of_reclaims_at_the_end_of_its_type_stops_no_sweep(
    db: Db, mill: Mill, kind: str, dead: bool
) -> None:
    """X1: the row itself ends; the others go back."""
    most = {"smallint": 2**15 - 1, "integer": 2**31 - 1, "bigint": 2**63 - 1}[kind]
    table(db, "worker text", "claimed_at $time", "heartbeat_at $time", f"reclaims {kind}", f"failures {kind}")
    db.execute("insert into jobs (id) values (2)")
    states = STATES if dead else {**STATES, "dead": None}
    mill.lane("jobs", name="jobs", lease=td(minutes=5), **states)(handle)
    async with Kit(mill) as kit:
        assert len(await kit.claim(count=2)) == 2
        db.execute(f"update jobs set reclaims = {most}, failures = {0 if dead else most} where id = 1")
        kit.advance(td(minutes=6))
        swept = {row.id: row for row in await kit.sweep()}
        assert swept.keys() == {1, 2}
        assert (swept[1].poison, swept[2].poison) == (True, False)
        assert all(row.refused is None for row in swept.values())
        assert db.value("select status from jobs where id = 2") == "ready"
        assert db.value("select status from jobs where id = 1") == ("dead" if dead else "ready")


@pytest.mark.parametrize("columns", [("worker text", "heartbeat_at $time"), ("claimed_at $time",), ("worker text",)])
async def test_a_deploy_that_shortens_the_lease_takes_no_row_from_a_live_worker(
    db: Db, mill: Mill, columns: tuple[str, ...]
) -> None:
    """A12, X1: the row's holder renews by the lease under which it claimed."""
    table(db, *columns)
    runs, may_end = [], asyncio.Event()

    async def work(job: Any) -> None:
        runs.append(job.id)
        await may_end.wait()

    mill.lane("jobs", name="jobs", lease=td(hours=1), **STATES)(work)
    newer = Mill(db.url)
    shorter = {"lease": td(milliseconds=100), "heartbeat": td(milliseconds=50), "sweep_every": td(milliseconds=20)}
    newer.lane("jobs", name="jobs", poll=td(milliseconds=20), **shorter, **STATES)(work)
    async with working(mill, worker_id="old"):
        await until(lambda: runs)
        async with working(newer, worker_id="new") as new:
            sweeps = 0

            async def sweep(*given: Any) -> Any:
                nonlocal sweeps
                sweeps += 1
                return await swept(*given)

            await until(lambda: new.environments[0].opened)
            store = new.environments[0].lane_states[0].store
            swept, store.sweep = store.sweep, sweep
            began = time.monotonic()
            await until(lambda: sweeps > 20 and time.monotonic() > began + 1)
            assert runs == [1]
            assert db.value("select status from jobs") == "running"
        may_end.set()
        await until(lambda: db.value("select status from jobs") == "done")


async def test_rows_of_a_worker_that_died_are_taken_back_by_its_own_lease(db: Db, mill: Mill) -> None:
    """X1: a worker that was not heard of since its lease ran out makes no other row wait."""
    table(db, "worker text", "claimed_at $time")
    mill.lane("jobs", name="jobs", lease=td(milliseconds=100), **STATES)(handle)
    await mill.prepare()
    fleet = WorkersTable(dict(mill.databases())[next(iter(mill.environments))])
    try:
        old = WorkerState("old", "1", "elsewhere", 1, ["jobs"], "", leases={"jobs": (600.0, 300.0)})
        assert await fleet.register(old) is None
        assert await fleet.longest_lease("jobs", at_start=False) == td(minutes=10)
        assert await fleet.longest_lease("jobs", at_start=True) == td(minutes=5)
        assert await fleet.longest_lease("other", at_start=False) == td(0)
        db.execute("update rowmill_workers set seen_at = '2020-01-01 00:00:00'")
        assert await fleet.longest_lease("jobs", at_start=False) == td(0)
        db.execute(f"update rowmill_workers set seen_at = {NOW[db.dialect]}, state = 'stopped'")
        assert await fleet.longest_lease("jobs", at_start=False) == td(0)
    finally:
        await fleet.database.close()


async def test_a_row_that_is_taken_back_again_waits_longer_each_time(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that kills its process must not run through its reclaims within seconds. The first two cost no wait, and
    neither does a sweep, which comes when a lease is over.
    """
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text default 'ready', worker text, attempts integer"
        f" default 0, claimed_at {time}, heartbeat_at {time}, run_after {time})"
    )
    db.insert("jobs", [{"id": 1}])
    mill = Mill(db.url)
    lane = mill.lane("jobs", name="jobs", max_attempts=10, **STATES)(handle)
    database = mill.databases()[0][1]
    await ensure(database)
    clock = Clock()
    store = await open_lane(lane, "default", database, clock, "w")
    waits = []
    for _ in range(5):
        (claim,) = await store.claim(1)
        _, taken, _ = await take_over(store, "w", "", lambda _: True, succeeds=True)
        assert [row.id for row in taken] == [claim.id]
        now, after = (await database.read(lambda run: run(f"select {store.statements.now('run_after')}, run_after from"
                                                          " jobs", ())))[0]  # fmt: skip
        waits.append((as_time(after) - as_time(now)).total_seconds() if after else 0.0)
        clock.advance(td(seconds=120))
    assert max(waits[:2]) <= 0
    assert all(most / 2 < wait <= most for wait, most in zip(waits[2:], (5, 10, 20), strict=True))
    assert await store.backs_off()
    # A drain asked for ready rows a moment ago, when the wait was not over.
    past = "now() - interval '60 s'" if db.dialect == "postgresql" else "datetime('now', '-60 seconds')"
    db.execute(f"update rowmill_suspects set swept_at = {past}")
    assert not await store.backs_off()
    monkeypatch.setattr(row_watch, "_JUST_OVER", 3600.0)
    assert await store.backs_off()
    await store.claim(1)
    clock.advance(lane.lease * 2)
    assert len(await store.sweep(lane.lease)) == 1
    assert len(await store.claim(1)) == 1
    await database.close()
