"""What an attack on the engine found, once each: one worker in this process, and the worst that rows, handlers, locks
and lost replies can do to it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from datetime import timedelta as td
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa

from databases import Db
from farm import JOBS
from rowmill import DeclarationError, Mill
from rowmill.store import Database, Tx
from rowmill.testing import Kit
from workers import STATES, add, events_of, jobs, until, working

CLOCK = {"postgresql": "timestamptz", "sqlite": "datetime"}
#: Nobody but the worker's own sign of life tells that it lives.
ALONE = "create table jobs (id integer primary key, status text not null default 'queued', worker text, error text)"


class Link(sa.types.TypeDecorator[str]):
    """A model's own type, which does not take everything."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        if value is not None and not value.startswith("http"):
            raise ValueError("not a link")
        return value


LINKS = sa.Table("jobs", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("note", Link))


def circular() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@asynccontextmanager
async def locked(db: Db, table: str = "jobs") -> AsyncIterator[Any]:
    """Somebody alters the table and takes their time: nobody else may even read it."""
    operator = await asyncpg.connect(db.direct)
    try:
        async with operator.transaction():
            await operator.execute(f"lock table {table} in access exclusive mode")
            yield operator
    finally:
        await operator.close()


def waiting(db: Db) -> bool:
    return bool(db.value("select count(*) from pg_locks where not granted"))


def statuses(db: Db) -> list[str]:
    return [row["status"] for row in db.query("select status from jobs order by id")]


# -- what handlers return and do


@pytest.mark.parametrize(
    ("table", "column", "bad", "good"),
    [("jobs", "data", circular(), {}), (LINKS, "note", "ftp://x", "http://x")],
    ids=["a circular value", "a model's own type"],
)
async def test_a_value_that_cannot_be_encoded_ends_its_own_row_dead(
    db: Db, table: Any, column: str, bad: Any, good: Any
) -> None:
    """One bad row fails neither its batch nor the worker."""
    jobs(db, 3)
    db.execute(f"alter table jobs add column data {'jsonb' if db.dialect == 'postgresql' else 'json'}")
    mill = Mill(db.url)

    @mill.lane(table, name="work", max_attempts=3, **STATES)
    async def work(job: Any) -> Any:
        return {column: bad if job.id == 2 else good}

    await mill.worker(drain=True).run()
    assert statuses(db) == ["done", "dead", "done"]
    assert db.value("select error from jobs where id=2").startswith(f"column {column!r}: ")


async def test_an_outcome_that_the_table_refuses_ends_dead_with_the_reason(db: Db) -> None:
    """Every row reaches an end: a CHECK on done does not leave it running for ever."""
    jobs(db, 0)
    db.execute("drop table jobs")
    db.execute(JOBS[db.dialect].split(";")[0].rstrip(" )\n") + ", check (status <> 'done' or note is not null))")
    add(db, 2)
    mill = Mill(db.url)

    @mill.lane("jobs", max_attempts=2, **STATES)
    async def work(job: Any) -> Any:
        return {"note": "here"} if job.id == 1 else None

    await asyncio.wait_for(mill.worker(drain=True).run(), 60)
    assert statuses(db) == ["done", "dead"]
    assert "the database refused the outcome done" in db.value("select error from jobs where id = 2")


async def stops_an_iteration(job: Any) -> None:
    raise StopAsyncIteration


async def cancels_itself(job: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


def asks_an_empty_iterator(job: Any) -> None:
    next(iter(()))


@pytest.mark.parametrize("handler", [cancels_itself, asks_an_empty_iterator, stops_an_iteration])
async def test_a_handler_that_ends_oddly_fails_its_run_and_keeps_its_slot(db: Db, handler: Callable[..., Any]) -> None:
    """A run fails, whatever it raises; the lane's only slot goes on with the next row."""
    jobs(db, 2)
    mill = Mill(db.url)
    mill.lane("jobs", name="work", concurrency=1, max_attempts=1, **STATES)(handler)
    tally = await asyncio.wait_for(mill.worker(drain=True).run(), 60)
    assert statuses(db) == ["dead", "dead"]
    assert tally.died == 2


async def test_a_cancellation_left_behind_by_one_run_does_not_hit_the_next(db: Db) -> None:
    """A timer that a handler forgot strikes an idle slot, and one that runs another row."""
    jobs(db, 1)
    mill = Mill(db.url)
    struck: list[Any] = []

    @mill.lane("jobs", name="work", concurrency=1, max_attempts=1, poll=td(seconds=0.1), **STATES)
    async def work(job: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if job.id == 1:
            asyncio.get_running_loop().call_later(0.2, lambda: struck.append(task.cancel()))

    async with working(mill):
        await until(lambda: struck)
        add(db, 2)
        await until(lambda: statuses(db) == ["done"] * 3, 60)


async def test_text_of_a_state_may_look_like_a_parameter(db: Db) -> None:
    """A lane fenced by time alone sends one parameter, whatever its states are called."""
    db.execute(f"create table jobs (id integer primary key, status text, claimed_at {CLOCK[db.dialect]})")
    db.execute("insert into jobs (id, status) values (1, 'queued')")
    mill = Mill(db.url)
    states = {**STATES, "done": {"status": "paid $20, at :now"}}

    @mill.lane("jobs", name="work", max_attempts=1, **states)
    async def work(job: Any) -> None: ...

    await asyncio.wait_for(mill.worker(drain=True).run(), 60)
    assert statuses(db) == ["paid $20, at :now"]


async def test_a_run_that_swallows_its_cancellation_keeps_its_row(lite: Db) -> None:
    """X1: it still runs, so nobody else may have the row."""
    jobs(lite)
    mill = Mill(lite.url)
    over, begun = False, asyncio.Event()

    @mill.lane("jobs", **STATES)
    async def work(job: Any) -> None:
        begun.set()
        while not over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    worker = mill.worker(worker_id="w", grace=0.1)
    task = asyncio.create_task(worker.run())
    await begun.wait()
    worker.stop()
    await asyncio.wait_for(task, 60)
    assert lite.one("select status, worker from jobs") == {"status": "running", "worker": "w"}
    over = True
    await until(lambda: not worker.slots["work"].busy)


async def test_lanes_told_apart_only_by_a_condition_are_refused(db: Db) -> None:
    """Their running rows look the same: each would sweep the other's by its own lease."""
    jobs(db, 0)
    mill = Mill(db.url)
    for name, seconds in (("a", 2), ("b", 60)):
        lease = td(seconds=seconds)
        mill.lane("jobs", name=name, where=f"note = '{name}'", lease=lease, **STATES)(asks_an_empty_iterator)
    with pytest.raises(DeclarationError, match="'a' and 'b': their running rows look the same on table 'jobs'"):
        await mill.worker(drain=True).run()


async def test_a_note_that_no_database_can_hold_does_not_end_the_sign_of_life(db: Db) -> None:
    """X1: where only rowmill_workers tells that a holder lives, nothing a handler says may silence it."""
    db.execute(ALONE)
    db.execute("insert into jobs (id) values (1)")
    mill = Mill(db.url)
    go = asyncio.Event()

    @mill.lane("jobs", **STATES)
    async def work(job: Any) -> None:
        await job.progress(0.1, "page \x00 \ud800")
        await go.wait()

    async with working(mill) as worker:
        await until(lambda: worker.environments[0].opened)
        await until(lambda: "page" in db.value("select current from rowmill_workers"))
        go.set()


# -- leases and locks


async def test_the_sign_of_life_comes_well_within_a_short_lease(db: Db) -> None:
    """X1: where nothing else tells that a holder lives, also more often than usual."""
    db.execute(ALONE)
    mill = Mill(db.url)
    mill.lane("jobs", name="work", lease=td(seconds=1), **STATES)(cancels_itself)
    async with working(mill) as worker:
        await until(lambda: worker.environments[0].opened)
        for _ in range(3):
            seen = db.value("select seen_at from rowmill_workers")
            await until(lambda seen=seen: db.value("select seen_at from rowmill_workers") != seen, 1)


async def test_a_locked_table_costs_no_other_lane_its_lease(pg: Db) -> None:
    """A12: renewals that wait for one table do not hold up those of another."""
    jobs(pg)
    pg.execute("create table others (like jobs including all)")
    pg.execute("insert into others (note) values (null)")
    mill = Mill(pg.url)
    seen, go = events_of(mill), asyncio.Event()
    options = dict(STATES, lease=td(seconds=1.5), heartbeat=td(seconds=0.2), sweep_every=td(hours=1))

    async def work(job: Any) -> None:
        await go.wait()

    mill.lane("jobs", name="a", **options)(work)
    mill.lane("others", name="b", **options)(work)
    async with working(mill):
        await until(lambda: pg.value("select count(*) from others where heartbeat_at > claimed_at") == 1)
        async with locked(pg):
            await until(lambda: waiting(pg))
            since = time.monotonic()
            while time.monotonic() - since < 3:  # twice the lease
                assert pg.value("select heartbeat_at > now() - interval '1.5 s' from others")
                await asyncio.sleep(0.05)
        go.set()
    assert not [event for event in seen if event.name == "claim_lost" and event.fields["lane"] == "b"]


async def test_a_claim_that_waited_for_a_lock_begins_with_a_whole_lease(pg: Db) -> None:
    """X1: its time is when it was granted, not when it was sent."""
    jobs(pg)
    mill = Mill(pg.url)
    mill.lane("jobs", name="work", **STATES)(asks_an_empty_iterator)
    async with Kit(mill) as kit:
        await kit.store("work")
        async with locked(pg) as operator:
            claiming = asyncio.create_task(kit.claim("work"))
            await until(lambda: waiting(pg))
            unlocked = await operator.fetchval("select clock_timestamp()")
        (claim,) = await claiming
        assert claim.claimed_at > unlocked


async def test_a_second_stop_does_not_wait_for_a_statement_behind_a_lock(pg: Db) -> None:
    """X2: stopped at once is at once."""
    jobs(pg, 0)
    mill = Mill(pg.url)
    mill.lane("jobs", name="work", poll=td(seconds=0.1), **STATES)(cancels_itself)
    worker = mill.worker()
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.environments[0].opened)
    async with locked(pg):
        await until(lambda: waiting(pg))
        worker.stop()
        worker.stop()
        await asyncio.wait_for(task, 8)


@pytest.mark.parametrize("cut", [0.02, 0.1])
async def test_a_transaction_cut_in_mid_statement_leaves_no_lock_behind(lite: Db, cut: float) -> None:
    """A finish block past its timeout: everybody else can write to the file."""
    lite.execute("create table effects (n integer)")
    database = Database.open(lite.url)
    numbers = "with recursive r(n) as (select 1 union all select n + 1 from r where n < 400000)"

    async def work() -> None:
        async with database.begin() as connection:
            await Tx(connection).execute(
                f"{numbers} insert into effects select n from r where n % 1000 = 0 returning n"
            )

    for _ in range(4):
        task = asyncio.create_task(work())
        await asyncio.sleep(cut)  # the moment is what is tested
        task.cancel()
        await asyncio.wait([task])
        with closing(sqlite3.connect(lite.url.removeprefix("sqlite:///"), timeout=2, isolation_level=None)) as other:
            other.execute("begin immediate")
            other.execute("rollback")
    await database.close()
