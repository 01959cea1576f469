"""The worker: claim, dispatch, settle. One loop over environments in order and lanes by priority, strictly.

A round settles what has ended and, where something may be ready and there is room for it, claims from the top
down. Between rounds the worker waits: for a run to end, for a wake-up, or for the next poll.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..clock import Clock
from ..declare.lane import Lane
from ..errors import (
    Busy,
    DatabaseError,
    DeclarationError,
    Refused,
    ResourceFailed,
    Unreachable,
    UnreadableReply,
    Unserved,
    WorkerIdTaken,
)
from ..events import Events
from ..store import Database, open_lane, probe
from ..store.lane.claim import Claim, Settlement
from ..store.lane.sweep import TAKEN_BACK
from . import worker_id as worker_ids
from .counters import Counters
from .environment import Environment, WorkerCallbacks
from .execute import Execution
from .isolate import importable
from .job import Job
from .lane_state import LaneState
from .resources import Resource, Resources
from .running_marks import RunningMarks
from .settle import Settler
from .shutdown import Shutdown
from .slots import AUTO_BATCH, Capacity, Slots
from .task_execution import TaskExecution
from .traced_lane import trace_held
from .wake import WakeUp

_BACKLOG = 2000  # unwritten outcomes before claiming stops
_CLAIMS = 10  # one after another, before the worker looks around
_FEW = 16  # rows taken back from a dead worker that run side by side
_LOOK_AGAIN = 1.0  # seconds between two looks at a table that was altered and misses what its lane needs
_REST = 10.0  # seconds for which a lane whose claim was refused is left alone
_OPENING = 5.0  # seconds that lanes below wait for the resources of one above, so that the order holds
_OPEN_AGAIN = (1.0, 60.0)  # seconds before a resource that failed to open is tried again: first, and at most


def check_handler(lane: Lane, resources: Resources) -> None:
    """Refuse a handler that asks for what no resource answers to, or that its process could not import."""
    resources.check(lane.resources(), f"lane {lane.name!r}")
    if lane.isolation == "process":
        importable(lane)


class Worker:
    """One worker process's engine. ``run`` works until stopped, or, draining, until nothing is ready or running."""

    def __init__(
        self,
        environments: Sequence[tuple[str, Database]],
        lanes: Sequence[Lane],
        *,
        resources: dict[str, Resource] | None = None,
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
    ) -> None:
        self.id = worker_id or worker_ids.new()
        self.incarnation = incarnation or uuid.uuid4().hex[:8]
        self.events = events or Events()
        self.drain, self.grace = drain, grace
        #: The process is the worker's own: it may be ended when nothing else helps, and is then started again.
        self.expendable = expendable
        self.bell = WakeUp()
        self.resources = Resources(resources or {})
        self.capacity = Capacity(concurrency)
        self.tally = Counters(self.events, self.id)
        ordered = sorted(lanes, key=lambda lane: lane.priority)
        self.slots = {lane.name: Slots(lane, self.capacity, self._ended, self.crashed, self.id) for lane in ordered}
        self.places = [Environment(name, db, [ln for ln in ordered if ln.serves(name)]) for name, db in environments]
        self.settler = Settler(self.events, self.tally, self._guarded, self.bell.ring, self.crashed)
        self._shutdown = Shutdown(self)
        self._crew = WorkerCallbacks(
            self.events,
            clock or Clock(),
            self.tally,
            self._shutdown.snapshot,
            self._lost_in_thread,
            self.bell.ring,
            self._shutdown.watch_loop,
            register,
            replaces,
            lambda: self._fallen,
        )
        #: Where a drain ended before all was done: rows that are paused without end, by environment and lane.
        self.held_back: list[dict[str, Any]] = []
        self._fallen: frozenset[int] | None = None
        #: A lane with rows that were taken back from a dead worker: they run while this process holds nothing else.
        self._apart: LaneState | None = None
        self._suspects: list[Claim] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._started = self.stopping = self.hurried = self.recycling = False
        self._above: list[LaneState] = []
        self._where: dict[int, Environment] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The thread that its event loop runs in.
        self.thread = 0
        self._crash: BaseException | None = None
        self._under_way: asyncio.Future[None] | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self.ticked = time.monotonic()
        #: It has looked everywhere once: what is wrong with a declaration was told by then.
        self.started = asyncio.Event()
        for lane in ordered:
            check_handler(lane, self.resources)

    def keep_running_marks(self, file: int) -> None:
        """Keep what runs in a file that outlives this process, after reading what the process before it left there."""
        flight = RunningMarks(file, [slots.lane.concurrency for slots in self.slots.values()])
        self._fallen = flight.before
        for slots, cells in zip(self.slots.values(), flight.cells, strict=True):
            slots.in_flight = cells

    # -- life

    async def run(self) -> Counters:
        """Work. Returns what was done."""
        self._loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        self._tick()
        try:
            while not self.stopping:
                await self._round_or_stop()
                self._started = True
                self.started.set()
                if self._crash is not None:
                    raise self._crash
                if self.drain and await self._shutdown.drained():
                    break
                if not self.stopping:
                    await self.bell.wait(self._pause())
            await self._shutdown.wind_down()
        finally:
            await self._shutdown.close()
            if self._ticking is not None:
                self._ticking.cancel()
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
        return self.tally

    def _tick(self) -> None:
        """A sign that the loop is not blocked, for the heartbeat thread to see."""
        self.ticked = time.monotonic()
        if self._loop is not None:
            self._ticking = self._loop.call_later(0.5, self._tick)

    async def _round_or_stop(self) -> None:
        """A round; a second stop does not wait for the statement that is under way."""
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
        """First call: claim nothing more, let runs finish. Second call: at once."""
        self.hurried = self.stopping
        self.stopping = True
        if self.hurried and self._under_way is not None:
            self._under_way.cancel()
        self.bell.ring()

    # -- a round

    async def _round(self) -> None:
        now = time.monotonic()
        for place in self.places:
            place.fall_due(now)
        self.settler.retry_later(now)
        self.settler.all(self.places)
        self._shutdown.watch(now)
        if self._apart is not None and not self.stopping:
            await self._run_apart(self._apart)
        if self.stopping or not any(self._wanted(place, now) for place in self.places):
            return
        self._above = []
        # All are opened before the first row is claimed anywhere: what is wrong is told before anything is done.
        new = [place for place in self.places if not place.opened and time.monotonic() >= place.retry_at]
        await asyncio.gather(*(self._guarded(place, place.examine(self._crew)) for place in new))
        reached = [place for place in new if time.monotonic() >= place.retry_at]
        await asyncio.gather(*(self._guarded(place, self._open(place)) for place in reached))
        for place in self.places:
            # All above it are looked at too: nothing below may start while something above is ready.
            if time.monotonic() >= place.retry_at:
                await self._guarded(place, self._take(place))

    async def _guarded(self, place: Environment, step: Coroutine[Any, Any, None]) -> None:
        """An environment that is away does not stop the others; it is tried again, and again later."""
        try:
            await step
            place.served()
        except (DeclarationError, WorkerIdTaken) as error:
            # At the start that is for the user to mend; but one that comes back wrong must not end the others' work.
            if not self._started:
                raise
            place.failed()
            self.events.emit("environment_wrong", logging.ERROR, environment=place.name, error=str(error))
        except DatabaseError as error:
            if self.drain and not place.opened and not isinstance(error, Busy):
                raise
            if isinstance(error, Unreachable):
                place.lost(self._crew)
                self.events.emit("environment_down", logging.ERROR, environment=place.name, error=error.message)
                return
            name = "statement_refused" if isinstance(error, Refused) else "environment_busy"
            pause = round(place.failed(), 1)
            self.events.emit(name, logging.ERROR, environment=place.name, error=error.message, retry_in=pause)

    def _wanted(self, place: Environment, now: float) -> bool:
        """Whether a look is worth a statement now."""
        if now < place.retry_at:
            return False
        if not place.opened or place.look or now >= place.next_poll:
            return True
        return any(held.more and self._ask(held) > 0 for held in place.held)

    async def _open(self, place: Environment) -> None:
        await place.open(self._crew)
        for held in place.held:
            if self.events.tracer is not None:
                trace_held(held, self.events.tracer)
            kind = TaskExecution if held.store.lane.own else Execution
            execution = kind(held, self.resources, self._thread_pool)
            self.slots[held.store.lane.name].executions[id(held)] = execution
            self._where[id(held)] = place

    async def _take(self, place: Environment) -> None:
        """Claim what is ready, from the lane of highest priority down, as far as there is room."""
        if not place.opened or self._overtaken():
            return
        place.looked()
        for held in place.held:
            if held.altered and held.rests_until <= time.monotonic():
                await self._look_at_table(place, held)
            if claims := await self.recover(held):
                slots = self.slots[held.store.lane.name]
                slots.put(held, claims)
                slots.start()
        open_to = [held for held in place.held if self._ask(held) > 0]
        for held in place.held:
            held.more = held not in open_to  # not looked at: there may be some
        if len(open_to) > 1:
            ready = await probe(place.database, [held.store for held in open_to])
            open_to = [held for held in open_to if held.store in ready]
        for held in place.held:
            if held in open_to and not self._overtaken():
                await self._claim_or_rest(place, held)
            elif held in open_to:
                held.more = True
            self._above.append(held)

    def _overtaken(self) -> bool:
        """Room has come up, while this round went down, for a lane above that has more: the next round is for it."""
        return any(held.more and self._ask(held) > 0 for held in self._above)

    def _ask(self, held: LaneState) -> int:
        """How many rows to take now: what can start, and, for the topmost lane, a little more to have at hand."""
        if self._apart is not None or held.rests_until > time.monotonic() or len(held.outcomes) > _BACKLOG:
            return 0  # what has ended is written before more is begun
        slots = self.slots[held.store.lane.name]
        # What a lane above does not give away before its gates have heard how a run ended is not to be had below.
        above = itertools.takewhile(lambda other: other is not held, self._above)
        room = slots.room(sum(other.gates.occupied(len(other.outcomes)) for other in above if other.gates is not None))
        if held.gates is not None:
            room -= held.gates.occupied(len(held.outcomes))
        if not self._may_fetch_ahead(held):
            return max(room, 0)
        most = slots.lane.batch or AUTO_BATCH
        ask = min(room + slots.ahead(held.gates is not None), most)
        # With work at hand, small claims would only cost round trips.
        return 0 if slots.buffered and ask < most // 2 else max(ask, 0)

    def _may_fetch_ahead(self, held: LaneState) -> bool:
        """Only where nothing is higher, so that nothing can be kept waiting, and where waiting rows are renewed; and
        not through a gate that goes by when runs start, or how they end.
        """
        first = self.places[0].held
        topmost = bool(first) and first[0] is held and held.store.binding.renew != "none"
        return topmost and (held.gates is None or all(group.only_limits for group in held.store.lane.groups))

    async def _claim(self, held: LaneState) -> None:
        slots = self.slots[held.store.lane.name]
        wanted = self._ask(held)
        most = slots.lane.batch or AUTO_BATCH
        if wanted > 0 and slots.lane.backfills is not None and slots.lane.backfill_pace is not None:
            rows, time_ = slots.lane.backfill_pace
            wanted, held.rests_until = min(wanted, rows), time.monotonic() + time_.total_seconds()
        coming: asyncio.Task[list[Claim]] | None = None
        turns = 0
        while wanted > 0:
            ask = min(wanted, most)
            claims = await (coming or held.store.claim(ask))
            turns, held.more = turns + 1, len(claims) == ask
            if held.gates is not None:
                held.gates.held_back = not held.more
            self._take_in(held, claims)
            slots.put(held, await self._without_suspects(held, claims))
            go_on = held.more and not self.stopping and self._apart is None
            wanted = wanted - ask if go_on else 0
            if go_on and not wanted and turns < _CLAIMS and self._may_fetch_ahead(held):
                wanted = self._ask(held)  # the topmost lane alone: those below look up first
            # The next claim is on its way before the runs of this one begin: they may not let go of the loop.
            coming = asyncio.create_task(held.store.claim(min(wanted, most))) if wanted > 0 else None
            slots.start()

    # -- rows that were taken back from a dead worker

    async def _without_suspects(self, held: LaneState, claims: list[Claim]) -> list[Claim]:
        """Claims less those of suspects. They go back, to be run apart as soon as this process holds nothing else."""
        suspects = await held.store.suspects(claims)
        if not suspects:
            return claims
        if not self._holds_others():  # given back first, they would have to pass a rate or a pace again, for ever
            return await self._pick_apart(held, claims, suspects)
        self._apart = self._apart or held
        await self._settle_now(held, [Settlement(claim, "release") for claim in claims if claim.key in suspects])
        return [claim for claim in claims if claim.key not in suspects]

    async def _settle_now(self, held: LaneState, settlements: list[Settlement]) -> None:
        """Write these before anything is started: what is held when a process dies is counted."""
        held.outcomes += settlements
        self.settler.soon(self._where[id(held)], held)
        while held.settling is not None:
            await asyncio.wait([held.settling])

    async def _run_apart(self, held: LaneState) -> None:
        """Run suspects a few at a time, or alone: one that kills the process takes hardly any other with it."""
        place, slots = self._where[id(held)], self.slots[held.store.lane.name]
        if self._holds_others() or time.monotonic() < place.retry_at:
            return
        self._apart, place.look = None, True
        await self._guarded(place, self._next_apart(held, slots))

    async def _next_apart(self, held: LaneState, slots: Slots) -> None:
        store = held.store
        if self._suspects:
            await store.clear_suspects(self._suspects)
            self._suspects = []
        try:
            claims = await store.claim(min(_FEW, slots.lane.concurrency))
        except Refused:
            return  # the next claim is refused, too, and says so
        except (Unreachable, asyncio.CancelledError):
            held.unsure = store.marked
            raise
        self._take_in(held, claims)
        suspects = await store.suspects(claims)
        if suspects:
            claims = await self._pick_apart(held, claims, suspects)
        slots.put(held, claims)
        slots.start()

    async def _pick_apart(self, held: LaneState, claims: list[Claim], suspects: dict[Any, int]) -> list[Claim]:
        """Of these claims, the suspects that run now: some, or one alone. The others go back."""
        store = held.store
        words = store.error_text(TAKEN_BACK)
        poison = [claim for claim in claims if store.is_poison(claim, suspects.get(claim.key, 0))]
        first = [claim for claim in claims if claim.key in suspects and claim not in poison][:_FEW]
        few = store.survives_reclaims and all(suspects[claim.key] == 1 for claim in first)
        self._suspects = first if few else first[:1]
        ended = [Settlement(claim, "dead", error=words) for claim in poison]
        others = [claim for claim in claims if claim not in poison and claim not in self._suspects]
        await self._settle_now(held, [*ended, *(Settlement(claim, "release") for claim in others)])
        self._apart = held
        return self._suspects

    def _holds_others(self) -> bool:
        """Something runs, waits for a slot, or is not written yet."""
        return any(slots.busy or slots.buffered for slots in self.slots.values()) or self.settler.busy(self.places)

    async def _claim_or_rest(self, place: Environment, held: LaneState) -> None:
        """A lane whose claim the database refuses does not stop the others."""
        try:
            if await self._equipped(place, held):
                await self._claim(held)
                held.refused = None
        except UnreadableReply as error:
            # The rows are this worker's, and the next look reads them so that only the one value is missing.
            held.unsure, place.look = held.store.marked, True
            self.events.emit(
                "value_unreadable", logging.WARNING, environment=place.name, lane=held.store.lane.name,
                error=error.message, hint="only the run that asks for the value fails",
            )  # fmt: skip
        except Unserved as error:
            held.altered = error.altered
            held.rests_until = time.monotonic() + (0.0 if error.altered else _REST)
            held.refused, place.look = error.message, place.look or error.altered
            self.events.emit(
                "statement_refused", logging.ERROR, environment=place.name, lane=held.store.lane.name,
                error=error.message, hint="rowmill check shows what the lane lacks",
            )  # fmt: skip
        except Refused as error:
            held.rests_until, held.refused = time.monotonic() + _REST, error.message
            self.events.emit(
                "statement_refused", logging.ERROR, environment=place.name, lane=held.store.lane.name,
                error=error.message, retry_in=_REST, hint="rowmill sql shows the statement",
            )  # fmt: skip
        except (Unreachable, asyncio.CancelledError):
            held.unsure = held.store.marked
            raise
        finally:
            self._tell_refused(held)

    async def _equipped(self, place: Environment, held: LaneState) -> bool:
        """Whether the handler's resources are open. They are opened when the first row is ready and before it is
        claimed: where that fails, the lane rests and its rows stay as they are.
        """
        needs = self.slots[held.store.lane.name].executions[id(held)].needs
        if self.resources.are_open(needs):
            return True
        if not await probe(place.database, [held.store]):
            return False
        held.rests_until = math.inf
        opening = asyncio.create_task(self._open_resources(place, held, needs))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        if held.unopened is None:
            await asyncio.wait([opening], timeout=_OPENING)
        return self.resources.are_open(needs) and not self.stopping

    async def _open_resources(self, place: Environment, held: LaneState, names: list[str]) -> None:
        try:
            await self.resources.get(names)
            held.unopened, held.open_pause, held.rests_until = None, 0.0, 0.0
        except ResourceFailed as error:
            held.open_pause = min(max(2 * held.open_pause, _OPEN_AGAIN[0]), _OPEN_AGAIN[1])
            held.unopened, held.rests_until = error, time.monotonic() + held.open_pause
            self.tally.unopened(held, error, held.open_pause)
        place.look = True
        self.bell.ring()

    async def stop_opening(self) -> None:
        """Give up what is still being opened: the worker stops."""
        for opening in self._opening:
            opening.cancel()
        if self._opening:
            await asyncio.wait(self._opening, timeout=_OPENING)

    async def _look_at_table(self, place: Environment, held: LaneState) -> None:
        """After ALTER TABLE: bind the lane again. A lane that misses what it needs rests, and looks again later."""
        where = {"environment": place.name, "lane": held.store.lane.name}
        try:
            fresh = await open_lane(
                held.store.lane, place.name, place.database, held.store.clock, self.id, self.incarnation
            )
            if gone := held.store.returned - set(fresh.binding.columns):
                raise DeclarationError(
                    f"the table no longer has {', '.join(sorted(gone))}, which the handler returns",
                    hint="outcomes wait: bring the column back, or restart workers with a handler that does without it",
                )
        except DeclarationError as error:
            held.rests_until, held.refused = time.monotonic() + _LOOK_AGAIN, error.message
            self.events.emit("table_altered", logging.ERROR, **where, error=error.message, hint=error.hint)
            return
        held.rebind(fresh)
        if self.events.tracer is not None:
            trace_held(held, self.events.tracer)
        self.events.emit("table_altered", logging.WARNING, **where, hint="the lane goes on by the table as it is now")

    def _tell_refused(self, held: LaneState) -> None:
        """Rows that the database will not let be claimed are told, each once."""
        rows, held.store.refused_rows = held.store.refused_rows, []
        for row in rows:
            self.tally.refused(held, row)

    async def recover(self, held: LaneState) -> list[Claim]:
        """After a lost reply: rows that were claimed for us all the same are ours."""
        if not held.unsure:
            return []
        # A lane beside this one on the same table may hold rows that look the same.
        beside = [
            o for o in self._where[id(held)].held if o.store.binding.table.fullname == held.store.binding.table.fullname
        ]
        # As of before the question: what is settled while the answer is on its way shows in it as still running.
        known = {claim.key for other in beside for claim in other.all()}
        found = await held.store.mine()
        claims = [c for c in found if c.key not in known and not any(other.find(c.key) for other in beside)]
        held.unsure = False
        self._take_in(held, claims)
        return claims

    def _take_in(self, held: LaneState, claims: list[Claim]) -> None:
        """Claims that were made: held from now on."""
        for older in held.again(claims):
            self._lost(held, older)  # a row this process still works on, that came back to it
        if claims:
            held.add(claims)
            self.tally.claimed(held, len(claims))

    def _thread_pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            count = sum(slots.lane.concurrency for slots in self.slots.values())
            self._threads = ThreadPoolExecutor(min(count, self.capacity.limit), "rowmill-handler")
        return self._threads

    # -- the end of a run

    def _ended(self, held: LaneState, claim: Claim, job: Job, settlement: Settlement | None) -> None:
        if claim.lost and job.finished is None:
            held.drop([claim])
            self.tally.lost(held, claim)
        elif settlement is not None:
            held.outcomes.append(settlement)
            if held.settling is None:
                self.settler.soon(self._where[id(held)], held)
        elif job.finished is not None:  # and stands, even if a renewal that came too late took it for lost
            self.settler.finished(self._where[id(held)], held, job.finished)
        self.bell.ring()

    def crashed(self, error: BaseException) -> None:
        """The engine itself failed: better gone, and started again, than holding rows that nobody works on."""
        self._crash = error
        self.bell.ring()

    def _lost_in_thread(self, held: LaneState, claim: Claim) -> None:
        if id(claim) in held.ending:
            return
        claim.lost = True  # a handler that looks, sees it at once, even while the loop is blocked
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._lost, held, claim)

    def _lost(self, held: LaneState, claim: Claim) -> None:
        if held.find(claim.key) is claim:
            claim.lost = True
            held.drop([claim])
            self.slots[claim.lane].lose(claim)

    # -- time

    def _pause(self) -> float:
        """Until the next thing that is known to come."""
        now = time.monotonic()
        times = [place.next_time() for place in self.places] + [self.settler.next_time]
        if any(self._wanted(place, now) for place in self.places):
            times.append(now)
        if self.drain:
            times.append(now + 0.2)
        if any(slots.busy for slots in self.slots.values()):
            times.append(now + 1.0)
        return min(times) - now
