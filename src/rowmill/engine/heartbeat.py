"""The heartbeat: a thread with its own event loop and its own connections.

It shares nothing with the handlers' loop but the list of held claims, so a handler that blocks that loop, or burns
CPU in Python, keeps its lease. One statement renews all that this process holds of a lane.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import DatabaseError, TooManyConnections, Unreachable
from ..store import Database, LaneStore, store_for
from ..store.lane.claim import Claim
from ..store.own.failures import Failure, Failures
from ..store.own.workers import BEAT_EVERY, KERNEL_EVERY, WorkersTable
from .lane_state import LaneState
from .recovery.liveness import DeadWorker, Peers
from .wake import jittered

if TYPE_CHECKING:
    from .environment import Environment
    from .worker import Worker

_CHUNK = 500
_SOON = 1.0  # a row that was locked by somebody else is tried again after this
_SHORTEST = 0.01  # seconds between two looks at the other workers, at least
_TELL_AFTER = 2.0  # seconds without renewals before that is worth a line: a short outage ends before
_MOST_CONNECTIONS = 5
_RECORD = 5.0  # seconds for a note about a blocked event loop


class HeartbeatThread:
    """The thread in which the heartbeats of all environments run. It lives while there is one."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beats: list[Heartbeat] = []

    def add(self, beat: Heartbeat) -> tuple[concurrent.futures.Future[None], asyncio.AbstractEventLoop]:
        """Run a heartbeat in the thread, in this loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), name="rowmill-heartbeat", daemon=True).start()
            self._beats.append(beat)
            return asyncio.run_coroutine_threadsafe(beat.main(), self._loop), self._loop

    def remove(self, beat: Heartbeat) -> None:
        with self._lock:
            self._beats.remove(beat)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_until_complete(self._watch())
        finally:
            beats = list(self._beats)
            for task in asyncio.all_tasks(loop):
                task.cancel()
            with contextlib.suppress(Exception):
                loop.run_until_complete(loop.shutdown_asyncgens())
            for beat in beats:  # the thread itself failed
                beat.ended = True
            loop.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            with self._lock:
                if not self._beats:
                    self._loop = None  # the next heartbeat starts another thread
                    return
                beats = list(self._beats)
            for beat in beats:
                beat.look()
            if (seen := self._worker.shutdown.watch_loop()) is not None and seen[0].failures is not None:
                for beat in beats:
                    await beat.record(*seen)


class Heartbeat:
    """Renews the leases held in one environment, and tells its workers table that this process is alive."""

    def __init__(
        self,
        worker: Worker,
        environment: Environment,
        lane_states: Sequence[LaneState],
        workers_tables: Sequence[Database],
    ) -> None:
        self._worker, self._environment, self._databases = worker, environment, workers_tables
        self._lane_states = lane_states
        self._peers = Peers(worker.suspicion, BEAT_EVERY)
        self._look_at = math.inf
        self._over = asyncio.Event()
        self._connected: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._running: concurrent.futures.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mine: dict[int, Database] = {}
        #: When the last statement was sent that its connection answered (monotonic).
        self._answered_at = -math.inf
        #: Since when a lane is not renewed, and whether that was said.
        self._silent_since: float | None = None
        self._silence_told = False
        #: Another incarnation has taken the worker's id.
        self.replaced = False
        #: It has ended, and nobody had stopped it.
        self.ended = False

    def start(self) -> None:
        """Begin, in the heartbeat thread."""
        self._running, self._loop = self._worker.heartbeats.add(self)

    def stop(self) -> None:
        """End after the statement that is under way. Blocks; not for the heartbeat's own thread."""
        if self._running is None or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._over.set)
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            self._running.result(timeout=10)

    async def connected(self) -> None:
        """Wait for the first beat: the connection is there. Raises what kept it from that."""
        await asyncio.wrap_future(self._connected)

    async def main(self) -> None:
        """Beat until stopped, or until something in here fails."""
        try:
            await self._beat()
        finally:
            self.ended = not self._over.is_set()
            self._worker.heartbeats.remove(self)

    def _database(self, theirs: Database) -> Database:
        """A connection of this thread's own: the handlers' loop may be blocked, and its pool with it."""
        if id(theirs) not in self._mine:
            # A lane whose table is locked waits on a connection of its own, and not for long: each lane has a
            # lease to keep.
            lanes = min(len(self._lane_states) + 1, _MOST_CONNECTIONS)
            beat = min(
                (h.store.lane.heartbeat.total_seconds() for h in self._lane_states if h.store.lane.heartbeat),
                default=10,
            )
            mine = Database.open(theirs.url, schema=theirs.schema, pool=lanes, patience=min(max(beat, 1.0), 10.0))
            mine.shares = None if theirs.shares is None else theirs.shares.for_heartbeat
            self._mine[id(theirs)] = mine
        return self._mine[id(theirs)]

    async def _beat(self) -> None:
        lanes = [
            (lane_state, self._twin(lane_state, self._database(lane_state.store.database)))
            for lane_state in self._lane_states
        ]
        workers_tables = [WorkersTable(self._database(theirs)) for theirs in self._databases]
        try:
            for own in self._mine.values():
                await own.reach()
        except BaseException as error:
            for own in self._mine.values():
                await own.close()
            self._connected.set_exception(error)
            return
        for lane_state in self._lane_states:
            lane_state.beat_at = time.monotonic()
        self._connected.set_result(None)
        tasks = [
            asyncio.create_task(self._keep(lane_state, store))
            for lane_state, store in lanes
            if store.binding.renew != "none"
        ]
        tasks += [asyncio.create_task(self._alive(workers_table)) for workers_table in workers_tables]
        self._look_at = time.monotonic() + KERNEL_EVERY
        try:
            await asyncio.wait([*tasks, over := asyncio.create_task(self._over.wait())], return_when="FIRST_COMPLETED")
        finally:
            for task in (*tasks, over):
                task.cancel()
            await asyncio.gather(*tasks, over, return_exceptions=True)
            for own in self._mine.values():
                await own.close()

    def look(self) -> None:
        """Look at what changes without a statement: renewals that are late, processes of this host that are gone."""
        self._tell_silence()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + KERNEL_EVERY
            self._take_over(self._peers.find_gone())

    async def record(self, lane_state: LaneState, failure: Failure) -> None:
        """Write to the row's history what the blocked event loop cannot write, and may not live to write."""
        if lane_state.environment is self._environment:
            with contextlib.suppress(DatabaseError, TimeoutError):
                async with asyncio.timeout(_RECORD):
                    await Failures(self._database(lane_state.store.database)).add([failure])

    def _take_over(self, dead: Sequence[DeadWorker]) -> None:
        """Let the worker give back what these held."""
        for one in dead:
            self._worker.take_over_from_thread(self._environment, one)

    def _tell_silence(self) -> None:
        """Say once that leases are not renewed, so that nothing more is claimed; and once that they are again."""
        environment = self._environment
        silent = [lane_state for lane_state in self._lane_states if not lane_state.beats]
        if not silent:
            self._silent_since = None
            if self._silence_told:
                self._silence_told = False
                self._worker.events.emit("heartbeat_back", worker=self._worker.id, environment=environment.name)
            return
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        if self._silence_told or environment.down or now - self._silent_since < _TELL_AFTER:
            return
        self._silence_told = True
        errors = [lane_state.beat_error for lane_state in silent if lane_state.beat_error is not None]
        hint = "nothing more is claimed until leases can be renewed again: see the error"
        self._worker.events.emit(
            "heartbeat_down", logging.ERROR, worker=self._worker.id, environment=environment.name,
            lanes=[lane_state.name for lane_state in silent],
            error=errors[0].message if errors else "the database does not answer a lease renewal",
            **(environment.connections if any(isinstance(e, TooManyConnections) for e in errors) else {"hint": hint}),
        )  # fmt: skip

    def _twin(self, lane_state: LaneState, database: Database) -> LaneStore:
        twin = store_for(lane_state.store.binding, database, lane_state.store.clock, "", "")
        twin.worker = lane_state.store.worker
        return twin

    async def _keep(self, lane_state: LaneState, store: LaneStore) -> None:
        """Renew one lane's claims, beat after beat."""
        assert store.lane.heartbeat is not None
        every = store.lane.heartbeat.total_seconds()
        pause = every
        while True:
            await asyncio.sleep(pause)
            if store.binding is not lane_state.store.binding:  # the table was altered
                store = self._twin(lane_state, store.database)
            claims, sent = lane_state.begin_renewal(), time.monotonic()
            try:
                if not claims and sent - self._answered_at < every:
                    sent = self._answered_at
                elif not claims:
                    await store.database.reach()  # the next claim will need it
                await lane_state.find_fences(store, claims)
                complete = all(
                    [
                        await self._renew(lane_state, store, claims[i : i + _CHUNK])
                        for i in range(0, len(claims), _CHUNK)
                    ]
                )
                pause = every if complete else min(_SOON, every)
                self._answered_at = max(self._answered_at, sent)
                silent, lane_state.beat_at, lane_state.beat_error = not lane_state.beats, sent, None
                if silent:
                    self._worker.wake_from_thread(lane_state.environment)
            except DatabaseError as error:
                # The lease outlives several beats; the next one tries again.
                pause = jittered(min(_SOON, every))
                lane_state.renewal_unanswered(claims)
                level = logging.WARNING if lane_state.beat_error is None else logging.DEBUG  # said once
                lane_state.beat_error = error
                if isinstance(error, Unreachable):
                    if lane_state.beats:
                        self._worker.wake_from_thread(lane_state.environment)
                    lane_state.beat_at = self._answered_at = -math.inf
                self._worker.events.emit("renew_failed", level, lane=store.lane.name, error=error.message)
            except Exception as error:
                pause = min(_SOON, every)
                self._worker.events.emit("renew_failed", logging.ERROR, lane=store.lane.name, error=repr(error))
            finally:
                lane_state.end_renewal()

    async def _renew(self, lane_state: LaneState, store: LaneStore, claims: Sequence[Claim]) -> bool:
        """True when nothing was passed over because somebody else had it locked."""
        sent = time.monotonic()
        renewed = {id(claim) for claim in await store.renew(claims)}
        for claim in claims:
            if id(claim) in renewed:
                claim.renewed = sent
        missing = [claim for claim in claims if id(claim) not in renewed]
        if not missing:
            return True
        # Not renewed is not lost: the row may be locked, by its own finish block for one. Read before deciding.
        held_still = await store.still_held(missing)
        for claim, holds in zip(missing, held_still, strict=True):
            if not holds:
                self._worker.lose_from_thread(lane_state, claim)
        return not any(held_still)

    async def _alive(self, workers_table: WorkersTable) -> None:
        """A sign of life every few seconds, and soon after work begins or ends."""
        reported, reported_locked, at = "", False, 0.0
        session, one_host = self._environment.session, workers_table.database.sql.one_writer
        # Where only this table can tell that a holder lives, it has to say so well within the lease.
        leases = [h.store.lane.lease.total_seconds() / 5 for h in self._lane_states if h.store.needs_workers_table]
        every = min([BEAT_EVERY, *leases])
        while True:
            me = self._worker.shutdown.snapshot()
            # Others miss the lock only of a worker that has said that it holds it: it says so as soon as it does.
            locked = session.locked_since is not None
            due = me.state != reported or (locked and not reported_locked) or time.monotonic() - at >= every
            try:
                if due:
                    sent = time.monotonic()
                    if not await workers_table.beat(me, locked=locked):
                        # The row is gone (then it is made again), or another live worker has the id.
                        self.replaced |= await workers_table.register(me) is not None
                    reported, reported_locked, at = me.state, locked, sent
                    self._answered_at = at
                    if workers_table.lock_lost:  # the server has ended the session, and nothing told this worker
                        self._worker.listen_again_from_thread(self._environment)
                if due or one_host or self._peers.suspects:
                    peers = await workers_table.peers(me)
                    age = None if workers_table.lock_lost else session.age
                    self._take_over(self._peers.update([peer for peer in peers if not peer.dead], age))
                    if due:  # the looks are a heartbeat apart
                        self._take_over(self._peers.find_unfinished(peers))
                next_beat = at + every - time.monotonic()
                await asyncio.sleep(max(self._peers.pause(min(_SOON, next_beat)), _SHORTEST))
            except Exception as error:
                level = logging.DEBUG if isinstance(error, DatabaseError) else logging.ERROR
                self._worker.events.emit("worker_beat_failed", level, error=str(error))
                await asyncio.sleep(jittered(_SOON))
