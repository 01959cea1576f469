"""A lane's statements as they will run, for people to read."""

from __future__ import annotations

from ..claim import KINDS
from .inspect import LaneView
from .postgres import PostgresStatements


def texts(view: LaneView) -> dict[str, str]:
    """The statements of a lane in one environment, by what they do."""
    say, lane, found = view.statements, view.lane, dict[str, str]()
    if isinstance(say, PostgresStatements):
        found["claim"] = say.claim()
        if say.bound() is not None:
            found["claim, from the remembered lower bound"] = say.claim(bounded=True)
    elif say.loose():
        found["claim"] = say.claim(placed=True)
        found["claim, of rows without a place in the order"] = say.claim(placed=False)
    else:
        found["claim"] = say.claim()
    for kind in KINDS:
        found[f"settle, {kind}"] = say.settle(kind, ())
    if view.binding.renew != "none":
        found["renew"] = say.renew()
    if "progress" in view.binding.roles:
        found["progress"] = say.progress()
    if isinstance(say, PostgresStatements):
        found["sweep"] = say.sweep(lane.lease)
        return found
    found["sweep, find"] = say.find_stale(lane.lease)
    found["sweep, back to ready"] = say.sweep(poison=False)
    if say.poison() is not None:
        found["sweep, poison"] = say.sweep(poison=True)
    return found
