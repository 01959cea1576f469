"""The gated claim on PostgreSQL as a worker makes it where all gates look at one key: whose turn is next, when to look
again, and into how many stretches keys are divided.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import Busy, Refused
from ..database import Run
from ..lane.claim import Claim
from ..lane.replan import Replan
from ..postgres_database import rows_of
from .claim_by_key_sql import MOST_STRETCHES, STRETCHES, ClaimByKeyStatements
from .gate_binding import BoundGates, KeylessShare

if TYPE_CHECKING:
    from ..lane.postgres import PostgresLane

#: How often gate rows of idle keys are looked for, in seconds.
_FORGET_EVERY = 30.0
#: Rows held back by what runs elsewhere are looked for again after this, where no time is known.
HELD_AGAIN, _LOCKED_AGAIN = 1.0, 0.01
#: Claims that met somebody else, each counting for less with every claim since, from which on stretches are rebuilt;
#: and when that is tried again, in seconds.
_CROWDED, _MARK_AGAIN = 1.5, 1.0
#: Tries of one claim that meets others, or rows that somebody has locked, before it gives up for a moment.
_TRIES = 5


class ClaimByKey:
    """The gated claim of one lane in this worker."""

    def __init__(self, store: PostgresLane, dim: BoundGates, table: str) -> None:
        self.store, self.dim = store, dim
        self.say = ClaimByKeyStatements(store.statements, dim, table)
        self._asks_for_worker = "worker" in store.binding.roles or dim.group.process is not None
        self._key_at = store.binding.columns.index(store.binding.key[0])
        #: The key served last.
        self._last: str | None = None
        self._forget_at = time.monotonic() + _FORGET_EVERY * random.uniform(0, 1)
        self._replan = Replan(slow=0.01, per_row=0.0002)
        #: Claims in a row that got nothing although something was free: somebody holds the rows themselves.
        self._empty_claims = 0
        #: How often others were met lately, and when stretches may be rebuilt.
        self._met, self._mark_at = 0.0, 0.0
        #: Whether the last try left keys out because others claim there, or rows because somebody has them locked: then
        #: the keys are not at their end.
        self._moved, self._locked = False, False
        self._share = KeylessShare()
        #: How many rows without a key have to be among those that are taken next.
        self._due = 0

    async def claim(self, count: int) -> list[Claim]:
        """Rows of as many keys as it takes: from the one served last on, and then from the first."""
        began = time.monotonic()
        try:
            claims = await self._round(count, began)
        except Refused:
            self._last = None  # perhaps it is no key any more
            raise
        now = time.monotonic()
        if now > self._replan.again_at and now - began > self._replan.slow + self._replan.per_row * count:
            self._replan.was_slow()
        self.store.look_again = None
        try:
            if len(claims) < count:
                await self._look_around(claims, count, began)
            if began > self._forget_at:
                self._forget_at = began + _FORGET_EVERY * random.uniform(0.7, 1.3)
                await self.store.database.write(lambda run: run(self.store._text("forget", self.say.forget), ()))
        except (Busy, Refused):
            if not claims:
                raise
            self.store.look_again = time.monotonic()  # the claims are committed and must run
        self._empty_claims = 0 if claims else self._empty_claims + 1
        return claims

    async def _round(self, count: int, began: float) -> list[Claim]:
        """From the key served last on, then from the first; a claim that meets another one goes on somewhere else."""
        claims: list[Claim] = []
        self._due += self._share.of(count) if self.dim.nullable else 0
        for _ in range(_TRIES):
            begun = self._last is not None
            try:
                claims += await self._take(count - len(claims), began)
            except (Busy, Refused):
                if not claims:
                    raise
                break  # what was taken before is committed: it runs, and the next claim meets the error again
            if len(claims) == count:
                break
            if self._moved or self._locked:
                continue
            if not begun:
                break
            self._last = None
        return claims

    async def _take(self, count: int, began: float) -> list[Claim]:
        rows = await self._ask(count)
        last, stretches, elsewhere, walked = rows[0][-4:]
        self._last = last if last is not None else self._last
        self._met *= 0.8
        self._moved = elsewhere is not None
        if self._moved:
            self._met, self._last = self._met + 1, elsewhere or None
        rows = [row for row in rows if row[self._key_at] is not None]
        claims = self.store.make_claims(rows, began)
        for claim, row in zip(claims, rows, strict=True):
            claim.gates = {self.dim.label: row[-5]} if row[-5] is not None else {}
        self._locked = len(claims) < count <= walked
        if self._moved and (not stretches or (self._met > _CROWDED and began > self._mark_at)):
            self._met, self._mark_at = 0.0, began + _MARK_AGAIN * random.uniform(0.7, 1.3)
            with contextlib.suppress(Busy):  # it is tried again later
                await self.store.database.transact(self._rebuild_stretches)
        return claims

    async def _ask(self, count: int) -> Sequence[Any]:
        """The claim itself: the rows that were taken, each with its key and what is told of the claim as a whole."""
        begun, loose = self._last is not None, min(self._due, count)
        self._due -= loose
        key, render = ("by key", begun, loose), self.store._text
        text = render(
            (*key, self._replan.number),
            lambda: self._replan.of(render(key, lambda: self.say.claim(begun=begun, loose=loose))),
        )
        values = [count, *([self._last] if begun else []), *([self.store.worker] if self._asks_for_worker else [])]
        return await self.store.claim_rows(text, tuple(values))

    async def _look_around(self, claims: list[Claim], count: int, began: float) -> None:
        """Fewer rows than were asked for: when to look again."""
        if self._moved or self._locked:  # there is more where others are just now, or behind what somebody has locked
            self.store.look_again = time.monotonic() + self._soon()
            return
        self._last = None
        self.store.look_again, free = await self._when()
        if free and not self._empty_claims:  # a key that was locked
            claims += await self._take(count - len(claims), began)
            self.store.look_again = (await self._when())[0] if len(claims) < count else None

    async def _when(self) -> tuple[float | None, bool]:
        """When to look again, by this process's clock (None: at the next poll); and whether a key is free even now."""
        text = self.store._text("when", self.say.when)
        me = (self.store.worker,) if self.dim.group.process is not None else ()
        wait, ready = (await self.store.database.read(rows_of(text, me)))[0]
        now = time.monotonic()
        if wait == 0:  # others were faster, or held its lock
            return now + self._soon(), True
        times = [now + max(wait, _least_wait(self.dim))] if wait is not None else []
        if ready:  # rows held back by what others run
            times.append(now + HELD_AGAIN)
        return min(times) if times else None, False

    def _soon(self) -> float:
        return random.uniform(0, min(_LOCKED_AGAIN * 2.0 ** min(self._empty_claims, 10), HELD_AGAIN))

    def _rebuild_stretches(self, run: Run) -> None:
        """Divide the keys again, into more stretches than before. Nobody claims meanwhile, not even a
        claim that has seen the old ones, which are gone.
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


def _least_wait(dim: BoundGates) -> float:
    """A fast rate is not followed token by token: half a bucket, or a twentieth of a second, at a time."""
    rate = dim.group.rate
    if rate is None or rate.source is not None or rate.adaptive is not None:
        return 0.005
    return min(0.05, rate.capacity(rate.n) / 2 / (rate.n / rate.per.total_seconds()))
