"""What operators do: retry, cancel, release, schedule and insert rows; pause and resume; set and reset gates; enqueue.

Each function answers with one document: ``rowmill ... --json`` prints it, and the HTTP API sends it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ..declare.call import Call
from ..declare.options import Options
from ..declare.states import OPEN
from ..errors import Busy, DeclarationError, WrongArguments
from ..mill import Mill
from ..plural import counted
from ..store import Database
from ..store.gates import pauses
from ..store.gates.gate_binding import BoundGates
from ..store.gates.pauses import Target, ensure_gates
from ..store.inspect.failure_families import members
from ..store.inspect.gate_view import SETTABLE as SETTABLE
from ..store.inspect.gate_view import LaneGates, lane_gates
from ..store.inspect.lane_view import LaneView
from ..store.lane.row_keys import Key, parse, written
from . import documents
from .directory import LaneDirectory
from .row_actions import Operator, Selection, ended_by_others, passed_over

Document = dict[str, Any]


class WrongGate(DeclarationError):
    """The setting does not apply to this kind of gate."""


CANCELED = "canceled by an operator"


@dataclass
class Progress:
    """Rows that an action has written so far."""

    rows: int = 0

    def __str__(self) -> str:
        """A note for the audit log after the error that ended the action."""
        return f"; at least {counted(self.rows, 'row was', 'rows were')} written before" if self.rows else ""


@dataclass(frozen=True)
class ActionTarget:
    """What an action applies to: an environment, or one lane in it.

    ``patience``: seconds after which an action on many rows ends and says that there are more.
    """

    directory: LaneDirectory
    environment: str
    lane: str | None = None
    patience: float | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def mill(self) -> Mill:
        return self.directory.mill

    @property
    def database(self) -> Database:
        """The environment's database."""
        return self.directory.database(self.environment)

    async def view(self) -> LaneView:
        return await self.directory.view(self.environment, self.lane or "")

    async def gates(self) -> LaneGates:
        """The lane's gates."""
        view = await self.view()
        if not view.lane.groups:
            raise DeclarationError(
                f"lane {view.lane.name!r} has no gates", hint="gates=[Concurrency(2, by=...)] in its declaration"
            )
        return await lane_gates(view)


def audited(document: Document) -> tuple[str, str | None]:
    """How an action ended, for the audit log: the outcome, and how many rows it wrote."""
    nothing = document.get("count") == 0 or ("resumed" in document and document["resumed"] is None)
    rows = counted(document["count"], "row").replace(",", "") if "count" in document else None  # for programs as well
    return "nothing" if nothing else "done", rows


# -- rows


@dataclass(frozen=True, kw_only=True)
class ChosenRows:
    """The rows that an action applies to: by id, state, family of failures (``error``), worker, or stuck."""

    ids: Sequence[str | int] | None = None
    state: str | None = None
    error: str | None = None
    worker: str | None = None
    stuck: bool = False

    def __post_init__(self) -> None:
        named = {name: bool(value) for name, value in vars(self).items()}
        if sum(named.values()) != 1:
            raise DeclarationError(
                "expected exactly one of ids, state, error, worker, stuck", hint='for example {"ids": ["7"]}'
            )

    def selection(self, view: LaneView, *states: str) -> Selection:
        """Rows in one of these states, or in the named one."""
        if self.worker is not None and "worker" not in view.binding.roles:
            raise DeclarationError(f"lane {view.lane.name!r} has no worker column", hint="name rows by id, or stuck")
        chosen = Selection((self.state,) if self.state else states, worker=self.worker)
        if self.ids is None:
            return chosen
        return replace(chosen, keys=tuple(dict.fromkeys(parse(view.binding, str(text)) for text in self.ids)))

    async def parts(self, view: LaneView, chosen: Selection) -> AsyncIterator[Selection]:
        """Yield the selection, or, for a family of failures, its rows in batches."""
        if self.error is None:
            yield chosen
            return
        async for keys in members(view, self.error, chosen.states):
            yield replace(chosen, keys=tuple(keys))


#: The states from which each verb takes rows that are named by id; and the rows of a family of failures.
_STATES = {"retry": (*OPEN, "dead", "canceled"), "cancel": OPEN, "release": ("running",), "schedule": OPEN}
_OF_FAMILY = {"retry": ("waiting", "excluded", "dead"), "cancel": OPEN}


def _states(verb: str, rows: ChosenRows, running: bool = False) -> tuple[str, ...]:
    if rows.error is not None:
        return _OF_FAMILY[verb]
    if rows.stuck:
        return ("stuck",)
    return (*_STATES[verb], *(["running"] if running else []))


@dataclass(frozen=True)
class Impact:
    """What an action would do: how many rows it would write, counted up to a limit.

    ``others``: lanes whose rows cannot be told from this lane's; ``foreign``: rows that another program ended.
    """

    view: LaneView
    rows: int
    others: list[str]
    foreign: int


async def impact(target: ActionTarget, verb: str, rows: ChosenRows, most: int, *, running: bool = False) -> Impact:
    """Count what an action on many rows would write, up to ``most``."""
    view, number = await target.view(), 0
    chosen, operator = rows.selection(view, *_states(verb, rows, running)), Operator(view)
    try:
        async for part in rows.parts(view, chosen):
            count = operator.count if part.keys is None else operator.count_keys
            number += await count(part, most - number)
            if number >= most:
                break
    except Busy:
        number = most
    sampled = "dead" in chosen.states and number and rows.error is None
    foreign = await ended_by_others(view.store) if sampled else 0
    return Impact(view, number, _sharing(target.directory, view, chosen.states), foreign)


def _sharing(directory: LaneDirectory, view: LaneView, states: Sequence[str]) -> list[str]:
    """Other lanes whose rows cannot be told from this lane's: the same table, the same final state."""
    return [
        other.name
        for other in directory.beside(view)
        for state in ("dead", "canceled")
        if state in states
        and (mine := getattr(view.lane, state))
        and (theirs := getattr(other, state))
        and view.lane.overlaps(mine, other, theirs)
    ]


async def retry(target: ActionTarget, rows: ChosenRows) -> Document:
    """Make rows ready at once, with all their attempts. A running row is never touched."""
    return await _write(target, "retry", rows, _states("retry", rows), Operator.retry)


async def cancel(
    target: ActionTarget, rows: ChosenRows, *, running: bool = False, reason: str | None = None
) -> Document:
    """Cancel rows; ``running`` ones only on request, and then their outcome is dropped."""
    if rows.state == "running" and not running:
        raise DeclarationError("to take running rows from their workers, send running: true")
    states = _states("cancel", rows, running)
    return await _write(target, "cancel", rows, states, lambda o, chosen: o.cancel(chosen, reason or CANCELED))


async def release(target: ActionTarget, rows: ChosenRows) -> Document:
    """Take running rows back from their holder: ready again, no attempt lost."""
    return await _write(target, "release", rows, _states("release", rows), Operator.release)


async def schedule(target: ActionTarget, rows: ChosenRows, run_after: datetime) -> Document:
    """Schedule rows that have not started for another time."""
    seconds = (run_after - datetime.now(UTC)).total_seconds()
    return await _write(target, "schedule", rows, OPEN, lambda o, chosen: o.schedule(chosen, seconds))


async def _write(
    target: ActionTarget,
    verb: str,
    rows: ChosenRows,
    states: tuple[str, ...],
    work: Callable[[Operator, Selection], AsyncIterator[list[Key]]],
) -> Document:
    """Write the chosen rows step by step, and say which were passed over."""
    view = await target.view()
    chosen, began, more, keys = rows.selection(view, *states), time.monotonic(), False, list[Key]()
    try:
        async with contextlib.aclosing(rows.parts(view, chosen)) as parts:  # type: ignore[type-var]
            async for part in parts:
                async with contextlib.aclosing(work(Operator(view), part)) as steps:  # type: ignore[type-var]
                    async for step in steps:
                        target.progress.rows += len(step)
                        keys += step if rows.ids else []
                        more = target.patience is not None and time.monotonic() - began > target.patience
                        if more and not rows.ids:
                            break
                if more:
                    break
    finally:
        if target.progress.rows and verb != "cancel":
            await target.directory.wake(target.environment)
    return {
        "environment": target.environment,
        "lane": view.lane.name,
        "action": verb,
        "error": rows.error,
        "count": target.progress.rows,
        "more": more and not rows.ids,
        "ids": [written(key if len(key) > 1 else key[0]) for key in keys] if rows.ids else None,
        "passed_over": await passed_over(view, chosen, keys) if rows.ids else [],
    }


async def insert(target: ActionTarget, columns: Mapping[str, Any]) -> Document:
    """Add a row in the lane's ready state."""
    view = await target.view()
    if view.lane.own:
        raise DeclarationError(f"{view.lane.name!r} is a queue of tasks", hint="POST /api/v1/tasks/{task}")
    key = await Operator(view).insert(columns)
    await target.directory.wake(target.environment)
    (row,) = await view.find([key])
    return documents.row_value(view, row, whole=True)


# -- pauses


async def _pause_target(target: ActionTarget, key: str | None, by: str | None) -> tuple[Target, list[str]]:
    """The target of a pause, checked against the lane and its table, and a note if no row has the key."""
    if target.lane is None:
        if key is not None:
            raise DeclarationError("--key needs a lane")
        return Target(), []
    view = await target.view()
    if key is None:
        return Target(view.lane.name), []
    gates = await lane_gates(view)
    dim = gates.choose(by, keyed=True)
    key, known = await gates.known(dim, key)
    return Target(view.lane.name, dim.label, key), [] if known else [f"No row has the key {key} at present."]


async def pause(
    target: ActionTarget,
    *,
    key: str | None = None,
    by: str | None = None,
    reason: str | None = None,
    end: datetime | timedelta | None = None,
) -> Document:
    """Stop claims of an environment, a lane, or a key of its gates. Running rows continue."""
    database = target.database
    paused, notes = await _pause_target(target, key, by)
    if await ensure_gates(database):
        notes.append("Created rowmill_gates, which stores pauses. Restart the workers that were started before.")
    made = await pauses.pause(database, target.mill.clock, paused, reason, end)
    return {"action": "pause", **documents.pause_value(made, target.environment), "notes": notes}


async def resume(target: ActionTarget, *, key: str | None = None, by: str | None = None) -> Document:
    """End a pause and wake idle workers. ``resumed`` is null if it was not paused."""
    database, clock = target.database, target.mill.clock
    paused, _ = await _pause_target(target, key, by)
    ended = await pauses.resume(database, clock, paused)
    if ended is not None:
        await target.directory.wake(target.environment)
    left = await pauses.standing(database, clock, [paused.lane] if paused.lane else target.mill.lanes)
    return {
        "action": "resume",
        "environment": target.environment,
        "lane": paused.lane or None,
        "by": paused.dim or None,
        "key": paused.key if paused.dim else None,
        "resumed": documents.pause_value(ended, target.environment) if ended else None,
        "still_paused": [documents.pause_value(pause, target.environment) for pause in left],
    }


# -- gates


async def set_gate(
    target: ActionTarget, changes: Mapping[str, Any], *, key: str | None = None, by: str | None = None
) -> Document:
    """Set the state of a gate, by the names in ``SETTABLE``; without a key, of the lane-wide gate."""
    gates = await target.gates()
    if not changes:
        raise DeclarationError("nothing to set", hint=f"names: {', '.join(SETTABLE)}")
    needs = [kind for name in changes if (kind := SETTABLE[name])]
    dim = gates.choose(by, keyed=key is not None, needs=needs)
    try:
        values = gates.change(dim, changes)
    except DeclarationError as error:
        raise WrongGate(error.message, hint=error.hint) from None
    known = (await gates.known(dim, key))[0] if key is not None else ""
    await ensure_gates(target.database)
    await gates.write(dim, known, values)
    (after,) = await gates.keys(dim, 1, known)
    await target.directory.wake(target.environment)
    where = {"action": "set", "environment": target.environment, "lane": target.lane, "by": dim.group.by}
    shown = documents.gate_value(gates.view, dim, [after], 1)
    return {**where, "label": shown["label"], "declared": shown["declared"], **shown["keys"][0]}


async def reset_gates(target: ActionTarget, *, key: str | None = None, by: str | None = None) -> Document:
    """Reset gates, but keep pauses. Without a key: all keys. ``known``: whether any row has the key."""
    gates = await target.gates()
    dims, chosen = _resettable(gates, key, by)
    name, known = await gates.known(chosen, key) if chosen is not None and key is not None else (None, True)
    await ensure_gates(target.database)
    number = await gates.reset(dims, name)
    await target.directory.wake(target.environment)
    where = {"action": "reset", "environment": target.environment, "lane": target.lane, "key": name}
    return {**where, "by": chosen.group.by if chosen is not None else None, "count": number, "known": known}


async def resettable(target: ActionTarget, *, by: str | None = None) -> int:
    """How many gates a reset of all keys would write."""
    gates = await target.gates()
    await ensure_gates(target.database)
    return await gates.count(_resettable(gates, None, by)[0])


def _resettable(gates: LaneGates, key: str | None, by: str | None) -> tuple[list[BoundGates], BoundGates | None]:
    if key is None and by is None:
        return list(gates.dims), None
    chosen = gates.choose(by, keyed=True)
    return [dim for dim in gates.dims if dim.phrase is not None and dim.group.by == chosen.group.by], chosen


# -- tasks


async def enqueue(target: ActionTarget, name: str, many: Sequence[Mapping[str, Any]], options: Options) -> Document:
    """Enqueue jobs of a task, one for each set of arguments by name."""
    task = target.mill.tasks[name]
    where, calls = f"task {task.name!r}", []
    for arguments in many:
        try:
            # By the handler's hints, as a worker would read them; then as any caller's.
            placed, named = task.signature.unpack(arguments)
        except TypeError as error:
            raise WrongArguments(f"{where}: {error}") from None
        calls.append(Call(task, task.signature.pack(where, tuple(placed), named), options))
    handles = await target.mill.enqueue_many(calls)
    ids = [handle.id for handle in handles]
    return {"task": task.name, "environment": target.environment, "lane": task.queue, "ids": ids}
