"""Huey on SQLite; the database is a file. A job is deleted when it is taken, and there is no call for many."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from huey import SqliteHuey

from .protocol import Recorder, order, serve


class Runner:
    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        self.options = options
        self.huey = SqliteHuey("bench", filename=dsn, timeout=30)
        self.recorder = Recorder()
        sleep = options.get("sleep", 0)
        logging.getLogger("huey").setLevel(logging.ERROR)

        def noop(number: int) -> None:
            self.recorder.hit(number)
            if sleep:
                time.sleep(sleep)

        self.task = self.huey.task()(noop)

    async def open(self) -> None: ...

    async def setup(self) -> None:
        self.huey.pending_count()

    async def add(self, number: int) -> Any:
        return self.task(number)

    async def add_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.task(number)

    async def work(self, recorder: Recorder) -> None:
        self.recorder = recorder
        recorder.wait_for_go()
        delay = self.options["delay"]
        self.huey.create_consumer(
            workers=self.options["workers"], initial_delay=delay, max_delay=delay, periodic=False
        ).start()
        await asyncio.Event().wait()


action, dsn, options = order()
asyncio.run(serve(Runner(dsn, options), action, options))
