"""Rows that a gated claim may take next, as one look found them: many small claims go by one look.

That is as safe as to look and take in one statement. What was counted holds for as long as nobody else claims of the
same stretch of keys, and who does moves its version (see ``stretch_statements``): a claim takes nothing of a stretch
whose version is not the one that was seen, or the one that this worker's own claims have made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Rows for one claim, all of one stretch: where they stand, their keys, the stretch's number."""

    rows: Sequence[Any]
    keys: Sequence[str]
    stretch: int


@dataclass
class Ahead:
    """What one look has found, in the order of keys."""

    #: Where each row stands, its key, and the number of its key's stretch, from 1 on.
    rows: Sequence[Any]
    keys: Sequence[str]
    stretches: Sequence[int]
    #: Where stretches begin, and the version that each must have.
    first: Sequence[str]
    versions: list[int]
    #: Not gone by any longer than this (monotonic): rows that came since have their turn, too.
    until: float
    #: How many rows were asked for already, or passed over; and how many claims got what they asked for.
    used: int = 0
    served: int = 0

    def has(self, count: int) -> bool:
        """Whether the next rows, so many, are of one stretch. (Keys come in an order of their own, a number's or a
        collation's; stretches are in the order of bytes, so that one may come between two parts of another.)
        """
        end = self.used + count
        return end <= len(self.rows) and len(set(self.stretches[self.used : end])) == 1

    def next(self, count: int) -> Part:
        """The next rows, to be asked for now."""
        begin, self.used = self.used, self.used + count
        return Part(self.rows[begin : self.used], self.keys[begin : self.used], self.stretches[begin])

    def version(self, part: Part) -> tuple[str, int]:
        """Where the stretch begins, and the version that it must have."""
        return self.first[part.stretch - 1], self.versions[part.stretch - 1]

    def took(self, part: Part) -> str:
        """Rows of this part were taken by this worker itself, which has moved their stretch's version on by one; the
        key served last. It has had its turn: the next rows are of others.
        """
        self.versions[part.stretch - 1] += 1
        last = part.keys[-1]
        while self.used < len(self.keys) and self.keys[self.used] == last:
            self.used += 1
        return last
