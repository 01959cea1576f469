"""``rowmill check``: every lane against every environment. It reads, and has exit codes for CI."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from ..ops.check import ERROR, WARNING, CheckedLane, ExaminedLane, check_mill, value
from ..plural import counted
from .app import App, AsJson, Env, app, load, plain, print_json, print_out, run_async


@app.command()
def check(
    reference: App = None,
    env: Env = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit with code 1 on warnings, too")] = False,
    processes: Annotated[int, typer.Option(min=1, help="planned number of worker processes")] = 1,
    as_json: AsJson = False,
) -> None:
    """Check every lane against every environment.

    Prints errors, warnings, the resolved roles, and how the claim finds its rows. Writes nothing: triggers are
    tried in a transaction that is rolled back. Exit codes: 0 no errors; 1 errors, or warnings with --strict.

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
        print_out(_page(results, needs, processes, bad, poor))
    if failed:
        raise typer.Exit(1)


# -- what is shown


def _page(results: list[CheckedLane], needs: dict[str, Any], processes: int, bad: int, poor: int) -> Group:
    several = len({checked.environment for checked in results}) > 1
    parts: list[Any] = []
    for checked in results:
        name = checked.lane.name if checked.lane else "all lanes"
        head = Text(f"{checked.environment} / " if several else "", "dim").append_text(plain(name))
        head.stylize("bold", len(f"{checked.environment} / ") if several else 0)
        if checked.examined is not None:
            head.append_text(_about(checked.examined))
        parts.append(head)
        for finding in sorted(checked.findings, key=lambda f: f.level):
            colour = "red" if finding.level == ERROR else "yellow"
            line = Text(f"  {finding.level}: ", colour).append_text(plain(finding.text))
            parts.append(line.append(". Try: ", "dim").append_text(plain(finding.hint)) if finding.hint else line)
        if not checked.findings:
            parts.append(Text("  no problems found", "green"))
        parts.append(Text())
    for name, need in needs.items():
        if need["at_most"] is not None:
            where = f"{name}: " if several else ""
            free = "behind a pooler" if need["pooler"] else f"{need['free']} of {need['allowed']} are free"
            parts.append(plain(f"{where}{_need(processes, need)}; {free}"))
    verdict = f"{counted(bad, 'error')}, {counted(poor, 'warning')}" if bad or poor else "No problems found."
    parts.append(Text(verdict, "red" if bad else "yellow" if poor else "green"))
    return Group(*parts)


def _need(processes: int, need: dict[str, Any]) -> str:
    return f"{counted(processes, 'process needs', 'processes need')} up to {counted(need['at_most'], 'connection')}"


def _pickup(examined: ExaminedLane) -> str:
    # A poll comes up to a fifth later, so that not all workers ask at once.
    poll = f"within {1.2 * examined.binding.lane.poll.total_seconds():g} s"
    if examined.wake_trigger:
        return f"within milliseconds (wake trigger), {poll} at the latest (poll)"
    return f"{poll} (poll); with rowmill migrate --wake within milliseconds"


def _about(examined: ExaminedLane) -> Text:
    binding = examined.binding
    about = "" if examined.exact else "about "
    text = Text().append_text(plain(f"  {binding.table.fullname}, {about}{counted(examined.rows, 'row')}")).append("\n")
    roles = ", ".join(role if role == column else f"{role}: {column}" for role, column in binding.roles.items())
    text.append_text(plain(f"  roles   {roles or 'none'}")).append("\n")
    order = ", ".join(f"{column}{' desc' if down else ''}" for column, down in binding.order)
    text.append_text(plain(f"  order   {order}")).append("\n")
    plan = examined.plan
    if plan is not None and plan.direct:
        how = f"by index {plan.index}"
    elif plan is not None and plan.index:
        how = f"walks index {plan.index} past rows that are not ready"
    else:
        how = "scans the whole table"
    cost = f", cost {plan.cost:,.0f}" if plan is not None and plan.cost is not None else ""
    text.append_text(plain(f"  claim   {how}{cost}"))
    if examined.wake_trigger is not None:
        text.append("\n").append_text(plain(f"  pickup  rows written by plain SQL start {_pickup(examined)}"))
    text.stylize("dim")
    return text
