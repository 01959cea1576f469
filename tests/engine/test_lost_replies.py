"""What an attack on the engine found, continued: replies that are lost, a database that is away for a moment, and how
claims are counted and shared.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta as td
from typing import Any

import pytest
import sqlalchemy as sa
from test_worker_attacks import cancels_itself, statuses

from databases import Db
from farm import JOBS
from rowmill import Mill, Unreachable
from rowmill.engine.recovery.sweep import Sweeper
from rowmill.engine.worker import Worker
from rowmill.store import PostgresLane
from rowmill.store.lane.sqlite import SqliteLane
from rowmill.testing import Kit
from workers import STATES, add, events_of, jobs, until, working


def once(patch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool) -> list[str]:
    """The next call of this verb loses the database: its reply (``after`` the work was done), or the request."""
    kept, begun, lost = getattr(owner, name), False, list[str]()

    async def verb(self: Any, *given: Any) -> Any:
        nonlocal begun
        if begun or (given and given[0] == []):
            return await kept(self, *given)
        begun = True
        if after:
            fences = [(claim, claim.claimed_at) for claim in given[0]] if name == "renew" else []
            await kept(self, *given)
            for claim, moment in fences:
                claim.claimed_at = moment  # nobody was told
        lost.append(name)
        raise Unreachable("the connection is gone")

    patch.setattr(owner, name, verb)
    return lost


def lane_of(db: Db) -> type:
    return PostgresLane if db.dialect == "postgresql" else SqliteLane


async def test_a_start_up_sweep_that_fails_is_tried_again(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """X2: a worker that cannot sweep yet waits, and comes back."""
    jobs(lite)
    lost = once(monkeypatch, Sweeper, "at_start", after=False)
    mill = Mill(lite.url)

    @mill.lane("jobs", name="work", poll=td(seconds=0.1), **STATES)
    async def work(job: Any) -> None: ...

    async with working(mill):
        await until(lambda: statuses(lite) == ["done"])
    assert lost


async def test_rows_whose_claim_was_never_answered_are_worked_on_at_once(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: also where nothing else is ready, and another lane is served."""
    jobs(db, 0)
    db.execute(JOBS[db.dialect].split(";")[0].replace("table jobs", "table others"))
    lost = once(monkeypatch, lane_of(db), "claim", after=True)
    mill = Mill(db.url)
    starts: list[Any] = []

    @mill.lane("jobs", name="work", lease=td(hours=1), poll=td(seconds=0.1), **STATES)
    async def work(job: Any) -> None:
        starts.append(job.id)

    mill.lane("others", name="other", poll=td(seconds=0.1), **STATES)(work.handler)
    add(db, 3)
    async with working(mill):
        await until(lambda: statuses(db) == ["done"] * 3)
    assert lost
    assert sorted(starts) == [1, 2, 3]


async def test_a_heartbeat_leaves_an_outcome_whose_reply_was_lost_to_the_settling(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1: the outcome stands, its reply is lost, and the database is away: the beat sees the row no longer running."""
    jobs(db)
    mill, beats, lose = Mill(db.url), list[Any](), Worker.lose_from_thread
    seen = events_of(mill)
    lost = once(monkeypatch, lane_of(db), "_settle_batch", after=True)

    def not_running(self: Worker, *given: Any) -> None:
        lose(self, *given)
        beats.append(given)

    monkeypatch.setattr(Worker, "lose_from_thread", not_running)

    @mill.lane("jobs", name="work", lease=td(hours=1), heartbeat=td(seconds=0.05), max_attempts=1, **STATES)
    async def work(job: Any) -> None: ...

    async with working(mill) as worker:
        database = worker.environments[0].database
        reach = database.reach

        async def away() -> None:
            if not beats:
                raise Unreachable("the connection is gone")
            await reach()

        monkeypatch.setattr(database, "reach", away)
        await until(lambda: lost and worker.environments[0].lane_states and not worker.busy, 60)
        assert worker.counters.completed == 1
    assert statuses(db) == ["done"]
    assert not [event for event in seen if event.name == "claim_lost"]


def with_a_moving_lease(db: Db, heartbeat: float, finishes: bool = False) -> tuple[Mill, asyncio.Event]:
    """Two rows whose runs end when they are told to; every renewal moves their fence."""
    jobs(db, 2)
    mill, go = Mill(db.url), asyncio.Event()
    options = dict(STATES, renew="claimed_at", lease=td(seconds=10), heartbeat=td(seconds=heartbeat))

    @mill.lane("jobs", name="work", max_attempts=1, **options)
    async def work(job: Any) -> None:
        await go.wait()
        if finishes:
            async with job.finish() as tx:
                tx.set(note="in the block")

    return mill, go


async def test_a_moving_lease_survives_a_renewal_that_was_never_answered(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence has moved in the row, and not here: the row is still this run's."""
    mill, go = with_a_moving_lease(db, heartbeat=0.1)
    seen = events_of(mill)
    async with working(mill):
        await until(lambda: statuses(db) == ["running"] * 2)
        lost = once(monkeypatch, lane_of(db), "renew", after=True)
        await until(lambda: lost)
        before = db.value("select min(claimed_at) from jobs")
        await until(lambda: db.value("select min(claimed_at) from jobs") > before)
        go.set()
        await until(lambda: statuses(db) == ["done"] * 2)
    assert not [event for event in seen if event.name == "claim_lost"]


@pytest.mark.parametrize("ends", ["by returning", "in a finish block"])
async def test_a_run_that_ends_before_the_next_renewal_knows_where_its_fence_went(
    db: Db, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """X1: the reply to a moving renewal is lost, and the run ends before the heartbeat has looked again."""
    # A second is left between the lost reply and the next renewal: the run ends well within it.
    mill, go = with_a_moving_lease(db, heartbeat=1, finishes=ends == "in a finish block")
    seen = events_of(mill)
    lost = once(monkeypatch, lane_of(db), "renew", after=True)
    async with working(mill):
        await until(lambda: lost)
        go.set()
        await until(lambda: statuses(db) == ["done"] * 2)
    assert not [event for event in seen if event.name == "claim_lost"]


async def test_a_moving_lease_does_not_move_under_a_finish_block(pg: Db) -> None:
    """No run is lost between the settling and the commit."""
    jobs(pg, 200)
    mill = Mill(pg.url)
    seen = events_of(mill)
    options = dict(STATES, renew="claimed_at", lease=td(seconds=10), heartbeat=td(seconds=0.01))

    @mill.lane("jobs", name="work", concurrency=20, **options)
    async def work(job: Any) -> None:
        await asyncio.sleep(0.03)
        async with job.finish() as tx:
            tx.set(note="here")

    await mill.worker(drain=True).run()
    assert pg.one("select count(*) n, max(attempts) most from jobs where note = 'here'") == {"n": 200, "most": 1}
    assert not [event for event in seen if event.name == "claim_lost"]


@pytest.mark.parametrize(
    "blip",
    [
        "select pg_terminate_backend(pg_backend_pid())",
        "do $$ begin raise exception 'x' using errcode = '40P01'; end $$",
    ],
    ids=["the connection is cut", "a deadlock"],
)
async def test_a_blip_inside_a_settled_hook_costs_no_attempt(pg: Db, blip: str) -> None:
    """The database's doing, not the hook's: outcome and hook are tried again together."""
    jobs(pg)
    mill = Mill(pg.url)
    calls: list[int] = []

    @mill.lane("jobs", name="work", max_attempts=1, **STATES)
    async def work(job: Any) -> None: ...

    @work.on_settled
    async def record(tx: Any, settled: Any) -> None:
        calls.append(len(settled))
        await tx.execute(sa.text("insert into runs (job_id, attempt) values (:j, 1)"), [{"j": s.id} for s in settled])
        if len(calls) == 1:
            await tx.execute(sa.text(blip))

    await asyncio.wait_for(mill.worker(drain=True).run(), 60)
    assert statuses(pg) == ["done"]
    assert pg.value("select count(*) from runs") == 1


async def test_progress_that_cannot_be_written_fails_no_run(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note on the way is no reason to fail."""
    jobs(db)
    db.execute("alter table jobs add column progress text")
    lost = once(monkeypatch, lane_of(db), "progress", after=False)
    mill = Mill(db.url)

    @mill.lane("jobs", name="work", max_attempts=1, **STATES)
    async def work(job: Any) -> None:
        await job.progress(0.5, "half")

    await mill.worker(drain=True).run()
    assert lost
    assert statuses(db) == ["done"]


# -- counting, and fair shares


async def test_killed_claims_do_not_use_up_the_attempts_of_a_lane_without_dead(db: Db) -> None:
    """C9: a row whose workers died has its reclaims, as where a state says dead."""
    jobs(db)
    states = {name: values for name, values in STATES.items() if name != "dead"}
    mill = Mill(db.url)
    mill.lane("jobs", name="work", max_attempts=2, max_reclaims=3, lease=td(seconds=5), **states)(cancels_itself)
    kills = 0
    async with Kit(mill) as kit:
        while await kit.claim("work"):
            kills += 1
            kit.advance(td(seconds=10))
            await kit.sweep("work")
    assert kills >= 5


async def test_a_slow_hook_does_not_keep_the_worker_busy(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """X4: while an outcome is being written, nothing is asked again and again."""
    jobs(db, 3)
    mill = Mill(db.url)
    go, rounds, whole = asyncio.Event(), list[float](), Worker._round

    async def counted(self: Worker) -> None:
        rounds.append(time.monotonic())
        await whole(self)

    monkeypatch.setattr(Worker, "_round", counted)

    @mill.lane("jobs", name="work", concurrency=3, batch=3, poll=td(hours=1), **STATES)
    async def work(job: Any) -> None:
        await asyncio.sleep(0.2 * job.id)

    @work.on_settled
    async def record(tx: Any, settled: Any) -> None:
        await go.wait()

    async with working(mill):
        await asyncio.sleep(1)  # all three have ended, the first one's hook is under way
        before = len(rounds)
        await asyncio.sleep(1)
        assert len(rounds) - before < 10
        go.set()


async def test_rows_at_hand_for_one_lane_take_no_room_from_another(db: Db) -> None:
    """A2: a lane at its own concurrency leaves the free places to those below it."""
    jobs(db, 600)
    db.execute(JOBS[db.dialect].split(";")[0].replace("table jobs", "table others"))
    db.insert("others", [{"note": None}] * 3)
    mill = Mill(db.url)
    go, left = asyncio.Event(), list[int]()

    @mill.lane("jobs", name="quick", concurrency=1, priority=0, **STATES)
    async def quick(job: Any) -> None:
        await asyncio.sleep(0.005)

    @mill.lane("others", name="slow", concurrency=3, priority=1, **STATES)
    async def slow(job: Any) -> None:
        left.append(db.value("select count(*) from jobs where status = 'queued'"))
        await go.wait()

    async with working(mill, concurrency=4, grace=1):
        await until(lambda: len(left) == 3)
        go.set()
    assert min(left) > 0


async def test_rows_at_hand_behind_slow_runs_are_given_back(db: Db) -> None:
    """A3: another worker could have them."""
    jobs(db, 0)
    db.insert("jobs", [{"note": None}] * 300)
    mill = Mill(db.url)
    go = asyncio.Event()

    @mill.lane("jobs", name="work", concurrency=2, poll=td(seconds=0.2), **STATES)
    async def work(job: Any) -> None:
        await (asyncio.sleep(0.002) if job.id < 100 else go.wait())

    async with working(mill, grace=1):
        await until(lambda: db.value("select count(*) from jobs where status = 'done'") >= 99)
        await until(lambda: db.value("select count(*) from jobs where status = 'running'") == 2, 60)
        for _ in range(20):  # nor are they taken again: what was short before is not any more
            await asyncio.sleep(0.05)
            assert db.value("select count(*) from jobs where status = 'running'") == 2
        go.set()
