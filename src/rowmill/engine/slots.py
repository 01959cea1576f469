"""The slots of one lane in this process: long-lived runners fed from a buffer, not one task object per job."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ..claim import Claim, Settlement
from ..lane import Lane
from .execute import Execution, runs_in_loop
from .held import Held
from .isolate import Child
from .job import Job

#: Called at the end of every run: what was held, the claim, its job, and what is to be written, if anything.
Ended = Callable[[Held, Claim, Job, Settlement | None], None]
Crashed = Callable[[BaseException], None]
_AHEAD = 0.25  # seconds of work that may wait in the buffer
AUTO_BATCH = 500


class Slot:
    """A place where one run happens."""

    def __init__(self, name: str, child: Child | None) -> None:
        self.name, self.child = name, child
        self.task: asyncio.Task[None] | None = None
        self.parked: asyncio.Future[None] | None = None
        self.held: Held | None = None
        self.claim: Claim | None = None
        self.job: Job | None = None
        self.began = 0.0

    def over(self, timeout: float | None, now: float) -> float:
        """Seconds by which the run has outlived the lane's timeout."""
        return now - self.began - timeout if self.claim is not None and timeout is not None else 0.0


class Capacity:
    """Runs at once in this process, over all lanes."""

    def __init__(self, limit: int | None) -> None:
        self.limit = sys.maxsize if limit is None else limit
        self.busy = 0
        #: Claimed, by whichever lane, and not started yet.
        self.waiting = 0

    @property
    def free(self) -> int:
        """How many more runs may start."""
        return self.limit - self.busy


class Slots:
    """The slots of one lane, and the claims that wait for one."""

    def __init__(self, lane: Lane, capacity: Capacity, ended: Ended, crashed: Crashed, worker: str) -> None:
        self.lane, self.capacity, self.worker = lane, capacity, worker
        self.executions: dict[int, Execution] = {}
        self._ended, self._crashed = ended, crashed
        self._buffer: deque[tuple[Held, Claim]] = deque()
        self._idle: list[Slot] = []
        self.all: list[Slot] = []
        self.busy = 0
        self._took = 0.0  # smoothed duration of a run

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def room(self) -> int:
        """How many more rows could start at once."""
        here = self.lane.concurrency - self.busy - len(self._buffer)
        return min(here, self.capacity.free - self.capacity.waiting)

    def ahead(self) -> int:
        """How many rows it is worth to have ready in the buffer: what a fraction of a second works off."""
        most = self.lane.batch or AUTO_BATCH
        if self._took <= 0:
            return 0
        return min(most, int(_AHEAD * self.lane.concurrency / self._took))

    def put(self, held: Held, claims: list[Claim]) -> None:
        """Give claims to free slots; what finds none waits in the buffer."""
        self._buffer.extend((held, claim) for claim in claims)
        self.capacity.waiting += len(claims)
        self.start()

    def start(self) -> None:
        """Wake as many slots as there is work and room for."""
        waking = min(len(self._buffer), self.lane.concurrency - self.busy, self.capacity.free)
        for _ in range(waking):
            if not self._idle and len(self.all) < self.lane.concurrency:
                self._add()
            elif self._idle:
                slot = self._idle.pop()
                assert slot.parked is not None
                slot.parked.set_result(None)

    def _add(self) -> None:
        name = self.lane.slot_name.format(lane=self.lane.name, n=len(self.all) + 1)
        slot = Slot(name, Child(self.lane) if self.lane.isolation == "process" else None)
        self.all.append(slot)
        slot.task = asyncio.create_task(self._serve(slot), name=name)
        slot.task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        """A slot ends only by being cancelled; anything else is a fault of the engine's own."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._crashed(error)

    async def _serve(self, slot: Slot) -> None:
        while True:
            if self._buffer and self.capacity.free > 0:
                await self._run(slot, *self._buffer.popleft())
                continue
            slot.parked = asyncio.get_running_loop().create_future()
            self._idle.append(slot)
            await slot.parked

    async def _run(self, slot: Slot, held: Held, claim: Claim) -> None:
        execution = self.executions[id(held)]
        slot.held, slot.claim, slot.began = held, claim, time.monotonic()
        slot.job = execution.job(claim, self.worker, slot.name)
        self.busy += 1
        self.capacity.busy += 1
        self.capacity.waiting -= 1
        settlement: Settlement | None = None
        job = slot.job
        try:
            if not claim.lost:
                settlement = await execution.run(slot.job, claim, slot.child)
        except asyncio.CancelledError:
            if not claim.lost:
                raise
        finally:
            self.busy -= 1
            self.capacity.busy -= 1
            took = time.monotonic() - slot.began
            self._took = took if self._took <= 0 else self._took * 0.9 + took * 0.1
            slot.job, slot.claim, slot.held = None, None, None
        if (task := asyncio.current_task()) is not None and task.cancelling():
            await _swallow(task)
        self._ended(held, claim, job, settlement)

    def lose(self, claim: Claim) -> None:
        """A claim was lost: tell its run, at once."""
        for slot in self.all:
            if slot.claim is claim and slot.task is not None and not self.in_threads:
                slot.task.cancel()

    @property
    def in_threads(self) -> bool:
        """Runs of this lane cannot be stopped from outside."""
        return self.lane.isolation == "auto" and not runs_in_loop(self.lane.handler)

    def take_back(self) -> list[tuple[Held, Claim]]:
        """Empty the buffer: rows that nobody started."""
        rest = list(self._buffer)
        self._buffer.clear()
        self.capacity.waiting -= len(rest)
        return rest

    def _running(self) -> Iterator[tuple[Slot, float | None]]:
        """Slots with a run under way, and what it may take."""
        for slot in list(self.all):
            if slot.claim is not None and slot.held is not None:
                yield slot, self.executions[id(slot.held)].timeout

    def overdue(self, now: float, grace: float) -> Slot | None:
        """A slot whose run has outlived timeout and grace: it cannot be stopped."""
        return next((slot for slot, timeout in self._running() if slot.over(timeout, now) > grace), None)

    def in_time(self, now: float) -> bool:
        """Whether a run is under way that may still end within its time."""
        return any(slot.over(timeout, now) <= 0 for slot, timeout in self._running())

    def facts(self, now: float) -> list[dict[str, Any]]:
        """What is under way, for the workers table."""
        found = []
        for slot in list(self.all):
            claim, job = slot.claim, slot.job
            if claim is not None and job is not None:
                seconds = round(now - slot.began, 1)
                where = {"slot": slot.name, "lane": claim.lane, "environment": claim.environment}
                found.append({**where, "id": ",".join(map(str, claim.key)), "seconds": seconds, "progress": job.latest})
        return found

    async def close(self) -> list[tuple[Held, Claim]]:
        """Cancel what can be cancelled, and say which claims were cut off. Threads cannot be stopped."""
        cut = []
        for slot in self.all:
            if slot.claim is not None and slot.held is not None:
                cut.append((slot.held, slot.claim))
            if slot.task is not None:
                slot.task.cancel()
        tasks = [slot.task for slot in self.all if slot.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        for slot in self.all:
            if slot.child is not None:
                slot.child.kill()
        return cut


async def _swallow(task: asyncio.Task[Any]) -> None:
    """A cancellation meant for a run that had just ended must not hit the next one."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling():
        task.uncancel()
