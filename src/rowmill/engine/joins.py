"""What follows when jobs have ended: those that waited for them go on, and those who await results are told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..clock import Clock
from ..declare.options import Keep
from ..declare.task import Queue, Task
from ..errors import DatabaseError
from ..events import Events
from ..store import Database
from ..store.jobs import flows
from ..store.jobs.enqueue import EnqueueStatements
from ..store.jobs.job_rows import Jobs
from .wake import DONE, jittered

_AWAITED = 20.0  # seconds for which one who awaits a result is remembered
_PAUSE = 0.01  # between two words that something is done
_JOIN_EVERY, _PRUNE_EVERY = 10.0, 60.0
_MOST_STEPS = 100


class Joins:
    """For the queues of one environment, in one worker."""

    def __init__(self, database: Database, clock: Clock, events: Events, ring: Callable[[], None]) -> None:
        self._database, self._events, self._ring = database, events, ring
        self._say, self._jobs = EnqueueStatements.to(database, clock), Jobs(database, clock)
        self._parents: set[int] = set()
        #: Somebody awaits results until then (monotonic), and is told when jobs are done. Only who listens asks for it.
        self.awaited_until = 0.0
        self._tell = False
        self._task: asyncio.Task[None] | None = None

    def awaited(self) -> None:
        """Somebody awaits results: say so when jobs are done, for a while."""
        self.awaited_until = time.monotonic() + _AWAITED

    @property
    def busy(self) -> bool:
        """Something is still to follow."""
        return self._task is not None

    def ended(self, parents: set[int]) -> None:
        """Jobs have ended, those of these parents among them, and that is committed."""
        self._tell |= time.monotonic() < self.awaited_until
        self._parents |= parents
        if (self._parents or self._tell) and self._task is None:
            self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            while self._parents or self._tell:
                parents, self._parents = self._parents, set()
                try:
                    if parents and await flows.join(self._database, self._say, list(parents)):
                        self._ring()
                    if self._tell:
                        self._tell = False
                        await self._database.notify(DONE)
                except DatabaseError as error:
                    # What was not found now, the next look at all of them finds.
                    self._events.emit("join_failed", logging.WARNING, error=error.message)
                    return
                await asyncio.sleep(_PAUSE)  # what ends meanwhile is looked at together
        finally:
            self._task = None
            self._ring()

    async def look(self) -> int:
        """Let all jobs go on whose children have ended; also where the worker that ended them was killed."""
        return await flows.join(self._database, self._say)

    async def run(self, queues: Sequence[Queue]) -> None:
        """Look at all of them now and then, and delete what need not be kept. Until cancelled."""
        prune_at = time.monotonic() + jittered(_PRUNE_EVERY)
        while True:
            await asyncio.sleep(jittered(_JOIN_EVERY))
            try:
                if await self.look():
                    self._ring()
                if time.monotonic() >= prune_at:
                    prune_at = time.monotonic() + jittered(_PRUNE_EVERY)
                    await self.prune([task for queue in queues for task in queue.tasks.values()])
            except Exception as error:  # whatever it is, the next look is tried
                level = logging.WARNING if isinstance(error, DatabaseError) else logging.ERROR
                self._events.emit("keep_failed", level, error=str(error))

    async def prune(self, tasks: Sequence[Task[Any, Any]]) -> int:
        """Delete jobs that have been over for as long as their tasks keep them, in bounded steps."""
        deleted = 0
        alike: dict[Keep, list[str]] = {}
        for task in tasks:
            alike.setdefault(task.keep, []).append(task.name)
        for keep, names in alike.items():
            for _ in range(_MOST_STEPS):
                count = await self._jobs.prune(names, keep)
                deleted += count
                if not count:
                    break
                await asyncio.sleep(0)
        if deleted:
            self._events.emit("jobs_pruned", logging.DEBUG, count=deleted)
        return deleted

    async def close(self) -> None:
        """Finish what is under way."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)
