"""After a claim whose reply was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from workers import STATES, jobs, until, working


async def test_a_row_that_is_settled_while_it_is_asked_what_is_ours_is_not_run_again(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1: the answer is older than the settling: in it the row still runs, and nobody here holds it."""
    jobs(db)
    mill = Mill(db.url)
    runs, may_end = [], asyncio.Event()

    @mill.lane("jobs", name="work", **STATES)
    async def work(job: Any) -> None:
        runs.append(job.id)
        await may_end.wait()

    async with working(mill) as worker:
        await until(lambda: runs)
        held = worker.environments[0].lane_states[0]
        ask = held.store.mine

        async def mine() -> Any:
            found = await ask()
            may_end.set()
            await until(lambda: not held.claims)
            return found

        monkeypatch.setattr(held.store, "mine", mine)
        held.reply_lost = worker.environments[0].look = True
        worker.wake()
        await until(lambda: not held.reply_lost)
        await until(lambda: not held.claims)
    assert runs == [1]
    assert db.value("select status from jobs") == "done"
