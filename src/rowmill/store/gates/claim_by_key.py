"""The gated claim of one worker on PostgreSQL, if all gates use one key.

It remembers which key comes next. It decides when to look again, and how many ranges the keys are divided into.
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
from .claim_by_key_sql import MOST_RANGES, RANGES, ClaimByKeyStatements
from .gate_binding import BoundGates, KeylessShare

if TYPE_CHECKING:
    from ..lane.postgres import PostgresLane

#: Seconds between two deletions of the gate rows of idle keys.
_FORGET_EVERY = 30.0
#: Seconds after which rows that a gate holds back are checked again, if no time is known.
HELD_AGAIN, _LOCKED_AGAIN = 1.0, 0.01
#: Ranges are rebuilt after this many claims that met another session (each claim since then lowers the count), and
#: the seconds until the next attempt.
_CROWDED, _MARK_AGAIN = 1.5, 1.0
#: Attempts of a claim that meets other claims or locked rows, before it pauses.
_TRIES = 5


class ClaimByKey:
    """The gated claim of one lane in this worker."""

    def __init__(self, store: PostgresLane, dim: BoundGates, table: str) -> None:
        self.store, self.dim = store, dim
        self.say = ClaimByKeyStatements(store.statements, dim, table)
        self._asks_for_worker = "worker" in store.binding.roles or dim.group.process is not None
        self._key_at = store.binding.columns.index(store.binding.key[0])
        #: The last key that got rows.
        self._last: str | None = None
        self._forget_at = time.monotonic() + _FORGET_EVERY * random.uniform(0, 1)
        self._replan = Replan(slow=0.01, per_row=0.0002)
        #: Claims in a row that got nothing although a key had room: another session has locked the rows themselves.
        self._empty_claims = 0
        #: How often this worker met other claims recently, and when it may rebuild the ranges.
        self._met, self._mark_at = 0.0, 0.0
        #: Whether the last attempt skipped keys because another claim holds their range, or skipped locked rows. If
        #: so, there are more keys. A key that had no row of its own until now counts as locked, too.
        self._moved, self._locked = False, False
        self._share = KeylessShare()
        #: How many rows without a key the next claims must include.
        self._due = 0

    def of(self, store: PostgresLane) -> ClaimByKey:
        """The same for the store of one of the lane's shards."""
        return ClaimByKey(store, self.dim, self.say.table)

    async def claim(self, count: int) -> list[Claim]:
        """Take rows key by key: start after the last key that got rows, then continue from the first key."""
        began = time.monotonic()
        try:
            claims = await self._round(count, began)
        except Refused:
            self._last = None  # it may no longer be a valid key
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
        """Take rows after the last key, then from the first one. A claim that meets another one continues elsewhere."""
        claims: list[Claim] = []
        self._due += self._share.of(count) if self.dim.nullable else 0
        for _ in range(_TRIES):
            after_last = self._last is not None
            try:
                claims += await self._take(count - len(claims), began)
            except (Busy, Refused):
                if not claims:
                    raise
                break  # the rows taken so far are committed and run; the next claim raises the error again
            if len(claims) == count:
                break
            if self._moved or self._locked:
                continue
            if not after_last:
                break
            self._last = None
        return claims

    async def _take(self, count: int, began: float) -> list[Claim]:
        rows = await self._ask(count)
        last, ranges, elsewhere, walked, missing = rows[0][-5:]
        self._last = last if last is not None else self._last
        self._met *= 0.8
        self._moved = elsewhere is not None
        if self._moved:
            self._met, self._last = self._met + 1, elsewhere or None
        rows = [row for row in rows if row[self._key_at] is not None]
        claims = self.store.make_claims(rows, began)
        for claim, row in zip(claims, rows, strict=True):
            claim.gates = {self.dim.label: row[-6]} if row[-6] is not None else {}
        self._locked = len(claims) < count <= walked
        if missing:
            text = self.store._text("create keys", self.say.create_keys)
            await self.store.database.write(lambda run: run(text, (missing,)))
            self._locked = True
        if self._moved and (not ranges or (self._met > _CROWDED and began > self._mark_at)):
            self._met, self._mark_at = 0.0, began + _MARK_AGAIN * random.uniform(0.7, 1.3)
            with contextlib.suppress(Busy):  # the next attempt does it
                await self.store.database.transact(self._rebuild_ranges)
        return claims

    async def _ask(self, count: int) -> Sequence[Any]:
        """Run the claim statement. Returns the rows, each with its key and the values for the whole claim."""
        after_last, keyless = self._last is not None, min(self._due, count)
        self._due -= keyless
        key, render = ("by key", after_last, keyless), self.store._text
        text = render(
            (*key, self._replan.number),
            lambda: self._replan.of(render(key, lambda: self.say.claim(after_last=after_last, keyless=keyless))),
        )
        values = [count, *([self._last] if after_last else []), *([self.store.worker] if self._asks_for_worker else [])]
        return await self.store.claim_rows(text, tuple(values))

    async def _look_around(self, claims: list[Claim], count: int, began: float) -> None:
        """Decide when to look again, after a claim that got fewer rows than it asked for."""
        if self._moved or self._locked:  # other sessions hold locks, and there is more behind them
            self.store.look_again = time.monotonic() + self._soon()
            return
        self._last = None
        self.store.look_again, free = await self._when()
        if free and not self._empty_claims:  # another session locked a key
            claims += await self._take(count - len(claims), began)
            self.store.look_again = (await self._when())[0] if len(claims) < count else None

    async def _when(self) -> tuple[float | None, bool]:
        """Return when to look again, by this process's clock (None: next poll), and whether a key has room now."""
        text = self.store._text("when", self.say.when)
        me = (self.store.worker,) if self.dim.group.process is not None else ()
        wait, ready = (await self.store.database.read(rows_of(text, me)))[0]
        now = time.monotonic()
        if wait == 0:  # other claims were faster, or held its lock
            return now + self._soon(), True
        times = [now + max(wait, _least_wait(self.dim))] if wait is not None else []
        if ready:  # rows held back by what other workers run
            times.append(now + HELD_AGAIN)
        return min(times) if times else None, False

    def _soon(self) -> float:
        return random.uniform(0, min(_LOCKED_AGAIN * 2.0 ** min(self._empty_claims, 10), HELD_AGAIN))

    def _rebuild_ranges(self, run: Run) -> None:
        """Divide the keys again, into more ranges than before. This locks out other claims: a claim that has read the
        old ranges finds them deleted.
        """
        say = self.say
        there, fresh = run(say.count_all(), ())[0]
        if fresh:
            return
        wanted = max(RANGES, min(2 * there, MOST_RANGES))
        keys = [row[0] for row in run(say.range_starts("$1::int"), (wanted,))]
        locked = len(run(say.lock_all(), ()))
        there, fresh = run(say.count_all(), ())[0]
        if locked == there and not fresh:
            run(say.drop_all(), ())
            if run(f"{say.create_first_range()}\nreturning 1", ()):
                run(say.create_ranges("select jsonb_array_elements_text($1::text::jsonb) as key"), (json.dumps(keys),))


def _least_wait(dim: BoundGates) -> float:
    """For a fast rate, wait for half a bucket or a twentieth of a second, not for each token."""
    rate = dim.group.rate
    if rate is None or rate.source is not None or rate.adaptive is not None:
        return 0.005
    return min(0.05, rate.capacity(rate.n) / 2 / (rate.n / rate.per.total_seconds()))
