"""What this process holds: the claims that the heartbeat thread renews and a shutdown gives back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..store import LaneStore
from ..store.lane.claim import Claim, Settlement
from .gate_feedback import GateFeedback
from .running_marks import salt
from .tracing import Tracer

if TYPE_CHECKING:
    from .failure_log import FailureLog
    from .joins import Joins


class LaneState:
    """The claims of one lane in one environment, shared by the event loop and the heartbeat thread.

    Where renewal moves the fence itself (``renew="claimed_at"``), a claim is never renewed and settled at the same
    time: whichever came second would carry a time that no longer stands in the row.
    """

    def __init__(self, store: LaneStore) -> None:
        self.store = store
        self.moving = store.binding.renew == "claimed_at"
        #: Tells marks of this table's rows from those of other tables.
        self.salt = salt(store.binding.environment, store.binding.table.fullname)
        #: Runs that have ended and are not written yet.
        self.outcomes: list[Settlement] = []
        #: The task that writes them; one at a time, so that what ends meanwhile makes the next batch.
        self.settling: asyncio.Task[None] | None = None
        #: Where the lane has gates.
        self.gates = GateFeedback(store.notes) if store.notes is not None else None
        #: More rows may be ready than were asked for.
        self.more = False
        #: The reply to a claim was lost: rows may be ours without our knowing.
        self.unsure = False
        #: The database refused the lane's claim, or nothing keeps its retries back: left alone until then (monotonic).
        self.rests_until = 0.0
        self.refused: str | None = None
        #: Outcomes wait until then (monotonic), and so long: the table or a right is not as the statement needs it.
        self.settle_again, self.settle_pause = 0.0, 0.0
        #: The table was altered: look at it again before the next claim.
        self.altered = False
        #: What follows when jobs of rowmill's own table have ended.
        self.follow: Joins | None = None
        #: Where failures are written down.
        self.failures: FailureLog | None = None
        #: Who traces what is done with it, if anybody does.
        self.tracer: Tracer | None = None
        #: Claims whose runs are ending themselves (``job.finish``), by identity: that a renewal no longer finds the row
        #: running may only mean that the commit was faster than its reply.
        self.ending: set[int] = set()
        self._claims: dict[tuple[Any, ...], Claim] = {}
        self._renewing: set[int] = set()
        self._settling: set[int] = set()
        #: Claims whose fence may stand elsewhere than we know: the reply to their renewal was lost. By identity.
        self._astray: set[int] = set()
        self._lock = threading.Lock()

    def rebind(self, store: LaneStore) -> None:
        """Work by the table as it is now. Claims that are held keep the columns they were claimed with."""
        store.sign(self.store.worker)
        store.opened_at = self.store.opened_at
        self.store = store
        if self.gates is not None and store.notes is not None:
            self.gates.notes = store.notes
        self.altered, self.rests_until, self.settle_again, self.settle_pause = False, 0.0, 0.0, 0.0

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claims: Iterable[Claim]) -> None:
        """Hold these from now on."""
        self._claims.update({claim.key: claim for claim in claims})

    def drop(self, claims: Sequence[Claim]) -> None:
        """These are settled or lost."""
        held = self._claims
        for claim in claims:
            if held.get(claim.key) is claim:
                del held[claim.key]
        if self.moving:
            gone = [id(claim) for claim in claims]
            self._settling.difference_update(gone)
            self._astray.difference_update(gone)

    @property
    def unwritten(self) -> bool:
        """Something has ended that is not written yet, or that the gates have not heard of."""
        return bool(self.outcomes) or (self.gates is not None and bool(self.gates.unheard))

    def again(self, claims: Iterable[Claim]) -> list[Claim]:
        """Claims held already on rows that these are on, too."""
        held = self._claims
        return [held[claim.key] for claim in claims if claim.key in held] if held else []

    def find(self, key: tuple[Any, ...]) -> Claim | None:
        """The claim held on that row, if there is one."""
        return self._claims.get(key)

    def all(self) -> list[Claim]:
        """All claims held at this moment."""
        return list(self._claims.values())

    def begin_renewal(self) -> list[Claim]:
        """The claims to renew now; with a moving fence, not those that are being settled."""
        if not self.moving:
            return self.all()
        with self._lock:
            claims = [claim for claim in self.all() if id(claim) not in self._settling]
            self._renewing = {id(claim) for claim in claims}
            return claims

    def end_renewal(self) -> None:
        """The renewal's answer is in."""
        with self._lock:
            self._renewing = set()

    def lost_reply(self, claims: Sequence[Claim]) -> None:
        """A renewal of these was not answered: a moving fence may have moved all the same."""
        if self.moving:
            self._astray.update([id(claim) for claim in claims])

    async def find_fences(self, store: LaneStore, claims: Sequence[Claim]) -> None:
        """Read where the fences of these stand, as far as a lost reply has left that open."""
        if astray := [claim for claim in claims if id(claim) in self._astray]:
            await store.adopt(astray)
            self._astray.difference_update([id(claim) for claim in astray])

    async def begin_settle(self, claims: Sequence[Claim]) -> None:
        """With a moving fence: wait until none of these is being renewed, keep it so, and know where it stands."""
        if not self.moving:
            return
        with self._lock:
            self._settling |= {id(claim) for claim in claims}
        while any(id(claim) in self._renewing for claim in claims):  # noqa: ASYNC110 - the other side is a thread
            await asyncio.sleep(0.005)
        await self.find_fences(self.store, claims)

    def end_settle(self, claims: Sequence[Claim]) -> None:
        """Settled or not: what is still held may be renewed again."""
        if not self.moving:
            return
        with self._lock:
            self._settling -= {id(claim) for claim in claims}
