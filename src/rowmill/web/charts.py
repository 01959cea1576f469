"""Charts and the state diagram of a lane, as SVG. The labels of charts are HTML around them: legible at any width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from .formatting import address, clock, count, day, how, rate, short, took

_W, _H = 720, 100
_KINDS = (("done", ("done",)), ("retried", ("retried", "snoozed", "stale")), ("dead", ("dead", "canceled")))


def throughput(history: dict[str, Any]) -> dict[str, Any]:
    """Runs that ended, by minute: done, retrying, dead; one bar for each step."""
    spans = history["spans"]
    sums = [{kind: sum(span[n] for n in names) for kind, names in _KINDS} for span in spans]
    rates = [{k: n / max(span["seconds"], 1) * 60 for k, n in s.items()} for s, span in zip(sums, spans, strict=True)]
    top = _top(max((sum(r.values()) for r in rates), default=0.0))
    step = _W / max(len(spans), 1)
    parts = [_frame()]
    for i, (span, span_rates) in enumerate(zip(spans, rates, strict=True)):
        y, title = float(_H), f"{_when(span, spans)}: " + ", ".join(f"{n:,} {k}" for k, n in sums[i].items())
        bars = Markup("")
        for kind, per_minute in span_rates.items():
            height = per_minute / top * _H
            if height > 0:
                y -= max(height, 0.8)
                bars += Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
                    f"bar {kind}", _n(i * step + 0.5), _n(y), _n(max(step - 1, 1)), _n(max(height, 0.8))
                )
        if bars:
            parts.append(Markup("<g><title>{}</title>{}</g>").format(title, bars))
    now = history["per_minute"]
    label = f"Runs that ended per minute; in the last few minutes {rate(now['done']) or 'none'} done"
    return _chart(parts, label, rate(top), spans, any(sum(s.values()) for s in sums))


def latency(history: dict[str, Any]) -> dict[str, Any]:
    """Run times: p50 is the lower line, p95 the upper."""
    spans = history["spans"]
    top = _top(max((span["p95_seconds"] or 0.0 for span in spans), default=0.0))
    step = _W / max(len(spans), 1)
    parts = [_frame()]
    for name, kind in (("p95_seconds", "p95"), ("p50_seconds", "p50")):
        for run in _runs(spans, name):
            points = " ".join(f"{_n((i + 0.5) * step)},{_n(_H - spans[i][name] / top * _H)}" for i in run)
            if len(run) == 1:
                x, y = points.split(",")
                parts.append(
                    Markup('<path class="line {}" d="M{} {}h{}"/>').format(kind, _n(float(x) - step / 2), y, _n(step))
                )
            else:
                parts.append(Markup('<polyline class="line {}" points="{}"/>').format(kind, points))
    recent = history["recent"]
    label = f"Run times in the last 5 minutes: p50 {took(recent['p50_seconds'])}, p95 {took(recent['p95_seconds'])}"
    return _chart(parts, label, took(top), spans, any(span["p50_seconds"] is not None for span in spans))


def spark(history: dict[str, Any]) -> Markup:
    """A sparkline of done rows per minute."""
    spans = history["spans"]
    per_minute = [span["done"] / max(span["seconds"], 1) * 60 for span in spans]
    top, step = _top(max(per_minute, default=0.0)), 120 / max(len(per_minute) - 1, 1)
    points = " ".join(f"{_n(i * step)},{_n(26 - n / top * 24)}" for i, n in enumerate(per_minute))
    return Markup(
        '<svg class="spark" viewBox="0 0 120 28" preserveAspectRatio="none" role="img" aria-label="Done per minute">'
        '<polyline points="{}"/></svg>'
    ).format(points)


def bars(counts: Sequence[int], hours: float) -> Markup:
    """Counts over time as small bars."""
    top, step = max(max(counts, default=0), 1), 240 / max(len(counts), 1)
    drawn = Markup("").join(
        Markup('<rect x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
            _n(i * step), _n(40 - n / top * 38), _n(step - 1), _n(max(n / top * 38, 1)), f"{n:,}"
        )
        for i, n in enumerate(counts)
        if n
    )
    label = f"{sum(counts):,} over the last {hours:g} hours, at most {max(counts, default=0):,} in one bar"
    return Markup(
        '<svg class="bars" viewBox="0 0 240 40" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<path class="grid" d="M0 39.5H240"/>{}</svg>'
    ).format(label, drawn)


def _chart(parts: list[Markup], label: str, top: str, spans: Sequence[dict[str, Any]], some: bool) -> dict[str, Any]:
    ends = [_when(spans[i], spans) for i in (0, len(spans) // 2)] if spans else ["", ""]
    svg = Markup(
        '<svg class="chart" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(_W, _H, label, Markup("").join(parts))
    return {"svg": svg, "label": label, "top": top, "from": ends[0], "middle": ends[1], "some": some}


def _frame() -> Markup:
    return Markup('<path class="grid" d="M0 0.5H{w}M0 50H{w}M0 99.5H{w}"/>').format(w=_W)


def _runs(spans: Sequence[dict[str, Any]], name: str) -> list[list[int]]:
    """Ranges of spans that have a value."""
    runs: list[list[int]] = []
    for i, span in enumerate(spans):
        if span[name] is None:
            continue
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _top(most: float) -> float:
    """The upper end of an axis: a round number not below the highest value."""
    if most <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(most))
    return next(size * step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if size * step >= most * 0.999)


def _when(span: dict[str, Any], spans: Sequence[dict[str, Any]]) -> str:
    long = spans and spans[-1]["start"] - spans[0]["start"] > 86_400 * 1.2
    return day(span["start"]) if long else clock(span["start"])


def _n(value: float) -> str:
    return f"{value:.1f}"


# -- the state diagram of a lane

_WIDE, _HIGH = 440, 186
_BOX = (104, 58)
_PLACES = {"ready": (8, 22), "running": (168, 22), "done": (328, 22), "waiting": (8, 124), "canceled": (168, 124),
           "dead": (328, 124)}  # fmt: skip
#: What flows from running straight back to ready: taken back from a dead worker; inputs that changed during the run.
_BACK = ("swept", "stale")
_RIGHT, _DOWN, _UP = "l-7 -4v8z", "l-4 -7h8z", "l-4 7h8z"
#: From where to where, the line, its head, where its label stands, and which counts flow along it.
_EDGES: tuple[tuple[str, str, str, str, tuple[int, int], tuple[str, ...]], ...] = (
    ("ready", "running", "M112 51H163", f"M167 51{_RIGHT}", (140, 44), ("started",)),
    ("running", "done", "M272 51H323", f"M327 51{_RIGHT}", (300, 44), ("done",)),
    ("running", "waiting", "M190 80V102H84V119", f"M84 123{_DOWN}", (137, 97), ("retried", "snoozed")),
    ("waiting", "ready", "M40 124V85", f"M40 81{_UP}", (0, 0), ()),
    ("running", "dead", "M250 80V102H380V119", f"M380 123{_DOWN}", (315, 97), ("dead",)),
    ("running", "canceled", "M220 80V119", f"M220 123{_DOWN}", (246, 116), ("canceled",)),
    ("running", "ready", "M200 22V8H80V17", f"M80 21{_DOWN}", (140, 19), _BACK),
)


def diagram(lane: dict[str, Any]) -> Markup:
    """The lane's states with their counts, each a link to its rows, and the rates of the last minutes on the edges."""
    counts, rates = lane["counts"], (lane["history"] or {}).get("per_minute", {})
    top = 0 if any(rates.get(name) for name in _BACK) else 16  # room for the edge above
    parts = [
        Markup('<svg class="diagram" viewBox="0 {} {} {}" aria-label="{}">').format(
            top, _WIDE, _HIGH - top, f"States of {lane['lane']} in {lane['environment']}"
        )
    ]
    for begin, end, line, head, label, names in _EDGES:
        if begin not in counts or end not in counts:
            continue
        flow = sum(rates.get(name) or 0.0 for name in names)
        if names == _BACK and not flow:
            continue
        quiet = "" if flow else " quiet"
        parts.append(
            Markup('<path class="edge{}" d="{}"/><path class="head{}" d="{}"/>').format(quiet, line, quiet, head)
        )
        if flow:
            text = rate(flow) + (f" {' and '.join(n for n in names if rates.get(n))}" if names == _BACK else "")
            parts.append(Markup('<text class="flow" x="{}" y="{}">{}</text>').format(*label, text))
    for state, (x, y) in _PLACES.items():
        if state in counts:
            parts.append(_box(lane, state, x, y))
    return Markup("").join([*parts, Markup("</svg>")])


def _box(lane: dict[str, Any], state: str, x: int, y: int) -> Markup:
    counted = lane["counts"][state]
    where = address("/lane", env=lane["environment"], lane=lane["lane"], state=state)
    title = f"{count(counted)} {state}" + (f" ({how(counted)})" if how(counted) else "")
    empty = " none" if counted["number"] == 0 else ""
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
        where, state, empty, title, x, y, *_BOX, x + 52, y + 18, state, x + 52, y + (38 if some else 43),
        short(counted), note,
    )  # fmt: skip
