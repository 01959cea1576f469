"""Rows that a gated claim may take next, as one look found them: many small claims go by one look.

That is as safe as to look and take in one statement. What was counted holds for as long as nobody else claims of the
same stretch of keys, and who does moves its version (see ``stretch_statements``): a claim takes nothing of a stretch
whose version is not the one that was seen, or the one that this worker's own claims have made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
        """Whether the next rows, so many, are of one stretch."""
        end = self.used + count
        return end <= len(self.rows) and self.stretches[self.used] == self.stretches[end - 1]

    def next(self, count: int) -> tuple[Any, ...]:
        """What the claim of the next rows is told: the rows and their keys, where their stretch begins, its version."""
        begin, self.used = self.used, self.used + count
        stretch = self.stretches[begin] - 1
        return self.rows[begin : self.used], self.keys[begin : self.used], self.first[stretch], self.versions[stretch]

    def took(self) -> str:
        """Some of the last ones were taken by this worker itself, which has moved their stretch's version on by one;
        the key served last. It has had its turn: the next rows are of others.
        """
        last = self.keys[self.used - 1]
        self.versions[self.stretches[self.used - 1] - 1] += 1
        while self.used < len(self.keys) and self.keys[self.used] == last:
            self.used += 1
        return last
