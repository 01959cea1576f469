"""Actions of the API and the dashboard: check the scope, call ``ops``, write the audit log.

``perform(request, "retry", environment, lane, {"ids": ["7"]})``. The values given are those of the API's documents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request

from ..declare.options import Options
from ..errors import DeclarationError
from ..ops import actions
from ..ops.actions import SETTABLE, ActionTarget, ChosenRows
from . import audit
from .access import require, who
from .problem import Problem, of

Given = Mapping[str, Any]
#: Seconds for which rows are written step by step before an answer is given; the rest is for the next request.
_PATIENCE = 20.0
_LONGEST_TARGET = 2000
#: What a gate's times are called in the API.
_WORDS = {"delay": "delay_seconds", "open": "open_seconds", "closed": "closed_seconds"}


async def perform(request: Request, action: str, environment: str, lane: str | None, given: Given) -> dict[str, Any]:
    """Do an action if the sender may. The audit log gets an entry before, and its outcome after."""
    scope, work = ACTIONS[action]
    target = ActionTarget(request.app.state.directory, environment, lane, _PATIENCE)
    entry = audit.Entry(request, action, environment=environment, lane=lane, target=_about(given))
    try:
        require(request, scope, lane)
        if action == "insert":
            _may_insert(request, lane)
        await entry.write("started")
        document = await work(target, given)
    except Exception as error:
        problem = of(error)
        if who(request).how != "none":
            outcome = "refused" if problem.status_code < 500 else "failed"
            await entry.write(outcome, f"{problem.detail}{target.progress}")
            problem.audited = True
        raise problem from error
    except BaseException:  # cut off by the time limit or by the server's shutdown
        await asyncio.shield(entry.write("failed", f"cut off{target.progress}"))
        raise
    await entry.write(*actions.audited(document))
    return document


def _about(given: Given) -> str | None:
    """The target of an action in one line."""
    named = {name: v for name, v in given.items() if v is not None and name not in ("args", "many", "columns")}
    text = ", ".join(f"{name}={value}" for name, value in named.items())
    return (text if len(text) <= _LONGEST_TARGET else f"{text[: _LONGEST_TARGET - 1]}…") or None


def _may_insert(request: Request, lane: str | None) -> None:
    known = request.app.state.mill.lanes.get(lane)
    if known is not None and not known.own and lane not in request.app.state.inserts:
        hint = f"rowmill serve --allow-insert {lane}"
        raise Problem(403, f"rows of lane {lane!r} cannot be created through the API", hint=hint)


# -- from the API's documents to the calls of ops


def _rows(given: Given) -> ChosenRows:
    return ChosenRows(**{name: given[name] for name in ("ids", "state", "error", "worker", "stuck") if name in given})


async def _cancel(target: ActionTarget, given: Given) -> dict[str, Any]:
    return await actions.cancel(
        target, _rows(given), running=bool(given.get("running")), reason=given.get("reason") or None
    )


async def _pause(target: ActionTarget, given: Given) -> dict[str, Any]:
    if given.get("seconds") is not None and given.get("until") is not None:
        raise DeclarationError("seconds and until cannot be used together")
    end: datetime | timedelta | None = None
    if given.get("seconds") is not None:
        end = timedelta(seconds=given["seconds"])
    elif given.get("until") is not None:
        end = moment(given["until"], "until")
    return await actions.pause(target, key=given.get("key"), by=given.get("by"), reason=given.get("reason"), end=end)


async def _set_gate(target: ActionTarget, given: Given) -> dict[str, Any]:
    changes = {name: given[word] for name in SETTABLE if (word := _WORDS.get(name, name)) in given}
    return await actions.set_gate(target, changes, key=given.get("key"), by=given.get("by"))


async def _reset_gates(target: ActionTarget, given: Given) -> dict[str, Any]:
    if given.get("key") is None and given.get("by") is None and not given.get("all"):
        raise DeclarationError("to reset all keys of the lane, send all: true")
    return await actions.reset_gates(target, key=given.get("key"), by=given.get("by"))


async def _enqueue(target: ActionTarget, given: Given) -> dict[str, Any]:
    after: datetime | timedelta | None = None
    if given.get("run_after") is not None:
        after = moment(given["run_after"], "run_after")
    elif given.get("delay_seconds") is not None:
        after = timedelta(seconds=given["delay_seconds"])
    options = Options(None, after, given.get("priority"), given.get("key"), target.environment)
    many = given["many"] if given.get("many") is not None else [given["args"]]
    return await actions.enqueue(target, given["task"], many, options)


def moment(text: str, what: str) -> datetime:
    """A time of a document; without a zone it is UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise DeclarationError(f"{what}: {text!r} is not a time", hint="2027-01-31T08:00:00Z") from None
    time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    if not 1000 < time.year < 9999:
        raise DeclarationError(f"{what}: {text!r} is too far away")
    return time


#: The scope that an action needs, and what it does.
ACTIONS: dict[str, tuple[str, Callable[[ActionTarget, Given], Awaitable[dict[str, Any]]]]] = {
    "retry": ("operate", lambda target, given: actions.retry(target, _rows(given))),
    "cancel": ("operate", _cancel),
    "release": ("operate", lambda target, given: actions.release(target, _rows(given))),
    "schedule": (
        "operate",
        lambda target, given: actions.schedule(target, _rows(given), moment(given["run_after"], "run_after")),
    ),
    "retry_family": ("operate", lambda target, given: actions.retry(target, _rows(given))),
    "bury_family": ("operate", lambda target, given: _cancel(target, {"reason": "buried by an operator", **given})),
    "pause": ("operate", _pause),
    "resume": (
        "operate",
        lambda target, given: actions.resume(target, key=given.get("key"), by=given.get("by")),
    ),
    "set_gate": ("operate", _set_gate),
    "reset_gates": ("operate", _reset_gates),
    "insert": ("enqueue", lambda target, given: actions.insert(target, given["columns"])),
    "enqueue": ("enqueue", _enqueue),
}
