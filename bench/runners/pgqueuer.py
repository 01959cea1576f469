"""PgQueuer, on the event loop its own command line uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer, Queries
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver

from .protocol import Recorder, order, serve


class Runner:
    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        self.dsn, self.options = dsn, options

    async def open(self) -> None:
        self.queries = Queries(AsyncpgDriver(await asyncpg.connect(self.dsn)))

    async def setup(self) -> None:
        await self.queries.install()

    async def add(self, number: int) -> Any:
        return await self.queries.enqueue("noop", b"%d" % number)

    async def add_many(self, numbers: Sequence[int]) -> Any:
        count = len(numbers)
        return await self.queries.enqueue(["noop"] * count, [b"%d" % n for n in numbers], [0] * count)

    async def work(self, recorder: Recorder) -> None:
        pool = await asyncpg.create_pool(self.dsn, min_size=2, max_size=self.options["pool"])
        queue, sleep = PgQueuer(AsyncpgPoolDriver(pool)), self.options.get("sleep", 0)

        @queue.entrypoint("noop")
        async def noop(job: Any) -> None:
            recorder.hit(int(job.payload))
            if sleep:
                await asyncio.sleep(sleep)

        recorder.wait_for_go()
        await queue.run(
            batch_size=self.options["batch_size"], max_concurrent_tasks=self.options.get("max_concurrent_tasks")
        )


action, dsn, options = order()
uvloop.run(serve(Runner(dsn, options), action, options))
