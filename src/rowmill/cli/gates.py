"""``rowmill gates``: how every gate stands; ``gates set`` and ``gates reset``, to change it by hand."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import DatabaseError, DeclarationError, RowmillError, did_you_mean
from ..mill import Mill
from ..plural import counted
from ..store.gates.gate_binding import BoundGates
from ..store.gates.pauses import Pause, ensure_gates
from ..store.inspect import json_values
from ..store.inspect.gate_view import SETTABLE, KeyView, LaneGates, has_table, lane_gates
from ..store.inspect.lane_view import LaneView
from . import show, show_gates
from .app import NOTHING_MATCHED, AsJson, NothingMatched, UsageError, app, load, print_json, print_out, run_async, said
from .durations import duration
from .environments import CommandAnswers, CommandDirectory, one_environment, one_lane, worded

_SET, _RESET = "[APP] LANE [KEY] name=value ...", "[APP] LANE [KEY]"
_LARGEST = 2**31 - 1

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[APP] [LANE] | set [APP] LANE [KEY] NAME=VALUE... | reset [APP] LANE [KEY]", show_default=False
    ),
]


@app.command()
def gates(
    words: Words = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="only this environment (may be given again)", callback=said)
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="only this key, however it stands")] = None,
    by: Annotated[str | None, typer.Option("--by", help="what the key is of, where gates have several")] = None,
    limit: Annotated[int, typer.Option(min=1, help="keys of each gate")] = 20,
    yes: Annotated[bool, typer.Option("--yes", help="reset all keys without asking")] = False,
    as_json: AsJson = False,
) -> None:
    """The state of gates by key, those that hold rows back first; and to change it by hand.

    `gates set APP LANE KEY NAME=VALUE ...`: *most* (another limit for this key, or no), *tokens*, *streak*,
    *delay* (of an adaptive rate), *open* and *closed* (for a duration, or no). Without KEY: the whole lane's gate.

    `gates reset APP LANE [KEY]`: as fresh as at the beginning; pauses stay. Without KEY: all keys.
    """
    given = list(words or ())
    verb = given.pop(0) if given and given[0] in ("set", "reset") else "list"
    if verb == "list":
        reference, rest = worded(given, "LANE")
        _list(load(reference), rest[0] if rest else None, env, key, by, limit, as_json)
        return
    if env and len(env) > 1:
        raise UsageError("one environment at a time", hint=f"--env {env[0]}")
    reference, rest = worded(given, *(["LANE"] if verb == "set" else ["LANE", "KEY"]), more=verb == "set")
    mill = load(reference)
    lane = one_lane(mill, rest.pop(0) if rest else None)
    if rest and key is None and not (verb == "set" and rest[0].partition("=")[0] in SETTABLE and "=" in rest[0]):
        key = rest.pop(0)
    place = one_environment(mill, env[0] if env else None, lane)
    if verb == "set":
        run_async(_set(mill, place, lane, key, by, _values(rest), as_json))
    else:
        run_async(_reset(mill, place, lane, key, by, yes, as_json))


# -- list


def _list(
    mill: Mill, lane: str | None, env: list[str] | None, key: str | None, by: str | None, limit: int, as_json: bool
) -> None:
    async def question(view: LaneView) -> list[tuple[BoundGates, list[KeyView]]]:
        narrowed = by is not None or key is not None
        if not view.lane.groups or (lane is None and narrowed and not any(g.by for g in view.lane.groups)):
            return []
        found = await lane_gates(view)
        dims = found.dims
        if narrowed:
            chosen = found.choose(by, keyed=True)
            dims = tuple(dim for dim in dims if dim.phrase is not None and dim.group.by == chosen.group.by)
        if not await has_table(view):
            return [(dim, []) for dim in dims]
        asked = key if key is None else (await found.known(dims[0], key))[0]
        return [(dim, await found.keys(dim, limit + 1, asked if dim.phrase else None)) for dim in dims]

    async def main() -> tuple[
        CommandAnswers[list[tuple[BoundGates, list[KeyView]]]],
        list[tuple[str, Pause]],
        list[tuple[str, str, str | None]],
        int,
    ]:
        async with CommandDirectory(mill, env, [lane] if lane else None) as lookout:
            answers, budgets = await lookout.ask(question), []
            # Those of keys are told with the keys.
            pauses = [(name, pause) for name, pause in await lookout.pauses() if not pause.target.dim]
            for name in dict.fromkeys(view.environment for view, _ in answers.found):
                view = next(view for view, _ in answers.found if view.environment == name)
                if lane is None and await has_table(view):
                    budgets += [(name, *budget) for budget in await (await lane_gates(view)).budgets()]
            return answers, pauses, budgets, len(lookout.databases)

    answers, pauses, budgets, several = run_async(main())
    found = [(view, dim, keys) for view, dims in answers.found for dim, keys in dims]
    if as_json:
        listed = [json_values.gate_value(view, dim, keys[:limit]) for view, dim, keys in found]
        shown = [{"environment": e, "budget": dim.removeprefix("budget:"), "cells": cells} for e, dim, cells in budgets]
        paused = [json_values.pause_value(pause, name) for name, pause in pauses]
        failed = [failure.value() for failure in answers.failures]
        print_json({"gates": listed, "paused": paused, "budgets": shown, "errors": failed})
        answers.exit()
        return
    parts: list[RenderableType] = [show.pause_line(pause, name, several) for name, pause in pauses]
    for view, dim, keys in found:
        parts += [show_gates.heading(view, dim, several), *([show_gates.keys_table(keys[:limit])] if keys else [])]
        if len(keys) > limit:
            parts.append(Text(f"and more: --limit, or one with --key (these are the first {limit})", "dim"))
    parts += [
        show.plain(f"{dim.replace(':', ' ', 1)}{f' in {e}' if several > 1 else ''}: {cells or 'unused'}")
        for e, dim, cells in budgets
    ]
    if parts:
        print_out(Group(*parts))
    elif answers.found:
        print_out("No gates.")
    answers.end()


# -- set and reset


def _values(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise UsageError(f"{word!r} is not name=value", hint=f"gates set {_SET}")
        if name not in SETTABLE:
            raise UsageError(f"there is no {name!r} to set", hint=did_you_mean(name, SETTABLE))
        found[name] = value.strip()
    if not found:
        raise UsageError("nothing to set", hint=f"gates set {_SET}; names: {', '.join(SETTABLE)}")
    return found


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST:
        raise UsageError(f"{name}={text!r} is not a whole number", hint=f"{name}=3")
    return int(text)


def _written(given: Mapping[str, str]) -> dict[str, Any]:
    """What was given, as values; times as seconds from now."""
    found: dict[str, Any] = {}
    for name, text in given.items():
        none = text.lower() == "no"
        match name:
            case "most":
                found[name] = None if none else _whole(name, text)
            case "streak":
                found[name] = _whole(name, text)
            case "tokens":
                try:
                    amount = float(text)
                except ValueError:
                    amount = -1.0
                if not 0 <= amount < math.inf:
                    raise UsageError(f"tokens={text!r} is not a number", hint="tokens=10")
                found[name] = amount
            case _:
                found[name] = None if none else duration(text, name, bare=True).total_seconds()
    return found


async def _set(
    mill: Mill, environment: str, lane: str, key: str | None, by: str | None, given: Mapping[str, str], as_json: bool
) -> None:
    async with CommandDirectory(mill, [environment], [lane]) as lookout:
        found = await _gates(lookout, environment)
        dim = found.choose(by, keyed=key is not None, needs=[kind for name in given if (kind := SETTABLE[name])])
        try:
            written = found.change(dim, _written(given))
        except DeclarationError as error:  # what does not go with this gate is the command's mistake
            raise UsageError(error.message, hint=error.hint) from None
        known = (await found.known(dim, key))[0] if key is not None else ""
        await ensure_gates(found.view.database)
        await found.write(dim, known, written)
        (after,) = await found.keys(dim, 1, known)
        await _wake(mill, environment)
    if as_json:
        print_json(
            {
                "action": "set",
                "environment": environment,
                "lane": lane,
                "by": dim.group.by,
                **json_values.key_value(after),
            }
        )
    else:
        print_out(Group(show_gates.heading(found.view, dim, len(mill.environments)), show_gates.keys_table([after])))


async def _reset(
    mill: Mill, environment: str, lane: str, key: str | None, by: str | None, yes: bool, as_json: bool
) -> None:
    async with CommandDirectory(mill, [environment], [lane]) as lookout:
        found = await _gates(lookout, environment)
        known, exists = None, True
        dims: Sequence[BoundGates] = found.dims
        if key is not None:
            chosen = found.choose(by, keyed=True)
            known, exists = await found.known(chosen, key)
            dims = [dim for dim in dims if dim.phrase is not None and dim.group.by == chosen.group.by]
        elif by is not None:
            chosen = found.choose(by, keyed=True)
            dims = [dim for dim in dims if dim.group.by == chosen.group.by]
        await ensure_gates(found.view.database)
        if key is None and not yes:
            _consent(await found.count(dims), lane, environment)
        number = await found.reset(dims, known)
        await _wake(mill, environment)
    if as_json:
        where = {"action": "reset", "environment": environment, "lane": lane, "key": known}
        print_json({**where, "count": number})
        if known is not None and not number:
            raise typer.Exit(NOTHING_MATCHED)
    elif known is not None and not number:
        by = chosen.group.by
        why = f"{by} {known} has no state" if exists else f"no row has {by} {known}"
        raise NothingMatched(f"nothing to reset: {why}", hint=f"rowmill gates {lane} lists the keys that have one")
    else:
        print_out(f"{counted(number, 'gate')} reset" if number else "No gate had a state.")


def _consent(number: int, lane: str, environment: str) -> None:
    """All keys at once are not reset by a slip of the hand."""
    if not number:
        return
    what = f"reset {counted(number, 'gate')} of lane {lane!r} in {environment!r}"
    if not sys.stdin.isatty():
        raise RowmillError(f"this would {what}", hint="--yes, or one key: gates reset APP LANE KEY")
    if not typer.confirm(f"This will {what}. Go on?", err=True):
        raise typer.Exit(1)


async def _gates(lookout: CommandDirectory, environment: str) -> LaneGates:
    view = await lookout.view(environment, lookout.databases[0][1], lookout.lanes[0])
    if not view.lane.groups:
        raise RowmillError(
            f"lane {view.lane.name!r} has no gates", hint="gates=[Concurrency(2, by=...)] in its declaration"
        )
    return await lane_gates(view)


async def _wake(mill: Mill, environment: str) -> None:
    with contextlib.suppress(DatabaseError):  # workers poll as well
        await mill.wake(environment)
