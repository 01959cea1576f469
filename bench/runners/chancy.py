"""Chancy with its async executor; finished jobs are kept, as by default."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from chancy import Chancy, Queue, Worker

from . import chancy_job
from .protocol import Recorder, order, serve


class Runner:
    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        self.options = options
        quiet = logging.getLogger("quiet")
        quiet.setLevel(logging.ERROR)
        self.chancy = Chancy(dsn, log=quiet)

    async def open(self) -> None:
        await self.chancy.__aenter__()

    async def setup(self) -> None:
        await self.chancy.migrate()
        # Left alone, the worker declares "default" by itself, with a pool of processes.
        await self.chancy.declare(Queue("default", executor=Chancy.Executor.Async))

    async def add(self, number: int) -> Any:
        return await self.chancy.push(self._job(number))

    async def add_many(self, numbers: Sequence[int]) -> None:
        jobs = [self._job(number) for number in numbers]
        async for _ in self.chancy.push_many(jobs, batch_size=len(jobs)):
            pass

    @staticmethod
    def _job(number: int) -> Any:
        return chancy_job.noop.job.with_kwargs(number=number)

    async def work(self, recorder: Recorder) -> None:
        chancy_job.recorder, chancy_job.sleep = recorder, self.options.get("sleep", 0)
        queue = Queue(
            "bench",
            executor=Chancy.Executor.Async,
            concurrency=self.options["concurrency"],
            polling_interval=1,
            eager_polling=True,
        )
        await self.chancy.declare(queue, upsert=True)
        recorder.wait_for_go()
        async with Worker(self.chancy, register_signal_handlers=False) as worker:
            await worker.wait_for_shutdown()


action, dsn, options = order()
asyncio.run(serve(Runner(dsn, options), action, options))
