"""What may be done through the API and the dashboard: each action asks who may, is done, and is written down.

``perform(request, "retry", environment, lane, {"ids": ["7"]})``. The values given are those of the API's documents.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request

from ..declare.call import Call
from ..declare.options import Options
from ..errors import DatabaseError, DeclarationError, did_you_mean
from ..mill import Mill
from ..ops.environments import LaneDirectory
from ..ops.row_actions import Operator, Selection, passed_over
from ..plural import counted
from ..store import Database
from ..store.gates.pauses import Pause, Target, ensure_gates, pause, resume, standing
from ..store.inspect import json_values
from ..store.inspect.gate_view import SETTABLE, LaneGates, lane_gates
from ..store.inspect.lane_view import OPEN, LaneView
from ..store.jobs.enqueue import CHANNEL
from ..store.lane.row_keys import Key, parse, written
from . import audit
from .access import require, who
from .problem import Problem, of

Given = Mapping[str, Any]
#: Seconds for which rows are written step by step before an answer is given; the rest is for the next request.
_PATIENCE = 20.0
_LONGEST_TARGET = 2000


@dataclass
class Progress:
    """Rows that an action has written so far."""

    rows: int = 0

    def __str__(self) -> str:
        """For the audit log, behind what ended the action."""
        return f"; at least {counted(self.rows, 'row was', 'rows were')} written before" if self.rows else ""


@dataclass(frozen=True)
class ActionTarget:
    """Where something is done: an environment, or one lane in it."""

    lookout: LaneDirectory
    environment: str
    lane: str | None
    inserts: frozenset[str] = frozenset()
    progress: Progress = field(default_factory=Progress)

    @property
    def mill(self) -> Mill:
        return self.lookout.mill

    @property
    def database(self) -> Database:
        """The environment's; a problem where there is no such environment."""
        known = dict(self.lookout.databases)
        if self.environment not in known:
            raise Problem(
                404, f"there is no environment {self.environment!r}", hint=did_you_mean(self.environment, known)
            )
        return known[self.environment]

    async def view(self) -> LaneView:
        """The lane; a problem where there is no such lane here."""
        database, name = self.database, self.lane or ""
        lane = self.mill.lanes.get(name)
        if lane is None:
            raise Problem(404, f"there is no lane {name!r}", hint=did_you_mean(name, self.mill.lanes))
        if not lane.serves(self.environment):
            raise Problem(404, f"lane {name!r} does not work in environment {self.environment!r}")
        return await self.lookout.view(self.environment, database, lane)

    async def gates(self) -> LaneGates:
        """The lane's gates; a problem where it has none."""
        view = await self.view()
        if not view.lane.groups:
            raise Problem(422, f"lane {view.lane.name!r} has no gates")
        return await lane_gates(view)

    async def wake(self) -> None:
        """A hint to idle workers; they poll as well."""
        database = self.database
        if database.dialect.name == "postgresql":
            with contextlib.suppress(DatabaseError):
                await database.write(lambda run: run("select pg_notify($1, '')", (CHANNEL,)))


def place(request: Request, environment: str, lane: str | None = None) -> ActionTarget:
    """Where a request is about."""
    state = request.app.state
    return ActionTarget(state.lookout, environment, lane, state.inserts)


async def perform(request: Request, action: str, environment: str, lane: str | None, given: Given) -> dict[str, Any]:
    """Do something if the sender may. The audit log has it before it is done, and how it ended after."""
    scope, work = ACTIONS[action]
    here = place(request, environment, lane)
    entry = audit.Entry(request, action, environment=environment, lane=lane, target=_target(given))
    try:
        require(request, scope, lane)
        await entry.write("started")
        found = await work(here, given)
    except Exception as error:
        problem = of(error)
        if who(request).how != "none":
            outcome = "refused" if problem.status_code < 500 else "failed"
            await entry.write(outcome, f"{problem.detail}{here.progress}")
            problem.audited = True
        raise problem from error
    except BaseException:  # cut off by the time limit or by the server's shutdown
        await asyncio.shield(entry.write("failed", f"cut off{here.progress}"))
        raise
    nothing = found.get("count") == 0 or ("resumed" in found and found["resumed"] is None)
    detail = counted(found["count"], "row").replace(",", "") if "count" in found else None  # for programs as well
    await entry.write("nothing" if nothing else "done", detail)
    return found


def _target(given: Given) -> str | None:
    """What an action was about, in a line."""
    said = {
        name: value for name, value in given.items() if value is not None and name not in ("args", "many", "columns")
    }
    text = ", ".join(f"{name}={value}" for name, value in said.items())
    return (text if len(text) <= _LONGEST_TARGET else f"{text[: _LONGEST_TARGET - 1]}…") or None


# -- rows


async def _write(
    here: ActionTarget,
    given: Given,
    action: str,
    chosen: Selection,
    work: Callable[[Operator, Selection], AsyncIterator[list[Key]]],
) -> dict[str, Any]:
    """Write the rows that are meant, step by step, and say which were passed over."""
    view = await here.view()
    ids = given.get("ids")
    if ids is not None:
        chosen = replace(chosen, keys=tuple(dict.fromkeys(parse(view.binding, str(text)) for text in ids)))
    if chosen.worker is not None and "worker" not in view.binding.roles:
        raise Problem(422, f"lane {view.lane.name!r} has no worker column")
    keys, began, more = list[Key](), time.monotonic(), False
    async with contextlib.aclosing(work(Operator(view), chosen)) as steps:  # type: ignore[type-var]
        async for step in steps:
            keys += step
            here.progress.rows += len(step)
            if chosen.keys is None and time.monotonic() - began > _PATIENCE:
                more = True
                break
    if keys and action != "cancel":
        await here.wake()
    found = {"environment": here.environment, "lane": view.lane.name, "action": action, "count": len(keys)}
    passed = [{"id": left.id, "reason": left.reason} for left in await passed_over(view, chosen, keys)]
    listed = [written(key if len(key) > 1 else key[0]) for key in keys] if ids is not None else None
    return {**found, "more": more, "ids": listed, "passed_over": passed}


def _one_of(given: Given, *names: str) -> None:
    if sum(bool(given.get(name)) for name in names) != 1:
        raise Problem(422, f"say which rows: {' or '.join(names)}, one of them")


async def _retry(here: ActionTarget, given: Given) -> dict[str, Any]:
    _one_of(given, "ids", "state")
    states = (given["state"],) if given.get("state") else (*OPEN, "dead", "canceled")
    return await _write(here, given, "retry", Selection(states), Operator.retry)


async def _cancel(here: ActionTarget, given: Given) -> dict[str, Any]:
    _one_of(given, "ids", "state")
    running = bool(given.get("running"))
    if given.get("state") == "running" and not running:
        raise Problem(422, "running rows are taken from their holders only with running: true")
    states = (given["state"],) if given.get("state") else (*OPEN, *(["running"] if running else []))
    reason = given.get("reason") or "canceled by an operator"
    return await _write(here, given, "cancel", Selection(states), lambda o, chosen: o.cancel(chosen, reason))


async def _release(here: ActionTarget, given: Given) -> dict[str, Any]:
    _one_of(given, "ids", "worker", "stuck")
    states = ("stuck",) if given.get("stuck") else ("running",)
    return await _write(here, given, "release", Selection(states, worker=given.get("worker")), Operator.release)


async def _schedule(here: ActionTarget, given: Given) -> dict[str, Any]:
    when = moment(given["run_after"], "run_after")
    seconds = (when - datetime.now(UTC)).total_seconds()
    chosen = Selection(OPEN)
    return await _write(here, given, "schedule", chosen, lambda o, rows: o.schedule(rows, seconds))


async def _insert(here: ActionTarget, given: Given) -> dict[str, Any]:
    view = await here.view()
    if view.lane.own:
        raise Problem(422, f"{view.lane.name!r} is a queue of tasks", hint="POST /api/v1/tasks/{task}")
    if view.lane.name not in here.inserts:
        raise Problem(
            403,
            f"rows of lane {view.lane.name!r} are not made through the API",
            hint=f"rowmill serve --allow-insert {view.lane.name}",
        )
    key = await Operator(view).insert(given["columns"])
    await here.wake()
    (row,) = await view.find([key])
    return {**json_values.row_value(view, row, whole=True), "key": written(row.id)}


# -- pauses and gates


async def _pause_target(here: ActionTarget, given: Given) -> Target:
    if here.lane is None:
        if given.get("key") is not None:
            raise Problem(422, "a key of which lane?")
        _ = here.database
        return Target()
    view = await here.view()
    if given.get("key") is None:
        return Target(view.lane.name)
    gates = await here.gates()
    dim = gates.choose(given.get("by"), keyed=True)
    return Target(view.lane.name, dim.label, (await gates.known(dim, given["key"]))[0])


async def _pause(here: ActionTarget, given: Given) -> dict[str, Any]:
    if given.get("seconds") is not None and given.get("until") is not None:
        raise Problem(422, "seconds or until, one of them")
    end: datetime | timedelta | None = None
    if given.get("seconds") is not None:
        end = timedelta(seconds=given["seconds"])
    elif given.get("until") is not None:
        end = moment(given["until"], "until")
    target = await _pause_target(here, given)
    await ensure_gates(here.database)
    found = await pause(here.database, here.mill.clock, target, given.get("reason"), end)
    return {"action": "pause", **json_values.pause_value(found, here.environment)}


async def _resume(here: ActionTarget, given: Given) -> dict[str, Any]:
    target = await _pause_target(here, given)
    stood = await resume(here.database, here.mill.clock, target)
    if stood is not None:
        await here.wake()
    left: list[Pause] = await standing(
        here.database, here.mill.clock, [target.lane] if target.lane else here.mill.lanes
    )
    return {
        "action": "resume",
        "environment": here.environment,
        "resumed": json_values.pause_value(stood, here.environment) if stood else None,
        "still_paused": [json_values.pause_value(pause, here.environment) for pause in left],
    }


async def _set_gate(here: ActionTarget, given: Given) -> dict[str, Any]:
    gates, key = await here.gates(), given.get("key")
    changes = {name: given[word] for name in SETTABLE if (word := _WORDS.get(name, name)) in given}
    if not changes:
        raise Problem(422, f"nothing to set: {', '.join(_WORDS.get(name, name) for name in SETTABLE)}")
    needs = [kind for name in changes if (kind := SETTABLE[name])]
    dim = gates.choose(given.get("by"), keyed=key is not None, needs=needs)
    known = (await gates.known(dim, key))[0] if key is not None else ""
    await ensure_gates(here.database)
    await gates.write(dim, known, gates.change(dim, changes))
    (after,) = await gates.keys(dim, 1, known)
    await here.wake()
    where = {"action": "set", "environment": here.environment, "lane": here.lane, "by": dim.group.by}
    return {**where, **json_values.key_value(after)}


#: What a gate's times are called in the API.
_WORDS = {"delay": "delay_seconds", "open": "open_seconds", "closed": "closed_seconds"}


async def _reset_gates(here: ActionTarget, given: Given) -> dict[str, Any]:
    gates, key, by = await here.gates(), given.get("key"), given.get("by")
    if key is None and by is None and not given.get("all"):
        raise Problem(422, "all keys of the lane are reset only with all: true")
    dims, known = list(gates.dims), None
    if key is not None or by is not None:
        chosen = gates.choose(by, keyed=True)
        dims = [dim for dim in dims if dim.phrase is not None and dim.group.by == chosen.group.by]
        known = (await gates.known(chosen, key))[0] if key is not None else None
    await ensure_gates(here.database)
    number = await gates.reset(dims, known)
    await here.wake()
    where = {"action": "reset", "environment": here.environment, "lane": here.lane, "key": known}
    return {**where, "count": number}


# -- tasks


async def _enqueue(here: ActionTarget, given: Given) -> dict[str, Any]:
    task = here.mill.tasks[given["task"]]
    _ = here.database
    if (given.get("args") is not None) == (given.get("many") is not None):
        raise Problem(422, "args or many, one of them")
    after: datetime | timedelta | None = None
    if given.get("run_after") is not None:
        after = moment(given["run_after"], "run_after")
    elif given.get("delay_seconds") is not None:
        after = timedelta(seconds=given["delay_seconds"])
    options = Options(None, after, given.get("priority"), given.get("key"), here.environment)
    where, calls = f"task {task.name!r}", []
    for args in given["many"] if given.get("many") is not None else [given["args"]]:
        try:
            # By the handler's hints, as a worker would read them; then as any caller's.
            placed, named = task.signature.unpack(args)
        except TypeError as error:
            raise Problem(422, f"{where}: {error}") from None
        calls.append(Call(task, task.signature.pack(where, tuple(placed), named), options))
    handles = await here.mill.enqueue_many(calls)
    ids = [handle.id for handle in handles]
    return {"task": task.name, "environment": here.environment, "lane": task.queue, "ids": ids}


def moment(text: str, what: str) -> datetime:
    """A time of a document; without a zone it is UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise DeclarationError(f"{what}: {text!r} is not a time", hint="2027-01-31T08:00:00Z") from None
    found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    if not 1000 < found.year < 9999:
        raise DeclarationError(f"{what}: {text!r} is too far away")
    return found


ACTIONS: dict[str, tuple[str, Callable[[ActionTarget, Given], Awaitable[dict[str, Any]]]]] = {
    "retry": ("operate", _retry),
    "cancel": ("operate", _cancel),
    "release": ("operate", _release),
    "schedule": ("operate", _schedule),
    "pause": ("operate", _pause),
    "resume": ("operate", _resume),
    "set_gate": ("operate", _set_gate),
    "reset_gates": ("operate", _reset_gates),
    "insert": ("enqueue", _insert),
    "enqueue": ("enqueue", _enqueue),
}
