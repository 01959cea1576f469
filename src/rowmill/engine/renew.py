"""The heartbeat: a thread with its own event loop and its own connections.

It shares nothing with the handlers' loop but the list of held claims, so a handler that blocks that loop, or burns
CPU in Python, keeps its lease. One statement renews all that this process holds of a lane.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

from ..claim import Claim
from ..errors import DatabaseError
from ..events import Events
from ..store import Database, LaneStore, store_for
from ..store.fleet import Fleet, WorkerState
from .held import Held

_CHUNK = 500
_SOON = 1.0  # a row that was locked by somebody else is tried again after this
_ALIVE_EVERY = 5.0


class Renewer(threading.Thread):
    """Renews leases, and tells the workers table that this process is alive."""

    def __init__(
        self,
        held: Sequence[Held],
        fleets: Sequence[Database],
        snapshot: Callable[[], WorkerState],
        lost: Callable[[Held, Claim], None],
        events: Events,
    ) -> None:
        super().__init__(name="rowmill-heartbeat", daemon=True)
        self._held, self._databases = held, fleets
        self._snapshot, self._lost, self._events = snapshot, lost, events
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
                mine[id(theirs)] = Database.open(theirs.url, schema=theirs.schema, pool=1, patience=10.0)
            return mine[id(theirs)]

        lanes = [(held, self._twin(held, database(held.store.database))) for held in self._held]
        fleets = [Fleet(database(theirs)) for theirs in self._databases]
        tasks = [asyncio.create_task(self._keep(held, store)) for held, store in lanes if store.binding.renew != "none"]
        tasks += [asyncio.create_task(self._alive(fleet)) for fleet in fleets]
        try:
            while not self._over.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for own in mine.values():
                await own.close()

    def _twin(self, held: Held, database: Database) -> LaneStore:
        twin = store_for(held.store.binding, database, held.store.clock, "", "")
        twin.worker = held.store.worker
        return twin

    async def _keep(self, held: Held, store: LaneStore) -> None:
        """Renew one lane's claims, beat after beat."""
        assert store.lane.heartbeat is not None
        every = store.lane.heartbeat.total_seconds()
        pause = every
        while True:
            await asyncio.sleep(pause)
            claims = held.begin_renewal()
            try:
                complete = all(
                    [await self._renew(held, store, claims[i : i + _CHUNK]) for i in range(0, len(claims), _CHUNK)]
                )
                pause = every if complete else min(_SOON, every)
            except DatabaseError as error:
                # The lease outlives several beats; the next one tries again.
                pause = min(_SOON, every)
                self._events.emit("renew_failed", logging.WARNING, lane=store.lane.name, error=error.message)
            except Exception as error:
                pause = min(_SOON, every)
                self._events.emit("renew_failed", logging.ERROR, lane=store.lane.name, error=repr(error))
            finally:
                held.end_renewal()

    async def _renew(self, held: Held, store: LaneStore, claims: Sequence[Claim]) -> bool:
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

    async def _alive(self, fleet: Fleet) -> None:
        """A sign of life every few seconds, and soon after work begins or ends."""
        told, at = "", 0.0
        while True:
            me = self._snapshot()
            if me.state == told and time.monotonic() - at < _ALIVE_EVERY:
                await asyncio.sleep(min(_SOON, _ALIVE_EVERY))
                continue
            told, at = me.state, time.monotonic()
            try:
                if not await fleet.beat(me):
                    # The row is gone (then it is made again), or another live worker has the id.
                    self.replaced |= await fleet.register(me) is not None
            except DatabaseError as error:
                self._events.emit("worker_beat_failed", logging.DEBUG, error=error.message)
