"""Totals of a worker's results, by lane and by minute. ``LaneState`` updates them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import DatabaseError
from ..events import Events
from ..store.own.minutes import Minutes
from .wake import jittered

if TYPE_CHECKING:
    from .records.run_log import RunLogWriter

_SUMMARY_EVERY = 10.0
_WRITE_EVERY, _PRUNE_EVERY, _LAST_WRITE = 4.0, 3600.0, 3.0
_STDLIB = os.path.dirname(os.__file__)
_ENGINE = os.path.dirname(os.path.dirname(__file__))


def raised_at(error: BaseException | None) -> str | None:
    """Where an exception was raised, preferably in the user's own code: ``shop.py:12 in price``."""
    if error is None or error.__traceback__ is None:
        return None
    return users_line(traceback.extract_tb(error.__traceback__))


def users_traceback(error: BaseException | None) -> str | None:
    """The traceback for display and storage, from the user's first frame on. None: the exception was never raised.

    The frames before that are the engine's call of the handler, and the same for every failure. A traceback without
    user code is kept whole.
    """
    if error is None or error.__traceback__ is None:
        return None
    shown = traceback.TracebackException.from_exception(error)
    parts = [shown]
    while parts:  # includes the errors that caused it, and those of a group
        part = parts.pop()
        first = next((n for n, frame in enumerate(part.stack) if not _calls_handlers(frame.filename)), 0)
        del part.stack[:first]
        parts += [p for p in (part.__cause__, part.__context__, *(part.exceptions or ())) if p is not None]
    return "".join(shown.format())


def _calls_handlers(filename: str) -> bool:
    """Whether a file belongs to the engine or the standard library: the frames between a worker and a handler."""
    if filename.startswith(_ENGINE):
        return True
    return filename.startswith((_STDLIB, "<frozen")) and "-packages" not in filename


def users_line(frames: traceback.StackSummary) -> str | None:
    """The innermost line of the user's own code: ``shop.py:12 in price``."""
    own = [f for f in frames if not f.filename.startswith(_ENGINE) and "site-packages" not in f.filename]
    own = [f for f in own if not f.filename.startswith(_STDLIB)] or own
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else None


class Counters:
    """Totals of a worker. ``died`` and ``losses`` decide a drain's exit code."""

    def __init__(self, events: Events, worker: str) -> None:
        self.events, self.worker = events, worker
        self.completed = self.failures = self.losses = self.died = self.canceled = self.left = 0
        self.lanes: dict[str, Counter[str]] = {}
        #: Results since the last ``take``, by environment and lane, for the table of minutes.
        self.minutes: dict[str, dict[str, Counter[str]]] = {}
        #: Called when the totals have changed. A supervisor keeps them if the process is killed.
        self.told: Callable[[Counters], None] | None = None
        self._summarised: dict[str, Counter[str]] = {}
        #: When the next summary is due (monotonic).
        self.summary_at = time.monotonic() + _SUMMARY_EVERY

    def tell(self) -> None:
        """Report that the totals have changed."""
        if self.told is not None:
            self.told(self)

    def take(self, environment: str) -> dict[str, Counter[str]]:
        """Take the results of an environment's lanes since the last call."""
        return self.minutes.pop(environment, {})

    def give_back(self, environment: str, counts: Mapping[str, Counter[str]]) -> None:
        """Add results back that could not be written, so that the next write includes them."""
        lanes = self.minutes.setdefault(environment, {})
        for lane, numbers in counts.items():
            lanes.setdefault(lane, Counter()).update(numbers)

    def leave(self) -> None:
        """Record that a drain ends while rows are running that show neither their worker nor a start time."""
        self.left = 1
        self.tell()

    def summarise(self) -> None:
        """Log every ten seconds, and at the end, what each lane did since the last time."""
        self.summary_at = time.monotonic() + _SUMMARY_EVERY
        for name, counts in self.lanes.items():
            new = counts - self._summarised.get(name, Counter())
            self._summarised[name] = Counter(counts)
            runs = new["success_count"] + new["fail_count"] + new["canceled_count"]
            if not new:
                continue
            self.events.emit(
                "lane_summary",
                worker=self.worker,
                lane=name,
                batch_claimed_count=new["batch_claimed_count"],
                success_count=new["success_count"],
                fail_count=new["fail_count"],
                canceled_count=new["canceled_count"],
                lost_count=new["lost_count"],
                job_duration_ms=round(new["job_duration_us"] / 1000 / runs, 1) if runs else None,
            )


class ThroughputRecorder:
    """Writes a worker's results to ``rowmill_minutes`` every few seconds, without delaying its work."""

    def __init__(
        self, environment: str, minutes: Minutes, counters: Counters, events: Events, logs: RunLogWriter | None = None
    ) -> None:
        """``logs``: the writer of runs' logs, whose retention holds where nothing is logged any more, too."""
        self._environment, self._minutes, self._counters, self._events = environment, minutes, counters, events
        self._logs = logs

    async def run(self) -> None:
        """Run until cancelled."""
        pruned = 0.0
        while True:
            await asyncio.sleep(jittered(_WRITE_EVERY))
            writing = asyncio.create_task(self.write())
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                # Finish a write that has started: if it is cut off, nobody knows whether it counts.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(writing, _LAST_WRITE)
                raise
            if time.monotonic() - pruned > _PRUNE_EVERY:
                pruned = time.monotonic()
                await self._try(self._minutes.prune())
                if self._logs is not None:
                    await self._try(self._logs.prune())

    async def write(self) -> None:
        """Write the collected results; if that fails, keep them for the next write."""
        counts = self._counters.take(self._environment)
        if counts and not await self._try(self._minutes.add(counts)):
            self._counters.give_back(self._environment, counts)

    async def last(self) -> None:
        """Write the remaining results at the end, if the database answers."""
        try:
            async with asyncio.timeout(_LAST_WRITE):
                await self.write()
        except TimeoutError:
            return

    async def _try(self, work: object) -> bool:
        try:
            await work  # type: ignore[misc]
        except DatabaseError as error:
            self._events.emit("minutes_failed", logging.DEBUG, environment=self._environment, error=error.message)
            return False
        return True
