"""Where a claim begins to look: at the head of its index, or at a remembered lower bound.

Every row that was claimed leaves an entry at the head of the index, and until a vacuum comes, each claim from the head
walks them all: 8 µs a row became 13 after 300,000 rows. Behind a long transaction, where no vacuum can take them away,
there is no end to it. A claim from where the last one ended walks none of them. What comes in below that (an urgent
row, a retry, a row that was taken back or that somebody had locked) is found by claims from the head, made in between.
"""

from __future__ import annotations

import math
from typing import Any

#: Rows that were taken, one full claim after another, from which on the head is worth passing over.
_FAR = 20_000
#: A claim from the head that took longer, so often in a row: one is a busy server, several are a long transaction.
_DEAR, _DEAR_PER_ROW, _DEAR_IN_A_ROW = 0.020, 0.00005, 3
#: Seconds from one claim from the head to the next: far on, where they are dear, and as a multiple of what one took.
_AGAIN_FAR, _AGAIN_DEAR, _AGAIN_SHARE = 0.25, 1.0, 10.0


class ClaimStart:
    """What one lane's claims in this process know of their index. Times are monotonic."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] | None = None
        self._taken = self._dear = 0
        self._cost, self._head_at = 0.0, -math.inf
        #: When a claim that came back short proves nothing, and is to be made again.
        self.look_again: float | None = None

    def bound(self, now: float) -> tuple[Any, ...] | None:
        """Where a claim that is made now begins; None: at the head."""
        return self._last if now < self._again_at() else None

    def _again_at(self) -> float:
        least = _AGAIN_DEAR if self._dear >= _DEAR_IN_A_ROW else _AGAIN_FAR
        return self._head_at + max(least, _AGAIN_SHARE * self._cost)

    def claimed(
        self, last: tuple[Any, ...] | None, *, full: bool, count: int, began: float, now: float, bounded: bool
    ) -> None:
        """A claim was made. ``last``: the place in the order of the last row it brought.

        That is the bound from then on, also where a claim from the head came less far than the one before it: what has
        come in below is then taken in order, however much it is.
        """
        self._taken = self._taken + count if full else 0
        if not bounded:
            self._cost, self._head_at = now - began, now
            self._dear = self._dear + 1 if self._cost > _DEAR + _DEAR_PER_ROW * count else 0
        self.look_again = None
        if self._dear >= _DEAR_IN_A_ROW or self._taken >= _FAR:
            self._last = last if last is not None and None not in last else self._last
            if bounded and not full:
                self.look_again = self._again_at()
        else:
            self._last = None
            if bounded:
                self.look_again = now
