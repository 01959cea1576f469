"""The fence: a worker that lost its lease cannot overwrite the outcome of the worker that took over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

from databases import Db
from rowmill import Cancel, Claim, Dead, Mill, Retry, Snooze
from rowmill.declare.outcome import Release
from rowmill.engine.execute import decide
from rowmill.store import LaneStore
from rowmill.store.lane.statements import Statements
from rowmill.store.own.workers import WorkersTable
from rowmill.testing import Kit
from rows import empty, whole

#: What stands in the row beside its state, and how the lease is kept.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "worker and time": ("worker text, claimed_at $time, heartbeat_at $time", {}),
    "worker, time and attempts": ("worker text, claimed_at $time, heartbeat_at $time, attempts integer", {}),
    "worker alone": ("worker text, heartbeat_at $time", {}),
    "worker and nothing else": ("worker text", {}),
    "time alone": ("claimed_at $time, heartbeat_at $time", {}),
    "renewed time": ("worker text, claimed_at $time", {"renew": "claimed_at"}),
    "renewed time alone": ("claimed_at $time", {"renew": "claimed_at"}),
}
LATE = [None, {"result": "late"}, Retry("late"), Snooze(td(minutes=1)), Dead("late"), Cancel("late"), Release()]

shapes = pytest.mark.parametrize("shape", SHAPES)
#: The one who takes over is another worker, or one that was given the dead one's id.
successors = pytest.mark.parametrize("successor", ["other", "zombie"], ids=["another id", "reused id"])


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


async def finish(job: Any) -> None:
    async with job.finish() as tx:
        await tx.execute("insert into effects (note) values ('made by ' || :who)", {"who": job.worker})
        tx.set(result=job.worker)


def mill_of(db: Db, shape: str) -> Mill:
    columns, options = SHAPES[shape]
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text not null default 'ready', result text, error text,"
        f" {columns.replace('$time', time)});"
        "create table effects (note text);"
        "insert into jobs (id) values (1)"
    )
    mill = Mill(db.url)
    states = {state: {"status": state} for state in ("ready", "running", "done", "dead", "canceled")}
    mill.lane("jobs", name="jobs", lease=td(minutes=1), heartbeat=td(seconds=10), **states | options)(finish)
    return mill


@asynccontextmanager
async def taken_over(mill: Mill, successor: str) -> AsyncIterator[tuple[Kit, Claim, Kit, Claim]]:
    """A claims; its lease runs out; B sweeps and claims the same row."""
    async with Kit(mill, worker_id="zombie") as a, Kit(mill, worker_id=successor) as b:
        store = await b.store()
        if store.needs_workers_table:
            await WorkersTable(store.database).ensure()  # and nobody registers: no sign of life at all
        (late,) = await a.claim()
        a.advance(td(minutes=2))
        assert [s.id for s in await b.sweep()] == [1]
        (claim,) = await b.claim()
        assert late.id == claim.id
        yield a, late, b, claim


def renewable(store: LaneStore) -> bool:
    return store.binding.renew != "none"


@shapes
@successors
async def test_nothing_a_zombie_does_reaches_the_row_that_another_took_over(db: Db, shape: str, successor: str) -> None:
    """X1: late outcomes of every kind, renewals and finish blocks are dropped; the new holder still settles."""
    mill = mill_of(db, shape)
    async with taken_over(mill, successor) as (a, late, b, claim):
        before = whole(db, "jobs", 1)
        for ended in LATE:
            report = await a.settle(late, ended)
            assert [s.claim for s in report.lost] == [late], ended
            assert [*report.written, *report.locked, *report.refused, *report.stuck] == [], ended
        store = await a.store()
        if renewable(store):
            assert await store.renew([late]) == []
        assert await store.still_held([late]) == [False]
        stepped = await a.run(late)
        assert stepped.outcome == "lost"
        assert late.lost
        assert whole(db, "jobs", 1) == before
        assert db.query("select * from effects") == []

        if renewable(store):
            assert await (await b.store()).renew([claim]) == [claim]
        assert (await b.run(claim)).outcome == "done"
    assert whole(db, "jobs", 1)["result"] == successor
    assert [r["note"] for r in db.query("select note from effects")] == [f"made by {successor}"]


@shapes
async def test_without_the_fence_the_zombies_outcome_would_stand(
    db: Db, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1: the test above is red where the fence is only the running state."""
    monkeypatch.setattr(Statements, "fence", lambda self, row, time, attempts, worker: self.running(f"{row}."))
    mill = mill_of(db, shape)
    async with taken_over(mill, "other") as (a, late, _, _):
        assert (await a.settle(late, {"result": "late"})).written
    assert whole(db, "jobs", 1)["result"] == "late"


@pytest.mark.parametrize("shape", [s for s in SHAPES if not s.startswith("worker a") or s == "worker and time"])
async def test_a_row_swept_from_a_worker_and_taken_again_by_it_has_one_live_claim(db: Db, shape: str) -> None:
    """X1: the older claim of the same process is lost like any other's."""
    mill = mill_of(db, shape)
    async with Kit(mill) as kit:
        (older,) = await kit.claim()
        kit.advance(td(minutes=2))
        await kit.sweep()
        (newer,) = await kit.claim()
        before = whole(db, "jobs", 1)
        for ended in LATE:
            assert (await kit.settle(older, ended)).lost, ended
        assert await (await kit.store()).renew([older, newer]) == [newer]
        assert {**whole(db, "jobs", 1), "heartbeat_at": None, "claimed_at": None} == {
            **before, "heartbeat_at": None, "claimed_at": None,
        }  # fmt: skip
        assert (await kit.settle(newer)).written


async def test_where_only_the_worker_tells_a_run_is_stopped_when_its_own_process_takes_the_row_again(db: Db) -> None:
    """X1: the fence cannot tell two claims of one process apart by the worker; the process itself does."""
    mill = mill_of(db, "worker alone")
    del mill.lanes["jobs"]
    runs: list[str] = []
    states = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
    async with Kit(mill) as other:

        @mill.lane("jobs", lease=td(minutes=1), poll=td(milliseconds=50), sweep_every=td(hours=1), **states)
        async def jobs(job: Any) -> dict[str, str]:
            runs.append("began")
            if len(runs) == 1:
                other.advance(td(minutes=2))
                try:
                    await other.sweep()  # the row may be claimed again before this returns
                    await asyncio.Event().wait()
                finally:
                    runs.append("stopped")
            return {"result": f"run {len(runs)}"}

        tally = await other.drain()
    assert runs == ["began", "stopped", "began"] or runs == ["began", "began", "stopped"]
    assert (tally.completed, tally.losses) == (1, 1)
    assert whole(db, "jobs", 1)["status"] == "done"


async def test_a_lane_with_nothing_but_a_worker_column_is_swept_and_drained_by_the_kit(db: Db) -> None:
    """Issue, test kit: also where only the workers table can tell that a holder is gone."""
    mill = mill_of(db, "worker and nothing else")
    async with Kit(mill) as kit:
        assert await kit.sweep() == []
        assert (await kit.drain()).completed == 1
    assert whole(db, "jobs", 1)["status"] == "done"


@pytest.mark.parametrize("kind", ["moved by hand", "deleted", "held by another"])
async def test_a_row_that_was_changed_under_a_run_is_left_as_it_is(db: Db, kind: str) -> None:
    """X1: the row must still be as this claim left it, no matter who changed it."""
    mill = mill_of(db, "worker and time")
    sql = {
        "moved by hand": "update jobs set status = 'canceled'",
        "deleted": "delete from jobs",
        "held by another": "update jobs set worker = 'somebody'",
    }[kind]
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        db.execute(sql)
        before = db.query("select * from jobs")
        for ended in LATE:
            assert (await kit.settle(claim, ended)).lost
        assert await (await kit.store()).renew([claim]) == []
        assert (await kit.run(claim)).outcome == "lost"
    assert db.query("select * from jobs") == before
    assert db.query("select * from effects") == []


async def test_a_lost_outcome_does_not_cost_its_batch_anything(db: Db) -> None:
    """X1: the others of the batch are written."""
    mill = mill_of(db, "worker and time")
    db.execute("insert into jobs (id) values (2), (3)")
    async with Kit(mill) as kit:
        claims = await kit.claim(count=3)
        db.execute("update jobs set worker = 'somebody' where id = 2")
        store = await kit.store()
        report = await store.settle([decide(store, claim, None) for claim in claims])
    assert [s.claim.id for s in report.lost] == [2]
    assert sorted(s.claim.id for s in report.written) == [1, 3]


async def test_an_unfenced_lane_does_not_look_who_holds_the_row(db: Db) -> None:
    """DESIGN, fence: refused unless unfenced=True; then the risk is the user's own."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(f"create table bare (id integer primary key, status text, updated_at {time})")
    db.execute("insert into bare values (1, 'ready', null)")
    mill = Mill(db.url)
    states = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
    mill.lane("bare", name="bare", unfenced=True, lease=td(minutes=1), **states)(finish)
    async with Kit(mill) as a, Kit(mill) as b:
        (late,) = await a.claim()
        a.advance(td(minutes=2))
        assert await b.sweep()
        assert await b.claim()
        assert (await a.settle(late)).written
    assert whole(db, "bare", 1)["status"] == "done"


async def test_eight_claimers_at_once_take_every_row_once(db: Db) -> None:
    """X1, A5: never two live claims on one row."""
    mill = mill_of(db, "worker and time")
    db.execute("delete from jobs")
    db.insert("jobs", [{"id": i} for i in range(500)])
    taken: dict[str, list[int]] = {}

    async def claimer(name: str) -> None:
        async with Kit(mill, worker_id=name) as kit:
            mine = taken.setdefault(name, [])
            while claims := await kit.claim(count=7):
                mine += [claim.id for claim in claims]

    await asyncio.gather(*[claimer(f"w{n}") for n in range(8)])
    await claimer("last")  # a claim passes over rows that others have locked at that moment
    assert sorted(key for mine in taken.values() for key in mine) == list(range(500))
    rows = db.query("select worker, count(*) as n from jobs where status = 'running' group by worker")
    assert {r["worker"]: r["n"] for r in rows} == {name: len(mine) for name, mine in taken.items() if mine}
