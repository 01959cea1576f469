"""The server keeps its plan for a text it has seen a few times. In a new guise the text gets a plan for what the table
is like now: wanted where a claim has become dear, because a plan that was made for a few rows may read all of many.
"""

from __future__ import annotations

import time

_AGAIN = 5.0
_MOST = 200  # more than a connection keeps prepared: by the time a guise comes back its old plan is gone


class Replan:
    """The present guise of one lane's claim. ``dear`` and ``per_row``: seconds that a claim may take without being
    called dear; where it is called so for no reason, that costs five plans.
    """

    def __init__(self, dear: float, per_row: float) -> None:
        self._dear, self._per_row = dear, per_row
        self.number, self._again_at = 0, 0.0

    def of(self, text: str) -> str:
        """The text in its present guise."""
        return f"{text}\n-- {self.number}" if self.number else text

    def claimed(self, took: float, count: int) -> None:
        """A claim of so many rows took so long."""
        now = time.monotonic()
        if took > self._dear + self._per_row * count and now > self._again_at:
            self.number, self._again_at = self.number % _MOST + 1, now + _AGAIN
