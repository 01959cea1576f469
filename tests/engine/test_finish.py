"""The handler's own writes: ``job.finish()`` and ``on_settled``, in one transaction with the outcome or not at all."""

from __future__ import annotations

import asyncio
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa

from databases import Db
from rowmill import Dead, LostClaim, Mill, Retry, Snooze, fixed
from rowmill.engine.job import Finish
from rowmill.store import LaneStore
from rowmill.testing import Kit
from rows import empty, having, whole

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


@pytest.fixture
def pg(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty PostgreSQL database."""
    return empty(request, tmp_path, "postgresql")


@pytest.fixture(params=["async", "sync"])
def colour(request: pytest.FixtureRequest) -> str:
    """Handlers and hooks are written with ``await`` or without."""
    return request.param


def tables(db: Db, rows: int = 1) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text not null default 'ready', worker text,"
        f" claimed_at {time}, heartbeat_at {time}, attempts integer default 0, run_after {time}, error text,"
        " result text, n integer check (n < 100));"
        "create table effects (job integer not null, note text);"
        "create table counters (name text primary key, n integer not null)"
    )
    db.insert("jobs", [{"id": i} for i in range(1, rows + 1)])


def lane(db: Db, handler: Any, **options: Any) -> Mill:
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", **STATES | {"max_attempts": 2, "backoff": fixed(td(0))} | options)(handler)
    return mill


def finisher(colour: str, inside: Any = None, note: str = "made", **columns: Any) -> Any:
    """A handler that writes an effect in its finish block, and does something more inside it."""
    sql = "insert into effects (job, note) values (:job, :note)"

    async def waiting(job: Any) -> None:
        async with job.finish() as tx:
            await tx.execute(sql, {"job": job.id, "note": note})
            tx.set(**columns)
            if inside is not None:
                inside(job)

    def plain(job: Any) -> None:
        with job.finish() as tx:
            tx.execute(sql, {"job": job.id, "note": note})
            tx.set(**columns)
            if inside is not None:
                inside(job)

    return waiting if colour == "async" else plain


def raising(error: BaseException) -> None:
    raise error


def effects(db: Db) -> list[Any]:
    return [row["job"] for row in db.query("select job from effects order by job")]


async def test_own_writes_and_the_outcome_are_committed_together(db: Db, colour: str) -> None:
    """DESIGN, finish: the handler's own writes and Done, with columns of the row."""
    tables(db)
    async with Kit(lane(db, finisher(colour, result="x", n=5))) as kit:
        step = await kit.step()
        assert step is not None
        assert (step.outcome, step.columns) == ("done", {"result": "x", "n": 5})
        assert await kit.step() is None
    row = whole(db, "jobs", 1)
    assert (row["status"], row["result"], row["n"], row["worker"]) == ("done", "x", 5, "test-worker")
    assert effects(db) == [1]


async def test_an_exception_that_leaves_the_block_takes_its_writes_along(db: Db, colour: str) -> None:
    """DESIGN, finish: if an exception leaves it, also Dead or Retry, its writes are rolled back and the run ends so."""
    ends = [
        (Dead("gone"), "dead", "gone"),
        (Retry("slow"), "ready", "slow"),
        (Snooze(td(minutes=1)), "ready", None),
        (ValueError("oh"), "ready", "ValueError: oh"),
    ]
    tables(db)
    raised = iter(ends)
    async with Kit(lane(db, finisher(colour, lambda job: raising(next(raised)[0]), result="x"))) as kit:
        for _, status, error in ends:
            db.execute("update jobs set status = 'ready', attempts = 0, run_after = null, error = null")
            await kit.step()
            row = whole(db, "jobs", 1)
            assert (row["status"], row["error"], row["result"]) == (status, error, None)
            assert effects(db) == []


async def test_a_claim_lost_before_the_block_ends_takes_its_writes_along(db: Db, colour: str) -> None:
    """X1; DESIGN, finish: the claim was lost, so the writes are rolled back; the handler is told by LostClaim."""
    tables(db)
    told: list[str] = []
    handle = finisher(colour)
    mill = lane(db, handle)
    del mill.lanes["jobs"]

    async def stolen(job: Any) -> None:
        db.execute("update jobs set worker = 'another'")
        try:
            await handle(job)
        except LostClaim as error:
            told.append(str(error))
            raise

    def stolen_in_thread(job: Any) -> None:
        db.execute("update jobs set worker = 'another'")
        try:
            handle(job)
        except LostClaim as error:
            told.append(str(error))
            raise

    mill.lane("jobs", name="jobs", **STATES)(stolen if colour == "async" else stolen_in_thread)
    async with Kit(mill) as kit:
        step = await kit.step()
    assert step is not None
    assert step.outcome == "lost"
    assert told == [having("no longer claimed by this run")]
    assert effects(db) == []
    assert (whole(db, "jobs", 1)["status"], whole(db, "jobs", 1)["worker"]) == ("running", "another")


async def test_columns_that_cannot_be_written_take_the_blocks_writes_along(db: Db, colour: str) -> None:
    """DESIGN, finish: all or nothing; the row says why."""
    tables(db)
    columns: dict[str, Any] = {}
    insert = "insert into effects (job) values (1)"

    async def waiting(job: Any) -> None:
        async with job.finish() as tx:
            await tx.execute(insert)
            tx.set(**columns)

    def plain(job: Any) -> None:
        with job.finish() as tx:
            tx.execute(insert)
            tx.set(**columns)

    mistakes = [({"n": 100}, "constraint"), ({"resullt": 1}, "did you mean 'result'"), ({"status": "x"}, "row's state")]
    async with Kit(lane(db, waiting if colour == "async" else plain, max_attempts=1)) as kit:
        for wrong, words in mistakes:
            db.execute("update jobs set status = 'ready', attempts = 0")
            columns = wrong
            await kit.step()
            row = whole(db, "jobs", 1)
            assert (row["status"], row["error"]) == ("dead", having(words))
            assert effects(db) == []


async def test_a_run_has_one_finish_block_and_it_is_its_end(db: Db) -> None:
    """DESIGN, finish: what comes after the block does not change the outcome; a second block is refused."""
    tables(db, 2)
    seen: list[str] = []

    async def handle(job: Any) -> Any:
        async with job.finish() as tx:
            await tx.execute(sa.text("insert into effects (job) values (:j)"), {"j": job.id})
        if job.id == 1:
            raise ValueError("too late to matter")
        try:
            async with job.finish():
                pass
        except Exception as error:
            seen.append(str(error))
        return {"result": "too late as well"}

    async with Kit(lane(db, handle)) as kit:
        assert (await kit.step()).outcome == "done"
        assert (await kit.step()).outcome == "done"
    assert seen == [having("already ended")]
    assert effects(db) == [1, 2]
    assert [r["result"] for r in db.query("select result from jobs")] == [None, None]


async def test_what_a_handler_does_behind_its_finish_block_does_not_lose_its_claim(db: Db) -> None:
    """X1: the outcome stands: a heartbeat that no longer finds the row running tells nothing, and cuts nothing off."""
    tables(db)
    behind: list[str] = []

    async def handler(job: Any) -> None:
        async with job.finish() as tx:
            tx.set(result="made")
        await asyncio.sleep(0.5)  # many heartbeats
        behind.append("done")

    mill = lane(db, handler, lease=td(seconds=10), heartbeat=td(milliseconds=20))
    told: list[str] = []
    mill.on_event(lambda event: told.append(event.name))
    tally = await mill.worker(drain=True).run()
    assert (behind, tally.completed, tally.losses) == (["done"], 1, 0)
    assert "claim_lost" not in told
    assert db.one("select status, result from jobs") == {"status": "done", "result": "made"}


async def test_a_commit_that_is_faster_than_its_reply_does_not_lose_the_claim(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1: the row has left the running state, the run has not heard of it yet, and heartbeats come by meanwhile."""
    tables(db)
    behind: list[str] = []
    commit = Finish._commit

    async def slow(finish: Finish, settlement: Any) -> None:
        class Late:
            async def __aexit__(self, *exc: Any) -> None:
                await context.__aexit__(*exc)
                await asyncio.sleep(0.3)

        context, finish._context = finish._context, Late()
        await commit(finish, settlement)

    monkeypatch.setattr(Finish, "_commit", slow)

    async def handler(job: Any) -> None:
        async with job.finish() as tx:
            tx.set(result="made")
        behind.append("lost" if job.lost else "done")

    mill = lane(db, handler, lease=td(seconds=10), heartbeat=td(milliseconds=20))
    tally = await mill.worker(drain=True).run()
    assert (behind, tally.completed, tally.losses) == (["done"], 1, 0)


async def test_a_finish_block_waits_for_a_lock_that_is_soon_gone(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: a row that somebody else has locked for a moment is not lost."""
    tables(pg)
    other = await asyncpg.connect(pg.direct)
    lock = other.transaction()
    still_held = LaneStore.still_held

    async def handle(job: Any) -> None:
        await lock.start()
        await other.execute("select 1 from jobs where id = 1 for update")
        async with job.finish() as tx:
            await tx.execute("insert into effects (job) values (1)")

    async def looked(store: LaneStore, claims: Any) -> list[bool]:
        held = await still_held(store, claims)
        await lock.rollback()
        return held

    monkeypatch.setattr(LaneStore, "still_held", looked)
    async with Kit(lane(pg, handle)) as kit:
        assert (await kit.step()).outcome == "done"
    await other.close()
    assert effects(pg) == [1]


# -- on_settled


def counter(mill: Mill, colour: str, seen: list[Any]) -> None:
    """A hook that counts outcomes in a table of its own."""
    sql = "insert into counters values (:name, 1) on conflict (name) do update set n = counters.n + 1"

    if colour == "async":

        @mill.lanes["jobs"].on_settled
        async def waiting(tx: Any, settled: Any) -> None:
            for one in settled:
                seen.append((one.id, one.outcome, one["result"], one.error, one.attempt))
                await tx.execute(sa.text(sql), {"name": one.outcome})
    else:

        @mill.lanes["jobs"].on_settled
        def plain(tx: Any, settled: Any) -> None:
            for one in settled:
                seen.append((one.id, one.outcome, one["result"], one.error, one.attempt))
                tx.execute(sa.text(sql), {"name": one.outcome})


async def test_a_hook_takes_sql_text_as_a_finish_block_does(db: Db, colour: str) -> None:
    """DESIGN: ``tx`` is one word for one thing, in finish blocks and in hooks."""
    tables(db)

    async def handle(job: Any) -> None:
        return None

    mill = lane(db, handle)
    sql = "insert into effects (job, note) values (:job, :note)"

    async def waiting(tx: Any, settled: Any) -> None:
        await tx.execute(sql, {"job": settled[0].id, "note": "x"})

    def plain(tx: Any, settled: Any) -> None:
        tx.execute(sql, {"job": settled[0].id, "note": "x"})

    mill.lanes["jobs"].on_settled(waiting if colour == "async" else plain)
    async with Kit(mill) as kit:
        step = await kit.step()
    assert step is not None
    assert (step.outcome, step.error) == ("done", None)
    assert effects(db) == [1]


def counts(db: Db) -> dict[str, int]:
    return {row["name"]: row["n"] for row in db.query("select * from counters")}


async def test_counters_are_kept_in_the_transaction_that_settles(db: Db, colour: str) -> None:
    """C2, DESIGN on_settled: the hook sees each outcome as it is written, by whichever way it ended."""
    tables(db, 4)

    async def handle(job: Any) -> Any:
        if job.id == 1:
            return {"result": "one"}
        if job.id == 2:
            raise Dead("two")
        if job.id == 3 and job.attempt == 1:
            raise ValueError("three")
        if job.id == 4:
            async with job.finish() as tx:
                tx.set(result="four")
        return None

    mill, seen = lane(db, handle), []
    counter(mill, colour, seen)
    async with Kit(mill) as kit:
        tally = await kit.drain()
    assert tally.completed == 3
    assert counts(db) == {"done": 3, "dead": 1, "retry": 1}
    assert sorted(seen, key=str) == [
        (1, "done", "one", None, 1),
        (2, "dead", None, "two", 1),
        (3, "done", None, None, 2),
        (3, "retry", None, "ValueError: three", 1),
        (4, "done", "four", None, 1),
    ]


@pytest.mark.parametrize("how", ["raises", "is refused by the database"])
async def test_a_hook_that_fails_rolls_back_and_its_run_counts_as_failed(db: Db, colour: str, how: str) -> None:
    """DESIGN, on_settled: nothing of that row was written but its failure; the others of the batch stand."""
    tables(db, 3)

    async def handle(job: Any) -> dict[str, Any]:
        return {"result": "done"}

    def sql(one: Any) -> Any:
        if one.id == 2 and how == "raises":
            raise RuntimeError("no counter for two")
        return sa.text("insert into effects (job) values (:job)"), {"job": None if one.id == 2 else one.id}

    mill = lane(db, handle)

    async def waiting(tx: Any, settled: Any) -> None:
        for one in settled:
            await tx.execute(*sql(one))

    def plain(tx: Any, settled: Any) -> None:
        for one in settled:
            tx.execute(*sql(one))

    mill.lanes["jobs"].on_settled(waiting if colour == "async" else plain)
    async with Kit(mill) as kit:
        tally = await kit.drain()
    assert (tally.completed, tally.failures, tally.died) == (2, 2, 1)
    rows = db.query("select id, status, result, attempts from jobs order by id")
    assert [tuple(row.values()) for row in rows] == [
        (1, "done", "done", 1),
        (2, "dead", None, 2),
        (3, "done", "done", 1),
    ]
    assert whole(db, "jobs", 2)["error"] == having("on_settled failed")
    assert effects(db) == [1, 3]


async def test_a_step_of_the_kit_tells_what_became_of_a_run_whose_hook_failed(db: Db) -> None:
    """Issue, test kit: a step says how the run ended, and leaves no row behind in running."""
    tables(db)

    async def handle(job: Any) -> None:
        return None

    mill = lane(db, handle)

    @mill.lanes["jobs"].on_settled
    async def hook(tx: Any, settled: Any) -> None:
        raise RuntimeError("no counter")

    async with Kit(mill) as kit:
        step = await kit.step()
    assert step is not None
    assert (step.outcome, step.error) == ("retry", having("no counter"))
    assert whole(db, "jobs", 1)["status"] == "ready"


async def test_a_hook_that_fails_in_a_finish_block_rolls_back_the_blocks_writes(db: Db) -> None:
    """DESIGN, finish and on_settled: one transaction for all three."""
    tables(db)
    mill = lane(db, finisher("async"), max_attempts=1)

    @mill.lanes["jobs"].on_settled
    async def hook(tx: Any, settled: Any) -> None:
        raise RuntimeError("no counter")

    async with Kit(mill) as kit:
        await kit.drain()
    assert effects(db) == []
    assert (whole(db, "jobs", 1)["status"], whole(db, "jobs", 1)["error"]) == ("dead", having("no counter"))


async def test_a_hook_sees_refused_rows_as_the_failures_they_became(db: Db) -> None:
    """DESIGN, on_settled: a row whose value the database refused is settled dead, with the hook."""
    tables(db, 3)

    async def handle(job: Any) -> dict[str, Any]:
        return {"n": 500 if job.id == 2 else 5}

    mill, seen = lane(db, handle), []
    counter(mill, "async", seen)
    async with Kit(mill) as kit:
        await kit.drain()
    assert counts(db) == {"done": 2, "dead": 1}
    assert whole(db, "jobs", 2)["error"] == having("the database refused what the handler returned (n)")
