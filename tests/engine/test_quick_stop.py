"""A stop is quick and kind: rows that nobody started go back at once, whatever the worker waits for."""

from __future__ import annotations

import asyncio
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from rowmill.store import PostgresLane
from rowmill.store.lane.sqlite import SqliteLane
from workers import STATES, jobs, until


async def test_prefetched_rows_go_back_at_once_while_a_handler_and_a_claim_go_on(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue, recovery: not when the round ends that the stop came into; and a late claim starts nothing."""
    jobs(db, 40)
    mill, go, may_claim = Mill(db.url), asyncio.Event(), asyncio.Event()
    lane = PostgresLane if db.dialect == "postgresql" else SqliteLane
    plain, starts, claimed = lane.claim, list[Any](), list[int]()

    async def claim(self: Any, count: int) -> Any:
        claims = await plain(self, count)
        claimed.append(len(claims))
        if len(claimed) == 2:
            await may_claim.wait()
        return claims

    monkeypatch.setattr(lane, "claim", claim)

    @mill.lane("jobs", name="work", concurrency=1, batch=10, poll=td(seconds=0.05), lease=td(hours=1), **STATES)
    async def work(job: Any) -> None:
        starts.append(job.id)
        await go.wait()

    worker = mill.worker(grace=60)
    worker.slots["work"]._took = 0.001  # runs are short, as far as it knows: it prefetches
    task = asyncio.create_task(worker.run())
    await until(lambda: starts and len(claimed) == 2, 60)
    assert (claimed, worker.slots["work"].buffered) == ([10, 10], 9)
    worker.stop()
    running = "select count(*) from jobs where status = 'running'"
    await until(lambda: db.value(running) == 11, 60)
    go.set()
    await until(lambda: db.value(running) == 10, 60)
    may_claim.set()  # while its slot is free
    await asyncio.wait_for(task, 60)
    assert starts == [1]
    assert db.query("select status, count(*) n, max(attempts) most from jobs group by status order by status") == [
        {"status": "done", "n": 1, "most": 1},
        {"status": "queued", "n": 39, "most": 0},
    ]
