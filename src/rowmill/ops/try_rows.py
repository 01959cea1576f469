"""Try a handler: one row in the foreground, or a sample of finished rows, old version against new."""

from __future__ import annotations

import math
import os
import random
import socket
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from ..engine.one_row import RowRun, RowRunner
from ..errors import Busy, RowmillError
from ..mill import Mill
from ..store import open_lane
from ..store.inspect.lane_view import LaneView
from ..store.lane.row_keys import Key, Placeholders, parse, written
from .directory import LaneDirectory, NotFound
from .documents import role, simple

Document = dict[str, Any]
#: Outcomes of a run that failed.
FAILED = ("retry", "dead", "lost", "stuck")
#: Rows from which a sample is drawn, and the seconds that the draw may take.
_DRAWN_FROM, _DRAW = 2000, 5.0


class RowNotFound(NotFound):
    """No row has this id."""


class RowHeld(RowmillError):
    """The row cannot be claimed: it is not ready, or another worker holds it."""


async def try_row(
    directory: LaneDirectory, environment: str, lane: str, id: str, *, commit: bool, timeout: timedelta | None
) -> Document:
    """Run the handler on one row: as a dry run, or, with ``commit``, claimed, fenced and written."""
    view = await directory.view(environment, lane)
    key = parse(view.binding, id)
    rows = await view.find([key], whole=view.lane.own)
    # A queue's table has the jobs of all queues: another queue's job has no handler here.
    if not rows or (view.lane.own and rows[0].values.get("queue") != view.lane.name):
        raise _no_row(view, id)
    if not commit:
        async with _dry_runner(directory.mill, view, timeout) as runner:
            run = await runner.dry(key)
    else:
        worker = f"try-{socket.gethostname()}-{os.getpid()}"
        store = await open_lane(
            view.lane, environment, view.database, directory.mill.clock, worker, os.urandom(4).hex()
        )
        async with RowRunner(
            store, directory.mill.resources, directory.mill.events, timeout, directory.mill.control
        ) as runner:
            run = await runner.commit(key, view.idle())
        if run is None:
            raise await _held(view, key, id)
    if run is None:
        raise _no_row(view, id)
    return {"lane": lane, "environment": environment, "id": id, "committed": commit, **_run_value(run)}


@asynccontextmanager
async def _dry_runner(mill: Mill, view: LaneView, timeout: timedelta | None) -> AsyncIterator[RowRunner]:
    view.store.sign("dry-run")
    async with RowRunner(view.store, mill.resources, mill.events, timeout) as runner:
        yield runner


def _no_row(view: LaneView, id: str) -> RowNotFound:
    return RowNotFound(
        f"lane {view.lane.name!r}: no row of table {view.binding.table.fullname!r} has the id {id}",
        hint=f"rowmill jobs --lane {view.lane.name} lists rows with their ids",
    )


async def _held(view: LaneView, key: Key, id: str) -> RowmillError:
    rows = await view.find([key])
    if not rows:
        return _no_row(view, id)
    state, name = rows[0].state, view.lane.name
    if state == "running":
        worker = role(view, rows[0], "worker")
        return RowHeld(
            f"lane {name!r}: row {id} is running, held by {worker or 'another worker'}",
            hint="wait until that run ends, or leave out --commit",
        )
    return RowHeld(
        f"lane {name!r}: row {id} cannot be claimed: it is {state or 'in none of the states of this lane'}",
        hint=f"rowmill retry --lane {name} --id {id}, or leave out --commit",
    )


def _run_value(run: RowRun) -> Document:
    cause = run.cause
    after = run.after if run.after is not None else {}
    changes = [
        {"column": column, "before": simple(before), "after": simple(after.get(column))}
        for column, before in run.before.items()
        if column not in after or after[column] != before
    ]
    return {
        "outcome": run.outcome,
        "error": run.error,
        "delay_seconds": run.delay.total_seconds() if run.delay is not None else None,
        "seconds": round(run.duration, 6),
        "deleted": run.after is None,
        "columns": changes,
        "enqueued": [{"task": call.task.name, "args": call.args} for call in run.calls],
        "traceback": "".join(traceback.format_exception(cause)) if cause is not None and cause.__traceback__ else None,
    }


# -- rehearse


async def rehearse(
    directory: LaneDirectory,
    environment: str,
    lane: str,
    rows: int,
    *,
    seed: int,
    against: Mill | None,
    timeout: timedelta | None,
) -> Document:
    """Run the handler on a sample of done rows, written nowhere. Compare what it would write with the stored values, or
    with what the other version of the lane in ``against`` would write.
    """
    view = await directory.view(environment, lane)
    keys, drawn_from = await _sample(view, rows, seed)
    results: list[Document] = []
    async with _dry_runner(directory.mill, view, timeout) as new, _other(against, environment, lane, timeout) as old:
        for key in keys:
            run = await new.dry(key)
            before = await old.dry(key) if old is not None else None
            if run is not None and (old is None or before is not None):
                results.append(_compared(run, before))
    return {
        "lane": lane, "environment": environment, "seed": seed, "drawn_from": drawn_from,
        "against": old is not None, **_summary(results, old is not None), "rows": results,
    }  # fmt: skip


@asynccontextmanager
async def _other(
    mill: Mill | None, environment: str, lane: str, timeout: timedelta | None
) -> AsyncIterator[RowRunner | None]:
    if mill is None:
        yield None
        return
    async with LaneDirectory(mill, [environment], [lane]) as directory:
        view = await directory.view(environment, lane)
        async with _dry_runner(mill, view, timeout) as runner:
            yield runner


async def _sample(view: LaneView, rows: int, seed: int) -> tuple[list[Key], int]:
    """Keys of done rows: drawn by the seed from the newest ones, so that a large table costs no more than a small."""
    statements = view.statements
    keys = statements.names(view.binding.key)
    order = ", ".join(f"{statements.name(column)} desc" for column in view.binding.key)
    text = f"select {keys} from {statements.table} where {view.need('done')}"
    if view.lane.own:
        text += f" and {statements.name('queue')} = " + (marks := Placeholders(view.binding)).add(view.lane.name)
    else:
        marks = Placeholders(view.binding)
    try:
        sampled = await view.ask(f"{text} order by {order} limit {_DRAWN_FROM}", marks, _DRAW)
    except Busy:  # few of the newest rows are done: some rows, then
        sampled = await view.ask(f"{text} limit {rows}", marks, _DRAW)
    drawn = sorted(tuple(row) for row in sampled)
    chosen = random.Random(seed).sample(drawn, min(rows, len(drawn)))
    return chosen, len(drawn)


def _compared(new: RowRun, old: RowRun | None) -> Document:
    """What one row would get, new beside old. Without another version: the values that are stored, for the columns that
    the handler returns.
    """
    new_after, old_after = new.after or {}, (old.after or {}) if old is not None else new.before
    columns = {**new.columns, **(old.columns if old is not None else {})}
    changes = [
        {"column": column, "old": simple(old_after.get(column)), "new": simple(new_after.get(column))}
        for column in new.before
        if column in columns and old_after.get(column) != new_after.get(column)
    ]
    return {
        "id": written(new.key if len(new.key) > 1 else new.key[0]),
        "same": not changes and new.outcome == (old.outcome if old is not None else "done"),
        "old": {"outcome": old.outcome, "error": old.error, "seconds": round(old.duration, 6)} if old else None,
        "new": {"outcome": new.outcome, "error": new.error, "seconds": round(new.duration, 6)},
        "columns": changes,
    }


def _summary(results: Sequence[Document], both: bool) -> Document:
    sides: Document = {}
    for side in ("old", "new"):
        runs = [row[side] for row in results if row[side] is not None]
        times = sorted(run["seconds"] for run in runs)
        sides[side] = {
            "failed": sum(run["outcome"] in FAILED for run in runs),
            "p50_seconds": percentile(times, 0.5),
            "p95_seconds": percentile(times, 0.95),
        }
    counts: dict[str, int] = {}
    for row in results:
        for change in row["columns"]:
            counts[change["column"]] = counts.get(change["column"], 0) + 1
    same = sum(row["same"] for row in results)
    return {
        "count": len(results), "same": same, "different": len(results) - same,
        "old": sides["old"] if both else None, "new": sides["new"], "columns": counts,
    }  # fmt: skip


def percentile(times: Sequence[float], share: float) -> float | None:
    """The time within which this share of runs ended; ``times`` are sorted."""
    return times[max(math.ceil(share * len(times)) - 1, 0)] if times else None
