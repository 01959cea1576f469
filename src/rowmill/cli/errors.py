"""``rowmill errors``: failures in families, each with how often, since when, and an example."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..plural import counted
from ..store.inspect.failure_families import SAMPLE, Errors
from ..store.inspect.failure_families import errors as find_errors
from ..store.own.failures import Family
from . import show
from .app import NOTHING_MATCHED, App, AsJson, Env, app, console, load, print_json, print_out, run_async, said
from .app import errors as complaints
from .environments import CommandAnswers, CommandDirectory
from .look import SomeLanes

BARS = " ▁▂▃▄▅▆▇█"
_WIDE = 120  # columns of a terminal from which on there is room for the bars
_COLOURS = {"transient": "yellow", "permanent": "red", "rate": "cyan", "poison": "magenta"}


@app.command()
def errors(
    reference: App = None,
    env: Env = None,
    lane: SomeLanes = None,
    hours: Annotated[float, typer.Option(min=0.1, max=24 * 30, help="how far back")] = 24.0,
    family: Annotated[
        str | None, typer.Option("--error", help="one family by its name, with its traceback", callback=said)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Failures in families: those that say the same but for numbers, ids, addresses and quoted values.

    `rowmill retry --error NAME` and `rowmill cancel --error NAME` act on the rows of one. Exit code 4: there is none.
    """
    mill = load(reference)
    found, answers = run_async(_ask(CommandDirectory(mill, env, lane), hours))
    if family is not None:
        for one in found:
            one.families = [f for f in one.families if f.fingerprint == family]
    if as_json:
        failures = [failure.value() for failure in answers.failures]
        print_json({"hours": hours, "environments": [value(one) for one in found], "failures": failures})
        answers.exit()
    else:
        print_out(_shown(found, len(mill.environments), whole=family is not None))
        answers.end()
    if family is not None and not any(one.families for one in found):
        if not as_json:
            complaints.print(
                Text(f"no failures of the family {family!r} in the last {hours:g} hours. Try: rowmill errors")
            )
        raise typer.Exit(NOTHING_MATCHED)


async def _ask(lookout: CommandDirectory, hours: float) -> tuple[list[Errors], CommandAnswers[None]]:
    async with lookout:

        async def there(view: Any) -> None: ...

        answers = await lookout.ask(there)
        places: dict[str, list[Any]] = {}
        for view, _ in answers.found:
            places.setdefault(view.environment, []).append(view)
        return [await find_errors(views, hours=hours) for views in places.values()], answers


def value(found: Errors) -> dict[str, Any]:
    """One environment's failures, for scripts."""
    return {
        "environment": found.environment,
        "recorded": found.recorded,
        "unknown": found.unknown,
        "families": [family.value() for family in found.families],
    }


def bars(counts: Sequence[int]) -> str:
    """Counts over time in one line."""
    most = max(counts, default=0)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] if most else " " for count in counts)


def _shown(found: Sequence[Errors], environments: int, *, whole: bool) -> RenderableType:
    parts: list[RenderableType] = []
    families = [family for one in found for family in one.families]
    if whole:
        parts += [part for family in families for part in _one(family)]
    elif families:
        headings = ["Failures", "Rows", "Last"]
        wide = not console.is_terminal or console.width >= _WIDE
        made = show.table(
            *(["Env"] if environments > 1 else []), "Lane", "Error", "Class", *headings, *(["When"] if wide else []),
            "Says", right=headings,
        )  # fmt: skip
        says = made.columns[-1]
        says.no_wrap = wide  # on a narrow terminal it takes several lines, so that the name of the family stays whole
        says.overflow = "ellipsis" if wide else "fold"
        for family in families:
            many = f"{family.count:,}" if family.count else f"{family.unrecorded:,}{_more(family)} dead"
            made.add_row(
                *([show.plain(family.environment)] if environments > 1 else []), show.plain(family.lane),
                family.fingerprint, Text(family.word or "", _COLOURS.get(family.word or "", "")), many,
                f"{family.rows:,}" if family.count else "", show.span(_ago(family.last_seen)),
                *([Text(bars(family.buckets), "red")] if wide else []), show.plain(family.shape),
            )  # fmt: skip
        parts.append(made)
    else:
        parts.append(Text("No failure is known."))
    for one in found:
        where = f"{one.environment}: " if environments > 1 else ""
        if not one.recorded:
            hint = "failures are not written down here (no table rowmill_failures): what dead rows show is all"
            parts.append(Text(f"{where}{hint}. Try: rowmill migrate", "yellow"))
        if one.unknown:
            names = ", ".join(one.unknown)
            parts.append(Text(f"{where}dead rows of {names} could not be looked at in time", "yellow"))
    return Group(*parts)


def _more(family: Family) -> str:
    return "+" if family.unrecorded >= SAMPLE else ""


def _ago(moment: str | None) -> float | None:
    return None if moment is None else (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _one(family: Family) -> list[RenderableType]:
    """All that is known of a family."""
    example = family.example
    seen = f"{counted(family.count, 'failure')} of {counted(family.rows, 'row')}" if family.count else "not on record"
    if family.unrecorded:
        seen += f", and {family.unrecorded:,}{_more(family)} dead rows without a record"
    head = Text(f"{family.fingerprint}  ", "bold").append_text(show.plain(family.shape))
    lines: list[RenderableType] = [head, show.plain(f"lane {family.lane} in {family.environment}: {seen}")]
    if family.first_seen:
        lines.append(Text(f"first {family.first_seen}, last {family.last_seen}  ").append(bars(family.buckets), "red"))
    told = f"row {example.get('row_id')}"
    told += f", attempt {example['attempt']}" if example.get("attempt") else ""
    told += f", {example['outcome']}" if example.get("outcome") else ""
    lines.append(show.plain(f"the latest: {told}: {example.get('message')}"))
    trace = str(example.get("traceback") or "")
    return lines + [show.plain(line) for line in trace.rstrip().split("\n") if trace] + [Text("")]
