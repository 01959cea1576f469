"""``rowmill why``: what holds one row back, since when, and when it should run."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..declare.lane import Lane
from ..mill import Mill
from ..ops import questions
from ..store.inspect import json_values, why_rules
from ..store.inspect.why_rules import Reason, WhyAnswer
from . import show
from .app import NOTHING_MATCHED, AsJson, UsageError, app, load, print_json, print_out, run_async, said
from .environments import one_environment, one_lane, worded

_ENDED = ("done", "dead", "canceled", "untouched_for", "no_worker")
_COLOURS = {"running": "blue", "done": "green", "ready": "cyan", "held": "yellow",
            "excluded": "yellow"}  # fmt: skip
_HEADS = {"none": "there is no such row", "held": "held back", "elsewhere": "in no state of this lane",
          "exhausted": "its attempts are used up"}  # fmt: skip


@app.command()
def why(
    words: Annotated[list[str], typer.Argument(metavar="[APP] LANE ID", help="a row, by its id; a composite key: a,b")],
    env: Annotated[
        str | None, typer.Option("--env", help="the environment; needed where there are several", callback=said)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Why a row is not running: every reason there is, the decisive one first; and when it should run.

    Exit code 4: there is no such row.
    """
    reference, rest = worded(words, "LANE", "ID")
    if not rest:
        raise UsageError("which row?", hint="why [APP] LANE ID")
    mill = load(reference)
    name = one_lane(mill, rest[0] if len(rest) > 1 else None)
    environment = one_environment(mill, env, name)
    answer = run_async(_ask(mill, environment, mill.lanes[name], rest[-1]))
    if as_json:
        print_json(json_values.why_value(answer, environment, name, rest[-1]))
    else:
        print_out(_shown(answer, environment, name, rest[-1], len(mill.environments)))
    if answer.state == "none":
        raise typer.Exit(NOTHING_MATCHED)


async def _ask(mill: Mill, environment: str, lane: Lane, text: str) -> WhyAnswer:
    names = list(mill.environments)
    databases = dict(mill.databases(names[: names.index(environment) + 1]))
    try:
        return await questions.why(mill, environment, lane, text, databases)
    finally:
        for database in databases.values():
            await database.close()


def _shown(answer: WhyAnswer, environment: str, lane: str, key: str, environments: int) -> RenderableType:
    where = f" in {environment}" if environments > 1 else ""
    head = show.plain(f"{lane} {key}{where}: ")
    head.append(_HEADS.get(answer.state, answer.state), f"bold {_COLOURS.get(answer.state, 'red')}")
    parts: list[RenderableType] = [head]
    if answer.state != "none":
        parts += [_line(reason) for reason in answer.reasons]
    if answer.state in ("held", "excluded", "ready", "stuck") or (
        answer.state == "running" and answer.wait is not None
    ):
        parts.append(_when(answer))
    return Group(*parts)


def _line(reason: Reason) -> Text:
    line = Text("- ").append_text(show.plain(reason.text))
    told = []
    if reason.since is not None:
        told.append(
            f"for {why_rules.span(reason.since)}"
            if reason.code not in _ENDED
            else f"{why_rules.span(reason.since)} ago"
        )
    if reason.wait == math.inf and reason.code.endswith("paused"):
        told.append("until it is resumed")
    elif reason.wait is not None and 0 < reason.wait < math.inf and reason.code != "sweep":
        told.append(f"{why_rules.span(reason.wait)} more")
    return line.append(f" ({', '.join(told)})", "dim") if told else line


def _when(answer: WhyAnswer) -> Text:
    if answer.wait == math.inf:
        return Text("It will not run by itself.", "bold")
    if answer.wait is None:
        first = answer.reasons[0].code
        until = {"line": "when its turn comes", "above": "when what goes before it is done", "where": "once that holds",
                 "ready": "once that holds", "locked": "when that transaction ends",
                 "capacity": "when a slot is free"}.get(first, "when one of them ends")  # fmt: skip
        return Text(f"It should run {until}.", "bold")
    if answer.wait == 0:
        return Text("It should run at the next claim.", "bold")
    at = json_values.from_now(answer.wait).replace("T", " ").partition(".")[0]
    return Text(f"It should run in {why_rules.span(answer.wait)}, at {at} UTC.", "bold")
