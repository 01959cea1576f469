"""What an operator does from a page: forms that are posted, carried out, written down, and answered with a notice."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.templating import Jinja2Templates

from ..errors import DatabaseError, RowmillError
from ..store.gate_rows import GateRows
from ..store.gate_view import LaneGates, lane_gates
from ..store.gating import Dimension
from ..store.inspect import LaneView
from ..store.keys import Key, parse
from ..store.operate import Operator, Selection
from ..store.pauses import Target, ensure_gates, pause, resume
from . import audit
from .access import require
from .notices import notices_of
from .problem import Problem
from .views import Sight, sight_of

#: What rows must be in for an action on one of them, and on all of a state.
_FROM = {
    "retry": ("ready", "waiting", "dead", "canceled"),
    "cancel": ("ready", "waiting"),
    "release": ("running",),
    "schedule": ("ready", "waiting"),
}
_PAST = {"retry": "made ready", "cancel": "canceled", "release": "released", "schedule": "rescheduled"}
_BULK = {"retry": ("dead", "canceled", "waiting"), "cancel": ("ready", "waiting"), "release": ("stuck",)}


def routes(templates: Jinja2Templates) -> list[Route]:
    """/act/...: where the pages' forms go."""

    async def act(request: Request) -> Response:
        form, verb = await request.form(), request.path_params["verb"]
        if verb not in _VERBS:
            raise Problem(404, f"there is no action {verb!r}")
        one = Action(request, verb, form)
        require(request, "operate", one.lane or None)
        try:
            if verb in _BULK and one.key is None and form.get("sure") != "yes":
                return await _ask(one, templates)
            level, text = "good", await _VERBS[verb](one)
        except RowmillError as error:
            await one.record("refused", error.message)
            level, text = "bad", error.message + (f". Try: {error.hint}" if error.hint else "")
        name = notices_of(request).keep(level, text)
        return RedirectResponse(_back(form, name), 303)

    return [Route("/act/{verb}", act, methods=["POST"])]


class Action:
    """A form that was posted."""

    def __init__(self, request: Request, verb: str, form: FormData) -> None:
        self.request, self.verb, self.form = request, verb, form
        self.sight: Sight = sight_of(request)
        self.environment, self.lane = self.text("env"), self.text("lane")
        self.key = self.text("id") or None

    def text(self, name: str) -> str:
        """A field's text."""
        return str(self.form.get(name, "")).strip()

    async def view(self) -> LaneView:
        """The lane that is meant."""
        return await self.sight.view(self.environment, self.lane)

    async def record(self, outcome: str = "done", detail: str | None = None, target: str | None = None) -> None:
        """Write it down."""
        await audit.record(
            self.request, self.verb, environment=self.environment or None, lane=self.lane or None,
            target=target or self.key, outcome=outcome, detail=detail,
        )  # fmt: skip

    async def wake(self) -> None:
        """Let idle workers look; they poll as well."""
        with contextlib.suppress(DatabaseError):
            await self.sight.mill.wake(self.environment)


# -- rows


async def _on_rows(one: Action) -> str:
    view = await one.view()
    operator = Operator(view)
    if one.key is not None:
        states = (*_FROM[one.verb], *(("running",) if one.verb == "cancel" and one.text("running") == "yes" else ()))
        chosen = Selection(states, (parse(view.binding, one.key),))
    else:
        chosen = Selection((_state(one),))
    count = 0
    async for step in await _work(one, operator, chosen):
        count += len(step)
    await one.wake()
    where = one.key or f"all {chosen.states[0]}"
    await one.record("done" if count else "nothing", f"{count} rows", where)
    if one.key is None:
        return f"{count:,} row{'' if count == 1 else 's'} {_PAST[one.verb]}."
    if not count:
        found = await view.find([parse(view.binding, one.key)], whole=False)
        state = found[0].state if found else None
        raise RowmillError(
            f"{one.key} was not {_PAST[one.verb]}: " + (f"it is {state}" if state else "there is no such row")
        )
    return f"{one.key} {_PAST[one.verb]}."


async def _work(one: Action, operator: Operator, chosen: Selection) -> AsyncIterator[list[Key]]:
    match one.verb:
        case "retry":
            return operator.retry(chosen)
        case "cancel":
            return operator.cancel(chosen, one.text("reason") or f"canceled by {one.request.state.who.name}")
        case "release":
            return operator.release(chosen)
        case _:
            return operator.schedule(chosen, await _from_now(one))


async def _from_now(one: Action) -> float:
    """Seconds from now, by the database's time: as minutes, or as a time in UTC."""
    if minutes := one.text("minutes"):
        try:
            return max(float(minutes), 0.0) * 60.0
        except ValueError:
            raise RowmillError(f"{minutes!r} is not a number of minutes", hint="30") from None
    try:
        at = datetime.fromisoformat(one.text("at"))
    except ValueError:
        raise RowmillError(f"{one.text('at')!r} is not a time", hint="2027-01-31T08:00") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    rows = GateRows(one.sight.databases[one.environment], one.sight.mill.clock, "")
    now = await rows.database.read(rows.epoch)
    return max(at.timestamp() - now, 0.0)


def _state(one: Action) -> str:
    state = one.text("state")
    if state not in _BULK.get(one.verb, ()):
        raise RowmillError(f"{one.verb} does not go with rows that are {state or 'in no state'}")
    return state


async def _ask(one: Action, templates: Jinja2Templates) -> Response:
    """Many rows are not changed by a slip of the hand."""
    state, view = _state(one), await one.view()
    glance = await one.sight.glance(view)
    values = {"verb": one.verb, "state": state, "count": glance.counts[state].value(), "env": one.environment,
              "lane": one.lane, "back": _path(one.form)}  # fmt: skip
    return templates.TemplateResponse(one.request, "sure.html", values)


# -- gates and pauses


async def _pause(one: Action) -> str:
    database = one.sight.databases.get(one.environment)
    if database is None:
        raise RowmillError(f"there is no environment {one.environment!r}")
    target, end = await _target(one), None
    if minutes := one.text("minutes"):
        end = timedelta(seconds=await _from_now(one)) if float_like(minutes) else None
    await ensure_gates(database)
    await pause(database, one.sight.mill.clock, target, one.text("reason") or None, end)
    await one.record(target=target.key or None, detail=one.text("reason") or None)
    return f"{_named(target, one.environment)} is paused. What runs goes on."


def float_like(text: str) -> bool:
    """Whether text is a number above zero."""
    try:
        return float(text) > 0
    except ValueError:
        raise RowmillError(f"{text!r} is not a number of minutes", hint="30") from None


async def _resume(one: Action) -> str:
    database = one.sight.databases.get(one.environment)
    if database is None:
        raise RowmillError(f"there is no environment {one.environment!r}")
    target = await _target(one)
    stood = await resume(database, one.sight.mill.clock, target)
    await one.wake()
    await one.record("done" if stood else "nothing", target=target.key or None)
    return f"{_named(target, one.environment)} {'goes on' if stood else 'was not paused'}."


async def _target(one: Action) -> Target:
    if not one.lane:
        return Target()
    view = await one.view()
    if not one.form.get("by"):
        return Target(view.lane.name)
    gates = await lane_gates(view)
    dim = gates.choose(one.text("by"), keyed=True)
    return Target(view.lane.name, dim.label, (await gates.known(dim, str(one.form.get("key", ""))))[0])


def _named(target: Target, environment: str) -> str:
    if target.kind == "environment":
        return f"Environment {environment}"
    return f"Lane {target.lane}" if target.kind == "lane" else f"{target.dim} {target.key}"


async def _set_gate(one: Action) -> str:
    """Another limit for one key, or for the whole lane; empty: the declared one."""
    gates, dim, key = await _gate(one)
    given = one.text("most")
    if given and (not given.isdecimal() or int(given) > 2**31 - 1):
        raise RowmillError(f"{given!r} is not a whole number", hint="3")
    if dim.group.concurrency is None:
        raise RowmillError(f"{dim.label or 'the lane'} has no limit to set")
    await ensure_gates(gates.view.database)
    await gates.write(dim, key, {"most": int(given) if given else None})
    await one.wake()
    await one.record(target=key or None, detail=f"most={given or 'as declared'}")
    return f"{key or 'The lane'}: at most {given or dim.group.concurrency.limit} running."


async def _reset_gate(one: Action) -> str:
    gates, dim, key = await _gate(one)
    await ensure_gates(gates.view.database)
    await gates.reset([dim], key)
    await one.wake()
    await one.record(target=key or None)
    return f"{key or 'The lane'}: its gate is as fresh as at the beginning."


async def _gate(one: Action) -> tuple[LaneGates, Dimension, str]:
    gates = await lane_gates(await one.view())
    keyed = bool(one.form.get("by"))
    dim = gates.choose(one.text("by") or None, keyed=keyed)
    return gates, dim, (await gates.known(dim, str(one.form.get("key", ""))))[0] if keyed else ""


_VERBS: dict[str, Callable[[Action], Awaitable[str]]] = {
    **dict.fromkeys(("retry", "cancel", "release", "schedule"), _on_rows),
    "pause": _pause,
    "resume": _resume,
    "gate": _set_gate,
    "reset": _reset_gate,
}


def _path(form: Any) -> str:
    """Where a form came from, as an address of this server's own."""
    given = str(form.get("back", "/"))
    parts = urlsplit(given)
    local = given.startswith("/") and not given.startswith(("//", "/\\")) and not parts.netloc and not parts.scheme
    return given if local and given.isprintable() else "/"


def _back(form: Any, notice: str) -> str:
    path = _path(form)
    return f"{path}{'&' if '?' in path else '?'}said={notice}"
