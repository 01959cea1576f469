"""Commands that look: status, workers, stuck, jobs. They write nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import RowmillError
from ..ops import questions
from ..store import Database
from ..store.gates.pauses import Pause
from ..store.inspect import json_values
from ..store.inspect.lane_view import Counts, LaneView, Row, UncountedRows
from ..store.lane.row_keys import parse
from . import show
from .app import NOTHING_MATCHED, App, AsJson, Env, app, console, lane_names, load, print_json, print_out, run_async
from .environments import CommandAnswers, CommandDirectory, PrintedFailure, one_lane

EVERY = 2.0
MOST_PAUSES = 10

OneLane = Annotated[
    str | None,
    typer.Option("--lane", help="the lane; may be left out where there is only one", autocompletion=lane_names),
]
SomeLanes = Annotated[
    list[str] | None, typer.Option("--lane", help="only this lane (may be given again)", autocompletion=lane_names)
]
State = Literal["ready", "waiting", "excluded", "running", "done", "dead", "canceled"]


@app.command()
def status(
    reference: App = None,
    env: Env = None,
    lane: SomeLanes = None,
    watch: Annotated[bool, typer.Option("--watch", help="refresh every 2 seconds, until Ctrl-C")] = False,
    as_json: AsJson = False,
) -> None:
    """Rows of every lane by state, and how long the oldest ready row has been ready.

    *waiting*: its time has not come. *excluded*: the lane's where= does not hold for it. *stuck* rows are among the
    running ones: no sign of life for longer than the lease. *Oldest*: since the row's run_after, or since its creation
    where that is later. Counts stop at 100,000.
    """
    if watch and as_json:
        raise typer.BadParameter("--watch is for people and --json for scripts: one of them")
    mill = load(reference)

    async def main() -> tuple[CommandAnswers[Counts], list[tuple[str, Pause]], list[UncountedRows]]:
        async with CommandDirectory(mill, env, lane) as lookout:
            several = len(lookout.databases)
            if watch:
                with Live(console=console, auto_refresh=False) as live:
                    while True:
                        began = time.monotonic()
                        answers = await lookout.ask(LaneView.count)
                        pauses, elsewhere = await lookout.pauses(), await lookout.elsewhere(answers)
                        live.update(_status(answers, pauses, elsewhere, several, live=True), refresh=True)
                        # Where counting is dear, looking on must not become the database's main work.
                        await asyncio.sleep(max(EVERY, 3 * (time.monotonic() - began)))
            answers = await lookout.ask(LaneView.count)
            pauses, elsewhere = await lookout.pauses(), await lookout.elsewhere(answers)
            if not as_json:
                print_out(_status(answers, pauses, elsewhere, several))
            return answers, pauses, elsewhere

    try:
        answers, pauses, elsewhere = run_async(main())
    except KeyboardInterrupt:
        if watch:
            return
        raise
    if as_json:
        marked = _paused(answers, pauses)
        lanes = [
            {**json_values.counts_value(view, counts), "paused": (view.environment, view.lane.name) in marked}
            for view, counts in answers.found
        ]
        paused = [json_values.pause_value(pause, name) for name, pause in pauses]
        rows = [json_values.elsewhere_value(found) for found in elsewhere]
        failed = [failure.value() for failure in answers.failures]
        print_json({"lanes": lanes, "paused": paused, "elsewhere": rows, "errors": failed})
    answers.exit()


def _paused(answers: CommandAnswers[Counts], pauses: Sequence[tuple[str, Pause]]) -> set[tuple[str, str]]:
    """Lanes of which nothing is claimed: paused themselves, or with their environment."""
    whole = {(name, pause.target.lane) for name, pause in pauses if not pause.target.dim}
    asked = {(view.environment, view.lane.name) for view, _ in answers.found}
    return {place for place in asked if place in whole or (place[0], "") in whole}


def _status(
    answers: CommandAnswers[Counts],
    pauses: Sequence[tuple[str, Pause]],
    elsewhere: Sequence[UncountedRows],
    environments: int,
    *,
    live: bool = False,
) -> RenderableType:
    marked = _paused(answers, pauses)
    parts: list[RenderableType] = [show.counts_table(answers.found, environments, marked)] if answers.found else []
    parts += [show.pause_line(pause, name, environments) for name, pause in pauses[:MOST_PAUSES]]
    if len(pauses) > MOST_PAUSES:
        parts.append(Text(f"and {len(pauses) - MOST_PAUSES} more are paused: rowmill gates", "yellow"))
    parts += [show.elsewhere_line(found, environments) for found in elsewhere]
    parts += [failure.line() for failure in answers.failures]
    if any(counts.unknown for _, counts in answers.found):
        parts.append(Text("?: counting took too long; an index on the state would make it quick", "yellow"))
    if live:
        parts.append(Text(f"{datetime.now():%H:%M:%S}, every {EVERY:.0f} s; Ctrl-C ends", "dim"))
    return Group(*parts)


@app.command()
def workers(
    reference: App = None,
    env: Env = None,
    everyone: Annotated[bool, typer.Option("--all", help="those that have stopped, too")] = False,
    as_json: AsJson = False,
) -> None:
    """Who works, on what, and when each worker was last heard of. *dead*: silent for a minute without a word."""
    databases = load(reference).databases(env)

    async def ask(name: str, database: Database) -> list[dict[str, Any]] | PrintedFailure:
        try:
            return await questions.fleet_of(database)
        except RowmillError as error:
            return PrintedFailure(name, None, error)
        finally:
            await database.close()

    async def main() -> list[list[dict[str, Any]] | PrintedFailure]:
        return await asyncio.gather(*(ask(*place) for place in databases))

    parts = run_async(main())
    known = [(name, part) for (name, _), part in zip(databases, parts, strict=True) if isinstance(part, list)]
    shown = questions.workers(known, everyone=everyone)
    answers = CommandAnswers[None]([], [part for part in parts if isinstance(part, PrintedFailure)])
    if as_json:
        print_json({"workers": shown, "errors": [failure.value() for failure in answers.failures]})
        answers.exit()
    elif shown:
        print_out(show.workers_table(shown, len(databases)))
    else:
        print_out("No workers." if everyone else "No workers (--all shows those that have stopped).")
    answers.end()


@app.command()
def stuck(
    reference: App = None,
    env: Env = None,
    lane: SomeLanes = None,
    limit: Annotated[int, typer.Option(min=1, help="rows per lane")] = 100,
    as_json: AsJson = False,
) -> None:
    """Running rows whose holder has given no sign of life for longer than the lease, or never gave one."""
    mill = load(reference)

    async def question(view: LaneView) -> list[Row]:
        return await view.rows("stuck", limit) if view.condition("stuck") else []

    async def main() -> tuple[CommandAnswers[list[Row]], int]:
        async with CommandDirectory(mill, env, lane) as lookout:
            return await lookout.ask(question), len(lookout.databases)

    answers, several = run_async(main())
    found = [(view, row) for view, rows in answers.found for row in rows]
    _print_rows(answers, found, as_json, lambda: show.stuck_table(found, several), "Nothing is stuck.")


@app.command()
def jobs(
    reference: App = None,
    env: Env = None,
    lane: OneLane = None,
    state: Annotated[State | None, typer.Option(help="only rows in this state")] = None,
    limit: Annotated[int, typer.Option(min=1, help="rows per environment")] = 20,
    key: Annotated[str | None, typer.Option("--id", help="one row, with all its columns; a composite key: a,b")] = None,
    as_json: AsJson = False,
) -> None:
    """Rows of a lane: ready ones as they will be claimed, others newest first."""
    mill = load(reference)
    name = one_lane(mill, lane)

    async def question(view: LaneView) -> list[Row]:
        return await (view.rows(state, limit) if key is None else view.find([parse(view.binding, key)]))

    async def main() -> tuple[CommandAnswers[list[Row]], int]:
        async with CommandDirectory(mill, env, [name]) as lookout:
            return await lookout.ask(question), len(lookout.databases)

    answers, several = run_async(main())
    found = [(view, row) for view, rows in answers.found for row in rows]
    if key is None:
        _print_rows(answers, found, as_json, lambda: show.rows_table(found, several), "No rows.")
        return
    tables = Group(*(show.whole_table(view, row) for view, row in found))
    _print_rows(answers, found, as_json, lambda: tables, f"No row has the id {key}.", whole=True)
    if not found:
        raise typer.Exit(NOTHING_MATCHED)


def _print_rows(
    answers: CommandAnswers[Any],
    found: Sequence[tuple[LaneView, Any]],
    as_json: bool,
    render: Callable[[], RenderableType],
    none: str,
    *,
    whole: bool = False,
) -> None:
    if as_json:
        rows = [json_values.row_value(view, row, whole=whole) for view, row in found]
        print_json({"rows": rows, "errors": [failure.value() for failure in answers.failures]})
        answers.exit()
    elif found:
        print_out(render())
    elif answers.found:
        print_out(show.plain(none))
    answers.end()
