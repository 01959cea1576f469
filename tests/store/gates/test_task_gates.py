"""Gates on tasks: a queue is a lane, and its jobs are held back like any row."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta as td

from databases import Db
from rowmill import Breaker, Concurrency, Job, Mill, Rate
from rowmill.testing import Kit


async def test_a_task_is_limited_by_an_argument_across_workers(db: Db) -> None:
    """A gate's key may be read from the arguments: on both databases the same expression."""
    mill, now, most = Mill(db.url), Counter[str](), Counter[str]()

    @mill.task(gates=[Concurrency(2, by="args->>'domain'")], concurrency=20)
    async def crawl(domain: str, n: int) -> int:
        now[domain] += 1
        most[domain] = max(most[domain], now[domain])
        await asyncio.sleep(0.002)
        now[domain] -= 1
        return n

    await mill.prepare()
    await crawl.enqueue_many([{"domain": f"d{n % 3}", "n": n} for n in range(60)])
    async with Kit(mill) as kit:
        tally = await asyncio.wait_for(kit.drain(), 60)
    await mill.close()
    assert tally.completed == 60
    assert most == {"d0": 2, "d1": 2, "d2": 2}


async def test_rate_and_pace_hold_back_tasks(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task(gates=[Rate(2, per=td(hours=1))])
    async def mail(to: str) -> None: ...

    @mill.task(pace=(1, td(hours=1)))
    async def report() -> None: ...

    await mill.prepare()
    for n in range(4):
        await mail.enqueue(to=str(n))
        await report.enqueue()
    async with Kit(mill) as kit:
        assert len(await kit.claim("mail", 10)) == 2
        assert len(await kit.claim("report", 10)) == 1
        assert await kit.claim("mail", 10) == []
        assert await kit.claim("report", 10) == []
    await mill.close()


async def test_a_breaker_parks_tasks_without_costing_them_an_attempt(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task(gates=[Breaker(2, td(minutes=5))], max_attempts=5)
    async def call(job: Job, n: int) -> None:
        raise RuntimeError("down")

    await mill.prepare()
    for n in range(5):
        await call.enqueue(n=n)
    async with Kit(mill) as kit:
        for _ in range(2):
            stepped = await kit.step("call")
            assert stepped is not None
            assert stepped.outcome == "retry"
        assert await kit.step("call") is None
    await mill.close()
    assert db.value("select count(*) from rowmill_jobs where attempts = 0 and state = 'ready'") == 3
