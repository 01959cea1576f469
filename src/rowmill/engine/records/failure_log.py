"""The log of failures, written in batches in the background. A crash may lose an entry, but the row has its outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...declare import retry
from ...events import Events
from ...store import Database
from ...store.lane.claim import Settlement, Swept
from ...store.lane.row_keys import written
from ...store.lane.statements import POISONED
from ...store.own.failures import Failure, Failures
from ..counters import users_traceback
from .background_writer import BackgroundWriter

POISON = "poison"
SWEPT = "taken back: its worker died, or did not renew its lease"


@dataclass(frozen=True, slots=True)
class _Entry:
    at: float
    failure: Failure
    cause: BaseException | None


class FailureLog(BackgroundWriter[_Entry]):
    """The failures of one environment that are to be written to ``rowmill_failures``."""

    off = "failures_off", "rowmill errors lists only errors in the rows until this role may write to rowmill_failures"
    dropped = "failures_dropped", "there were more failures than could be recorded; the rows themselves are correct"

    def __init__(self, database: Database, events: Events, environment: str) -> None:
        super().__init__(events, environment)
        self._table = Failures(database)

    def settled(self, settlement: Settlement) -> None:
        """Record a failed run. Its outcome is in the row."""
        claim = settlement.claim
        word = settlement.word or (retry.PERMANENT if settlement.kind == "dead" else None)
        failure = Failure(
            claim.lane, written(claim.id), claim.attempt, claim.worker, settlement.kind, word, settlement.error or ""
        )
        self._add_failure(failure, settlement.cause)

    def swept(self, lane: str, row: Swept) -> None:
        """Record a row that was taken back from its worker, or that is dead because this happened too often."""
        error = row.refused or (POISONED.strip("'") if row.poison else SWEPT)
        outcome, word = ("dead", POISON) if row.poison else ("swept", retry.TRANSIENT)
        self._add_failure(Failure(lane, written(row.id), None, row.worker, outcome, word, error), None)

    def refused(self, lane: str, id: Any, worker: str | None, error: str, *, dead: bool = False) -> None:
        """Record that the database refuses the claim or a write of a row."""
        outcome = "dead" if dead else "refused"
        self._add_failure(Failure(lane, written(id), None, worker, outcome, retry.PERMANENT, error), None)

    def _add_failure(self, failure: Failure, cause: BaseException | None) -> None:
        self._add(_Entry(time.monotonic(), failure, cause))

    async def _store(self, entries: Sequence[_Entry]) -> None:
        # Format tracebacks in a thread: the event loop has to serve runs.
        await self._table.add(await asyncio.to_thread(_worded, entries))

    async def prune(self) -> None:
        """Delete failures that are too old or too many."""
        await self._table.prune()


def _worded(batch: Sequence[_Entry]) -> list[Failure]:
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
