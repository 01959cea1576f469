"""The forms of the pages: each is an action of the API, answered with a notice on the page it came from."""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import FormData
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.templating import Jinja2Templates

from ..declare.states import OPEN
from ..plural import counted
from .access import cache_of, directory_of, require, who
from .actions import perform
from .problem import Problem

#: What a form's verb is called as an action; and on which states it may be done to all rows of a lane.
_ACTIONS = {"retry": "retry", "cancel": "cancel", "release": "release", "schedule": "schedule", "pause": "pause",
            "resume": "resume", "gate": "set_gate", "reset": "reset_gates", "retry_family": "retry_family",
            "bury_family": "bury_family"}  # fmt: skip
_BULK = {"retry": ("dead", "canceled", "waiting", "excluded"), "cancel": OPEN, "release": ("stuck",)}
#: Letters of a field, as the API has it, and of what a page has put into a form: a key, an address, a message.
_LONGEST, _LONGEST_MADE = 1000, 8000
_PAST = {"retry": "made ready", "cancel": "canceled", "release": "released", "schedule": "rescheduled"}


def routes(templates: Jinja2Templates) -> list[Route]:
    """/act/...: where the forms go."""

    async def act(request: Request) -> Response:
        form, verb = await request.form(), request.path_params["verb"]
        if verb not in _ACTIONS:
            raise Problem(404, f"there is no action {verb!r}")
        _check(form)
        environment, lane = str(form.get("env", "")), str(form.get("lane", "")) or None
        many = (verb in _BULK and not form.get("id")) or verb.endswith("_family")
        if many and form.get("sure") != "yes":
            return await _ask(request, templates, verb, environment, lane or "", form)
        try:
            document = await perform(request, _ACTIONS[verb], environment, lane, _given(request, verb, form))
            cache_of(request).forget()
            level, text = _told(verb, environment, lane, document, form)
        except Problem as problem:
            if problem.status_code in (401, 403):
                raise
            level, text = "bad", str(problem.detail) + (f". Try: {problem.hint}" if problem.hint else "")
        name = notices_of(request).keep(level, text)
        path = _path(form)
        return RedirectResponse(f"{path}{'&' if '?' in path else '?'}said={name}", 303)

    return [Route("/act/{verb}", act, methods=["POST"])]


def _given(request: Request, verb: str, form: FormData) -> dict[str, Any]:
    """A form as the API's document."""
    given: dict[str, Any] = {}
    if verb in _PAST:
        if form.get("id"):
            given["ids"] = [str(form["id"])]
        elif verb == "release":
            given["stuck"] = _state(verb, form) == "stuck"
        else:
            given["state"] = _state(verb, form)
    if verb.endswith("_family"):
        given["error"] = _text(form, "error")
        given["reason"] = f"buried by {who(request).signature}"
    if verb == "cancel":
        given |= {"running": form.get("running") == "yes", "reason": _text(form, "reason")}
        given["reason"] = given["reason"] or f"canceled by {who(request).signature}"
    if verb == "schedule":
        given["run_after"] = _text(form, "at") or ""
    if verb == "pause":
        given["reason"] = _text(form, "reason")
        if minutes := _text(form, "minutes"):
            given["seconds"] = _number(minutes, "minutes") * 60.0
    if verb in ("pause", "resume", "gate", "reset") and "key" in form:
        given |= {"by": str(form.get("by", "")), "key": str(form["key"])}
    if verb == "gate":
        most = _text(form, "most")
        given["most"] = None if most is None else int(_number(most, "limit"))
    if verb == "reset" and "key" not in form:
        given["all"] = True
    return given


def _check(form: FormData) -> None:
    """Refuse what the pages never send and no database stores: files, NUL characters, very long text."""
    for name, value in form.multi_items():
        most = _LONGEST_MADE if name in ("back", "shape", "id", "key") else _LONGEST
        if not isinstance(value, str) or "\0" in value or len(value) > most:
            raise Problem(422, f"{name[:50]!r} is not text of at most {most:,} characters")


def _text(form: FormData, name: str) -> str | None:
    return str(form.get(name, "")).strip() or None


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 2**31 - 1:
        raise Problem(422, f"{what}: {text!r} is not a number", hint="30")
    return number


def _state(verb: str, form: FormData) -> str:
    state = str(form.get("state", ""))
    if state not in _BULK.get(verb, ()):
        raise Problem(422, f"{verb} cannot be applied to rows that are {state or 'in no state'}")
    return state


def _told(verb: str, environment: str, lane: str | None, document: dict[str, Any], form: FormData) -> tuple[str, str]:
    """The result of an action, as a sentence."""
    if verb in _PAST:
        if passed := document["passed_over"]:
            return "bad", f"{passed[0]['id']} was not {_PAST[verb]}: {passed[0]['reason']}."
        count, more = document["count"], " so far; run it again for the rest" if document["more"] else ""
        what = document["ids"][0] if document["ids"] else counted(count, "row")
        return "good", f"{what} {_PAST[verb]}{more}."
    if verb.endswith("_family"):
        count, more = document["count"], " so far; run it again for the rest" if document["more"] else ""
        done = "made ready" if verb == "retry_family" else "buried"
        return "good", f"{counted(count, 'row')} of the family {done}{more}."
    name = str(form["key"]) if "key" in form else f"Lane {lane}" if lane else f"Environment {environment}"
    match verb:
        case "pause":
            return "good", f"{name} is paused. Running rows go on."
        case "resume":
            return "good", f"{name} {'is resumed' if document['resumed'] else 'was not paused'}."
        case "gate":
            return "good", f"{name}: at most {document['most']} running."
        case _:
            return "good", f"{name}: state cleared."


async def _ask(
    request: Request, templates: Jinja2Templates, verb: str, environment: str, lane: str, form: FormData
) -> Response:
    """Ask for confirmation before an action on many rows."""
    identity = require(request, "operate", lane)
    shown: dict[str, Any] = {"page": "lane", "who": identity, "csrf": identity.csrf, "verb": verb, "env": environment,
                             "lane": lane, "back": _path(form), "environments": [], "lanes": []}  # fmt: skip
    if verb.endswith("_family"):
        shown |= {"error": _text(form, "error"), "shape": _text(form, "shape")}
        return templates.TemplateResponse(request, "sure.html", shown)
    state = _state(verb, form)
    view = await directory_of(request).view(environment, lane)
    shown |= {"state": state, "count": (await cache_of(request).counts(view))[state].value()}
    return templates.TemplateResponse(request, "sure.html", shown)


def _path(form: FormData) -> str:
    """The page that a form came from, as an address on this server."""
    given = str(form.get("back", "/"))
    try:
        parts = urlsplit(given)
    except ValueError:  # //[bad
        return "/"
    local = given.startswith("/") and not given.startswith(("//", "/\\")) and not parts.netloc and not parts.scheme
    return given if local and given.isprintable() else "/"


# -- notices

#: Notices that are kept at most.
_NOTICES = 200


class Notices:
    """Notices of actions, kept until the next page shows them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, str]] = {}

    def keep(self, level: str, text: str) -> str:
        """Keep a notice; its name."""
        name = secrets.token_hex(8)
        self._kept[name] = level, text
        while len(self._kept) > _NOTICES:
            self._kept.pop(next(iter(self._kept)))
        return name

    def take(self, name: str | None) -> tuple[str, str] | None:
        """Take a notice; it is shown once."""
        return self._kept.pop(name, None) if name else None


def notices_of(request: HTTPConnection) -> Notices:
    """The application's notices."""
    state = request.app.state
    if not hasattr(state, "notices"):
        state.notices = Notices()
    notices: Notices = state.notices
    return notices
