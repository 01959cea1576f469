"""What follows when jobs end: jobs that waited for them continue, and callers that await results are notified."""

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

_AWAITED = 20.0  # seconds for which a caller's request for notifications stays valid
_PAUSE = 0.01  # between two notifications
_JOIN_EVERY, _PRUNE_EVERY = 10.0, 60.0
_MOST_STEPS = 100


class Joins:
    """Follow-up work for the queues of one environment, in one worker."""

    def __init__(self, database: Database, clock: Clock, events: Events, ring: Callable[[], None]) -> None:
        self._database, self._events, self._ring = database, events, ring
        self._say, self._jobs = EnqueueStatements.to(database, clock), Jobs(database, clock)
        self._parents: set[int] = set()
        #: Until this time (monotonic) a caller awaits results and is notified of done jobs. Only callers that listen
        #: ask for it.
        self.awaited_until = 0.0
        self._tell = False
        self._task: asyncio.Task[None] | None = None

    def awaited(self) -> None:
        """Notify a waiting caller when jobs are done, for a while."""
        self.awaited_until = time.monotonic() + _AWAITED

    @property
    def busy(self) -> bool:
        """Whether follow-up work remains."""
        return self._task is not None

    def ended(self, parents: set[int]) -> None:
        """Jobs have ended, including children of these parents, and the transaction has committed."""
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
                    # The next periodic check of all jobs finds those that this one missed.
                    self._events.emit("join_failed", logging.WARNING, error=error.message)
                    return
                await asyncio.sleep(_PAUSE)  # batch the jobs that end meanwhile
        finally:
            self._task = None
            self._ring()

    async def look(self) -> int:
        """Continue all jobs whose children have ended, even if the worker that ended them was killed."""
        return await flows.join(self._database, self._say)

    async def run(self, queues: Sequence[Queue]) -> None:
        """Check all jobs periodically, and delete those past their retention. Runs until cancelled."""
        prune_at = time.monotonic() + jittered(_PRUNE_EVERY)
        while True:
            await asyncio.sleep(jittered(_JOIN_EVERY))
            try:
                if await self.look():
                    self._ring()
                if time.monotonic() >= prune_at:
                    prune_at = time.monotonic() + jittered(_PRUNE_EVERY)
                    await self.prune([task for queue in queues for task in queue.tasks.values()])
            except Exception as error:  # after any error, the next check tries again
                level = logging.WARNING if isinstance(error, DatabaseError) else logging.ERROR
                self._events.emit("keep_failed", level, error=str(error))

    async def prune(self, tasks: Sequence[Task[Any, Any]]) -> int:
        """Delete jobs that are past the retention of their tasks, in bounded steps."""
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
        """Finish the work in progress."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)
