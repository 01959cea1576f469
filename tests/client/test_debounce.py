"""``Key(value, debounce=, at_most=)``: one run after the last call, and no later than the longest wait."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

from databases import Db
from rowmill import Job, Key, Mill, fixed
from rowmill.errors import WrongArguments
from rowmill.testing import Kit

KEY = Key("doc-1", debounce=td(minutes=5), at_most=td(minutes=12))


async def test_a_job_waits_for_the_last_call_and_gets_its_arguments(mill: Mill, db: Db) -> None:
    seen: list[int] = []

    @mill.task
    async def index(n: int) -> None:
        seen.append(n)

    await mill.prepare()
    async with Kit(mill, real=True) as kit:
        first = await index.enqueue(n=1, key=KEY)
        kit.advance(td(minutes=4))
        assert (await index.enqueue(n=2, key=KEY)).id == first.id
        kit.advance(td(minutes=4))  # 8 min: past the first call's wait, not past the second's
        assert await kit.step("default") is None
        kit.advance(td(minutes=2))
        assert (await kit.step("default")) is not None
    assert seen == [2]


async def test_calls_without_an_end_hold_a_job_back_no_longer_than_at_most(mill: Mill, db: Db) -> None:
    seen: list[int] = []

    @mill.task
    async def index(n: int) -> None:
        seen.append(n)

    await mill.prepare()
    async with Kit(mill, real=True) as kit:
        for n in range(3):  # calls at 0, 4 and 8 min: the last would put the job off to 13 min
            await index.enqueue(n=n, key=KEY)
            kit.advance(td(minutes=4))
            assert (await kit.step("default") is None) is (n < 2)
    assert seen == [2]


async def test_a_call_while_the_job_runs_makes_the_next_job(mill: Mill, db: Db) -> None:
    @mill.task
    async def index(n: int) -> None: ...

    await mill.prepare()
    async with Kit(mill, real=True) as kit:
        first = await index.enqueue(n=1, key=KEY)
        kit.advance(td(minutes=6))
        (claim,) = await kit.claim("default")
        second = await index.enqueue(n=2, key=KEY)
        assert second.id != first.id
        assert (await index.enqueue(n=3, key=KEY)).id == second.id
        await kit.settle(claim)
    assert db.value("select count(*) from rowmill_jobs") == 2


async def test_a_job_that_waits_for_its_retry_begins_again_with_the_new_call(mill: Mill, db: Db) -> None:
    """With all its attempts, with the whole wait, and without what its steps made of the old arguments."""
    seen: list[tuple[int, int, int]] = []

    @mill.task(max_attempts=2, backoff=fixed(td(hours=1)))
    async def index(job: Job, n: int) -> None:
        async def read() -> int:
            return n

        seen.append((n, await job.step("read", read), job.attempt))
        if n == 1:
            raise ValueError("no such document")

    await mill.prepare()
    async with Kit(mill, real=True) as kit:
        first = await index.enqueue(n=1, key=KEY)
        kit.advance(td(minutes=20))  # the longest wait is over
        await kit.step("default")
        assert (await index.enqueue(n=2, key=KEY)).id == first.id
        kit.advance(td(minutes=4))
        assert await kit.step("default") is None
        kit.advance(td(minutes=2))
        await kit.step("default")
    assert seen == [(1, 1, 1), (2, 2, 1)]


async def test_calls_at_the_same_time_make_one_job(mill: Mill, db: Db) -> None:
    await mill.prepare()
    callers = [Mill(db.url) for _ in range(8)]

    async def index(n: int) -> None: ...

    tasks = [caller.task(name="index")(index) for caller in callers]
    await asyncio.gather(*(task.enqueue(n=n, key=KEY) for n, task in enumerate(tasks * 3)))
    assert db.value("select count(*) from rowmill_jobs") == 1
    for caller in callers:
        await caller.close()


async def test_of_two_transactions_on_sqlite_the_second_waits_for_the_first(lite: Db) -> None:
    """Also where neither has written before it enqueues: a read locks nobody out."""
    path = Path(lite.url.removeprefix("sqlite:///"))
    async with Kit(mill := Mill(lite.url), real=True):

        @mill.task
        async def index(n: int) -> None: ...

        with closing(sqlite3.connect(path)) as one, closing(sqlite3.connect(path, timeout=0)) as other:
            one.set_trace_callback(
                lambda sql: then.append(_refused(index, other)) if sql.startswith("insert") else None
            )
            then: list[bool] = []
            index.enqueue_sync(n=1, key=KEY, tx=one)
            one.commit()
            index.enqueue_sync(n=2, key=KEY, tx=other)
            other.commit()
    assert then == [True]
    assert lite.value("select count(*) from rowmill_jobs") == 1


def _refused(task: Any, tx: sqlite3.Connection) -> bool:
    try:
        task.enqueue_sync(n=3, key=KEY, tx=tx)
    except sqlite3.OperationalError:
        return True
    finally:
        tx.rollback()
    return False


@pytest.mark.parametrize(
    "given",
    [
        {"at_most": td(seconds=1)},
        {"debounce": td(0)},
        {"debounce": 5},
        {"debounce": td(seconds=5), "at_most": td(seconds=4)},
        {"debounce": td(seconds=5), "conflict": "raise"},
        {"debounce": td(seconds=5), "within": td(hours=1)},
    ],
)
def test_what_makes_no_sense_is_refused(given: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(WrongArguments):
        Key("k", **given)
