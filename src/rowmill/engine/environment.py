"""An environment as one worker serves it: its lanes bound, its id taken, its heartbeat, sweep and wake-up running."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import os
import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..declare.lane import Lane
from ..declare.task import Queue
from ..errors import DatabaseError, DeclarationError, Refused, TooManyConnections, Unreachable, WorkerIdTaken
from ..store import Database, LaneStore, examine_lane, open_lane
from ..store.jobs.enqueue import CHANNEL
from ..store.lane.claim import Settlement
from ..store.lane.sweep import take_over
from ..store.own.minutes import Minutes
from ..store.own.process_identity import same_kernel
from ..store.own.schema import FAILURES, MINUTES, RUN_LOGS, OwnTables, taken
from ..store.own.schema import ensure as ensure_own
from ..store.own.workers import BEAT_EVERY, WorkersTable, WorkerState
from .counters import ThroughputRecorder
from .cron_scheduler import Scheduler
from .heartbeat import Heartbeat
from .joins import Joins
from .lane_state import LaneState
from .records.failure_log import FailureLog
from .records.run_log import RunLogWriter
from .recovery.liveness import DeadWorker
from .recovery.running_marks import mark
from .recovery.sweep import Sweeper
from .tracing import trace_lane
from .waits import WaitLooker

if TYPE_CHECKING:
    from .worker import Worker

_RETRY = (0.5, 30.0)  # how soon, and how late at most, an environment that refuses or is busy is tried again
_RETURN = (0.5, 1.8)  # the same for one that is away, less or more by half: it is noticed within 3 s
_RETURN_FULL = (0.5, 10.0)  # and for one that gives no further connection
_MOST_DUE = 10_000
_POLL = 5.0  # seconds between two looks where nothing else says when, or nobody can wake the worker
_BEFORE_CRON = 4.0  # seconds before the tick of a cron in which it is not closed; half of it before, it is opened
_LOOK_AGAIN = 1.0  # seconds between two looks at a table that was altered and misses what its lane needs


class Environment:
    """One environment: its lanes, and when to look at it next."""

    def __init__(self, worker: Worker, name: str, database: Database, lanes: list[Lane]) -> None:
        self._worker = worker
        self.name, self.database, self.lanes = name, database, lanes
        self.lane_states: list[LaneState] = []
        self.opened = False
        #: Lanes that were looked at before in this round; lower ones keep their slots free.
        self.above: list[LaneState] = []
        #: It is no longer listed: nothing more is claimed, and it is closed when nothing is held.
        self.leaving = False
        #: In fair order: rows claimed so far, when the last ones were, and whether the last look brought none.
        self.claimed, self.worked_at, self.idle = 0, time.monotonic(), True
        #: The bound lanes and rowmill's own tables, which an environment that rests keeps.
        self._stores: list[LaneStore] | None = None
        self._own: OwnTables | None = None
        self._examined_at = 0.0
        #: Something may be ready: look, whatever the poll says.
        self.look = True
        self.next_poll = 0.0
        self.retry_at = 0.0
        #: How often in a row it would not serve.
        self.failures = 0
        self._due: list[float] = []
        self._poll = min((lane.poll_seconds for lane in lanes), default=_POLL)
        #: No lane polls: something else wakes the worker. Then a server is asked nothing while there is nothing to do.
        self._unpolled = self._poll == math.inf
        self.sleeps = self._unpolled and database.file is None
        self._stay_until = 0.0
        self._listening: asyncio.Task[None] | None = None
        self._workers_table: WorkersTable | None = None
        #: The process before this one, with the same worker id, if it died.
        self._before: DeadWorker | None = None
        #: On PostgreSQL: the session on which the worker listens.
        self.session = worker.listeners.session(database)
        self._renewer: Heartbeat | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.joins: Joins | None = None
        self._scheduler: Scheduler | None = None
        self._looker: WaitLooker | None = None
        self._failures_log: FailureLog | None = None
        self._run_logs: RunLogWriter | None = None
        self._returning: asyncio.Task[None] | None = None
        #: The events that reported the outage, empty while it serves; and how often in a row it was asked since.
        self.outage_events: set[str] = set()
        self._asked = 0
        self._minutes: ThroughputRecorder | None = None

    @property
    def beating(self) -> bool:
        """The heartbeat runs."""
        return self._renewer is not None and not self._renewer.ended

    @property
    def replaced(self) -> bool:
        """Another worker has taken this one's id."""
        return self._renewer is not None and self._renewer.replaced

    @property
    def to_open(self) -> bool:
        """It was not opened yet, or not since it failed. One that rests is opened when it has work."""
        return not self.opened and self._stores is None

    @property
    def reachable(self) -> bool:
        """Nothing says to leave it alone now."""
        return time.monotonic() >= self.retry_at

    # -- when

    def failed(self) -> float:
        """It would not serve: how long to leave it alone."""
        pause = min(_RETRY[0] * 2.0**self.failures, _RETRY[1])
        self.failures = min(self.failures + 1, 10)
        self.retry_at = time.monotonic() + pause
        self.look = True
        return pause

    @property
    def down(self) -> bool:
        """It was said to be away, and has not served since."""
        return bool(self.outage_events)

    def lost(self, error: Unreachable) -> None:
        """It is away. Until it answers again it is asked in the background only, so that nobody waits for it."""
        self.retry_at, self.look = math.inf, True
        full = isinstance(error, TooManyConnections)
        name = "environment_full" if full else "environment_down"
        if name not in self.outage_events:
            self.outage_events.add(name)
            limits = self.connections if full else {}
            self._worker.events.emit(name, logging.ERROR, environment=self.name, error=error.message, **limits)
        if self._returning is None or self._returning.done():
            self._returning = asyncio.create_task(self._return(full))

    def served(self) -> None:
        """A step went well after some that did not: it is back, if it was away."""
        self.failures = 0
        if self.outage_events and self.reachable:
            self.outage_events.clear()
            self._asked = 0
            self._worker.events.emit("environment_back", environment=self.name)

    @property
    def connections(self) -> dict[str, Any]:
        """What to know and to do where connections are short."""
        needs, most = self.database.needs, self.database.max_connections
        hint = f"a worker process needs up to {needs} connections here: run fewer processes, raise the limit, or use"
        known = {} if most is None else {"max_connections": most}
        return {"needs": needs, **known, "hint": f"{hint} a pooler"}

    async def _return(self, full: bool) -> None:
        """Ask until it answers. What is held back for lack of connections leaves its own to others meanwhile."""
        while True:
            if full:
                if not any(one.claims or one.unwritten or one.reply_lost for one in self.lane_states):
                    await self._abandon()
                self.database.release_idle()
            first, most = _RETURN_FULL if full else _RETURN
            self._asked = min(self._asked + 1, 10)
            await asyncio.sleep(min(first * 2.0 ** (self._asked - 1), most) * random.uniform(0.5, 1.5))
            try:
                await self.database.reach()
            except DatabaseError as error:
                full = isinstance(error, TooManyConnections)
                continue
            if self.database.replaced:
                await self._abandon()
            self.retry_at = time.monotonic()
            self._worker.wake()
            return

    async def _abandon(self) -> None:
        """Another file stands where the environment was: the claims held are lost, and it is opened like a new one."""
        await self._stop()
        await asyncio.gather(
            *(lane_state.settling for lane_state in self.lane_states if lane_state.settling is not None)
        )
        for lane_state in self.lane_states:
            for settlement in lane_state.outcomes:
                lane_state.lost(settlement.claim)
            lane_state.outcomes = []
            lane_state.ending.clear()
            for claim in lane_state.all():
                self._worker.lose_from_thread(lane_state, claim)
        self._stores, self.lane_states, self.opened, self._due = None, [], False, []
        self.joins = self._scheduler = self._looker = self._failures_log = self._run_logs = self._minutes = None
        self._renewer = self._workers_table = None

    def looked(self) -> None:
        """It is being looked at now; next time at the poll, if nothing comes before."""
        self.look = False
        poll = _POLL if self.sleeps and not self._wakes else self._poll
        self.next_poll = time.monotonic() + poll * random.uniform(0.8, 1.2)  # so that not all ask at once

    @property
    def _wakes(self) -> bool:
        """Somebody who has rows for it can wake the worker: it listens, or was told that wake calls will do."""
        return not self._worker.listens or self.session.locked_since is not None

    def will_be_due(self, settlement: Settlement) -> None:
        """A row this worker sent back will be ready again: look then, without waiting for the poll."""
        if settlement.kind in ("retry", "snooze", "wait", "stale") and len(self._due) < _MOST_DUE:
            delay = settlement.delay.total_seconds() if settlement.delay else 0.0
            heapq.heappush(self._due, time.monotonic() + delay)
        if settlement.wait is not None and self._looker is not None:
            self._looker.settled()

    def fall_due(self, now: float) -> None:
        """Rows whose time has come, and claims that proved nothing, make it worth a look."""
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
            self.look = True
        for lane_state in self.lane_states:
            if lane_state.store.look_again is not None and lane_state.store.look_again <= now:
                lane_state.store.look_again, self.look = None, True
        for lane_state in self.lane_states:
            if 0.0 < lane_state.paused_until <= now:
                lane_state.paused_until, self.look = 0.0, True

    def next_time(self) -> float:
        """When there is something to do here, as far as is known."""
        times = [0.0 if self.to_open else self.next_poll]
        times += self._due[:1]
        times += [
            lane_state.store.look_again for lane_state in self.lane_states if lane_state.store.look_again is not None
        ]
        times += [lane_state.paused_until for lane_state in self.lane_states if lane_state.paused_until]
        times += [
            lane_state.settle_again
            for lane_state in self.lane_states
            if lane_state.unwritten and lane_state.settling is None
        ]
        if self.look:
            times.append(0.0)
        if self.sleeps and self.opened:
            times.append(max(self.worked_at + self._worker.rest_after, self._stay_until))
        return max(min(times), self.retry_at)

    # -- open and close

    async def examine(self) -> None:
        """Where rowmill's own tables are still to be made: raise what is wrong with the declarations before that."""
        lanes = [lane for lane in self.lanes if not lane.own]
        if (
            not lanes or not self._worker.registers or self.database.replaced
        ):  # a file that came back is opened as it is
            return
        self.database.must_exist()
        if not (await taken(self.database)).complete:
            _refuse_overlaps([await examine_lane(lane, self.name, self.database, ("done",)) for lane in lanes])

    async def open(self) -> None:
        """Bind the lanes, take the worker's id, and begin to renew, sweep and listen."""
        try:
            await self._open()
        except BaseException:
            await self._stop()  # what had begun by then
            self._renewer = self._stores = None
            raise

    async def _open(self) -> None:
        self._check_wake()
        me = self._worker.shutdown.snapshot()
        if self._stores is None:
            await self._bind()
        stores, own = self._stores or [], self._own
        if self._worker.registers:
            self._workers_table = await self._register()
        for store in stores:
            if store.needs_workers_table and self._workers_table is None:
                raise DeclarationError(
                    f"lane {store.lane.name!r}: without rowmill_workers, nothing shows that a worker is dead",
                    hint="add a heartbeat_at or claimed_at column, or let the role create rowmill_workers",
                )
        _refuse_overlaps(stores)
        lane_states = [LaneState(store, self._worker.counters) for store in stores]
        for lane_state in lane_states:
            lane_state.environment, lane_state.controls = self, self._worker.controls
        self._log_runs(own, lane_states)
        # Before the first claim: what is claimed here has to be renewed.
        if self.database.shares is None:
            await self.database.ask_limit()
        self._renewer = Heartbeat(self._worker, self, lane_states, [self.database] if self._workers_table else [])
        self._renewer.start()
        await self._renewer.connected()
        if self._before is not None:
            await self._give_back(self._before, lane_states, succeeds=True)
        sweeper = Sweeper(lane_states, self.wake, self._workers_table)
        looker = WaitLooker(lane_states, self.wake, self._poll)
        if self._worker.turns is None:
            await sweeper.at_start()
            await looker.look()
        queues = [lane for lane in self.lanes if isinstance(lane, Queue)]
        tasks = [task for queue in queues for task in queue.tasks.values()]
        tables = [source for source in self._worker.schedules if tasks and source.serves(self.name)]
        scheduler = Scheduler(
            self.database, self._worker.clock, self._worker.events, tasks, tables, self.name,
            {task.name for task in tasks},
        )  # fmt: skip
        await scheduler.start()
        self.lane_states, self._looker = lane_states, looker
        if queues:
            self.joins = Joins(self.database, self._worker.clock, self._worker.events, self.wake)
            for lane_state in lane_states:
                lane_state.joins = self.joins if lane_state.store.lane.own else None
            self._tasks = [asyncio.create_task(self.joins.run(queues))]
        if scheduler.needed:
            self._scheduler = scheduler
            self._tasks.append(asyncio.create_task(scheduler.run()))
        self._tasks += [
            # In fair order the first claims do not wait for the start-up sweep, nor for the first look.
            asyncio.create_task(sweeper.run(at_start=self._worker.turns is not None)),
            asyncio.create_task(looker.run(at_start=self._worker.turns is not None)),
        ]
        self._listen()
        if own is not None and own.has(MINUTES):
            self._minutes = ThroughputRecorder(
                self.name, Minutes(self.database, self._worker.clock), self._worker.counters, self._worker.events,
                self._run_logs,
            )  # fmt: skip
            self._tasks.append(asyncio.create_task(self._minutes.run()))
        if self._before is not None:
            self._tasks.append(asyncio.create_task(self._give_back_rest(self._before, lane_states)))
        self.opened, self.worked_at = True, time.monotonic()
        self._examined_at = self.worked_at
        for store in stores:
            if lacks := store.binding.lacks():
                self._worker.events.emit("lane_lacks", environment=self.name, lane=store.lane.name, lacks=lacks)
        self._worker.events.emit(
            "worker_started", worker=me.id, environment=self.name, lanes=[lane.name for lane in self.lanes]
        )

    async def _bind(self) -> None:
        """Make rowmill's own tables where the role may, and bind the lanes to their tables."""
        worker = self._worker
        await self.database.pin()
        if not all(lane.own for lane in self.lanes):
            self.database.must_exist()
        self._own = await ensure_own(self.database) if worker.registers else None
        self._stores = [
            await open_lane(lane, self.name, self.database, worker.clock, worker.id, worker.incarnation)
            for lane in self.lanes
        ]

    # -- open while there is work, closed while there is none

    @property
    def holds(self) -> bool:
        """Something is claimed, or not written yet."""
        return any(one.claims or one.unwritten or one.settling or one.reply_lost for one in self.lane_states)

    @property
    def gone(self) -> bool:
        """Outcomes cannot be written, because the table is gone or a privilege is missing."""
        return any(one.settle_pause > 0 for one in self.lane_states)

    @property
    def must_stay_open(self) -> bool:
        """The clock makes work here: crons, and schedules in a table."""
        tasks = [task for lane in self.lanes if isinstance(lane, Queue) for task in lane.tasks.values()]
        tables = any(source.serves(self.name) for source in self._worker.schedules)
        return any(task.cron is not None for task in tasks) or bool(tasks and tables)

    def may_rest(self, now: float, after: float) -> bool:
        """It is open and has had no work for a while."""
        if not self.opened or self.leaving or self.holds or self._worker.drain or now < self._stay_until:
            return False
        stays = self._until_cron() < _BEFORE_CRON if self.sleeps else self.must_stay_open
        return not stays and not (self.sleeps and (self.look or not self._wakes)) and now - self.worked_at > after

    async def sleep(self) -> None:
        """Ask nothing more until something wakes it: unless rows are ready or running, which somebody has to see to."""
        self.look = False  # what is said from now on is looked for afterwards
        if any([await lane_state.store.unfinished() for lane_state in self.lane_states]):
            self._stay_until = time.monotonic() + self._worker.rest_after
            return
        if (until := self._until_cron()) < math.inf:
            heapq.heappush(self._due, time.monotonic() + max(until - _BEFORE_CRON / 2, 0.0))
        await self.rest()

    def _until_cron(self) -> float:
        """Seconds until the next tick of a cron."""
        now = datetime.now(UTC)
        tasks = [task for lane in self.lanes if isinstance(lane, Queue) for task in lane.tasks.values()]
        ticks = [task.cron.next(now) for task in tasks if task.cron is not None]
        return min([(tick - now).total_seconds() for tick in ticks if tick is not None], default=math.inf)

    def _check_wake(self) -> None:
        """Refuse to do without polls where nothing would wake the worker."""
        if not self._unpolled:
            return
        where = f"environment {self.name!r}: its lanes do not poll (poll=None)"
        if self._worker.listens and self.database.pooled:
            raise DeclarationError(
                f"{where}, and the URL goes through a transaction pooler, which has no LISTEN",
                hint="the database's direct address; or Mill(..., listen=False), and mill.wake() for every new row",
            )
        if any(source.serves(self.name) for source in self._worker.schedules):
            raise DeclarationError(
                f"{where}, and schedules in a table are read at every poll", hint="poll=timedelta(minutes=1), or crons"
            )

    def _listen(self) -> None:
        """Listen for wake-ups, from now on and while it rests."""
        if self._listening is not None or not self._worker.listens:
            return

        def awaited() -> None:
            if self.joins is not None:
                self.joins.awaited()

        session = self.session if self._workers_table or self.sleeps else None
        self._listening = asyncio.create_task(self._worker.listeners.listen(self.database, self.wake, awaited, session))

    async def has_work(self) -> bool:
        """Whether a row is ready, or running and possibly left by a dead worker. Needs one connection for a moment."""
        self.looked()
        if self._unpolled:
            self._check_wake()
            self._listen()
        if self._stores is None:
            await self._bind()
        assert self._stores is not None
        if self.must_stay_open:
            return True
        sweep_every = min((lane.sweep_every.total_seconds() for lane in self.lanes), default=math.inf)
        if any(store.binding.expires for store in self._stores) and time.monotonic() - self._examined_at > sweep_every:
            return True
        try:
            if any(lane.own for lane in self.lanes):  # parents whose children have ended are ready, too
                await Joins(self.database, self._worker.clock, self._worker.events, self.wake).look()
            if any([store.waits is not None and await store.waits.any_over() for store in self._stores]):
                return True
            return any([await store.unfinished() or await store.backs_off() for store in self._stores])
        except Refused:
            self._stores = None  # the table may have changed
            raise

    async def rest(self) -> None:
        """Close what was opened, because there is no work. The bound lanes are kept."""
        self.looked()
        await self._sign_off(listening=self._unpolled)
        self._stores = [lane_state.store for lane_state in self.lane_states]
        self.lane_states, self.opened = [], False
        self.joins = self._scheduler = self._looker = self._failures_log = self._run_logs = self._minutes = None
        self._renewer = self._workers_table = None
        await self.database.rest()
        self._worker.events.emit("environment_idle", logging.DEBUG, environment=self.name)

    async def leave(self) -> None:
        """Close it for good: it is no longer listed. Claims that it still holds are lost."""
        if self.opened:
            last = self._worker.shutdown.snapshot()
            if self.holds:
                await self._abandon()
            await self.close(last)
        else:
            await self.close(self._worker.shutdown.snapshot())

    async def rebind(self, lane_state: LaneState) -> None:
        """After ALTER TABLE: bind the lane again. A lane that misses what it needs waits, and looks again later."""
        worker, store = self._worker, lane_state.store
        try:
            fresh = await open_lane(store.lane, self.name, self.database, store.clock, worker.id, worker.incarnation)
            if gone := store.returned - set(fresh.binding.columns):
                raise DeclarationError(
                    f"the table no longer has {', '.join(sorted(gone))}, which the handler returns",
                    hint="outcomes wait: restore the column, or restart workers with a handler that does not return it",
                )
        except DeclarationError as error:
            lane_state.paused_until, lane_state.refused = time.monotonic() + _LOOK_AGAIN, error.message
            lane_state.emit("table_altered", logging.ERROR, error=error.message, hint=error.hint)
            return
        lane_state.rebind(fresh)
        if worker.events.tracer is not None:
            trace_lane(lane_state, worker.events.tracer)
        lane_state.emit("table_altered", logging.WARNING, hint="the lane continues with the altered table")

    async def take_over(self, dead: DeadWorker) -> None:
        """Give back at once what another worker held that is dead, if nobody else does so already."""
        if not self.opened or self._workers_table is None:
            return
        if not dead.declared:
            if not await self._workers_table.declare_dead(dead.id, dead.incarnation, dead.seen_at):
                return
            self._worker.events.emit(
                "worker_dead",
                logging.WARNING,
                worker=dead.id,
                environment=self.name,
                found_by=self._worker.id,
                presumed=dead.seen_at is not None,
            )
        done = await self._give_back(dead, self.lane_states)
        # A claim that was under way when the worker died may be committed only now, and somebody may have locked a row.
        # So the next looks at the workers give back the rest, and only those say that all is done.
        if dead.declared and done:
            await self._workers_table.rows_given_back(dead.id, dead.incarnation, self._worker.slots.keys())

    async def _give_back(
        self, dead: DeadWorker, lane_states: list[LaneState], *, succeeds: bool = False, claims: bool = False
    ) -> bool:
        """Give back what a dead worker held; whether all is done. Rows that had not started are not counted."""
        count, done = 0, True
        for lane_state in lane_states:
            if "worker" not in lane_state.store.binding.roles:
                continue

            def started(key: tuple[Any, ...], salt: int = lane_state.salt) -> bool:
                return dead.running is None or mark(key, salt) in dead.running

            taken = await take_over(
                lane_state.store, dead.id, dead.incarnation, started, succeeds=succeeds, claims=claims
            )
            done = done and taken.done
            count += taken.released + len(taken.swept)
            for row in taken.swept:
                lane_state.swept(row)
            if taken.released:
                lane_state.emit("rows_given_back", previous_worker=dead.id, count=taken.released)
        if count and self.opened:
            self.wake()
            if notify := self.database.sql.notify:  # other workers may have room, too
                await self.database.write(lambda run: run(notify, (CHANNEL, "")))
        return done

    async def _give_back_rest(self, before: DeadWorker, lane_states: list[LaneState]) -> None:
        """Give back what the process before this one, with the same id, held and could not be given back at the start.

        Its name in the workers table is this worker's now, so no other worker looks after it.
        """
        done = False
        while not done:
            await asyncio.sleep(BEAT_EVERY)
            with contextlib.suppress(DatabaseError):
                done = await self._give_back(before, lane_states, succeeds=True, claims=True)

    def _log_runs(self, own: OwnTables | None, lane_states: list[LaneState]) -> None:
        """Failures, and what runs log, are written down where there are tables for them."""
        if own is None:
            return
        logging_lanes = [one for one in lane_states if one.store.lane.keep_logs is not None]
        if not own.has(RUN_LOGS) and logging_lanes:
            self._worker.events.emit(
                "logs_off", logging.WARNING, environment=self.name, error=own.refused,
                hint="rowmill logs shows nothing until rowmill migrate has created the table",
            )  # fmt: skip
        elif own.has(RUN_LOGS):
            self._run_logs = RunLogWriter(self.database, self._worker.events, self.name)
            for lane_state in logging_lanes:
                lane_state.run_logs = self._run_logs
        if not own.has(FAILURES):
            self._worker.events.emit(
                "failures_off", logging.WARNING, environment=self.name, error=own.refused,
                hint="rowmill errors lists only errors in the rows until rowmill migrate has created the table",
            )  # fmt: skip
            return
        self._failures_log = FailureLog(self.database, self._worker.events, self.name)
        for lane_state in lane_states:
            lane_state.failures = self._failures_log

    def wake(self) -> None:
        """Rows may be ready here: look now."""
        self.look = True
        if self._looker is not None:
            self._looker.look_soon()
        if self._scheduler is not None:
            self._scheduler.look()
        self._worker.wake()

    async def _register(self) -> WorkersTable | None:
        workers_table = WorkersTable(self.database)
        try:
            await workers_table.ensure()
        except Refused as error:
            self._worker.events.emit(
                "workers_table_off", logging.WARNING, environment=self.name, error=error.message,
                hint="rowmill workers lists nothing here until this role may create rowmill_workers",
            )  # fmt: skip
            return None
        me = self._worker.shutdown.snapshot()
        previous, gone = await workers_table.find(me.id), False
        holder = await workers_table.register(me, self._worker.replaces)
        if holder is not None and await _is_gone(holder, me, workers_table):
            previous, gone = await workers_table.find(me.id), True
            holder = await workers_table.register(me, holder["incarnation"])
        if holder is not None:
            raise WorkerIdTaken(
                f"a live worker already has the id {me.id!r}: pid {holder['pid']} on {holder['host']},"
                f" last heard of {holder['silent_for']:.0f} s ago",
                hint="choose another --worker-id, or stop that worker first",
            )
        self._before = self._predecessor(previous, gone=gone)
        await workers_table.forget()
        return workers_table

    def _predecessor(self, previous: dict[str, Any] | None, *, gone: bool) -> DeadWorker | None:
        """The process that had this worker's id before, if it is dead; ``previous`` is what the table said of it."""
        worker = self._worker
        if worker.replaces is not None:  # the supervisor started this one because that one ended
            return None if worker.fallen is None else DeadWorker(worker.id, worker.replaces, worker.fallen)
        if previous is None or previous["incarnation"] == worker.incarnation:
            return None
        dead = previous["state"] == "dead" or previous["process_gone"] or previous["lock_missing"]
        dead = dead or (gone and previous["lock_id"] is None)
        return DeadWorker(worker.id, previous["incarnation"]) if dead else None

    async def _stop(self, *, listening: bool = False) -> None:
        """Stop what runs beside the work; ``listening``: but for the wake-ups."""
        if self.joins is not None:
            await self.joins.close()
        tasks, self._tasks = self._tasks, []
        if self._listening is not None and not listening:
            tasks.append(self._listening)
            self._listening = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in (self._failures_log, self._run_logs):
            if writer is not None:
                await writer.close()
        if self._renewer is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._renewer.stop)

    async def close(self, last: WorkerState) -> None:
        """Stop what runs beside the work, sign off, and close the connections."""
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.gather(self._returning, return_exceptions=True)
        await self._sign_off(last)
        await self.database.close()

    async def _sign_off(self, last: WorkerState | None = None, *, listening: bool = False) -> None:
        """Stop what runs beside the work, and say so in the workers table."""
        await self._stop(listening=listening)
        if self._minutes is not None:
            await self._minutes.last()
        if self._workers_table is not None:
            last = last or self._worker.shutdown.snapshot()
            last.state, last.current = "stopped", []
            with contextlib.suppress(DatabaseError):  # else it is called dead after a silence
                await self._workers_table.beat(last)


def _refuse_overlaps(stores: list[LaneStore]) -> None:
    """Two lanes whose running rows look the same sweep each other's: into the other's ready state, or too early."""

    def sweep(store: LaneStore) -> tuple[object, ...]:
        lane = store.lane
        return store.binding.swept_back, lane.lease, lane.startup_lease, lane.max_reclaims

    for one, other in itertools.combinations(stores, 2):
        same_table = one.binding.table.fullname == other.binding.table.fullname
        alike = same_table and one.lane.overlaps(one.binding.running, other.lane, other.binding.running)
        if alike and sweep(one) != sweep(other):
            raise DeclarationError(
                f"lanes {one.lane.name!r} and {other.lane.name!r}: their running rows look the same on table"
                f" {one.binding.table.fullname!r}, so each would take back the other's",
                hint="add a column to ready that distinguishes them, or give each lane its own running values",
            )


async def _is_gone(holder: dict[str, Any], me: WorkerState, workers_table: WorkersTable) -> bool:
    """Whether the holder of this worker's id is gone: the worker before this one, with a fixed ``--worker-id``."""
    if same_kernel(holder["process"], me.process):
        return bool(holder["process_gone"])
    if holder["host"] != me.host:
        return False
    if holder["process"] is None or me.process is None:
        return not _lives(holder["pid"])
    # A container that was restarted, or another one with the same host name: its process cannot be seen from here.
    # A live one beats meanwhile.
    await asyncio.sleep(max(2 * BEAT_EVERY - holder["silent_for"], 0.0))
    now = await workers_table.find(me.id)
    return now is not None and (now["incarnation"], now["seen_at"]) == (holder["incarnation"], holder["seen_at"])


def _lives(pid: int) -> bool:
    if pid == os.getpid():  # a restarted container, with the same host name and process ids
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
