"""``rowmill check``: every lane against every environment. It reads, and has exit codes for CI."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..ops.check import ERROR, SMALL, WARNING, CheckedLane, ExaminedLane, check_mill, value
from ..plural import counted
from .app import app, for_app, labelled, plain, print_json, print_out, run_async
from .options import App, AsJson, Env, load


@app.command()
def check(
    reference: App = None,
    env: Env = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit with code 1 on warnings, too")] = False,
    processes: Annotated[int, typer.Option(min=1, help="planned number of worker processes")] = 1,
    as_json: AsJson = False,
) -> None:
    """Check every lane against every environment.

    Prints errors, warnings, the roles of your columns, and how the claim finds its rows. Writes nothing: it tries
    triggers in a transaction that is rolled back.

    Exit codes: 0 no errors; 1 errors, or warnings with --strict.

    Example: `rowmill check app:mill --strict`
    """
    mill = load(reference)
    mill.select(None)

    results, needs = run_async(check_mill(mill, env, processes))
    levels = [finding.level for checked in results for finding in checked.findings]
    bad, poor = levels.count(ERROR), levels.count(WARNING)
    failed = bool(bad or (strict and poor))
    if as_json:
        print_json({"ok": not failed, "errors": bad, "warnings": poor, "checked": [value(c) for c in results],
                    "connections": needs})  # fmt: skip
    else:
        print_out(_page(results, needs, processes, bad, poor, reference))
    if failed:
        raise typer.Exit(1)


# -- what is shown


def _page(
    results: list[CheckedLane], needs: dict[str, Any], processes: int, bad: int, poor: int, reference: str | None
) -> Group:
    several = len({checked.environment for checked in results}) > 1
    parts: list[Any] = []
    for checked in results:
        name = checked.lane.name if checked.lane else "all lanes"
        head = Text(f"{checked.environment} / " if several else "", "dim").append_text(plain(name))
        head.stylize("bold", len(f"{checked.environment} / ") if several else 0)
        if checked.examined is not None:
            head.append_text(_size(checked.examined))
        parts.append(head)
        parts += _about(checked.examined, reference) if checked.examined is not None else []
        for finding in sorted(checked.findings, key=lambda f: f.level):
            colour = "red" if finding.level == ERROR else "yellow"
            text = plain(finding.text)
            if finding.hint:
                text.append("\nTry: ", "bold").append_text(plain(for_app(finding.hint, reference)))
            parts.append(labelled(Text(f"  {finding.level}: ", colour), text))
        if not checked.findings:
            parts.append(Text("  no problems found", "green"))
        parts.append(Text())
    for name, need in needs.items():
        if need["at_most"] is not None:
            where = f"{name}: " if several else ""
            many = counted(processes, "process needs", "processes need")
            most = counted(need["at_most"], "connection")
            free = "behind a pooler" if need["pooler"] else f"{need['free']} of {need['allowed']} are free"
            parts.append(plain(f"{where}{many} up to {most}; {free}"))
    verdict = f"{counted(bad, 'error')}, {counted(poor, 'warning')}" if bad or poor else "No problems found."
    parts.append(Text(verdict, "red" if bad else "yellow" if poor else "green"))
    return Group(*parts)


def _pickup(examined: ExaminedLane, reference: str | None) -> str:
    lane, wake = examined.binding.lane, for_app("rowmill migrate APP --wake --apply", reference)
    if lane.poll is None:
        trigger = "within milliseconds (wake trigger); no poll"
        return (
            trigger
            if examined.wake_trigger
            else f"when the worker is woken (no poll); within milliseconds after {wake}"
        )
    # A poll comes up to a fifth later, so that not all workers ask at once.
    poll = f"within {1.2 * lane.poll_seconds:g} s"
    if examined.wake_trigger:
        return f"within milliseconds (wake trigger), {poll} at the latest (poll)"
    return f"{poll} (poll); within milliseconds after {wake}"


def _size(examined: ExaminedLane) -> Text:
    about = "" if examined.exact else "about "
    text = plain(f"  {examined.binding.table.fullname}, {about}{counted(examined.rows, 'row')}")
    text.stylize("dim")
    return text


def _about(examined: ExaminedLane, reference: str | None) -> list[Table]:
    binding = examined.binding
    roles = ", ".join(role if role == column else f"{role}: {column}" for role, column in binding.roles.items())
    order = ", ".join(f"{column}{' desc' if down else ''}" for column, down in binding.order)
    plan = examined.plan
    if plan is not None and plan.direct:
        how = f"by index {plan.index}"
    elif plan is not None and plan.index:
        how = f"by index {plan.index}, past rows that it does not claim"
    else:
        how = "scans the whole table" + (", which is small" if examined.rows < SMALL else "")
    cost = f", cost {plan.cost:,.0f}" if plan is not None and plan.cost is not None else ""
    told = {"roles": roles or "none", "order": order, "claim": f"{how}{cost}"}
    if examined.wake_trigger is not None:
        told["pickup"] = f"rows written by plain SQL start {_pickup(examined, reference)}"
    lines = []
    for label, words in told.items():
        text = plain(words)
        text.stylize("dim")
        lines.append(labelled(Text(f"  {label:<8}", "dim"), text))
    return lines
