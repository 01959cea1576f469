"""Force PostgreSQL to plan a statement again whose cached plan went stale.

The server keeps its plan for a text that it has seen a few times. A plan that was made for a few rows may read all of
many. A claim that has become slow gets another text, and with it a plan for what the table is like now.
"""

from __future__ import annotations

import time

_AGAIN = 5.0
_MOST = 200  # more than a connection keeps prepared: by the time a number comes back its old plan is gone


class Replan:
    """The number in one lane's claim. ``slow`` and ``per_row``: seconds that a claim may take without being called
    slow; where it is called so for no reason, that costs five plans.
    """

    def __init__(self, slow: float, per_row: float) -> None:
        self.slow, self.per_row = slow, per_row
        self.number = 0
        #: Not planned again before then (monotonic).
        self.again_at = 0.0

    def of(self, text: str) -> str:
        """The text with its present number."""
        return f"{text}\n-- {self.number}" if self.number else text

    def was_slow(self) -> None:
        """A claim took longer than it may: have it planned again."""
        self.number, self.again_at = self.number % _MOST + 1, time.monotonic() + _AGAIN
