"""The worker: claim, dispatch, settle. One loop over environments in order and lanes by priority, strictly.

A round settles what has ended and, where something may be ready and there is room for it, claims from the top
down. Between rounds the worker waits: for a run to end, for a wake-up, or for the next poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..clock import Clock
from ..declare.gates import Rate
from ..declare.lane import Lane
from ..declare.schedules import Schedules
from ..declare.states import FINAL
from ..declare.task import Queue
from ..errors import (
    Busy,
    DatabaseError,
    DeclarationError,
    Refused,
    Unreachable,
    UnreadableReply,
    Unserved,
    WorkerIdTaken,
)
from ..events import Events
from ..store import Database, probe
from ..store.connection_limit import ConnectionShares
from ..store.gates.shared_rate import SharedWindow
from ..store.lane.claim import Claim, Report, Settlement
from ..store.own.workers import lock_id
from . import worker_id as worker_ids
from .chunks import ChunkSlots
from .counters import Counters
from .discovery import Discovery
from .environment import Environment
from .execute import Execution, TaskExecution, unhooked
from .heartbeat import HeartbeatThread
from .isolate import importable
from .job import Job
from .lane_state import LaneState
from .recovery.liveness import DeadWorker
from .recovery.quarantine import Quarantine
from .recovery.running_marks import RunningMarks
from .resources import LaneResources, Resource, Resources
from .shared_rate import ControlDatabases, SharedRate
from .shutdown import Shutdown
from .slots import Capacity, Slots
from .tracing import trace_lane
from .turns import FairOrder, Turns
from .wake import Listeners

_SETTLE_BATCH = 1000  # outcomes per statement
_BACKLOG = 2000  # unwritten outcomes before claiming stops
_CLAIMS_IN_A_ROW = 10  # of one lane, before the other lanes are looked at
_REFUSED_PAUSE = 10.0  # seconds for which a lane whose claim was refused is left alone
_SETTLE_AGAIN = (0.5, 30.0)  # backoff in seconds, first and longest, when the table refuses all outcomes
_LOCKED_AGAIN = 0.5  # seconds until an outcome is tried again whose row somebody has locked
SUSPICION = 4.0  # seconds for which a worker's lock is missing before the worker is presumed dead
_NO_RUN_AFTER = 1.0  # seconds that a lane without a run_after column pauses at most


def _divided(most: int, lanes: Sequence[Lane]) -> ConnectionShares:
    """The bound on connections. Each control database has one of them."""
    shared = {lane.shared_rate.shared for lane in lanes if lane.shared_rate is not None}
    shared |= {budget.shared for lane in lanes for budget in lane.budgets.values()}
    left = most - len(shared - {None})
    if left < ConnectionShares.LEAST:
        raise DeclarationError(
            f"max_connections={most} is too few: shared rates and budgets need {most - left} of them",
            hint=f"at least {ConnectionShares.LEAST + most - left}",
        )
    return ConnectionShares.of(left)


def check_handler(lane: Lane, resources: Resources) -> None:
    """Refuse a handler that asks for a resource that is not declared, or that its process could not import."""
    resources.check(lane.resources(), f"lane {lane.name!r}")
    if lane.isolation == "process":
        importable(lane)
    if isinstance(lane, Queue) and lane.chunk is not None:
        for task in lane.tasks.values():
            _ = task.signature  # raises where a parameter is not a list


class Worker:
    """One worker process's engine. ``run`` works until stopped, or, draining, until nothing is ready or running."""

    #: Pauses before an outcome that the database refuses to take at all is tried again; then it is given up.
    stuck_pauses: Sequence[float] = (1.0, 2.0, 4.0, 8.0, 15.0)

    def __init__(
        self,
        environments: Sequence[tuple[str, Database]],
        lanes: Sequence[Lane],
        *,
        resources: dict[str, Resource] | None = None,
        schedules: Sequence[Schedules] = (),
        events: Events | None = None,
        clock: Clock | None = None,
        worker_id: str | None = None,
        incarnation: str | None = None,
        replaces: str | None = None,
        concurrency: int | None = None,
        drain: bool = False,
        grace: float = 30.0,
        register: bool = True,
        expendable: bool = False,
        suspicion: float | None = None,
        fair: FairOrder | None = None,
        max_connections: int | None = None,
        discovery: Discovery | None = None,
        control: Callable[[str], Database] = Database.open,
        rest_after: float = 60.0,
        listens: bool = True,
    ) -> None:
        self.id = worker_id or worker_ids.new()
        self.incarnation = incarnation or uuid.uuid4().hex[:8]
        #: The incarnation that this one follows, under the same id.
        self.replaces = replaces
        self.events, self.clock = events or Events(), clock or Clock()
        self.drain, self.grace, self.registers = drain, grace, register
        #: The process is the worker's own. It may end it if a run cannot be stopped; the supervisor starts it again.
        self.expendable = expendable
        #: Seconds for which another worker's lock may be missing before its rows are taken back; None: forever.
        self.suspicion = suspicion
        self._woken = asyncio.Event()
        #: Start the next round at once, or right after the current one. Every run that ends calls it.
        self.wake = self._woken.set
        self.resources = Resources(resources or {})
        self.lane_resources = LaneResources(self)
        self.capacity = Capacity(concurrency)
        self.counters = Counters(self.events, self.id)
        #: Tables of schedules, for the tasks of its queues.
        self.schedules = schedules
        ordered = sorted(lanes, key=lambda lane: lane.priority)
        self.heartbeats = HeartbeatThread(self)
        self.listeners = Listeners(lock_id(self.incarnation))
        self.slots = {
            lane.name: Slots(lane, self) if lane.chunk is None else ChunkSlots(lane, self) for lane in ordered
        }
        self._lanes = ordered
        #: The databases that hold what is shared by all environments, and the rates of lanes there.
        self.controls = ControlDatabases(control)
        self.shared_rates = {
            lane.name: self._share_rate(lane, lane.shared_rate) for lane in ordered if lane.shared_rate is not None
        }
        #: The bound on its connections, over all environments.
        self.shares = None if max_connections is None else _divided(max_connections, ordered)
        #: Seconds without work after which an environment is closed until it has some: in fair order, or without polls.
        self.rest_after = rest_after
        #: It listens for wake-ups; if not, somebody calls ``wake_up``.
        self.listens = listens
        #: In fair order: which environment comes next. None: strictly in the order of the list.
        self.turns = None if fair is None else Turns(self, fair)
        #: Where environments come and go: the list of them.
        self.discovery = discovery
        self.environments: list[Environment] = []
        for name, database in environments:
            self.add_environment(name, database)
        self.shutdown = Shutdown(self)
        self.quarantine = Quarantine(self)
        #: Where a drain ended before all was done: rows that are paused without end, by environment and lane.
        self.held_back: list[dict[str, Any]] = []
        #: What the process before this one, with the same worker id, was running when it died; None: not known.
        self.fallen: frozenset[int] | None = None
        self.stopping = self.hurried = self.recycling = False
        #: The thread that its event loop runs in, and when that loop last gave a sign of life.
        self.thread, self.ticked = 0, time.monotonic()
        #: Set after the first round: by then every wrong declaration was reported.
        self.started = asyncio.Event()
        #: Outcomes that could not be written (row locked, or refused), each with the time of its next try.
        self._settle_later: list[tuple[float, LaneState, Settlement]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._above: list[LaneState] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._crash: BaseException | None = None
        self._under_way: asyncio.Future[None] | None = None
        #: What is done beside the rounds, kept so that it is not collected as garbage.
        self._beside: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.TimerHandle | None = None
        for lane in ordered:
            check_handler(lane, self.resources)

    def add_environment(self, name: str, database: Database) -> None:
        """Serve one more environment, after the others."""
        database.shares = self.shares
        lanes = [lane for lane in self._lanes if lane.serves(name)]
        self.environments.append(Environment(self, name, database, lanes))
        self.wake()

    async def remove_environment(self, environment: Environment) -> None:
        """Close an environment that is no longer listed, and forget it."""
        if self.turns is not None:
            await self.turns.idle(environment)
            self.turns.forget(environment)
        await environment.leave()
        self.environments.remove(environment)

    def _share_rate(self, lane: Lane, rate: Rate) -> SharedRate:
        assert rate.shared is not None
        slots = self.slots[lane.name]
        window = SharedWindow(self.controls.get(rate.shared), self.clock, lane.shared_name, rate)
        slots.shared_rate = SharedRate(self, slots, window)
        return slots.shared_rate

    def wake_up(self, environment: str | None = None) -> None:
        """Rows may be ready, in all environments or in one: look now. May be called from any thread."""
        if self._loop is not None and self._loop.is_running():
            for one in self.environments:
                if environment in (None, one.name):
                    self._loop.call_soon_threadsafe(one.wake)

    def keep_running_marks(self, file: int) -> None:
        """Keep what runs in a file that outlives this process, after reading what the process before it left there."""
        marks = RunningMarks(file, [slots.rows for slots in self.slots.values()])
        self.fallen = marks.before
        for slots, cells in zip(self.slots.values(), marks.cells, strict=True):
            slots.running_marks = cells

    # -- life

    async def run(self) -> Counters:
        """Work. Returns what was done."""
        self._loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        self._tick()
        listing = asyncio.create_task(self.discovery.run(self)) if self.discovery is not None else None
        try:
            while not self.stopping:
                await self._round_or_stop()
                self.started.set()
                if self._crash is not None:
                    raise self._crash
                if self.drain and not self.busy and await self.shutdown.drained():
                    break
                if not self.stopping:
                    await self.wait(self._pause())
            await self._stop_looking(listing)
            await self.shutdown.wind_down()
        finally:
            await self._stop_looking(listing)
            await self.shutdown.close()
            if self._ticking is not None:
                self._ticking.cancel()
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
        return self.counters

    async def _stop_looking(self, listing: asyncio.Task[None] | None) -> None:
        """Look for no environments, and for no rows in them, any more."""
        if listing is not None:
            listing.cancel()
            await asyncio.gather(listing, return_exceptions=True)
        if self.turns is not None:
            await self.turns.stop(wait=not self.hurried)

    async def wait(self, seconds: float) -> None:
        """Wait until ``wake`` is called, at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0)):
                await self._woken.wait()
        self._woken.clear()

    @property
    def busy(self) -> bool:
        """Something runs, waits for a slot, or is not written yet."""
        looking = self.turns is not None and self.turns.busy
        return looking or any(slots.busy or slots.buffered for slots in self.slots.values()) or self.unsettled

    def _tick(self) -> None:
        """A sign that the loop is not blocked, for the heartbeat thread to see."""
        self.ticked = time.monotonic()
        if self._loop is not None:
            self._ticking = self._loop.call_later(0.5, self._tick)

    async def _round_or_stop(self) -> None:
        """Run a round. A second ``stop`` cancels the statement that is under way."""
        self._under_way = asyncio.ensure_future(self._round())
        try:
            await self._under_way
        except asyncio.CancelledError:
            if not self.hurried:
                raise

    @property
    def stepping(self) -> asyncio.Task[Any] | None:
        """The task that the event loop is running at this moment; for other threads."""
        return asyncio.current_task(self._loop) if self._loop is not None else None

    def stop(self) -> None:
        """First call: claim nothing more, let runs finish. Second call: stop at once."""
        self.hurried = self.stopping
        self.stopping = True
        if self.hurried and self._under_way is not None:
            self._under_way.cancel()
        if self._loop is not None and self._loop.is_running():
            # Not when the round has ended: it may wait for a claim, a resource, an environment that does not answer.
            self._loop.call_soon_threadsafe(self.shutdown.give_back_prefetched)
        self.wake()

    def fail(self, error: BaseException) -> None:
        """Stop because the engine itself failed. A new process takes over, so that no row is held for nothing."""
        self._crash = error
        self.wake()

    @property
    def lane_states(self) -> list[LaneState]:
        """Every lane in every environment that is open."""
        return [lane_state for environment in self.environments for lane_state in environment.lane_states]

    # -- a round

    async def _round(self) -> None:
        now = time.monotonic()
        for environment in self.environments:
            environment.fall_due(now)
        for rate in self.shared_rates.values():
            rate.serve(now)
        self.settle_delayed(now)
        self.settle_all()
        for slots in self.slots.values():
            slots.start()
        if now >= self.shutdown.watch_at:
            self.shutdown.watch(now)
        if self.quarantine.beside:
            await self.quarantine.clear_ended()
        if self.quarantine.pending is not None and not self.stopping:
            await self.quarantine.run_next()
        if self.turns is not None:
            if not self.stopping:
                await self.turns.start(now)
            return
        for environment in self.environments:
            if environment.sleeps and environment.may_rest(now, self.rest_after):
                await self.guarded(environment, environment.sleep())
        if self.stopping or not any(self.wanted(environment, now) for environment in self.environments):
            return
        self._above = []
        for environment in self.environments:
            environment.above = self._above  # of all environments: nothing below may start before it
        # All are opened before the first row is claimed anywhere: errors in declarations are reported before that.
        new = [
            environment for environment in self.environments if not environment.opened and self.wanted(environment, now)
        ]
        await asyncio.gather(*(self.guarded(environment, environment.examine()) for environment in new))
        reached = [environment for environment in new if environment.reachable]
        await asyncio.gather(*(self.guarded(environment, self.open(environment)) for environment in reached))
        for environment in list(self.environments):
            # All above it are looked at too: nothing below may start while something above is ready.
            if time.monotonic() >= environment.retry_at:
                await self.guarded(environment, self.claim_from(environment))

    async def guarded(
        self, environment: Environment, step: Coroutine[Any, Any, None], *, tells_all: bool = False
    ) -> None:
        """Run a step against an environment. One that is unreachable does not stop the others; it is tried later.

        ``tells_all``: the caller decides what a wrong declaration means.
        """
        try:
            await step
            if environment.failures or environment.outage_events:
                environment.served()
        except (DeclarationError, WorkerIdTaken) as error:
            # At the start it ends the worker. Later, one environment with a wrong declaration must not stop the others.
            if tells_all or not self.started.is_set():
                raise
            environment.failed()
            self.events.emit("environment_wrong", logging.ERROR, environment=environment.name, error=str(error))
        except DatabaseError as error:
            if self.drain and not environment.opened and not isinstance(error, Busy):
                raise
            if isinstance(error, Unreachable):
                environment.lost(error)
                return
            name = "statement_refused" if isinstance(error, Refused) else "environment_busy"
            pause = round(environment.failed(), 1)
            self.events.emit(name, logging.ERROR, environment=environment.name, error=error.message, retry_in=pause)

    def wanted(self, environment: Environment, now: float) -> bool:
        """Whether to ask this environment in this round."""
        if now < environment.retry_at or environment.leaving:
            return False
        if environment.to_open or environment.look or now >= environment.next_poll:
            return True
        return any(lane_state.more and self._ask(lane_state) > 0 for lane_state in environment.lane_states)

    async def open(self, environment: Environment) -> None:
        """Open an environment, and connect its lanes with the slots."""
        await environment.open()
        for lane_state in environment.lane_states:
            if self.events.tracer is not None:
                trace_lane(lane_state, self.events.tracer)
            kind = TaskExecution if lane_state.store.lane.own else Execution
            lane_state.execution = kind(lane_state, self.resources, self._thread_pool)
            lane_state.slots = self.slots[lane_state.name]

    # -- claim

    async def claim_from(self, environment: Environment) -> None:
        """Claim what is ready, from the lane of highest priority down, as far as there is room."""
        if not environment.opened or environment.leaving or self._higher_lane_can_claim(environment):
            return
        environment.looked()
        if not all(lane_state.beats for lane_state in environment.lane_states):
            await environment.database.reach()  # is it away, or only the heartbeat's connection?
        for lane_state in environment.lane_states:
            if lane_state.altered and lane_state.paused_until <= time.monotonic():
                await environment.rebind(lane_state)
            if claims := await self.recover(lane_state):
                lane_state.slots.put(lane_state, claims)
                lane_state.slots.start()
        claimable = [lane_state for lane_state in environment.lane_states if self._ask(lane_state) > 0]
        for lane_state in environment.lane_states:
            lane_state.more = lane_state not in claimable  # not looked at: there may be some
            rate = lane_state.slots.shared_rate
            if rate is not None and lane_state.more and self._fitting(lane_state) > 0:
                lane_state.more = await rate.look(lane_state)
        if len(claimable) > 1:
            ready = await probe(environment.database, [lane_state.store for lane_state in claimable])
            claimable = [lane_state for lane_state in claimable if lane_state.store in ready]
        for lane_state in environment.lane_states:
            if lane_state in claimable and not self._higher_lane_can_claim(environment):
                await self._claim_or_pause(lane_state)
            elif lane_state in claimable:
                lane_state.more = True
            environment.above.append(lane_state)

    def _higher_lane_can_claim(self, environment: Environment) -> bool:
        """A lane of higher priority has more rows and free slots again: this round ends, and the next is for it."""
        return any(lane_state.more and self._ask(lane_state) > 0 for lane_state in environment.above)

    def _ask(self, lane_state: LaneState) -> int:
        """How many rows to take now: as many as fit, and as a shared rate allows."""
        fitting, rate = self._fitting(lane_state), lane_state.slots.shared_rate
        return fitting if rate is None or fitting <= 0 else min(fitting, rate.free)

    def _fitting(self, lane_state: LaneState) -> int:
        """How many rows there is room for: what can start, and the prefetch of the topmost lane."""
        outcomes, paused = len(lane_state.outcomes), lane_state.paused_until > time.monotonic()
        if self.quarantine.pending is not None or paused or outcomes > _BACKLOG:
            return 0  # first write what has ended
        if not lane_state.beats:
            return 0  # its lease could run out while the handler runs
        slots = lane_state.slots
        # Slots that a higher lane keeps until its gates have learned how runs ended are not free for lower lanes.
        above = itertools.takewhile(lambda other: other is not lane_state, lane_state.environment.above)
        room = slots.room(sum(other.occupied for other in above)) - lane_state.occupied
        if self.turns is not None:
            gated = lane_state.store.gate_learning is not None
            return self.turns.share(lane_state, room, slots.prefetch(gated) if self._may_prefetch(lane_state) else 0)
        if not self._may_prefetch(lane_state):
            return max(room, 0)
        most = slots.most
        ask = min(room + slots.prefetch(lane_state.store.gate_learning is not None), most)
        # With work at hand, small claims would only cost round trips.
        return 0 if slots.stocked and ask < most // 2 else max(ask, 0)

    def _may_prefetch(self, lane_state: LaneState) -> bool:
        """Whether rows may be claimed before a slot is free: only for the topmost lane, only with renewal, and not
        through a gate that goes by when runs start, or how they end.
        """
        first = (lane_state.environment if self.turns is not None else self.environments[0]).lane_states
        topmost = bool(first) and first[0] is lane_state and lane_state.store.binding.renew != "none"
        return topmost and lane_state.only_limits

    async def _claim_or_pause(self, lane_state: LaneState) -> None:
        """A lane whose claim the database refuses does not stop the others."""
        environment, store = lane_state.environment, lane_state.store
        try:
            if not lane_state.execution.needs or await self.lane_resources.are_open(lane_state):
                await self._claim(lane_state)
                lane_state.refused = None
        except UnreadableReply as error:
            # The rows are this worker's, and the next look reads them so that only the one value is missing.
            lane_state.reply_lost, environment.look = store.marked, True
            hint = "only the run that asks for the value fails"
            lane_state.emit("value_unreadable", logging.WARNING, error=error.message, hint=hint)
        except Unserved as error:
            lane_state.altered = error.altered
            lane_state.paused_until = time.monotonic() + (0.0 if error.altered else _REFUSED_PAUSE)
            lane_state.refused, environment.look = error.message, environment.look or error.altered
            hint = "rowmill check shows what the lane lacks"
            lane_state.emit("statement_refused", logging.ERROR, error=error.message, hint=hint)
        except Refused as error:
            lane_state.paused_until, lane_state.refused = time.monotonic() + _REFUSED_PAUSE, error.message
            hint = "rowmill sql shows the statement"
            lane_state.emit("statement_refused", logging.ERROR, error=error.message, retry_in=_REFUSED_PAUSE, hint=hint)
        except (Unreachable, asyncio.CancelledError):
            lane_state.reply_lost = store.marked
            raise
        finally:
            rows, lane_state.store.refused_rows = lane_state.store.refused_rows, []
            for row in rows:
                lane_state.row_refused(row)

    async def _claim(self, lane_state: LaneState) -> None:
        wanted, rate = self._ask(lane_state), lane_state.slots.shared_rate
        if rate is None:
            await self._claim_up_to(lane_state, wanted)
        elif wanted > 0:
            rate.claiming += wanted
            try:
                await self._claim_up_to(lane_state, wanted)
                rate.note(lane_state, more=lane_state.more)
            finally:
                rate.claiming -= wanted
        else:
            lane_state.more = True  # another environment was faster

    async def _claim_up_to(self, lane_state: LaneState, wanted: int) -> None:
        slots = lane_state.slots
        most = slots.most
        if wanted > 0 and slots.lane.backfills is not None and slots.lane.backfill_pace is not None:
            rows, period = slots.lane.backfill_pace
            wanted, lane_state.paused_until = min(wanted, rows), time.monotonic() + period.total_seconds()
        send = lane_state.store.claim if self.turns is None else functools.partial(self.turns.claim, lane_state)
        next_claim: asyncio.Task[list[Claim]] | None = None
        turns = 0
        while wanted > 0:
            ask = min(wanted, most)
            claims = await (next_claim or send(ask))
            turns, lane_state.more = turns + 1, len(claims) == ask
            lane_state.held_back = not lane_state.more
            self.take_in(lane_state, claims)
            if suspects := await lane_state.store.suspects(claims):
                claims = await self.quarantine.hold_back(lane_state, claims, suspects)
            slots.put(lane_state, claims)
            if self.stopping:  # they came too late to be started
                self.shutdown.give_back_prefetched()
            go_on = lane_state.more and not self.stopping and self.quarantine.pending is None
            go_on = go_on and (self.turns is None or self.turns.alone(lane_state.environment))
            wanted = wanted - ask if go_on else 0
            if go_on and not wanted and turns < _CLAIMS_IN_A_ROW and self._may_prefetch(lane_state):
                wanted = self._ask(
                    lane_state
                )  # only the topmost lane goes on: a lower lane checks the higher ones first
            # The next claim is sent before the runs of this one begin, because a run may block the event loop.
            next_claim = asyncio.create_task(send(min(wanted, most))) if wanted > 0 else None
            slots.start()

    async def recover(self, lane_state: LaneState) -> list[Claim]:
        """After a lost reply: find the rows that were claimed all the same."""
        if not lane_state.reply_lost:
            return []
        # A lane beside this one on the same table may hold rows that look the same.
        table = lane_state.store.binding.table.fullname
        beside = [one for one in lane_state.environment.lane_states if one.store.binding.table.fullname == table]
        # Taken before the query: a row that is settled meanwhile still shows as running in its result.
        known = {key for other in beside for key in other.claims}
        rows = await lane_state.store.mine()
        claims = [c for c in rows if c.key not in known and not any(c.key in other.claims for other in beside)]
        lane_state.reply_lost = False
        self.take_in(lane_state, claims)
        return claims

    def take_in(self, lane_state: LaneState, claims: list[Claim]) -> None:
        """Register new claims. An older claim on the same row is lost."""
        held = lane_state.claims
        for older in [held[claim.key] for claim in claims if claim.key in held] if held else ():
            self._lose(lane_state, older)  # a row this process still works on, that came back to it
        if claims:
            lane_state.environment.worked_at = time.monotonic()
            lane_state.claimed(claims)

    def lose_from_thread(self, lane_state: LaneState, claim: Claim) -> None:
        """The heartbeat thread found a row that no longer shows its claim: lost, unless its outcome was sent."""
        if id(claim) in lane_state.ending:
            return
        claim.lost = True  # a handler that asks job.lost sees it at once, even while the loop is blocked
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._lose, lane_state, claim)

    def take_over(self, dead: DeadWorker) -> None:
        """Give back what another worker held that is known to be dead, wherever it worked."""
        for environment in self.environments:
            self._take_over(environment, dead)

    def take_over_from_thread(self, environment: Environment, dead: DeadWorker) -> None:
        """The heartbeat thread found another worker dead."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take_over, environment, dead)

    def _take_over(self, environment: Environment, dead: DeadWorker) -> None:
        if environment.reachable:
            task = asyncio.create_task(self.guarded(environment, environment.take_over(dead)))
            self._beside.add(task)
            task.add_done_callback(self._beside.discard)

    def wake_from_thread(self, environment: Environment) -> None:
        """The heartbeat thread can renew again: look what is ready."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(environment.wake)

    def listen_again_from_thread(self, environment: Environment) -> None:
        """The heartbeat thread misses the lock of the session on which this worker listens."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(environment.session.end)

    def _lose(self, lane_state: LaneState, claim: Claim) -> None:
        if lane_state.claims.get(claim.key) is claim:
            claim.lost = True
            lane_state.drop([claim])
            lane_state.slots.lose(claim)

    def _thread_pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            count = sum(slots.lane.concurrency for slots in self.slots.values())
            self._threads = ThreadPoolExecutor(min(count, self.capacity.limit), "rowmill-handler")
        return self._threads

    # -- settle

    def run_ended(self, lane_state: LaneState, claim: Claim, job: Job, settlement: Settlement | None) -> None:
        """A run is over. Its outcome is written with the next batch, unless it was lost, or the run wrote it itself."""
        if claim.lost and job.finished is None:
            lane_state.drop([claim])
            lane_state.lost(claim)
        elif settlement is not None:
            lane_state.outcomes.append(settlement)
            if lane_state.settling is None:
                self.settle_soon(lane_state)
        elif job.finished is not None:  # committed, even if a late renewal marked the claim as lost
            self._written(lane_state, [job.finished])
            if lane_state.unlearned:
                self.settle_soon(lane_state)
        self.wake()

    def settle_all(self) -> None:
        """Write what has ended, everywhere."""
        for lane_state in self.lane_states:
            self.settle_soon(lane_state)

    def settle_soon(self, lane_state: LaneState) -> None:
        """Start to write outcomes, beside the next claim. Runs that end meanwhile make the next batch."""
        if lane_state.settling is None and self._may_settle(lane_state):
            lane_state.settling = asyncio.create_task(self._settle_batches(lane_state))

    @staticmethod
    def _may_settle(lane_state: LaneState) -> bool:
        at = max(lane_state.environment.retry_at, lane_state.settle_again)
        return lane_state.unwritten and time.monotonic() >= at

    async def _settle_batches(self, lane_state: LaneState) -> None:
        try:
            while self._may_settle(lane_state):
                await self.guarded(lane_state.environment, self._settle(lane_state))
        except Exception as error:
            self.fail(error)
        finally:
            lane_state.settling = None
            self.wake()

    @property
    def unsettled(self) -> bool:
        """Some outcome is not written yet."""
        return bool(self._settle_later) or any(one.unwritten or one.settling for one in self.lane_states)

    async def _settle(self, lane_state: LaneState) -> None:
        batch, lane_state.outcomes = lane_state.outcomes[:_SETTLE_BATCH], lane_state.outcomes[_SETTLE_BATCH:]
        lane_state.learning = len(batch)
        try:
            await self._write(lane_state, batch)
            lane_state.settle_pause = 0.0
        except Unserved as error:
            self._postpone_settling(lane_state, error)
            return
        finally:
            lane_state.learning = 0
        if lane_state.store.gate_learning is not None:
            await self._learn(lane_state)

    async def _learn(self, lane_state: LaneState) -> None:
        """Let the gates learn how runs ended; rows that they held back may pass now."""
        batch, lane_state.unlearned = lane_state.unlearned, []
        lane_state.learning += len(batch)
        assert lane_state.store.gate_learning is not None
        try:
            for change in await lane_state.store.gate_learning.note(batch):
                lane_state.breaker_changed(change)
        except BaseException:
            lane_state.unlearned[:0] = batch
            raise
        finally:
            lane_state.learning -= len(batch)
        lane_state.environment.look |= bool(batch) and lane_state.held_back

    async def _write(self, lane_state: LaneState, batch: list[Settlement]) -> None:
        if lost := [settlement.claim for settlement in batch if settlement.claim.lost]:
            for claim in lost:
                lane_state.lost(claim)
            batch = [settlement for settlement in batch if not settlement.claim.lost]
        if not batch:
            return
        claims = [settlement.claim for settlement in batch]
        lane_state.ending.update(map(id, claims))
        try:
            await lane_state.begin_settle(claims)
            report = await lane_state.store.settle(batch)
        except BaseException:
            lane_state.outcomes[:0] = batch
            raise
        finally:
            lane_state.end_settle(claims)
        self._process_report(lane_state, report)

    def _process_report(self, lane_state: LaneState, report: Report) -> None:
        """What became of a batch: counted, and what could not be written yet is kept for later."""
        ended = [*report.written, *report.refused]
        lane_state.environment.worked_at = time.monotonic()
        lane_state.drop([settlement.claim for settlement in (*ended, *report.lost)])
        self._written(lane_state, ended)
        if self.turns is not None and ended:
            self.turns.ran(lane_state, ended)
        for settlement in ended:
            if settlement.delay is not None:
                lane_state.environment.will_be_due(settlement)
        for settlement in report.lost:
            lane_state.lost(settlement.claim)
        now = time.monotonic()
        if "run_after" not in lane_state.store.binding.roles and ended and not any(s.kind == "done" for s in ended):
            # Nothing in the table keeps these rows back: without a pause they would be claimed again at once, forever.
            delays = [s.delay.total_seconds() for s in ended if s.delay is not None]
            lane_state.paused_until = now + min(max(delays, default=0.0), _NO_RUN_AFTER)
        self._settle_later += [(now + _LOCKED_AGAIN, lane_state, settlement) for settlement in report.locked]
        for settlement, words in report.stuck:
            self._refused(lane_state, settlement, words)
        for settlement, error in report.unhooked:
            lane_state.outcomes.append(unhooked(lane_state.store, settlement, error))
            self.wake()

    @staticmethod
    def _written(lane_state: LaneState, ended: list[Settlement]) -> None:
        """Outcomes are committed: count them, queue them for the gates, and let waiting parent jobs go on."""
        lane_state.settled(ended)
        if lane_state.store.gate_learning is not None:
            lane_state.unlearned += ended
        if lane_state.joins is not None:
            parents = {s.claim.row[s.claim.holder.at["parent_id"]] for s in ended if s.kind in FINAL}
            awaited = bool(parents) and time.monotonic() < lane_state.joins.awaited_until
            if awaited or parents - {None}:
                lane_state.joins.ended(parents - {None})

    def _postpone_settling(self, lane_state: LaneState, error: Unserved) -> None:
        """No row is at fault: the outcomes wait, and the lane claims nothing meanwhile."""
        lane_state.settle_pause = min(max(2 * lane_state.settle_pause, _SETTLE_AGAIN[0]), _SETTLE_AGAIN[1])
        lane_state.settle_again = lane_state.paused_until = time.monotonic() + lane_state.settle_pause
        lane_state.altered = lane_state.altered or error.altered
        hint = "outcomes are kept and written once the table or the privilege is restored; no row fails"
        if "permission denied" in error.message and lane_state.store.returned:
            columns = sorted(lane_state.store.returned)
            written = " ".join(f"--writes {lane_state.name}.{column}" for column in columns)
            hint += f". To grant what the handler returns: rowmill sql APP --role NAME {written}"
        lane_state.emit(
            "statement_refused", logging.ERROR, error=error.message, retry_in=lane_state.settle_pause,
            waiting=len(lane_state.outcomes), hint=hint,
        )  # fmt: skip

    def _refused(self, lane_state: LaneState, settlement: Settlement, words: str) -> None:
        """The database refuses every outcome of this row: try a few more times, then report it and pass it over."""
        given_up = self.shutdown.settling_last or settlement.refusals >= len(self.stuck_pauses)
        hint = "the table refuses the outcome of this row; rowmill tries again"
        if given_up:
            lane_state.drop([settlement.claim])
            lane_state.store.passed.add(settlement.claim.key)
            lane_state.stuck(settlement, words)
            hint = "a trigger or constraint refuses this row's outcome; it stays running until that is fixed"
        else:
            pause = self.stuck_pauses[settlement.refusals]
            settlement.refusals += 1
            self._settle_later.append((time.monotonic() + pause, lane_state, settlement))
        lane_state.emit(
            "settle_refused", logging.ERROR, id=settlement.claim.id, outcome=settlement.kind, error=words,
            given_up=given_up, hint=hint,
        )  # fmt: skip

    @property
    def settle_later_at(self) -> float:
        """When something that could not be written is tried again."""
        return min((at for at, *_ in self._settle_later), default=math.inf)

    def settle_delayed(self, now: float) -> None:
        """Outcomes that could not be written, because somebody had the row locked, are tried again."""
        if not self._settle_later:
            return
        due = [entry for entry in self._settle_later if entry[0] <= now]
        self._settle_later = [entry for entry in self._settle_later if entry[0] > now]
        for _, lane_state, settlement in due:
            lane_state.outcomes.append(settlement)

    # -- time

    def _pause(self) -> float:
        """Seconds until the next thing that is known to come."""
        now = time.monotonic()
        turns = self.turns
        waiting = {one for one in self.environments if one.leaving or (turns is not None and turns.has_to_wait(one))}
        times = [one.next_time() for one in self.environments if one not in waiting] + [self.settle_later_at]
        times += [rate.next_time(now) for rate in self.shared_rates.values()]
        if waiting:
            times.append(now + 0.5)
        wanted = self.wanted if turns is None else turns.may_start
        if any(wanted(environment, now) for environment in self.environments):
            times.append(now)
        if self.drain:
            times.append(now + 0.2)
        if any(slots.busy for slots in self.slots.values()):
            times.append(now + 1.0)
        return min(times) - now
