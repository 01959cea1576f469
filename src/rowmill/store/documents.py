"""Values on their way to PostgreSQL in one JSON document, which the server itself types."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from typing import Any
from uuid import UUID


def plain(value: Any) -> Any:
    """Values JSON has no word for, as text the server can read in any type."""
    if isinstance(value, (datetime, date, clock_time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return f"{value // timedelta(microseconds=1)} microseconds"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "\\x" + bytes(value).hex()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    return str(value)


def clean(value: Any) -> Any:
    """Text as JSON on the server takes it: scraped text has NUL and lone surrogates, which fail a whole batch."""
    if isinstance(value, str):
        return value if value.isascii() and "\x00" not in value else _without_poison(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {clean(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return value


def _without_poison(text: str) -> str:
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
