"""``rowmill why``: what holds one row back, since when, and when it should run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..ops import questions
from ..ops.documents import span
from . import show
from .app import answer, app, ask, plain
from .options import AsJson, OneEnvironment, one_row

#: How a reason's start is told, where not as "for 5 min so far"; and reasons whose text already says when they end.
_SINCE = {"done": "{} ago", "dead": "{} ago", "canceled": "{} ago", "untouched_for": "changed {} ago",
          "no_worker": "last seen {} ago", "running": "started {} ago", "stuck": "claimed {} ago"}  # fmt: skip
_END_TOLD = ("sweep", "stuck", "run_after")
_COLOURS = {"running": "blue", "done": "green", "ready": "cyan", "held": "yellow",
            "excluded": "yellow"}  # fmt: skip
_HEADS = {"none": "no row has this id", "held": "held back", "elsewhere": "in none of this lane's states",
          "ignored": "in a state the lane ignores",
          "exhausted": "out of attempts"}  # fmt: skip


@app.command()
def why(
    words: Annotated[
        list[str], typer.Argument(metavar="[APP] LANE ID", help="the lane and the id of the row; a composite key: a,b")
    ],
    env: OneEnvironment = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a row is not running: every reason, the decisive one first, and when it should run.

    A mill with only one lane needs no LANE. Exit code 4: no row has this id.

    Example: `rowmill why app:mill fetch 7`
    """
    mill, name, environment, id, reference = one_row(words, env, "why")
    document = ask(mill, lambda directory: questions.why(directory, environment, name, id))
    shown = _shown(document, len(mill.environments), reference)
    answer(document, shown, as_json=as_json, nothing=document["state"] == "none")


def _shown(document: dict[str, Any], environments: int, reference: str | None) -> RenderableType:
    where, state = f" in {document['environment']}" if environments > 1 else "", document["state"]
    head = plain(f"{document['lane']} {document['id']}{where}: ")
    word = _HEADS.get(state, state)
    if state == "held" and document["reasons"][0]["code"] == "no_worker":
        word = "waiting for a worker"
    head.append(word, f"bold {_COLOURS.get(state, 'red')}")
    parts: list[RenderableType] = [head]
    if state != "none":
        parts += [_line(reason) for reason in document["reasons"]]
    if state in ("held", "excluded", "ready", "stuck", "elsewhere") or (
        state == "running" and document["by_itself"] is not None
    ):
        parts.append(_when(document))
    if command := _command(document, reference, environments):
        parts.append(Text("Try: ", "bold").append_text(plain(command)))
    return Group(*parts)


def _command(document: dict[str, Any], reference: str | None, environments: int) -> str | None:
    """What makes a row run that does not run by itself."""
    app, lane = f" {reference}" if reference else "", document["lane"]
    env = f" --env {document['environment']}" if environments > 1 else ""
    codes = {reason["code"] for reason in document["reasons"] if reason["seconds"] is None}
    if document["state"] in ("dead", "canceled", "exhausted"):
        return f"rowmill retry{app}{env} --lane {lane} --id {document['id']}"
    if document["state"] == "none":
        return f"rowmill jobs{app}{env} --lane {lane} lists rows with their ids"
    if document["state"] == "elsewhere":
        return "give the row the values of the lane's ready state, in SQL"
    if "environment_paused" in codes:
        return f"rowmill resume{app}{env}"
    if "lane_paused" in codes:
        return f"rowmill resume{app}{env} --lane {lane}"
    return f"rowmill run{app}{env} starts a worker" if "no_worker" in codes and not document["by_itself"] else None


def _line(reason: dict[str, Any]) -> Text:
    line, code, seconds = Text("- ").append_text(plain(reason["text"])), reason["code"], reason["seconds"]
    parts = []
    if (since := show.ago(reason["since"])) is not None:
        parts.append(_SINCE.get(code, "for {} so far").format(span(since)))
    if seconds is None and code.endswith("paused"):
        parts.append("until it is resumed")
    elif seconds and code not in _END_TOLD:
        parts.append(f"{span(seconds)} left")
    return line.append(f" ({', '.join(parts)})", "dim") if parts else line


def _when(document: dict[str, Any]) -> Text:
    seconds = document["runs_in_seconds"]
    if not document["by_itself"]:
        return Text("It will not run by itself.", "bold")
    if seconds is None:
        until = {"line": "when its turn comes", "above": "when the rows of higher priority are done",
                 "where": "once that condition is true", "ready": "once that condition is true",
                 "locked": "when that transaction ends", "capacity": "when a slot is free",
                 "stuck": "after the next sweep, which is due now"}  # fmt: skip
        return Text(
            f"It should run {until.get(document['reasons'][0]['code'], 'when one of those runs ends')}.", "bold"
        )
    if seconds == 0:
        return Text("It should run at the next claim.", "bold")
    at = document["runs_at"].replace("T", " ").partition(".")[0]
    latest = "at the latest " if any(reason["code"] == "sweep" for reason in document["reasons"]) else ""
    return Text(f"It should run in {span(seconds)}, {latest}at {at} UTC.", "bold")
