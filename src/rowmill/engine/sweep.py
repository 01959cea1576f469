"""The sweep: any worker takes back rows whose holder has given no sign of life for longer than the lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..errors import DatabaseError
from ..store.own.workers import WorkersTable
from .counters import Counters
from .lane_state import LaneState
from .wake import jittered

_MOST = 1000


class Sweeper:
    """Sweeps the lanes of one environment, each in its own rhythm."""

    def __init__(
        self, held: Sequence[LaneState], tally: Counters, ring: Callable[[], None], fleet: WorkersTable | None
    ) -> None:
        self._held, self._tally, self._ring, self._fleet = held, tally, ring, fleet

    async def at_start(self) -> None:
        """The start-up sweep, with its own, shorter threshold."""
        for held in self._held:
            await self.sweep(held, at_start=True)

    async def run(self) -> None:
        """Sweep every lane every ``sweep_every``, until cancelled."""
        due = {id(held): time.monotonic() + self._every(held) for held in self._held}
        while True:
            await asyncio.sleep(max(min(due.values(), default=0) - time.monotonic(), 0.01) if due else 3600)
            for held in self._held:
                if due[id(held)] <= time.monotonic():
                    try:
                        await self.sweep(held)
                    except Exception as error:  # whatever it is, the next sweep is tried
                        level = logging.WARNING if isinstance(error, DatabaseError) else logging.ERROR
                        self._tally.events.emit("sweep_failed", level, lane=held.store.lane.name, error=str(error))
                    due[id(held)] = time.monotonic() + self._every(held)

    def _every(self, held: LaneState) -> float:
        return jittered(held.store.lane.sweep_every.total_seconds())

    async def _lease(self, held: LaneState, *, at_start: bool) -> timedelta:
        """The lease by which rows are judged: the declared one, or a longer one that a live worker goes by."""
        lane = held.store.lane
        lease = lane.startup_lease if at_start else lane.lease
        assert lease is not None
        return max(lease, await self._fleet.longest_lease(lane.name, at_start=at_start)) if self._fleet else lease

    async def sweep(self, held: LaneState, *, at_start: bool = False) -> int:
        """Take back what is stale, in bounded steps; the previous holder is logged."""
        count, lease = 0, await self._lease(held, at_start=at_start)
        while True:
            swept = await held.store.sweep(lease, _MOST)
            for row in swept:
                self._tally.swept(held, row)
            written = sum(row.poison or not row.refused for row in swept)
            count += written
            if written < _MOST:
                break
        if count:
            self._ring()
        return count
