"""What the API shows: the same values as the commands' ``--json``, as far as whoever asks may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..declare.lane import Lane
from ..declare.task import Queue
from ..errors import RowmillError, did_you_mean
from ..ops import questions
from ..ops.environments import Answers, EnvironmentFailure, LaneDirectory
from ..store import Database
from ..store.gates.gate_binding import BoundGates
from ..store.gates.pauses import Pause
from ..store.inspect import json_values
from ..store.inspect.gate_view import KeyView, has_table, lane_gates
from ..store.inspect.lane_view import CELL, Counts, LaneView, Row
from ..store.inspect.pages import Filter, Wanted, page
from ..store.lane.row_keys import parse, written
from ..store.own.access import Audit
from .actions import ActionTarget
from .problem import Problem

Sees = Callable[[str], bool]


def chosen(lookout: LaneDirectory, sees: Sees, env: list[str] | None, lanes: list[str] | None) -> dict[str, Any]:
    """Environments and lanes to be asked: those named, and of them what may be seen."""
    known = dict(lookout.databases)
    for name in env or ():
        if name not in known:
            raise Problem(404, f"there is no environment {name!r}", hint=did_you_mean(name, known))
    for name in lanes or ():
        if not sees(name):
            raise Problem(403, f"this token is not for lane {name!r}")
        if name not in lookout.mill.lanes:
            raise Problem(404, f"there is no lane {name!r}", hint=did_you_mean(name, lookout.mill.lanes))
    shown = [lane.name for lane in lookout.lanes if sees(lane.name) and (not lanes or lane.name in lanes)]
    return {"environments": env or None, "lanes": shown}


def _failed(failures: list[EnvironmentFailure]) -> list[dict[str, Any]]:
    return [failure.value() for failure in failures]


async def status(lookout: LaneDirectory, sees: Sees, env: list[str] | None, lanes: list[str] | None) -> dict[str, Any]:
    """Rows of every lane by state."""
    asked = chosen(lookout, sees, env, lanes)
    answers: Answers[Counts] = await lookout.ask(LaneView.count, **asked)
    pauses = [
        (name, pause)
        for name, pause in await lookout.pauses()
        if (not env or name in env) and (not pause.target.lane or pause.target.lane in asked["lanes"])
    ]
    elsewhere = await lookout.elsewhere(answers) if sees("") else []  # of a whole table
    return {
        "lanes": [
            {**json_values.counts_value(view, counts), "paused": _is_paused(view, pauses)}
            for view, counts in answers.found
        ],
        "paused": [json_values.pause_value(pause, name) for name, pause in pauses],
        "elsewhere": [json_values.elsewhere_value(found) for found in elsewhere],
        "errors": _failed(answers.failures),
    }


def _is_paused(view: LaneView, pauses: list[tuple[str, Pause]]) -> bool:
    return any(
        name == view.environment and not pause.target.dim and pause.target.lane in ("", view.lane.name)
        for name, pause in pauses
    )


def lanes(lookout: LaneDirectory, sees: Sees, inserts: frozenset[str]) -> dict[str, Any]:
    """What is declared."""
    places = [name for name, _ in lookout.databases]
    found = [
        {
            "lane": lane.name,
            "table": str(lane.table)
            if isinstance(lane.table, str)
            else str(getattr(lane.table, "fullname", lane.table)),
            "queue": isinstance(lane, Queue),
            "environments": [name for name in places if lane.serves(name)],
            "priority": lane.priority,
            "concurrency": lane.concurrency,
            "max_attempts": lane.max_attempts,
            "gates": [json_values.declared(group) for group in lane.groups],
            "insert": lane.name in inserts,
        }
        for lane in lookout.lanes
        if sees(lane.name)
    ]
    return {"environments": places, "lanes": found}


async def workers(lookout: LaneDirectory, sees: Sees, env: list[str] | None, everyone: bool) -> dict[str, Any]:
    """Who works, on what."""
    asked = chosen(lookout, sees, env, None)

    async def ask(name: str, database: Database) -> list[dict[str, Any]] | EnvironmentFailure:
        try:
            return await questions.fleet_of(database)
        except RowmillError as error:
            return EnvironmentFailure(name, None, error)

    places = [place for place in lookout.databases if not env or place[0] in env]
    parts = await asyncio.gather(*(ask(*place) for place in places))
    known = [(name, part) for (name, _), part in zip(places, parts, strict=True) if isinstance(part, list)]
    found = []
    for worker in questions.workers(known, everyone=everyone):
        served = [name for name in worker["lanes"] if name in asked["lanes"]]
        current = [job for job in worker["current"] if job.get("lane") in asked["lanes"]]
        if served:
            found.append({**worker, "lanes": served, "current": current})
    return {"workers": found, "errors": _failed([part for part in parts if isinstance(part, EnvironmentFailure)])}


async def stuck(
    lookout: LaneDirectory, sees: Sees, env: list[str] | None, lanes: list[str] | None, limit: int
) -> dict[str, Any]:
    """Running rows without a sign of life."""

    async def question(view: LaneView) -> list[Row]:
        return await view.rows("stuck", limit) if view.condition("stuck") else []

    answers = await lookout.ask(question, **chosen(lookout, sees, env, lanes))
    rows = [_row(view, row) for view, rows in answers.found for row in rows]
    return {"rows": rows, "errors": _failed(answers.failures)}


def _row(view: LaneView, row: Row, *, whole: bool = False) -> dict[str, Any]:
    return {**json_values.row_value(view, row, whole=whole), "key": written(row.id)}


async def rows(here: ActionTarget, query: dict[str, Any]) -> dict[str, Any]:
    """A page of a lane's rows; ``next`` is the ``after`` of the one behind it."""
    view, cursor = await here.view(), query.get("after")
    filters = []
    for given in query.get("filter") or ():
        column, sign, rest = given.partition(":")
        operator, _, value = rest.partition(":")
        if not sign:
            raise Problem(422, f"filter={given!r} is not column:operator:value", hint="filter=domain:eq:example.org")
        filters.append(Filter(column, operator, value))
    if cursor is not None and cursor[:1] not in ("=", "~"):
        raise Problem(422, f"after={cursor!r} is not what an answer said under next")
    wanted = Wanted(
        query.get("state"), tuple(filters), query.get("search") or "", cursor[1:] if cursor else None,
        query.get("order") == "oldest", (cursor or "").startswith("~"), query.get("limit") or 50,
    )  # fmt: skip
    found = await page(view, wanted)
    listed = []
    for row in found.rows:
        further = {f.column: json_values.simple(row.values[f.column]) for f in filters if f.column in row.values}
        listed.append({**_row(view, row), **({"columns": further} if further else {})})
    after = None if found.after is None else f"{'~' if found.stretches else '='}{found.after}"
    return {"rows": listed, "next": after, "looked_at": found.looked_at}


async def visible_row(view: LaneView, sees: Sees, key: str, cut: int | None = None) -> Row:
    """The row with this key; a problem where there is none. A token for some lanes sees only rows of those lanes, also
    where other lanes share the table.
    """
    found = await view.find([parse(view.binding, key)], cut=cut)
    if not found or not (sees("") or view.owns(found[0])):
        raise Problem(404, f"no row of lane {view.lane.name!r} in {view.environment!r} has the id {key!r}")
    return found[0]


async def row(here: ActionTarget, sees: Sees, key: str) -> dict[str, Any]:
    """One row, whole."""
    view = await here.view()
    return _row(view, await visible_row(view, sees, key), whole=True)


async def why(here: ActionTarget, sees: Sees, key: str) -> dict[str, Any]:
    """Why a row is not running."""
    view, lookout = await here.view(), here.lookout
    await visible_row(view, sees, key, CELL)
    databases = dict(lookout.databases)

    async def other(name: str, lane: Lane) -> LaneView:
        return await lookout.view(name, databases[name], lane)

    names = list(databases)
    above = {name: databases[name] for name in names[: names.index(here.environment) + 1]}
    answer = await questions.why_in(here.mill, view, key, above, other, sees)
    return json_values.why_value(answer, here.environment, view.lane.name, key)


async def gates(
    lookout: LaneDirectory,
    sees: Sees,
    env: list[str] | None,
    lane: str | None,
    key: str | None,
    by: str | None,
    limit: int,
) -> dict[str, Any]:
    """How every gate stands, keys that are held back first."""

    async def question(view: LaneView) -> list[tuple[BoundGates, list[KeyView]]]:
        keyed = key is not None or by is not None
        if not view.lane.groups or (lane is None and keyed and not any(g.by for g in view.lane.groups)):
            return []
        found = await lane_gates(view)
        dims = found.dims
        if keyed:
            group = found.choose(by, keyed=True).group
            dims = tuple(dim for dim in dims if dim.phrase is not None and dim.group.by == group.by)
        if not await has_table(view):
            return [(dim, []) for dim in dims]
        asked = key if key is None else (await found.known(dims[0], key))[0]
        return [(dim, await found.keys(dim, limit, asked if dim.phrase else None)) for dim in dims]

    answers = await lookout.ask(question, **chosen(lookout, sees, env, [lane] if lane else None))
    found = [json_values.gate_value(view, dim, keys) for view, dims in answers.found for dim, keys in dims]
    budgets = []
    whole = lane is None and sees("")  # budgets are spent by all lanes
    for view in {view.environment: view for view, _ in answers.found}.values() if whole else ():
        if await has_table(view):
            told = await (await lane_gates(view)).budgets()
            budgets += [
                {"environment": view.environment, "budget": d.removeprefix("budget:"), "cells": c} for d, c in told
            ]
    return {"gates": found, "budgets": budgets, "errors": _failed(answers.failures)}


def tasks(lookout: LaneDirectory, sees: Sees) -> dict[str, Any]:
    """Tasks, and what each takes."""
    places = [name for name, _ in lookout.databases]
    found = [
        {
            "task": task.name,
            "lane": task.queue,
            "cron": task.cron.expression if task.cron else None,
            "max_attempts": task.max_attempts,
            "environments": list(task.environments or places),
            "takes": str(task.signature),
            "needs": task.signature.needs(),
        }
        for task in lookout.mill.tasks.values()
        if sees(task.queue)
    ]
    return {"tasks": found}


async def entries(audit: Audit, lanes: frozenset[str] | None, limit: int, before: int | None) -> dict[str, Any]:
    """What was done; ``next`` is the ``before`` of what was done before that."""
    found = await audit.entries(limit, before, lanes)
    return {"entries": found, "next": found[-1]["id"] if len(found) == limit else None}
