"""Counts of a lane that cost almost nothing, however large its table: for pages that are open all day.

Counting stops at ``BOUND``. Larger counts, and counts that would be slow, come from PostgreSQL's statistics and are
marked as estimates. An exact count is made on request, with a time limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...declare.states import SEEN, STUCK
from ...errors import Busy
from .lane_view import LaneView, age_seconds

BOUND = 10_000
#: The highest cost that the planner may estimate for a bounded count: about this many pages in sequence.
_COST = 8_000.0
#: Seconds for all counts in one query, for each count after that, and in total; and for an exact count.
_ALL, _EACH, _BUDGET, EXACT = 0.2, 0.12, 0.3, 10.0
#: Seconds before a count that took too long is tried again.
_SLOW = 60.0


@dataclass(frozen=True, slots=True)
class Count:
    """A number: ``exact``, ``at_least``, an ``estimate`` or ``unknown`` (None). ``none``: there is no such state."""

    number: int | None
    how: str

    def value(self) -> dict[str, Any]:
        """The count as plain values."""
        return {"number": self.number, "how": self.how}


@dataclass(frozen=True, slots=True)
class QuickCounts:
    """A lane's counts by state. ``stuck`` rows are a part of the running ones."""

    counts: Mapping[str, Count]
    oldest_ready: float | None
    #: The age of the oldest row that was read; there may be older ones.
    oldest_at_least: bool = False

    def __getitem__(self, state: str) -> Count:
        return self.counts[state]

    def value(self) -> dict[str, Any]:
        """The counts as plain values."""
        counts = {state: count.value() for state, count in self.counts.items() if count.how != "none"}
        return {"counts": counts, "oldest_ready_seconds": self.oldest_ready, "oldest_at_least": self.oldest_at_least}


class QuickCounter:
    """Counts one lane repeatedly, and remembers which counts were slow."""

    def __init__(self, view: LaneView) -> None:
        self.view = view
        self._slow: dict[str, float] = {}

    async def look(self) -> QuickCounts:
        """Return all counts, in a fraction of a second."""
        tests = {s: test for s in (*SEEN, STUCK) if (test := self.view.condition(s)) is not None}
        counts = {state: Count(None, "none" if state not in tests else "unknown") for state in (*SEEN, STUCK)}
        guesses: dict[str, int] = {}
        cheap = list(tests)
        if self.view.sql.estimates_rows:
            guesses, cheap = await self._guess(tests)
        now = time.monotonic()
        looked_at = await self._bounded([s for s in cheap if self._slow.get(s, 0.0) <= now])
        for state, guess in guesses.items():
            counts[state] = Count(_rounded(guess), "estimate")
        for state, (number, _) in looked_at.items():
            if number <= BOUND:
                counts[state] = Count(number, "exact")
            elif guesses.get(state, 0) > BOUND:
                counts[state] = Count(_rounded(guesses[state]), "estimate")
            else:  # statistics older than the rows do not include them
                counts[state] = Count(BOUND, "at_least")
        oldest = looked_at.get("ready", (0, None))[1]
        more = counts["ready"].how != "exact"
        if more and (head := await self._head(tests["ready"])) is not None:
            oldest, more = max(head, oldest or head), False
        return QuickCounts(counts, oldest, more and oldest is not None)

    async def exact(self, state: str, seconds: float = EXACT) -> Count:
        """Count every row of a state, within the time limit."""
        text = f"select count(*) from {self.view.statements.table} where {self.view.need(state)}"
        try:
            return Count(int((await self.view.ask(text, seconds=seconds))[0][0]), "exact")
        except Busy:
            return Count(None, "unknown")

    # -- how it counts

    async def _guess(self, tests: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
        """The planner's estimate for each state, and the states that are cheap to count. Reads no rows."""
        table = self.view.statements.table
        steps = [
            f"(select count(*) from (select 1 from {table} where {t} limit {BOUND + 1}) x)" for t in tests.values()
        ]
        rows = await self.view.ask(f"explain (format json) select {', '.join(steps)}", seconds=1.0)
        document = json.loads(rows[0][0]) if isinstance(rows[0][0], str) else rows[0][0]
        plans = [p for p in document[0]["Plan"].get("Plans", ()) if p.get("Parent Relationship") == "InitPlan"]
        if len(plans) != len(tests):  # a version with a different plan format: no estimate
            return {}, list(tests)
        guesses, cheap = {}, []
        for state, plan in zip(tests, plans, strict=True):
            limit = _limit(plan)
            if limit is None:
                cheap.append(state)
                continue
            guesses[state] = int(limit["Plans"][0]["Plan Rows"])
            # A count far beyond the bound becomes an estimate anyway, so do not count up to the bound.
            if float(limit["Total Cost"]) <= _COST and guesses[state] <= 2 * BOUND:
                cheap.append(state)
        return guesses, cheap

    async def _bounded(self, states: Sequence[str]) -> dict[str, tuple[int, float | None]]:
        counts, slow = await self.view.counted(states, BOUND + 1, _ALL, _EACH, _BUDGET)
        self._slow |= dict.fromkeys(slow, time.monotonic() + _SLOW)
        return counts

    async def _head(self, test: str) -> float | None:
        """How long the row that is claimed next has been ready; None if that would be expensive to find."""
        if self._slow.get("head", 0.0) > time.monotonic():
            return None
        view = self.view
        text = (
            f"select {view.waited()} from {view.statements.table} where {test} order by {view.order('ready')} limit 1"
        )
        try:
            rows = await view.ask(text, seconds=_EACH)
        except Busy:
            self._slow["head"] = time.monotonic() + _SLOW
            return None
        return age_seconds(rows[0][0]) if rows else None


def _limit(plan: dict[str, Any]) -> dict[str, Any] | None:
    """The plan node that stops a bounded count."""
    while plan.get("Plans"):
        if plan["Node Type"] == "Limit":
            return plan
        plan = plan["Plans"][0]
    return None


def _rounded(number: int) -> int:
    """Round an estimate to three digits. The planner estimates one row where it expects none."""
    number = 0 if number == 1 else number
    digits = len(str(number))
    return round(number, 3 - digits) if digits > 3 else number
