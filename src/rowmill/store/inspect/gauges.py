"""A lane's state in numbers, cheap enough to query every few seconds: bounded in rows and in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...declare.states import DEAD, OPEN, RUNNING
from ...errors import Busy
from .gate_view import has_table, lane_gates
from .lane_view import LaneView

#: Counting stops at this number.
MOST = 10_000
_SECONDS = 0.5
STATES = (*OPEN, RUNNING, DEAD)
_KEYS = 500
STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class Gauges:
    """Rows by state; ``MOST`` means that many or more. A state that took too long to count is missing.

    ``oldest_ready``: how many seconds the oldest ready row has been ready, among the ``MOST`` that are claimed next; 0
    if none is ready, None if unknown. ``held_keys``: the number of keys that a gate holds back, by the gate's key.
    ``longest_wait``: seconds until the last of them opens again, among those that open by time. ``longest_silence``:
    the most seconds since the last sign of life of a stuck row.
    """

    rows: dict[str, int]
    oldest_ready: float | None
    held_keys: dict[str, int]
    longest_wait: dict[str, float]
    longest_silence: float


async def gauges(view: LaneView, states: Sequence[str] = STATES) -> Gauges:
    """Query the gauges of a lane in one environment. ``states`` may be any states of the lane, and ``stuck``."""
    rows: dict[str, int] = {}
    oldest: float | None = None
    for state in states:
        condition = view.condition(state)
        if condition is None:
            continue
        age, order = (view.waited(), f" order by {view.order(state)}") if state == "ready" else ("null", "")
        inner = f"select {age} as age from {view.statements.table} where {condition}{order} limit {MOST}"
        try:
            number, longest = (await view.ask(f"select count(*), max(age) from ({inner}) x", seconds=_SECONDS))[0]
        except Busy:  # no index for this state
            continue
        rows[state] = int(number)
        if state == "ready":
            oldest = 0.0 if not number else None if longest is None else max(float(longest), 0.0)
    held, waits = await _held(view)
    silence = await _silence(view) if rows.get(RUNNING) else 0.0
    return Gauges(rows, oldest, held, waits, silence)


async def _silence(view: LaneView) -> float:
    """The most seconds since the last sign of life of a stuck row; 0 if none is stuck."""
    if not view.condition(STUCK):
        return 0.0
    silent = [
        since
        for row in await view.rows(STUCK, _KEYS)
        if (since := row.silent_for if row.silent_for is not None else row.ages.get("claimed_at")) is not None
    ]
    return max(silent, default=0.0)


async def _held(view: LaneView) -> tuple[dict[str, int], dict[str, float]]:
    held: dict[str, int] = {}
    waits: dict[str, float] = {}
    if not view.lane.groups or not await has_table(view):
        return held, waits
    gates = await lane_gates(view)
    for dim in gates.dims:
        keys = [key for key in await gates.keys(dim, _KEYS) if key.held]
        held[dim.label] = len(keys)
        waits[dim.label] = max((gate.wait or 0.0 for key in keys for gate in key.held), default=0.0)
    return held, waits
