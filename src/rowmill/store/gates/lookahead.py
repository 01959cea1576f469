"""Rows that a gated claim may take next, as one look found them: many small claims go by one look.

That is as safe as to look and take in one statement. What was counted holds for as long as nobody else claims of the
same stretch of keys, and who does moves its version (see ``stretch_statements``): a claim takes nothing of a stretch
whose version is not the one that was seen, or the one that this worker's own claims have made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Stretches that one claim may lock: the one that it is in, and the next where that ends.
_AT_ONCE = 2


class LookaheadPart(NamedTuple):
    """Rows for one claim: where they stand, their keys, and the numbers of the stretches they are in, each once."""

    rows: Sequence[str]
    keys: Sequence[str]
    stretches: Sequence[int]


def as_array(texts: Sequence[str]) -> str:
    """Texts as PostgreSQL writes an array of them."""
    whole = "".join(texts)
    if "\\" in whole or '"' in whole:
        texts = [text.replace("\\", "\\\\").replace('"', '\\"') for text in texts]
    return '{"' + '","'.join(texts) + '"}'


@dataclass
class Lookahead:
    """What one look has found, in the order of keys."""

    #: Where each row stands, its key, and the number of its key's stretch, from 1 on.
    rows: Sequence[str]
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
        """Whether the next rows, so many, are there and of few stretches. (Keys come in an order of their own, a
        number's or a collation's; stretches are in the order of bytes, so that keys may go to and fro between them.)
        """
        end = self.used + count
        return end <= len(self.rows) and len(set(self.stretches[self.used : end])) <= _AT_ONCE

    def next(self, count: int) -> LookaheadPart:
        """The next rows, to be asked for now."""
        part = slice(self.used, self.used + count)
        self.used += count
        return LookaheadPart(self.rows[part], self.keys[part], sorted(set(self.stretches[part])))

    def versions_of(self, part: LookaheadPart) -> tuple[list[str], list[int]]:
        """Where the stretches of a part begin, and the versions that they must have."""
        return [self.first[n - 1] for n in part.stretches], [self.versions[n - 1] for n in part.stretches]

    def took(self, part: LookaheadPart) -> str:
        """Rows of this part were taken by this worker itself, which has moved its stretches' versions on by one; the
        key served last. It has had its turn: the next rows are of others.
        """
        for number in part.stretches:
            self.versions[number - 1] += 1
        last = part.keys[-1]
        while self.used < len(self.keys) and self.keys[self.used] == last:
            self.used += 1
        return last
