"""Charts as SVG without a word in them: their labels are HTML around them, so they stay legible at any width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from .formatting import clock, day, rate, took

_W, _H = 720, 100
_KINDS = (("done", ("done",)), ("retried", ("retried", "snoozed")), ("dead", ("dead", "canceled")))


def throughput(history: dict[str, Any]) -> dict[str, Any]:
    """Runs that ended, by minute: done, to be tried again, dead; one bar for each step."""
    spans = history["spans"]
    sums = [{kind: sum(span[n] for n in names) for kind, names in _KINDS} for span in spans]
    rates = [{k: n / max(span["seconds"], 1) * 60 for k, n in s.items()} for s, span in zip(sums, spans, strict=True)]
    top = _top(max((sum(r.values()) for r in rates), default=0.0))
    step = _W / max(len(spans), 1)
    parts = [_frame()]
    for i, (span, found) in enumerate(zip(spans, rates, strict=True)):
        y, told = float(_H), f"{_when(span, spans)}: " + ", ".join(f"{n:,} {k}" for k, n in sums[i].items())
        bars = Markup("")
        for kind, per_minute in found.items():
            height = per_minute / top * _H
            if height > 0:
                y -= max(height, 0.8)
                bars += Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
                    f"bar {kind}", _n(i * step + 0.5), _n(y), _n(max(step - 1, 1)), _n(max(height, 0.8))
                )
        if bars:
            parts.append(Markup("<g><title>{}</title>{}</g>").format(told, bars))
    now = history["per_minute"]
    label = f"Runs that ended per minute; of late {rate(now['done']) or 'none'} done"
    return _chart(parts, label, rate(top), spans, any(sum(s.values()) for s in sums))


def latency(history: dict[str, Any]) -> dict[str, Any]:
    """How long runs took: half of them no longer than the lower line, 95 of 100 no longer than the upper."""
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
    label = f"Run times; of late half within {took(recent['p50_seconds'])}, 95 % within {took(recent['p95_seconds'])}"
    return _chart(parts, label, took(top), spans, any(span["p50_seconds"] is not None for span in spans))


def spark(history: dict[str, Any]) -> Markup:
    """Done by minute, as a small line."""
    spans = history["spans"]
    found = [span["done"] / max(span["seconds"], 1) * 60 for span in spans]
    top, step = _top(max(found, default=0.0)), 120 / max(len(found) - 1, 1)
    points = " ".join(f"{_n(i * step)},{_n(26 - n / top * 24)}" for i, n in enumerate(found))
    return Markup(
        '<svg class="spark" viewBox="0 0 120 28" preserveAspectRatio="none" role="img" aria-label="Done per minute">'
        '<polyline points="{}"/></svg>'
    ).format(points)


def bars(counts: Sequence[int], hours: float) -> Markup:
    """Counts over time, as small bars."""
    top, step = max(max(counts, default=0), 1), 240 / max(len(counts), 1)
    drawn = Markup("").join(
        Markup('<rect x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
            _n(i * step), _n(40 - n / top * 38), _n(step - 1), _n(max(n / top * 38, 1)), f"{n:,}"
        )
        for i, n in enumerate(counts)
        if n
    )
    label = f"{sum(counts):,} over the last {hours:g} hours, at most {max(counts, default=0):,} at once"
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
    """Stretches of spans that have a value."""
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
