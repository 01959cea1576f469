"""``rowmill prove``: test the user's own lanes under interleavings and faults, on a copy of the schema."""

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
from .app import app, errors, plain, print_json, print_out, run_async
from .options import App, AsJson, lane_names, load, not_empty, pairs

_SEEDS = 10**6


@app.command("prove")
def prove_command(
    reference: App = None,
    lane: Annotated[
        list[str] | None,
        typer.Argument(metavar="LANE", help="only these lanes", autocompletion=lane_names, show_default=False),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option("--env", help="the environment whose tables are copied (default: the first)", callback=not_empty),
    ] = None,
    schedules: Annotated[int, typer.Option(min=0, help="interleavings to try per lane")] = 300,
    seconds: Annotated[float, typer.Option(min=0, help="seconds to keep killing workers; 0: skip")] = 6.0,
    seed: Annotated[int | None, typer.Option(help="replay one interleaving, step by step", show_default=False)] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="URL", help="an empty database to copy to", callback=not_empty)
    ] = None,
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="COLUMN=VALUE", help="a column value for the generated rows")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test your lanes under hundreds of interleavings and killed workers.

    Makes a copy of your tables' structure, works on it, and drops it. It only reads your own database, and does not run
    your handlers.

    Exit codes: 0 every lane passed; 1 a lane failed, or could not be tested.

    Example: `rowmill prove app:mill fetch`
    """
    mill = load(reference)
    first = random.randrange(1, _SEEDS)
    values = pairs(given or (), "--set", "COLUMN=VALUE", "--set kind=pdf")
    terms = ProofSettings(reference or os.environ["ROWMILL_APP"], schedules, seconds, first, seed, on, values)
    results = run_async(_prove(mill, lane or None, env, terms))
    if as_json:
        print_json({"held": all(p.held for p in results), "first_seed": first, "lanes": [value(p) for p in results]})
    else:
        print_out(_page(results, terms))
    if not all(proved.held for proved in results):
        raise typer.Exit(1)


async def _prove(mill: Mill, names: Sequence[str] | None, env: str | None, terms: ProofSettings) -> list[ProofResult]:
    lanes = provable(mill, names)
    results = []
    for name, database in mill.databases([env] if env else None):
        try:
            for lane in list(lanes):
                if not lane.serves(name):
                    continue
                lanes.remove(lane)  # once is enough: an environment is another place, not another structure
                with errors.status(f"{lane.name} ...") as status:
                    results.append(await prove(mill, lane, name, database, terms, _teller(status, lane.name)))
        finally:
            await database.close()
    return results


def _teller(status: Status, lane: str) -> Tell:
    return lambda what: status.update(f"{escape(lane)}: {what} ...")


def _page(results: Sequence[ProofResult], terms: ProofSettings) -> Group:
    parts: list[RenderableType] = []
    for proved in results:
        head = plain(proved.lane.name)
        head.stylize("bold")
        parts.append(head.append(f"  {proved.table}" if proved.table else "", "dim"))
        parts += _lane(proved, terms)
        parts.append(Text())
    bad = [proved for proved in results if not proved.held]
    if bad:
        parts.append(Text(f"{len(bad)} of {counted(len(results), 'lane')} failed or could not be tested.", "red"))
    else:
        lanes = "The lane passed." if len(results) == 1 else f"All {counted(len(results), 'lane')} passed."
        parts.append(Text(f"{lanes} Your own tables were only read; the copy was removed.", "green"))
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
        lines += [plain(f"  {n:>{width}}  {step}") for n, step in enumerate(tried.last.steps, 1)]
    if tried is not None and tried.broken is not None:
        lines.append(Text("  broken       ", "red").append_text(plain(str(tried.broken.broken))))
        again = f"rowmill prove {terms.reference} {proved.lane.name} --seed {tried.broken.seed}".replace("  ", " ")
        lines.append(Text("  Try: ", "bold").append_text(plain(again)))
    if proved.error is not None:
        lines.append(Text("  not tested   ", "red").append_text(plain(proved.error.message)))
        if proved.error.hint:
            lines.append(Text("  Try: ", "bold").append_text(plain(proved.error.hint)))
    elif proved.held and proved.promises:
        lines.append(Text(f"  held         {'; '.join(proved.promises)}", "green"))
    return lines
