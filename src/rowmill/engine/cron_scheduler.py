"""The scheduler: any worker enqueues the crons that are due. The first one does; each tick is enqueued once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ..clock import Clock
from ..declare.cron import MOST
from ..declare.task import Task
from ..errors import DatabaseError
from ..events import Events
from ..store import Database
from ..store.jobs.cron_ticks import Ticks
from .wake import jittered

_LONGEST, _AFTER_ERROR = 30.0, 5.0


class Scheduler:
    """For the crons of one environment, in one worker."""

    def __init__(self, database: Database, clock: Clock, events: Events, tasks: Sequence[Task[Any, Any]]) -> None:
        self._events = events
        self._tasks = {task.name: task for task in tasks if task.cron is not None}
        self._ticks = Ticks(database, clock)

    async def start(self) -> None:
        """Crons that are new are counted from now on."""
        await self._ticks.register(list(self._tasks.values()))

    async def run(self) -> None:
        """Enqueue what is due, and sleep until the next tick. Until cancelled."""
        while True:
            try:
                pause = await self.tick()
            except Exception as error:  # whatever it is, the next tick is tried
                level = logging.WARNING if isinstance(error, DatabaseError) else logging.ERROR
                self._events.emit("cron_failed", level, error=str(error))
                pause = jittered(_AFTER_ERROR)
            await asyncio.sleep(pause)

    async def tick(self) -> float:
        """Enqueue what is due now; how long until there is something to do."""
        now, last = await self._ticks.now(list(self._tasks))
        nearest = now.timestamp() + jittered(_LONGEST)
        for name, task in self._tasks.items():
            assert task.cron is not None
            if name not in last:
                await self._ticks.register([task])  # somebody deleted it
                continue
            count = await self._ticks.enqueue(task, task.cron, last[name], now)
            if count:
                self._events.emit("cron_enqueued", task=name, count=count)
            if count >= MOST:
                nearest = now.timestamp()  # there are more to be made up for
            coming = task.cron.next(max(now, last[name]))
            if coming is not None:
                nearest = min(nearest, coming.timestamp())
        return max(nearest - now.timestamp(), 0.0) + 0.001
