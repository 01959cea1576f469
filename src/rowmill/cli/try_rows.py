"""``rowmill try`` and ``rowmill rehearse``: a handler on one row, and a new version on a sample of rows."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..config import find_app
from ..events import configure_logs
from ..ops import try_rows
from ..plural import counted
from .app import NothingMatched, answer, app, ask, errors, plain, print_json, print_out
from .options import AsJson, OneEnvironment, load, one_environment, one_lane, one_row, worded

#: The exit code of a run that failed.
RUN_FAILED = 3
#: Characters of a value, on a terminal.
_VALUE, _ROWS = 200, 10
_COLOURS = {
    "done": "green",
    "retry": "yellow",
    "snooze": "cyan",
    "wait": "cyan",
    "stale": "yellow",
    "joining": "cyan",
    "release": "cyan",
}
_TIMEOUT = typer.Option("--timeout", min=0.001, help="seconds that the handler may take (default: no limit)")


@app.command("try")
def try_command(
    words: Annotated[
        list[str], typer.Argument(metavar="[APP] LANE ID", help="the lane and the id of the row; a composite key: a,b")
    ],
    commit: Annotated[bool, typer.Option("--commit", help="claim the row and write the outcome")] = False,
    timeout: Annotated[float | None, _TIMEOUT] = None,
    env: OneEnvironment = None,
    as_json: AsJson = False,
) -> None:
    """Run the handler on one row in the foreground, and show what would be written.

    Does not claim the row and does not change it, whatever its state. job.finish() is rolled back, and job.progress,
    spend, step, spawn and enqueue write nothing. What the handler does by itself really happens: HTTP calls, files, its
    own transactions. breakpoint() works, and there is no timeout.

    With --commit it claims the row, renews the lease, and writes the outcome if the claim still holds. The row must be
    ready or waiting. Gates and pauses do not hold it back.

    Exit codes: 0 the run ended well; 3 it failed; 4 no row has this id; 1 it could not run.

    Example: `rowmill try app:mill fetch 7`
    """
    mill, name, environment, id, _ = one_row(words, env, "try")
    limit = timedelta(seconds=timeout) if timeout is not None else None
    with _foreground(as_json):
        document = ask(
            mill, lambda d: try_rows.try_row(d, environment, name, id, commit=commit, timeout=limit),
            [environment], [name],
        )  # fmt: skip
    answer(document, _tried(document), as_json=as_json)
    if document["outcome"] in try_rows.FAILED:
        raise typer.Exit(RUN_FAILED)


@contextlib.contextmanager
def _foreground(as_json: bool) -> Iterator[None]:
    """Logs go to standard error. With JSON, so does what the handler prints: the document stays readable."""
    configure_logs("console", logging.INFO)
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield
    except try_rows.RowNotFound as error:
        raise NothingMatched(error.message, hint=error.hint) from None


def _text(value: Any) -> Text:
    text = "NULL" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return plain(text if len(text) <= _VALUE else text[:_VALUE] + "…")


def _tried(document: dict[str, Any]) -> RenderableType:
    outcome = document["outcome"]
    head = plain(f"{document['lane']} {document['id']}: ")
    head.append(outcome, f"bold {_COLOURS.get(outcome, 'red')}").append(f" in {_span(document['seconds'])}")
    if document["delay_seconds"] is not None:
        head.append(f", runs again after {_span(document['delay_seconds'])}")
    parts: list[RenderableType] = [head]
    if document["traceback"]:
        parts.append(Text(document["traceback"].rstrip(), "dim"))
    elif document["error"]:
        parts.append(plain(document["error"]))
    if document["deleted"]:
        parts.append(Text("The row is deleted."))
    elif document["columns"]:
        table = Table("column", "before", "after", box=None, pad_edge=False, header_style="bold")
        for change in document["columns"]:
            table.add_row(plain(change["column"]), _text(change["before"]), _text(change["after"]))
        parts.append(table)
    parts += [plain(f"enqueues {call['task']} {_text(call['args'])}") for call in document["enqueued"]]
    verdict = "Written." if document["committed"] else "Dry run: nothing was claimed or written. --commit writes it."
    if document["committed"] and outcome in ("lost", "stuck"):
        verdict = "Not written: the claim was lost." if outcome == "lost" else "Not written: the database refused it."
    parts.append(Text(verdict, "bold"))
    return Group(*parts)


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
    )


@app.command("rehearse")
def rehearse_command(
    words: Annotated[list[str], typer.Argument(metavar="[APP] LANE", help="the lane")],
    rows: Annotated[int, typer.Option("--rows", min=1, max=1000, help="how many rows")] = 50,
    against: Annotated[
        str | None, typer.Option("--against", metavar="OTHER_APP", help="the old version (default: the stored values)")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="which sample: the same seed draws the same rows")] = 1,
    timeout: Annotated[float | None, _TIMEOUT] = None,
    env: OneEnvironment = None,
    as_json: AsJson = False,
) -> None:
    """Run a new version of a handler on finished rows, and show what it would write differently.

    Takes a sample of the 2,000 newest done rows, by key, and runs each as `rowmill try` does. Nothing is written, but
    what the handler does by itself really happens. Compares the returned columns with the stored values, or with what
    the lane of the same name in OTHER_APP would write.

    Exit codes: 0 every run ended well, with or without differences; 3 a run of the new version failed; 4 no row is
    done.

    Example: `rowmill rehearse app:mill fetch --rows 50 --against old_app:mill`
    """
    reference, rest = worded(words, "LANE")
    mill = load(reference)
    name = one_lane(mill, rest[0] if rest else None)
    environment = one_environment(mill, env, name)
    other = find_app(against) if against is not None else None
    if other is not None:
        other.select([name])
    limit = timedelta(seconds=timeout) if timeout is not None else None
    spinner = contextlib.nullcontext() if as_json else errors.status(f"{name}: up to {counted(rows, 'row')}")
    with _foreground(as_json), spinner:
        document = ask(
            mill,
            lambda d: try_rows.rehearse(d, environment, name, rows, seed=seed, against=other, timeout=limit),
            [environment], [name],
        )  # fmt: skip
    if as_json:
        print_json(document)
    elif document["count"]:
        print_out(_rehearsed(document))
    if not document["count"]:
        raise NothingMatched(f"lane {name!r}: no row is done", hint="rowmill try runs the handler on any row")
    if document["new"]["failed"]:
        raise typer.Exit(RUN_FAILED)


def _rehearsed(document: dict[str, Any]) -> RenderableType:
    head = plain(f"{document['lane']}: {counted(document['count'], 'row')}, ")
    head.append(f"{document['same']} the same", "green").append(", ")
    head.append(f"{document['different']} different", "yellow" if document["different"] else "green")
    sides = Table("", "failed", "p50", "p95", box=None, pad_edge=False, header_style="bold")
    for side in ("old", "new"):
        if (numbers := document[side]) is not None:
            sides.add_row(side, str(numbers["failed"]), _span(numbers["p50_seconds"]), _span(numbers["p95_seconds"]))
    parts: list[RenderableType] = [head, sides]
    if document["columns"]:
        names = ", ".join(f"{column} ({number})" for column, number in document["columns"].items())
        parts.append(plain(f"columns that differ: {names}"))
    different = [row for row in document["rows"] if not row["same"]]
    for row in different[:_ROWS]:
        parts += _difference(row)
    if len(different) > _ROWS:
        parts.append(Text(f"and {len(different) - _ROWS} more: --json lists them all", "dim"))
    parts.append(Text("Nothing was written.", "bold"))
    return Group(*parts)


def _difference(row: dict[str, Any]) -> list[RenderableType]:
    old = row["old"]["outcome"] if row["old"] is not None else "done"
    line = Text("\n").append_text(plain(row["id"])).append(": ")
    line.append(old if old == row["new"]["outcome"] else f"{old} -> {row['new']['outcome']}", "bold")
    parts: list[RenderableType] = [line]
    failed = [side for side in ("old", "new") if row[side] is not None and row[side]["error"]]
    parts += [plain(f"  {side}: {row[side]['error']}") for side in failed]
    for change in row["columns"]:
        parts.append(Text("  ").append_text(plain(change["column"])))
        parts.append(Text("  - ", "red").append_text(_text(change["old"])))
        parts.append(Text("  + ", "green").append_text(_text(change["new"])))
    return parts
