"""Columns of a claimed row, each decoded when it is read: most rows are read in a column or two."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

Reader = Callable[[Sequence[Any]], Any]


class Readers(dict[str, Reader]):
    """A reader for each column that was ever asked for."""

    def __init__(self, make: Callable[[str], Reader]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, column: str) -> Reader:
        reader = self[column] = self._make(column)
        return reader


def reading(at: int, decode: Callable[[Any], Any] | None) -> Reader:
    """Reads the value at that place; ``decode``: what makes it of what the driver gives, if anything has to."""
    if decode is None:
        return operator.itemgetter(at)

    def read(row: Sequence[Any]) -> Any:
        raw = row[at]
        try:
            return None if raw is None else decode(raw)
        except (TypeError, ValueError, LookupError):  # SQLite keeps whatever was put in, whatever the column says
            return raw

    return read
