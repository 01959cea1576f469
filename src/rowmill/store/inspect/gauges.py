"""How a lane stands, in numbers that may be asked for every few seconds: bounded in rows and in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...declare.states import DEAD, OPEN, RUNNING
from ...errors import Busy
from .gate_view import has_table, lane_gates
from .lane_view import LaneView

#: A count beyond this is not counted further.
MOST = 10_000
_SECONDS = 0.5
STATES = (*OPEN, RUNNING, DEAD)
_KEYS = 500


@dataclass(frozen=True, slots=True)
class Gauges:
    """Rows by state, ``MOST`` standing for that many or more; a state that took too long to count is not there.

    ``oldest_ready``: seconds that the oldest ready row has been ready, among the ``MOST`` that are claimed next; 0
    where none is ready, None where it is not known. ``held_keys``: keys that a gate holds back, by what it goes by.
    """

    rows: dict[str, int]
    oldest_ready: float | None
    held_keys: dict[str, int]


async def gauges(view: LaneView, states: Sequence[str] = STATES) -> Gauges:
    """Ask a lane in one environment. ``states`` may be any of the lane's, and ``stuck``."""
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
    return Gauges(rows, oldest, await _held(view))


async def _held(view: LaneView) -> dict[str, int]:
    if not view.lane.groups or not await has_table(view):
        return {}
    gates = await lane_gates(view)
    return {dim.label: sum(bool(key.held) for key in await gates.keys(dim, _KEYS)) for dim in gates.dims}
