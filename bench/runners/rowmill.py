"""rowmill with its defaults: heartbeat thread, workers table, fence and sweeps are all on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rowmill import Concurrency, Mill
from rowmill.engine.processes.child import rest_collector

from ..tables import table
from .protocol import Recorder, order, serve
from .rows import rows


class Runner:
    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        self.url = dsn if "://" in dsn else f"sqlite:///{dsn}"
        self.options, self.table = options, table(options)
        self.rows = rows(dsn, self.table)

    async def open(self) -> None:
        await self.rows.open()

    async def setup(self) -> None:
        await self.rows.setup()

    async def add(self, number: int) -> None:
        await self.rows.add(number)

    async def add_many(self, numbers: Sequence[int]) -> None:
        await self.rows.add_many(numbers)

    async def work(self, recorder: Recorder) -> None:
        mill, hit, number = Mill(self.url), recorder.hit, self.table.number
        sleep = self.options.get("sleep", 0)

        async def noop(job: Any) -> None:
            hit(number(job))
            if sleep:
                await asyncio.sleep(sleep)

        given = {name: self.options[name] for name in ("batch", "concurrency")}
        if limit := self.options.get("gate"):
            given["gates"] = [Concurrency(limit, by="domain")]
        self.table.declare(mill, noop, **given)
        worker = mill.worker()
        rest_collector()  # as ``rowmill run`` does in a process of its own
        recorder.wait_for_go()
        await worker.run()


action, dsn, options = order()
asyncio.run(serve(Runner(dsn, options), action, options))
