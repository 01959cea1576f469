"""The settler: outcomes of runs that have ended are written in batches, beside the next claim."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ..errors import Unserved
from ..events import Events
from ..store.lane.claim import Report, Settlement
from .counters import Counters
from .environment import Environment
from .execute import unhooked
from .lane_state import LaneState

_BATCH = 1000  # outcomes per statement
_LOCKED_AGAIN, _NO_RUN_AFTER = 0.5, 1.0
_AGAIN = (0.5, 30.0)  # how soon, and how late at most, outcomes are tried again that no row kept from being written


class Settler:
    """Writes what runs have come to. ``guarded`` runs a step against a place that may be away."""

    def __init__(
        self,
        events: Events,
        tally: Counters,
        guarded: Callable[[Environment, Coroutine[Any, Any, None]], Coroutine[Any, Any, None]],
        ring: Callable[[], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._events, self._tally = events, tally
        self._guarded, self._ring, self._crashed = guarded, ring, crashed
        #: Not written, because somebody had the row locked or the table would not take it: when to try again.
        self._later: list[tuple[float, LaneState, Settlement]] = []
        #: Pauses before an outcome that the database refuses to take at all is tried again; then it is given up.
        self.stuck_pauses: Sequence[float] = (1.0, 2.0, 4.0, 8.0, 15.0)
        #: The worker stops: nothing is kept for later that the database refuses.
        self.stopping = False

    def all(self, places: Sequence[Environment]) -> None:
        """Write what has ended, everywhere."""
        for place in places:
            for held in place.held:
                self.soon(place, held)

    def soon(self, place: Environment, held: LaneState) -> None:
        """Write what has ended, beside the next claim; what ends while that is under way makes the next batch."""
        if held.unwritten and held.settling is None and time.monotonic() >= max(place.retry_at, held.settle_again):
            held.settling = asyncio.create_task(self._settle_all(place, held))

    async def _settle_all(self, place: Environment, held: LaneState) -> None:
        try:
            while held.unwritten and time.monotonic() >= max(place.retry_at, held.settle_again):
                await self._guarded(place, self._settle(place, held))
        except Exception as error:
            self._crashed(error)
        finally:
            held.settling = None
            self._ring()

    def busy(self, places: Sequence[Environment]) -> bool:
        """Whether some outcome is not written yet."""
        waiting = any(held.unwritten or held.settling for place in places for held in place.held)
        return waiting or bool(self._later)

    async def _settle(self, place: Environment, held: LaneState) -> None:
        batch, held.outcomes = held.outcomes[:_BATCH], held.outcomes[_BATCH:]
        if held.gates is not None:
            held.gates.on_the_way = len(batch)
        try:
            await self._write(place, held, batch)
            held.settle_pause = 0.0
        except Unserved as error:
            self._put_off(held, error)
            return
        finally:
            if held.gates is not None:
                held.gates.on_the_way = 0
        if held.gates is not None:
            ended = bool(held.gates.unheard)
            for turned in await held.gates.tell():
                self._tally.turned(held, turned)
            place.look = place.look or (ended and held.gates.held_back)

    def _put_off(self, held: LaneState, error: Unserved) -> None:
        """No row is at fault: the outcomes wait, and the lane claims nothing meanwhile."""
        held.settle_pause = min(max(2 * held.settle_pause, _AGAIN[0]), _AGAIN[1])
        held.settle_again = held.rests_until = time.monotonic() + held.settle_pause
        held.altered = held.altered or error.altered
        self._events.emit(
            "statement_refused", logging.ERROR, environment=held.store.binding.environment, lane=held.store.lane.name,
            error=error.message, retry_in=held.settle_pause, waiting=len(held.outcomes),
            hint="outcomes wait until the table or the right is as it was; no row ends by it",
        )  # fmt: skip

    async def _write(self, place: Environment, held: LaneState, batch: list[Settlement]) -> None:
        claims = [settlement.claim for settlement in batch]
        if lost := [claim for claim in claims if claim.lost]:
            for claim in lost:
                self._tally.lost(held, claim)
            batch = [settlement for settlement in batch if not settlement.claim.lost]
            claims = [settlement.claim for settlement in batch]
        if not batch:
            return
        try:
            await held.begin_settle(claims)
            report = await held.store.settle(batch)
        except BaseException:
            held.outcomes[:0] = batch
            raise
        finally:
            held.end_settle(claims)
        self._account(place, held, report)

    def _account(self, place: Environment, held: LaneState, report: Report) -> None:
        """What became of a batch: counted, and what could not be written yet is kept for later."""
        ended = [*report.written, *report.refused]
        held.drop([settlement.claim for settlement in (*ended, *report.lost)])
        self._ended(held, ended)
        for settlement in ended:
            if settlement.delay is not None:
                place.will_be_due(settlement)
        for settlement in report.lost:
            self._tally.lost(held, settlement.claim)
        now = time.monotonic()
        if "run_after" not in held.store.binding.roles and ended and not any(s.kind == "done" for s in ended):
            # Nothing in the table keeps these rows back: without a pause they would be claimed again at once, for ever.
            delays = [s.delay.total_seconds() for s in ended if s.delay is not None]
            held.rests_until = now + min(max(delays, default=0.0), _NO_RUN_AFTER)
        self._later += [(now + _LOCKED_AGAIN, held, settlement) for settlement in report.locked]
        for settlement, words in report.stuck:
            self._refused(held, settlement, words)
        for settlement, error in report.unhooked:
            held.outcomes.append(unhooked(held.store, settlement, error))
            self._ring()

    def _refused(self, held: LaneState, settlement: Settlement, words: str) -> None:
        """The database takes no outcome for this row: tried a few more times, then given up, told and passed over."""
        given_up = self.stopping or settlement.refusals >= len(self.stuck_pauses)
        if given_up:
            held.drop([settlement.claim])
            held.store.passed.add(settlement.claim.key)
            self._tally.stuck(held, settlement, words)
        else:
            pause = self.stuck_pauses[settlement.refusals]
            settlement.refusals += 1
            self._later.append((time.monotonic() + pause, held, settlement))
        self._events.emit(
            "settle_refused", logging.ERROR, lane=held.store.lane.name, environment=held.store.binding.environment,
            id=settlement.claim.id, outcome=settlement.kind, error=words, given_up=given_up,
            hint="a trigger or constraint refuses this row's outcome; it stays running until that is mended"
            if given_up else "the table takes no outcome for this row; it is tried again",
        )  # fmt: skip

    def finished(self, place: Environment, held: LaneState, settlement: Settlement) -> None:
        """A run has ended itself, in a ``finish`` block: what a written batch brings about is brought about for it."""
        self._ended(held, [settlement])
        if held.gates is not None:
            self.soon(place, held)

    def _ended(self, held: LaneState, ended: list[Settlement]) -> None:
        """Outcomes stand: they are counted, gates hear of them, and jobs that waited for them may go on."""
        self._tally.settled(held, ended)
        if held.gates is not None:
            held.gates.ended(ended)
        if held.follow is not None and ended:
            held.follow.settled(held.store.binding.columns, ended)

    @property
    def next_time(self) -> float:
        """When something that could not be written is tried again."""
        return min((at for at, *_ in self._later), default=math.inf)

    def retry_later(self, now: float) -> None:
        """Outcomes that could not be written, because somebody had the row locked, are tried again."""
        ripe = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, held, settlement in ripe:
            held.outcomes.append(settlement)
