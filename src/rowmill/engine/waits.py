"""Rows that wait for a condition: any worker makes them due when it is true.

A worker looks at every poll. While it knows of waiting rows, because it saw some or made them wait itself, it looks at
every wake-up, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from ..errors import DatabaseError
from ..store.lane.waits import EndedWaits, lanes_with_waits
from .lane_state import LaneState
from .wake import jittered

#: Seconds between two looks, however often it is woken; and as a multiple of what the last one took.
_APART, _SHARE = 0.1, 10


class WaitLooker:
    """Looks after the waiting rows of one environment."""

    def __init__(self, lane_states: Sequence[LaneState], wake: Callable[[], None], poll: float) -> None:
        self._lane_states, self._wake, self._poll = lane_states, wake, poll
        self._rung = asyncio.Event()
        #: There are waiting rows, as far as is known.
        self._some = False

    def look_soon(self) -> None:
        """Rows may have changed."""
        if self._some:
            self._rung.set()

    def settled(self) -> None:
        """A row has begun to wait."""
        self._some = True
        self._rung.set()

    async def look(self) -> None:
        """Look once: ask for the lanes that have waiting rows, with one statement, and look in each of them."""
        watched = [lane_state for lane_state in self._lane_states if lane_state.store.waits is not None]
        if not watched:
            return
        try:
            lanes = await lanes_with_waits(watched[0].store.database)
        except DatabaseError as error:
            watched[0].emit("wait_check_failed", logging.WARNING, error=error.message)
            return
        some = woken = False
        for lane_state in watched:
            waits = lane_state.store.waits
            if waits is None:
                continue
            try:
                ended = await waits.look() if lane_state.store.lane.name in lanes else EndedWaits()
            except DatabaseError as error:
                some = some or self._some
                lane_state.emit("wait_check_failed", logging.WARNING, error=error.message)
                continue
            some, woken = some or ended.waiting, woken or bool(ended.woken)
            lane_state.waits_ended(ended)
        self._some = some
        if woken:
            self._wake()

    async def run(self, *, at_start: bool = False) -> None:
        """Look at every poll, and soon after every wake-up, until cancelled. ``at_start``: nobody has looked yet."""
        if at_start:
            self._rung.set()
        apart = _APART
        while True:
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(jittered(self._poll)):
                    await self._rung.wait()
            await asyncio.sleep(max(began + apart - time.monotonic(), 0))
            self._rung.clear()
            began = time.monotonic()
            try:
                await self.look()
            except Exception as error:  # whatever it is, the next look is tried
                for lane_state in self._lane_states[:1]:
                    lane_state.emit("wait_check_failed", logging.ERROR, error=str(error))
            apart = max(_APART, _SHARE * (time.monotonic() - began))
