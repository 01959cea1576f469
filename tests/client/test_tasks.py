"""Tasks: enqueued, claimed by the worker like any row, run, and their results asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from databases import Db, as_time
from rowmill import (
    Dead,
    DeclarationError,
    Job,
    Keep,
    Key,
    KeyTaken,
    Mill,
    Retry,
    Snooze,
    SyncJob,
    TaskCanceled,
    TaskFailed,
    WrongArguments,
    fixed,
)
from rowmill.client import connection
from rowmill.store.lane.claim import Settlement
from rowmill.testing import Kit
from workers import until

td = timedelta


@asynccontextmanager
async def working(mill: Mill, **options: Any) -> AsyncIterator[Any]:
    """A worker beside the test."""
    worker = mill.worker(**options)
    running = asyncio.create_task(worker.run())
    started = asyncio.Event()
    mill.on_event(lambda event: started.set() if event.name == "worker_started" else None)
    try:
        await asyncio.wait([asyncio.create_task(started.wait()), running], return_when=asyncio.FIRST_COMPLETED)
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(running, 60)


# -- enqueue and run


async def test_a_task_is_enqueued_run_and_its_result_given_back(mill: Mill, db: Db) -> None:
    @mill.task(max_attempts=5)
    async def add(a: int, b: int = 2) -> int:
        return a + b

    handle = await add.enqueue(a=40)
    row = db.one("select * from rowmill_jobs")
    assert (row["task"], row["state"], row["queue"], row["max_attempts"]) == ("add", "ready", "default", 5)
    await mill.worker(drain=True).run()
    assert await handle.result(timeout=60) == 42
    row = db.one("select * from rowmill_jobs")
    assert (row["state"], row["attempts"]) == ("done", 1)
    assert row["worker"] is not None
    assert row["finished_at"] is not None


async def test_sync_handlers_and_async_ones_share_a_queue(mill: Mill) -> None:
    @mill.task
    def slow(job: SyncJob, n: int) -> int:
        job.progress(0.5, "half")
        return n * 2

    @mill.task
    async def quick(n: int) -> int:
        return n * 3

    handles = [await slow.enqueue(1), await quick.enqueue(1)]
    await mill.worker(drain=True).run()
    assert [await h.result(5) for h in handles] == [2, 3]


async def test_a_task_gets_the_job_and_resources_beside_its_arguments(mill: Mill) -> None:
    @mill.resource
    async def prefix() -> AsyncIterator[str]:
        yield "hello "

    @mill.task
    async def greet(job: Job, name: str, prefix: str) -> str:
        return f"{prefix}{name} {job.attempt}"

    handle = await greet.enqueue(name="world")
    await mill.worker(drain=True).run()
    assert await handle.result(5) == "hello world 1"


async def test_code_that_does_not_await_enqueues_too(mill: Mill, db: Db) -> None:
    @mill.task
    def note(n: int) -> int:
        return n + 1

    def plain() -> Any:
        handle = note.enqueue_sync(1)
        note.enqueue_many_sync([(2,), (3,)])
        return handle

    handle = await asyncio.to_thread(plain)
    await mill.worker(drain=True).run()
    assert await asyncio.to_thread(handle.result_sync, 5) == 2
    assert (await asyncio.to_thread(handle.status_sync)).state == "done"
    with pytest.raises(Exception, match="inside a running event loop"):
        note.enqueue_sync(4)
    assert db.value("select count(*) from rowmill_jobs") == 3


async def test_a_plain_insert_is_a_job(mill: Mill, db: Db) -> None:
    @mill.task(max_attempts=2, backoff=fixed(td(0)))
    async def note(n: int = 0) -> int:
        raise ValueError("no")

    await mill.prepare()
    db.execute("insert into rowmill_jobs (task, args) values ('note', '{\"n\": 5}')")
    await mill.worker(drain=True).run()
    row = db.one("select state, attempts, error from rowmill_jobs")
    assert row == {"state": "dead", "attempts": 2, "error": "ValueError: no"}, "the task's own limit holds"


async def test_the_database_function_enqueues_and_keeps_keys_apart(pg: Db) -> None:
    mill = Mill(pg.url)

    @mill.task
    async def note(n: int = 0) -> int:
        return n

    await mill.prepare()
    first = pg.value("select rowmill_enqueue('note', '{\"n\": 3}', key => 'k')")
    assert pg.value("select rowmill_enqueue('note', key => 'k')") == first
    other = pg.value("select rowmill_enqueue('note', run_after => now() + interval '1 hour', priority => 3)")
    assert pg.one("select priority from rowmill_jobs where id = ?", other) == {"priority": 3}
    await mill.worker(drain=True).run()
    assert pg.value("select result from rowmill_jobs where id = ?", first) == "3"
    assert pg.value("select state from rowmill_jobs where id = ?", other) == "ready"
    assert pg.value("select rowmill_enqueue('note', key => 'k')") != first, "the first one is done"
    await mill.close()


async def test_tables_live_in_the_schema_that_is_set(pg: Db) -> None:
    mill = Mill(pg.url, schema="work")

    @mill.task
    async def note(n: int) -> int:
        return n

    handles = await note.enqueue_many([{"n": n} for n in range(120)])
    await mill.worker(drain=True).run()
    assert await handles[5].result(5) == 5
    assert pg.value("select count(*) from work.rowmill_jobs where state = 'done'") == 120
    await mill.close()


async def test_jobs_of_tasks_that_a_worker_does_not_know_are_left_alone(mill: Mill, db: Db) -> None:
    @mill.task
    async def known() -> None: ...

    await mill.prepare()
    db.execute("insert into rowmill_jobs (task) values ('newer')")
    await known.enqueue()
    await mill.worker(drain=True).run()
    assert db.query("select task, state, attempts from rowmill_jobs order by id") == [
        {"task": "newer", "state": "ready", "attempts": 0},
        {"task": "known", "state": "done", "attempts": 1},
    ]


@pytest.mark.no_pooler("a transaction pooler loses LISTEN with the transaction: the next poll is the wake-up there")
async def test_what_is_enqueued_is_picked_up_at_once_by_an_idle_worker(mill: Mill) -> None:
    """On both databases, without the next poll, which is an hour away. How fast: bench/ measures that."""
    began: asyncio.Queue[int] = asyncio.Queue()

    @mill.task(poll=timedelta(hours=1))
    async def note(n: int) -> None:
        began.put_nowait(n)

    async with working(mill) as worker:
        for n in range(15):
            await until(lambda: all(e.opened and not e.look for e in worker.environments))
            await note.enqueue(n)
            assert await asyncio.wait_for(began.get(), 60) == n


# -- queues


async def test_a_lane_parameter_gives_a_task_a_queue_of_its_own(mill: Mill, db: Db) -> None:
    now, most = 0, 0

    @mill.task(concurrency=2)
    async def narrow() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    mill.queue("mail", priority=5)

    @mill.task(queue="mail")
    async def send() -> None: ...

    assert set(mill.lanes) == {"narrow", "mail"}
    await narrow.enqueue_many([{}] * 10)
    await send.enqueue()
    await mill.worker(drain=True).run()
    assert most == 2
    assert db.value("select count(*) from rowmill_jobs where state = 'done' and queue in ('narrow', 'mail')") == 11
    with pytest.raises(DeclarationError, match="applies to a whole queue"):
        mill.task(queue="mail", concurrency=1)(lambda: None)


async def test_a_job_goes_to_the_environment_named_or_the_first_that_serves_it(fresh: Any) -> None:
    one, two = fresh("sqlite"), fresh("sqlite")
    mill = Mill({"one": one.url, "two": two.url})

    @mill.task(environments=["two"])
    async def there() -> str:
        return "there"

    @mill.task
    async def anywhere(job: Job) -> str:
        return job.environment

    handles = [await there.enqueue(), await anywhere.enqueue(), await anywhere.enqueue(env="two")]
    assert [handle.environment for handle in handles] == ["two", "one", "two"]
    await mill.worker(drain=True).run()
    assert [await handle.result(5) for handle in handles] == ["there", "one", "two"]
    with pytest.raises(WrongArguments, match="did you mean 'two'"):
        await anywhere.enqueue(env="twoo")
    await mill.close()


# -- due time, priority, keys


async def test_run_after_holds_a_job_back_and_enqueue_at_too(mill: Mill, db: Db) -> None:
    @mill.task
    async def note(n: int) -> None: ...

    await note.enqueue(n=1, run_after=td(hours=1))
    await note.enqueue_at(datetime.now(UTC) + td(hours=2), n=2)
    await note.enqueue_many([{"n": 3}] * 120, run_after=td(hours=3))
    due = [
        as_time(r["run_after"]) - datetime.now(UTC) for r in db.query("select run_after from rowmill_jobs order by id")
    ]
    assert [round(d.total_seconds() / 3600, 2) for d in due[:3]] == [1, 2, 3]
    async with Kit(mill) as kit:
        assert await kit.step() is None
        kit.advance(td(minutes=61))
        stepped = await kit.step()
        assert stepped is not None
        assert stepped.outcome == "done"
        assert await kit.step() is None
    with pytest.raises(WrongArguments, match="time zone"):
        await note.enqueue(n=1, run_after=datetime(2030, 1, 1))


async def test_lower_priority_numbers_go_first(mill: Mill) -> None:
    order: list[int] = []

    @mill.task(concurrency=1, batch=1, priority=1)
    async def note(n: int) -> None:
        order.append(n)

    for n, priority in ((1, 5), (2, None), (3, -3), (4, 5)):
        await note.enqueue(n=n, priority=priority)
    await mill.worker(drain=True).run()
    assert order == [3, 2, 1, 4]


async def test_a_key_keeps_a_second_job_out_while_the_first_is_unfinished(mill: Mill, db: Db) -> None:
    @mill.task
    async def note(n: int) -> None: ...

    @mill.task
    async def other(n: int) -> None: ...

    first = await note.enqueue(n=1, key="k")
    assert (await note.enqueue(n=2, key="k")).id == first.id
    assert (await other.enqueue(n=2, key="k")).id != first.id, "a key is its task's own"
    with pytest.raises(KeyTaken) as taken:
        await note.enqueue(n=3, key=Key("k", conflict="raise"))
    assert taken.value.id == first.id
    replaced = await note.enqueue(n=4, priority=9, run_after=td(hours=1), key=Key("k", conflict="replace"))
    assert replaced.id == first.id
    row = db.one("select * from rowmill_jobs where id = ?", first.id)
    assert row["args"].replace(" ", "") == '{"n":4}'
    assert row["priority"] == 9
    assert as_time(row["run_after"]) > datetime.now(UTC) + td(minutes=50)
    db.execute("update rowmill_jobs set run_after = created_at")
    await mill.worker(drain=True).run()
    assert (await note.enqueue(n=5, key="k")).id != first.id


async def test_a_key_may_look_at_other_states_and_at_a_window(mill: Mill, db: Db) -> None:
    @mill.task
    async def note(n: int = 0) -> None: ...

    hourly = Key("h", within=td(hours=1))
    first = await note.enqueue(key=hourly)
    await mill.worker(drain=True).run()
    assert (await note.enqueue(key=hourly)).id == first.id, "done, but within the hour"
    mill.clock.advance(td(minutes=61))
    assert (await note.enqueue(key=hourly)).id != first.id
    # While one runs, one more may wait: what the running one has read may be old.
    waiting = Key("w", states=("ready",))
    async with Kit(mill) as kit:
        ready = await note.enqueue(key=waiting)
        assert (await note.enqueue(key=waiting)).id == ready.id
        claims = await kit.claim(count=10)
        assert ready.id in [claim.id for claim in claims]
        second = await note.enqueue(key=waiting)
        assert second.id != ready.id
        assert (await note.enqueue(key=waiting)).id == second.id
        for claim in claims:
            assert (await kit.settle(claim, Retry(after=td(0)))).written, "two may wait: retries are not kept out"


async def test_of_many_callers_with_one_key_one_gets_in(mill: Mill, db: Db) -> None:
    @mill.task
    async def note(n: int) -> None: ...

    await mill.prepare()
    for key in (Key("a"), Key("b", within=td(hours=1))):
        handles = await asyncio.gather(*(note.enqueue(n=n, key=key) for n in range(20)))
        assert len({handle.id for handle in handles}) == 1
    assert db.value("select count(*) from rowmill_jobs") == 2


# -- failures


async def test_a_failure_is_retried_and_its_history_kept(mill: Mill) -> None:
    @mill.task(max_attempts=3, backoff=fixed(td(0)))
    async def fail(n: int) -> None:
        raise ValueError(f"no {n}")

    handle = await fail.enqueue(n=7)
    await mill.worker(drain=True, worker_id="w1").run()
    status = await handle.status()
    assert status is not None
    assert (status.state, status.attempts, status.error) == ("dead", 3, "ValueError: no 7")
    assert [(h["attempt"], h["outcome"], h["worker"]) for h in status.history] == [
        (1, "retry", "w1"), (2, "retry", "w1"), (3, "dead", "w1"),
    ]  # fmt: skip
    assert datetime.fromisoformat(status.history[0]["started_at"]).tzinfo is not None
    with pytest.raises(TaskFailed, match="is dead: ValueError: no 7") as failed:
        await handle.result(timeout=60)
    assert failed.value.traceback is not None
    assert "in fail" in failed.value.traceback
    assert "In the worker:" in str(failed.value)


async def test_a_history_is_bounded(mill: Mill) -> None:
    @mill.task(max_attempts=30, backoff=fixed(td(0)))
    async def fail() -> None:
        raise ValueError("x" * 10_000)

    handle = await fail.enqueue()
    await mill.worker(drain=True).run()
    status = await handle.status()
    assert status is not None
    assert [h["attempt"] for h in status.history] == list(range(11, 31))
    assert len(str(status.history)) < 20 * 8000


async def test_outcomes_mean_what_they_mean_in_a_lane(mill: Mill) -> None:
    @mill.task(max_attempts=2)
    async def run(how: str) -> Any:
        match how:
            case "dead":
                raise Dead("never")
            case "snooze":
                return Snooze(td(hours=1))
            case "object":
                return object()

    handles = {how: await run.enqueue(how) for how in ("dead", "snooze", "object")}
    await mill.worker(drain=True).run()
    found = {how: await handle.status() for how, handle in handles.items()}
    assert (found["dead"].state, found["dead"].error) == ("dead", "never")
    assert (found["snooze"].state, found["snooze"].attempts) == ("ready", 0)
    assert found["object"].state == "dead"
    assert "cannot be stored as a result" in found["object"].error


async def test_a_task_has_its_own_timeout(mill: Mill) -> None:
    @mill.task(max_attempts=1, timeout=td(milliseconds=50))
    async def slow() -> None:
        await asyncio.sleep(30)

    handle = await slow.enqueue()
    await mill.worker(drain=True).run()
    with pytest.raises(TaskFailed, match="timed out after"):
        await handle.result(5)


@pytest.mark.parametrize("changed", ["worker = 'other'", "state = 'canceled'", "attempts = 2", "claimed_at = null"])
async def test_an_outcome_is_written_only_where_the_claim_still_holds(mill: Mill, db: Db, changed: str) -> None:
    """X1, for the short statement that plain ends have, and for the one that ends with a result."""

    @mill.task
    async def note(n: int) -> None: ...

    handles = await note.enqueue_many([(n,) for n in range(4)])
    async with Kit(mill) as kit:
        claims = await kit.claim(count=4)
        for claim in claims[:2]:
            db.execute(f"update rowmill_jobs set {changed} where id = ?", claim.id)
        store = await kit.store()
        settled = [Settlement(claims[0], "done"), Settlement(claims[1], "done", columns={"result": 1})]
        settled += [Settlement(claims[2], "done"), Settlement(claims[3], "done", columns={"result": 1})]
        report = await store.settle(settled)
        assert [s.claim for s in report.lost] == claims[:2]
        assert [s.claim for s in report.written] == claims[2:]
    states = [row["state"] for row in db.query("select state from rowmill_jobs order by id")]
    assert states[:2] == (["canceled"] * 2 if "canceled" in changed else ["running"] * 2)
    assert states[2:] == ["done"] * 2
    assert len(handles) == 4


async def test_outcomes_of_several_claims_go_together_each_by_its_own_fence(mill: Mill, db: Db) -> None:
    """X1: claims of different times, in turns; of each time one that no longer holds."""

    @mill.task
    async def note(n: int) -> None: ...

    await note.enqueue_many([(n,) for n in range(6)])
    async with Kit(mill) as kit:
        first = await kit.claim(count=3)
        await asyncio.sleep(0.01)  # SQLite's times are milliseconds
        second = await kit.claim(count=3)
        assert first[0].claimed_at != second[0].claimed_at
        for claim in (first[1], second[2]):
            db.execute("update rowmill_jobs set attempts = 9 where id = ?", claim.id)
        mixed = [claim for pair in zip(first, second, strict=True) for claim in pair]
        report = await (await kit.store()).settle([Settlement(claim, "done") for claim in mixed])
        assert [s.claim for s in report.lost] == [first[1], second[2]]
        assert [s.claim for s in report.written] == [first[0], second[0], second[1], first[2]]
    assert db.value("select count(*) from rowmill_jobs where state = 'done'") == 4


# -- results, progress, cancel


@pytest.mark.no_pooler("a transaction pooler loses LISTEN with the transaction: the next poll is the wake-up there")
async def test_a_result_is_awaited_while_the_job_runs(mill: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    """Woken by a word that it is done, not found by a poll: eleven polls would take far longer."""
    monkeypatch.setattr(connection, "_POLL", (10.0, 10.0))

    @mill.task
    async def add(n: int) -> int:
        await asyncio.sleep(0.01)
        return n + 1

    async with working(mill):
        assert await (await add.enqueue(0)).result(60) == 1
        began = time.monotonic()
        handles = await add.enqueue_many([(n,) for n in range(20)])
        assert await asyncio.gather(*(h.result(60) for h in handles)) == list(range(1, 21))
        for n in range(10):
            assert await (await add.enqueue(n)).result(60) == n + 1
        assert time.monotonic() - began < 60
        with pytest.raises(TimeoutError):
            await (await add.enqueue(1, run_after=td(hours=1))).result(0.2)


async def test_progress_is_seen_from_outside(mill: Mill) -> None:
    go, told = asyncio.Event(), asyncio.Event()

    @mill.task
    async def long(job: Job) -> None:
        await job.progress(0.25, "page 1 of 4")
        told.set()
        await go.wait()

    async with working(mill):
        handle = await long.enqueue()
        await asyncio.wait_for(told.wait(), 60)
        status = await handle.status()
        assert status is not None
        assert status.progress == {"fraction": 0.25, "note": "page 1 of 4"}
        go.set()
        await handle.result(10)


async def test_ready_and_running_jobs_are_canceled(mill: Mill, db: Db) -> None:
    """A running async handler is cancelled within a heartbeat, and what it would have returned is dropped."""
    mill.queue("default", lease=td(seconds=5), heartbeat=td(milliseconds=200))
    started, ended = asyncio.Event(), asyncio.Event()

    @mill.task
    async def long() -> str:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return "never"

    later = await long.enqueue(run_after=td(hours=1))
    assert await later.cancel("not wanted")
    assert not await later.cancel()
    with pytest.raises(TaskCanceled, match="not wanted"):
        await later.result(5)
    async with working(mill):
        handle = await long.enqueue()
        await asyncio.wait_for(started.wait(), 60)
        assert await handle.cancel()
        await asyncio.wait_for(ended.wait(), 60)
    status = await handle.status()
    assert status is not None
    assert (status.state, status.result) == ("canceled", None)


# -- retention


async def test_ended_jobs_are_kept_by_age_and_count_and_pruned_in_steps(mill: Mill, db: Db, monkeypatch: Any) -> None:
    from rowmill.engine.joins import Joins
    from rowmill.store.jobs import job_rows

    monkeypatch.setattr(job_rows, "PRUNE", 7)

    @mill.task(keep=td(hours=1))
    async def aged() -> None: ...

    @mill.task(keep=3)
    async def counted() -> None: ...

    @mill.task(keep=Keep(age=None, count=None, dead=td(hours=1)), max_attempts=1)
    async def failing(fail: bool) -> None:
        if fail:
            raise ValueError

    await aged.enqueue_many([{}] * 20)
    await counted.enqueue_many([{}] * 20)
    await failing.enqueue_many([{"fail": True}, {"fail": False}])
    await mill.worker(drain=True).run()
    database = (await mill._client.connection()).database
    follow = Joins(database, mill.clock, mill.events, lambda: None)
    tasks = list(mill.tasks.values())

    def left() -> dict[str, int]:
        return {r["task"]: r["n"] for r in db.query("select task, count(*) as n from rowmill_jobs group by task")}

    await follow.prune(tasks)
    assert left() == {"aged": 20, "counted": 3, "failing": 2}
    mill.clock.advance(td(minutes=61))
    await aged.enqueue()
    assert await follow.prune(tasks) == 21
    assert left() == {"aged": 1, "counted": 3, "failing": 1}, "what is not over is never deleted"


# -- declarations


def test_wrong_declarations_are_told() -> None:
    mill = Mill("sqlite:///x.db")
    with pytest.raises(DeclarationError, match="name of an option of enqueue"):
        mill.task(_with_key)
    with pytest.raises(DeclarationError, match="no parameter 'retries'"):
        mill.task(retries=3)(_plain)
    mill.task(_plain)
    with pytest.raises(DeclarationError, match="two tasks"):
        mill.task(_plain)
    with pytest.raises(DeclarationError, match="keep="):
        mill.task(keep="a week", name="b")(_plain)
    mill.task(_positional)
    other = Mill("sqlite:///x.db")
    other.lane("t", name="default", ready={"a": 1}, running={"a": 2}, done={"a": 3})(_lane)
    with pytest.raises(DeclarationError, match="cannot be a queue"):
        other.task(_plain)


def _with_key(key: str) -> None: ...


def _positional(key: str, /) -> None: ...


def _plain(to: str = "") -> None: ...


def _lane(job: Job) -> None: ...
