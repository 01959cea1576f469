"""A lane as its state diagram: boxes with counts, edges with what flows along them, as SVG that scales to a phone."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from .formatting import address, count, how, rate, short

WIDTH, HEIGHT = 440, 186
_BOX = (104, 58)
_PLACES = {"ready": (8, 22), "running": (168, 22), "done": (328, 22), "waiting": (8, 124), "canceled": (168, 124),
           "dead": (328, 124)}  # fmt: skip
_RIGHT, _DOWN, _UP = "l-7 -4v8z", "l-4 -7h8z", "l-4 7h8z"
#: From where to where, the line, its head, where its label stands, and which counts flow along it.
_EDGES: tuple[tuple[str, str, str, str, tuple[int, int], tuple[str, ...]], ...] = (
    ("ready", "running", "M112 51H163", f"M167 51{_RIGHT}", (140, 44), ("started",)),
    ("running", "done", "M272 51H323", f"M327 51{_RIGHT}", (300, 44), ("done",)),
    ("running", "waiting", "M190 80V102H84V119", f"M84 123{_DOWN}", (137, 97), ("retried", "snoozed")),
    ("waiting", "ready", "M40 124V85", f"M40 81{_UP}", (0, 0), ()),
    ("running", "dead", "M250 80V102H380V119", f"M380 123{_DOWN}", (315, 97), ("dead",)),
    ("running", "canceled", "M220 80V119", f"M220 123{_DOWN}", (246, 116), ("canceled",)),
    ("running", "ready", "M200 22V8H80V17", f"M80 21{_DOWN}", (140, 19), ("swept",)),
)


def diagram(lane: dict[str, Any]) -> Markup:
    """The lane's states with their counts, each a link to its rows, and the rates of the last minutes on the edges."""
    counts, rates = lane["counts"], (lane["history"] or {}).get("per_minute", {})
    top = 0 if rates.get("swept") else 16  # room for the edge above
    parts = [
        Markup('<svg class="diagram" viewBox="0 {} {} {}" aria-label="{}">').format(
            top, WIDTH, HEIGHT - top, f"States of {lane['lane']} in {lane['environment']}"
        )
    ]
    for begin, end, line, head, label, names in _EDGES:
        if begin not in counts or end not in counts:
            continue
        flow = sum(rates.get(name) or 0.0 for name in names)
        if names == ("swept",) and not flow:
            continue
        quiet = "" if flow else " quiet"
        parts.append(
            Markup('<path class="edge{}" d="{}"/><path class="head{}" d="{}"/>').format(quiet, line, quiet, head)
        )
        if flow:
            text = rate(flow) + (" swept" if names == ("swept",) else "")
            parts.append(Markup('<text class="flow" x="{}" y="{}">{}</text>').format(*label, text))
    for state, (x, y) in _PLACES.items():
        if state in counts:
            parts.append(_box(lane, state, x, y))
    return Markup("").join([*parts, Markup("</svg>")])


def _box(lane: dict[str, Any], state: str, x: int, y: int) -> Markup:
    found = lane["counts"][state]
    where = address("/lane", env=lane["environment"], lane=lane["lane"], state=state)
    told = f"{count(found)} {state}" + (f" ({how(found)})" if how(found) else "")
    empty = " none" if found["number"] == 0 else ""
    # Some of the running rows are stuck; excluded rows stand beside those that wait.
    further = {"running": "stuck", "waiting": "excluded"}.get(state, "")
    some = lane["counts"].get(further, {}).get("number")
    note = (
        Markup('<text class="note" x="{}" y="{}">{} {}</text>').format(x + 52, y + 52, f"{some:,}", further)
        if some
        else ""
    )
    return Markup(
        '<a href="{}" class="state {}{}"><title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="7"/>'
        '<text class="name" x="{}" y="{}">{}</text><text class="count" x="{}" y="{}">{}</text>{}</a>'
    ).format(
        where, state, empty, told, x, y, *_BOX, x + 52, y + 18, state, x + 52, y + (38 if some else 43), short(found),
        note,
    )  # fmt: skip
