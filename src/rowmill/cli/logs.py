"""``rowmill logs``: what the last runs of a row logged."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..ops import questions
from ..ops.directory import NotFound
from ..plural import counted
from . import show
from .app import NothingMatched, answer, app, ask, for_app, plain
from .options import AsJson, OneEnvironment, one_row

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}
_ENDS = {"done": "green", "retry": "yellow", "dead": "red", "lost": "red"}


@app.command()
def logs(
    words: Annotated[
        list[str], typer.Argument(metavar="[APP] LANE ID", help="the lane and the id of the row; a composite key: a,b")
    ],
    env: OneEnvironment = None,
    run: Annotated[int | None, typer.Option("--run", min=1, help="only this run, counted back: 1 is the last")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the last runs of a row logged, newest first.

    A mill with only one lane needs no LANE. Exit code 4: no row has this id, or nothing is kept of its runs.

    Example: `rowmill logs app:mill fetch 7`
    """
    mill, name, environment, id, reference = one_row(words, env, "logs")
    try:
        document = ask(mill, lambda directory: questions.logs(directory, environment, name, id, run))
    except NotFound as error:
        raise NothingMatched(error.message, hint="rowmill jobs lists rows with their ids") from None
    answer(document, _shown(document, reference), as_json=as_json, nothing=not document["runs"])


def _shown(document: dict[str, Any], reference: str | None) -> RenderableType:
    if not document["kept"]:
        hint = f"keep_logs=timedelta(days=7) on the lane, and {for_app('rowmill migrate APP --apply', reference)}"
        return plain(f"Logs of runs are not kept here. Try: {hint}")
    if not document["runs"]:
        return plain("Nothing is kept: no run has logged anything with job.log, or it was too long ago.")
    return Group(*(part for run in document["runs"] for part in _run(run, document["id"])))


def _run(run: dict[str, Any], row: str) -> list[RenderableType]:
    head = Text(f"{run['run']}. {show.span(show.ago(run['at']))} ago, attempt {run['attempt']}: ", "bold")
    head.append(run["outcome"], _ENDS.get(run["outcome"], ""))
    parts: list[RenderableType] = [head.append_text(plain(f" ({run['worker']})"))]
    if run["dropped"]:
        parts.append(Text(f"   {counted(run['dropped'], 'earlier line')} did not fit", "dim"))
    for line in run["lines"]:
        about = f"row {line['id']}: " if line["id"] not in (None, row) else ""
        at = line["at"].partition("T")[2][:12]
        text = Text(f"   {at} ").append(f"{line['level']:<8}", _COLOURS.get(line["level"], ""))
        first, *rest = line["text"].split("\n")
        parts.append(text.append_text(plain(about + first)))
        parts += [Text("   ").append_text(plain(part)) for part in rest]
    return parts
