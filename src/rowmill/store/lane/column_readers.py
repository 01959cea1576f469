"""Columns of a claimed row, each decoded when it is read: most rows are read in a column or two."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import UnreadableValue
from ..unreadable_values import Unreadable, inside

Reader = Callable[[Sequence[Any]], Any]


class Readers(dict[str, Reader]):
    """A reader for each column that was ever asked for."""

    def __init__(self, make: Callable[[str], Reader]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, column: str) -> Reader:
        reader = self[column] = self._make(column)
        return reader


def reading(at: int, column: str, decode: Callable[[Any], Any] | None, *, checked: bool) -> Reader:
    """Reads the value at that place; ``decode``: what makes it of what the driver gives, if anything has to.

    ``checked``: the driver may give an Unreadable; then the error says which column it is.
    """
    if decode is None and not checked:
        return operator.itemgetter(at)

    def read(row: Sequence[Any]) -> Any:
        raw = row[at]
        if checked and (wrong := inside(raw)) is not None:
            raise unreadable(column, wrong)
        if decode is None:
            return raw
        try:
            return None if raw is None else decode(raw)
        except (RecursionError, TypeError, ValueError, LookupError) as error:
            if _too_much(error):
                raise unreadable(column, Unreadable(str(raw), str(error))) from None
            return raw  # SQLite keeps whatever was put in, whatever the column says

    return read


def _too_much(error: Exception) -> bool:
    """The text is JSON, and says more than Python can hold: too many levels, or digits."""
    return isinstance(error, RecursionError) or "integer string conversion" in str(error)


def unreadable(column: str, value: Unreadable) -> UnreadableValue:
    """What a handler meets that asks for such a column."""
    shown = value.text if len(value.text) <= 60 else f"{value.text[:60]}…"
    return UnreadableValue(
        f"column {column!r} holds {shown}, which Python cannot hold: {value.reason}",
        hint=f"correct the row's {column}, or leave the column out of what the handler reads",
    )
