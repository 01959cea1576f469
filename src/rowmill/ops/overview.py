"""What the pages of the dashboard show. Nothing here writes, and nothing scans a large table.

``directory`` has the lanes that the viewer may see; ``cache`` is shared by all viewers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ..declare import states
from ..declare.lane import Lane
from ..errors import DeclarationError, RowmillError
from ..store import Database
from ..store.dialect import utc
from ..store.gates.pauses import standing
from ..store.inspect.gate_view import has_table, lane_gates
from ..store.inspect.lane_view import PAGE_CELL, LaneView, Row
from ..store.inspect.pages import OPERATORS, Wanted, page
from ..store.inspect.quick_counts import QuickCounts
from ..store.jobs.job_rows import Jobs
from ..store.jobs.schedule_rows import schedule_list
from ..store.lane.row_keys import written
from ..store.own import schema
from ..store.own.failures import Failures
from ..store.own.minutes import History
from . import documents, questions
from .cached_mill import CachedMill
from .directory import EnvironmentFailure, LaneDirectory
from .questions import Document

_KEYS = 50
#: Jobs that wait for their children, of which as many are shown.
_JOINING = 50
#: Rows of a table of schedules that are shown.
_SCHEDULES = 200


# -- overview


async def overview(directory: LaneDirectory, cache: CachedMill, hours: float = 1.0) -> Document:
    """Every environment with its lanes: counts, rates, forecast, pauses; lanes in a row where one feeds the next."""
    parts = [_environment(directory, cache, *place, hours) for place in directory.databases.items()]
    return {"environments": await asyncio.gather(*parts)}


async def _environment(
    directory: LaneDirectory, cache: CachedMill, name: str, database: Database, hours: float
) -> Document:
    lanes = [lane for lane in directory.lanes if lane.serves(name)]
    summaries: list[Document] = []
    failures: list[EnvironmentFailure] = []
    pauses: list[Document] = []
    histories, absent = None, False
    try:
        absent = not (await schema.taken(database)).has(schema.JOBS)
        histories = await cache.histories(name, hours)
        in_force = await standing(database, cache.mill.clock, [lane.name for lane in lanes])
        pauses = [documents.pause_value(pause, name) for pause in in_force]
        # The first worker makes the table of the tasks, or the first call.
        there = [lane for lane in lanes if not (lane.own and absent)]
        asked = [_lane_summary(directory, cache, name, lane, histories, pauses) for lane in there]
        for lane, answer in zip(there, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, RowmillError):
                failures.append(EnvironmentFailure(name, lane.name, answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                summaries.append(answer)
    except RowmillError as error:
        failures.append(EnvironmentFailure(name, None, error))
    return {
        "environment": name,
        "lanes": summaries,
        "rows": _rows([one["lane"] for one in summaries], cache.mill.lanes),
        "pauses": pauses,
        "charts": histories is not None,
        "absent": [lane.name for lane in lanes if lane.own and absent],
        "errors": [failure.value() for failure in failures],
    }


async def _lane_summary(
    directory: LaneDirectory,
    cache: CachedMill,
    environment: str,
    lane: Lane,
    histories: Mapping[str, History] | None,
    pauses: Sequence[Document],
) -> Document:
    view = await directory.view(environment, lane.name)
    counts = await cache.counts(view)
    history = histories[lane.name] if histories is not None else None
    whole = [p for p in pauses if p["key"] is None and p["lane"] in (None, lane.name)]
    return {
        "environment": environment,
        "lane": lane.name,
        "table": view.binding.table.fullname,
        "states": {state: _state_in_words(view, state) for state in ("ready", "running", "done", "dead", "canceled")},
        **counts.value(),
        "history": history.value() if history is not None else None,
        "forecast": forecast(counts, history),
        "paused": bool(whole),
        "keys_paused": sum(1 for p in pauses if p["lane"] == lane.name and p["key"] is not None),
    }


def _state_in_words(view: LaneView, state: str) -> str | None:
    """What rows in a state look like, in the table's own words."""
    given = getattr(view.lane, state)
    if given is None or isinstance(given, str):
        return given
    return " and ".join(
        f"{column} {'in' if isinstance(value, (list, tuple, set, frozenset)) else '='} {_value_in_words(value)}"
        if (test := states.null_test(value)) is None or value is states.NOW
        else f"{column} {test}"
        for column, value in given.items()
    )


def _value_in_words(value: Any) -> str:
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"({', '.join(_value_in_words(part) for part in value)})"
    return "now" if value is states.NOW else "null" if value is None else str(value)


def forecast(counts: QuickCounts, history: History | None) -> Document | None:
    """When the backlog is done at the current rate, if no rows are added; None if the rate is not known."""
    if history is None:
        return None
    left = [counts[state] for state in ("ready", "waiting") if counts[state].number is not None]
    number = sum(count.number or 0 for count in left)
    rate = history.recent.rate("done", "dead", "canceled")
    if not number:
        return {"rows": 0, "seconds": 0.0, "at_least": False}
    seconds = round(number / rate * 60.0, 1) if rate > 0 else None
    return {"rows": number, "seconds": seconds, "at_least": any(count.how == "at_least" for count in left)}


def _rows(names: Sequence[str], lanes: Mapping[str, Lane]) -> list[Document]:
    """Lanes grouped into lines: the phases of a pipeline together, in order; then the other lanes."""
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
    pipelines = [{"pipeline": True, "lanes": row} for row in rows if len(row) > 1]
    return [*pipelines, *([{"pipeline": False, "lanes": alone}] if alone else [])]


def feeds(one: Lane, other: Lane) -> bool:
    """Whether rows that are done in one lane are ready in the other."""
    if isinstance(other.ready, str) or one.table != other.table or one.own or other.own or other.backfills is not None:
        return False
    return other.ready.keys() <= {**one.running_condition, **one.done}.keys() and states.overlaps(
        other.ready, {**one.running_condition, **one.done}
    )


# -- a lane, its rows


async def lane(
    directory: LaneDirectory, cache: CachedMill, environment: str, name: str, wanted: Wanted, hours: float = 1.0
) -> Document:
    """One lane: counts, charts, gates, and a page of its rows."""
    beside = [other for other in cache.mill.lanes.values() if other.name != name and directory.sees(other.name)]
    view = await directory.view(environment, name)
    histories = await cache.histories(environment, hours)
    in_force = await standing(view.database, cache.mill.clock, [name])
    pauses = [documents.pause_value(pause, environment) for pause in in_force]
    summary = await _lane_summary(directory, cache, environment, view.lane, histories, pauses)
    return {
        **summary,
        "pauses": pauses,
        "columns": list(view.binding.columns),
        "key": list(view.binding.key),
        "operators": OPERATORS,
        "roles": dict(view.binding.roles),
        "gates": await _gates(cache, view),
        "page": await cache.once(("rows", environment, name, wanted), lambda: _lane_rows(cache, view, wanted)),
        "feeds": [other.name for other in beside if feeds(view.lane, other)],
        "fed_by": [other.name for other in beside if feeds(other, view.lane)],
    }


async def _lane_rows(cache: CachedMill, view: LaneView, wanted: Wanted) -> Document:
    """A page of rows; ``after`` is where the next one begins."""
    asked = view.environment, view.lane.name, wanted.state, wanted.filters, wanted.search
    shown = await page(view, replace(wanted, ranges=wanted.ranges or cache.was_slow(asked)))
    if shown.ranges:
        cache.note_slow(asked)
    listed = [{"columns": {}, **questions.row_in_list(view, row, wanted.filters)} for row in shown.rows]
    return {"rows": listed, "after": shown.after, "ranges": shown.ranges, "looked_at": shown.looked_at}


async def exact(directory: LaneDirectory, cache: CachedMill, environment: str, lane: str, state: str) -> Document:
    """Every row of a state counted, within a time limit."""
    return (await cache.counter(await directory.view(environment, lane)).exact(state)).value()


async def _gates(cache: CachedMill, view: LaneView) -> list[Document]:
    """A lane's gates with the keys worth a look, those held back first."""
    if not view.lane.groups:
        return []

    async def ask() -> list[Document]:
        gates = await lane_gates(view)
        there = await has_table(view)
        keys = [(dim, await gates.keys(dim, _KEYS) if there else []) for dim in gates.dims]
        return [documents.gate_value(view, dim, shown, _KEYS) for dim, shown in keys]

    return await cache.once(("gates", view.environment, view.lane.name), ask)


# -- health and failures, which many may look at


async def health(directory: LaneDirectory, cache: CachedMill) -> Document:
    """``questions.health``, from the cache."""
    return await cache.once(("health", *_part(directory)), lambda: questions.health(directory), 5.0)


async def errors(directory: LaneDirectory, cache: CachedMill, hours: float = 24.0) -> Document:
    """``questions.errors``, from the cache. Skips dead rows that are expensive to find."""

    async def ask() -> Document:
        unsampled = set()
        for view, _ in (await directory.views()).lanes:
            cheap = False
            with contextlib.suppress(RowmillError):
                cheap = (await cache.counts(view))["dead"].how in ("exact", "none")
            unsampled |= set() if cheap else {(view.environment, view.lane.name)}
        return await questions.errors(directory, hours, unsampled=unsampled)

    return await cache.once(("errors", *_part(directory), hours), ask, 2.0)


def _part(directory: LaneDirectory) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(directory.databases), frozenset(lane.name for lane in directory.lanes)


# -- one row


_STEPS = {"created_at": "created", "claimed_at": "claimed", "heartbeat_at": "last heartbeat", "finished_at": "ended",
          "run_after": "scheduled", "expires_at": "expires"}  # fmt: skip


async def row(directory: LaneDirectory, environment: str, lane: str, key: str) -> Document:
    """One row: all its columns, what happened to it, and why it is not running."""
    view = await directory.view(environment, lane)
    one = await questions.visible_row(directory, view, key, PAGE_CELL)
    failures = Failures(view.database)
    recorded = await failures.of_row(lane, written(one.id)) if await failures.exists() else None
    return {
        **documents.row_value(view, one, whole=True),
        "table": view.binding.table.fullname,
        "ages": one.ages,
        "why": await questions.why(directory, environment, lane, key),
        "timeline": _timeline(view, one, recorded),
        "logs": await questions.kept_logs(view, written(one.id)),
        "flow": await _flow(directory, view, one),
        "progress": documents.role(view, one, "progress") if "progress" in view.binding.roles else None,
        "may_schedule": "run_after" in view.binding.roles,
    }


def _timeline(view: LaneView, one: Row, failures: list[Document] | None) -> list[Document]:
    """Events from the row's own time columns, the oldest first."""
    columns = {**view.binding.roles, **({"created_at": view.created} if view.created else {})}
    entries = []
    for role, what in _STEPS.items():
        if role in columns and (at := documents.moment(one.values.get(columns[role]))) is not None:
            worker = documents.role(view, one, "worker") if role in ("claimed_at", "finished_at") else None
            entries.append({"at": at, "age": one.ages.get(role), "what": what, "worker": worker})
    if failures is not None:
        entries += [_recorded(entry) for entry in failures]
    elif view.lane.own:
        entries += [_failed(entry) for entry in one.values.get("history") or () if isinstance(entry, dict)]
    return sorted(entries, key=lambda entry: str(entry["at"]))


def _failed(entry: Document) -> Document:
    """A failure of a task's job, as its history has it."""
    what = f"attempt {entry.get('attempt')}: {entry.get('outcome', 'failed')}"
    shown = {name: entry.get(name) for name in ("worker", "error", "traceback")}
    return {"at": entry.get("started_at"), "age": None, "what": what, "kind": "failed", **shown}


def _recorded(entry: Document) -> Document:
    tries = f"attempt {entry['attempt']}: " if entry["attempt"] else ""
    what = {"retry": "retrying", "swept": "taken back from its worker"}.get(entry["outcome"], entry["outcome"])
    return {"at": entry["at"], "age": None, "what": f"{tries}{what}", "kind": "failed", "worker": entry["worker"],
            "error": entry["message"], "traceback": entry["traceback"], "class": entry["class"]}  # fmt: skip


async def _flow(directory: LaneDirectory, view: LaneView, one: Row) -> Document | None:
    """A job's parent and the states of its children; None if it is in no flow."""
    if not view.lane.own:
        return None
    children = (await Jobs(view.database, directory.mill.clock).children([one.id])).get(one.id, {})
    parent = one.values.get("parent_id")
    return {"parent": parent, "children": children} if parent is not None or children else None


# -- tasks


async def tasks(directory: LaneDirectory) -> Document:
    """Every task with its queue and its schedule, and the jobs that wait for others, by environment."""

    async def ask(name: str, database: Database) -> Document:
        return await _task_environment(directory, name, database)

    known, failures = await directory.each(ask)
    errors = {failure.environment: [failure.value()] for failure in failures}
    now = datetime.now(UTC)
    listed = []
    for task in directory.mill.tasks.values():
        if not directory.sees(task.queue):
            continue
        cron = task.cron
        coming = cron.next(now) if cron is not None else None
        listed.append({
            "task": task.name, "queue": task.queue, "max_attempts": task.max_attempts,
            "cron": cron.expression if cron is not None else None, "tz": cron.tz if cron is not None else None,
            "next_tick": coming.isoformat() if coming is not None else None,
        })  # fmt: skip
    empty: Document = {"ticks": {}, "joining": [], "schedules": []}
    environments = [
        {"environment": name, **known.get(name, empty | {"errors": errors.get(name, [])})}
        for name in directory.databases
    ]
    return {"tasks": listed, "environments": environments}


async def _task_environment(directory: LaneDirectory, name: str, database: Database) -> Document:
    own = await schema.taken(database)
    document: Document = {"ticks": {}, "joining": [], "schedules": [], "errors": []}
    for source in directory.mill.schedule_tables:
        if not source.serves(name):
            continue
        try:
            schedules = await schedule_list(source, name, database)
        except DeclarationError as error:
            document["errors"].append(EnvironmentFailure(name, None, error).value())
        else:
            document["schedules"] += [row for row in schedules if directory.sees(row["queue"] or "")][:_SCHEDULES]
    if own.has(schema.CRONS):
        text = f"select name, last_tick from {database.own('rowmill_crons')}"
        rows = await database.read(lambda run: run(text, ()))
        document["ticks"] = {row[0]: utc(row[1]).isoformat() for row in rows}
    if own.has(schema.JOBS):
        jobs = Jobs(database, directory.mill.clock)
        text = f"select id, task, queue from {jobs.table} where state = 'joining' order by id desc limit {_JOINING}"
        rows = [row for row in await database.read(lambda run: run(text, ())) if directory.sees(row[2])]
        children = await jobs.children([row[0] for row in rows]) if rows else {}
        document["joining"] = [
            {"id": row[0], "task": row[1], "queue": row[2], "children": children.get(row[0], {})} for row in rows
        ]
    return document
