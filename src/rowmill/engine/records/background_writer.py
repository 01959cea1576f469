"""Writes what people want to read to rowmill's own tables: in batches, in the background. No row waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from ...errors import DatabaseError, Refused
from ...events import Events

E = TypeVar("E")
#: How long the first entry waits for others, how long until a failed write is tried again, and how long at the end.
_PAUSE, _AGAIN, _LAST = 0.25, 5.0, 5.0
_PRUNE_EVERY, _TELL_EVERY = 600.0, 60.0


class BackgroundWriter(Generic[E]):
    """Entries of one environment that are to be written. A crash may lose some; the rows have their outcomes."""

    #: The most entries in the queue, and the most in one statement.
    most, batch = 5000, 500
    #: The events that say that nothing is written, and that some entries were dropped; each with what to know about it.
    off: tuple[str, str]
    dropped: tuple[str, str]

    def __init__(self, events: Events, environment: str) -> None:
        self._events, self._environment = events, environment
        self._waiting: deque[E] = deque(maxlen=self.most)
        self._dropped = self._under_way = 0
        self._off = False
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._pruned = self._told = 0.0

    async def _store(self, entries: Sequence[E]) -> None:
        """Write these."""
        raise NotImplementedError

    async def prune(self) -> None:
        """Delete what is too old or too much."""
        raise NotImplementedError

    def _add(self, entry: E) -> None:
        if self._off:
            return
        self._dropped += len(self._waiting) == self.most
        self._waiting.append(entry)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        pause = _PAUSE
        while self._waiting and not self._off:
            if pause != _PAUSE or len(self._waiting) < self.batch:  # a full batch need not wait
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause)
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self.batch))]
            self._under_way = len(batch)
            try:
                await self._store(batch)
                self._under_way, pause = 0, _PAUSE
            except Refused as error:
                self._off = True
                name, hint = self.off
                self._events.emit(name, logging.WARNING, environment=self._environment, error=error.message, hint=hint)
            except DatabaseError:  # unreachable or busy; new entries matter more than old ones
                too_many = max(len(batch) + len(self._waiting) - self.most, 0)
                self._drop(batch[:too_many])
                self._waiting.extendleft(reversed(batch[too_many:]))
                if self._hurry.is_set():
                    self._under_way = 0
                    return
                pause = _AGAIN
            self._under_way = 0
            self._tell()
            if not self._off and (time.monotonic() - self._pruned > _PRUNE_EVERY or not self._pruned):
                self._pruned = time.monotonic()
                with contextlib.suppress(DatabaseError):  # a failed cleanup must not repeat the write
                    await self.prune()

    def _drop(self, entries: Sequence[E]) -> None:
        """These will not be written."""
        self._dropped += len(entries)

    def _tell(self, *, last: bool = False) -> None:
        """Report entries that were dropped, once in a while."""
        if self._dropped and (last or time.monotonic() - self._told > _TELL_EVERY or not self._told):
            self._told = time.monotonic()
            name, hint = self.dropped
            self._events.emit(name, logging.WARNING, environment=self._environment, count=self._dropped, hint=hint)
            self._dropped = 0

    async def close(self) -> None:
        """Write the remaining entries, if that is quick."""
        self._hurry.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_LAST)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not self._off:
            self._dropped += len(self._waiting) + self._under_way
            self._waiting.clear()
            self._tell(last=True)
