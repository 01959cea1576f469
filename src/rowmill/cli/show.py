"""How documents are shown on a terminal: rows, counts, pauses and workers as tables and lines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..declare.states import SEEN
from ..ops import documents
from ..plural import counted, plural
from .app import console, for_app, plain

Document = dict[str, Any]
COLOURS = {"ready": "cyan", "running": "blue", "busy": "blue", "done": "green", "dead": "red", "stuck": "red"}
#: Letters that are shown of a state's value; and of a worker's id, its beginning and its end.
_VALUE, _WORKER = 40, (14, 6)
#: A column of errors with less room than this is of no use.
_ERROR = 24


def span(seconds: float | None) -> str:
    return "" if seconds is None else documents.span(max(round(seconds), 0))


def ago(moment: str | None) -> float | None:
    """Seconds since a time of a document."""
    return None if moment is None else (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def table(*headings: str, right: Sequence[str] = ()) -> Table:
    """An empty table: numbers to the right and never cut; names are folded where the line is too short."""
    # A line below the headings is for the eye: in a pipe it would be as long as the longest error.
    ruled, between = (box.SIMPLE_HEAD, 1) if console.is_terminal else (None, 2)
    made = Table(box=ruled, padding=(0, between, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for heading in headings:
        folds = heading in ("Env", "Lane", "Worker", "Id")
        made.add_column(heading, justify="right" if heading in right else "left", no_wrap=not folds, overflow="fold")
    return made


def rows_with_notes(
    headings: Sequence[str], rows: Sequence[Sequence[Text]], notes: Sequence[Text], right: Sequence[str] = ()
) -> RenderableType:
    """A table for a narrow terminal: a row's long text is on the line below it, so that ids and names stay whole."""
    widths = [
        max(len(heading), *map(len, cells)) for heading, cells in zip(headings, zip(*rows, strict=True), strict=True)
    ]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= console.width else 1

    def line(cells: Sequence[Text]) -> Text:
        padded = []
        for heading, cell, width in zip(headings, cells, widths, strict=True):
            space = " " * (width - len(cell))
            padded.append(Text(space).append_text(cell) if heading in right else cell.copy().append(space))
        made = Text(" " * gap).join(padded)
        made.rstrip()
        return made

    parts: list[RenderableType] = [line([Text(heading, "bold") for heading in headings])]
    parts.append(Text("─" * min(sum(widths) + gap * (len(widths) - 1), console.width), no_wrap=True))
    for cells, note in zip(rows, notes, strict=True):
        parts.append(line(cells))
        if note.plain:
            parts.append(Padding(note, (0, 0, 0, 2)))
    return Group(*parts)


def count(lane: Document, state: str) -> Text:
    """A count: blank where there is no such state, a question mark where counting took too long."""
    number = lane["counts"].get(state)
    if state in lane["unknown"]:
        return Text("?", "yellow")
    if number is None:
        return Text("")
    more = "+" if state in lane["at_least"] else ""
    return Text(f"{number:,}{more}", COLOURS.get(state, "") if number else "dim")


def counts_table(lanes: Sequence[Document], environments: int) -> Table:
    """Lanes by state; those that are paused have a mark."""
    some = {
        "canceled": any(lane["counts"]["canceled"] is not None or "canceled" in lane["unknown"] for lane in lanes),
        "excluded": any(lane["counts"]["excluded"] or "excluded" in lane["unknown"] for lane in lanes),
    }
    shown = [state for state in SEEN if some.get(state, True)]
    shown.insert(shown.index("running") + 1, "stuck")
    headings = [state.capitalize() for state in shown] + ["Oldest"]
    made = table(*(["Env"] if environments > 1 else []), "Lane", *headings, right=headings)
    last = None
    for lane in lanes:
        oldest = Text(span(lane["oldest_ready_seconds"]))
        if lane["oldest_ready_seconds"] is None and lane["counts"]["ready"]:
            oldest = Text("-")  # no column says since when
        elif "ready" in lane["at_least"]:
            oldest = Text(f"> {oldest}")
        environment = plain(lane["environment"]) if lane["environment"] != last else Text("")
        name = plain(lane["lane"]).append(" (paused)" if lane["paused"] else "", "yellow")
        cells = [count(lane, state) for state in shown]
        made.add_row(*([environment] if environments > 1 else []), name, *cells, oldest)
        last = lane["environment"]
    return made


def pause_name(pause: Document) -> str:
    """``lane 'crawl'``, as people say it."""
    if pause["lane"] is None:
        return f"environment {pause['environment']!r}"
    return f"lane {pause['lane']!r}" + (f", {pause['by']} {pause['key']}" if pause["by"] else "")


def pause_line(pause: Document, environments: int) -> Text:
    """A pause: what, since when, until when, why."""
    where = f"{pause['environment']}: " if environments > 1 and pause["lane"] else ""
    since, left = ago(pause["since"]), pause["seconds_left"]
    paused = f"was paused {span(since)} ago, and stays paused" if since is not None and since >= 1 else "is paused"
    line = Text(style="yellow").append_text(plain(f"{where}{pause_name(pause)} {paused}"))
    line.append(" until it is resumed" if left is None else f" for another {span(left)}")
    return line.append_text(plain(f": {pause['reason']}")) if pause["reason"] else line


def elsewhere_line(rows: Document, environments: int) -> Text:
    """Rows that no lane counts, and what they are."""
    where, number = f"{rows['environment']}: " if environments > 1 else "", rows["rows"]
    many = f"{number:,}{' or more' if rows['at_least'] else ''}"
    what = f"{plural(number, 'row')} of table {rows['table']!r} {plural(number, 'is', 'are')}"
    kinds = "; ".join(f"{_kind(kind['columns'])}: {kind['rows']:,}" for kind in rows["kinds"])
    rest = number - sum(kind["rows"] for kind in rows["kinds"])
    kinds += f"; others: {rest:,}" if rest else ""
    if rows["at_least"]:
        kinds = f"of the first {number:,}: {kinds}"
    return Text(style="yellow").append_text(plain(f"{where}{many} {what} in no state of any lane ({kinds})"))


def _kind(columns: Document) -> str:
    """``status = 'new' and flag is null``"""
    tests = []
    for column, value in columns.items():
        text = repr(value if len(value) <= _VALUE else f"{value[:_VALUE]}…") if isinstance(value, str) else value
        tests.append(f"{column} is null" if value is None else f"{column} = {text}")
    return " and ".join(tests)


def holder(row: Document) -> Text:
    """A row's worker, on a terminal without the middle of a long id."""
    name, (beginning, end) = plain(row.get("worker") or ""), _WORKER
    if console.is_terminal and len(name) > beginning + 1 + end:
        return Text(f"{name.plain[:beginning]}…{name.plain[-end:]}")
    return name


def rows_table(rows: Sequence[Document], environments: int) -> RenderableType:
    """Rows with their state, holder, attempts, the time that matters for the state, and the error's beginning."""
    cells: dict[str, list[Text]] = {}
    for row in rows:
        tries = next((n for name in ("attempts", "failures") if (n := row.get(name)) is not None), "")
        for heading, cell in (
            ("Env", plain(row["environment"] if environments > 1 else "")),
            ("Id", plain(row["key"])),
            ("State", Text(row["state"] or "", COLOURS.get(row["state"] or "", ""))),
            ("Attempts", Text(str(tries))),
            ("When", Text(when(row))),
            ("Worker", holder(row)),
            ("Error", plain(row.get("error") or "")),
        ):
            cells.setdefault(heading, []).append(cell)
    shown = {heading: column for heading, column in cells.items() if any(column)}
    made = table(*shown, right=["Attempts"])
    if "Error" in shown and console.is_terminal:
        others = sum(max(len(h), *map(len, column)) + 2 for h, column in shown.items() if h != "Error")
        if console.width - others < _ERROR:
            errors = shown.pop("Error")
            for error in errors:
                error.no_wrap, error.overflow = True, "ellipsis"
            return rows_with_notes(list(shown), list(zip(*shown.values(), strict=True)), errors, ["Attempts"])
        made.columns[-1].max_width, made.columns[-1].overflow = console.width - others, "ellipsis"
    for cell_row in zip(*shown.values(), strict=True):
        made.add_row(*cell_row)
    return made


def stuck_table(rows: Sequence[Document], environments: int) -> Table:
    """Stuck rows, the longest silent first."""
    right = ["Last heartbeat", "Running for"]
    made = table(*(["Env"] if environments > 1 else []), "Lane", "Id", "Worker", *right, "Back at", right=right)
    for row in rows:
        cells = [plain(row["environment"])] if environments > 1 else []
        silent = "never" if row["silent_seconds"] is None else f"{span(row['silent_seconds'])} ago"
        cells += [plain(row["lane"]), plain(row["key"]), holder(row)]
        back = clock_time(row["until"]) or ("next sweep" if row["swept"] else "no live worker")
        made.add_row(*cells, Text(silent, "red"), span(row["running_seconds"]), back)
    return made


def stuck_notes(rows: Sequence[Document], reference: str | None) -> list[Text]:
    """When stuck rows come back, and what to do."""
    notes, release = [], for_app("rowmill release APP --stuck", reference)
    if never := [row for row in rows if row["silent_seconds"] is None and row["running_seconds"] is None]:
        lease = span(max(row["lease_seconds"] for row in never))
        note = "never: the row shows neither a claim time nor a heartbeat. Another program may have set its state."
        notes.append(plain(f"{note} A worker takes it back {lease} (the lease) after it first sees it."))
    if lanes := sorted({row["lane"] for row in rows if not row["swept"]}):
        which = f"{plural(len(lanes), 'lane')} {', '.join(map(repr, lanes))}"
        tries = f"{for_app('rowmill run APP', reference)}, or {release}"
        notes.append(plain(f"No live worker serves {which}, so nothing takes these rows back. Try: {tries}"))
    elif never:
        notes.append(plain(f"Try: {release} takes it back now"))
    return notes


def held_by_dead_line(entry: Document, environments: int, reference: str | None) -> Text:
    """Rows of a dead worker whose lease has not ended yet, and when they are taken back."""
    where, number = f"{entry['environment']}: " if environments > 1 else "", entry["rows"]
    what = f"holds {counted(number, 'row')} of lane {entry['lane']!r} ({entry['evidence']})"
    line = plain(f"{where}dead worker {entry['worker']} {what}; ")
    if not entry["swept"]:
        return line.append(for_app("no live worker takes them back. Try: rowmill run APP", reference))
    end = f"by about {clock_time(entry['until'])} UTC" if entry["until"] else "with the next sweep"
    return line.append(f"{plural(number, 'it is', 'they are')} taken back {end}")


def clock_time(moment: str | None) -> str:
    """The time of day, in UTC, of a time in a document."""
    return f"{datetime.fromisoformat(moment):%H:%M:%S}" if moment else ""


def when(row: Document) -> str:
    """The time that matters for the state a row is in."""
    age = row["ages"].get
    if row["state"] == "ready":
        since = documents.ready_for(row["ages"])
        return f"for {span(since)}" if since is not None else ""
    if row["state"] == "excluded":
        return "where is false"
    if row["state"] == "waiting":
        due = age("run_after")
        return f"in {span(-due)}" if due is not None and due < 0 else "held back"
    if row["state"] == "running":
        return f"for {span(age('claimed_at'))}" if age("claimed_at") is not None else ""
    ended = next((a for r in ("finished_at", "updated_at") if (a := age(r)) is not None), None)
    return f"{span(ended)} ago" if ended is not None else ""


def whole_table(row: Document) -> Table:
    made = table()
    made.add_column(plain(f"{row['environment']} / {row['lane']}"), style="cyan", no_wrap=True)
    made.add_column(plain(f"{row['key']}: " + (row["state"] or "in none of this lane's states")), overflow="fold")
    for column, value in row["columns"].items():
        meaning = [name for name in row["roles"].get(column, []) if name != column]
        label = Text(column).append(f" ({', '.join(meaning)})" if meaning else "", "dim")
        made.add_row(label, Text("null", "dim") if value is None else plain(value))
    return made


def workers_table(workers: Sequence[Document], environments: int) -> Table:
    """The workers: what each runs, and when it was last seen."""
    right = ["Done", "Failed", "Lost", "Seen"]
    made = table("Worker", "State", *right, right=right)
    for worker in workers:
        name, lanes = plain(worker["id"]), ", ".join(worker["lanes"])
        about = f"host {worker['host']}, pid {worker['pid']}, {plural(len(worker['lanes']), 'lane')} {lanes}"
        name.append("\n  " + plain(about).plain, "dim")
        state, current = worker["state"], worker["current"]
        if worker["process_gone"] or worker["lock_missing"]:
            what = "its process is gone" if worker["process_gone"] else "its session with the database is gone"
            name.append(f"\n  {what}", "red")
        if state == "dead" and current:
            name.append(f"\n  held {counted(rows_of(current), 'row')} when last seen")
        for job in current if state != "dead" else ():
            name.append("\n  ").append_text(_current(job, environments))
        numbers = [f"{worker[number]:,}" for number in ("completed", "failed", "lost")]
        made.add_row(name, Text(state, COLOURS.get(state, "")), *numbers, f"{span(worker['silent_seconds'])} ago")
    return made


def rows_of(current: Sequence[Document]) -> int:
    """How many rows these runs hold: a chunk is one run of several."""
    return sum(job.get("rows", 1) for job in current)


def run_name(job: Document) -> str:
    """A run by the id of its row, or of the first of its chunk."""
    more = job.get("rows", 1) - 1
    return f"{job['id']} and {counted(more, 'more row')}" if more else str(job["id"])


def _current(job: Document, environments: int) -> Text:
    where = f"{job['environment']}/" if environments > 1 else ""
    text = plain(f"{where}{job['lane']} {run_name(job)}, {span(job['seconds'])}")
    if (progress := job.get("progress")) is not None:
        fraction, note = progress
        text.append_text(plain(f", {fraction:.0%}{f' {note}' if note else ''}"))
    return text
