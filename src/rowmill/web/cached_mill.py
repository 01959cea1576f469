"""A Mill to be looked at by many: bound lanes, and answers that are given again for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import HTTPConnection

from ..errors import DeclarationError, did_you_mean
from ..ops.environments import LaneDirectory
from ..store.inspect.lane_view import LaneView
from ..store.inspect.quick_counts import QuickCounter, QuickCounts
from ..store.own.minutes import History, Minutes

T = TypeVar("T")
#: Seconds for which an answer is given again: however many look on, the database is asked as by one.
FRESH = 1.0
#: By how many times longer than it took to get it an answer is kept, and for how long at most.
_DEAR, _LONGEST = 10.0, 30.0
_SLOW = 60.0


class CachedMill:
    """A Mill to be looked at, with what is worth remembering from one look to the next."""

    def __init__(self, lookout: LaneDirectory) -> None:
        self.lookout, self.mill = lookout, lookout.mill
        self.databases = dict(lookout.databases)
        self._glancers: dict[tuple[str, str], QuickCounter] = {}
        self._answers: dict[object, _Answer] = {}
        self._slow: dict[object, float] = {}

    async def view(self, environment: str, lane: str) -> LaneView:
        """One lane in one environment; raises DeclarationError for names that there are not."""
        (found,) = self.mill.select([lane])
        if environment not in self.databases:
            raise DeclarationError(
                f"there is no environment {environment!r}", hint=did_you_mean(environment, self.databases)
            )
        if not found.serves(environment):
            raise DeclarationError(f"lane {lane!r} does not work in environment {environment!r}")
        return await self.lookout.view(environment, self.databases[environment], found)

    def glancer(self, view: LaneView) -> QuickCounter:
        """Counts of a lane, by one who remembers what was dear."""
        place = view.environment, view.lane.name
        if place not in self._glancers:
            self._glancers[place] = QuickCounter(view)
        self._glancers[place].view = view
        return self._glancers[place]

    async def once(self, key: object, work: Callable[[], Awaitable[T]], fresh: float = FRESH) -> T:
        """The answer to a question that may be a moment old, and older where it was dear; who asks the same meanwhile
        gets the same.
        """
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
        """The quick way took too long."""
        now = time.monotonic()
        self._slow = {q: until for q, until in self._slow.items() if until > now}
        self._slow[question] = now + _SLOW

    def forget(self) -> None:
        """Something was done: what is shown next is asked anew."""
        self._answers.clear()

    async def glance(self, view: LaneView) -> QuickCounts:
        """A lane's counts."""
        key = ("glance", view.environment, view.lane.name)
        return await self.once(key, lambda: self.glancer(view).look())

    async def histories(self, environment: str, hours: float) -> Mapping[str, History] | None:
        """What every lane did in the last hours; None where there is no table that would tell."""

        async def ask() -> Mapping[str, History] | None:
            minutes = Minutes(self.databases[environment], self.mill.clock)
            return await minutes.history(list(self.mill.lanes), hours) if await minutes.exists() else None

        return await self.once(("minutes", environment, hours), ask)


def sight_of(request: HTTPConnection) -> CachedMill:
    """The application's sight of its Mill, made with the first request."""
    state = request.app.state
    if not hasattr(state, "sight"):
        state.sight = CachedMill(state.lookout)
    found: CachedMill = state.sight
    return found


class _Answer:
    """An answer that is given again for a while: looking on must not become the database's main work."""

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
        """Whether it is to be asked anew."""
        if self._ended is None:
            return False
        kept = min(max(fresh, _DEAR * (self._ended - self._began)), _LONGEST)
        return time.monotonic() - self._ended > kept
