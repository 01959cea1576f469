"""How rows, counts and workers are shown: as tables for people, as plain values for scripts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ..plural import plural
from ..store.gates.pauses import Pause, Target
from ..store.inspect import json_values, why_rules
from ..store.inspect.lane_view import MOST, SAMPLE, STATES, Counts, LaneView, Row, UncountedRows
from ..store.lane.row_keys import written
from .app import console

COLOURS = {"ready": "cyan", "running": "blue", "busy": "blue", "done": "green", "dead": "red", "stuck": "red"}
#: Of a state's value, and of a worker's id: its beginning and its end.
MOST_SAID, WORKER = 40, (14, 6)
_TIMES = ("created_at", "run_after", "claimed_at", "heartbeat_at", "finished_at", "updated_at")


def plain(value: Any) -> Text:
    """Somebody else's text in one line, without anything that a terminal would obey."""
    return Text("".join(c if c.isprintable() else " " for c in str(value)))


def span(seconds: float | None) -> str:
    """A duration in one unit, as people say it."""
    return "" if seconds is None else why_rules.span(max(round(seconds), 0))


def table(*headings: str, right: Sequence[str] = ()) -> Table:
    """An empty table: numbers to the right and never cut; names are folded where the line is too short."""
    # A line below the headings is for the eye: in a pipe it would be as long as the longest error.
    ruled, between = (box.SIMPLE_HEAD, 1) if console.is_terminal else (None, 2)
    found = Table(box=ruled, padding=(0, between, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for heading in headings:
        folds = heading in ("Env", "Lane", "Worker", "Id", "Holder")
        found.add_column(heading, justify="right" if heading in right else "left", no_wrap=not folds, overflow="fold")
    return found


def count(number: int | None, state: str, unknown: Sequence[str]) -> Text:
    """A count: blank where there is no such state, a question mark where counting took too long."""
    if state in unknown:
        return Text("?", "yellow")
    if number is None:
        return Text("")
    if number > MOST:
        return Text(f"{MOST:,}+", COLOURS.get(state, ""))
    return Text(f"{number:,}", COLOURS.get(state, "") if number else "dim")


def counts_table(
    found: Sequence[tuple[LaneView, Counts]], environments: int, paused: Collection[tuple[str, str]] = ()
) -> Table:
    """Lanes by state; those that are paused have a mark."""
    some = {
        "canceled": any(view.lane.canceled for view, _ in found),
        "excluded": any(counts.states["excluded"] or "excluded" in counts.unknown for _, counts in found),
    }
    shown = [state for state in STATES if some.get(state, True)]
    shown.insert(shown.index("running") + 1, "stuck")
    headings = [state.capitalize() for state in shown] + ["Oldest"]
    made = table(*(["Env"] if environments > 1 else []), "Lane", *headings, right=headings)
    last = None
    for view, counts in found:
        cells = [count(counts.states.get(state), state, counts.unknown) for state in shown]
        oldest = Text(span(counts.oldest_ready))
        if (counts.states["ready"] or 0) > MOST:
            oldest = Text(f"> {oldest}")
        name = plain(view.environment) if view.environment != last else Text("")
        lane = plain(view.lane.name)
        if (view.environment, view.lane.name) in paused:
            lane.append(" (paused)", "yellow")
        made.add_row(*([name] if environments > 1 else []), lane, *cells, oldest)
        last = view.environment
    return made


def pause_name(target: Target, environment: str) -> str:
    """``lane 'crawl'``, as people say it."""
    if target.kind == "environment":
        return f"environment {environment!r}"
    return f"lane {target.lane!r}" + (f", {target.dim} {target.key}" if target.kind == "key" else "")


def pause_line(pause: Pause, environment: str, environments: int) -> Text:
    """A pause, for people: what, since when, until when, why."""
    where = f"{environment}: " if environments > 1 and pause.target.lane else ""
    ago = f"was paused {span(pause.since)} ago" if pause.since is not None and pause.since >= 1 else "is paused"
    line = Text(style="yellow").append_text(plain(f"{where}{pause_name(pause.target, environment)} {ago}"))
    line.append(", until it is resumed" if pause.left == math.inf else f", for another {span(pause.left)}")
    return line.append_text(plain(f": {pause.reason}")) if pause.reason else line


def elsewhere_line(found: UncountedRows, environments: int) -> Text:
    """Rows that no lane counts, and what they are: for people."""
    where = f"{found.environment}: " if environments > 1 else ""
    many = f"{found.rows:,}{' or more' if found.rows >= SAMPLE else ''}"
    what = f"{plural(found.rows, 'row')} of table {found.table!r} {plural(found.rows, 'is', 'are')}"
    kinds = "; ".join(f"{_kind(values)}: {number:,}" for values, number in found.kinds)
    rest = found.rows - sum(number for _, number in found.kinds)
    kinds += f"; others: {rest:,}" if rest else ""
    if found.rows >= SAMPLE:
        kinds = f"of the first {SAMPLE:,}: {kinds}"
    return Text(style="yellow").append_text(plain(f"{where}{many} {what} in no lane's state ({kinds})"))


def _kind(columns: dict[str, Any]) -> str:
    """``status = 'new' and flag is null``"""
    said = []
    for column, value in columns.items():
        value = json_values.simple(value)
        text = repr(value if len(value) <= MOST_SAID else f"{value[:MOST_SAID]}…") if isinstance(value, str) else value
        said.append(f"{column} is null" if value is None else f"{column} = {text}")
    return " and ".join(said)


def holder(view: LaneView, row: Row) -> Text:
    """A row's worker, on a terminal without the middle of a long id."""
    name, (beginning, end) = plain(json_values.role(view, row, "worker") or ""), WORKER
    if console.is_terminal and len(name) > beginning + 1 + end:
        return Text(f"{name.plain[:beginning]}…{name.plain[-end:]}")
    return name


def rows_table(found: Sequence[tuple[LaneView, Row]], environments: int) -> Table:
    """Rows with their state, holder, attempts, the time that matters for the state, and the error's beginning."""
    cells: dict[str, list[Text]] = {}
    for view, row in found:
        tries = next((n for r in ("attempts", "failures") if (n := json_values.role(view, row, r)) is not None), "")
        for heading, cell in (
            ("Env", plain(view.environment if environments > 1 else "")),
            ("Id", plain(written(row.id))),
            ("State", Text(row.state or "", COLOURS.get(row.state or "", ""))),
            ("Attempts", Text(str(tries))),
            ("When", Text(when(row))),
            ("Worker", holder(view, row)),
            ("Error", plain(json_values.role(view, row, "error") or "")),
        ):
            cells.setdefault(heading, []).append(cell)
    shown = {heading: column for heading, column in cells.items() if any(column)}
    made = table(*shown, right=["Attempts"])
    if "Error" in shown and console.is_terminal:
        others = sum(max(len(h), *map(len, column)) + 2 for h, column in shown.items() if h != "Error")
        made.columns[-1].max_width, made.columns[-1].overflow = max(console.width - others, 16), "ellipsis"
    for cell_row in zip(*shown.values(), strict=True):
        made.add_row(*cell_row)
    return made


def stuck_table(found: Sequence[tuple[LaneView, Row]], environments: int) -> Table:
    """Rows that hang, the longest silent first."""
    right = ["No sign for", "Running for"]
    made = table(*(["Env"] if environments > 1 else []), "Lane", "Id", "Holder", *right, right=right)
    for view, row in found:
        cells = [plain(view.environment)] if environments > 1 else []
        silent = "never seen" if row.silent_for is None else span(row.silent_for)
        cells += [plain(view.lane.name), plain(written(row.id)), holder(view, row)]
        made.add_row(*cells, Text(silent, "red"), span(row.ages.get("claimed_at")))
    return made


def when(row: Row) -> str:
    """The time that matters for the state a row is in."""
    age = row.ages.get
    if row.state == "ready":
        since = why_rules.ready_for(row.ages)
        return f"for {span(since)}" if since is not None else ""
    if row.state == "excluded":
        return "where does not hold"
    if row.state == "waiting":
        due = age("run_after")
        return f"in {span(-due)}" if due is not None and due < 0 else "held back"
    if row.state == "running":
        return f"for {span(age('claimed_at'))}" if age("claimed_at") is not None else ""
    ended = next((a for r in ("finished_at", "updated_at") if (a := age(r)) is not None), None)
    return f"{span(ended)} ago" if ended is not None else ""


def whole_table(view: LaneView, row: Row) -> Table:
    """All columns of one row."""
    made = table()
    made.add_column(plain(f"{view.environment} / {view.lane.name}"), style="cyan", no_wrap=True)
    made.add_column(plain(f"{written(row.id)}: {row.state or 'in no state of this lane'}"), overflow="fold")
    by_column: dict[str, list[str]] = {}
    for name, column in view.binding.roles.items():
        by_column.setdefault(column, []).append(name)
    for column, value in row.values.items():
        meaning = [name for name in by_column.get(column, []) if name != column]
        label = Text(column).append(f" ({', '.join(meaning)})" if meaning else "", "dim")
        made.add_row(label, Text("null", "dim") if value is None else plain(json_values.simple(value)))
    return made


def workers_table(found: Sequence[dict[str, Any]], environments: int) -> Table:
    """Who works, on what, and when each was last heard of."""
    right = ["Done", "Failed", "Lost", "Seen"]
    made = table("Worker", "State", *right, right=right)
    for worker in found:
        name, lanes = plain(worker["id"]), ", ".join(worker["lanes"])
        name.append("\n" + plain(f"{worker['host']} {worker['pid']}: {lanes}").plain, "dim")
        for job in worker["current"]:
            name.append("\n  ").append_text(_current(job, environments))
        state = worker["state"]
        numbers = [f"{worker[number]:,}" for number in ("completed", "failed", "lost")]
        made.add_row(name, Text(state, COLOURS.get(state, "")), *numbers, f"{span(worker['silent_seconds'])} ago")
    return made


def _current(job: dict[str, Any], environments: int) -> Text:
    where = f"{job['environment']}/" if environments > 1 else ""
    text = plain(f"{where}{job['lane']} {job['id']}, {span(job['seconds'])}")
    if (progress := job.get("progress")) is not None:
        fraction, note = progress
        text.append_text(plain(f", {fraction:.0%}{f' {note}' if note else ''}"))
    return text
