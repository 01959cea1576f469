"""The log of failures, written in batches in the background. A crash may lose an entry, but the row has its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..declare import retry
from ..errors import DatabaseError, Refused
from ..events import Events
from ..store import Database
from ..store.lane.claim import Settlement, Swept
from ..store.lane.row_keys import written
from ..store.lane.statements import POISONED
from ..store.own.failures import Failure, Failures
from .counters import users_traceback

#: The most failures in the queue, the most in one statement, and how long the first of them waits for others.
_WAITING, _BATCH, _PAUSE = 5000, 500, 0.25
_AGAIN, _LAST, _PRUNE_EVERY = 5.0, 5.0, 600.0
POISON = "poison"
SWEPT = "taken back: its worker died, or did not renew its lease"


@dataclass(frozen=True, slots=True)
class _Entry:
    at: float
    failure: Failure
    cause: BaseException | None


class FailureLog:
    """The failures of one environment that are to be written to ``rowmill_failures``."""

    def __init__(self, database: Database, events: Events, environment: str) -> None:
        self._table, self._events, self._environment = Failures(database), events, environment
        self._waiting: deque[_Entry] = deque(maxlen=_WAITING)
        self._dropped = self._under_way = 0
        self._off = False
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._pruned = 0.0

    def settled(self, settlement: Settlement) -> None:
        """Record a failed run. Its outcome is in the row."""
        claim = settlement.claim
        word = settlement.word or (retry.PERMANENT if settlement.kind == "dead" else None)
        failure = Failure(
            claim.lane, written(claim.id), claim.attempt, claim.worker, settlement.kind, word, settlement.error or ""
        )
        self._add(failure, settlement.cause)

    def swept(self, lane: str, row: Swept) -> None:
        """Record a row that was taken back from its worker, or that is dead because this happened too often."""
        error = row.refused or (POISONED.strip("'") if row.poison else SWEPT)
        outcome, word = ("dead", POISON) if row.poison else ("swept", retry.TRANSIENT)
        self._add(Failure(lane, written(row.id), None, row.worker, outcome, word, error), None)

    def refused(self, lane: str, id: Any, worker: str | None, error: str, *, dead: bool = False) -> None:
        """Record that the database refuses the claim or a write of a row."""
        outcome = "dead" if dead else "refused"
        self._add(Failure(lane, written(id), None, worker, outcome, retry.PERMANENT, error), None)

    def _add(self, failure: Failure, cause: BaseException | None) -> None:
        if self._off:
            return
        self._dropped += len(self._waiting) == _WAITING
        self._waiting.append(_Entry(time.monotonic(), failure, cause))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        pause = _PAUSE
        while self._waiting and not self._off:
            if pause != _PAUSE or len(self._waiting) < _BATCH:  # a full batch need not wait
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause)
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _BATCH))]
            self._under_way = len(batch)
            try:
                # Format tracebacks in a thread: the event loop has to serve runs.
                await self._table.add(await asyncio.to_thread(_worded, batch))
                self._under_way, pause = 0, _PAUSE
            except Refused as error:
                self._off = True
                self._events.emit(
                    "failures_off", logging.WARNING, environment=self._environment, error=error.message,
                    hint="rowmill errors lists only errors in the rows until this role may write to rowmill_failures",
                )  # fmt: skip
            except DatabaseError:  # unreachable or busy; new entries matter more than old ones
                room = _WAITING - len(self._waiting)
                self._dropped += max(len(batch) - room, 0)
                self._waiting.extendleft(reversed(batch[max(len(batch) - room, 0) :]))
                if self._hurry.is_set():
                    self._under_way = 0
                    return
                pause = _AGAIN
            self._under_way = 0
            self._tell()
            with contextlib.suppress(DatabaseError):  # a failed cleanup must not repeat the write
                await self._prune()

    def _tell(self) -> None:
        """Report entries that were dropped."""
        if self._dropped:
            self._events.emit(
                "failures_dropped", logging.WARNING, environment=self._environment, count=self._dropped,
                hint="there were more failures than could be recorded; the rows themselves are correct",
            )  # fmt: skip
            self._dropped = 0

    async def _prune(self) -> None:
        if time.monotonic() - self._pruned > _PRUNE_EVERY or not self._pruned:
            self._pruned = time.monotonic()
            await self._table.prune()

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
            self._tell()


def _worded(batch: list[_Entry]) -> list[Failure]:
    now, entries = time.monotonic(), []
    for entry in batch:
        text = users_traceback(entry.cause)
        failure = entry.failure
        entries.append(
            Failure(
                failure.lane, failure.row_id, failure.attempt, failure.worker, failure.outcome, failure.word,
                failure.message, text, round(now - entry.at, 3),
            )
        )  # fmt: skip
    return entries
