"""``rowmill check``: every lane against every environment. It reads, and has exit codes for CI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from ..adopt.lane_file import quoted_table
from ..adopt.survey import read_only
from ..declare.lane import Lane
from ..engine.environment import _refuse_overlaps
from ..engine.resources import Resources
from ..engine.worker import check_handler
from ..errors import DatabaseError, DeclarationError, RowmillError, Unserved
from ..migrate import ddl
from ..mill import Mill
from ..ops.findings import ERROR, SMALL, WARNING, CheckFinding, ExaminedLane, across, connections, examine
from ..ops.row_actions import ended_by_others
from ..plural import counted
from ..store import Database, LaneStore, examine_lane, store_for
from ..store.database import runner
from ..store.inspect.lane_view import check_file
from ..store.lane.binding import Binding
from ..store.lane.refused_rows import refused_claims
from ..store.lane.refused_states import doubtful_states
from ..store.lane.row_keys import written
from . import show
from .app import App, AsJson, Env, app, load, print_json, print_out, run_async

#: Ready rows whose claim is tried.
_TRIED = 100

#: Connections of one process in one environment, beside the engine's own: heartbeat, listener, finish blocks; and
#: how many more heartbeats may open while tables are locked.
_HEARTBEAT, _LISTEN, _FINISH, _LOCKED = 1, 1, 4, 4


@dataclass
class CheckedLane:
    """One lane in one environment, or (lane None) the environment itself."""

    environment: str
    lane: Lane | None
    examined: ExaminedLane | None = None
    findings: list[CheckFinding] = field(default_factory=list)


@app.command()
def check(
    reference: App = None,
    env: Env = None,
    strict: Annotated[bool, typer.Option("--strict", help="warnings end with code 1, too")] = False,
    processes: Annotated[int, typer.Option(min=1, help="how many worker processes are planned")] = 1,
    as_json: AsJson = False,
) -> None:
    """Every lane against every environment: errors, warnings, resolved roles, and how the claim finds its rows.

    Writes nothing: triggers are tried in a transaction that is rolled back.
    Exit codes: 0 fine, or warnings; 1 errors, or with --strict warnings.
    """
    mill = load(reference)
    mill.select(None)

    found, needs = run_async(check_mill(mill, env, processes))
    levels = [finding.level for checked in found for finding in checked.findings]
    bad, poor = levels.count(ERROR), levels.count(WARNING)
    failed = bool(bad or (strict and poor))
    if as_json:
        print_json({"ok": not failed, "errors": bad, "warnings": poor, "checked": [_value(c) for c in found],
                    "connections": needs})  # fmt: skip
    else:
        print_out(_page(found, needs, processes, bad, poor))
    if failed:
        raise typer.Exit(1)


async def check_mill(
    mill: Mill, env: Sequence[str] | None = None, processes: int = 1
) -> tuple[list[CheckedLane], dict[str, dict[str, Any]]]:
    """Every lane in every environment, or in the named ones; and the connections that each environment needs."""
    found: list[CheckedLane] = []
    needs: dict[str, dict[str, Any]] = {}
    for name, database in mill.databases(env):
        try:
            part = await _environment(mill, name, database)
            found += part
            if any(checked.examined for checked in part):
                needs[name] = await _connections(mill, database, processes)
        except RowmillError as error:
            found.append(
                CheckedLane(name, None, findings=[CheckFinding(ERROR, "unreachable", error.message, error.hint)])
            )
        finally:
            await database.close()
    for name, need in needs.items():
        if need.get("free") is not None and need["at_most"] > need["free"]:
            text = f"{processes} processes need up to {need['at_most']} connections, and {need['free']} are free"
            hint = "fewer processes, Mill(connections=...), or a pooler"
            found.append(CheckedLane(name, None, findings=[CheckFinding(WARNING, "connections", text, hint)]))
    return found, needs


async def _environment(mill: Mill, name: str, database: Database) -> list[CheckedLane]:
    check_file(database)
    lanes = sorted((lane for lane in mill.lanes.values() if lane.serves(name)), key=lambda lane: lane.priority)
    found = [await _lane(lane, name, database, Resources(mill.resources)) for lane in lanes]
    bound = [(c.examined.binding, c.examined.facts) for c in found if c.examined]
    for binding, finding in across(bound):
        next(c for c in found if c.lane is binding.lane).findings.append(finding)
    try:
        _refuse_overlaps([store_for(binding, database, mill.clock, "", "") for binding, _ in bound])
    except DeclarationError as error:
        found.append(CheckedLane(name, None, findings=[CheckFinding(ERROR, "sweeps", error.message, error.hint)]))
    return found


async def _lane(lane: Lane, name: str, database: Database, resources: Resources) -> CheckedLane:
    checked = CheckedLane(name, lane)
    try:
        check_handler(lane, resources)
    except DeclarationError as error:
        checked.findings.append(CheckFinding(ERROR, "handler", error.message, error.hint))
    try:
        store = await examine_lane(lane, name, database)
    except DeclarationError as error:
        hint = error.hint
        if await _helped(lane, name, database):
            hint = f"rowmill migrate APP --apply adds what is missing; or {error.hint}"
        checked.findings.append(CheckFinding(ERROR, "declaration", error.message, hint))
        return checked
    binding = store.binding
    table = quoted_table(binding.table.schema, binding.table.name)
    checked.examined = await read_only(database, lambda c: examine(c, binding, table))
    checked.findings += checked.examined.findings
    unindexed = any(finding.code in ("no_ready_index", "no_turns_index") for finding in checked.findings)
    if checked.examined.rows < SMALL or not unindexed:  # else the trial would read the whole table
        checked.findings += await _refused_claims(store)
    for state, reason in (await doubtful_states(store)).items():
        text = f"on a trial, a trigger of the table refused {state}: {reason}"
        hint = "nothing, if the handler writes the columns that the trigger asks for; otherwise another value"
        checked.findings.append(CheckFinding(WARNING, "trigger", text, hint))
    if foreign := await ended_by_others(store):
        own = binding.roles["error"]
        text = (
            f"{foreign:,} dead rows were ended by another program ({own} is null, another error is not): status counts"
            " them, and retry would send them into this lane"
        )
        hint = f"say in dead what tells this lane's rows apart: {own!r}: NOT_NULL, or IS_NULL for the other's column"
        checked.findings.append(CheckFinding(WARNING, "shared_dead", text, hint))
    return checked


async def _refused_claims(store: LaneStore) -> list[CheckFinding]:
    """Ready rows whose claim the database would refuse: tried and rolled back, where this role may."""
    try:
        refused = await refused_claims(store, _TRIED)
    except DatabaseError:
        return []
    hint = "mend the row, or the trigger or constraint that refuses it; workers set it aside or pass it over"
    return [
        CheckFinding(
            WARNING, "claim_refused", f"the database refuses the claim of row {written(key)}: {error.message}", hint
        )
        for key, error in refused
        if not isinstance(error, Unserved) and not error.in_the_way
    ]


async def _helped(lane: Lane, name: str, database: Database) -> bool:
    """Whether the columns that migrate adds would make the lane work."""
    try:
        return bool((await ddl.outline(lane, name, database)).lacking)
    except RowmillError:
        return False


async def _connections(mill: Mill, database: Database, processes: int) -> dict[str, Any]:
    if database.dialect.name != "postgresql":
        return {"processes": processes, "at_most": None, "free": None}
    listen = 0 if database.pooled else _LISTEN
    each = mill.connections + _HEARTBEAT + listen + _FINISH
    server = await read_only(database, lambda c: connections(runner(c)))
    return {
        "processes": processes,
        "each": each,
        "at_most": processes * each,
        "while_locked": processes * (each + _LOCKED),
        "allowed": server["allowed"],
        "in_use": server["in_use"],
        "free": None if database.pooled else max(0, server["allowed"] - server["in_use"] + 1),
        "pooler": database.pooled,
    }


# -- what is shown


def _page(found: list[CheckedLane], needs: dict[str, Any], processes: int, bad: int, poor: int) -> Group:
    several = len({checked.environment for checked in found}) > 1
    parts: list[Any] = []
    for checked in found:
        name = checked.lane.name if checked.lane else "all lanes"
        head = Text(f"{checked.environment} / " if several else "", "dim").append_text(show.plain(name))
        head.stylize("bold", len(f"{checked.environment} / ") if several else 0)
        if checked.examined is not None:
            head.append_text(_about(checked.examined))
        parts.append(head)
        for finding in sorted(checked.findings, key=lambda f: f.level):
            colour = "red" if finding.level == ERROR else "yellow"
            line = Text(f"  {finding.level}: ", colour).append_text(show.plain(finding.text))
            parts.append(line.append(". Try: ", "dim").append_text(show.plain(finding.hint)) if finding.hint else line)
        if not checked.findings:
            parts.append(Text("  nothing to say against it", "green"))
        parts.append(Text())
    for name, need in needs.items():
        if need["at_most"] is not None:
            where = f"{name}: " if several else ""
            free = "behind a pooler" if need["pooler"] else f"{need['free']} of {need['allowed']} are free"
            parts.append(show.plain(f"{where}{_need(processes, need)}; {free}"))
    verdict = f"{counted(bad, 'error')}, {counted(poor, 'warning')}" if bad or poor else "All is well."
    parts.append(Text(verdict, "red" if bad else "yellow" if poor else "green"))
    return Group(*parts)


def _need(processes: int, need: dict[str, Any]) -> str:
    return f"{counted(processes, 'process needs', 'processes need')} up to {counted(need['at_most'], 'connection')}"


def _about(examined: ExaminedLane) -> Text:
    binding = examined.binding
    about = "" if examined.exact else "about "
    text = (
        Text()
        .append_text(show.plain(f"  {binding.table.fullname}, {about}{counted(examined.rows, 'row')}"))
        .append("\n")
    )
    roles = ", ".join(role if role == column else f"{role}: {column}" for role, column in binding.roles.items())
    text.append_text(show.plain(f"  roles   {roles or 'none'}")).append("\n")
    order = ", ".join(f"{column}{' desc' if down else ''}" for column, down in binding.order)
    text.append_text(show.plain(f"  order   {order}")).append("\n")
    plan = examined.plan
    if plan is not None and plan.direct:
        how = f"by index {plan.index}"
    elif plan is not None and plan.index:
        how = f"by index {plan.index}, and past other rows"
    else:
        how = "reads the table"
    cost = f", cost {plan.cost:,.0f}" if plan is not None and plan.cost is not None else ""
    text.append_text(show.plain(f"  claim   {how}{cost}"))
    text.stylize("dim")
    return text


def _value(checked: CheckedLane) -> dict[str, Any]:
    found: dict[str, Any] = {
        "environment": checked.environment,
        "lane": checked.lane.name if checked.lane else None,
        "findings": [vars(finding) for finding in checked.findings],
    }
    if checked.examined is not None:
        binding: Binding = checked.examined.binding
        plan = checked.examined.plan
        found |= {
            "table": binding.table.fullname,
            "rows": checked.examined.rows,
            "exact": checked.examined.exact,
            "key": list(binding.key),
            "roles": dict(binding.roles),
            "lacks": binding.lacks(),
            "order": [{"column": column, "descending": down} for column, down in binding.order],
            "max_attempts": binding.max_attempts,
            "renew": binding.renew,
            "plan": None if plan is None else {
                "lines": list(plan.lines), "index": plan.index, "uses_index": plan.direct, "cost": plan.cost,
            },
        }  # fmt: skip
    return found
