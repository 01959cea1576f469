"""The questions of operators: status, rows, why, errors, gates, workers, health. Each function returns one document:
``rowmill ... --json`` prints it, and the HTTP API sends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ..declare.lane import Lane
from ..declare.schedules import Schedules
from ..declare.task import Queue
from ..errors import RowmillError
from ..store import Database
from ..store.gates.budgets import spent
from ..store.gates.gate_binding import BoundGates
from ..store.gates.pauses import COUNTED as COUNTED
from ..store.gates.pauses import Pause
from ..store.gates.shared_rate import SharedState
from ..store.inspect import failure_families, why_rules
from ..store.inspect.failure_families import SAMPLE as SAMPLE
from ..store.inspect.gate_view import KeyView, has_table, lane_gates
from ..store.inspect.health import examine
from ..store.inspect.lane_view import LaneView, Row
from ..store.inspect.pages import OPERATORS as OPERATORS
from ..store.inspect.pages import Filter as Filter
from ..store.inspect.pages import Page, page
from ..store.inspect.pages import Wanted as Wanted
from ..store.inspect.why import Inquiry, inquire
from ..store.inspect.why_rules import SharedFacts
from ..store.lane.row_keys import parse, written
from ..store.own.access import Audit
from ..store.own.run_logs import RunLogs
from ..store.own.workers import WorkersTable, evidence, taken_back_within
from . import documents
from .directory import EnvironmentFailure, LaneDirectory, NotFound

Document = dict[str, Any]
#: Buckets of time that a family of failures is counted in.
BUCKETS = 48
#: Seconds to wait for the answer of an environment of higher priority.
_ABOVE = 3.0


# -- lanes


async def lanes(directory: LaneDirectory, inserts: Collection[str] = ()) -> Document:
    """What is declared. ``inserts``: lanes whose rows may be created through the API."""
    places = list(directory.databases)
    declared = [
        {
            "lane": lane.name,
            "table": lane.table if isinstance(lane.table, str) else str(getattr(lane.table, "fullname", lane.table)),
            "queue": isinstance(lane, Queue),
            "environments": [name for name in places if lane.serves(name)],
            "priority": lane.priority,
            "concurrency": lane.concurrency,
            "max_attempts": lane.max_attempts,
            "gates": [documents.declared(group) for group in lane.groups],
            "insert": lane.name in inserts,
        }
        for lane in directory.lanes
    ]
    return {"environments": places, "lanes": declared}


async def status(directory: LaneDirectory) -> Document:
    """Counts of every lane by state, and the pauses."""
    answers = await directory.ask(LaneView.count)
    pauses = await directory.pauses()
    uncounted = (
        await directory.uncounted(answers) if directory.sees("") else []
    )  # rows of no lane: only for callers that see all lanes
    return {
        "lanes": [
            {**documents.counts_value(view, counts), "paused": is_paused(view, pauses)}
            for view, counts in answers.lanes
        ],
        "paused": [documents.pause_value(pause, name) for name, pause in pauses],
        "elsewhere": [documents.uncounted_value(rows) for rows in uncounted],
        "errors": answers.errors(),
    }


def is_paused(view: LaneView, pauses: Sequence[tuple[str, Pause]]) -> bool:
    """Whether a lane is paused, by itself or with its environment."""
    return any(
        name == view.environment and not pause.target.dim and pause.target.lane in ("", view.lane.name)
        for name, pause in pauses
    )


def scheduled(directory: LaneDirectory, environment: str) -> list[Schedules]:
    """The tables of schedules in an environment, for an asker who sees all lanes."""
    whole = directory.sees("") and len(directory.lanes) == len(directory.mill.lanes)
    return [source for source in directory.mill.schedule_tables if whole and source.serves(environment)]


async def health(directory: LaneDirectory) -> Document:
    """What slows the queues down and what to do, the worst first."""
    answers = await directory.views()

    async def ask(name: str, database: Database) -> list[Document]:
        views = [view for view, _ in answers.lanes if view.environment == name]
        sources = scheduled(directory, name)
        return [finding.value() for finding in await examine(database, views, sources, name)]

    findings, failures = await directory.each(ask)
    errors = _by_environment([*answers.failures, *failures])
    return {
        "environments": [
            {"environment": name, "findings": findings.get(name, []), "errors": errors.get(name, [])}
            for name in directory.databases
        ]
    }


def _by_environment(failures: Sequence[EnvironmentFailure]) -> dict[str, list[Document]]:
    """What failed in each environment, each error once."""
    errors: dict[str, list[Document]] = {}
    for failure in failures:
        listed = errors.setdefault(failure.environment, [])
        listed += [failure.value()] if failure.value() not in listed else []
    return errors


# -- rows


async def rows(view: LaneView, wanted: Wanted, *, queue: bool = False) -> Document:
    """A page of a lane's rows by key. ``next`` is where the next page begins.

    ``queue``: one page in the lane's own order instead: ready rows as they will be claimed, others newest first.
    """
    if queue:
        listed = await view.rows(wanted.state, wanted.size + 1)
        return _page(view, Page(listed[: wanted.size], None), (), more=len(listed) > wanted.size)
    shown = await page(view, wanted)
    return _page(view, shown, wanted.filters, more=shown.after is not None)


def _page(view: LaneView, shown: Page, filters: Sequence[Filter], *, more: bool) -> Document:
    after = None if shown.after is None else f"{'~' if shown.ranges else '='}{shown.after}"
    listed = [row_in_list(view, row, filters) for row in shown.rows]
    return {"rows": listed, "next": after, "more": more, "looked_at": shown.looked_at, "errors": []}


def row_in_list(view: LaneView, row: Row, filters: Sequence[Filter]) -> Document:
    """One row of a list, with the columns that were filtered by."""
    columns = {f.column: documents.simple(row.values[f.column]) for f in filters if f.column in row.values}
    return {**documents.row_value(view, row), **({"columns": columns} if columns else {})}


async def jobs(directory: LaneDirectory, state: str | None, limit: int, key: str | None = None) -> Document:
    """Rows in every environment, as ``rows`` with ``queue``; or the one with this key, with all its columns."""

    async def question(view: LaneView) -> list[Document]:
        if key is not None:
            return [documents.row_value(view, row, whole=True) for row in await view.find([parse(view.binding, key)])]
        return [row_in_list(view, row, ()) for row in await view.rows(state, limit + 1)]

    answers = await directory.ask(question)
    listed = [row for _, part in answers.lanes for row in part[:limit]]
    more = any(len(part) > limit for _, part in answers.lanes)
    return {"rows": listed, "next": None, "more": more, "looked_at": None, "errors": answers.errors()}


async def stuck(directory: LaneDirectory, limit: int = 100) -> Document:
    """Running rows whose holder has given no sign of life for longer than the lease; and how many rows workers hold
    that are dead, or seem to be, and whose lease has not ended yet. ``until``: when another worker has taken them back
    at the latest; null if that time is over, or if no live worker serves the lane (``swept``).
    """
    suspicion = _suspicion(directory)

    async def question(view: LaneView) -> tuple[list[Document], list[Document]]:
        if not view.condition("stuck"):
            return [], []
        listed, held = await view.rows("stuck", limit), await view.holders()
        serving = [worker for worker in await _workers_in(view.database) if view.lane.name in worker["lanes"]]
        alive = [worker for worker in serving if evidence(worker, suspicion) is None]
        dead = {worker["id"]: worker for worker in serving if worker not in alive}
        # A row that shows no time is taken back a lease after a worker first saw it; the next sweep sees it.
        seen = await view.first_seen() if any(_since(row) is None for row in listed) else {}
        lease, sweep_every = view.lane.lease.total_seconds(), view.lane.sweep_every.total_seconds()

        def until(holder: str | None, silent_for: float) -> str | None:
            left = lease + sweep_every - silent_for if alive else 0.0
            if holder in dead and (within := taken_back_within(dead[holder], alive, suspicion)) is not None:
                left = within if left <= 0 else min(left, within)
            return documents.from_now(left) if left > 0 else None

        def listed_row(row: Row) -> Document:
            value, since = documents.row_value(view, row), _since(row)
            silent = since if since is not None else seen.get(value["key"], -sweep_every)
            back = until(documents.role(view, row, "worker"), silent)
            return {**value, "until": back, "lease_seconds": lease, "swept": bool(alive)}

        rows = [listed_row(row) for row in listed]
        where = {"environment": view.environment, "lane": view.lane.name}
        return rows, [
            {
                **where,
                "worker": h.worker,
                "evidence": evidence(dead[h.worker], suspicion),
                "rows": h.rows,
                "until": until(h.worker, h.silent_for),
                "swept": bool(alive),
            }
            for h in held
            if h.worker in dead
        ]

    answers = await directory.ask(question)
    return {
        "rows": [row for _, (rows, _) in answers.lanes for row in rows],
        "held_by_dead": [entry for _, (_, held) in answers.lanes for entry in held],
        "errors": answers.errors(),
    }


def _since(row: Row) -> float | None:
    """Seconds since the last time that a running row shows."""
    return row.silent_for if row.silent_for is not None else row.ages.get("claimed_at")


async def waiting(directory: LaneDirectory) -> list[Document]:
    """Lanes with rows that wait for their time: how many, and the seconds until the first of each is ready."""

    async def question(view: LaneView) -> tuple[int, float] | None:
        due = [row.ages.get("run_after") for row in await view.rows("waiting", 1)]
        if not due or due[0] is None or due[0] >= 0:
            return None
        counts, _ = await view.counted(("waiting",), COUNTED, 1.0, 1.0)
        return counts.get("waiting", (1, None))[0], -due[0]

    answers = await directory.ask(question)
    return [
        {"environment": view.environment, "lane": view.lane.name, "count": rows[0], "seconds": rows[1]}
        for view, rows in answers.lanes
        if rows is not None
    ]


async def visible_row(directory: LaneDirectory, view: LaneView, key: str, cut: int | None = None) -> Row:
    """The row with this key, if the asker may see one of its lanes."""
    matching = await view.find([parse(view.binding, key)], cut=cut)
    if not matching or not (directory.sees("") or view.owns(matching[0])):
        raise NotFound(f"no row of lane {view.lane.name!r} in {view.environment!r} has the id {key!r}")
    return matching[0]


async def row(directory: LaneDirectory, environment: str, lane: str, key: str) -> Document:
    view = await directory.view(environment, lane)
    return documents.row_value(view, await visible_row(directory, view, key), whole=True)


async def why(directory: LaneDirectory, environment: str, lane: str, key: str) -> Document:
    """Why a row is not running. Lanes that the asker does not see are not named."""
    view = await directory.view(environment, lane, serving=False)
    if not directory.sees(""):
        await visible_row(directory, view, key)
    inquiry = await inquire(view, parse(view.binding, key), _suspicion(directory))
    beside = [await directory.view(environment, o.name) for o in directory.beside(view) if directory.sees(o.name)]
    facts = await inquiry.facts(await _above(directory, inquiry), beside)
    answer = why_rules.why(replace(facts, shared=_shared_facts(await directory.shared_state(view.lane), view.lane)))
    return documents.why_value(answer, environment, lane, key)


async def logs(directory: LaneDirectory, environment: str, lane: str, key: str, run: int | None = None) -> Document:
    """What the last runs of a row logged, the last run first; or one run, counted back from the last, which is 1."""
    view = await directory.view(environment, lane)
    if not directory.sees(""):
        await visible_row(directory, view, key)
    kept = await kept_logs(view, written(_key(view, key)))
    if not kept:
        await visible_row(directory, view, key)  # raises where there is no such row; logs of a deleted one are shown
    runs = [one for one in kept or () if run in (None, one["run"])]
    return {"environment": environment, "lane": lane, "id": key, "kept": kept is not None, "runs": runs}


def _key(view: LaneView, key: str) -> Any:
    parts = parse(view.binding, key)
    return parts[0] if len(parts) == 1 else parts


async def kept_logs(view: LaneView, row_id: str) -> list[Document] | None:
    """The logs of a row's runs; None if none are kept here."""
    run_logs = RunLogs(view.database)
    if view.lane.keep_logs is None or not await run_logs.exists():
        return None
    return await run_logs.of_row(view.lane.name, row_id)


def _shared_facts(state: SharedState | RowmillError | None, lane: Lane) -> SharedFacts | None:
    if state is None or lane.shared_rate is None:
        return None
    n, seconds = int(lane.shared_rate.n), lane.shared_rate.per.total_seconds()
    if isinstance(state, RowmillError):
        return SharedFacts(n, seconds, error=state.message)
    return SharedFacts(n, seconds, state.used, state.wait)


def _suspicion(directory: LaneDirectory) -> float | None:
    suspicion = directory.mill.suspicion
    return None if suspicion is None else suspicion.total_seconds()


async def _above(directory: LaneDirectory, inquiry: Inquiry) -> list[LaneView]:
    """The lanes that the workers of this one serve before it: in environments above, and here by priority."""
    lane, here, live = inquiry.lane, inquiry.view.environment, inquiry.live
    lanes = [other for other in directory.mill.lanes.values() if other is lane or directory.sees(other.name)]
    ordered = sorted(lanes, key=lambda other: other.priority)
    common = {name for worker in live for name in worker["lanes"]} if live else {other.name for other in lanes}
    above: list[LaneView] = []
    for name, database in directory.databases.items():
        first = ordered if name != here else ordered[: ordered.index(lane)]
        try:
            async with asyncio.timeout(_ABOVE):
                if name == here or await _shared(database, live):
                    above += [await directory.view(name, o.name) for o in first if o.serves(name) and o.name in common]
        except (RowmillError, TimeoutError):
            pass
        if name == here:
            break
    return above


async def _shared(database: Database, live: Sequence[Document]) -> bool:
    """Whether one of these workers works in this environment, too; so it may be where none is known."""
    there = {worker["id"] for worker in await _workers_in(database) if worker["alive"]} if live else set()
    return not live or bool(there & {worker["id"] for worker in live})


# -- workers


async def workers(directory: LaneDirectory, *, everyone: bool = False) -> Document:
    """The workers: what each runs, and when it was last seen; with ``everyone`` also stopped ones."""
    answers, failures = await directory.each(lambda _, database: _workers_in(database))
    # A worker of several environments is in the table of each: it is one worker.
    known: dict[tuple[str, str], Document] = {}
    for name, part in answers.items():
        for entry in part:
            worker = known.setdefault((entry["id"], entry["incarnation"]), entry | {"environments": []})
            worker["environments"].append(name)
            if entry["silent_for"] < worker["silent_for"]:
                worker |= entry
    shown = []
    for worker in known.values():
        worker["lanes"] = [lane for lane in worker["lanes"] if directory.sees(lane)]
        worker["current"] = [job for job in worker["current"] if directory.sees(job.get("lane", ""))]
        if (worker["lanes"] or directory.sees("")) and (everyone or worker["state"] != "stopped"):
            shown.append(documents.worker_value(worker))
    shown.sort(key=lambda worker: (("busy", "idle", "dead", "stopped").index(worker["state"]), worker["id"]))
    return {"workers": shown, "errors": [failure.value() for failure in failures]}


async def _workers_in(database: Database) -> list[Document]:
    """The workers in the table of one environment."""
    workers_table = WorkersTable(database)
    return await workers_table.all() if await workers_table.exists() else []


# -- failures


async def errors(
    directory: LaneDirectory,
    hours: float = 24.0,
    family: str | None = None,
    *,
    unsampled: Collection[tuple[str, str]] = (),
) -> Document:
    """Failures of the last hours in families, those seen last first; or one family.

    ``unsampled``: environments and lanes whose dead rows are not searched for failures without a record.
    """
    answers = await directory.views()

    async def ask(name: str, database: Database) -> Document:
        document: Document = {"recorded": True, "unknown": [], "families": []}
        views = [view for view, _ in answers.lanes if view.environment == name]
        for sample in (True, False):
            part = [view for view in views if ((name, view.lane.name) not in unsampled) == sample]
            if not part:
                continue
            answer = await failure_families.errors(part, hours=hours, buckets=BUCKETS, sample=sample)
            document["recorded"] = answer.recorded
            document["unknown"] += answer.unknown if sample else [view.lane.name for view in part]
            document["families"] += [f.value() for f in answer.families if family in (None, f.fingerprint)]
        document["families"].sort(key=lambda one: one["last_seen"] or "", reverse=True)
        return document

    known, failures = await directory.each(ask)
    failed = _by_environment([*answers.failures, *failures])
    empty: Document = {"recorded": True, "unknown": [], "families": []}
    return {
        "hours": hours,
        "environments": [
            {"environment": name, **known.get(name, empty), "errors": failed.get(name, [])}
            for name in directory.databases
        ],
    }


# -- gates


async def gates(
    directory: LaneDirectory,
    lane: str | None = None,
    key: str | None = None,
    by: str | None = None,
    limit: int = 20,
) -> Document:
    """The state of every gate, keys that are held back first; with ``lane``, of one lane."""
    keyed = key is not None or by is not None

    async def question(view: LaneView) -> list[tuple[BoundGates, list[KeyView]]]:
        if not view.lane.groups or (lane is None and keyed and not any(group.by for group in view.lane.groups)):
            return []
        bound = await lane_gates(view)
        dims = bound.dims
        if keyed:
            group = bound.choose(by, keyed=True).group
            dims = tuple(dim for dim in dims if dim.phrase is not None and dim.group.by == group.by)
        if not await has_table(view):
            return [(dim, []) for dim in dims]
        asked = key if key is None else (await bound.known(dims[0], key))[0]
        return [(dim, await bound.keys(dim, limit + 1, asked if dim.phrase else None)) for dim in dims]

    answers = await directory.ask(question)
    # Pauses of keys are told with the keys.
    pauses = [(name, pause) for name, pause in await directory.pauses() if not pause.target.dim]
    whole = lane is None and directory.sees("")  # all lanes spend from a budget
    return {
        "gates": [documents.gate_value(view, dim, keys, limit) for view, dims in answers.lanes for dim, keys in dims],
        "paused": [documents.pause_value(pause, name) for name, pause in pauses],
        "shared": await _shared_rates(directory, lane) if not keyed else [],
        "budgets": await _budgets(directory, [view for view, _ in answers.lanes]) if whole else [],
        "errors": answers.errors(),
    }


async def _shared_rates(directory: LaneDirectory, lane: str | None) -> list[Document]:
    """The rates over all environments."""
    lanes = [one for one in directory.lanes if lane in (None, one.name)]
    states = [(one, await directory.shared_state(one)) for one in lanes]
    return [documents.shared_value(one, state) for one, state in states if state is not None]


async def _budgets(directory: LaneDirectory, views: Sequence[LaneView]) -> list[Document]:
    budgets: list[Document] = []
    for declared in directory.mill.budgets.values():
        if declared.shared is None:
            continue
        with contextlib.suppress(RowmillError):  # then it is not known
            for name, limit, used in await spent(directory.control(declared.shared), directory.mill.clock, [declared]):
                text = f"{used:g} of {limit.most:g} {limit.unit} in {documents.per(limit.seconds)}"
                budgets.append({"environment": None, "budget": name, "cells": text})
    for view in {view.environment: view for view in views}.values():
        if await has_table(view):
            for name, cells in await (await lane_gates(view)).budgets():
                budget = {"environment": view.environment, "budget": name.removeprefix("budget:"), "cells": cells}
                budgets.append(budget)
    return budgets


# -- tasks and the audit log


async def tasks(directory: LaneDirectory) -> Document:
    """Tasks, and what each takes."""
    places = list(directory.databases)
    declared = [
        {
            "task": task.name,
            "lane": task.queue,
            "cron": task.cron.expression if task.cron else None,
            "max_attempts": task.max_attempts,
            "environments": list(task.environments or places),
            "takes": str(task.signature),
            "needs": task.signature.needs(),
        }
        for task in directory.mill.tasks.values()
        if directory.sees(task.queue)
    ]
    return {"tasks": declared}


async def audit(
    database: Database, limit: int = 50, before: int | None = None, lanes: frozenset[str] | None = None
) -> Document:
    """The audit log, newest first; ``next`` is the ``before`` of the following page."""
    entries = await Audit(database).entries(limit, before, lanes)
    return {"entries": entries, "next": entries[-1]["id"] if len(entries) == limit else None}
