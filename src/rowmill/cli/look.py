"""Commands that look: status, workers, stuck, jobs, health. They write nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import datetime
from typing import Annotated, Any, Literal

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..ops import questions
from ..ops.directory import LaneDirectory
from ..plural import counted
from . import show
from .app import (
    UsageError,
    answer,
    app,
    ask,
    console,
    failure_line,
    for_app,
    labelled,
    plain,
    print_json,
    print_out,
)
from .options import App, AsJson, Env, OneLane, SomeLanes, asked, load, one_lane, one_of

EVERY = 2.0
MOST_PAUSES = 10
State = Literal["ready", "waiting", "excluded", "running", "stuck", "done", "dead", "canceled"]


@app.command()
def status(
    reference: App = None,
    env: Env = None,
    lane: SomeLanes = None,
    watch: Annotated[bool, typer.Option("--watch", help="refresh every 2 seconds, until Ctrl-C")] = False,
    as_json: AsJson = False,
) -> None:
    """Count the rows of every lane by state, and show how long the oldest ready row has waited.

    *Waiting* rows are scheduled for later. *Excluded* rows do not meet the lane's where=. *Stuck* rows are running, but
    sent no heartbeat for longer than the lease; *Running* counts them, too. *Oldest* counts from a row's run_after, or
    from its creation if that is later. Counts stop at 100,000.

    Example: `rowmill status app:mill --lane fetch`
    """
    if watch and as_json:
        raise UsageError("--watch and --json cannot be used together", hint="use one of them")
    mill = load(reference)
    several = asked(mill, env)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            ask(mill, lambda directory: _watch(directory, several), env, lane)
        return
    document = ask(mill, questions.status, env, lane)
    if as_json:
        print_json(document)
    else:
        print_out(_status(document, several))
    if document["errors"]:
        raise typer.Exit(1)


async def _watch(directory: LaneDirectory, several: int) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            document = await questions.status(directory)
            clock = Text(f"{datetime.now():%H:%M:%S}, every {EVERY:.0f} s; Ctrl-C quits", "dim")
            live.update(Group(_status(document, several), clock), refresh=True)
            # Where counting is expensive, it must not become the database's main work.
            await asyncio.sleep(max(EVERY, 3 * (time.monotonic() - began)))


def _status(document: dict[str, Any], environments: int) -> RenderableType:
    lanes, pauses = document["lanes"], document["paused"]
    parts: list[RenderableType] = [show.counts_table(lanes, environments)] if lanes else []
    parts += [show.pause_line(pause, environments) for pause in pauses[:MOST_PAUSES]]
    if len(pauses) > MOST_PAUSES:
        parts.append(Text(f"and {len(pauses) - MOST_PAUSES} more are paused: rowmill gates", "yellow"))
    parts += [show.elsewhere_line(rows, environments) for rows in document["elsewhere"]]
    parts += [failure_line(failure) for failure in document["errors"]]
    if any(lane["counts"]["stuck"] for lane in lanes):
        parts.append(Text("Stuck rows are counted among the running ones; rowmill stuck lists them.", "dim"))
    if any(lane["unknown"] for lane in lanes):
        parts.append(Text("?: counting took too long; an index on the state would make it quick", "yellow"))
    return Group(*parts)


@app.command()
def workers(
    reference: App = None,
    env: Env = None,
    everyone: Annotated[bool, typer.Option("--all", help="include stopped workers")] = False,
    as_json: AsJson = False,
) -> None:
    """List the workers: what each runs, and when it was last seen.

    A worker counts as dead when its process is gone, or when it has not been seen for a minute.

    Example: `rowmill workers app:mill --all`
    """
    mill = load(reference)
    document = ask(mill, lambda directory: questions.workers(directory, everyone=everyone), env)
    none = "No workers." if everyone else "No live workers (--all includes stopped ones)."
    listed = document["workers"]
    answer(document, show.workers_table(listed, asked(mill, env)) if listed else none, as_json=as_json)


@app.command()
def stuck(
    reference: App = None,
    env: Env = None,
    lane: SomeLanes = None,
    limit: Annotated[int, typer.Option(min=1, help="rows per lane")] = 100,
    as_json: AsJson = False,
) -> None:
    """List running rows whose worker sent no heartbeat for longer than the lease, or never sent one.

    Workers take such rows back by themselves; `rowmill release --stuck` does it now.

    Example: `rowmill stuck app:mill --lane fetch`
    """
    mill = load(reference)
    document = ask(mill, lambda directory: questions.stuck(directory, limit), env, lane)
    rows = document["rows"]
    of_dead_workers = document["held_by_dead"]
    none = _none(document, "Nothing is stuck yet." if of_dead_workers else "Nothing is stuck.")
    parts: list[RenderableType] = [show.stuck_table(rows, asked(mill, env))] if rows else [none] if none else []
    parts += show.stuck_notes(rows, reference)
    parts += [show.held_by_dead_line(entry, asked(mill, env), reference) for entry in of_dead_workers]
    answer(document, Group(*parts) if parts else None, as_json=as_json)


@app.command()
def jobs(
    reference: App = None,
    env: Env = None,
    lane: OneLane = None,
    state: Annotated[
        State | None, typer.Option(metavar="STATE", help=f"only rows in this state: {one_of(State)}")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="rows per environment")] = 20,
    key: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="one row, with all its columns; a composite key: a,b")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the rows of a lane, or show one row with all its columns.

    Ready rows come in the order in which they will be claimed, others newest first: by their creation time, or else
    by their key. Without --state it lists rows of all states, newest first.

    Example: `rowmill jobs app:mill --lane fetch --state dead`
    """
    mill = load(reference)
    name = one_lane(mill, lane)
    document = ask(mill, lambda directory: questions.jobs(directory, state, limit, key), env, [name])
    shown: RenderableType | None
    if not document["rows"]:
        shown = _none(document, "No rows." if key is None else f"No row has the id {key}.")
    elif key is None:
        shown = show.rows_table(document["rows"], asked(mill, env))
        if document["more"]:
            note = Text(f"These are the first {counted(limit, 'row')}: --limit {10 * limit} shows more.", "dim")
            shown = Group(shown, note)
    else:
        shown = Group(*(show.whole_table(row) for row in document["rows"]))
    answer(document, shown, as_json=as_json, nothing=key is not None and not document["rows"])


def _none(document: dict[str, Any], text: str) -> Text | None:
    """A text for an empty answer; None if the question failed."""
    return plain(text) if not document["errors"] else None


@app.command()
def health(reference: App = None, env: Env = None, lane: SomeLanes = None, as_json: AsJson = False) -> None:
    """Show what slows the queues down, worst first, and what to do about it.

    Example: `rowmill health app:mill`
    """
    document = ask(load(reference), questions.health, env, lane)
    several = len(document["environments"]) > 1
    parts: list[RenderableType] = []
    for part in document["environments"]:
        findings = part["findings"]
        where = f"{part['environment']}: " if several else ""
        parts += [_finding(finding, where, reference) for finding in findings if finding["level"] != "ok"]
        parts.append(plain(f"{where}{counted(sum(f['level'] == 'ok' for f in findings), 'check')} found no problem"))
    answer(document, Group(*parts), as_json=as_json)


def _finding(finding: dict[str, Any], where: str, reference: str | None) -> RenderableType:
    word, colour = {"bad": ("critical", "red"), "look": ("warning", "yellow")}.get(finding["level"], ("unknown", ""))
    about = f" ({finding['lane']})" if finding["lane"] else ""
    text = plain(f"{finding['title']}{about}: {finding['told']}")
    if finding["todo"]:
        text.append("\nTry: ", "bold").append_text(plain(for_app(finding["todo"], reference)))
    if finding["command"]:
        text.append("\n").append_text(plain(for_app(finding["command"], reference)))
    return labelled(Text(where).append(f"{word}: ", colour), text)
