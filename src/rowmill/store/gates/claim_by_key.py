"""The gated claim on PostgreSQL as a worker makes it: whose turn is next, and when to look again."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import Refused
from ..asyncpg_pool import rows_of
from ..lane.claim import Claim
from ..lane.replan import Replan
from .claim_by_key_sql import ClaimByKeyStatements
from .gate_binding import BoundGates, KeylessShare

if TYPE_CHECKING:
    from ..lane.postgres import PostgresLane

#: How often gate rows of idle keys are looked for, in seconds.
_FORGET_EVERY = 30.0
#: Rows held back by what runs elsewhere are looked for again after this, where no time is known.
HELD_AGAIN, _LOCKED_AGAIN = 1.0, 0.01


class ClaimByKey:
    """The gated claim of one lane in this worker."""

    #: What it says.
    speak: type[ClaimByKeyStatements] = ClaimByKeyStatements

    def __init__(self, store: PostgresLane, dim: BoundGates, table: str) -> None:
        self.store, self.dim = store, dim
        self.say = self.speak(store.statements, dim, table)
        self._asks_for_worker = "worker" in store.binding.roles or dim.group.process is not None
        self._key_at = store.binding.columns.index(store.binding.key[0])
        #: The key served last.
        self._last: str | None = None
        self._forget_at = time.monotonic() + _FORGET_EVERY * random.uniform(0, 1)
        #: Gate rows made here, in all and of late, and the number at which the server is told to look at them anew.
        self._made, self._new, self._count_at = 0, 0, 100
        self._guise = Replan(dear=0.01, per_row=0.0002)
        #: Claims in a row that got nothing although something was free: somebody holds the rows themselves.
        self._in_vain = 0
        self._share = KeylessShare()

    async def claim(self, count: int) -> list[Claim]:
        """Rows of as many keys as it takes: from the one served last on, and then from the first."""
        began = time.monotonic()
        try:
            claims = await self._round(count, began)
        except Refused:
            self._last = None  # perhaps it is no key any more
            raise
        self._guise.claimed(time.monotonic() - began, count)
        await self._mind_plans()
        self.store.look_again = None
        if len(claims) < count:
            await self._look_around(claims, count, began)
        self._in_vain = 0 if claims else self._in_vain + 1
        if began > self._forget_at:
            self._forget_at = began + _FORGET_EVERY * random.uniform(0.7, 1.3)
            await self.store.database.write(lambda run: run(self.store._text("forget", self.say.forget), ()))
        return claims

    async def _round(self, count: int, began: float) -> list[Claim]:
        begun = self._last is not None
        claims = await self._take(count, began)
        if begun and len(claims) < count:
            self._last = None
            claims += await self._take(count - len(claims), began)
        return claims

    async def _look_around(self, claims: list[Claim], count: int, began: float) -> None:
        """Fewer rows than were asked for: when to look again."""
        self._last = None
        self.store.look_again, free = await self._when()
        if free and (self._new or not self._in_vain):  # a key that has only now got its gate row, or was locked
            claims += await self._take(count - len(claims), began)
            self.store.look_again = (await self._when())[0] if len(claims) < count else None

    async def _take(self, count: int, began: float) -> list[Claim]:
        rows = await self._ask(count)
        last, self._new = rows[0][-2:]
        self._last = last if last is not None else self._last
        self._made += self._new
        return self._claims(rows, began, -3)

    async def _ask(self, count: int) -> Sequence[Any]:
        """The claim itself: the rows that were taken, each with its key and what is told of the claim as a whole."""
        begun = self._last is not None
        options = {"begun": begun, "loose": self._loose_share(count), **self._manner()}
        text = self.store._text(
            ("turns", *options.values(), self._guise.number), lambda: self._guise.of(self.say.claim(**options))
        )
        values = [count, *([self._last] if begun else []), *([self.store.worker] if self._asks_for_worker else [])]
        return await self.store.claim_rows(text, tuple(values))

    def _loose_share(self, count: int) -> int:
        return self._share.of(count) if self.dim.nullable else 0

    def _manner(self) -> dict[str, Any]:
        """What else the claim is told."""
        return {}

    def _claims(self, rows: Sequence[Any], began: float, key_at: int) -> list[Claim]:
        rows = [row for row in rows if row[self._key_at] is not None]
        claims = self.store.make_claims(rows, began)
        label = self.dim.label
        for claim, row in zip(claims, rows, strict=True):
            claim.gates = {label: row[key_at]} if row[key_at] is not None else {}
        return claims

    async def _mind_plans(self) -> None:
        """A plan that was made for a few keys reads all of them once they are many."""
        if self._made >= self._count_at:
            self._count_at = 4 * self._made
            await self.store.database.write(lambda run: run(f"analyze {self.say.table}", ()))

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
        return random.uniform(0, min(_LOCKED_AGAIN * 2.0 ** min(self._in_vain, 10), HELD_AGAIN))


def _least_wait(dim: BoundGates) -> float:
    """A fast rate is not followed token by token: half a bucket, or a twentieth of a second, at a time."""
    rate = dim.group.rate
    if rate is None or rate.source is not None or rate.adaptive is not None:
        return 0.005
    return min(0.05, rate.capacity(rate.n) / 2 / (rate.n / rate.per.total_seconds()))
