"""The foreman: watches over one worker's health, knows when its work is done, and ends it in good order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import os
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from ..declare.lane import Lane
from ..declare.retry import TRANSIENT
from ..errors import DatabaseError, RowmillError
from ..store.gates import pauses
from ..store.gates.pauses import HeldBack
from ..store.lane.claim import Claim, Settlement
from ..store.lane.row_keys import written
from ..store.own.failures import Failure
from ..store.own.workers import WorkerState
from .counters import users_line
from .lane_state import LaneState

if TYPE_CHECKING:
    from .environment import Environment
    from .worker import Worker

_LAST, _HURRIED = 20.0, 3.0  # seconds for the last outcomes, where the database is slow or away
_ASK_PAUSES = 0.5
_BLOCKED = 1.0  # seconds without a sign from the event loop: it ticks twice as often
RECYCLE = 75  # exit code: start this worker again


class Shutdown:
    """What concerns a worker as a whole and no row in particular."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        #: When it is next asked whether what is left is paused: that may mean a look at every ready row.
        self._ask_pauses_at = 0.0
        #: Each environment has a heartbeat thread, and one of them is to report.
        self._watching = threading.Lock()

    def watch(self, now: float) -> None:
        """A run that outlives its timeout and cannot be stopped costs this process its life, in good order; so does
        a heartbeat that has stopped, or an id that another worker has taken.
        """
        worker = self._worker
        for slots in worker.slots.values():
            if slots.hoards(now):
                self._give_back(slots.take_back())
            slots.start()
            slot = slots.overdue(now, worker.grace)
            if slot is not None and not worker.recycling:
                worker.recycling = True
                worker.stop()
                worker.events.emit(
                    "worker_recycled", logging.ERROR, worker=worker.id, lane=slots.lane.name, slot=slot.name,
                    hint='a handler that cannot be stopped: isolation="process" can kill it',
                )  # fmt: skip
        for place in worker.places:
            if place.opened and not place.beating:
                worker.crashed(RowmillError(f"the heartbeat of environment {place.name!r} has stopped"))
            if place.replaced and not worker.stopping:
                worker.stop()
                worker.events.emit(
                    "worker_replaced", logging.ERROR, worker=worker.id, environment=place.name,
                    hint="another worker has taken this id; this one stops",
                )  # fmt: skip
        worker.tally.summarise(now)

    def watch_loop(self) -> tuple[LaneState, Failure] | None:
        """Called from the heartbeat thread. A handler that blocks the event loop past its timeout is reported once, and
        ends the process past the grace. Returns what the row's history is to show.
        """
        with self._watching:
            seen = self._blocked()
        if seen is None:
            self._end_if_hung()
        return seen

    def _blocked(self) -> tuple[LaneState, Failure] | None:
        worker, now = self._worker, time.monotonic()
        if now - worker.ticked < _BLOCKED:
            return None
        for slot in [slot for slots in list(worker.slots.values()) for slot in list(slots.all)]:
            job, plan = slot.job, slot.plan
            if job is None or plan is None or job.blocked_at is not None or (slot.over(now) or 0.0) <= 0:
                continue
            frame = sys._current_frames().get(worker.thread)
            if slot.task is None or slot.task is not worker.stepping or frame is None:
                continue
            job.blocked_at = users_line(traceback.extract_stack(frame)) or "an unknown line"
            claim, seconds = job._claim, round(now - slot.began, 1)
            worker.events.emit(
                "loop_blocked", logging.WARNING, worker=worker.id, environment=claim.environment, lane=claim.lane,
                id=claim.id, at=job.blocked_at, seconds=seconds, timeout=plan.timeout,
                hint='nothing else can run: await there, make the handler a plain function, or isolation="process"',
            )  # fmt: skip
            message = f"blocks the event loop past its timeout of {plan.timeout:g} s, at {job.blocked_at}"
            failure = Failure(claim.lane, written(claim.id), claim.attempt, claim.worker, "blocked", TRANSIENT, message)
            return job._held, failure
        return None

    def _end_if_hung(self) -> None:
        """A handler that blocks the loop past timeout and grace keeps this foreman, too, from its work, and with the
        heartbeat its row would be held for ever.
        """
        worker, now = self._worker, time.monotonic()
        if not worker.expendable or now - worker.ticked < worker.grace:
            return
        for slots in list(worker.slots.values()):
            if (slot := slots.overdue(now, worker.grace)) is not None:
                worker.events.emit(
                    "worker_recycled", logging.ERROR, worker=worker.id, lane=slots.lane.name, slot=slot.name,
                    hint='its handler blocks the event loop: make it a plain function, or isolation="process"',
                )  # fmt: skip
                os._exit(RECYCLE)

    async def drained(self) -> bool:
        """Nothing under way here, and nothing ready or running anywhere; or nothing but rows paused without end.

        Rows that run and show neither who holds them nor since when are not waited for: their worker may have died long
        ago, and nobody could tell.
        """
        worker = self._worker
        left: list[tuple[Environment, LaneState, HeldBack]] = []
        unseen = False
        if any(slots.busy or slots.buffered for slots in worker.slots.values()) or worker.settler.busy(worker.places):
            return False
        for place in worker.places:
            if not place.opened:
                return False
            for held in place.held:
                try:
                    unfinished = await held.store.unfinished()
                    unseen = unseen or (not unfinished and await held.store.left_running())
                except DatabaseError:
                    return False
                if unfinished and held.refused is not None:
                    raise RowmillError(
                        f"lane {held.store.lane.name!r}: the database refuses the claim, so the rows cannot be drained:"
                        f" {held.refused}",
                        hint=f"rowmill sql shows the statement; running={dict(held.store.lane.running)!r}",
                    )
                if unfinished:
                    held_back = await self._held_back(held)
                    if held_back is None:
                        return False
                    left.append((place, held, held_back))
            if place.follow is not None and (place.follow.busy or await place.follow.look()):
                return False
        for place, held, rows in left:
            lane = held.store.lane.name
            worker.held_back.append({"environment": place.name, "lane": lane, "count": rows.count, "why": rows.why})
            worker.events.emit(
                "drain_held_back", logging.WARNING, worker=worker.id, environment=place.name, lane=lane,
                count=rows.count, why=rows.why, hint="rowmill resume lets them go; this drain ends without them",
            )  # fmt: skip
        if unseen:
            worker.tally.leave()
        return True

    async def _held_back(self, held: LaneState) -> HeldBack | None:
        """Ready rows that nobody will claim before somebody resumes: waiting for them a drain would never end."""
        began = time.monotonic()
        if began < self._ask_pauses_at:
            return None
        try:
            found = await pauses.held_back(held.store)
        except DatabaseError:
            found = None
        if found is None:
            ended = time.monotonic()
            self._ask_pauses_at = ended + max(_ASK_PAUSES, 20 * (ended - began))
        return found

    async def wind_down(self) -> None:
        """Claim nothing more; rows that nobody started go back; runs may finish within the grace."""
        worker = self._worker
        deadline = time.monotonic() + worker.grace
        for slots in worker.slots.values():
            self._give_back(slots.take_back())
        while not worker.hurried and time.monotonic() < deadline:
            worker.settler.all(worker.places)
            if not any(slots.in_time(time.monotonic()) for slots in worker.slots.values()):
                break
            await worker.bell.wait(0.5)
        for slots in worker.slots.values():
            self._give_back(await slots.close())
        await self._give_back_unsure()
        last = time.monotonic() + (_HURRIED if worker.hurried else _LAST)
        worker.settler.stopping = True
        worker.settler.retry_later(float("inf"))
        while time.monotonic() < last:
            worker.settler.retry_later(time.monotonic())
            worker.settler.all(worker.places)
            if not worker.settler.busy(worker.places):
                break
            await worker.bell.wait(min(max(worker.settler.next_time - time.monotonic(), 0.0), 0.5))

    async def _give_back_unsure(self) -> None:
        """Rows whose claim was cut off, by the stop itself or by a lost reply, and stands all the same."""
        for place in self._worker.places:
            for held in place.held:
                with contextlib.suppress(DatabaseError, TimeoutError):
                    async with asyncio.timeout(_HURRIED):
                        self._give_back([(held, claim) for claim in await self._worker.recover(held)])

    @staticmethod
    def _give_back(claims: list[tuple[LaneState, Claim]]) -> None:
        for held, claim in claims:
            if not claim.lost:
                held.outcomes.append(Settlement(claim, "release"))

    async def close(self) -> None:
        """Sign off in every environment, and close what is open."""
        worker = self._worker
        for slots in worker.slots.values():
            await slots.close()  # also where the work ended in an error: a slot waits for ever unless it is told
        for place in worker.places:
            await place.close(self.snapshot())
        await worker.resources.close()
        worker.tally.summarise(time.monotonic(), last=True)
        # The last word of every worker: who sends things elsewhere in the background sends the rest now.
        worker.events.emit("worker_stopped", logging.DEBUG, worker=worker.id)

    def snapshot(self) -> WorkerState:
        """What the worker says of itself with every sign of life. Called from the heartbeat thread too."""
        worker, now = self._worker, time.monotonic()
        current = [facts for slots in list(worker.slots.values()) for facts in slots.facts(now)]
        return WorkerState(
            id=worker.id,
            incarnation=worker.incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            lanes=list(worker.slots),
            version=_version(),
            leases={name: _leases(slots.lane) for name, slots in worker.slots.items()},
            state="busy" if current else "idle",
            current=current,
            completed=worker.tally.completed,
            failed=worker.tally.failures,
            lost=worker.tally.losses,
            memory=_memory(),
        )


def _leases(lane: Lane) -> tuple[float, float]:
    assert lane.startup_lease is not None
    return lane.lease.total_seconds(), lane.startup_lease.total_seconds()


def _memory() -> int:
    """Resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as numbers:
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@functools.cache
def _version() -> str:
    return importlib.metadata.version("rowmill")
