"""Chunks: one call of the handler for many rows. Each row keeps its own claim, fence, attempts and outcome.

An error of the whole call may be the fault of a single row. The call is then repeated for halves of the chunk, at once
and within the same attempt, until the rows at fault are alone: no other row pays for them.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..declare.chunk import Misfits, answers, in_order
from ..declare.lane import Lane
from ..declare.outcome import Outcome, Release
from ..declare.retry import RATE, TRANSIENT
from ..errors import InputsChanged, LostClaim
from ..store.lane.claim import Claim, Settlement
from .execute import Execution, RunPlan, TimedOut, shared_word
from .isolate import HandlerProcess
from .job import ChunkJobs, Job
from .lane_state import LaneState
from .records.run_log import RunLines
from .recovery.running_marks import mark
from .slots import _PREFETCH, _PREFETCH_GATED, AUTO_BATCH, Slot, Slots, consume_cancellation
from .tracing import kept_with, wrote_row

if TYPE_CHECKING:
    from .worker import Worker

#: Rows that have failed alone before the error counts as everybody's, as long as no row has ended well.
_ALONE = 4
_LOOK = 0.8  # of a chunk's wait, until the worker looks once more for rows
#: A row of a chunk whose run is over, and what is to be written for it; None: nothing.
Ended = tuple[Job, Settlement | None]


class ChunkRun:
    """One chunk on its way through a slot: the rows whose handler is still to be called, and in which parts."""

    def __init__(self, execution: Execution, plan: RunPlan, claims: Sequence[Claim], worker: str, slot: str) -> None:
        self.execution, self.plan = execution, plan
        self._worker, self._slot = worker, slot
        #: What waits for its call; the last part is the next.
        self.parts: list[list[Claim]] = [list(claims)]
        #: Those of the call under way, and those of them that its handler was given.
        self.jobs: list[Job] = []
        self._given: list[Job] = []
        #: A call was made; some call brought an answer; and how many rows failed in a call of their own.
        self.begun = self._answered = False
        self._alone = 0
        if execution.lane_state.run_logs is not None:
            lines = RunLines()  # each row gets what was logged of any of them
            for claim in claims:
                claim.lines = lines

    def unfinished(self) -> list[Claim]:
        """Rows that have no outcome yet and are still held."""
        claims = [job._claim for job in self.jobs if job.finished is None]
        return [claim for claim in [*claims, *self.waiting()] if not claim.lost]

    def waiting(self) -> list[Claim]:
        """Rows whose call has not begun."""
        return [claim for part in self.parts for claim in part]

    def begin(self, jobs: list[Job] | None = None) -> list[Job]:
        """The next part: its rows as jobs. A row that was divided from others gets a new Job for each call."""
        claims, self.begun = self.parts.pop(), True
        make = self.execution.job
        self.jobs = jobs or [make(self.plan, claim, self._worker, self._slot) for claim in claims]
        self._given = [job for job in self.jobs if not job._claim.lost]
        return self.jobs

    async def call(self, child: HandlerProcess | None) -> Any:
        """Call the handler for this part. Returns what it returned or raised, but for a cancellation."""
        if not self._given:
            return None
        tracer = self.execution.lane_state.tracer
        if tracer is None:
            return await self._call(child)
        store, first = self.execution.store, self._given[0]
        claims = [job._claim for job in self._given]
        facts = {name: getattr(first, name) for name in ("lane", "environment", "worker", "slot")}
        kept, wrote = [[of(store, claim) for claim in claims] for of in (kept_with, wrote_row)]
        carriers = [one for one in kept if one], [one for one in wrote if one]
        with tracer.chunk({**facts, "count": len(claims)}, *carriers) as ended:
            result = await self._call(child)
            ended(result if isinstance(result, BaseException) and not isinstance(result, Outcome) else None)
            return result

    async def _call(self, child: HandlerProcess | None) -> Any:
        plan, handed = self.plan, ChunkJobs(self._given)
        oldest = min([job._claim for job in self._given], key=lambda claim: claim.taken)
        over = plan.timeout is not None and time.monotonic() - oldest.taken >= plan.timeout
        if over and self.execution.store.binding.renew == "none":
            return TimedOut(plan.timeout or 0.0)  # earlier calls of this chunk have used up its lease
        try:
            if plan.plain and child is None:
                returned = await plan.handler(handed)
            else:
                returned = await self.execution.within(plan, handed, oldest, child)
            return in_order(returned, handed, self._given)
        except asyncio.CancelledError:
            raise  # whose doing it was, the slot knows
        except BaseException as error:  # SystemExit too: a handler's exit() ends its call, not the worker
            return error
        finally:
            for job in self.jobs:
                job.close()

    def end(self, ended: Any) -> list[Ended]:
        """What a call's end means for the rows of its part: those that have ended. The others wait for another call."""
        jobs, self.jobs = self.jobs, []
        lost = [job for job in self._given if job._claim.lost]
        open_ = [job for job in self._given if job.finished is None and not job._claim.lost]
        over: list[Ended] = [(job, None) for job in jobs if job.finished is not None or job._claim.lost]
        if not open_:
            return over
        if isinstance(ended, Misfits):
            misfits = {id(self._given[place]): outcome for place, outcome in ended.outcomes.items()}
            self._wait([job for job in open_ if id(job) not in misfits])
            return over + self._settled([(job, misfits[id(job)]) for job in open_ if id(job) in misfits])
        if isinstance(ended, BaseException) and not isinstance(ended, Outcome):
            return over + self._failed(open_, ended, lost)
        try:
            each = dict(zip(map(id, self._given), answers(self._given, ended), strict=False))
        except Exception as error:  # a wrong number of outcomes; or an object that raises while it is read
            return over + self._failed(open_, error, lost)
        self._answered = True
        return over + self._settled([(job, each[id(job)]) for job in open_])

    def _failed(self, jobs: list[Job], error: BaseException, lost: Sequence[Job]) -> list[Ended]:
        """The call failed as a whole: an end for all, or a further call for halves of them."""
        if isinstance(error, LostClaim) and lost:  # one row's lost claim is no fault of the others
            self._wait(jobs)
            return []
        if isinstance(error, InputsChanged) and (changed := [job for job in jobs if job.inputs_changed]):
            self._wait([job for job in jobs if not job.inputs_changed])
            return self._settled([(job, error) for job in changed])
        word = shared_word(self.execution.store, jobs[0]._claim, error)
        if word == RATE:
            over = self._settled([(job, error) for job in jobs])  # what waits would be told the same
            return over + self._rest(error)
        if word is not None and not (word == TRANSIENT and self._costly(jobs)):
            return self._settled([(job, error) for job in jobs])
        if len(jobs) > 1:
            chosen = set(random.sample(range(len(jobs)), len(jobs) // 2))
            self._wait([job for place, job in enumerate(jobs) if place not in chosen])
            self._wait([job for place, job in enumerate(jobs) if place in chosen])
            return []
        self._alone += 1
        over = self._settled([(jobs[0], error)])
        if self._alone >= _ALONE and not self._answered and not self._last_attempts():
            over += self._rest(error)
        return over

    def _costly(self, jobs: Sequence[Job]) -> bool:
        """An error of the connection has cost one of these an attempt before, or costs it the last one: this time it
        must show that it is not the fault of a single row.
        """
        limit = self.execution.store.limit
        return any(job.attempt > 1 or job.attempt >= limit(job._claim) for job in jobs)

    def _last_attempts(self) -> bool:
        limit = self.execution.store.limit
        return any(claim.attempt >= limit(claim) for claim in self.waiting())

    def _rest(self, error: BaseException) -> list[Ended]:
        """What waits ends like those before it, without a call."""
        claims, self.parts = self.waiting(), []
        make = self.execution.job
        jobs = [make(self.plan, claim, self._worker, self._slot) for claim in claims]
        return self._settled([(job, error) for job in jobs])

    def _wait(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self.parts.append([job._claim for job in jobs])

    def _settled(self, ended: Sequence[tuple[Job, Any]]) -> list[Ended]:
        return [(job, self.execution.settlement(job._claim, end)) for job, end in ended]

    def release(self) -> list[Ended]:
        """Give back the rows whose call has not begun."""
        return self._rest(Release())


async def run_alone(
    execution: Execution, plan: RunPlan, job: Job, child: HandlerProcess | None = None
) -> Settlement | None:
    """A row as a chunk of one. None: there is nothing left to write (lost, or finished by itself)."""
    run = ChunkRun(execution, plan, [job._claim], job.worker, job.slot)
    run.begin([job])
    return run.end(await run.call(child))[0][1]


class ChunkSlots(Slots):
    """The slots of a lane with chunks: each holds one."""

    def __init__(self, lane: Lane, worker: Worker) -> None:
        super().__init__(lane, worker)
        assert lane.chunk is not None
        self.chunk = lane.chunk
        self.rows = lane.concurrency * self.chunk
        batch = lane.batch or max(AUTO_BATCH, self.chunk)
        # Whole chunks: a claim of one and a half would leave half of one to start as it is.
        self.most = batch // self.chunk * self.chunk or batch
        self._wait = lane.chunk_wait.total_seconds() if lane.chunk_wait is not None else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def _counts(self) -> list[int]:
        """Rows in the buffer by environment: a chunk is of one."""
        if len(self.worker.environments) == 1:
            return [len(self._buffer)]
        return list(Counter([id(lane_state) for lane_state, _ in self._buffer]).values())

    @property
    def buffered(self) -> int:
        return sum(-(-count // self.chunk) for count in self._counts())

    @property
    def took(self) -> float:
        return self._took / self.chunk

    @property
    def stocked(self) -> bool:
        return len(self._buffer) >= self.chunk

    @property
    def _left(self) -> float:
        """Seconds for which the oldest row may still wait for others."""
        return self._buffer[0][1].taken + self._wait - time.monotonic() if self._buffer else 0.0

    def startable(self) -> int:
        if self._wait and self._left > 0:
            return sum(count // self.chunk for count in self._counts())
        return self.buffered

    def room(self, kept: int = 0) -> int:
        here = (self.lane.concurrency - self.busy) * self.chunk - len(self._buffer)
        return min(here, (self.capacity.free - self.capacity.waiting - kept) * self.chunk + self._unfilled())

    def _unfilled(self) -> int:
        """Rows that chunks in the buffer still have room for."""
        return self.buffered * self.chunk - len(self._buffer)

    def prefetch(self, gated: bool = False) -> int:
        if self._took <= 0 or self.most == 1:
            return 0
        took = max(self._took, time.monotonic() - self._began) if self.busy else self._took
        if gated:
            calls = int(_PREFETCH_GATED * self.lane.concurrency / took)
            return min(self.most, self.rows, calls * self.chunk)
        return min(2 * self.most, int(_PREFETCH * self.lane.concurrency / took) * self.chunk)

    def start(self) -> None:
        if self._wait and self._timer is None and (left := self._left) > 0 and not self._closing:
            self._timer = asyncio.get_running_loop().call_later(left * _LOOK, self._look, left * (1 - _LOOK))
        super().start()

    def _look(self, left: float) -> None:
        """Shortly before a chunk starts that is not full: are there more rows?"""
        for lane_state in {id(lane_state): lane_state for lane_state, _ in self._buffer}.values():
            lane_state.environment.wake()
        self._timer = asyncio.get_running_loop().call_later(left, self._waited)

    def _waited(self) -> None:
        self._timer = None
        self.start()

    def _take(self) -> tuple[LaneState, list[Claim]]:
        """The next chunk, of one environment."""
        lane_state = self._buffer[0][0]
        claims: list[Claim] = []
        others: list[tuple[LaneState, Claim]] = []
        while self._buffer and len(claims) < self.chunk:
            entry = self._buffer.popleft()
            if entry[0] is lane_state:
                claims.append(entry[1])
            else:
                others.append(entry)
        self._buffer.extendleft(reversed(others))
        return lane_state, claims

    async def _work(self, slot: Slot) -> None:
        self.busy += 1
        self.capacity.busy += 1
        try:
            while self.startable() and not self._closing:
                lane_state, claims = self._take()
                self.start()
                await self._run(slot, lane_state, claims)
        finally:
            self.busy -= 1
            self.capacity.busy -= 1

    async def _run(self, slot: Slot, lane_state: LaneState, claims: list[Claim]) -> None:
        """One chunk, in as many calls as it takes."""
        worker, execution = self.worker, lane_state.execution
        plan = slot.plan = execution.plan(claims[0])
        run = slot.chunk = ChunkRun(execution, plan, claims, worker.id, slot.name)
        while run.parts:
            if run.begun and (worker.stopping or self._closing):
                for job, settlement in run.release():
                    worker.run_ended(lane_state, job._claim, job, settlement)
                break
            jobs = run.begin()
            slot.began = self._began = began = time.monotonic()
            slot.job = jobs[0]
            self._mark(slot, lane_state, jobs)
            try:
                ended = await run.call(slot.child)
            except asyncio.CancelledError as error:
                if self._closing and run.unfinished():
                    raise
                ended = error  # the handler's own doing: its call failed; or all of its claims were lost
            finally:
                took = time.monotonic() - began
                self._took = self._took * 0.9 + took * 0.1 if self._took > 0 else took
                slot.job = None
            if slot.task is not None and slot.task.cancelling() and not self._closing:
                await consume_cancellation(slot)
            share = took / len(jobs)
            for job, settlement in run.end(ended):
                outcome = settlement or job.finished
                if outcome is not None:
                    outcome.duration = share
                worker.run_ended(lane_state, job._claim, job, settlement)
        self._mark(slot, lane_state, [])

    def _mark(self, slot: Slot, lane_state: LaneState, jobs: Sequence[Job]) -> None:
        """Which rows run now; not where the call was cut off: a thread may still be at it."""
        if self.running_marks is not None:
            marks = [mark(job._claim.key, lane_state.salt) for job in jobs]
            first = slot.number * self.chunk
            self.running_marks[first : first + self.chunk] = array("q", marks + [0] * (self.chunk - len(marks)))

    def lose(self, claim: Claim) -> None:
        """A call that has lost all of its rows is told at once. The others go on: ``job.lost`` tells."""
        for slot in self.all:
            jobs = slot.chunk.jobs if slot.chunk is not None and slot.job is not None else []
            mine = any(job._claim is claim for job in jobs)
            if mine and all(job._claim.lost for job in jobs) and slot.task is not None and slot.stoppable:
                slot.task.cancel()
