"""How gates are shown: as tables for people, as plain values for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ..store.gates.gate_binding import BoundGates
from ..store.inspect import json_values
from ..store.inspect.gate_view import KeyView
from ..store.inspect.lane_view import LaneView
from . import show


def heading(view: LaneView, dim: BoundGates, several: int) -> Text:
    """What is declared, in a line."""
    where = f"{view.environment}/" if several > 1 else ""
    of = f" by {dim.label}" if dim.phrase is not None else ""
    return show.plain(f"{where}{view.lane.name}{of}: {'; '.join(json_values.declared(dim.group))}")


def keys_table(keys: Sequence[KeyView]) -> Table:
    """Keys of one group, for people; columns that say nothing are left out."""
    cells: dict[str, list[Text]] = {}
    for view in keys:
        group, state = view.dim.group, view.state
        running = (
            str(view.running) + (f"/{json_values.most_of(view)}" if group.concurrency else "")
            if group.counts_running
            else ""
        )
        for heading, cell in (
            ("Key", show.plain(view.key if view.dim.phrase is not None else "(the whole lane)")),
            ("Running", Text(running)),
            ("Tokens", Text("" if view.tokens is None else f"{math.floor(view.tokens * 100) / 100:g}")),
            ("Streak", Text(str(state.streak) if state.streak else "")),
            ("Delay", Text(f"{state.delay:.3g} s" if state.delay is not None else "")),
            ("State", _state(view)),
        ):
            cells.setdefault(heading, []).append(cell)
    shown = {heading: column for heading, column in cells.items() if any(column) or heading == "State"}
    made = show.table(*shown, right=["Running", "Tokens", "Streak", "Delay"])
    made.columns[0].no_wrap, made.columns[0].overflow = False, "fold"
    for row in zip(*shown.values(), strict=True):
        made.add_row(*row)
    return made


def _state(view: KeyView) -> Text:
    """What holds a key back, in a few words."""
    told = Text()
    for held in view.held:
        told.append(", " if told else "").append_text(
            Text(style="yellow").append_text(show.plain(_held(view, held.why, held.wait)))
        )
    breaker = view.dim.group.breaker
    if breaker is not None and view.state.streak >= breaker.failures and not any("break" in a.why for a in view.held):
        told.append(", " if told else "").append("half open", "yellow")
    if view.state.most is not None and view.dim.group.concurrency is not None:
        told.append(", " if told else "").append("limit set by hand")
    return told if told else Text("open", "dim")


def _held(view: KeyView, why: str, wait: float | None) -> str:
    more = f" for {show.span(wait)}" if wait is not None and wait != math.inf else ""
    match why:
        case "paused":
            return f"paused{more}{f': {view.state.reason}' if view.state.reason else ''}"
        case "closed":
            return f"closed by Retry-After{more}"
        case "breaker":
            return f"breaker open{more}"
        case "breaker's probe":
            return "half open, its probe is running"
        case "concurrency":
            return "full"
        case "rate":
            return f"next token in {wait:.3g} s" if more else "rate is 0"
        case _:
            return f"{why}{more}"
