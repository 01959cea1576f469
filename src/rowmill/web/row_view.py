"""One row, as plain data: all its columns, what happened to it, and why it is not running."""

from __future__ import annotations

from typing import Any

from ..declare.lane import Lane
from ..ops import questions
from ..store.inspect import json_values
from ..store.inspect.lane_view import PAGE_CELL, LaneView, Row
from ..store.jobs.job_rows import Jobs
from ..store.lane.row_keys import written
from ..store.own.failures import Failures
from .documents import visible_row
from .views import CachedMill, Sees


async def row(sight: CachedMill, sees: Sees, environment: str, lane: str, key: str) -> dict[str, Any]:
    """One row: all its columns, what happened to it, and why it is not running."""
    view = await sight.view(environment, lane)
    one = await visible_row(view, sees, key, PAGE_CELL)

    async def other(name: str, beside: Lane) -> LaneView:
        return await sight.view(name, beside.name)

    names = list(sight.databases)
    above = {name: sight.databases[name] for name in names[: names.index(environment) + 1]}
    answer = await questions.why_in(sight.mill, view, key, above, other, sees)
    by_column: dict[str, list[str]] = {}
    for role, column in view.binding.roles.items():
        by_column.setdefault(column, []).append(role)
    failures = Failures(view.database)
    told = await failures.of_row(lane, written(one.id)) if await failures.exists() else None
    return {
        **json_values.row_value(view, one, whole=True),
        "key": written(one.id),
        "table": view.binding.table.fullname,
        "ages": one.ages,
        "roles": by_column,
        "why": json_values.why_value(answer, environment, lane, key),
        "timeline": _timeline(view, one, told),
        "flow": await _flow(sight, view, one),
        "progress": json_values.role(view, one, "progress") if "progress" in view.binding.roles else None,
        "may_schedule": "run_after" in view.binding.roles,
    }


_STEPS = {"created_at": "made", "claimed_at": "claimed", "heartbeat_at": "last sign of life", "finished_at": "ended",
          "run_after": "may run"}  # fmt: skip


def _timeline(view: LaneView, one: Row, failures: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """What the row's own times tell, the oldest first."""
    columns = {**view.binding.roles, **({"created_at": view.created} if view.created else {})}
    found = []
    for role, what in _STEPS.items():
        if role in columns and (at := json_values.moment(one.values.get(columns[role]))) is not None:
            worker = json_values.role(view, one, "worker") if role in ("claimed_at", "finished_at") else None
            found.append({"at": at, "age": one.ages.get(role), "what": what, "worker": worker})
    if failures is not None:
        found += [_recorded(entry) for entry in failures]
    elif view.lane.own:
        found += [_failed(entry) for entry in one.values.get("history") or () if isinstance(entry, dict)]
    return sorted(found, key=lambda entry: str(entry["at"]))


def _failed(entry: dict[str, Any]) -> dict[str, Any]:
    """A failure of a task's job, as its history has it."""
    what = f"attempt {entry.get('attempt')}: {entry.get('outcome', 'failed')}"
    shown = {name: entry.get(name) for name in ("worker", "error", "traceback")}
    return {"at": entry.get("started_at"), "age": None, "what": what, "kind": "failed", **shown}


def _recorded(entry: dict[str, Any]) -> dict[str, Any]:
    """A failure as it was written down."""
    tries = f"attempt {entry['attempt']}: " if entry["attempt"] else ""
    what = {"retry": "to be tried again", "swept": "taken back from its worker"}.get(entry["outcome"], entry["outcome"])
    return {"at": entry["at"], "age": None, "what": f"{tries}{what}", "kind": "failed", "worker": entry["worker"],
            "error": entry["message"], "traceback": entry["traceback"], "class": entry["class"]}  # fmt: skip


async def _flow(sight: CachedMill, view: LaneView, one: Row) -> dict[str, Any] | None:
    """Whose child a job is, and how its own children stand; None where it is in no flow."""
    if not view.lane.own:
        return None
    children = (await Jobs(view.database, sight.mill.clock).children([one.id])).get(one.id, {})
    parent = one.values.get("parent_id")
    return {"parent": parent, "children": children} if parent is not None or children else None
