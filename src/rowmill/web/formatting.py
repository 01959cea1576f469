"""Formats numbers, times and addresses for the pages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request

from ..ops.documents import ready_for
from ..ops.documents import span as plain_span
from ..plural import counted, plural


def number(value: float | None) -> str:
    """A number with thousands separators."""
    return "" if value is None else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def count(value: dict[str, Any] | None) -> str:
    """A count and how sure it is: ``12``, ``10,000+``, ``≈ 4,820,000``, ``?``."""
    if value is None or value["how"] == "none":
        return "–"
    if value["number"] is None:
        return "?"
    mark = {"estimate": "≈\u00a0", "at_least": ""}.get(value["how"], "")
    return f"{mark}{value['number']:,}{'+' if value['how'] == 'at_least' else ''}"


def short(value: dict[str, Any] | None) -> str:
    """A short count: ``≈ 4.82M``."""
    if value is None or value["number"] is None or value["number"] < 100_000:
        return count(value)
    mark = {"estimate": "≈\u00a0"}.get(value["how"], "")
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value["number"] >= size:
            return f"{mark}{value['number'] / size:.3g}{unit}{'+' if value['how'] == 'at_least' else ''}"
    return count(value)


def how(value: dict[str, Any] | None) -> str:
    """An explanation of a count's mark."""
    return {
        "estimate": "an estimate from the database's statistics",
        "at_least": "a lower bound: counting stops there",
        "unknown": "counting took too long",
    }.get((value or {}).get("how", ""), "")


def rate(per_minute: float | None) -> str:
    """``12/min``, ``1.2k/min``, ``24/h``."""
    if not per_minute or per_minute < 0:
        return ""
    if per_minute >= 1000:
        return f"{per_minute / 1000:.3g}k/min"
    if per_minute >= 1:
        return f"{per_minute:.3g}/min"
    return f"{max(per_minute * 60, 0.1):.2g}/h"


def span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    seconds = max(float(seconds), 0.0)
    return plain_span(seconds if seconds < 1 else round(seconds, 1) if seconds < 10 else round(seconds))


def took(seconds: float | None) -> str:
    """A run time: down to milliseconds."""
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else plain_span(seconds)


def ago(seconds: float | None) -> str:
    """``3 min ago``, ``in 2 h``."""
    if seconds is None:
        return ""
    if abs(seconds) < 1.5:
        return "just now"
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def clock(epoch: float) -> str:
    """The time of day in UTC."""
    return f"{datetime.fromtimestamp(epoch, UTC):%H:%M}"


def day(epoch: float) -> str:
    """Day and time in UTC."""
    return f"{datetime.fromtimestamp(epoch, UTC):%d %b %H:%M}"


def moment(text: Any) -> str:
    """A time as people read it, to the second, in UTC."""
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return str(text)
    return f"{(at if at.tzinfo is None else at.astimezone(UTC)):%Y-%m-%d %H:%M:%S}"


def since(text: Any) -> str:
    """How long ago a time was."""
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return str(text)
    return ago(max((datetime.now(UTC) - (at if at.tzinfo else at.replace(tzinfo=UTC))).total_seconds(), 0.0))


def size(number: float | None) -> str:
    """A number of bytes, in a readable unit."""
    if not number:
        return ""
    for unit, name in ((2**30, "GB"), (2**20, "MB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number / 1024:.0f} kB"


def address(path: str, **query: Any) -> str:
    """A path with its query; what is None or empty is left out, a list is given again and again."""
    pairs: list[tuple[str, str]] = []
    for name, value in query.items():
        if isinstance(value, (list, tuple)):
            pairs += [(name, str(part)) for part in value]
        elif value not in (None, "", False):
            pairs.append((name, "1" if value is True else str(value)))
    return f"{path}?{urlencode(pairs)}" if pairs else path


def with_query(request: Request, **changed: Any) -> str:
    """This page with some of its query changed; None takes a name out."""
    left = [(k, v) for k, v in request.query_params.multi_items() if k not in changed and k not in ("said", "live")]
    left += [(k, str(v)) for k, v in changed.items() if v is not None]
    return f"{request.url.path}?{urlencode(left)}" if left else request.url.path


_WORDS = (number, count, short, how, rate, span, took, ago, clock, day, moment, since, size)
FILTERS: dict[str, Any] = {word.__name__: word for word in (*_WORDS, ready_for, counted, plural)}
