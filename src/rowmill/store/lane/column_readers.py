"""Columns of a claimed row, each decoded on first access: most handlers read only one or two."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import UnreadableValue
from ..unreadable_values import Unreadable, inside

Reader = Callable[[Sequence[Any]], Any]


class Readers(dict[str, Reader]):
    """A reader for each column that was ever accessed."""

    def __init__(self, make: Callable[[str], Reader]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, column: str) -> Reader:
        reader = self[column] = self._make(column)
        return reader


def reading(at: int, column: str, decode: Callable[[Any], Any] | None, *, checked: bool) -> Reader:
    """Return a reader for the value at that position. ``decode`` converts the driver's value, if needed.

    ``checked``: the driver may return an Unreadable; then the error names the column.
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
            return raw  # SQLite stores any value in any column

    return read


def _too_much(error: Exception) -> bool:
    """Whether the text is valid JSON that exceeds Python's limits: nesting, or digits of a number."""
    return isinstance(error, RecursionError) or "integer string conversion" in str(error)


def unreadable(column: str, value: Unreadable) -> UnreadableValue:
    """The error for a handler that reads such a column."""
    shown = value.text if len(value.text) <= 60 else f"{value.text[:60]}…"
    return UnreadableValue(
        f"column {column!r} holds {shown}, which Python cannot hold: {value.reason}",
        hint=f"correct the row's {column}, or leave the column out of what the handler reads",
    )
