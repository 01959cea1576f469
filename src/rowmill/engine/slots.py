"""The slots of one lane in this process: long-lived runners fed from a buffer, not one task object per job."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ..declare.lane import Lane
from ..store.lane.claim import Claim, Settlement
from .execute import RunPlan
from .isolate import HandlerProcess
from .job import Job
from .lane_state import LaneState
from .recovery.running_marks import mark

if TYPE_CHECKING:
    from .chunks import ChunkRun
    from .recovery.running_marks import Cells
    from .shared_rate import SharedRate
    from .worker import Worker

#: Slots are woken by few, and wake others: where runs are short, the first have done it all before the last would wake.
_WAKEN = 4
_PREFETCH = 0.25  # seconds of work that may wait in the buffer
_PREFETCH_GATED = 0.005  # the same where a row that waits takes up its key: no longer than a claim takes
_STUCK_AFTER = 1.0  # seconds a run may take while others wait behind it
AUTO_BATCH = 1000


class Slot:
    """A place where one run happens."""

    def __init__(self, name: str, child: HandlerProcess | None, number: int) -> None:
        self.name, self.child, self.number = name, child, number
        self.task: asyncio.Task[None] | None = None
        self.parked: asyncio.Future[None] | None = None
        #: What runs here, and what ran here last and how.
        self.job: Job | None = None
        #: The chunk that ``job`` is the first of; None in a lane without chunks.
        self.chunk: ChunkRun | None = None
        self.plan: RunPlan | None = None
        self.began = 0.0

    @property
    def claim(self) -> Claim | None:
        """The claim whose run is under way."""
        job = self.job
        return None if job is None else job._claim

    @property
    def stoppable(self) -> bool:
        """Its run can be stopped from outside."""
        return self.plan is None or not self.plan.in_thread

    def over(self, now: float) -> float | None:
        """Seconds by which the run has outlived its timeout; None where nothing runs."""
        if self.job is None or self.plan is None:
            return None
        return now - self.began - self.plan.timeout if self.plan.timeout is not None else 0.0


class Capacity:
    """Runs at once in this process, over all lanes."""

    def __init__(self, limit: int | None) -> None:
        self.limit = sys.maxsize if limit is None else limit
        self.busy = 0
        self.lanes: list[Slots] = []

    @property
    def waiting(self) -> int:
        """Runs, of whichever lane, that are claimed and about to start."""
        return sum(min(slots.buffered, slots.lane.concurrency - slots.busy) for slots in self.lanes)

    @property
    def free(self) -> int:
        """How many more runs may start."""
        return self.limit - self.busy


class Slots:
    """The slots of one lane, and the claims that wait for one."""

    def __init__(self, lane: Lane, worker: Worker) -> None:
        self.lane, self.worker, self.capacity = lane, worker, worker.capacity
        #: Rows that one claim takes at most, and rows that the slots hold together.
        self.most, self.rows = lane.batch or AUTO_BATCH, lane.concurrency
        self._buffer: deque[tuple[LaneState, Claim]] = deque()
        self._idle: list[Slot] = []
        self.all: list[Slot] = []
        #: The marks of the rows that run now, by slot, in memory that outlives the process; None: nobody reads them.
        self.running_marks: Cells | None = None
        self.busy = 0
        self._took = 0.0  # smoothed duration of a run
        self._began = 0.0  # when the last run began
        self._closing = False
        #: Slots whose runs did not end although they were told to.
        self.unstoppable: list[str] = []
        #: The lane's rate over all environments: a run starts only within one of its slices.
        self.shared_rate: SharedRate | None = None
        self.capacity.lanes.append(self)

    @property
    def buffered(self) -> int:
        """Runs that wait for a slot."""
        return len(self._buffer)

    @property
    def stocked(self) -> bool:
        """A slot that becomes free has work at hand."""
        return bool(self._buffer)

    def startable(self) -> int:
        """How many runs could start now, as far as their rows and a shared rate are concerned."""
        here = len(self._buffer)
        return here if self.shared_rate is None else min(here, self.shared_rate.at_hand)

    @property
    def took(self) -> float:
        """How long a row takes up a slot in this lane, smoothed; 0: not known."""
        return self._took

    def room(self, kept: int = 0) -> int:
        """How many more rows could start at once, where so many of the places of all lanes are kept for others."""
        here = self.lane.concurrency - self.busy - len(self._buffer)
        return min(here, self.capacity.free - self.capacity.waiting - kept)

    def prefetch(self, gated: bool = False) -> int:
        """How many rows it is worth to have ready in the buffer: what a fraction of a second works off, and no more
        than two claims bring: one is worked on while the next is on its way. With ``batch=1`` none: that
        setting leaves the other rows to workers that are free. ``gated``: a row that waits keeps others of its key
        waiting, so far less, and no more than run at a time.
        """
        most = self.most
        if self._took <= 0 or most == 1:
            return 0
        # Runs that have turned slow are not over yet: that none has begun for so long says it before they do.
        took = max(self._took, time.monotonic() - self._began) if self.busy else self._took
        if gated:
            return min(most, self.lane.concurrency, int(_PREFETCH_GATED * self.lane.concurrency / took))
        return min(2 * most, int(_PREFETCH * self.lane.concurrency / took))

    def put(self, lane_state: LaneState, claims: list[Claim]) -> None:
        """Claims for the next free slots; ``start`` wakes them."""
        self._buffer.extend([(lane_state, claim) for claim in claims])

    def start(self) -> None:
        """Wake slots where there is work and room for them; each wakes others before it begins."""
        waking = min(self.startable(), self.lane.concurrency - self.busy, self.capacity.free, _WAKEN)
        for _ in range(waking):
            if not self._idle and len(self.all) < self.lane.concurrency:
                self._add()
            elif self._idle:
                parked = self._idle.pop().parked
                if parked is not None and not parked.done():
                    parked.set_result(None)

    def _add(self) -> None:
        name = self.lane.slot_name.format(lane=self.lane.name, n=len(self.all) + 1)
        slot = Slot(name, HandlerProcess(self.lane) if self.lane.isolation == "process" else None, len(self.all))
        self.all.append(slot)
        slot.task = asyncio.create_task(self._serve(slot), name=name)
        slot.task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        """A slot ends only by being cancelled; anything else is a fault of the engine's own."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.worker.fail(error)

    async def _serve(self, slot: Slot) -> None:
        while not self._closing:
            try:
                if self.startable() and self.capacity.free > 0:
                    await self._work(slot)
                    continue
                slot.parked = asyncio.get_running_loop().create_future()
                self._idle.append(slot)
                await slot.parked
            except asyncio.CancelledError:
                if self._closing:
                    raise
                await consume_cancellation(
                    slot
                )  # a timer that an earlier handler left behind: not for the run in the slot now
                if slot in self._idle:
                    self._idle.remove(slot)

    async def _work(self, slot: Slot) -> None:
        """Run what waits in the buffer, one after the other; but first wake others, where there is enough for them."""
        buffer, running_marks, worker, rate = self._buffer, self.running_marks, self.worker, self.shared_rate
        self.busy += 1
        self.capacity.busy += 1
        try:
            lane_state, claim = buffer.popleft()
            if rate is not None:
                rate.start()
            self.start()
            while True:  # not a coroutine more for each run: a no-op is over in three microseconds
                execution = lane_state.execution
                plan = slot.plan = execution.plan(claim)
                slot.began = self._began = began = time.monotonic()
                job = slot.job = execution.job(plan, claim, worker.id, slot.name)
                if running_marks is not None:
                    running_marks[slot.number] = mark(claim.key, lane_state.salt)
                settlement: Settlement | None = None
                try:
                    if not claim.lost:
                        settlement = await execution.run(plan, job, claim, slot.child)
                except asyncio.CancelledError as error:
                    if self._closing and not claim.lost:
                        raise
                    if not claim.lost:
                        settlement = execution.settlement(claim, error)  # the handler's own doing: its run failed
                finally:
                    took = time.monotonic() - began
                    self._took = self._took * 0.9 + took * 0.1 if self._took > 0 else took
                    slot.job = None
                if slot.task is not None and slot.task.cancelling() and not self._closing:
                    await consume_cancellation(slot)
                if settlement is not None:
                    settlement.duration = took
                elif job.finished is not None:
                    job.finished.duration = took
                worker.run_ended(lane_state, claim, job, settlement)
                if not buffer or self._closing or (rate is not None and not rate.at_hand):
                    if running_marks is not None:
                        running_marks[slot.number] = 0  # not where it was cut off: a thread may still be at it
                    return
                lane_state, claim = buffer.popleft()
                if rate is not None:
                    rate.start()
        finally:
            self.busy -= 1
            self.capacity.busy -= 1

    def lose(self, claim: Claim) -> None:
        """A claim was lost: tell its run, at once."""
        for slot in self.all:
            if slot.claim is claim and slot.task is not None and slot.stoppable:
                slot.task.cancel()

    def take_back(self) -> list[tuple[LaneState, Claim]]:
        """Empty the buffer: rows that nobody started."""
        rest = list(self._buffer)
        self._buffer.clear()
        return rest

    def overdue(self, now: float, grace: float) -> Slot | None:
        """A slot whose run has outlived timeout and grace: it cannot be stopped."""
        return next((slot for slot in self.all if (slot.over(now) or 0.0) > grace), None)

    def in_time(self, now: float) -> bool:
        """Whether a run is under way that may still end within its time."""
        return any(over is not None and over <= 0 for over in (slot.over(now) for slot in list(self.all)))

    def facts(self, now: float) -> list[dict[str, Any]]:
        """What is under way, for the workers table."""
        facts = []
        # A limit over all lanes is shown with what takes it up, so that ``why`` can name it.
        limit = {"at_once": self.capacity.limit} if self.capacity.limit != sys.maxsize else {}
        for slot in list(self.all):
            if (job := slot.job) is not None:
                claim, seconds = job._claim, round(now - slot.began, 1)
                where = {"slot": slot.name, "lane": claim.lane, "environment": claim.environment}
                facts.append(
                    {**where, "id": ",".join(map(str, claim.key)), "seconds": seconds, "progress": job.latest, **limit}
                )
                if slot.chunk is not None:
                    jobs = slot.chunk.jobs
                    facts[-1] |= {"rows": len(jobs), "progress": next((one.latest for one in jobs if one.latest), None)}
        return facts

    async def close(self) -> list[tuple[LaneState, Claim]]:
        """Cancel what can be cancelled, and say which claims were cut off: those whose runs have really ended.

        A thread cannot be stopped, and a handler may swallow its cancellation: such a row stays held, and its lease
        runs out when this process is gone.
        """
        self._closing = True
        under_way = [(slot, slot.job) for slot in self.all if slot.job is not None and slot.stoppable]
        for slot in self.all:
            if slot.task is not None:
                slot.task.cancel()
        tasks = [slot.task for slot in self.all if slot.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        for slot in self.all:
            if slot.child is not None and (slot.task is None or slot.task.done()):
                await asyncio.to_thread(slot.child.kill)
        self.unstoppable = [slot.name for slot in self.all if slot.task is not None and not slot.task.done()]
        cut_off = []
        for slot, job in under_way:
            if slot.task is not None and slot.task.done():
                claims = [job._claim] if slot.chunk is None else slot.chunk.unfinished()
                cut_off += [(job._lane_state, claim) for claim in claims]
        return cut_off

    def prefetch_is_stuck(self, now: float) -> bool:
        """Rows wait in the buffer behind runs that have turned slow: others could have them."""
        running = [slot for slot in self.all if slot.job is not None]
        full = bool(self._buffer) and len(running) >= min(self.lane.concurrency, self.capacity.limit)
        return full and all(now - slot.began > _STUCK_AFTER for slot in running)


async def consume_cancellation(slot: Slot) -> None:
    """A cancellation that was meant for a run that has ended must not hit the next one."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while slot.task is not None and slot.task.cancelling():
        slot.task.uncancel()
