"""``rowmill prove``: the user's own declaration under interleavings and faults, on a copy of his schema."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from ..mill import Mill
from ..plural import counted
from ..prove.trial import ProofResult, ProofSettings, Tell, provable, prove, value
from . import show
from .app import App, AsJson, UsageError, app, errors, lane_names, load, print_json, print_out, run_async, said

_SEEDS = 10**6


@app.command("prove")
def prove_command(
    reference: App = None,
    lane: Annotated[
        list[str] | None, typer.Argument(help="only these lanes", autocompletion=lane_names, show_default=False)
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", help="the environment whose tables are copied: the first", callback=said)
    ] = None,
    schedules: Annotated[int, typer.Option(min=0, help="orders of statements to try, for each lane")] = 300,
    seconds: Annotated[float, typer.Option(min=0, help="how long its workers are killed; 0: not at all")] = 6.0,
    seed: Annotated[int | None, typer.Option(help="one schedule again, step by step", show_default=False)] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="URL", help="an empty database to copy to", callback=said)
    ] = None,
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="COLUMN=VALUE", help="a value for the rows that are made up")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put your lanes to the proof: their statements in hundreds of orders, their workers killed and stopped.

    On a copy of your tables' structure, which is made and dropped; your own database is only read. Your handlers are
    not run. Exit codes: 0 all of it held; 1 something broke, or could not be tried.
    """
    mill = load(reference)
    first = random.randrange(1, _SEEDS)
    terms = ProofSettings(
        reference or os.environ["ROWMILL_APP"], schedules, seconds, first, seed, on, _values(given or [])
    )
    found = run_async(_prove(mill, lane or None, env, terms))
    if as_json:
        print_json({"held": all(p.held for p in found), "first_seed": first, "lanes": [value(p) for p in found]})
    else:
        print_out(_page(found, terms))
    if not all(proved.held for proved in found):
        raise typer.Exit(1)


def _values(given: Sequence[str]) -> dict[str, str]:
    for pair in given:
        if not pair.partition("=")[0] or "=" not in pair:
            raise UsageError(f"--set {pair!r} is no column with its value", hint="--set kind=pdf")
    return {name: text for name, _, text in (pair.partition("=") for pair in given)}


async def _prove(mill: Mill, names: Sequence[str] | None, env: str | None, terms: ProofSettings) -> list[ProofResult]:
    lanes = provable(mill, names)
    found = []
    for name, database in mill.databases([env] if env else None):
        try:
            for lane in list(lanes):
                if not lane.serves(name):
                    continue
                lanes.remove(lane)  # once is enough: an environment is another place, not another structure
                with errors.status(f"{lane.name} ...") as status:
                    found.append(await prove(mill, lane, name, database, terms, _teller(status, lane.name)))
        finally:
            await database.close()
    return found


def _teller(status: Status, lane: str) -> Tell:
    return lambda what: status.update(f"{escape(lane)}: {what} ...")


def _page(found: Sequence[ProofResult], terms: ProofSettings) -> Group:
    parts: list[RenderableType] = []
    for proved in found:
        head = show.plain(proved.lane.name)
        head.stylize("bold")
        parts.append(head.append(f"  {proved.table}" if proved.table else "", "dim"))
        parts += _lane(proved, terms)
        parts.append(Text())
    bad = [proved for proved in found if not proved.held]
    if bad:
        parts.append(Text(f"{len(bad)} of {counted(len(found), 'lane')} did not hold, or could not be tried.", "red"))
    else:
        lanes = "The lane held." if len(found) == 1 else f"All {counted(len(found), 'lane')} held."
        parts.append(Text(f"{lanes} Your own tables were only read; the copy is gone.", "green"))
    return Group(*parts)


def _lane(proved: ProofResult, terms: ProofSettings) -> list[RenderableType]:
    lines: list[RenderableType] = []
    tried, survived = proved.tried, proved.survived
    if tried is not None:
        lines.append(Text(
            f"  interleaved  {counted(tried.schedules, 'schedule')} of 2 to 4 workers, {counted(tried.steps, 'step')}"
            f" in {tried.seconds:.0f} s: {counted(tried.claims, 'claim')}, {tried.swept:,} taken back,"
            f" {counted(tried.lost, 'late outcome')} dropped"
        ))  # fmt: skip
    if survived is not None:
        cut = f", cut off {counted(survived.cut, 'time')}" if survived.cut else ""
        lines.append(Text(
            f"  killed       3 worker processes, {counted(survived.rows, 'row')}:"
            f" {counted(survived.killed, 'time')} kill -9,"
            f" {counted(survived.stopped, 'time')} stopped past the lease{cut}"
        ))  # fmt: skip
        lines.append(Text(
            f"               lost {survived.lost}, doubled {survived.doubled}, left over {survived.left};"
            f" {survived.done:,} done, {survived.dead:,} dead",
            "" if survived.held else "red",
        ))  # fmt: skip
    if tried is not None and (tried.broken is not None or terms.seed is not None) and tried.last is not None:
        width = len(str(len(tried.last.steps)))
        lines += [show.plain(f"  {n:>{width}}  {step}") for n, step in enumerate(tried.last.steps, 1)]
    if tried is not None and tried.broken is not None:
        lines.append(Text("  broken       ", "red").append_text(show.plain(str(tried.broken.broken))))
        again = f"rowmill prove {terms.reference} {proved.lane.name} --seed {tried.broken.seed}".replace("  ", " ")
        lines.append(Text("  Try: ", "bold").append_text(show.plain(again)))
    if proved.error is not None:
        lines.append(Text("  not tried    ", "red").append_text(show.plain(proved.error.message)))
        if proved.error.hint:
            lines.append(Text("  Try: ", "bold").append_text(show.plain(proved.error.hint)))
    elif proved.held and proved.promises:
        lines.append(Text(f"  held         {'; '.join(proved.promises)}", "green"))
    return lines
