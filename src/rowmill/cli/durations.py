"""Durations and times as people write them on a command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from .app import UsageError

_UNITS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(sorted(_UNITS, key=len, reverse=True))})\s*")
#: What is longer than this was not meant.
_MOST = timedelta(days=3650)


def duration(text: str, what: str, *, bare: bool = False) -> timedelta:
    """``90s``, ``10m``, ``1h30m``, ``2d``; ``bare``: a number alone is seconds."""
    plain, seconds, at = text.strip().lower(), 0.0, 0
    if bare and re.fullmatch(r"\d+(?:\.\d+)?", plain):
        plain += "s"
    while at < len(plain) and (part := _PART.match(plain, at)):
        seconds, at = seconds + float(part[1]) * _UNITS[part[2]], part.end()
    if at < len(plain) or not plain:
        raise UsageError(f"{what}: {text!r} is not a duration", hint="90s, 10m, 1h30m or 2d")
    if not 0 < seconds <= _MOST.total_seconds():
        raise UsageError(f"{what}: {text!r} is not between a moment and ten years", hint="90s, 10m, 1h30m or 2d")
    return timedelta(seconds=seconds)


def moment(text: str, what: str) -> datetime:
    """``2027-01-31T08:00+01:00``, or ``18:30`` for the next time it is that late; without a zone it is UTC."""
    now = datetime.now(UTC)
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text.strip()):
            hour, minute = map(int, text.split(":"))
            found = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return found if found > now else found + timedelta(days=1)
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"{what}: {text!r} is not a time", hint="18:30 or 2027-01-31T08:00 (UTC), or with +01:00"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
