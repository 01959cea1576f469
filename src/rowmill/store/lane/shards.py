"""A lane over several shards: one store for each, whose statements are about its own shard alone.

So the server looks into one partition, or sends a statement to one node. Claims go from shard to shard in turn. A claim
remembers its shard, and whatever is written for it goes there. What looks at all rows (counts, sweeps, inspection) is
one statement over all shards, by the store of the whole lane.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import DatabaseError, Refused, Unreachable, UnreadableReply
from .claim import Claim

if TYPE_CHECKING:
    from .lane_store import LaneStore

#: Shards that one claim asks because they have ready rows, and seconds until it asks the rest of these.
MOST, _PAUSE = 16, 0.1


class Shards:
    """The shards of one lane in this process."""

    def __init__(self, store: LaneStore) -> None:
        self._store = store
        (self._values,) = store.binding.shard.values()
        self._stores: dict[Any, LaneStore] = {}
        #: The position of the shard whose turn it is. Whether the last claim found rows enough: then the next one does
        #: not look which shards have any.
        self._next: int | None = None
        self._plenty = True
        #: What a later shard of a claim failed with: the next claim tells it, after the claims of this one.
        self._error: DatabaseError | None = None

    def of(self, bucket: Any) -> LaneStore:
        """The store of one shard."""
        whole, store = self._store, self._stores.get(bucket)
        if store is None:
            store = self._stores[bucket] = whole.for_bucket(bucket)
        if store.worker != whole.worker:
            store.sign(whole.worker)
        return store

    @property
    def opened(self) -> Sequence[LaneStore]:
        """The stores of the shards that were asked so far."""
        return tuple(self._stores.values())

    async def claim(self, count: int) -> list[Claim]:
        """Take rows of the shard whose turn it is; where it has too few, of others that have ready rows."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        began, claims, more = time.monotonic(), list[Claim](), False
        if self._next is None:  # each worker begins elsewhere: in one shard they would meet each other's locked rows
            self._next = zlib.crc32(self._store.worker.encode()) % len(self._values)
        for store in self.opened:  # those whose time has come are among the shards with ready rows
            store.look_again = None if (store.look_again or 0.0) <= began else store.look_again
        try:
            if self._plenty:
                await self._ask([self._next], count, claims)
            if len(claims) < count:
                ready = await self._ready()
                await self._ask(ready[:MOST], count, claims)
                more = len(ready) > MOST and len(claims) < count
        except DatabaseError as error:
            # Rows may be claimed all the same. The worker finds them by its mark, with those of the shards before.
            unanswered = self._store.marked and isinstance(error, (Unreachable, UnreadableReply))
            if not claims or unanswered:
                raise
            self._error, more = error, True
        self._plenty = len(claims) >= count
        times = [store.look_again for store in self.opened if store.look_again is not None]
        self._store.look_again = min([*times, time.monotonic() + _PAUSE] if more else times, default=None)
        return claims

    async def _ask(self, positions: Sequence[int], count: int, claims: list[Claim]) -> None:
        whole = self._store
        for position in positions:
            if len(claims) >= count:
                return
            self._next = (position + 1) % len(self._values)
            store = self.of(self._values[position])
            store.claims_work = whole.claims_work
            try:
                claims += await store.claim(count - len(claims))
            finally:
                whole.claims_work |= store.claims_work
                whole.refused_rows += store.refused_rows
                store.refused_rows = []

    async def _ready(self) -> Sequence[int]:
        """Positions of the shards with a ready row, in the order of their turns."""
        whole, number = self._store, len(self._values)
        text = whole._text("ready shards", whole.statements.ready_shards)
        try:
            found = [row[0] for row in await whole.database.read(lambda run: run(text, ()))]
        except Refused:  # a distributed database does not plan it: they are asked in turn, some at a time
            found = list(range(number))
        return sorted(found, key=lambda position: (position - (self._next or 0)) % number)
