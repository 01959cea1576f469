"""Health, drain and graceful shutdown of one worker: what concerns it as a whole and no row in particular."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import os
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, cast

from ..declare.lane import Lane
from ..declare.retry import TRANSIENT
from ..errors import DatabaseError, RowmillError
from ..store.gates import pauses
from ..store.gates.pauses import HeldBack
from ..store.inspect.lane_view import LaneView
from ..store.lane.claim import Claim, Settlement
from ..store.lane.row_keys import written
from ..store.own.failures import Failure
from ..store.own.process_identity import process_identity
from ..store.own.workers import WorkerState
from .counters import users_line
from .lane_state import LaneState

if TYPE_CHECKING:
    from ..store.lane.postgres import PostgresLane
    from ..store.lane.sqlite import SqliteLane
    from .environment import Environment
    from .slots import Slots
    from .worker import Worker

_LAST, _HURRIED = 20.0, 3.0  # seconds for the last outcomes, where the database is slow or away
_WATCH_EVERY = 0.2
_ASK_PAUSES = 0.5
#: Seconds between two words of a drain about the rows that it waits for.
_SAY_WAITING = 15.0
_GIVE_UP = 4.0  # seconds between two tries to open a resource: a drain does not wait longer, after three of them
_BLOCKED = 1.0  # seconds without a sign from the event loop: it ticks twice as often
RECYCLE = 75  # exit code: start this worker again


class Shutdown:
    """Watches over a worker's health, knows when a drain is done, and shuts the worker down gracefully."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        #: The last outcomes are being written: nothing is kept for later that the database refuses.
        self.settling_last = False
        #: When the worker's health is looked at next (monotonic).
        self.watch_at = 0.0
        #: When it is next asked whether what is left is paused: that may mean a look at every ready row.
        self._ask_pauses_at = 0.0
        #: When a drain may next say what it waits for; 0: it has not waited yet.
        self._say_waiting_at = 0.0

    def watch(self, now: float) -> None:
        """Stop the worker gracefully if a run cannot be stopped after timeout and grace, if a heartbeat thread has
        stopped, or if another worker took its id.
        """
        worker, self.watch_at = self._worker, now + _WATCH_EVERY
        for slots in worker.slots.values():
            if slots.prefetch_is_stuck(now):
                self.give_back(slots)
            slot = slots.overdue(now, worker.grace)
            if slot is not None and not worker.recycling:
                worker.recycling = True
                worker.stop()
                worker.events.emit(
                    "worker_recycled", logging.ERROR, worker=worker.id, lane=slots.lane.name, slot=slot.name,
                    hint='a handler could not be stopped, so the process restarts; isolation="process" can kill it',
                )  # fmt: skip
        for environment in worker.environments:
            if environment.opened and not environment.beating:
                worker.fail(RowmillError(f"the heartbeat of environment {environment.name!r} has stopped"))
            if environment.replaced and not worker.stopping:
                worker.stop()
                worker.events.emit(
                    "worker_replaced", logging.ERROR, worker=worker.id, environment=environment.name,
                    hint="another worker has taken over this id; this one stops",
                )  # fmt: skip
        if now >= worker.counters.summary_at:
            worker.counters.summarise()

    def watch_loop(self) -> tuple[LaneState, Failure] | None:
        """Called from the heartbeat thread. Reports a handler that blocks the event loop past its timeout, once; after
        the grace, ends the process. Returns what the row's history is to show.
        """
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
                hint='no other job can run: await there, make the handler a plain function, or use isolation="process"',
            )  # fmt: skip
            message = f"blocks the event loop past its timeout of {plan.timeout:g} s, at {job.blocked_at}"
            failure = Failure(claim.lane, written(claim.id), claim.attempt, claim.worker, "blocked", TRANSIENT, message)
            return job._lane_state, failure
        return None

    def _end_if_hung(self) -> None:
        """A handler that blocks the loop past timeout and grace keeps this check, too, from its work, and with the
        heartbeat its row would be held forever.
        """
        worker, now = self._worker, time.monotonic()
        if not worker.expendable or now - worker.ticked < worker.grace:
            return
        for slots in list(worker.slots.values()):
            if (slot := slots.overdue(now, worker.grace)) is not None:
                worker.events.emit(
                    "worker_recycled", logging.ERROR, worker=worker.id, lane=slots.lane.name, slot=slot.name,
                    hint='a handler blocks the event loop: make it a plain function, or use isolation="process"',
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
        for environment in worker.environments:
            if not environment.opened:
                return False
            # First: a job that a join makes ready between the two questions would be missed.
            if environment.joins is not None and (environment.joins.busy or await environment.joins.look()):
                return False
            for lane_state in environment.lane_states:
                try:
                    unfinished = await lane_state.store.unfinished()
                    if not unfinished and await lane_state.store.backs_off():
                        return False
                    unseen = unseen or (not unfinished and await lane_state.store.left_running())
                except DatabaseError:
                    return False
                if unfinished and lane_state.refused is not None:
                    raise RowmillError(
                        f"lane {lane_state.store.lane.name!r}: the database refuses the claim, so the rows"
                        f" cannot be drained: {lane_state.refused}",
                        hint=f"rowmill sql shows the statement; running={dict(lane_state.store.lane.running)!r}",
                    )
                if unfinished and lane_state.unopened is not None and lane_state.open_pause >= _GIVE_UP:
                    raise RowmillError(
                        f"lane {lane_state.store.lane.name!r}: {lane_state.unopened.message}, so its rows"
                        " cannot be drained",
                        hint=lane_state.unopened.hint,
                    )
                if unfinished:
                    held_back = await self._held_back(lane_state)
                    if held_back is None:
                        await self._say_waiting(environment, lane_state)
                        return False
                    left.append((environment, lane_state, held_back))
        for environment, lane_state, rows in left:
            lane = lane_state.store.lane.name
            worker.held_back.append(
                {"environment": environment.name, "lane": lane, "count": rows.count, "why": rows.why}
            )
            worker.events.emit(
                "drain_held_back", logging.WARNING, worker=worker.id, environment=environment.name, lane=lane,
                count=rows.count, why=rows.why,
                hint=f"this drain ends without them; rowmill resume --lane {lane} ends the pause",
            )  # fmt: skip
        if unseen:
            worker.counters.leave()
        return True

    async def _say_waiting(self, environment: Environment, lane_state: LaneState) -> None:
        """Say now and then which running rows of others a drain waits for: without a word it looks hung."""
        now, worker = time.monotonic(), self._worker
        if now < self._say_waiting_at:
            return
        first, self._say_waiting_at = self._say_waiting_at == 0.0, now + _SAY_WAITING
        if first:
            return
        store = cast("PostgresLane | SqliteLane", lane_state.store)  # the only lane stores there are
        try:
            view = LaneView(store, has_workers_table=True)
            holders, timeless = await view.holders(), await view.timeless()
        except DatabaseError:
            return
        held = [rows for rows in holders if rows.worker != worker.id]
        swept = (store.lane.lease + store.lane.sweep_every).total_seconds()
        if held:
            names = ", ".join(rows.worker for rows in held[:3]) + (", ..." if len(held) > 3 else "")
            worker.events.emit(
                "drain_waiting", worker=worker.id, environment=environment.name, lane=store.lane.name,
                count=sum(rows.rows for rows in held), holders=names,
                seconds=round(max(swept - rows.silent_for for rows in held)),
                hint="rows of a worker that is gone are taken back within these seconds",
            )  # fmt: skip
        elif timeless:
            worker.events.emit(
                "drain_waiting", worker=worker.id, environment=environment.name, lane=store.lane.name,
                count=timeless, seconds=round(swept),
                hint="running rows without the time of a claim or a heartbeat are taken back within these seconds;"
                f" rowmill release --lane {store.lane.name} --stuck does it now",
            )  # fmt: skip
        elif store.lane.groups:
            worker.events.emit(
                "drain_waiting", worker=worker.id, environment=environment.name, lane=store.lane.name,
                hint=f"ready rows are held back by a gate: rowmill gates {store.lane.name} shows until when",
            )  # fmt: skip

    async def _held_back(self, lane_state: LaneState) -> HeldBack | None:
        """Ready rows that nobody will claim before somebody resumes: waiting for them a drain would never end."""
        began = time.monotonic()
        if began < self._ask_pauses_at:
            return None
        try:
            paused = await pauses.held_back(lane_state.store)
        except DatabaseError:
            paused = None
        if paused is None:
            ended = time.monotonic()
            self._ask_pauses_at = ended + max(_ASK_PAUSES, 20 * (ended - began))
        return paused

    async def wind_down(self) -> None:
        """Claim nothing more; rows that nobody started go back; runs may finish within the grace."""
        worker = self._worker
        deadline = time.monotonic() + worker.grace
        self.give_back_prefetched()
        while not worker.hurried and time.monotonic() < deadline:
            worker.settle_all()
            if not any(slots.in_time(time.monotonic()) for slots in worker.slots.values()):
                break
            await worker.wait(0.5)
        for slots in worker.slots.values():
            self._give_back(await slots.close())
        await self._give_back_unanswered()
        last = time.monotonic() + (_HURRIED if worker.hurried else _LAST)
        self.settling_last = True
        worker.settle_delayed(float("inf"))
        while time.monotonic() < last:
            worker.settle_delayed(time.monotonic())
            worker.settle_all()
            if not worker.unsettled:
                break
            await worker.wait(min(max(worker.settle_later_at - time.monotonic(), 0.0), 0.5))

    def give_back_prefetched(self) -> None:
        """Release at once the rows that were claimed and that nobody started."""
        for slots in self._worker.slots.values():
            self.give_back(slots)
        self._worker.settle_all()

    def give_back(self, slots: Slots) -> None:
        """Release the rows of a lane that were claimed and that nobody started."""
        self._give_back(slots.take_back())

    async def _give_back_unanswered(self) -> None:
        """Release rows that were claimed although the reply was lost, or the stop cut the claim off."""
        for environment in self._worker.environments:
            for lane_state in environment.lane_states:
                with contextlib.suppress(DatabaseError, TimeoutError):
                    async with asyncio.timeout(_HURRIED):
                        self._give_back([(lane_state, claim) for claim in await self._worker.recover(lane_state)])

    @staticmethod
    def _give_back(claims: list[tuple[LaneState, Claim]]) -> None:
        for lane_state, claim in claims:
            if not claim.lost:
                lane_state.outcomes.append(Settlement(claim, "release"))

    async def close(self) -> None:
        """Mark the worker as stopped in every environment, and close what is open."""
        worker = self._worker
        for slots in worker.slots.values():
            await slots.close()  # also where the work ended in an error: a slot waits forever unless it is told
        await asyncio.gather(*(rate.close() for rate in worker.shared_rates.values()))
        await worker.controls.close()
        await asyncio.gather(*(environment.close(self.snapshot()) for environment in worker.environments))
        await worker.lane_resources.stop()
        await worker.resources.close()
        worker.counters.summarise()
        # The last event of every worker. Sentry and OpenTelemetry flush on it.
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
            completed=worker.counters.completed,
            failed=worker.counters.failures,
            lost=worker.counters.losses,
            memory=_memory(),
            process=process_identity(),
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
