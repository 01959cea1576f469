"""Wake-ups by the trigger of migrate --wake: no row waits for a poll, whatever the order of commits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from wake import TABLE, connected, insert_unheard, install, listening
from workers import STATES, until, working

pytestmark = pytest.mark.no_pooler("nobody listens through a pooler")

Insert = Callable[[Any], Awaitable[Any]]


async def ready_worker(pg: Db) -> tuple[Mill, list[int]]:
    """A lane that polls once an hour, on a table with a wake trigger; and the rows that it ran."""
    pg.execute(TABLE.format("jobs"))
    mill, ran = Mill(pg.url), list[int]()

    @mill.lane("jobs", name="jobs", poll=timedelta(hours=1), **STATES)
    async def handler(job: Any) -> None:
        ran.append(job.id)

    await install(mill)
    return mill, ran


async def listens(pg: Db, worker: Any) -> None:
    """Wait until a worker has opened its lanes and listens."""
    await worker.started.wait()
    async with connected(pg) as connection:
        text = "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
        async with asyncio.timeout(60):
            while not await connection.fetchval(text):  # noqa: ASYNC110 - the server says it, nobody else
                await asyncio.sleep(0.02)


async def test_a_row_of_plain_sql_runs_without_a_poll(pg: Db) -> None:
    mill, ran = await ready_worker(pg)
    async with working(mill) as worker, connected(pg) as writer:
        await listens(pg, worker)
        for count in range(1, 6):
            await writer.execute("insert into jobs default values")
            await until(lambda count=count: len(ran) == count, 60)  # type: ignore[misc]
        await writer.execute("update jobs set status = 'queued' where id = 1")
        await until(lambda: len(ran) == 6, 60)


async def test_a_writer_that_commits_before_the_one_that_notified_first_is_not_kept_waiting(pg: Db) -> None:
    mill, ran = await ready_worker(pg)
    async with working(mill) as worker, connected(pg) as first, connected(pg) as second:
        await listens(pg, worker)
        async with first.transaction():
            await first.execute("insert into jobs default values")
            await second.execute("insert into jobs default values")
            await until(lambda: ran == [2], 60)
        await until(lambda: ran == [2, 1], 60)


async def test_a_writer_whose_notification_was_left_out_is_seen_when_it_commits_later(pg: Db) -> None:
    """Notified by another transaction, the worker looks on while this one is open, and sees its row in the end."""
    mill, ran = await ready_worker(pg)
    async with working(mill) as worker, connected(pg) as first, connected(pg) as second, listening(pg) as listener:
        await listens(pg, worker)
        async with second.transaction():
            await insert_unheard(second)
            assert await listener.count() == 0
            await first.execute("select setval('rowmill_wake', 1)")
            await first.execute("insert into jobs default values")
            await until(lambda: len(ran) == 1, 60)
            await asyncio.sleep(0.3)  # longer than a second look takes: the worker has to go on
        await until(lambda: len(ran) == 2, 60)
        assert await listener.count() == 1, "the second writer never notified"


async def test_a_writer_whose_notification_was_left_out_is_seen_when_it_commits_first(pg: Db) -> None:
    mill, ran = await ready_worker(pg)
    async with working(mill) as worker, connected(pg) as first, connected(pg) as second, listening(pg) as listener:
        await listens(pg, worker)
        async with first.transaction():
            await first.execute("insert into jobs default values")
            async with second.transaction():
                await insert_unheard(second)
        await until(lambda: len(ran) == 2, 60)
        assert await listener.count() == 1, "the second writer never notified"
