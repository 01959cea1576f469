"""How gates are shown: as tables for people, as plain values for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..gates import Group as Gates
from ..store.gate_view import KeyView
from ..store.gating import Dimension
from ..store.inspect import LaneView
from . import show


def declared(group: Gates) -> list[str]:
    """A group's gates, in words."""
    told = []
    if group.concurrency is not None:
        told.append(f"at most {group.concurrency.limit} running")
    if group.process is not None:
        told.append(f"at most {group.process.limit} running in each process")
    if (rate := group.rate) is not None:
        if rate.adaptive is not None:
            told.append(f"adaptive rate, {rate.adaptive.least:g} to {rate.adaptive.most:g} s between starts")
        elif rate.source is not None:
            told.append(f"rate from {rate.source.table}.{rate.source.column} per {_per(rate.per.total_seconds())}")
        else:
            told.append(f"{rate.n:g} starts per {_per(rate.per.total_seconds())}, {rate.capacity(rate.n):g} at once")
    if group.breaker is not None:
        cooldown = show.span(group.breaker.cooldown.total_seconds())
        told.append(f"breaker after {group.breaker.failures} failures, for {cooldown}")
    if group.pace is not None:
        told.append(f"pace of {group.pace.n} starts per {_per(group.pace.seconds)}")
    return told


def _per(seconds: float) -> str:
    return {1.0: "s", 60.0: "min", 3600.0: "h", 86400.0: "d"}.get(seconds, f"{seconds:g} s")


def heading(view: LaneView, dim: Dimension, several: int) -> Text:
    """What is declared, in a line."""
    where = f"{view.environment}/" if several > 1 else ""
    of = f" by {dim.label}" if dim.phrase is not None else ""
    return show.plain(f"{where}{view.lane.name}{of}: {'; '.join(declared(dim.group))}")


def gate_value(view: LaneView, dim: Dimension, keys: Sequence[KeyView]) -> dict[str, Any]:
    """One group of gates with some of its keys, for scripts."""
    return {
        "environment": view.environment,
        "lane": view.lane.name,
        "by": dim.group.by,
        "label": dim.label,
        "declared": declared(dim.group),
        "keys": [key_value(key) for key in keys],
    }


def key_value(view: KeyView) -> dict[str, Any]:
    """One key's state, for scripts; durations in seconds, past ones left out."""
    state, group = view.state, view.dim.group
    found: dict[str, Any] = {
        "key": view.key if view.dim.phrase is not None else None,
        "held_back": [{"by": a.why, "seconds": _finite(a.wait)} for a in view.held],
        "running": view.running if group.counts_running else None,
        "most": _most(view),
        "tokens": None if view.tokens is None else round(view.tokens, 3),
        "streak": state.streak if group.breaker is not None else None,
        "delay_seconds": state.delay,
        "open_seconds": _ahead(state.open_for),
        "closed_seconds": _ahead(state.closed_for),
        "paused": (state.paused_for or 0.0) > 0,
        "paused_seconds": _ahead(state.paused_for),
        "reason": state.reason if (state.paused_for or 0.0) > 0 else None,
    }
    return found


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or seconds == math.inf else round(seconds, 3)


def _ahead(seconds: float | None) -> float | None:
    return _finite(seconds) if seconds is not None and seconds > 0 else None


def _most(view: KeyView) -> int | None:
    limit = view.dim.group.concurrency
    if limit is None:
        return None
    return view.state.most if view.state.most is not None else limit.limit


def keys_table(keys: Sequence[KeyView]) -> Table:
    """Keys of one group, for people; columns that say nothing are left out."""
    cells: dict[str, list[Text]] = {}
    for view in keys:
        group, state = view.dim.group, view.state
        running = str(view.running) + (f"/{_most(view)}" if group.concurrency else "") if group.counts_running else ""
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
