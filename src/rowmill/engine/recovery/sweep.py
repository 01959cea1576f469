"""The sweep: any worker takes back rows whose holder has given no sign of life for longer than the lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ...errors import DatabaseError
from ...store.own.workers import WorkersTable
from ..lane_state import LaneState
from ..wake import jittered

_MOST = 1000


class Sweeper:
    """Sweeps the lanes of one environment, each in its own rhythm."""

    def __init__(
        self, lane_states: Sequence[LaneState], wake: Callable[[], None], workers_table: WorkersTable | None
    ) -> None:
        self._lane_states, self._wake, self._workers_table = lane_states, wake, workers_table

    async def at_start(self) -> None:
        """The start-up sweep, with its own, shorter threshold."""
        for lane_state in self._lane_states:
            await self.sweep(lane_state, at_start=True)
            await lane_state.store.forget_stale_runs()

    async def run(self, *, at_start: bool = False) -> None:
        """Sweep every lane every ``sweep_every``, until cancelled. ``at_start``: begin with the start-up sweep."""
        due = {id(lane_state): time.monotonic() + self._every(lane_state) for lane_state in self._lane_states}
        if at_start:
            for lane_state in self._lane_states:
                await self._try(lane_state, at_start=True)
        while True:
            await asyncio.sleep(max(min(due.values(), default=0) - time.monotonic(), 0.01) if due else 3600)
            for lane_state in self._lane_states:
                if due[id(lane_state)] <= time.monotonic():
                    await self._try(lane_state)
                    due[id(lane_state)] = time.monotonic() + self._every(lane_state)

    async def _try(self, lane_state: LaneState, *, at_start: bool = False) -> None:
        try:
            await self.sweep(lane_state, at_start=at_start)
        except Exception as error:  # whatever it is, the next sweep is tried
            level = logging.WARNING if isinstance(error, DatabaseError) else logging.ERROR
            lane_state.emit("sweep_failed", level, error=str(error))

    def _every(self, lane_state: LaneState) -> float:
        return jittered(lane_state.store.lane.sweep_every.total_seconds())

    async def _lease(self, lane_state: LaneState, *, at_start: bool) -> timedelta:
        """The lease by which rows are judged: the declared one, or a longer one that a live worker goes by."""
        lane = lane_state.store.lane
        lease = lane.startup_lease if at_start else lane.lease
        assert lease is not None
        return (
            max(lease, await self._workers_table.longest_lease(lane.name, at_start=at_start))
            if self._workers_table
            else lease
        )

    async def sweep(self, lane_state: LaneState, *, at_start: bool = False) -> int:
        """Take back what is stale, in bounded steps; the previous holder is logged."""
        count, lease = 0, await self._lease(lane_state, at_start=at_start)
        while True:
            swept = await lane_state.store.sweep(lease, _MOST)
            for row in swept:
                lane_state.swept(row)
            written = sum(row.poison or not row.refused for row in swept)
            count += written
            if written < _MOST:
                break
        await self._expire(lane_state)
        if lane_state.store.waits is not None:
            await lane_state.store.waits.forget()
        if count:
            self._wake()
        return count

    async def _expire(self, lane_state: LaneState) -> None:
        """End rows that were not started in time, in bounded steps."""
        while True:
            expired = await lane_state.store.expire(_MOST)
            lane_state.expired(expired)
            if sum(row.refused is None for row in expired) < _MOST:
                break
