"""A finish block whose claim is gone lets go at once."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta as td
from typing import Any

from databases import Db
from rowmill import LostClaim, Mill
from workers import STATES, jobs


async def test_a_finish_block_that_lost_its_claim_does_not_keep_the_file_behind_the_engines_own_writes(
    lite: Db,
) -> None:
    """X1: it has the write lock while it asks whether its claim holds, and the engine waits for that lock."""
    jobs(lite, 2)
    mill = Mill(lite.url)
    in_block, took = asyncio.Event(), list[float]()

    @mill.lane("jobs", name="work", concurrency=2, lease=td(seconds=60), poll=td(seconds=0.2), **STATES)
    async def work(job: Any) -> None:
        if job.id == 2:
            await in_block.wait()  # ends while the other has the lock: its outcome waits for that
            return
        # Not ready again: this worker could claim it before the block has the lock, and would cancel this run.
        lite.execute("update jobs set status = 'dead', worker = null where id = 1")
        try:
            async with job.finish():
                in_block.set()
                await asyncio.sleep(0.3)
                began = time.monotonic()
        except LostClaim:
            took.append(time.monotonic() - began)
            raise

    await mill.worker(drain=True).run()
    assert took
    assert took[0] < 3  # it was the five seconds that the engine waits for a lock, and more
    assert lite.query("select status from jobs order by id") == [{"status": "dead"}, {"status": "done"}]
