"""Force PostgreSQL to re-plan a statement whose cached plan went stale.

The server caches its plan for a statement after a few executions. A plan for a small table may scan all of a large one.
So a claim that has become slow changes its text, and gets a plan for the table's current size.
"""

from __future__ import annotations

import time

_AGAIN = 5.0
_MOST = 200  # more than a connection keeps prepared, so the old plan is gone when a number comes back


class Replan:
    """The number in one lane's claim. A claim counts as slow above ``slow`` plus ``per_row`` seconds per row.

    A false alarm costs five plans.
    """

    def __init__(self, slow: float, per_row: float) -> None:
        self.slow, self.per_row = slow, per_row
        self.number = 0
        #: No re-planning before this time (monotonic).
        self.again_at = 0.0

    def of(self, text: str) -> str:
        """The text with its current number."""
        return f"{text}\n-- {self.number}" if self.number else text

    def was_slow(self) -> None:
        """A claim exceeded its time limit: have it planned again."""
        self.number, self.again_at = self.number % _MOST + 1, time.monotonic() + _AGAIN
