"""The worker: claim, dispatch, settle. One loop over environments in order and lanes by priority, strictly.

A round settles what has ended and, where something may be ready and there is room for it, claims from the top
down. Between rounds the worker waits: for a run to end, for a wake-up, or for the next poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import importlib.metadata
import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..claim import Claim, Report, Settlement
from ..clock import Clock
from ..errors import Busy, DatabaseError, DeclarationError, Refused, WorkerIdTaken
from ..events import Events
from ..lane import Lane
from ..store import Database, open_lane, probe
from ..store.fleet import Fleet, WorkerState
from .execute import Execution, decide
from .held import Held
from .isolate import importable
from .job import Job
from .renew import Renewer
from .resources import Resource, Resources
from .slots import AUTO_BATCH, Capacity, Slots
from .sweep import Sweeper
from .tally import Tally
from .wake import Bell, jittered, listen

_RETRY = (0.5, 30.0)  # how soon, and how late at most, a lost environment is tried again
_LOCKED_AGAIN = 0.5
_MOST_DUE = 10_000
RECYCLE = 75  # exit code: start this worker again


class Place:
    """One environment as this worker serves it."""

    def __init__(self, name: str, database: Database, lanes: list[Lane]) -> None:
        self.name, self.database, self.lanes = name, database, lanes
        self.held: list[Held] = []
        self.fleet: Fleet | None = None
        self.renewer: Renewer | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.opened = False
        self.look = True
        self.next_poll = 0.0
        self.retry_at = 0.0
        self.failures = 0
        self.due: list[float] = []
        self.poll = min((lane.poll.total_seconds() for lane in lanes), default=5.0)

    def failed(self) -> float:
        """It is away: how long to leave it alone."""
        pause = min(_RETRY[0] * 2.0**self.failures, _RETRY[1])
        self.failures = min(self.failures + 1, 10)
        self.retry_at = time.monotonic() + pause
        return pause


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
        replaces: str | None = None,
        concurrency: int | None = None,
        drain: bool = False,
        grace: float = 30.0,
        register: bool = True,
    ) -> None:
        self.id = worker_id or f"unified-worker-{uuid.uuid4()}"
        self.incarnation = uuid.uuid4().hex[:8]
        self.replaces = replaces
        self.events = events or Events()
        self.clock = clock or Clock()
        self.drain, self.grace, self.registers = drain, grace, register
        self.bell = Bell()
        self.resources = Resources(resources or {})
        self.capacity = Capacity(concurrency)
        ordered = sorted(lanes, key=lambda lane: lane.priority)
        self.slots = {lane.name: Slots(lane, self.capacity, self._ended, self.id) for lane in ordered}
        self.places = [Place(name, db, [ln for ln in ordered if ln.serves(name)]) for name, db in environments]
        self.tally = Tally(self.events, self.id)
        self._threads: ThreadPoolExecutor | None = None
        self._stopping = self._hard = self.recycling = False
        self._later: list[tuple[float, Held, Settlement]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        for lane in ordered:
            self.resources.check(lane.resources(), f"lane {lane.name!r}")
            if lane.isolation == "process":
                importable(lane)

    # -- life

    async def run(self) -> Tally:
        """Work. Returns what was done."""
        self._loop = asyncio.get_running_loop()
        try:
            while not self._stopping:
                await self._round()
                if self.drain and await self._drained():
                    break
                if not self._stopping:
                    await self.bell.wait(self._pause())
            await self._wind_down()
        finally:
            await self._close()
        return self.tally

    def stop(self) -> None:
        """First call: claim nothing more, let runs finish. Second call: at once."""
        self._hard = self._stopping
        self._stopping = True
        self.bell.ring()

    async def _open(self, place: Place) -> None:
        """Bind the environment's lanes, take the worker's id there, and begin to listen, renew and sweep."""
        stores = [
            await open_lane(lane, place.name, place.database, self.clock, self.id, self.incarnation)
            for lane in place.lanes
        ]
        if self.registers:
            place.fleet = await self._register(place)
        for store in stores:
            if store.needs_fleet and place.fleet is None:
                raise DeclarationError(
                    f"lane {store.lane.name!r}: only rowmill_workers could tell that a holder is gone",
                    hint="add a heartbeat_at or claimed_at column, or let the role create rowmill_workers",
                )
        place.held = [Held(store) for store in stores]
        for held in place.held:
            slots = self.slots[held.store.lane.name]
            slots.executions[id(held)] = Execution(held.store, self.resources, self._thread_pool)
        place.renewer = Renewer(
            place.held, [place.database] if place.fleet else [], self._snapshot, self._lost_in_thread, self.events
        )
        place.renewer.start()
        place.opened, place.failures = True, 0
        sweeper = Sweeper(place.held, self.events, lambda: self._look(place))
        await sweeper.at_start()
        place.tasks = [
            asyncio.create_task(sweeper.run()),
            asyncio.create_task(listen(place.database, lambda: self._look(place))),
        ]
        self.events.emit(
            "worker_started", worker=self.id, environment=place.name, lanes=[lane.name for lane in place.lanes]
        )

    async def _register(self, place: Place) -> Fleet | None:
        fleet = Fleet(place.database)
        try:
            await fleet.ensure()
        except Refused as error:
            self.events.emit(
                "workers_table_off", logging.WARNING, environment=place.name, error=error.message,
                hint="rowmill workers shows nothing here until the role may create rowmill_workers",
            )  # fmt: skip
            return None
        holder = await fleet.register(self._snapshot(), self.replaces)
        if holder is not None and holder["host"] == socket.gethostname() and not _lives(holder["pid"]):
            holder = await fleet.register(self._snapshot(), holder["incarnation"])
        if holder is not None:
            raise WorkerIdTaken(
                f"a live worker has the id {self.id!r} already: pid {holder['pid']} on {holder['host']},"
                f" last heard of {holder['silent_for']:.0f} s ago",
                hint="another --worker-id, or stop that worker first",
            )
        await fleet.forget()
        return fleet

    def _thread_pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            count = sum(lane.concurrency for lane in (slots.lane for slots in self.slots.values()))
            self._threads = ThreadPoolExecutor(min(count, self.capacity.limit or count), "rowmill-handler")
        return self._threads

    # -- a round

    async def _round(self) -> None:
        now = time.monotonic()
        self._fall_due(now)
        for place in self.places:
            if now >= place.retry_at:
                await self._guarded(place, self._settle_place(place))
        self._watch(now)
        if self._stopping or not any(self._wanted(place, now) for place in self.places):
            return
        for place in self.places:
            # All above it are looked at too: nothing below may start while something above is ready.
            if time.monotonic() >= place.retry_at:
                await self._guarded(place, self._take(place))

    async def _guarded(self, place: Place, step: Any) -> None:
        """An environment that is away does not stop the others; it is tried again, and again later."""
        try:
            await step
            place.failures = 0
        except (DeclarationError, WorkerIdTaken):
            raise
        except DatabaseError as error:
            if self.drain and not place.opened and not isinstance(error, Busy):
                raise
            pause = place.failed()
            self.events.emit(
                "environment_down",
                logging.WARNING,
                environment=place.name,
                error=error.message,
                retry_in=round(pause, 1),
            )
            place.look = True

    def _wanted(self, place: Place, now: float) -> bool:
        if now < place.retry_at:
            return False
        if not place.opened or place.look or now >= place.next_poll:
            return True
        return any(held.more and self.slots[held.store.lane.name].room() > 0 for held in place.held)

    async def _take(self, place: Place) -> None:
        """Claim what is ready, from the lane of highest priority down, as far as there is room."""
        if not place.opened:
            await self._open(place)
        place.look = False
        place.next_poll = time.monotonic() + jittered(place.poll)
        open_to = [held for held in place.held if self._ask(held) > 0]
        for held in place.held:
            held.more = held not in open_to  # not looked at: there may be some
        if len(open_to) > 1:
            ready = await probe(place.database, [held.store for held in open_to])
            open_to = [held for held in open_to if held.store in ready]
        for held in open_to:
            await self._claim(held)

    def _ask(self, held: Held) -> int:
        """How many rows to take now: what can start, and, for the topmost lane, a little more to have at hand."""
        slots = self.slots[held.store.lane.name]
        room = slots.room()
        if not self._may_fetch_ahead(held):
            return max(room, 0)
        most = slots.lane.batch or AUTO_BATCH
        ask = min(room + slots.ahead(), most)
        # With work at hand, small claims would only cost round trips.
        return 0 if slots.buffered and ask < most // 2 else max(ask, 0)

    def _may_fetch_ahead(self, held: Held) -> bool:
        """Only where nothing is higher, so that nothing can be kept waiting, and where waiting rows are renewed."""
        first = self.places[0].held
        return bool(first) and first[0] is held and held.store.binding.renew != "none"

    async def _claim(self, held: Held) -> None:
        slots = self.slots[held.store.lane.name]
        wanted = self._ask(held)
        most = slots.lane.batch or AUTO_BATCH
        while wanted > 0:
            ask = min(wanted, most)
            claims = await held.store.claim(ask)
            held.more = len(claims) == ask
            if claims:
                self._forget_older(held, claims)
                held.add(claims)
                self.tally.claimed(held, len(claims))
                slots.put(held, claims)
            if not held.more:
                break
            wanted -= ask

    def _forget_older(self, held: Held, claims: list[Claim]) -> None:
        """A row this process still works on, that came back to it: the older run has lost it."""
        for claim in claims if len(held) else ():
            older = held.find(claim.key)
            if older is not None:
                self._lost(held, older)

    # -- the end of a run

    def _ended(self, held: Held, claim: Claim, job: Job, settlement: Settlement | None) -> None:
        if claim.lost:
            held.drop([claim])
            self.tally.lost(held, claim)
        elif settlement is not None:
            held.outcomes.append(settlement)
        elif job.finished is not None:
            held.drop([claim])
            self.tally.settled(held, [job.finished])
        self.bell.ring()

    def _lost_in_thread(self, held: Held, claim: Claim) -> None:
        claim.lost = True  # a handler that looks, sees it at once, even while the loop is blocked
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._lost, held, claim)

    def _lost(self, held: Held, claim: Claim) -> None:
        if held.find(claim.key) is claim:
            claim.lost = True
            held.drop([claim])
            self.slots[claim.lane].lose(claim)

    # -- settle

    async def _settle_place(self, place: Place) -> None:
        for held in place.held:
            if held.outcomes:
                await self._settle(place, held)

    async def _settle(self, place: Place, held: Held) -> None:
        batch, held.outcomes = held.outcomes, []
        for settlement in [s for s in batch if s.claim.lost]:
            self.tally.lost(held, settlement.claim)
        batch = [s for s in batch if not s.claim.lost]
        claims = [s.claim for s in batch]
        await held.begin_settle(claims)
        try:
            report = await held.store.settle(batch)
        except BaseException:
            held.outcomes[:0] = batch
            raise
        finally:
            held.end_settle(claims)
        self._account(place, held, report)

    def _account(self, place: Place, held: Held, report: Report) -> None:
        ended = [*report.written, *report.refused]
        held.drop([s.claim for s in ended])
        held.drop([s.claim for s in report.lost])
        self.tally.settled(held, ended)
        for settlement in report.lost:
            self.tally.lost(held, settlement.claim)
        again = time.monotonic() + _LOCKED_AGAIN
        self._later += [(again, held, settlement) for settlement in report.locked]
        for settlement, words in report.stuck:
            self.events.emit(
                "settle_refused", logging.ERROR, lane=held.store.lane.name, id=settlement.claim.id,
                outcome=settlement.kind, error=words, hint="the table does not take this state; it is tried again",
            )  # fmt: skip
            self._later.append((time.monotonic() + 10, held, settlement))
        for settlement, error in report.unhooked:
            failed = decide(held.store, settlement.claim, error)
            failed.error = held.store.error_text(f"on_settled failed: {failed.error}")
            failed.hooked = False
            held.outcomes.append(failed)
            self.bell.ring()
        for settlement in ended:
            if settlement.kind in ("retry", "snooze") and len(place.due) < _MOST_DUE:
                delay = settlement.delay.total_seconds() if settlement.delay else 0.0
                heapq.heappush(place.due, time.monotonic() + delay)

    # -- time

    def _look(self, place: Place) -> None:
        place.look = True
        self.bell.ring()

    def _fall_due(self, now: float) -> None:
        for place in self.places:
            while place.due and place.due[0] <= now:
                heapq.heappop(place.due)
                place.look = True
            if any(held.store.look_again is not None and held.store.look_again <= now for held in place.held):
                place.look = True
        ripe = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, held, settlement in ripe:
            held.outcomes.append(settlement)

    def _pause(self) -> float:
        """Until the next thing that is known to come."""
        now = time.monotonic()
        times = [entry[0] for entry in self._later]
        for place in self.places:
            times.append(max(place.retry_at, place.next_poll if place.opened else 0.0))
            if place.due:
                times.append(max(place.due[0], place.retry_at))
            times += [held.store.look_again for held in place.held if held.store.look_again is not None]
            if any(held.outcomes for held in place.held):
                times.append(max(place.retry_at, now))
            if self._wanted(place, now):
                times.append(now)
        if self.drain:
            times.append(now + 0.2)
        if any(slots.busy for slots in self.slots.values()):
            times.append(now + 1.0)
        return min(times, default=now + 1.0) - now

    def _watch(self, now: float) -> None:
        """A run that outlives its timeout and cannot be stopped costs this process its life, in good order."""
        for slots in self.slots.values():
            slots.start()
            for execution in slots.executions.values():
                for slot in slots.running():
                    over = slot.overdue(execution.timeout, now)
                    if over > self.grace and not self.recycling:
                        self.recycling = True
                        self.events.emit(
                            "worker_recycled", logging.ERROR, worker=self.id, lane=slots.lane.name,
                            slot=slot.name, hint='a handler that cannot be stopped: isolation="process" can kill it',
                        )  # fmt: skip
                        self._stopping = True
        self.tally.summarise(now)

    # -- the end

    async def _drained(self) -> bool:
        """Nothing under way here, and nothing ready or running anywhere."""
        if any(slots.busy or slots.buffered for slots in self.slots.values()) or self._later:
            return False
        for place in self.places:
            if not place.opened or any(held.outcomes for held in place.held):
                return False
            for held in place.held:
                try:
                    if await held.store.unfinished():
                        return False
                except DatabaseError:
                    return False
        return True

    async def _wind_down(self) -> None:
        """Claim nothing more; rows that nobody started go back; runs may finish within the grace."""
        deadline = time.monotonic() + self.grace
        for slots in self.slots.values():
            self._give_back(slots.take_back())
        while not self._hard and time.monotonic() < deadline:
            for place in self.places:
                if place.opened and time.monotonic() >= place.retry_at:
                    await self._guarded(place, self._settle_place(place))
            stuck = self.recycling and all(s.child is None for sl in self.slots.values() for s in sl.running())
            if not any(slots.busy for slots in self.slots.values()) or (stuck and self._only_overdue()):
                break
            await self.bell.wait(0.5)
        for slots in self.slots.values():
            cut = await slots.close()
            # A thread cannot be stopped: its row stays held, and the lease runs out when this process is gone.
            if not slots.in_threads:
                self._give_back(cut)
            elif cut:
                self.tally.abandoned += len(cut)
        for place in self.places:
            if place.opened:
                await self._guarded(place, self._settle_place(place))

    def _only_overdue(self) -> bool:
        now = time.monotonic()
        return all(
            slot.overdue(execution.timeout, now) > 0
            for slots in self.slots.values()
            for execution in slots.executions.values()
            for slot in slots.running()
        )

    def _give_back(self, claims: list[tuple[Held, Claim]]) -> None:
        for held, claim in claims:
            if not claim.lost:
                held.outcomes.append(Settlement(claim, "release"))

    async def _close(self) -> None:
        for place in self.places:
            for task in place.tasks:
                task.cancel()
            await asyncio.gather(*place.tasks, return_exceptions=True)
            if place.renewer is not None:
                await asyncio.get_running_loop().run_in_executor(None, place.renewer.stop)
            if place.fleet is not None:
                state = self._snapshot()
                state.state, state.current = "stopped", []
                with contextlib.suppress(DatabaseError):  # else it is called dead after a silence
                    await place.fleet.beat(state)
            await place.database.close()
        await self.resources.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self.tally.summarise(time.monotonic(), last=True)

    def _snapshot(self) -> WorkerState:
        """What this worker says of itself with every sign of life. Called from the heartbeat thread."""
        current = []
        now = time.monotonic()
        for slots in list(self.slots.values()):
            for slot in list(slots.all):
                claim, job = slot.claim, slot.job
                if claim is not None and job is not None:
                    current.append(
                        {
                            "slot": slot.name, "lane": claim.lane, "environment": claim.environment,
                            "id": str(claim.id), "seconds": round(now - slot.began, 1), "progress": job.latest,
                        }
                    )  # fmt: skip
        return WorkerState(
            id=self.id, incarnation=self.incarnation, host=socket.gethostname(), pid=os.getpid(),
            lanes=list(self.slots), version=_version(), state="busy" if current else "idle", current=current,
            completed=self.tally.completed, failed=self.tally.failures, lost=self.tally.losses,
        )  # fmt: skip


@functools.cache
def _version() -> str:
    return importlib.metadata.version("rowmill")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
