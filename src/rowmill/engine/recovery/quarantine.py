"""Quarantine: rows that were taken back from dead workers twice run while this process holds nothing else.

One of them may have killed those workers. They run a few at a time, or one alone, so that a crash affects few others.
After the first death they run beside other work: most workers die of a deploy, of a host or of a kill, not of a row.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ...errors import Refused, Unreachable
from ...store.lane.claim import Claim, Settlement
from ...store.lane.sweep import TAKEN_BACK
from ..lane_state import LaneState

if TYPE_CHECKING:
    from ..worker import Worker

_FEW = 16  # suspects that run side by side


class Quarantine:
    """The suspects of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        #: A lane that has suspects: nothing else is claimed until they have run.
        self.pending: LaneState | None = None
        self._running: list[Claim] = []
        #: Suspects that run beside other work; they are cleared when they have ended.
        self.beside: list[tuple[LaneState, Claim]] = []

    async def hold_back(self, lane_state: LaneState, claims: list[Claim], suspects: dict[Any, int]) -> list[Claim]:
        """Return the claims that may run now. Suspects go back, unless this process holds nothing else, or they may
        run beside other work.
        """
        if lane_state.store.survives_deaths(3):
            first = [claim for claim in claims if suspects.get(claim.key) == 1]
            self.beside += [(lane_state, claim) for claim in first]
            suspects = {key: count for key, count in suspects.items() if count > 1}
            if not suspects:
                return claims
        if not self._worker.busy:  # run them now: given back, they would use up a rate or a pace again with every claim
            return await self._choose_suspects(lane_state, claims, suspects)
        self.pending = self.pending or lane_state
        await self._settle_now(lane_state, [Settlement(claim, "release") for claim in claims if claim.key in suspects])
        return [claim for claim in claims if claim.key not in suspects]

    async def clear_ended(self) -> None:
        """Suspects that ran beside other work, and have ended, are suspects no more."""
        ended = [one for one in self.beside if one[0].claims.get(one[1].key) is not one[1]]
        self.beside = [one for one in self.beside if one not in ended]
        for lane_state in {id(lane_state): lane_state for lane_state, _ in ended}.values():
            claims = [claim for other, claim in ended if other is lane_state and not claim.lost]
            if claims:
                await self._worker.guarded(lane_state.environment, lane_state.store.clear_suspects(claims))

    async def run_next(self) -> None:
        """Claim and start the next suspects, once this process holds nothing else."""
        lane_state = self.pending
        if lane_state is None or self._worker.busy or not lane_state.environment.reachable:
            return
        self.pending, lane_state.environment.look = None, True
        await self._worker.guarded(lane_state.environment, self._run_next(lane_state))

    async def _run_next(self, lane_state: LaneState) -> None:
        store, slots = lane_state.store, lane_state.slots
        if self._running:
            await store.clear_suspects(self._running)
            self._running = []
        try:
            claims = await store.claim(min(_FEW, slots.rows))
        except Refused:
            return  # the next regular claim is refused, too, and reports it
        except (Unreachable, asyncio.CancelledError):
            lane_state.reply_lost = store.marked
            raise
        self._worker.take_in(lane_state, claims)
        if suspects := await store.suspects(claims):
            claims = await self._choose_suspects(lane_state, claims, suspects)
        slots.put(lane_state, claims)
        slots.start()

    async def _choose_suspects(
        self, lane_state: LaneState, claims: list[Claim], suspects: dict[Any, int]
    ) -> list[Claim]:
        """Return the suspects that run now: some, or one alone. The others go back."""
        store = lane_state.store
        words = store.error_text(TAKEN_BACK)
        poison = [claim for claim in claims if store.is_poison(claim, suspects.get(claim.key, 0))]
        candidates = [claim for claim in claims if claim.key in suspects and claim not in poison][:_FEW]
        few = 2 if store.survives_deaths(3) else 1 if store.survives_deaths(2) else 0
        several = all(suspects[claim.key] <= few for claim in candidates)
        self._running = candidates if several else candidates[:1]
        ended = [Settlement(claim, "dead", error=words) for claim in poison]
        others = [claim for claim in claims if claim not in poison and claim not in self._running]
        await self._settle_now(lane_state, [*ended, *(Settlement(claim, "release") for claim in others)])
        self.pending = lane_state
        return self._running

    async def _settle_now(self, lane_state: LaneState, settlements: list[Settlement]) -> None:
        """Write these before anything is started: every row held at a crash counts as a suspect."""
        lane_state.outcomes += settlements
        self._worker.settle_soon(lane_state)
        while lane_state.settling is not None:
            await asyncio.wait([lane_state.settling])
