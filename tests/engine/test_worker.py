"""One worker in this process: order, wake-ups, leases, timeouts, environments that come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta as td
from typing import Any

import pytest

import systems
from databases import Db, Server
from farm import JOBS
from rowmill import DeclarationError, Mill, RowmillError, Snooze, Unreachable, fixed
from rowmill.engine.worker import Worker
from rowmill.store import LaneStore, probe
from workers import STATES, add, events_of, jobs, until, working


def registre(urls: dict[str, str], handler: Callable[[Any], Awaitable[Any]]) -> Mill:
    mill = Mill(urls)
    systems.extraction(mill, handler)
    systems.req(mill, handler)
    systems.rdprm(mill, handler)
    return mill


async def test_one_slot_starts_rows_strictly_by_environment_lane_and_age(fresh: Callable[[str], Db], db: Db) -> None:
    """A2, A3: prod before staging; extraction, then REQ, then RDPRM; oldest first."""
    prod, staging = db, fresh(db.dialect)
    expected = []
    for name, where in (("staging", staging), ("prod", prod)):
        systems.create(where, "registre")
        rows = {"rdprm": systems.insert_rdprm(where, 3), "req": systems.insert_req(where, 3)}
        rows["extraction"] = systems.insert_extraction(where, 3)
        expected = [(name, kind, id) for kind in ("extraction", "req", "rdprm") for id in rows[kind]] + expected
    starts: list[tuple[str, str, Any]] = []

    async def handler(job: Any) -> None:
        starts.append((job.environment, job.lane, job.id))

    mill = registre({"prod": prod.url, "staging": staging.url}, handler)
    await mill.worker(drain=True, concurrency=1).run()
    assert starts == expected


async def test_a_lane_below_looks_up_before_it_takes_what_has_come_free(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2: a run below ends, and a row above arrives, while a claim of the lane below is on its way."""
    jobs(db, 6)
    db.execute("create table urgent (id integer primary key, status text not null default 'queued', worker text)")
    starts: list[str] = []
    first, claims = asyncio.Event(), 0
    mill = Mill(db.url)

    @mill.lane("urgent", name="urgent", priority=1, **STATES)
    async def urgent(job: Any) -> None:
        starts.append("urgent")

    @mill.lane("jobs", name="jobs", priority=2, batch=1, **STATES)
    async def handler(job: Any) -> None:
        starts.append("job")
        await (first.wait() if len(starts) == 1 else asyncio.sleep(0.05))

    claim = LaneStore.claim
    worker = mill.worker(drain=True, concurrency=2)

    async def counted(store: LaneStore, count: int) -> Any:
        nonlocal claims
        if store.lane.name == "jobs":
            claims += 1
            if claims == 2:
                first.set()
                await until(lambda: worker.capacity.busy == 0)
                await asyncio.to_thread(db.execute, "insert into urgent (id) values (1)")
        return await claim(store, count)

    monkeypatch.setattr(LaneStore, "claim", counted)
    await worker.run()
    assert starts.index("urgent") == 2, starts


async def test_a_lane_above_that_has_come_free_meanwhile_goes_first(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """A2: its only run ends while lanes below it are asked whether they have something."""
    tables = ("top", "middle", "bottom")
    for table in tables:
        db.execute(f"create table {table} (id integer primary key, status text not null default 'queued', worker text)")
    db.execute("insert into top (id) values (1), (2)")
    starts: list[str] = []
    may_end, asked = asyncio.Event(), 0
    mill = Mill(db.url)

    @mill.lane("top", name="top", priority=1, concurrency=1, batch=1, poll=td(seconds=0.1), **STATES)
    async def top(job: Any) -> None:
        starts.append("top")
        if len(starts) == 1:
            for table in tables[1:]:  # without letting go of the loop: both are there when anybody asks
                db.execute(f"insert into {table} (id) values (1), (2)")
            await may_end.wait()

    for name in tables[1:]:

        @mill.lane(name, name=name, priority=2, poll=td(seconds=0.1), **STATES)
        async def below(job: Any) -> None:
            starts.append(job.lane)
            await asyncio.sleep(0.05)

    worker = mill.worker(drain=True, concurrency=2)

    async def probed(database: Any, stores: Any) -> Any:
        nonlocal asked
        found = await probe(database, stores)
        if starts == ["top"] and len(found) == 2:
            asked += 1
            may_end.set()
            await until(lambda: worker.capacity.busy == 0)
        return found

    monkeypatch.setattr("rowmill.engine.worker.probe", probed)
    await worker.run()
    assert asked == 1
    assert starts[:2] == ["top", "top"], starts
    assert len(starts) == 6


async def test_with_batches_of_one_no_row_waits_behind_a_slow_run(db: Db) -> None:
    """A3: one row at a time, also after runs so short that others would be fetched ahead of them."""
    jobs(db, 14)
    held: list[int] = []
    mill = Mill(db.url)

    @mill.lane("jobs", name="jobs", batch=1, concurrency=1, **STATES)
    async def handler(job: Any) -> None:
        if job.id == 10:
            await asyncio.sleep(0.2)  # what would be claimed meanwhile, is by now
            held.append(await asyncio.to_thread(db.value, "select count(*) from jobs where status = 'running'"))

    await mill.worker(drain=True).run()
    assert held == [1]


async def test_a_row_of_a_higher_lane_that_arrives_in_mid_backlog_starts_next(
    fresh: Callable[[str], Db], db: Db
) -> None:
    """A2: however long the backlog below it, and in whichever environment."""
    prod, staging = db, fresh(db.dialect)
    for where in (prod, staging):
        systems.create(where, "registre")
    systems.insert_rdprm(staging, 30)
    systems.insert_req(staging, 5)
    starts: list[tuple[str, str]] = []

    async def handler(job: Any) -> None:
        starts.append((job.environment, job.lane))
        if len(starts) == 8:  # in the middle of staging's RDPRM backlog
            systems.insert_extraction(staging, 1)
        if len(starts) == 12:
            systems.insert_rdprm(prod, 1)

    mill = registre({"prod": prod.url, "staging": staging.url}, handler)
    await mill.worker(drain=True, concurrency=1).run()
    assert starts[:5] == [("staging", "req")] * 5
    assert starts[8] == ("staging", "extraction")
    assert starts[12] == ("prod", "rdprm")
    assert len(starts) == 37


@pytest.mark.no_pooler("a transaction pooler loses LISTEN with the transaction: the next poll is the wake-up there")
async def test_a_wake_up_makes_pickup_immediate(db: Db) -> None:
    """A3, X4: the poll is an hour away; a notification, or on SQLite another's commit, is enough."""
    jobs(db, 0)
    mill = Mill(db.url)
    done = asyncio.Event()

    @mill.lane("jobs", poll=td(hours=1), **STATES)
    async def work(job: Any) -> None:
        done.set()

    async with working(mill) as worker:
        await until(lambda: worker.environments[0].opened and not worker.environments[0].look)
        await asyncio.sleep(0.3)  # let the listener connect: its first ring is not what is tested
        add(db)
        if db.dialect == "postgresql":
            await mill.wake()
        await asyncio.wait_for(done.wait(), 60)


async def test_a_worker_comes_back_for_its_own_retries_when_they_are_due(db: Db) -> None:
    """C9: without waiting for the poll, and a snooze costs no attempt."""
    jobs(db)
    mill = Mill(db.url)
    attempts: list[int] = []

    @mill.lane("jobs", poll=td(hours=1), max_attempts=3, backoff=fixed(td(seconds=0.2)), **STATES)
    async def work(job: Any) -> Any:
        attempts.append(job.attempt)
        if len(attempts) == 1:
            return Snooze(td(seconds=0.2))
        if len(attempts) == 2:
            raise ValueError("once")
        return None

    async with working(mill):
        await until(lambda: db.value("select status from jobs") == "done", 60)
    assert attempts == [1, 1, 2]


async def test_an_environment_that_is_down_does_not_stop_the_others(fresh: Callable[[str], Db]) -> None:
    """X2: it is reported, tried again, and served when it is back."""
    with Server() as own:
        prod = Db(own.create_database("prod"))
        staging = fresh("sqlite")
        jobs(prod), jobs(staging)
        own.stop("fast")
        mill = Mill({"prod": prod.url, "staging": staging.url})
        seen = events_of(mill)

        @mill.lane("jobs", poll=td(seconds=0.2), **STATES)
        async def work(job: Any) -> None: ...

        async with working(mill):
            await until(lambda: staging.value("select status from jobs") == "done")
            assert any(e.name == "environment_down" and e.fields["environment"] == "prod" for e in seen)
            await asyncio.to_thread(own.start)
            await until(lambda: prod.value("select status from jobs") == "done")


async def test_a_wrong_declaration_in_any_environment_is_told_at_the_start(fresh: Callable[[str], Db], db: Db) -> None:
    """The message names lane, table and environment."""
    jobs(db)
    mill = Mill({"prod": db.url, "staging": fresh("sqlite").url})

    @mill.lane("jobs", **STATES)
    async def work(job: Any) -> None: ...

    with pytest.raises(DeclarationError, match="'work': there is no table 'jobs' in environment 'staging'"):
        await mill.worker().run()


async def test_a_lost_claim_cancels_its_handler_and_drops_its_outcome(db: Db) -> None:
    """X1: told at once, by the heartbeat."""
    jobs(db)
    mill = Mill(db.url)
    seen = events_of(mill)
    told: list[bool] = []

    @mill.lane("jobs", lease=td(seconds=1), heartbeat=td(seconds=0.1), poll=td(hours=1), **STATES)
    async def work(job: Any) -> Any:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            told.append(job.lost)
            raise

    async with working(mill):
        await until(lambda: db.value("select status from jobs") == "running")
        db.execute("update jobs set status = 'done', note = 'by hand', worker = 'an operator'")
        await until(lambda: told)
        await until(lambda: any(e.name == "claim_lost" for e in seen))
    assert told == [True]
    assert db.one("select status, note from jobs") == {"status": "done", "note": "by hand"}


async def test_one_locked_row_never_costs_the_others_their_lease(pg: Db) -> None:
    """A12: an operator's transaction holds one running row; the others are renewed, and none is lost."""
    import asyncpg

    jobs(pg, 5)
    mill = Mill(pg.url)
    seen = events_of(mill)
    go = asyncio.Event()

    @mill.lane("jobs", heartbeat=td(seconds=0.2), sweep_every=td(seconds=0.2), **STATES)
    async def work(job: Any) -> None:
        await go.wait()

    async with working(mill), working(mill, worker_id="rival"):
        await until(lambda: pg.value("select count(*) from jobs where status = 'running'") == 5)
        operator = await asyncpg.connect(pg.direct)
        try:
            async with operator.transaction():
                await operator.execute("select * from jobs order by id limit 1 for update")
                await renewed(pg, "id > 1", times=5)
        finally:
            await operator.close()
        go.set()
        await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 5)
    assert {e.fields["id"] for e in seen if e.name in ("claim_lost", "row_swept")} <= {1}
    assert pg.value("select max(attempts) from jobs where id > 1") == 1


async def renewed(pg: Db, rows: str, times: int) -> None:
    """Wait until the heartbeat of each of these rows was written so many times."""
    for _ in range(times):
        before = pg.value(f"select max(heartbeat_at) from jobs where {rows}")
        await until(lambda: pg.value(f"select min(heartbeat_at) from jobs where {rows}") > before)  # noqa: B023


async def test_a_row_locked_for_less_than_its_lease_keeps_it(pg: Db) -> None:
    """A12: renewals pass it over while it is locked, and come back to it when the lock is gone."""
    import asyncpg

    jobs(pg, 2)
    mill = Mill(pg.url)
    seen = events_of(mill)
    go = asyncio.Event()

    @mill.lane("jobs", heartbeat=td(seconds=0.2), sweep_every=td(seconds=0.1), **STATES)
    async def work(job: Any) -> None:
        await go.wait()

    async with working(mill), working(mill, worker_id="rival"):
        await until(lambda: pg.value("select count(*) from jobs where status = 'running'") == 2)
        operator = await asyncpg.connect(pg.direct)
        try:
            async with operator.transaction():
                await operator.execute("select * from jobs where id = 1 for update")
                await renewed(pg, "id = 2", times=5)
        finally:
            await operator.close()
        await renewed(pg, "id = 1", times=2)
        go.set()
        await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 2)
    assert not [e for e in seen if e.name in ("claim_lost", "row_swept")]


async def test_a_locked_row_is_settled_when_the_lock_is_gone(pg: Db) -> None:
    """The others of the batch are not kept waiting."""
    import asyncpg

    jobs(pg, 3)
    mill = Mill(pg.url)
    go = asyncio.Event()

    @mill.lane("jobs", **STATES)
    async def work(job: Any) -> None:
        await go.wait()

    async with working(mill):
        await until(lambda: pg.value("select count(*) from jobs where status = 'running'") == 3)
        operator = await asyncpg.connect(pg.direct)
        try:
            async with operator.transaction():
                await operator.execute("select * from jobs order by id limit 1 for update")
                go.set()
                await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 2)
        finally:
            await operator.close()
        await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 3)


async def test_an_async_run_past_its_timeout_fails(db: Db) -> None:
    """A run's own limit; the slot is free again."""
    jobs(db)
    mill = Mill(db.url)

    @mill.lane("jobs", timeout=td(seconds=0.2), max_attempts=1, **STATES)
    async def work(job: Any) -> None:
        await asyncio.sleep(30)

    tally = await mill.worker(drain=True).run()
    assert tally.died == 1
    assert db.value("select error from jobs") == "timed out after 0.2 s"


async def test_a_thread_that_cannot_be_stopped_keeps_its_row_and_has_the_process_recycled(db: Db) -> None:
    """X1: past timeout and grace; the other lane's run ends first, and the stuck row is still held."""
    jobs(db, 1)
    mill = Mill(db.url)
    release = threading.Event()

    @mill.lane("jobs", timeout=td(seconds=0.2), max_attempts=1, **STATES)
    def work(job: Any) -> None:
        release.wait(600)

    worker: Worker = mill.worker(grace=0.3)
    try:
        await asyncio.wait_for(worker.run(), 60)
        assert worker.recycling
        assert db.value("select status from jobs") == "running"
    finally:
        release.set()


async def test_a_second_stop_ends_at_once_and_gives_the_row_back(db: Db) -> None:
    """X2: no attempt is lost."""
    jobs(db)
    mill = Mill(db.url)

    @mill.lane("jobs", **STATES)
    async def work(job: Any) -> None:
        await asyncio.sleep(3600)

    worker = mill.worker(grace=3600)
    task = asyncio.create_task(worker.run())
    await until(lambda: db.value("select status from jobs") == "running")
    worker.stop()
    worker.stop()
    await asyncio.wait_for(task, 60)
    assert db.one("select status, attempts, worker from jobs") == {"status": "queued", "attempts": 0, "worker": None}


async def test_sync_handlers_run_beside_each_other_in_threads(db: Db) -> None:
    """C7: one that blocks does not stop the others."""
    jobs(db, 4)
    mill = Mill(db.url)
    meet = threading.Barrier(4, timeout=60)

    @mill.lane("jobs", concurrency=4, **STATES)
    def work(job: Any) -> dict[str, str]:
        meet.wait()
        return {"note": threading.current_thread().name}

    await mill.worker(drain=True).run()
    assert db.value("select count(distinct note) from jobs") == 4


async def test_a_batch_runs_in_parallel_and_one_failure_does_not_affect_the_others(db: Db) -> None:
    """C7: N rows at once; the failed one is retried alone."""
    jobs(db, 10)
    mill = Mill(db.url)
    running = most = 0

    @mill.lane("jobs", batch=10, concurrency=10, max_attempts=1, **STATES)
    async def work(job: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        if job.id == 1:
            raise ValueError("only this one")

    tally = await mill.worker(drain=True).run()
    assert most == 10
    assert (tally.completed, tally.died) == (9, 1)


async def test_idle_workers_hardly_ask_the_database(pg: Db) -> None:
    """X4: fifty idle lanes are probed with one statement, every few seconds."""
    pg.execute(JOBS["postgresql"])
    mill = Mill(pg.url)
    for n in range(50):
        states = {**STATES, "ready": {"status": f"queued-{n}"}, "running": {"status": f"running-{n}"}}
        mill.lane("jobs", name=f"lane{n}", poll=td(seconds=1), **states)(_nothing)
    calls = 0

    async with working(mill) as worker:
        await until(lambda: worker.environments[0].opened and not worker.environments[0].look)
        database = worker.environments[0].database
        read, write = database.read, database.write

        def counted(verb: Any) -> Any:
            def call(*given: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                return verb(*given, **named)

            return call

        database.read, database.write, began = counted(read), counted(write), time.monotonic()
        await until(lambda: calls >= 3)
        assert calls <= 2 + 2 * (time.monotonic() - began)


async def _nothing(job: Any) -> None: ...


async def test_rows_claimed_by_a_statement_whose_reply_was_lost_are_worked_on(db: Db) -> None:
    """X2: the claim was committed, the answer never came; the rows do not wait for their lease to run out."""
    jobs(db, 3)
    mill = Mill(db.url)
    mill.lane("jobs", poll=td(hours=1), **STATES)(_nothing)
    worker = mill.worker(drain=True)
    lost = []
    opened = worker.environments[0].open

    async def open_and_break() -> None:
        await opened()
        store = worker.environments[0].lane_states[0].store
        claim = store.claim

        async def claim_and_lose(count: int) -> Any:
            claims = await claim(count)
            if not lost:
                lost.extend(claims)
                raise Unreachable("the reply was lost")
            return claims

        store.claim = claim_and_lose  # type: ignore[method-assign]

    worker.environments[0].open = open_and_break  # type: ignore[method-assign]
    tally = await asyncio.wait_for(worker.run(), 60)
    assert len(lost) == 3
    assert tally.completed == 3
    assert db.value("select max(attempts) from jobs") == 1


async def test_a_lane_whose_claim_is_refused_does_not_stop_the_others(db: Db) -> None:
    """A CHECK that the declaration cannot know: reported with the database's words; the other lane works."""
    jobs(db)
    db.execute("create table picky (id integer primary key, status text check (status <> 'running'), worker text)")
    db.execute("insert into picky values (1, 'queued', null)")
    mill = Mill(db.url)
    seen = events_of(mill)
    mill.lane("picky", name="picky", priority=-1, **STATES)(_nothing)
    mill.lane("jobs", name="fine", **STATES)(_nothing)
    async with working(mill):
        await until(lambda: db.value("select status from jobs") == "done")
        await until(lambda: [e for e in seen if e.name == "statement_refused"])
    refusal = next(e for e in seen if e.name == "statement_refused")
    assert refusal.fields["lane"] == "picky"
    assert "check" in refusal.fields["error"].lower()


async def test_a_handler_that_calls_exit_ends_its_run_and_not_the_worker(db: Db) -> None:
    """SystemExit is a failure like any other."""
    jobs(db, 2)
    mill = Mill(db.url)

    @mill.lane("jobs", max_attempts=1, **STATES)
    async def work(job: Any) -> None:
        if job.id == 1:
            raise SystemExit(7)

    tally = await mill.worker(drain=True).run()
    assert (tally.completed, tally.died) == (1, 1)
    assert db.value("select error from jobs where id = 1") == "SystemExit: 7"


async def test_a_worker_whose_id_was_taken_stops(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """A13: it was silent, another took its id; back again, it must not claim under the other's name."""
    monkeypatch.setattr("rowmill.engine.heartbeat.BEAT_EVERY", 0.1)
    jobs(db, 0)
    mill = Mill(db.url)
    seen = events_of(mill)
    mill.lane("jobs", poll=td(seconds=0.1), **STATES)(_nothing)
    worker = mill.worker(worker_id="same")
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.environments[0].opened)
    db.execute("update rowmill_workers set incarnation = 'another'")
    await asyncio.wait_for(task, 60)
    assert any(e.name == "worker_replaced" for e in seen)


async def test_a_drain_that_the_database_refuses_ends_with_its_words(db: Db) -> None:
    """A scheduled drain must not hang on a table that does not take the running state."""
    db.execute("create table picky (id integer primary key, status text check (status <> 'running'), worker text)")
    db.execute("insert into picky values (1, 'queued', null)")
    mill = Mill(db.url)
    mill.lane("picky", name="picky", **STATES)(_nothing)
    with pytest.raises(RowmillError, match="'picky': the database refuses the claim"):
        await asyncio.wait_for(mill.worker(drain=True).run(), 60)


async def test_a_failure_is_logged_with_the_place_it_was_raised_at(db: Db) -> None:
    """C11: the file, the line and the function of the user's own code."""
    jobs(db)
    mill = Mill(db.url)
    seen = events_of(mill)

    @mill.lane("jobs", max_attempts=1, **STATES)
    async def work(job: Any) -> None:
        Snooze("5m")  # type: ignore[arg-type]

    await mill.worker(drain=True).run()
    failure = next(e for e in seen if e.name == "job_failed")
    assert failure.fields["error"] == "TypeError: Snooze takes a timedelta, not '5m'"
    assert failure.fields["at"].startswith("test_worker.py:")


async def test_what_a_table_lacks_is_told_once_at_the_start(db: Db) -> None:
    """DESIGN, roles: what a table lacks, a lane does without, and the cost is said."""
    db.execute("create table bare (id integer primary key, status text default 'queued', locked_at timestamp)")
    mill = Mill(db.url)
    seen = events_of(mill)
    mill.lane("bare", name="bare", **STATES)(_nothing)
    await mill.worker(drain=True).run()
    (told,) = [e for e in seen if e.name == "lane_lacks"]
    assert set(told.fields["lacks"]) == {"run_after", "error", "heartbeat_at", "worker", "attempts"}


async def test_a_finish_block_and_a_moving_fence_do_not_get_in_each_others_way(db: Db) -> None:
    """X1: with renew="claimed_at" renewals move what the block's settling asks for; every row is done, once."""
    jobs(db, 60)
    mill = Mill(db.url)
    starts: list[int] = []

    @mill.lane("jobs", renew="claimed_at", lease=td(seconds=20), heartbeat=td(milliseconds=15), **STATES)
    async def work(job: Any) -> None:
        starts.append(job.id)
        await asyncio.sleep(0.03)
        async with job.finish() as tx:
            tx.set(note="done in the block")

    tally = await asyncio.wait_for(mill.worker(drain=True).run(), 60)
    assert (tally.completed, tally.losses) == (60, 0)
    assert len(starts) == 60
