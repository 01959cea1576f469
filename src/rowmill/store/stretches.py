"""The gated claim on PostgreSQL as a worker makes it where a lane's only gate is a limit by key."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from ..claim import Claim
from .database import Run
from .gating import Dimension
from .stretch_statements import MOST_STRETCHES, STRETCHES, StretchStatements
from .turns import Turns

#: Claims that met somebody else, each counting for less with every claim since, from which on stretches are made anew;
#: and when that is tried again, in seconds.
_CROWDED, _MARK_AGAIN = 1.5, 1.0
#: Claims that begin with a thorough look once a quick one did not do, at first and at most.
_DISTRUST = (2, 64)


class Stretches(Turns):
    """The gated claim of one lane in this worker."""

    speak = StretchStatements
    say: StretchStatements
    #: How often others were met of late, and when stretches may be made anew.
    _met, _mark_at = 0.0, 0.0
    #: Whether this look is a quick one; whether keys were left out because others had them.
    _quick, _moved = True, False
    #: How many claims go without a quick look, now and next time.
    _thorough, _distrust = 0, _DISTRUST[0]
    #: How many rows without a key have to be among those that this claim takes.
    _due = 0

    async def _round(self, count: int, began: float) -> list[Claim]:
        """A quick look, then a thorough one; who meets somebody else goes on somewhere else."""
        claims: list[Claim] = []
        self._quick, self._due = self._thorough <= 0, super()._loose_share(count)
        for _ in range(4):
            begun, self._moved = self._last is not None, False
            claims += await self._take(count - len(claims), began)
            if len(claims) == count:
                self._thorough -= 1
                self._distrust = _DISTRUST[0] if self._quick else self._distrust
                break
            if self._moved:
                continue
            if self._quick:
                self._quick, self._thorough = False, self._distrust
                self._distrust = min(2 * self._distrust, _DISTRUST[1])
            elif begun:
                self._last = None
            else:
                break
        return claims

    def _loose_share(self, count: int) -> int:
        due, self._due = min(self._due, count), 0
        return due

    async def _take(self, count: int, began: float) -> list[Claim]:
        rows = await self._ask(count)
        last, stretches, elsewhere = rows[0][-3:]
        self._last = last if last is not None else self._last
        self._met *= 0.8
        if elsewhere is not None:
            self._met, self._moved, self._last = self._met + 1, True, elsewhere or None
            if not stretches or (self._met > _CROWDED and began > self._mark_at):
                self._met, self._mark_at = 0.0, began + _MARK_AGAIN * random.uniform(0.7, 1.3)
                await self.store.database.transact(self._mark_out)
        return self._claims(rows, began, -4)

    def _manner(self) -> dict[str, Any]:
        return {"quick": self._quick}

    async def _look_around(self, claims: list[Claim], count: int, began: float) -> None:
        if not self._moved:
            await super()._look_around(claims, count, began)
        else:  # there is more where others are just now
            self.store.look_again = time.monotonic() + self._soon()

    def _mark_out(self, run: Run) -> None:
        """Divide the keys anew, into more stretches than before. Nobody claims meanwhile: not even who has seen the old
        ones, which are gone.
        """
        say = self.say
        there, fresh = run(say.count_all(), ())[0]
        if fresh:
            return
        wanted = max(STRETCHES, min(2 * there, MOST_STRETCHES))
        keys = [row[0] for row in run(say.divide("$1::int"), (wanted,))]
        if len(run(say.lock_all(), ())) == run(say.count_all(), ())[0][0]:
            run(say.drop_all(), ())
            run(say.mark_out("select jsonb_array_elements_text($1::text::jsonb) as key"), (json.dumps(keys),))


def turns_of(dim: Dimension) -> type[Turns]:
    """How the gates of one key are claimed through: limits alone have nothing to keep by key."""
    return Stretches if dim.group.only_limits else Turns
