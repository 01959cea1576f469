"""The pools of processors: one pool per phase, each processor idle, busy or in error, and their health check.

A processor is a slot of rowmill's: it has the slot's name, ``{phase}-processor-{n}``. What each does is known in the
process at once, and in the table ``"AnalysisWorker"`` a second later, for observers outside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from rowmill import Job, Outcome, RowmillError
from rowmill.events import Event, Events

IDLE, BUSY, ERROR = STATES = ("idle", "busy", "error")
_WRITE_EVERY = 1.0
Write = Callable[[str, dict[str, Any]], Awaitable[None]]


@dataclass
class Processor:
    """One place of a phase, and what it is doing since when."""

    name: str
    phase: str
    state: str = IDLE
    job: str | None = None
    since: float = 0.0
    error: str | None = None


class Processors:
    """All processors of this process: ``size`` for each phase."""

    def __init__(
        self, worker: str, phases: Sequence[str], size: int, *, stuck: float, every: float, events: Events
    ) -> None:
        self.all = {
            name: Processor(name, phase)
            for phase in phases
            for name in (f"{phase}-processor-{n}" for n in range(1, size + 1))
        }
        self.worker = worker
        self.health: dict[str, Any] = {"reset": [], "stuck": []}
        self._stuck, self._every, self._events = stuck, every, events
        self._changed = asyncio.Event()

    @contextmanager
    def working(self, job: Job) -> Iterator[Processor]:
        """Around a run: its processor is busy with this job, then idle, or in error where the run broke down. A run
        that ends as an outcome (put off, given up) is no fault of the processor's.
        """
        processor = self.all[job.slot]
        self._turn(processor, BUSY, job=str(job.id))
        try:
            yield processor
        except Outcome:
            self._turn(processor, IDLE)
            raise
        except asyncio.CancelledError:  # it took too long, lost its row, or all is being shut down
            self._turn(processor, ERROR, error="the run was stopped")
            raise
        except Exception as error:
            self._turn(processor, ERROR, error=f"{type(error).__name__}: {error}"[:300])
            raise
        self._turn(processor, IDLE)

    def _turn(self, processor: Processor, state: str, job: str | None = None, error: str | None = None) -> None:
        processor.state, processor.job, processor.error, processor.since = state, job, error, time.monotonic()
        self._changed.set()

    def check(self) -> dict[str, Any]:
        """The health check: processors in error are idle again. One that is stuck is told apart: rowmill ends its run
        at the same limit, and its row goes back with one more in retryCount.
        """
        now = time.monotonic()
        broken = [processor for processor in self.all.values() if processor.state == ERROR]
        stuck = [p.name for p in self.all.values() if p.state == BUSY and now - p.since > self._stuck]
        for processor in broken:
            self._turn(processor, IDLE)
        states = Counter(processor.state for processor in self.all.values())
        found = {**{state: states[state] for state in STATES}, "reset": [p.name for p in broken], "stuck": stuck}
        level = logging.WARNING if broken or stuck else logging.INFO
        self._events.emit("health_checked", level, worker=self.worker, **found)
        return found

    def report(self) -> dict[str, Any]:
        """What each processor is doing, as a plain value."""
        now = time.monotonic()
        return {
            "pid": os.getpid(),
            "processors": [
                {"name": p.name, "phase": p.phase, "state": p.state, "job": p.job, "error": p.error,
                 "seconds": round(now - p.since, 1) if p.since else None}
                for p in self.all.values()
            ],
        }  # fmt: skip

    async def check_on(self) -> None:
        """The health check, every so often; until cancelled."""
        while True:
            await asyncio.sleep(self._every)
            self.health = self.check()
            self._changed.set()

    async def tell(self, write: Write) -> None:
        """Write what has changed, at most once a second; until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(_WRITE_EVERY)
            self._changed.clear()
            try:
                await write(self.worker, {**self.report(), "health": self.health})
            except RowmillError as error:  # a report that is missing is no reason to stop
                self._events.emit("report_failed", logging.WARNING, worker=self.worker, error=error.message)


@asynccontextmanager
async def telling(processors: Processors, write: Write) -> AsyncIterator[Processors]:
    """Processors that tell others what they do."""
    task = asyncio.create_task(processors.tell(write))
    try:
        yield processors
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Pools:
    """The processors of each worker in this process, with their health check from the worker's start to its end:
    a worker that has nothing to do reports, too.
    """

    def __init__(self, make: Callable[[str], Processors]) -> None:
        self._make = make
        self._checking: dict[str, asyncio.Task[None]] = {}
        self.newest: Processors | None = None

    def follow(self, event: Event) -> None:
        """A subscriber: a worker has begun, in one of its environments, or has ended."""
        worker = event.fields.get("worker", "")
        if event.name == "worker_started" and worker not in self._checking:
            self.newest = self._make(worker)
            self._checking[worker] = asyncio.create_task(self.newest.check_on())
        elif event.name == "worker_stopped" and worker in self._checking:
            self._checking.pop(worker).cancel()
