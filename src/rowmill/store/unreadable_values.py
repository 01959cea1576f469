"""Values that a database can store and Python cannot: the year 10000, a date BC, 24:00, JSON with thousands of digits.

The driver decodes a whole reply at once, so one such value would make every row of the reply fail. Connections prepared
by ``tolerate`` return an ``Unreadable`` in its place. They decode times in Python, which is slower, so only lanes that
met such a value use them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

from asyncpg import Range

_EPOCH = datetime(2000, 1, 1)
_DAY, _CYCLE = 86_400_000_000, 146_097  # microseconds in a day; days after which the calendar repeats: 400 years
_MOST, _LEAST = 2**63 - 1, -(2**63)  # the server's values for infinity and -infinity
_MOST_DAYS, _LEAST_DAYS = 2**31 - 1, -(2**31)


@dataclass(frozen=True, repr=False)
class Unreadable:
    """A value as the database prints it, and why Python cannot hold it."""

    text: str
    reason: str
    #: The value as it was received, so that it can be sent back.
    raw: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def inside(value: Any) -> Unreadable | None:
    """The unreadable part of a value: the value itself, or a part of a list or a range."""
    if isinstance(value, Unreadable):
        return value
    parts = value if isinstance(value, list) else (value.lower, value.upper) if isinstance(value, Range) else ()
    return next((wrong for part in parts if (wrong := inside(part)) is not None), None)


def parse_json(text: str) -> Any:
    """Parse JSON; returns Unreadable if it is nested too deeply, or has a number with too many digits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(text, str(error) or type(error).__name__)


def parse_text(raw: bytes) -> Any:
    """Decode text; returns Unreadable if it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return Unreadable(raw.decode(errors="backslashreplace"), str(error), raw)


async def tolerate(connection: Any) -> None:
    """Make an asyncpg connection return values that it cannot decode as Unreadable. Nothing else changes."""
    for name, (decode, encode, show) in _TIMES.items():
        await connection.set_type_codec(
            name, schema="pg_catalog", format="tuple", decoder=_tolerant(decode, show), encoder=_sent(encode)
        )
    for name in ("text", "varchar", "bpchar"):
        await connection.set_type_codec(
            name, schema="pg_catalog", format="binary", decoder=parse_text, encoder=_sent(str.encode)
        )


def _tolerant(decode: Callable[..., Any], show: Callable[..., str]) -> Callable[[tuple[Any, ...]], Any]:
    def read(raw: tuple[Any, ...]) -> Any:
        try:
            return decode(*raw)
        except (ValueError, OverflowError) as error:
            return Unreadable(show(*raw), str(error), raw)

    return read


def _sent(encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: value.raw if isinstance(value, Unreadable) else encode(value)


# -- times in the server's format: microseconds or days since 2000


def _timestamp(micros: int) -> datetime:
    if micros in (_MOST, _LEAST):
        return datetime.max if micros == _MOST else datetime.min
    return _EPOCH + timedelta(microseconds=micros)


def _timestamptz(micros: int) -> datetime:
    at = _timestamp(micros)
    return at if micros in (_MOST, _LEAST) else at.replace(tzinfo=UTC)


def _date(days: int) -> date:
    if days in (_MOST_DAYS, _LEAST_DAYS):
        return date.max if days == _MOST_DAYS else date.min
    return _EPOCH.date() + timedelta(days=days)


def _time(micros: int) -> time:
    if micros == _DAY:
        raise ValueError("the last moment of a day is 23:59:59.999999")
    return (_EPOCH + timedelta(microseconds=micros)).time()


def _timetz(micros: int, west: int) -> time:
    return _time(micros).replace(tzinfo=timezone(timedelta(seconds=-west)))


def _interval(months: int, days: int, micros: int) -> timedelta:
    years, months = divmod(abs(months), 12) if months >= 0 else (-(-months // 12), -(-months % 12))
    return timedelta(days=days + 365 * years + 30 * months, microseconds=micros)


def _micros(at: datetime) -> tuple[int]:
    if at.tzinfo is None and at in (datetime.max, datetime.min):
        return (_MOST if at == datetime.max else _LEAST,)
    naive = at.astimezone(UTC).replace(tzinfo=None) if at.tzinfo is not None else at
    return ((naive - _EPOCH) // timedelta(microseconds=1),)


def _days(day: date) -> tuple[int]:
    if day in (date.max, date.min):
        return (_MOST_DAYS if day == date.max else _LEAST_DAYS,)
    return ((day - _EPOCH.date()).days,)


def _of_day(at: time) -> tuple[int]:
    return ((datetime.combine(_EPOCH, at.replace(tzinfo=None)) - _EPOCH) // timedelta(microseconds=1),)


def _of_day_west(at: time) -> tuple[int, int]:
    offset = at.utcoffset() or timedelta(0)
    return (*_of_day(at), -int(offset.total_seconds()))


def _span(value: timedelta) -> tuple[int, int, int]:
    return (0, value.days, value.seconds * 1_000_000 + value.microseconds)


def _show_date(days: int) -> str:
    """Print any day, by the calendar's 400-year cycle."""
    cycles, rest = divmod(days, _CYCLE)
    day = _EPOCH.date() + timedelta(days=rest)
    year = day.year + 400 * cycles
    return f"{year:04}-{day:%m-%d}" if year > 0 else f"{1 - year:04}-{day:%m-%d} BC"


def _show_timestamp(micros: int) -> str:
    days, rest = divmod(micros, _DAY)
    day, *era = _show_date(days).split(" ")
    return " ".join([day, str(_time(rest)), *era])


_TIMES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., str]]] = {
    "timestamptz": (_timestamptz, _micros, lambda micros: f"{_show_timestamp(micros)} UTC"),
    "timestamp": (_timestamp, _micros, _show_timestamp),
    "date": (_date, _days, _show_date),
    "time": (_time, _of_day, lambda micros: "24:00:00"),
    "timetz": (_timetz, _of_day_west, lambda micros, west: f"24:00:00{-west // 3600:+03}"),
    "interval": (_interval, _span, lambda months, days, micros: f"{months} months {days} days {micros} microseconds"),
}
