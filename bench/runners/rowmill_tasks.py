"""rowmill's tasks: rowmill_jobs, with everything on, through the calls that an application has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rowmill import Mill
from rowmill.engine.processes.child import rest_collector

from .protocol import Recorder, order, serve


class Runner:
    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        self.options = options
        self.mill = Mill(dsn if "://" in dsn else f"sqlite:///{dsn}")
        self.sleep, self.hit = options.get("sleep", 0), lambda number: None
        self.mill.queue("default", batch=options["batch"], concurrency=options["concurrency"])

        @self.mill.task
        async def noop(number: int) -> None:
            self.hit(number)
            if self.sleep:
                await asyncio.sleep(self.sleep)

        self.noop = noop

    async def open(self) -> None:
        await self.noop.handle(0).status()  # connects, as the others do

    async def setup(self) -> None:
        await self.mill.prepare()

    async def add(self, number: int) -> Any:
        return await self.noop.enqueue(number)

    async def add_many(self, numbers: Sequence[int]) -> Any:
        return await self.noop.enqueue_many([(number,) for number in numbers])

    async def work(self, recorder: Recorder) -> None:
        self.hit = recorder.hit
        worker = self.mill.worker()
        rest_collector()  # as ``rowmill run`` does in a process of its own
        recorder.wait_for_go()
        await worker.run()


action, dsn, options = order()
asyncio.run(serve(Runner(dsn, options), action, options))
