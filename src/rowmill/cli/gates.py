"""Commands for what holds rows back: pause, resume, and gates (show, set, reset)."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import did_you_mean
from ..mill import Mill
from ..ops import actions, documents, questions
from ..ops.actions import SETTABLE, ActionTarget
from ..plural import counted
from . import show
from .app import (
    NothingMatched,
    UsageError,
    answer,
    app,
    ask,
    consent,
    errors,
    plain,
)
from .options import (
    App,
    AsJson,
    Env,
    OneEnvironment,
    asked,
    lane_names,
    load,
    not_empty,
    one_environment,
    one_lane,
    worded,
)

_SET = "[APP] LANE [KEY] name=value ..."
_LARGEST = 2**31 - 1
_STILL_PAUSED = 10
_UNITS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(sorted(_UNITS, key=len, reverse=True))})\s*")
#: A longer duration is a mistake.
_MOST = timedelta(days=3650)

Lane = Annotated[
    str | None,
    typer.Option(
        "--lane", help="this lane; default: the whole environment", autocompletion=lane_names, callback=not_empty
    ),
]
Key = Annotated[str | None, typer.Option("--key", help="only rows with this key; the lane needs a gate by key")]
By = Annotated[
    str | None, typer.Option("--by", help="the gate's column, if the lane has gates by several", callback=not_empty)
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[APP] [LANE] | set [APP] LANE [KEY] NAME=VALUE... | reset [APP] LANE [KEY]", show_default=False
    ),
]


# -- pause and resume


@app.command()
def pause(
    reference: App = None,
    lane: Lane = None,
    key: Key = None,
    by: By = None,
    env: OneEnvironment = None,
    reason: Annotated[
        str | None, typer.Option(help="shown by status, gates and the dashboard", callback=not_empty)
    ] = None,
    span: Annotated[str | None, typer.Option("--for", help="how long: 90s, 10m, 1h30m, 2d", callback=not_empty)] = None,
    until: Annotated[
        str | None, typer.Option("--until", help="until when: 18:30 or 2027-01-31T08:00 (UTC)", callback=not_empty)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pause a lane, one key of a gate, or a whole environment.

    Workers stop claiming at once, until the pause ends or until *resume*. Running rows go on. No row is changed.

    Example: `rowmill pause app:mill --lane fetch --for 10m --reason deploy`
    """
    if span and until:
        raise UsageError("--for and --until cannot be used together", hint="use one of them")
    end = duration(span, "--for") if span else moment(until, "--until") if until else None
    mill, environment, lane = _place(reference, lane, key, by, env)
    document = _act(
        mill, environment, lane, lambda target: actions.pause(target, key=key, by=by, reason=reason, end=end)
    )
    answer(document, show.pause_line(document, len(mill.environments)), as_json=as_json)
    for note in document["notes"] if not as_json else ():
        errors.print(plain(note), soft_wrap=True)


@app.command()
def resume(
    reference: App = None,
    lane: Lane = None,
    key: Key = None,
    by: By = None,
    env: OneEnvironment = None,
    as_json: AsJson = False,
) -> None:
    """End a pause, and wake idle workers.

    Exit code 4: it was not paused.

    Example: `rowmill resume app:mill --lane fetch`
    """
    mill, environment, lane = _place(reference, lane, key, by, env)
    document = _act(mill, environment, lane, lambda target: actions.resume(target, key=key, by=by))
    ended = "is no longer paused" if document["resumed"] else "was not paused"
    left = [show.pause_line(pause, len(mill.environments)) for pause in document["still_paused"][:_STILL_PAUSED]]
    lines = (Text("still: ").append_text(line) for line in left)
    shown = Group(plain(f"{show.pause_name(document)} {ended}"), *lines)
    answer(document, shown, as_json=as_json, nothing=document["resumed"] is None)


def _place(
    reference: str | None, lane: str | None, key: str | None, by: str | None, env: str | None
) -> tuple[Mill, str, str | None]:
    """The application, the environment and the lane. With a key, the lane may be left out if there is only one."""
    if key is None and by is not None:
        raise UsageError("--by needs --key", hint="--key KEY")
    mill = load(reference)
    if lane is None and key is not None:
        lane = one_lane(mill, None)
    return mill, one_environment(mill, env, lane), lane


def _act(
    mill: Mill, environment: str, lane: str | None, work: Callable[[ActionTarget], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    lanes = [lane] if lane else None
    return ask(mill, lambda directory: work(ActionTarget(directory, environment, lane)), [environment], lanes)


def duration(text: str, what: str, *, bare: bool = False) -> timedelta:
    """``90s``, ``10m``, ``1h30m``, ``2d``; ``bare``: a number alone is seconds."""
    plain_text, seconds, at = text.strip().lower(), 0.0, 0
    if bare and re.fullmatch(r"\d+(?:\.\d+)?", plain_text):
        plain_text += "s"
    while at < len(plain_text) and (part := _PART.match(plain_text, at)):
        seconds, at = seconds + float(part[1]) * _UNITS[part[2]], part.end()
    if at < len(plain_text) or not plain_text:
        raise UsageError(f"{what}: {text!r} is not a duration", hint="90s, 10m, 1h30m or 2d")
    if not 0 < seconds <= _MOST.total_seconds():
        raise UsageError(f"{what}: {text!r} must be more than zero and at most ten years", hint="90s, 10m, 1h30m or 2d")
    return timedelta(seconds=seconds)


def moment(text: str, what: str) -> datetime:
    """``2027-01-31T08:00+01:00``, or ``18:30`` for the next time it is that late; without a zone it is UTC."""
    now = datetime.now(UTC)
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text.strip()):
            hour, minute = map(int, text.split(":"))
            time = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return time if time > now else time + timedelta(days=1)
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"{what}: {text!r} is not a time", hint="18:30 or 2027-01-31T08:00 (UTC), or with +01:00"
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


# -- gates


@app.command()
def gates(
    words: Words = None,
    env: Env = None,
    key: Annotated[str | None, typer.Option("--key", help="only this key")] = None,
    by: Annotated[str | None, typer.Option("--by", help="the gate's column, if the lane has gates by several")] = None,
    limit: Annotated[int, typer.Option(min=1, help="keys to show per gate")] = 20,
    yes: Annotated[bool, typer.Option("--yes", help="reset all keys without asking")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of gates by key, or change it by hand.

    Lists keys that hold rows back first.

    `gates set APP LANE KEY NAME=VALUE ...` changes one key. Without KEY it changes the gate of the whole lane. Names:

    - *limit*: how many rows of the key may run at once; *no* for the declared limit

    - *tokens*: what a rate has left

    - *streak*: failures in a row, as the breaker counts them

    - *delay*: seconds between starts, for an adaptive rate

    - *open*, *closed*: hold the key back for a duration such as 10m; *no* lets it start

    `gates reset APP LANE [KEY]` clears this state, but no pause. Without KEY it clears all keys.

    Example: `rowmill gates set app:mill fetch example.org closed=10m`
    """
    given = list(words or ())
    verb = given.pop(0) if given and given[0] in ("set", "reset") else "list"
    if verb == "list":
        reference, rest = worded(given, "LANE")
        _list(load(reference), rest[0] if rest else None, env, key, by, limit, as_json)
        return
    if env and len(env) > 1:
        raise UsageError("gates are changed in one environment at a time", hint=f"--env {env[0]}")
    reference, rest = worded(given, *(["LANE"] if verb == "set" else ["LANE", "KEY"]), more=verb == "set")
    mill = load(reference)
    lane = one_lane(mill, rest.pop(0) if rest else None)
    if (
        rest
        and key is None
        and not (verb == "set" and rest[0].partition("=")[0] in (*SETTABLE, "limit") and "=" in rest[0])
    ):
        key = rest.pop(0)
    environment = one_environment(mill, env[0] if env else None, lane)
    if verb == "set":
        _set(mill, environment, lane, key, by, _values(rest), as_json)
    else:
        _reset(mill, environment, lane, key, by, yes, as_json)


def _list(
    mill: Mill, lane: str | None, env: list[str] | None, key: str | None, by: str | None, limit: int, as_json: bool
) -> None:
    lanes, several = [lane] if lane else None, asked(mill, env)
    document = ask(mill, lambda directory: questions.gates(directory, lane, key, by, limit), env, lanes)
    parts: list[RenderableType] = [show.pause_line(pause, several) for pause in document["paused"]]
    for gate in document["gates"]:
        parts += [_heading(gate, several), *([_keys_table(gate["keys"])] if gate["keys"] else [])]
        if gate["more"]:
            parts.append(Text(f"the first {counted(limit, 'key')}; --limit shows more, --key shows one", "dim"))
    for shared in document["shared"]:
        rate = f"{shared['limit']} starts per {documents.per(shared['per_seconds'])} in all environments"
        now = f"{shared['used']:g} count now" if shared["error"] is None else f"not known: {shared['error']}"
        parts.append(plain(f"{shared['lane']}: shared rate of {rate}, held in {shared['shared']}; {now}"))
    for budget in document["budgets"]:
        where = f" in {budget['environment'] or 'all environments'}" if several > 1 else ""
        parts.append(plain(f"budget {budget['budget']}{where}: {budget['cells'] or 'unused'}"))
    none = "No gates." if not document["errors"] else None
    answer(document, Group(*parts) if parts else none, as_json=as_json)


def _set(
    mill: Mill, environment: str, lane: str, key: str | None, by: str | None, given: Mapping[str, str], as_json: bool
) -> None:
    changes = _written(given)
    try:
        document = _act(mill, environment, lane, lambda target: actions.set_gate(target, changes, key=key, by=by))
    except actions.WrongGate as error:  # what does not go with this gate is the command's mistake
        raise UsageError(error.message, hint=error.hint) from None
    answer(document, Group(_heading(document, len(mill.environments)), _keys_table([document])), as_json=as_json)


def _reset(mill: Mill, environment: str, lane: str, key: str | None, by: str | None, yes: bool, as_json: bool) -> None:
    async def work(target: ActionTarget) -> dict[str, Any]:
        if key is None and not yes and (many := await actions.resettable(target, by=by)):
            what = f"reset {counted(many, 'gate')} of lane {lane!r} in {environment!r}"
            consent(what, "--yes, or reset one key: gates reset APP LANE KEY")
        return await actions.reset_gates(target, key=key, by=by)

    document = _act(mill, environment, lane, work)
    number, nothing = document["count"], key is not None and not document["count"]
    if nothing and not as_json:
        name = f"{document['by']} {document['key']}"
        why = f"{name} has no state" if document["known"] else f"no row has {name}"
        raise NothingMatched(f"nothing to reset: {why}", hint=f"rowmill gates {lane} lists the keys that have one")
    reset = f"{counted(number, 'gate')} reset" if number else "Nothing to reset: no gate has any state."
    answer(document, reset, as_json=as_json, nothing=nothing)


def _values(words: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        name = "most" if name == "limit" else name
        if not sign:
            raise UsageError(f"{word!r} is not name=value", hint=f"gates set {_SET}")
        if name not in SETTABLE:
            raise UsageError(f"{name!r} cannot be set", hint=did_you_mean(name, SETTABLE))
        values[name] = value.strip()
    if not values:
        raise UsageError("nothing to set", hint=f"gates set {_SET}; names: {', '.join(SETTABLE)}")
    return values


def _written(given: Mapping[str, str]) -> dict[str, Any]:
    """The given settings as values; times as seconds from now."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        none = text.lower() == "no"
        match name:
            case "most":
                values[name] = None if none else _whole(name, text)
            case "streak":
                values[name] = _whole(name, text)
            case "tokens":
                try:
                    amount = float(text)
                except ValueError:
                    amount = -1.0
                if not 0 <= amount < math.inf:
                    raise UsageError(f"tokens={text!r} is not a number", hint="tokens=10")
                values[name] = amount
            case _:
                values[name] = None if none else duration(text, name, bare=True).total_seconds()
    return values


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST:
        raise UsageError(f"{name}={text!r} is not a whole number", hint=f"{name}=3")
    return int(text)


# -- how gates are shown


def _heading(gate: dict[str, Any], several: int) -> Text:
    """The declared gates in one line."""
    where = f"{gate['environment']}/" if several > 1 else ""
    of = f" by {gate['label']}" if gate["by"] is not None else ""
    return plain(f"{where}{gate['lane']}{of}: {'; '.join(gate['declared'])}")


def _keys_table(keys: Sequence[dict[str, Any]]) -> Table:
    """The keys of one group; empty columns are left out."""
    cells: dict[str, list[Text]] = {}
    for key in keys:
        most = f"/{key['most']}" if key["most"] is not None else ""
        for heading, cell in (
            ("Key", plain(key["key"] if key["key"] is not None else "(the whole lane)")),
            ("Running", Text("" if key["running"] is None else f"{key['running']}{most}")),
            ("Tokens", Text("" if key["tokens"] is None else f"{math.floor(key['tokens'] * 100) / 100:g}")),
            ("Streak", Text(str(key["streak"] or ""))),
            ("Delay", Text("" if key["delay_seconds"] is None else f"{key['delay_seconds']:.3g} s")),
            ("State", _state(key)),
        ):
            cells.setdefault(heading, []).append(cell)
    shown = {heading: column for heading, column in cells.items() if any(column) or heading == "State"}
    made = show.table(*shown, right=["Running", "Tokens", "Streak", "Delay"])
    made.columns[0].no_wrap, made.columns[0].overflow = False, "fold"
    for row in zip(*shown.values(), strict=True):
        made.add_row(*row)
    return made


def _state(key: dict[str, Any]) -> Text:
    """What holds a key back, in a few words."""
    parts = [plain(_held(key, held["by"], held["seconds"])) for held in key["held_back"]]
    for part in parts:
        part.stylize("yellow")
    parts += [Text("half open", "yellow")] if key["half_open"] else []
    parts += [Text("limit set by hand")] if key["most_by_hand"] else []
    return Text(", ").join(parts) if parts else Text("free", "dim")


def _held(key: dict[str, Any], why: str, seconds: float | None) -> str:
    more = f" for {show.span(seconds)}" if seconds is not None else ""
    match why:
        case "paused":
            return f"paused{more}" + (f": {key['reason']}" if key["reason"] else "")
        case "closed":
            return f"closed by Retry-After{more}"
        case "breaker":
            return f"circuit open{more}"
        case "breaker's probe":
            return "circuit half open, probe running"
        case "concurrency":
            return "full"
        case "rate":
            return f"next token in {seconds:.3g} s" if more else "rate is 0"
        case _:
            return f"{why}{more}"
