"""An environment as one worker serves it: its lanes bound, its id taken, its heartbeat, sweep and wake-up running."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..clock import Clock
from ..declare import states
from ..declare.lane import Lane
from ..declare.task import Queue
from ..errors import DatabaseError, DeclarationError, Refused, WorkerIdTaken
from ..events import Events
from ..store import Database, LaneStore, examine_lane, open_lane
from ..store.lane.claim import Claim, Settlement
from ..store.lane.statements import INCARNATION
from ..store.lane.sweep import take_over
from ..store.own.failures import Failure
from ..store.own.minutes import Minutes
from ..store.own.schema import FAILURES, MINUTES, OwnTables, taken
from ..store.own.schema import ensure as ensure_own
from ..store.own.workers import WorkersTable, WorkerState
from .counters import Counters
from .cron_scheduler import Scheduler
from .failure_log import FailureLog
from .heartbeat import Heartbeat
from .joins import Joins
from .lane_state import LaneState
from .running_marks import mark
from .sweep import Sweeper
from .throughput import ThroughputRecorder
from .wake import jittered, listen

_RETRY = (0.5, 30.0)  # how soon, and how late at most, a lost environment is tried again
_MOST_DUE = 10_000


@dataclass(frozen=True)
class WorkerCallbacks:
    """What a place needs of its worker."""

    events: Events
    clock: Clock
    tally: Counters
    snapshot: Callable[[], WorkerState]
    lost: Callable[[LaneState, Claim], None]
    ring: Callable[[], None]
    watch_loop: Callable[[], tuple[LaneState, Failure] | None]
    registers: bool
    replaces: str | None
    #: What the process before this one, with the same worker id, was running when it died; None: not known.
    fallen: Callable[[], frozenset[int] | None]


class Environment:
    """One environment: what is held there, and when to look at it next."""

    def __init__(self, name: str, database: Database, lanes: list[Lane]) -> None:
        self.name, self.database, self.lanes = name, database, lanes
        self.held: list[LaneState] = []
        self.opened = False
        #: Something may be ready: look, whatever the poll says.
        self.look = True
        self.next_poll = 0.0
        self.retry_at = 0.0
        self._failures = 0
        self._due: list[float] = []
        self._poll = min((lane.poll.total_seconds() for lane in lanes), default=5.0)
        self._fleet: WorkersTable | None = None
        self._renewer: Heartbeat | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.follow: Joins | None = None
        self._failures_log: FailureLog | None = None
        self._returning: asyncio.Task[None] | None = None
        self._minutes: ThroughputRecorder | None = None

    @property
    def beating(self) -> bool:
        """The heartbeat thread is alive."""
        return self._renewer is not None and self._renewer.is_alive()

    @property
    def replaced(self) -> bool:
        """Another worker has taken this one's id."""
        return self._renewer is not None and self._renewer.replaced

    # -- when

    def failed(self) -> float:
        """It would not serve: how long to leave it alone."""
        pause = min(_RETRY[0] * 2.0**self._failures, _RETRY[1])
        self._failures = min(self._failures + 1, 10)
        self.retry_at = time.monotonic() + pause
        self.look = True
        return pause

    def lost(self, crew: WorkerCallbacks) -> None:
        """It is away. Until it answers again it is asked in the background only, so that nobody waits for it."""
        self.retry_at, self.look = math.inf, True
        if self._returning is None or self._returning.done():
            self._returning = asyncio.create_task(self._return(crew))

    async def _return(self, crew: WorkerCallbacks) -> None:
        pause = _RETRY[0]
        while True:
            await asyncio.sleep(jittered(pause))
            try:
                await self.database.reach()
            except DatabaseError:
                pause = min(pause * 2, _RETRY[1])
                continue
            if self.database.replaced:
                await self._abandon(crew)
            self.retry_at = time.monotonic()
            crew.events.emit("environment_back", environment=self.name)
            crew.ring()
            return

    async def _abandon(self, crew: WorkerCallbacks) -> None:
        """Another file stands where the environment was: the claims held are lost, and it is opened like a new one."""
        await self._stop()
        await asyncio.gather(*(held.settling for held in self.held if held.settling is not None))
        for held in self.held:
            for settlement in held.outcomes:
                crew.tally.lost(held, settlement.claim)
            held.outcomes = []
            held.ending.clear()
            for claim in held.all():
                crew.lost(held, claim)
        self.held, self.opened, self._due = [], False, []
        self.follow = self._failures_log = self._minutes = self._renewer = self._fleet = None

    def served(self) -> None:
        """It answered."""
        self._failures = 0

    def looked(self) -> None:
        """It is being looked at now; next time at the poll, if nothing comes before."""
        self.look = False
        self.next_poll = time.monotonic() + jittered(self._poll)

    def will_be_due(self, settlement: Settlement) -> None:
        """A row this worker sent back will be ready again: look then, without waiting for the poll."""
        if settlement.kind in ("retry", "snooze") and len(self._due) < _MOST_DUE:
            delay = settlement.delay.total_seconds() if settlement.delay else 0.0
            heapq.heappush(self._due, time.monotonic() + delay)

    def fall_due(self, now: float) -> None:
        """Rows whose time has come, and claims that proved nothing, make it worth a look."""
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
            self.look = True
        for held in self.held:
            if held.store.look_again is not None and held.store.look_again <= now:
                held.store.look_again, self.look = None, True
        for held in self.held:
            if 0.0 < held.rests_until <= now:
                held.rests_until, self.look = 0.0, True

    def next_time(self) -> float:
        """When there is something to do here, as far as is known."""
        times = [self.next_poll if self.opened else 0.0]
        times += self._due[:1]
        times += [held.store.look_again for held in self.held if held.store.look_again is not None]
        times += [held.rests_until for held in self.held if held.rests_until]
        times += [held.settle_again for held in self.held if held.unwritten and held.settling is None]
        if self.look:
            times.append(0.0)
        return max(min(times), self.retry_at)

    # -- open and close

    async def examine(self, crew: WorkerCallbacks) -> None:
        """Where rowmill's own tables are still to be made: raise what is wrong with the declarations before that."""
        lanes = [lane for lane in self.lanes if not lane.own]
        if not lanes or not crew.registers or self.database.replaced:  # a file that came back is opened as it is
            return
        self.database.must_exist()
        if not (await taken(self.database)).complete:
            _refuse_overlaps([await examine_lane(lane, self.name, self.database, ("done",)) for lane in lanes])

    async def open(self, crew: WorkerCallbacks) -> None:
        """Bind the lanes, take the worker's id, and begin to renew, sweep and listen."""
        me = crew.snapshot()
        await self.database.pin()
        if not all(lane.own for lane in self.lanes):
            self.database.must_exist()
        own = await ensure_own(self.database) if crew.registers else None
        stores = [
            await open_lane(lane, self.name, self.database, crew.clock, me.id, me.incarnation) for lane in self.lanes
        ]
        if crew.registers:
            self._fleet = await self._register(crew)
        for store in stores:
            if store.needs_fleet and self._fleet is None:
                raise DeclarationError(
                    f"lane {store.lane.name!r}: only rowmill_workers could tell that a holder is gone",
                    hint="add a heartbeat_at or claimed_at column, or let the role create rowmill_workers",
                )
        _refuse_overlaps(stores)
        held = [LaneState(store) for store in stores]
        self._log_failures(crew, own, held)
        await self._take_over(crew, held)
        sweeper = Sweeper(held, crew.tally, lambda: self._wake(crew), self._fleet)
        await sweeper.at_start()
        queues = [lane for lane in self.lanes if isinstance(lane, Queue)]
        crons = [task for queue in queues for task in queue.tasks.values() if task.cron is not None]
        scheduler = Scheduler(self.database, crew.clock, crew.events, crons)
        await scheduler.start()
        self.held = held
        if queues:
            self.follow = Joins(self.database, crew.clock, crew.events, lambda: self._wake(crew))
            for one in held:
                one.follow = self.follow if one.store.lane.own else None
            self._tasks = [asyncio.create_task(self.follow.run(queues))]
        if crons:
            self._tasks.append(asyncio.create_task(scheduler.run()))
        fleets = [self.database] if self._fleet else []
        self._renewer = Heartbeat(self.held, fleets, crew.snapshot, crew.lost, crew.watch_loop, crew.events)
        self._renewer.start()
        awaited = self.follow.awaited if self.follow is not None else None
        self._tasks += [
            asyncio.create_task(sweeper.run()),
            asyncio.create_task(listen(self.database, lambda: self._wake(crew), awaited=awaited)),
        ]
        if own is not None and own.has(MINUTES):
            self._minutes = ThroughputRecorder(self.name, Minutes(self.database, crew.clock), crew.tally, crew.events)
            self._tasks.append(asyncio.create_task(self._minutes.run()))
        self.opened = True
        for store in stores:
            if lacks := store.binding.lacks():
                crew.events.emit("lane_lacks", environment=self.name, lane=store.lane.name, lacks=lacks)
        crew.events.emit(
            "worker_started", worker=me.id, environment=self.name, lanes=[lane.name for lane in self.lanes]
        )

    async def _take_over(self, crew: WorkerCallbacks, held: list[LaneState]) -> None:
        """Give back at once what the dead process before this one held. Rows that had not started are not counted."""
        fallen, me = crew.fallen(), crew.snapshot()
        if fallen is None or crew.replaces is None or self._fleet is None:
            return
        for one in held:
            if "worker" not in one.store.binding.roles:
                continue
            name = f"{me.id}{INCARNATION}{crew.replaces}" if one.store.binding.incarnated else me.id
            released, swept = await take_over(one.store, name, functools.partial(_in_flight, fallen, one.salt))
            for row in swept:
                crew.tally.swept(one, row)
            if released:
                crew.events.emit(
                    "rows_given_back", worker=me.id, environment=self.name, lane=one.store.lane.name, count=released
                )

    def _log_failures(self, crew: WorkerCallbacks, own: OwnTables | None, held: list[LaneState]) -> None:
        """Failures are written down where there is a table for them."""
        if own is None:
            return
        if not own.has(FAILURES):
            crew.events.emit(
                "failures_off", logging.WARNING, environment=self.name, error=own.refused,
                hint="rowmill errors shows only what stands in the rows, until rowmill migrate has made the table",
            )  # fmt: skip
            return
        self._failures_log = FailureLog(self.database, crew.events, self.name)
        for one in held:
            one.failures = self._failures_log

    def _wake(self, crew: WorkerCallbacks) -> None:
        self.look = True
        crew.ring()

    async def _register(self, crew: WorkerCallbacks) -> WorkersTable | None:
        fleet = WorkersTable(self.database)
        try:
            await fleet.ensure()
        except Refused as error:
            crew.events.emit(
                "workers_table_off", logging.WARNING, environment=self.name, error=error.message,
                hint="rowmill workers shows nothing here until the role may create rowmill_workers",
            )  # fmt: skip
            return None
        me = crew.snapshot()
        holder = await fleet.register(me, crew.replaces)
        if holder is not None and holder["host"] == socket.gethostname() and not _lives(holder["pid"]):
            holder = await fleet.register(me, holder["incarnation"])
        if holder is not None:
            raise WorkerIdTaken(
                f"a live worker has the id {me.id!r} already: pid {holder['pid']} on {holder['host']},"
                f" last heard of {holder['silent_for']:.0f} s ago",
                hint="another --worker-id, or stop that worker first",
            )
        await fleet.forget()
        return fleet

    async def _stop(self) -> None:
        """Stop what runs beside the work."""
        if self.follow is not None:
            await self.follow.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failures_log is not None:
            await self._failures_log.close()
        if self._renewer is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._renewer.stop)

    async def close(self, last: WorkerState) -> None:
        """Stop what runs beside the work, sign off, and close the connections."""
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.gather(self._returning, return_exceptions=True)
        await self._stop()
        if self._minutes is not None:
            await self._minutes.last()
        if self._fleet is not None:
            last.state, last.current = "stopped", []
            with contextlib.suppress(DatabaseError):  # else it is called dead after a silence
                await self._fleet.beat(last)
        await self.database.close()


def _refuse_overlaps(stores: list[LaneStore]) -> None:
    """Two lanes whose running rows look the same sweep each other's: into the other's ready state, or too early."""

    def sweep(store: LaneStore) -> tuple[object, ...]:
        lane = store.lane
        return store.binding.swept_back, lane.lease, lane.startup_lease, lane.max_reclaims

    for one, other in itertools.combinations(stores, 2):
        same_table = one.binding.table.fullname == other.binding.table.fullname
        alike = same_table and states.overlaps(one.binding.running, other.binding.running)
        if alike and sweep(one) != sweep(other):
            raise DeclarationError(
                f"lanes {one.lane.name!r} and {other.lane.name!r}: their running rows look the same on table"
                f" {one.binding.table.fullname!r}, so each would take back the other's",
                hint="say what tells them apart in ready (it then holds for running too), or give each another running",
            )


def _in_flight(fallen: frozenset[int], salt: int, key: tuple[Any, ...]) -> bool:
    return mark(key, salt) in fallen


def _lives(pid: int) -> bool:
    if pid == os.getpid():  # a container started anew, with the same host name and numbers
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
