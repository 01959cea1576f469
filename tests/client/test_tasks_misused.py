"""Tasks under wrong use and bad luck: refused in words at the call, and nobody else's job suffers."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import asyncpg
import pytest

from databases import Db, Server
from rowmill import DeclarationError, Job, Keep, Key, Mill, RowmillError, WrongArguments
from rowmill.client.connection import EnvironmentConnection
from rowmill.declare.cron import Cron
from rowmill.engine.cron_scheduler import Scheduler
from rowmill.testing import Kit

td = timedelta


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


UNKEPT = [math.nan, math.inf, nested(5000), [10**5000], [math.nan], {"a": -math.inf}]


@pytest.mark.parametrize("value", UNKEPT, ids=range(len(UNKEPT)))
async def test_a_value_that_json_has_no_word_for_is_refused_at_the_call(lite: Db, value: Any) -> None:
    """PostgreSQL would refuse it later, and SQLite would keep what no other reader takes."""
    mill = Mill(lite.url)

    @mill.task
    async def take(given): ...

    @mill.task
    async def count(given: int, share: float = 0.5): ...

    with pytest.raises(WrongArguments):
        take.call(value)
    with pytest.raises(WrongArguments):
        count.call(10**5000)
    with pytest.raises(WrongArguments):
        count.call(1, math.nan)


def test_one_name_cannot_be_two_arguments() -> None:
    mill = Mill("sqlite://")

    @mill.task
    async def take(to, /, **rest): ...

    assert take.call("a", cc="b").args == {"to": "a", "cc": "b"}
    with pytest.raises(WrongArguments, match="'to' is a parameter"):
        take.call("a", to="b")


@pytest.mark.parametrize(
    "options",
    [
        {"run_after": datetime.min.replace(tzinfo=timezone(td(hours=5)))},
        {"run_after": datetime.max.replace(tzinfo=timezone(td(hours=-5)))},
        {"run_after": td.max},
        {"run_after": td.min},
        {"key": "a\0b"},
        {"key": "a\ud800"},
        {"key": "k" * 501},
        {"priority": True},
        {"priority": 32768},
        {"env": 5},
    ],
    ids=repr,
)
async def test_options_that_no_database_keeps_are_refused_at_the_call(lite: Db, options: dict[str, Any]) -> None:
    """A time before the year one can be written to PostgreSQL and not read again: it stopped its whole queue."""
    mill = Mill(lite.url)

    @mill.task
    async def work(): ...

    with pytest.raises(WrongArguments):
        await work.enqueue(**options)
    await mill.close()


async def test_calls_that_are_none_are_refused_by_enqueue_many(lite: Db) -> None:
    mill = Mill(lite.url)

    @mill.task
    async def work(to: str): ...

    for wrong in ([1, 2], ["a", "b"], None, {"to": "a"}, "ab", work.call("a")):
        with pytest.raises(WrongArguments):
            await work.enqueue_many(wrong)  # type: ignore[arg-type]
    for wrong in ([1], None, work.call("a")):
        with pytest.raises(WrongArguments):
            await mill.enqueue_many(wrong)  # type: ignore[arg-type]
    await mill.close()


def test_wrong_limits_are_told_at_the_declaration() -> None:
    for wrong in ({"age": 5}, {"dead": td(days=-1)}, {"count": -1}, {"count": "many"}):
        with pytest.raises(DeclarationError):
            Keep(**wrong)  # type: ignore[arg-type]
    with pytest.raises(WrongArguments):
        Key("a", within=td(days=-1))
    for options in ({"name": ""}, {"name": 5}, {"queue": 5}, {"classify": 5}, {"max_attempts": 10**12}):
        with pytest.raises(DeclarationError):
            Mill("sqlite://").task(**options)(lambda: None)
    with pytest.raises(DeclarationError):
        Mill("sqlite://").cron("0 3 * * *", tz=5)(lambda: None)  # type: ignore[arg-type]


def test_common_options_are_for_calls_too_so_that_a_rollback_leaves_nothing(lite: Db) -> None:
    """A call kept its own options only: given a transaction for all, it was added outside of it."""
    mill = Mill(lite.url)

    @mill.task
    async def work(to: str): ...

    mill.prepare_sync()
    connection = sqlite3.connect(lite.url.removeprefix("sqlite:///"))
    connection.row_factory = lambda cursor, row: {
        about[0]: value for about, value in zip(cursor.description, row, strict=True)
    }
    calls = [work.call("a"), {"to": "b"}, work.options(priority=3).call("c")]
    work.enqueue_many_sync(calls, tx=connection, priority=7)
    work.enqueue_sync("d", key="d", tx=connection)
    found = connection.execute("select priority from rowmill_jobs order by id").fetchall()
    assert [row["priority"] for row in found] == [7, 7, 3, 0], "rows of the connection's own kind are no hindrance"
    connection.rollback()
    connection.close()
    assert lite.value("select count(*) from rowmill_jobs") == 0
    asyncio.run(mill.close())


async def test_arguments_that_are_no_object_end_the_job_in_words(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task
    async def work(to: str): ...

    await mill.prepare()
    for args in ("[1]", "5", '"x"', "null"):
        db.execute("insert into rowmill_jobs (task, args) values ('work', ?)", args)
    async with Kit(mill) as kit:
        for _ in range(4):
            stepped = await kit.step()
            assert stepped is not None
            assert stepped.outcome == "dead"
            assert "must be an object" in str(stepped.error)
    await mill.close()


@pytest.mark.parametrize("kind", ["step", "spawn"])
async def test_a_name_that_comes_twice_in_a_run_ends_the_job(db: Db, kind: str) -> None:
    """The second would get what the first one got, without having run."""
    mill = Mill(db.url)

    @mill.task
    async def part(number: int) -> int:
        return number

    @mill.task
    async def whole(job: Job) -> None:
        for number in range(2):
            if kind == "step":
                await job.step("part", part.handler, number)
            else:
                await job.spawn(part.call(number), name="part")

    handle = await whole.enqueue()
    async with Kit(mill) as kit:
        await kit.drain()
    status = await handle.status()
    assert status is not None
    assert status.state == "dead"
    assert "twice in one run" in str(status.error)
    await mill.close()


# -- results


async def test_a_result_that_is_there_is_given_without_waiting(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task
    async def work() -> str:
        return 5  # type: ignore[return-value]

    handle = await work.enqueue()
    with pytest.raises(TimeoutError):
        await handle.result(timeout=0)
    async with Kit(mill) as kit:
        await kit.drain()
    assert await handle.result(timeout=0) == 5, "also where it is not what the handler said it would be"
    with pytest.raises(WrongArguments):
        await handle.result(timeout="soon")  # type: ignore[arg-type]
    await mill.close()


async def test_who_asks_while_a_watch_ends_is_watched_for(lite: Db, monkeypatch: Any) -> None:
    """The watch saw that nobody waits any more, and took its time to end: who came then waited for ever."""
    mill = Mill(lite.url)

    @mill.task
    async def work() -> int:
        return 1

    first, second = await work.enqueue(), await work.enqueue()
    counter: EnvironmentConnection = await mill._client.connection()
    ending, going_on = asyncio.Event(), asyncio.Event()

    async def slow_to_end(*_: Any, **__: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ending.set()
            await going_on.wait()

    monkeypatch.setattr("rowmill.client.connection.listen", slow_to_end)
    waiting = asyncio.create_task(counter.ended(first.id))
    lite.execute("update rowmill_jobs set state = 'done', finished_at = created_at where id = ?", first.id)
    await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(ending.wait(), 60)
    lite.execute("update rowmill_jobs set state = 'done', finished_at = created_at where id = ?", second.id)
    try:
        await asyncio.wait_for(counter.ended(second.id), 60)
    finally:
        going_on.set()
    await mill.close()


async def test_a_restart_of_the_database_does_not_end_the_wait_for_a_result() -> None:
    with Server() as server:
        db = Db(server.create_database("restarted"))
        mill = Mill(db.url)

        @mill.task
        async def work() -> str:
            return "there"

        handle = await work.enqueue()
        waiting = asyncio.create_task(handle.result(timeout=60))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(1)
        assert not waiting.done()
        await asyncio.to_thread(server.start)
        async with Kit(mill) as kit:
            await kit.drain()
        assert await waiting == "there"
        await asyncio.to_thread(server.stop)
        asking = asyncio.create_task(handle.result(timeout=60))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.start)
        assert await asking == "there", "also where it was asked for while the database was away"
        await mill.close()


# -- code that does not await


def test_closing_in_one_loop_leaves_the_calls_of_other_threads_alone(lite: Db) -> None:
    """It stopped the loop that they waited for, and they waited for ever."""
    mill = Mill(lite.url)

    @mill.task
    async def work() -> int:
        return 7

    handle = work.enqueue_sync()
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.append(handle.result_sync(timeout=60)), daemon=True)
    waiter.start()
    deadline = time.monotonic() + 60
    while mill._client._own is None or not mill._client._own.calls:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asyncio.run(mill.close())

    async def drain() -> None:
        async with Kit(mill) as kit:
            await kit.drain()

    asyncio.run(drain())
    waiter.join(60)
    assert results == [7]
    assert not [thread for thread in threading.enumerate() if thread.name == "rowmill-client" and _outlives(thread)]


def _outlives(thread: threading.Thread) -> bool:
    thread.join(60)
    return thread.is_alive()


async def test_who_awaits_a_result_is_told_that_the_mill_was_closed(lite: Db) -> None:
    mill = Mill(lite.url)

    @mill.task
    async def work() -> None: ...

    handle = await work.enqueue()
    waiting = asyncio.create_task(handle.result())
    for _ in range(6000):
        if (await mill._client.connection())._awaited:
            break
        await asyncio.sleep(0.01)
    await mill.close()
    with pytest.raises(RowmillError, match="closed"):
        await asyncio.wait_for(waiting, 60)


# -- crons after a long stop


@pytest.mark.parametrize(("missed", "wanted"), [("skip", 1), ("once", 1)])
def test_after_a_year_of_absence_the_next_tick_is_the_next_one(missed: str, wanted: int) -> None:
    """Ten thousand ticks were gone through at a time, once a minute: an hour without ticks, or fifty for once."""
    now = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
    ticks, until = Cron("* * * * *", "America/Montreal", missed).due(now - td(days=365), now)
    assert len(ticks) == wanted
    assert until == datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
    daily = Cron("0 3 * * *", "America/Montreal", missed)
    ticks, until = daily.due(now - td(days=365), now)
    assert until == datetime(2026, 6, 1, 7, 0, tzinfo=UTC)
    assert ticks == ([] if missed == "skip" else [until])
    assert daily.due(until, now) == ([], until)


async def test_a_cron_with_another_expression_is_counted_from_its_change_on(db: Db) -> None:
    """Otherwise a daily cron that becomes one of every minute makes up for a day of minutes."""

    def declared(expression: str) -> Mill:
        mill = Mill(db.url)

        @mill.cron(expression, missed="all")
        async def often() -> None: ...

        return mill

    async def tick(mill: Mill, later: timedelta) -> int:
        async with Kit(mill) as kit:
            kit.advance(later)
            database = dict(kit._databases)["default"]
            scheduler = Scheduler(database, mill.clock, mill.events, list(mill.tasks.values()))
            await mill.prepare()
            await scheduler.start()
            await scheduler.tick()
        await mill.close()
        return int(db.value("select count(*) from rowmill_jobs"))

    assert await tick(declared("0 0 1 1 *"), td(0)) == 0
    assert await tick(declared("* * * * *"), td(hours=5)) == 0
    assert await tick(declared("* * * * *"), td(hours=5, minutes=10)) in (10, 11)


async def test_a_reason_to_cancel_may_be_any_text(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task
    async def work() -> None: ...

    handle = await work.enqueue()
    assert await handle.cancel("why\0 \ud800") is True
    status = await handle.status()
    assert status is not None
    assert status.error == "why\\x00 ?"
    await mill.close()


async def test_postgres_refuses_a_due_time_that_no_driver_reads(pg: Db) -> None:
    """A plain insert of one stopped its whole queue."""
    mill = Mill(pg.url)
    await mill.prepare()
    insert = "insert into rowmill_jobs (task, run_after) values ('work', {})"
    for wrong in ("'0044-03-15 BC'", "'20000-01-01'"):
        with pytest.raises(asyncpg.CheckViolationError):
            pg.execute(insert.format(wrong))
    for right in ("'infinity'", "'-infinity'", "now()"):
        pg.execute(insert.format(right))
    await mill.close()
