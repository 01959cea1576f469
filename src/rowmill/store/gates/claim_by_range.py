"""The gated claim on PostgreSQL as a worker makes it where a lane's only gate is a limit by key."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from ..asyncpg_pool import rows_of
from ..database import Run
from ..lane.claim import Claim
from .claim_by_key import ClaimByKey
from .claim_by_range_sql import MOST_STRETCHES, STRETCHES, ClaimByRangeStatements
from .gate_binding import BoundGates
from .lookahead import Lookahead, as_array

#: Claims that met somebody else, each counting for less with every claim since, from which on stretches are made anew;
#: and when that is tried again, in seconds.
_CROWDED, _MARK_AGAIN = 1.5, 1.0
#: Claims that begin with a thorough look once a quick one did not do, at first and at most.
_DISTRUST = (2, 64)
#: Claims of up to so many rows go by a look ahead, which is gone by for so many seconds.
_SMALL, _AHEAD_FOR = 128, 0.25
#: For how many claims it finds rows: for claims of up to so many rows, for larger ones, and for how many at least.
_TINY, _FOR_TINY, _FOR_SMALL, _LEAST = 32, 32, 16, 8


class ClaimByRange(ClaimByKey):
    """The gated claim of one lane in this worker."""

    speak = ClaimByRangeStatements
    say: ClaimByRangeStatements
    #: How often others were met of late, and when stretches may be made anew.
    _met, _mark_at = 0.0, 0.0
    #: Whether this look is a quick one; whether keys were left out because others claim there, or rows because somebody
    #: has them locked although there were as many as were asked for: then the keys are not at their end.
    _quick, _moved, _locked = True, False, False
    #: How many claims go without a quick look, now and next time.
    _thorough, _distrust = 0, _DISTRUST[0]
    #: How many rows without a key have to be among those that the next claim takes which is not by a look ahead.
    _due = 0
    #: What a look ahead has found. Whether the last claim got all it asked for: there is more, and it pays to look.
    _ahead: Lookahead | None = None
    _plenty = False
    #: How many claims go without a look ahead, now and next time.
    _without, _doubt = 0, 1

    async def _round(self, count: int, began: float) -> list[Claim]:
        """A quick look, then a thorough one; who meets somebody else goes on somewhere else."""
        claims: list[Claim] = []
        self._quick, self._due = self._thorough <= 0, min(self._due + super()._loose_share(count), _SMALL)
        plenty, self._plenty, trusted = self._plenty, False, self._quick
        for _ in range(5):
            begun, self._moved, self._locked = self._last is not None, False, False
            if plenty and self._quick and await self._looked_ahead(count, began):
                claims += await self._take_those(count - len(claims), began)
            else:
                claims += await self._take(count - len(claims), began)
            if len(claims) == count:
                self._plenty = True
                self._thorough -= 1
                self._distrust = _DISTRUST[0] if self._quick else self._distrust
                break
            if self._moved:
                continue
            if self._quick:
                self._quick, self._thorough = False, self._distrust
                self._distrust = min(2 * self._distrust, _DISTRUST[1])
            elif self._locked:
                continue
            elif begun:
                self._last = None
                if trusted and claims:  # the keys are at their end, and that was all that ailed the quick look
                    trusted, self._quick, self._thorough = False, True, 0
            else:
                break
        return claims

    def _loose_share(self, count: int) -> int:
        due = min(self._due, count)
        self._due -= due
        return due

    async def _take(self, count: int, began: float) -> list[Claim]:
        self._ahead = None  # some of what it found may be what is taken now
        rows = await self._ask(count)
        last, stretches, elsewhere, found = rows[0][-4:]
        self._last = last if last is not None else self._last
        self._met *= 0.8
        if elsewhere is not None:
            self._met, self._moved, self._last = self._met + 1, True, elsewhere or None
            if not stretches or (self._met > _CROWDED and began > self._mark_at):
                self._met, self._mark_at = 0.0, began + _MARK_AGAIN * random.uniform(0.7, 1.3)
                await self.store.database.transact(self._mark_out)
        claims = self._claims(rows, began, -5)
        self._locked = len(claims) < count <= found
        return claims

    def _manner(self) -> dict[str, Any]:
        return {"quick": self._quick}

    # -- by a look ahead

    async def _looked_ahead(self, count: int, began: float) -> bool:
        """Whether it is known what this claim may take."""
        store = self.store
        if count > _SMALL or self._due >= count or not self.say.looks_ahead:
            return False
        if self._ahead is not None and self._ahead.has(count) and began < self._ahead.until:
            return True
        if self._ahead is not None and self._ahead.served < 2:
            self._in_doubt()  # keys with many rows each, or stretches with few
        self._ahead, self._without = None, self._without - 1
        if self._without >= 0:
            return False
        begun, many = self._last is not None, count * (_FOR_TINY if count <= _TINY else _FOR_SMALL)
        text = store._text(("ahead", begun, self._guise.number), lambda: self._guise.of(self.say.ahead(begun=begun)))
        values = (many, *([self._last] if begun else []))
        rows, keys, stretches, first, versions = (await store.database.read(rows_of(text, values)))[0]
        if not rows or not first or len(rows) < _LEAST * count:
            self._in_doubt()
            return False
        self._ahead = Lookahead(rows, keys, stretches, first, versions, began + _AHEAD_FOR)
        return self._ahead.has(count)

    async def _take_those(self, count: int, began: float) -> list[Claim]:
        """Rows that were found ahead."""
        ahead, store = self._ahead, self.store
        assert ahead is not None
        text = store._text(("those", self._guise.number), lambda: self._guise.of(self.say.claim_those()))
        part = ahead.next(count)
        values = (
            as_array(part.rows),
            as_array(part.keys),
            *ahead.versions_of(part),
            *([store.worker] if self._asks_for_worker else []),
        )
        claims = self._claims(await store.claim_rows(text, values), began, -1)
        if claims:
            self._last = ahead.took(part)
        if len(claims) == count:
            ahead.served += 1
            self._doubt = 1 if ahead.served > 1 else self._doubt
        else:  # others have claimed there, or have the rows themselves: what comes next is counted anew
            self._ahead, self._moved = None, True
            self._in_doubt()
        return claims

    def _in_doubt(self) -> None:
        """A look ahead did not pay: some claims go without one."""
        self._without, self._doubt = self._doubt, min(2 * self._doubt, _DISTRUST[1])

    async def _look_around(self, claims: list[Claim], count: int, began: float) -> None:
        if not self._moved and not self._locked:
            await super()._look_around(claims, count, began)
        else:  # there is more where others are just now, or behind what somebody has locked
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
        locked = len(run(say.lock_all(), ()))
        there, fresh = run(say.count_all(), ())[0]
        if locked == there and not fresh:
            run(say.drop_all(), ())
            run(say.mark_out("select jsonb_array_elements_text($1::text::jsonb) as key"), (json.dumps(keys),))


def turns_of(dim: BoundGates) -> type[ClaimByKey]:
    """How the gates of one key are claimed through: limits alone have nothing to keep by key."""
    return ClaimByRange if dim.group.only_limits else ClaimByKey
