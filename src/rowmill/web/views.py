"""What the pages and the API show, gathered as plain data. Nothing here writes, and nothing scans a big table.

Each function takes a ``CachedMill``, made once per application, and returns values that JSON has. ``sees`` tells which
lanes the caller may see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..declare import states
from ..declare.lane import Lane
from ..errors import RowmillError
from ..ops import questions
from ..ops.environments import EnvironmentFailure
from ..store import Database
from ..store.gates.pauses import standing
from ..store.inspect import json_values
from ..store.inspect.gate_view import has_table, lane_gates
from ..store.inspect.health import examine
from ..store.inspect.lane_view import LaneView
from ..store.inspect.pages import OPERATORS, Wanted, page
from ..store.inspect.quick_counts import QuickCounts
from ..store.lane.row_keys import written
from ..store.own import schema
from ..store.own.minutes import History
from .cached_mill import CachedMill, sight_of

__all__ = ["Sight", "sight_of"]
Sees = Callable[[str], bool]
#: Hours that the charts offer.
HOURS = (1, 6, 24, 168)
_KEYS = 50


# -- overview


async def overview(sight: CachedMill, sees: Sees, hours: float = 1.0) -> dict[str, Any]:
    """Every environment with its lanes: counts, rates, forecast, pauses; lanes in a row where one feeds the next."""
    parts = [_environment(sight, name, database, sees, hours) for name, database in sight.databases.items()]
    return {"environments": await asyncio.gather(*parts)}


async def _environment(sight: CachedMill, name: str, database: Database, sees: Sees, hours: float) -> dict[str, Any]:
    lanes = [lane for lane in sight.lookout.lanes if lane.serves(name) and sees(lane.name)]
    found: list[dict[str, Any]] = []
    failures: list[EnvironmentFailure] = []
    pauses: list[dict[str, Any]] = []
    histories, absent = None, False
    try:
        absent = not (await schema.taken(database)).has(schema.JOBS)
        histories = await sight.histories(name, hours)
        standing_now = await standing(database, sight.mill.clock, [lane.name for lane in lanes])
        pauses = [json_values.pause_value(pause, name) for pause in standing_now]
        # The first worker makes the table of the tasks, or the first call.
        there = [lane for lane in lanes if not (lane.own and absent)]
        asked = [_lane_summary(sight, name, lane, histories, pauses) for lane in there]
        for lane, told in zip(there, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(told, RowmillError):
                failures.append(EnvironmentFailure(name, lane.name, told))
            elif isinstance(told, BaseException):
                raise told
            else:
                found.append(told)
    except RowmillError as error:
        failures.append(EnvironmentFailure(name, None, error))
    return {
        "environment": name,
        "lanes": found,
        "rows": _rows([one["lane"] for one in found], sight.mill.lanes),
        "pauses": pauses,
        "charts": histories is not None,
        "absent": [lane.name for lane in lanes if lane.own and absent],
        "errors": [failure.value() for failure in failures],
    }


async def _lane_summary(
    sight: CachedMill,
    environment: str,
    lane: Lane,
    histories: Mapping[str, History] | None,
    pauses: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    view = await sight.view(environment, lane.name)
    glance = await sight.glance(view)
    history = histories[lane.name] if histories is not None else None
    whole = [p for p in pauses if p["key"] is None and p["lane"] in (None, lane.name)]
    return {
        "environment": environment,
        "lane": lane.name,
        "table": view.binding.table.fullname,
        "states": {state: _said(view, state) for state in ("ready", "running", "done", "dead", "canceled")},
        **glance.value(),
        "history": history.value() if history is not None else None,
        "forecast": forecast(glance, history),
        "paused": bool(whole),
        "keys_paused": sum(1 for p in pauses if p["lane"] == lane.name and p["key"] is not None),
    }


def _said(view: LaneView, state: str) -> str | None:
    """What rows in a state look like, in the table's own words."""
    given = getattr(view.lane, state)
    if given is None or isinstance(given, str):
        return given
    return " and ".join(
        f"{column} {'in' if isinstance(value, (list, tuple, set, frozenset)) else '='} {_plainly(value)}"
        if (test := states.null_test(value)) is None or value is states.NOW
        else f"{column} {test}"
        for column, value in given.items()
    )


def _plainly(value: Any) -> str:
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"({', '.join(_plainly(part) for part in value)})"
    return "now" if value is states.NOW else "null" if value is None else str(value)


def forecast(glance: QuickCounts, history: History | None) -> dict[str, Any] | None:
    """When the backlog is done at the present rate, if nothing is added; None where there is nothing to tell."""
    if history is None:
        return None
    left = [glance[state] for state in ("ready", "waiting") if glance[state].number is not None]
    number = sum(count.number or 0 for count in left)
    rate = history.recent.rate("done", "dead", "canceled")
    if not number:
        return {"rows": 0, "seconds": 0.0, "at_least": False}
    seconds = round(number / rate * 60.0, 1) if rate > 0 else None
    return {"rows": number, "seconds": seconds, "at_least": any(count.how == "at_least" for count in left)}


def _rows(names: Sequence[str], lanes: Mapping[str, Lane]) -> list[dict[str, Any]]:
    """Lanes in rows: the phases of a pipeline in one, in their order; then all that stand alone."""
    left = list(names)
    fed = {name: [o for o in left if o != name and feeds(lanes[o], lanes[name])] for name in left}
    rows = []
    for begin in [n for n in left if not fed[n]] + left:
        row, name = list[str](), begin
        while name in left:
            left.remove(name)
            row.append(name)
            name = next((other for other in left if name in fed[other]), "")
        rows += [row] if row else []
    alone = [name for row in rows if len(row) == 1 for name in row]
    found = [{"pipeline": True, "lanes": row} for row in rows if len(row) > 1]
    return [*found, *([{"pipeline": False, "lanes": alone}] if alone else [])]


def feeds(one: Lane, other: Lane) -> bool:
    """Whether rows that are done in one lane are ready in the other."""
    if isinstance(other.ready, str) or one.table != other.table or one.own or other.own or other.backfills is not None:
        return False
    return other.ready.keys() <= {**one.running_condition, **one.done}.keys() and states.overlaps(
        other.ready, {**one.running_condition, **one.done}
    )


# -- a lane, its rows


async def lane(
    sight: CachedMill, environment: str, name: str, wanted: Wanted, hours: float = 1.0, sees: Sees = lambda lane: True
) -> dict[str, Any]:
    """One lane: counts, charts, gates, and a page of its rows."""
    beside = [other for other in sight.mill.lanes.values() if other.name != name and sees(other.name)]
    view = await sight.view(environment, name)
    histories = await sight.histories(environment, hours)
    pauses = [json_values.pause_value(p, environment) for p in await standing(view.database, sight.mill.clock, [name])]
    summary = await _lane_summary(sight, environment, view.lane, histories, pauses)
    return {
        **summary,
        "pauses": pauses,
        "columns": list(view.binding.columns),
        "key": list(view.binding.key),
        "operators": OPERATORS,
        "roles": dict(view.binding.roles),
        "gates": await gates(sight, environment, name),
        "page": await sight.once(("rows", environment, name, wanted), lambda: rows(sight, environment, name, wanted)),
        "feeds": [other.name for other in beside if feeds(view.lane, other)],
        "fed_by": [other.name for other in beside if feeds(other, view.lane)],
    }


async def rows(sight: CachedMill, environment: str, lane: str, wanted: Wanted) -> dict[str, Any]:
    """A page of rows; ``after`` is where the next one begins."""
    view = await sight.view(environment, lane)
    asked = environment, lane, wanted.state, wanted.filters, wanted.search
    found = await page(view, replace(wanted, stretches=wanted.stretches or sight.was_slow(asked)))
    if found.stretches:
        sight.note_slow(asked)
    further = [f.column for f in wanted.filters]
    listed = []
    for row in found.rows:
        value = {**json_values.row_value(view, row), "key": written(row.id), "ages": row.ages}
        value["columns"] = {
            column: json_values.simple(row.values[column]) for column in further if column in row.values
        }
        listed.append(value)
    return {"rows": listed, "after": found.after, "stretches": found.stretches, "looked_at": found.looked_at}


async def exact(sight: CachedMill, environment: str, lane: str, state: str) -> dict[str, Any]:
    """Every row of a state counted, within a time limit."""
    view = await sight.view(environment, lane)
    return (await sight.glancer(view).exact(state)).value()


async def gates(sight: CachedMill, environment: str, lane: str, limit: int = _KEYS) -> list[dict[str, Any]]:
    """A lane's gates with the keys worth a look, those held back first."""
    view = await sight.view(environment, lane)
    if not view.lane.groups:
        return []

    async def ask() -> list[dict[str, Any]]:
        found = await lane_gates(view)
        there = await has_table(view)
        keys = [(dim, await found.keys(dim, limit) if there else []) for dim in found.dims]
        return [json_values.gate_value(view, dim, shown) for dim, shown in keys]

    return await sight.once(("gates", environment, lane, limit), ask)


# -- workers, health


async def workers(sight: CachedMill, *, everyone: bool = False, sees: Sees = lambda lane: True) -> dict[str, Any]:
    """Who works, on what, and when each was last heard of."""

    async def ask(name: str, database: Database) -> tuple[str, list[dict[str, Any]] | EnvironmentFailure]:
        try:
            return name, await questions.fleet_of(database)
        except RowmillError as error:
            return name, EnvironmentFailure(name, None, error)

    parts = await asyncio.gather(*(ask(*place) for place in sight.databases.items()))
    known = [(name, part) for name, part in parts if isinstance(part, list)]
    failed = [part.value() for _, part in parts if isinstance(part, EnvironmentFailure)]
    found = questions.workers(known, everyone=everyone)
    for worker in found:
        worker["lanes"] = [name for name in worker["lanes"] if sees(name)]
        worker["current"] = [job for job in worker["current"] if sees(job["lane"])]
    return {"workers": [worker for worker in found if worker["lanes"]], "errors": failed}


async def health(sight: CachedMill, sees: Sees = lambda lane: True) -> dict[str, Any]:
    """What slows the queues down, and what to do; the worst first. Only lanes that ``sees`` allows are examined."""
    lanes = [lane for lane in sight.lookout.lanes if sees(lane.name)]

    async def ask(name: str, database: Database) -> dict[str, Any]:
        views, errors = [], []
        for one in lanes:
            if one.serves(name):
                try:
                    views.append(await sight.view(name, one.name))
                except RowmillError as error:
                    errors.append(EnvironmentFailure(name, one.name, error).value())
        try:
            findings = [finding.value() for finding in await examine(database, views)]
        except RowmillError as error:
            return {"environment": name, "findings": [], "errors": [EnvironmentFailure(name, None, error).value()]}
        return {"environment": name, "findings": findings, "errors": errors}

    async def everywhere() -> dict[str, Any]:
        return {"environments": await asyncio.gather(*(ask(*place) for place in sight.databases.items()))}

    return await sight.once(("health", frozenset(lane.name for lane in lanes)), everywhere, 5.0)
