"""What gates learn from how runs ended: streaks, refusals and delays, written together with the outcomes.

The gate rows are locked first, in the order of their keys, and updated from their locked values. So the changes of two
concurrent workers add up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...declare.gates import closed_by_refusal
from ..database import Run
from ..lane.claim import Settlement
from .gate_binding import BoundGates
from .gate_rows import GateChange, GateRows, Spot
from .rules import Ended, GateState, Learned, learn

if TYPE_CHECKING:
    from ..lane.lane_store import LaneStore

#: The row that stores a lane's pauses, and the reason of a pause that an outcome asked for.
LANE_SPOT: Spot = ("", "")
ASKED_TO_WAIT = "the other side asked to wait"
#: Seconds between two writes for successes that change nothing else.
_SUCCESS_EVERY = 1.0


@dataclass(frozen=True)
class BreakerChange:
    """A breaker that opened or closed."""

    dim: str
    key: str
    opened: bool
    streak: int


class GateLearning:
    """What this worker has to record for the gates of one lane."""

    def __init__(self, store: LaneStore, dims: Sequence[BoundGates], rows: GateRows) -> None:
        self.store, self.dims, self.rows = store, {dim.label: dim for dim in dims}, rows
        groups = [dim.group for dim in dims]
        self._learns = {g.label for g in groups if g.breaker is not None or (g.rate and g.rate.adaptive)}
        self._groups = groups
        #: Whether the next start may depend on how a run ended.
        self.decides = any(g.rate is not None or g.breaker is not None for g in groups)
        self._successes: dict[Spot, float] = {}
        self._turned: list[BreakerChange] = []

    async def hear(self, settlements: Sequence[Settlement]) -> None:
        """Learn from failures before their outcomes are written.

        Once an outcome is written, another row may start in its place. It must not start if this failure opened the
        breaker. Lost claims count, too: their runs did fail.
        """
        if any(s.kind != "done" and (s.word or s.closes is not None) and not s.heard for s in settlements):
            self._turned += await self._note([s for s in settlements if not s.heard])

    async def note(self, settlements: Sequence[Settlement]) -> list[BreakerChange]:
        """Learn from the remaining settlements, in order. Returns the breakers that changed since the last call."""
        if not self._learns and not self._turned and all(s.closes is None for s in settlements):
            return []
        self._turned += await self._note([s for s in settlements if not s.heard])
        turned, self._turned = self._turned, []
        return turned

    async def _note(self, settlements: Sequence[Settlement]) -> list[BreakerChange]:
        turned = await self._learn_from(settlements)
        for settlement in settlements:
            settlement.heard = True
        return turned

    async def _learn_from(self, settlements: Sequence[Settlement]) -> list[BreakerChange]:
        if not self._learns:  # these gates learn only from a refusal with a time
            settlements = [s for s in settlements if s.closes is not None]
        ends: dict[Spot, list[Ended]] = {}
        lane_for = max(
            (s.closes.total_seconds() for s in settlements if s.closes is not None and s.closes_lane), default=0
        )
        for settlement in settlements:
            word = "" if settlement.kind == "done" else settlement.word
            closes = settlement.closes.total_seconds() if settlement.closes is not None else None
            keys = {dim.label: "" for dim in self.dims.values() if dim.phrase is None} | dict(
                settlement.claim.gates or {}
            )
            closed = set() if closes is None or settlement.closes_lane else closed_by_refusal(self._groups, keys)
            for label, key in keys.items():
                end = Ended(
                    word if label in self._learns else None,
                    settlement.duration,
                    settlement.cause,
                    closes if label in closed else None,
                )
                if end.word is not None or end.closes is not None:
                    ends.setdefault((label, key), []).append(end)
        if plain := self._plain(ends):
            # A success of a healthy key writes nothing, but it ends a streak that another worker has recorded.
            states = await self.store.database.read(lambda run: self._read(run, plain))
            for spot in plain:
                if spot not in states or not states[spot].streak:
                    del ends[spot]
        if not ends and not lane_for:
            return []
        return await self.store.database.transact(lambda run: self._write(run, ends, lane_for))

    def _plain(self, ends: dict[Spot, list[Ended]]) -> list[Spot]:
        """Keys with nothing but successes, where the last write is recent."""
        now, entries = time.monotonic(), []
        if len(self._successes) > 100_000:
            self._successes.clear()
        for spot, several in ends.items():
            rate = self.dims[spot[0]].group.rate
            if any(end.word or end.closes is not None for end in several) or (rate is not None and rate.adaptive):
                self._successes.pop(spot, None)
            elif now - self._successes.get(spot, -_SUCCESS_EVERY) < _SUCCESS_EVERY:
                entries.append(spot)
            else:
                self._successes[spot] = now
        return entries

    def _read(self, run: Run, spots: Sequence[Spot]) -> dict[Spot, GateState]:
        states = self.rows.read(run, spots)
        for label, dim in self.dims.items():
            mine = {key: state for (of, key), state in states.items() if of == label}
            states |= {(label, key): state for key, state in dim.overlay(run, mine).items()}
        return states

    def _write(self, run: Run, ends: dict[Spot, list[Ended]], lane_for: float) -> list[BreakerChange]:
        states = self.rows.lock(run, [*ends, *([LANE_SPOT] if lane_for else [])], wait=True)
        turned, changes = [], []
        if lane_for and lane_for > (states[LANE_SPOT].paused_for or 0.0):
            changes.append(
                GateChange(*LANE_SPOT, {"paused_until": lane_for, "paused_at": 0.0, "reason": ASKED_TO_WAIT})
            )
        for spot in sorted(ends):
            dim = self.dims[spot[0]]
            state = dim.overlay(run, {spot[1]: states.get(spot, GateState(spot[1]))})[spot[1]]
            learned = learn(dim.group, state, ends[spot])
            if learned.opened or learned.shut:
                streak = learned.values.get("streak", state.streak)
                turned.append(BreakerChange(*spot, learned.opened, streak))
            if dim.breaker is not None:
                self.write_own(run, dim, spot[1], learned)
            if learned.values:
                changes.append(GateChange(*spot, learned.values))
        self.rows.write(run, changes)
        return turned

    def write_own(self, run: Run, dim: BoundGates, key: str, learned: Learned) -> None:
        """Write the state of a breaker that is stored only in the user's own table."""
        own, names = dim.breaker, dim.columns
        assert own is not None
        written: list[str] = []
        computed: list[str] = []
        values: list[Any] = [key]
        for name in ("streak", "open_until", "last_success_at", "last_failure_at"):
            if name not in learned.values:
                continue
            value, column = learned.values.pop(name), getattr(names, name)
            if column is None:
                continue
            values.append(value)
            mark = self.rows.sql.mark(len(values), "float8")
            to = self.rows.sql.as_type(mark, "integer")
            if name != "streak":
                to = f"case when {mark} is null then null else {own.after(column, mark)} end"
            computed.append(f"{to} as _rm_v{len(values)}")
            written.append(f"{own.quote(column)} = _rm_s._rm_v{len(values)}")
        if written:
            # Times are columns of a step: an update that calls the clock is refused by a distributed planner.
            step = f"(select {', '.join(computed)}) _rm_s"
            run(f"update {own.table} set {', '.join(written)} from {step} where {own.of_first()}", tuple(values))
