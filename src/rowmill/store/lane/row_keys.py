"""A row's key, as people write it and as a statement takes it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any
from uuid import UUID

import sqlalchemy as sa

from ...errors import DeclarationError
from ..dialect import dialect_named
from .binding import Binding

if TYPE_CHECKING:
    from .statements import Statements

Key = tuple[Any, ...]


class Placeholders:
    """The parameters of one statement, in the order in which they were added."""

    def __init__(self, binding: Binding) -> None:
        self._binding, self._sql = binding, dialect_named(binding.dialect.name)
        self._values: list[Any] = []

    def copy(self) -> Placeholders:
        """A copy, to which other parameters can be added."""
        other = Placeholders(self._binding)
        other._values = list(self._values)
        return other

    def given(self) -> Any:
        """The values in the form that the driver expects."""
        return self._sql.bound(self._values)

    def add(self, value: Any, column: str | None = None) -> str:
        """Add a value and return its SQL placeholder. On PostgreSQL it is cast from text to the column's type."""
        self._values.append(value)
        return self._sql.bind(len(self._values), value, self._binding.sql_types.get(column) if column else None)

    def key(self, key: Key) -> str:
        """The SQL placeholders for a whole key."""
        return f"({', '.join(self.add(part, c) for part, c in zip(key, self._binding.key, strict=True))})"


def written(key: Any) -> str:
    """A key as on a command line, with commas between the parts of a composite key."""
    if not isinstance(key, tuple):
        return str(key)
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(key)
    return line.getvalue()


def parse(binding: Binding, text: str) -> Key:
    """Parse a key by the types of its columns."""
    columns = binding.key
    parts = [text] if len(columns) == 1 else _parts(text, len(columns))
    if len(parts) != len(columns):
        raise DeclarationError(
            f"{text!r} is not an id in table {binding.table.fullname!r}: its key is ({', '.join(columns)})",
            hint=f"--id {','.join(f'<{column}>' for column in columns)}",
        )
    return tuple(_part(binding, column, part) for column, part in zip(columns, parts, strict=True))


def _parts(text: str, count: int) -> list[str]:
    """The parts of a composite key: separated by commas, or a JSON list as in the log."""
    try:
        listed = json.loads(text, parse_int=str, parse_float=str) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):  # a part that begins with a bracket
        listed = None
    if isinstance(listed, list) and len(listed) == count:
        return [part if isinstance(part, str) else json.dumps(part) for part in listed]
    # A part that contains a comma is in double quotes.
    try:
        return next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:  # a line break outside quotes, or an unclosed quote
        return []


def _part(binding: Binding, column: str, text: str) -> Any:
    kind = binding.table.c[column].type
    typed = dialect_named(binding.dialect.name).typed_columns
    try:
        if isinstance(kind, sa.Integer):
            return _whole(int(text), binding.sql_types.get(column, "bigint").lower())
        if isinstance(kind, sa.Uuid):
            # SQLite has no such type. The declared type of the column decides how the value is stored.
            processor = None if typed else kind.dialect_impl(binding.dialect).bind_processor(binding.dialect)
            return processor(UUID(text)) if processor else UUID(text)
        if not typed and isinstance(kind, (sa.Numeric, sa.Float, sa.types.NullType)):
            return int(text) if text.lstrip("-").isdigit() else text  # SQLite columns may hold any value
        if isinstance(kind, sa.Numeric):
            return Decimal(text)
        if isinstance(kind, (sa.DateTime, sa.Date)) and typed:
            return _moment(kind, text)
    except (ValueError, OverflowError, InvalidOperation) as error:
        known = binding.sql_types.get(column, str(kind)).lower()
        raise DeclarationError(
            f"{text!r} is not an id in table {binding.table.fullname!r}: its key column {column!r} is {known}",
            hint="rowmill jobs lists rows with their ids",
        ) from error
    return text


def _whole(number: int, kind: str) -> int:
    """Check that the column can hold the number. The driver's own error would name neither column nor table."""
    bits = {"smallint": 15, "integer": 31, "int": 31}.get(kind, 63)
    if not -(2**bits) <= number < 2**bits:
        raise ValueError(number)
    return number


def _moment(kind: sa.DateTime | sa.Date, text: str) -> date:
    """A time in the form that the driver expects; without a zone it is UTC."""
    if isinstance(kind, sa.Date):
        return date.fromisoformat(text)
    moment = datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return moment if kind.timezone else moment.replace(tzinfo=None)


def among(say: Statements, keys: Sequence[Key], marks: Placeholders) -> str:
    """SQL that is true for the lane's rows with these keys."""
    return f"({say.names(say.binding.key)}) in (values {', '.join(marks.key(key) for key in keys)}){say.shard()}"
