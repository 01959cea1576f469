"""The heartbeat: a thread with its own event loop and its own connections.

It shares nothing with the handlers' loop but the list of held claims, so a handler that blocks that loop, or burns
CPU in Python, keeps its lease. One statement renews all that this process holds of a lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import DatabaseError
from ..events import Events
from ..store import Database, LaneStore, store_for
from ..store.lane.claim import Claim
from ..store.own.failures import Failure, Failures
from ..store.own.workers import WorkersTable, WorkerState
from .lane_state import LaneState

_CHUNK = 500
_SOON = 1.0  # a row that was locked by somebody else is tried again after this
_ALIVE_EVERY = 5.0
_MOST_CONNECTIONS = 5
_RECORD = 5.0  # seconds for a note about a blocked event loop


class Heartbeat(threading.Thread):
    """Renews leases, and tells the workers table that this process is alive."""

    def __init__(
        self,
        held: Sequence[LaneState],
        fleets: Sequence[Database],
        snapshot: Callable[[], WorkerState],
        lost: Callable[[LaneState, Claim], None],
        watch_loop: Callable[[], tuple[LaneState, Failure] | None],
        events: Events,
    ) -> None:
        super().__init__(name="rowmill-heartbeat", daemon=True)
        self._held, self._databases = held, fleets
        self._snapshot, self._lost, self._watch_loop, self._events = snapshot, lost, watch_loop, events
        self._over = threading.Event()
        #: Another incarnation has taken the worker's id.
        self.replaced = False

    def stop(self) -> None:
        """End after the statement that is under way."""
        self._over.set()
        self.join(timeout=10)

    def run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        # Own connections: the handlers' loop may be blocked, and its pool with it.
        mine: dict[int, Database] = {}

        def database(theirs: Database) -> Database:
            if id(theirs) not in mine:
                # A lane whose table is locked waits on a connection of its own, and not for long: each lane has a
                # lease to keep.
                lanes = min(len(self._held) + 1, _MOST_CONNECTIONS)
                beat = min(
                    (h.store.lane.heartbeat.total_seconds() for h in self._held if h.store.lane.heartbeat), default=10
                )
                mine[id(theirs)] = Database.open(
                    theirs.url, schema=theirs.schema, pool=lanes, patience=min(max(beat, 1.0), 10.0)
                )
            return mine[id(theirs)]

        lanes = [(held, self._twin(held, database(held.store.database))) for held in self._held]
        fleets = [WorkersTable(database(theirs)) for theirs in self._databases]
        tasks = [asyncio.create_task(self._keep(held, store)) for held, store in lanes if store.binding.renew != "none"]
        tasks += [asyncio.create_task(self._alive(fleet)) for fleet in fleets]
        try:
            while not self._over.is_set() and not any(task.done() for task in tasks):
                await asyncio.sleep(0.05)
                if (seen := self._watch_loop()) is not None and seen[0].failures is not None:
                    await self._record(database(seen[0].store.database), seen[1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for own in mine.values():
                await own.close()

    @staticmethod
    async def _record(database: Database, failure: Failure) -> None:
        """Write to the row's history what the blocked event loop cannot write, and may not live to write."""
        with contextlib.suppress(DatabaseError, TimeoutError):
            async with asyncio.timeout(_RECORD):
                await Failures(database).add([failure])

    def _twin(self, held: LaneState, database: Database) -> LaneStore:
        twin = store_for(held.store.binding, database, held.store.clock, "", "")
        twin.worker = held.store.worker
        return twin

    async def _keep(self, held: LaneState, store: LaneStore) -> None:
        """Renew one lane's claims, beat after beat."""
        assert store.lane.heartbeat is not None
        every = store.lane.heartbeat.total_seconds()
        pause = every
        while True:
            await asyncio.sleep(pause)
            if store.binding is not held.store.binding:  # the table was altered
                store = self._twin(held, store.database)
            claims = held.begin_renewal()
            try:
                await held.find_fences(store, claims)
                complete = all(
                    [await self._renew(held, store, claims[i : i + _CHUNK]) for i in range(0, len(claims), _CHUNK)]
                )
                pause = every if complete else min(_SOON, every)
            except DatabaseError as error:
                # The lease outlives several beats; the next one tries again.
                pause = min(_SOON, every)
                held.lost_reply(claims)
                self._events.emit("renew_failed", logging.WARNING, lane=store.lane.name, error=error.message)
            except Exception as error:
                pause = min(_SOON, every)
                self._events.emit("renew_failed", logging.ERROR, lane=store.lane.name, error=repr(error))
            finally:
                held.end_renewal()

    async def _renew(self, held: LaneState, store: LaneStore, claims: Sequence[Claim]) -> bool:
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
                self._lost(held, claim)
        return not any(held_still)

    async def _alive(self, fleet: WorkersTable) -> None:
        """A sign of life every few seconds, and soon after work begins or ends."""
        told, at = "", 0.0
        # Where only this table can tell that a holder lives, it has to say so well within the lease.
        leases = [h.store.lane.lease.total_seconds() / 5 for h in self._held if h.store.needs_fleet]
        every = min([_ALIVE_EVERY, *leases])
        while True:
            me = self._snapshot()
            if me.state == told and time.monotonic() - at < every:
                await asyncio.sleep(min(_SOON, every))
                continue
            told, at = me.state, time.monotonic()
            try:
                if not await fleet.beat(me):
                    # The row is gone (then it is made again), or another live worker has the id.
                    self.replaced |= await fleet.register(me) is not None
            except Exception as error:
                level = logging.DEBUG if isinstance(error, DatabaseError) else logging.ERROR
                self._events.emit("worker_beat_failed", level, error=str(error))
                await asyncio.sleep(_SOON)
