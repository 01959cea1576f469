"""``rowmill errors``: failures grouped into families, with counts, times and an example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..ops import questions
from ..ops.questions import SAMPLE
from ..plural import counted
from . import show
from .app import NOTHING_MATCHED, answer, app, ask, console, for_app, plain
from .app import errors as complaints
from .options import App, AsJson, Env, SomeLanes, load, not_empty

BARS = " ▁▂▃▄▅▆▇█"
_WIDE = 120  # columns of a terminal from which on there is room for the bars
_COLOURS = {"transient": "yellow", "permanent": "red", "rate": "cyan", "poison": "magenta"}


@app.command()
def errors(
    reference: App = None,
    env: Env = None,
    lane: SomeLanes = None,
    hours: Annotated[float, typer.Option(min=0.1, max=24 * 30, help="hours to look back")] = 24.0,
    family: Annotated[
        str | None, typer.Option("--error", help="one family by its name, with a traceback", callback=not_empty)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show failures grouped into families.

    Failures of one family have the same message, apart from numbers, ids, addresses and quoted values. `rowmill
    retry --error NAME` and `rowmill cancel --error NAME` act on the rows of one family. Exit code 4: no such family.

    Example: `rowmill errors app:mill --hours 2`
    """
    mill = load(reference)
    document = ask(mill, lambda directory: questions.errors(directory, hours, family), env, lane)
    parts = _shown(document, len(mill.environments), reference, whole=family is not None)
    answer(document, Group(*parts) if parts else None, as_json=as_json)
    if family is not None and not any(part["families"] for part in document["environments"]):
        if not as_json:
            complaints.print(
                plain(
                    f"no failures of the family {family!r} in the last {hours:g} hours."
                    f" Try: {for_app('rowmill errors APP', reference)}"
                )
            )
        raise typer.Exit(NOTHING_MATCHED)


def bars(counts: Sequence[int]) -> str:
    """Counts over time in one line."""
    most = max(counts, default=0)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] if most else " " for count in counts)


def halved(counts: Sequence[int]) -> list[int]:
    """Two neighbours in one: a terminal has less room than a page."""
    return [sum(counts[at : at + 2]) for at in range(0, len(counts), 2)]


def _shown(document: dict[str, Any], environments: int, reference: str | None, *, whole: bool) -> list[RenderableType]:
    parts: list[RenderableType] = []
    families = [family for part in document["environments"] for family in part["families"]]
    if whole:
        parts += [line for family in families for line in _one(family, document["hours"])]
    elif families:
        parts.append(_table(families, environments, document["hours"]))
    if any(family["dead_at_least"] for family in families):
        parts.append(Text(f"+: at least this many; only {SAMPLE:,} dead rows of each lane were read", "dim"))
    if not whole and any(not family["count"] for family in families):
        parts.append(
            Text("Without a class: rowmill did not record these failures; the rows show only their error.", "dim")
        )
    if not families and not whole and not any(part["errors"] for part in document["environments"]):
        parts.append(Text("No failures."))
    for part in document["environments"]:
        where = f"{part['environment']}: " if environments > 1 else ""
        if not part["recorded"]:
            hint = "failures are not recorded here (no table rowmill_failures), so only dead rows are listed"
            parts.append(Text(f"{where}{hint}. Try: {for_app('rowmill migrate APP --apply', reference)}", "yellow"))
        if part["unknown"]:
            names = ", ".join(part["unknown"])
            parts.append(Text(f"{where}dead rows of {names} were not read: the query took too long", "yellow"))
    return parts


def _table(families: Sequence[dict[str, Any]], environments: int, hours: float) -> RenderableType:
    over = f"Last {hours:g} h"  # the span of the bars, from left to right
    headings = ["Failures", "Rows", "Dead now", "Last"]
    wide = not console.is_terminal or console.width >= _WIDE
    rows: list[list[Text]] = []
    for family in families:
        count, word = family["count"], family["class"] or ""
        seen = f"{show.span(show.ago(family['last_seen']))} ago" if family["last_seen"] else ""
        rows.append([
            *([plain(family["environment"])] if environments > 1 else []), plain(family["lane"]),
            Text(family["fingerprint"]), Text(word, _COLOURS.get(word, "")), Text(f"{count:,}" if count else ""),
            Text(f"{family['rows']:,}" if count else ""), Text(_dead_now(family)), Text(seen),
        ])  # fmt: skip
    names = [*(["Env"] if environments > 1 else []), "Lane", "Family", "Class", *headings]
    says = [plain(family["shape"]) for family in families]
    if not wide:
        return show.rows_with_notes(names, rows, says, headings)
    made = show.table(*names, over, "Says", right=headings)
    made.columns[-1].overflow = "ellipsis"
    for family, cells, text in zip(families, rows, says, strict=True):
        made.add_row(*cells, Text(bars(halved(family["buckets"])), "red"), text)
    return made


def _dead_now(family: dict[str, Any]) -> str:
    """How many rows are dead of it now; with a plus where there may be more."""
    dead = family["dead"]
    return "" if dead is None else f"{dead:,}{'+' if family['dead_at_least'] else ''}"


def _one(family: dict[str, Any], hours: float) -> list[RenderableType]:
    example, unrecorded = family["example"], family["unrecorded"]
    parts = []
    if family["count"]:
        parts.append(f"{counted(family['count'], 'failure')} of {counted(family['rows'], 'row')}")
    if unrecorded:
        parts.append(f"{counted(unrecorded, 'dead row')} whose failure was not recorded here")
    if family["dead"] is not None:
        parts.append(f"{_dead_now(family)} dead now")
    seen = "; ".join(parts)
    head = Text(f"{family['fingerprint']}  ", "bold").append_text(plain(family["shape"]))
    lines: list[RenderableType] = [head, plain(f"lane {family['lane']} in {family['environment']}: {seen}")]
    if family["first_seen"]:
        first, last = (f"{show.span(show.ago(family[name]))} ago" for name in ("first_seen", "last_seen"))
        times = Text(f"first seen {first}, last seen {last}; last {hours:g} hours: ")
        lines.append(times.append(bars(halved(family["buckets"])).lstrip(), "red"))
    about = f"row {example.get('row_id')}"
    about += f", attempt {example['attempt']}" if example.get("attempt") else ""
    about += f", {example['outcome']}" if example.get("outcome") else ""
    lines.append(plain(f"latest: {about}: {example.get('message')}"))
    trace = str(example.get("traceback") or "")
    return lines + [plain(line) for line in trace.rstrip().split("\n") if trace] + [Text("")]
