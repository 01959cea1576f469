"""A cache of answers for many viewers: the database load does not grow with their number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ..store.inspect.lane_view import LaneView
from ..store.inspect.quick_counts import QuickCounter, QuickCounts
from ..store.own.minutes import History, Minutes
from .directory import LaneDirectory

T = TypeVar("T")
#: Seconds for which an answer is given again.
FRESH = 1.0
#: How many times longer than it took to get it an answer is kept, and for how many seconds at most.
_EXPENSIVE, _LONGEST = 10.0, 30.0
_SLOW = 60.0


class CachedMill:
    """A Mill's lanes, with answers that are kept for a moment, longer where they were expensive."""

    def __init__(self, directory: LaneDirectory) -> None:
        self.directory, self.mill = directory, directory.mill
        self._counters: dict[tuple[str, str], QuickCounter] = {}
        self._answers: dict[object, _Answer] = {}
        self._slow: dict[object, float] = {}

    def counter(self, view: LaneView) -> QuickCounter:
        """Counts a lane's rows, and remembers which counts were expensive."""
        key = view.environment, view.lane.name
        counter = self._counters.setdefault(key, QuickCounter(view))
        counter.view = view
        return counter

    async def once(self, key: object, work: Callable[[], Awaitable[T]], fresh: float = FRESH) -> T:
        """The answer to a question, at most a moment old. Simultaneous askers share one query."""
        known = self._answers.get(key)
        if known is None or known.stale(fresh):
            self._answers = {k: a for k, a in self._answers.items() if not a.stale(_LONGEST)}
            known = self._answers[key] = _Answer(work)
        answer: T = await asyncio.shield(known.task)
        return answer

    def was_slow(self, question: object) -> bool:
        """Whether the quick way to an answer took too long a short while ago: then it is not tried again."""
        return self._slow.get(question, 0.0) > time.monotonic()

    def note_slow(self, question: object) -> None:
        """Remember that the quick way took too long."""
        now = time.monotonic()
        self._slow = {q: until for q, until in self._slow.items() if until > now}
        self._slow[question] = now + _SLOW

    def forget(self) -> None:
        """Drop cached answers after a change."""
        self._answers.clear()

    async def counts(self, view: LaneView) -> QuickCounts:
        """A lane's counts."""
        key = ("counts", view.environment, view.lane.name)
        return await self.once(key, lambda: self.counter(view).look())

    async def histories(self, environment: str, hours: float) -> Mapping[str, History] | None:
        """The history of every lane over the last hours; None if it is not recorded."""

        async def ask() -> Mapping[str, History] | None:
            minutes = Minutes(self.directory.database(environment), self.mill.clock)
            return await minutes.history(list(self.mill.lanes), hours) if await minutes.exists() else None

        return await self.once(("minutes", environment, hours), ask)


class _Answer:
    """One answer, asked for when it is made."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self._ended: float | None = None
        self._began = time.monotonic()
        self.task = asyncio.ensure_future(self._run(work))
        self.task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await work()
        finally:
            self._ended = time.monotonic()

    def stale(self, fresh: float) -> bool:
        """Whether the answer is too old. Expensive answers are kept longer, to limit the database load."""
        if self._ended is None:
            return False
        kept = min(max(fresh, _EXPENSIVE * (self._ended - self._began)), _LONGEST)
        return time.monotonic() - self._ended > kept
