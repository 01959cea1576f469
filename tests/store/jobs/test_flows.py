"""Flows: chains, children with a join, batches with a callback, and steps that run once."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from databases import Db
from rowmill import Job, Joined, Mill, RowmillError, SyncJob, TaskCanceled, TaskFailed, WrongArguments, fixed
from rowmill.testing import Kit

td = timedelta


# -- steps


async def test_a_step_runs_once_and_a_retry_goes_on_behind_it(mill: Mill, db: Db) -> None:
    ran: Counter[str] = Counter()

    async def fetch(url: str) -> dict[str, Any]:
        ran["fetch"] += 1
        return {"url": url}

    def size(page: dict[str, Any]) -> int:
        ran["size"] += 1
        if ran["size"] < 3:
            raise ValueError("not yet")
        return len(page["url"])

    @mill.task(max_attempts=5, backoff=fixed(td(0)))
    async def work(job: Job, url: str) -> int:
        page = await job.step("fetch", fetch, url)
        assert page == {"url": url}
        return await job.step("size", size, page)

    @mill.task(max_attempts=5, backoff=fixed(td(0)))
    def plainly(job: SyncJob) -> str:
        value = job.step("once", lambda: ran.update(["plain"]) or "kept")
        if job.attempt < 2:
            raise ValueError
        return value

    handles = [await work.enqueue(url="http://x"), await plainly.enqueue()]
    await mill.worker(drain=True).run()
    assert [await handle.result(5) for handle in handles] == [8, "kept"]
    assert ran == {"fetch": 1, "size": 3, "plain": 1}
    db.execute(
        "delete from rowmill_jobs" if db.dialect != "sqlite" else "pragma foreign_keys=on; delete from rowmill_jobs"
    )
    assert db.value("select count(*) from rowmill_steps") == 0, "steps go with their job"


async def test_a_run_that_lost_its_claim_keeps_no_step(mill: Mill, db: Db) -> None:
    @mill.task
    async def work(job: Job) -> None:
        await job.step("one", taken_away)

    def taken_away() -> int:
        db.execute("update rowmill_jobs set worker = 'other'")
        return 1

    await work.enqueue()
    async with Kit(mill) as kit:
        stepped = await kit.step()
        assert stepped is not None
        assert stepped.outcome == "lost"
    assert db.value("select count(*) from rowmill_steps") == 0


async def test_a_lane_over_a_users_table_has_no_steps_and_says_so(mill: Mill, db: Db) -> None:
    db.execute("create table t (id integer primary key, s text, worker text, error text)")
    db.execute("insert into t (id, s) values (1, 'a')")

    @mill.lane("t", ready={"s": "a"}, running={"s": "b"}, done={"s": "c"}, dead={"s": "d"})
    async def work(job: Job) -> None:
        with pytest.raises(RowmillError, match="table of your own"):
            await job.step("x", print)

    async with Kit(mill) as kit:
        stepped = await kit.step("work")
        assert stepped is not None
        assert stepped.outcome == "done"


# -- children


async def test_a_job_spawns_children_and_goes_on_when_all_have_ended(mill: Mill, db: Db) -> None:
    runs: list[int] = []

    @mill.task(max_attempts=1)
    async def part(n: int) -> int:
        if n == 3:
            raise ValueError
        return n * 10

    @mill.task(max_attempts=2)
    async def whole(job: Job, count: int) -> list[Any]:
        runs.append(job.attempt)
        joined = await job.spawn(*[part.call(n) for n in range(count)])
        assert joined == Joined(done=count - 1, failed=1)
        assert joined.total == count
        again = await job.spawn(part.call(7), name="more")
        assert again == Joined(done=1)
        return [*await job.results("spawn-1"), *await job.results("more")]

    handle = await whole.enqueue(count=5)
    await mill.worker(drain=True).run()
    assert await handle.result(5) == [0, 10, 20, None, 40, 70]
    assert runs == [1, 1, 1], "waiting costs no attempt"
    status = await handle.status()
    assert status is not None
    assert status.children == {"done": 5, "dead": 1}


async def test_a_sync_handler_spawns_too(mill: Mill) -> None:
    @mill.task
    def part(n: int) -> int:
        return n

    @mill.task
    def whole(job: SyncJob) -> int:
        try:
            return job.spawn(*[part.call(n) for n in range(3)]).done
        except Exception:
            return -1  # what ends the run is no Exception

    handle = await whole.enqueue()
    await mill.worker(drain=True).run()
    assert await handle.result(5) == 3


async def test_children_are_there_only_with_their_parents_new_state(mill: Mill, db: Db) -> None:
    """A run whose claim was lost adds nothing; one that has children does not add them again."""

    @mill.task
    async def part() -> None: ...

    @mill.task(queue="parents")
    async def whole(job: Job, steal: bool) -> None:
        if steal:
            db.execute("update rowmill_jobs set worker = 'other' where task = 'whole'")
        await job.spawn(part.call(), part.call())

    await whole.enqueue(steal=True)
    async with Kit(mill) as kit:
        stepped = await kit.step("parents")
        assert stepped is not None
        assert stepped.outcome == "lost"
        assert db.value("select count(*) from rowmill_jobs") == 1
        db.execute("delete from rowmill_jobs")
        await whole.enqueue(steal=False)
        await kit.step("parents")
        assert db.query("select task, state from rowmill_jobs order by id") == [
            {"task": "whole", "state": "joining"}, {"task": "part", "state": "ready"},
            {"task": "part", "state": "ready"},
        ]  # fmt: skip
        assert await kit.step("parents") is None
        await kit.step("default")
        assert await kit.step("parents") is None
        await kit.step("default")
        stepped = await kit.step("parents")
        assert stepped is not None
        assert stepped.outcome == "done"
    assert db.value("select count(*) from rowmill_jobs") == 3


@pytest.mark.parametrize("how", ["canceled", "poison", "deleted"])
async def test_a_child_that_ends_any_way_ends_the_waiting(mill: Mill, db: Db, how: str) -> None:
    """Not only by a settled run: canceled by hand, taken back too often, or deleted."""
    mill.queue("default", max_reclaims=0)

    @mill.task(max_attempts=1)
    async def part() -> None: ...

    @mill.task(queue="parents")
    async def whole(job: Job) -> int:
        return (await job.spawn(part.call(), part.call())).total

    handle = await whole.enqueue()
    async with Kit(mill) as kit:
        await kit.step("parents")
        await kit.step("default")
        child = db.value("select id from rowmill_jobs where state = 'ready'")
        if how == "canceled":
            from rowmill import Handle

            await Handle(mill._client, mill.tasks["part"], "default", child).cancel()
        elif how == "deleted":
            db.execute("delete from rowmill_jobs where id = ?", child)
        else:
            for _ in range(2):
                await kit.claim("default")
                kit.advance(td(minutes=2))
                await kit.sweep("default")
            assert db.value("select state from rowmill_jobs where id = ?", child) == "dead"
    await mill.worker(drain=True).run()
    assert await handle.result(5) == (1 if how == "deleted" else 2)


async def test_a_job_made_ready_before_its_time_waits_on_for_the_children_it_has(mill: Mill, db: Db) -> None:
    @mill.task
    async def part() -> None: ...

    @mill.task(queue="parents")
    async def whole(job: Job) -> int:
        return (await job.spawn(part.call(), part.call())).done

    handle = await whole.enqueue()
    async with Kit(mill) as kit:
        await kit.step("parents")
        db.execute("update rowmill_jobs set state = 'ready' where task = 'whole'")
        await kit.step("parents")
        assert db.value("select state from rowmill_jobs where task = 'whole'") == "joining"
    await mill.worker(drain=True).run()
    assert await handle.result(5) == 2
    assert db.value("select count(*) from rowmill_jobs") == 3


async def test_children_are_kept_until_their_parent_has_looked_at_them(mill: Mill, db: Db) -> None:
    from rowmill.store.jobs.job_rows import Jobs

    @mill.task(keep=td(0))
    async def part(n: int) -> int:
        return n

    @mill.task(queue="parents")
    async def whole(job: Job) -> int:
        return (await job.spawn(part.call(1), part.call(2))).done

    handle = await whole.enqueue()
    counter = await mill._client.connection()
    jobs = Jobs(counter.database, mill.clock)
    async with Kit(mill) as kit:
        await kit.step("parents")
        await kit.step("default")
        mill.clock.advance(td(seconds=1))
        assert await jobs.prune(["part"], mill.tasks["part"].keep) == 0
        await kit.step("default")
        assert await jobs.prune(["part"], mill.tasks["part"].keep) == 0
        await kit.step("parents")
        assert await jobs.prune(["part"], mill.tasks["part"].keep) == 2
    assert await handle.result(5) == 2
    assert db.value("select count(*) from rowmill_jobs") == 1


# -- batches and chains


async def test_a_batch_calls_back_once_when_all_have_ended(mill: Mill) -> None:
    @mill.task(max_attempts=1)
    async def part(n: int) -> int:
        if n == 1:
            raise ValueError
        return n

    @mill.task
    async def report(job: Job, title: str) -> str:
        joined = await job.joined()
        return f"{title}: {joined.done} done, {joined.failed} failed, {await job.results()}"

    handle = await mill.batch([part.call(n) for n in range(4)], then=report.call(title="t"))
    empty = await mill.batch([], then=report.call(title="e"))
    await mill.worker(drain=True).run()
    assert await handle.result(5) == "t: 3 done, 1 failed, [0, None, 2, 3]"
    assert await empty.result(5) == "e: 0 done, 0 failed, []"


async def test_a_chain_runs_in_order_and_stops_where_one_fails(mill: Mill, db: Db) -> None:
    order: list[str] = []

    @mill.task(max_attempts=1)
    async def link(job: Job, name: str, fail: bool = False) -> str:
        before = await job.results()
        order.append(name)
        if fail:
            raise ValueError
        return (before[0] if before else "") + name

    handle = await mill.chain(*[link.call(name) for name in "abc"])
    await mill.worker(drain=True).run()
    assert await handle.result(5) == "abc"
    assert order == ["a", "b", "c"]
    handle = await mill.chain(link.call("d"), link.call("e", fail=True), link.call("f"), link.call("g"))
    await mill.worker(drain=True).run()
    with pytest.raises(TaskCanceled, match="did not end well"):
        await handle.result(5)
    assert order == ["a", "b", "c", "d", "e"]
    states = [row["state"] for row in db.query("select state from rowmill_jobs order by id desc")]
    assert states[:4] == ["done", "dead", "canceled", "canceled"]


async def test_a_flow_is_added_whole_or_not_at_all(mill: Mill, db: Db) -> None:
    @mill.task
    async def part(n: int) -> None: ...

    class Undo(Exception): ...

    await mill.prepare()
    database = (await mill._client.connection()).database

    async def undone() -> None:
        async with database.begin() as tx:
            await mill.batch([part.call(n) for n in range(3)], then=part.options(tx=tx).call(9))
            raise Undo

    with pytest.raises(Undo):
        await undone()
    assert db.value("select count(*) from rowmill_jobs") == 0


async def test_calls_with_keys_are_refused_in_flows(mill: Mill) -> None:
    """A key that is taken leads to a job that is nobody's child: the parent would wait for ever."""

    @mill.task(max_attempts=1)
    async def part(job: Job) -> None:
        await job.spawn(part.options(key="k").call())

    keyed = part.options(key="k").call()
    for flow in (mill.batch([keyed], then=part.call()), mill.chain(part.call(), keyed)):
        with pytest.raises(WrongArguments, match="cannot have a key"):
            await flow
    handle = await part.enqueue()
    await mill.worker(drain=True).run()
    with pytest.raises(TaskFailed, match="cannot have a key"):
        await handle.result(5)
