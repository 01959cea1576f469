"""What a worker did, written to ``rowmill_minutes`` every few seconds, beside the work and never on its way."""

from __future__ import annotations

import asyncio
import logging
import time

from ..errors import DatabaseError
from ..events import Events
from ..store.own.minutes import Minutes
from .counters import Counters
from .wake import jittered

_EVERY, _PRUNE_EVERY, _LAST = 4.0, 3600.0, 3.0


class ThroughputRecorder:
    """For one environment, in one worker."""

    def __init__(self, environment: str, minutes: Minutes, tally: Counters, events: Events) -> None:
        self._environment, self._minutes, self._tally, self._events = environment, minutes, tally, events

    async def run(self) -> None:
        """Until cancelled."""
        pruned = 0.0
        while True:
            await asyncio.sleep(jittered(_EVERY))
            await self.write()
            if time.monotonic() - pruned > _PRUNE_EVERY:
                pruned = time.monotonic()
                await self._try(self._minutes.prune())

    async def write(self) -> None:
        """Write what has come together; where that fails it is kept for the next time."""
        counts = self._tally.take(self._environment)
        if counts and not await self._try(self._minutes.add(counts)):
            self._tally.give_back(self._environment, counts)

    async def last(self) -> None:
        """What has come together by the end, as far as the database answers."""
        try:
            async with asyncio.timeout(_LAST):
                await self.write()
        except TimeoutError:
            return

    async def _try(self, work: object) -> bool:
        try:
            await work  # type: ignore[misc]
        except DatabaseError as error:
            self._events.emit("minutes_failed", logging.DEBUG, environment=self._environment, error=error.message)
            return False
        return True
