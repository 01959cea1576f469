"""Procrastinate on its psycopg connector."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import procrastinate

from .protocol import Recorder, order, serve


class Runner:
    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        self.options = options
        connector = procrastinate.PsycopgConnector(conninfo=dsn, min_size=1, max_size=options["pool"])
        self.app = procrastinate.App(connector=connector)
        self.recorder = Recorder()
        sleep = options.get("sleep", 0)

        async def noop(number: int) -> None:
            self.recorder.hit(number)
            if sleep:
                await asyncio.sleep(sleep)

        self.task = self.app.task(noop, name="noop", queue="bench")

    async def open(self) -> None:
        await self.app.open_async()

    async def setup(self) -> None:
        await self.app.schema_manager.apply_schema_async()

    async def add(self, number: int) -> Any:
        return await self.task.defer_async(number=number)

    async def add_many(self, numbers: Sequence[int]) -> Any:
        return await self.task.batch_defer_async(*({"number": number} for number in numbers))

    async def work(self, recorder: Recorder) -> None:
        self.recorder = recorder
        recorder.wait_for_go()
        await self.app.run_worker_async(
            queues=["bench"], concurrency=self.options["concurrency"], install_signal_handlers=False
        )


action, dsn, options = order()
asyncio.run(serve(Runner(dsn, options), action, options))
