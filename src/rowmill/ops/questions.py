"""Questions that concern a Mill as a whole, for the command line, the API and the dashboard alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from ..declare.lane import Lane
from ..errors import RowmillError
from ..mill import Mill
from ..store import Database
from ..store.inspect import json_values, why_rules
from ..store.inspect.lane_view import LaneView, check_file, view_lane
from ..store.inspect.why import Inquiry, inquire
from ..store.inspect.why_rules import WhyAnswer
from ..store.lane.row_keys import parse
from ..store.own.workers import WorkersTable

#: An environment above that does not answer in this time is not waited for.
_PATIENCE = 3.0

View = Callable[[str, Lane], Awaitable[LaneView]]
Sees = Callable[[str], bool]


async def why(mill: Mill, environment: str, lane: Lane, text: str, databases: Mapping[str, Database]) -> WhyAnswer:
    """Why a row is not running. ``databases``: the environments up to this one, in order."""

    async def view(name: str, other: Lane) -> LaneView:
        return await view_lane(other, name, databases[name], mill.clock)

    return await why_in(mill, await view(environment, lane), text, databases, view)


async def why_in(
    mill: Mill,
    view: LaneView,
    text: str,
    databases: Mapping[str, Database],
    other: View,
    sees: Sees = lambda lane: True,
) -> WhyAnswer:
    """The same with lanes bound by ``other``. The answer names only lanes that ``sees`` allows."""
    lane, environment = view.lane, view.environment
    inquiry = await inquire(view, parse(view.binding, text))
    seen = [o for o in mill.lanes.values() if o is lane or sees(o.name)]
    beside = [o for o in seen if o is not lane and o.serves(environment) and view.same_table(o)]
    views = [await other(environment, one) for one in beside]
    return why_rules.why(await inquiry.facts(await _above(seen, inquiry, databases, other), views))


async def _above(
    lanes: Sequence[Lane], inquiry: Inquiry, databases: Mapping[str, Database], view: View
) -> list[LaneView]:
    """The lanes that the workers of this one serve before it: in environments above, and here by priority."""
    lane, here, live = inquiry.lane, inquiry.view.environment, inquiry.live
    ordered = sorted(lanes, key=lambda other: other.priority)
    common = {name for worker in live for name in worker["lanes"]} if live else {other.name for other in lanes}
    found: list[LaneView] = []
    for name, database in databases.items():
        first = ordered if name != here else ordered[: ordered.index(lane)]
        try:
            async with asyncio.timeout(_PATIENCE):
                if name != here and live:
                    fleet = WorkersTable(database)
                    there = {w["id"] for w in await fleet.all() if w["alive"]} if await fleet.exists() else set()
                    if not there & {worker["id"] for worker in live}:
                        continue
                served = [other for other in first if other.serves(name) and other.name in common]
                found += [await view(name, other) for other in served]
        except (RowmillError, TimeoutError):
            continue
    return found


async def fleet_of(database: Database) -> list[dict[str, Any]]:
    """The workers that one environment knows of, as they said it themselves."""
    check_file(database)
    fleet = WorkersTable(database)
    return await fleet.all() if await fleet.exists() else []


def workers(parts: Iterable[tuple[str, Iterable[dict[str, Any]]]], *, everyone: bool = False) -> list[dict[str, Any]]:
    """Workers from what each environment knows; those that have stopped only on request."""
    # A worker of several environments is in the table of each: it is one worker.
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, part in parts:
        for worker in part:
            known = found.setdefault((worker["id"], worker["incarnation"]), worker | {"environments": []})
            known["environments"].append(name)
            if worker["silent_for"] < known["silent_for"]:
                known |= worker
    shown = [json_values.worker_value(worker) for worker in found.values() if everyone or worker["state"] != "stopped"]
    shown.sort(key=lambda worker: (("busy", "idle", "dead", "stopped").index(worker["state"]), worker["id"]))
    return shown
