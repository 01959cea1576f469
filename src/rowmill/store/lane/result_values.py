"""The values that a handler returned, checked against their columns before anything is written.

A value that is no data (a coroutine, any other object), or that its column cannot hold as it is, fails the run with the
column's name. Without this check the database would store the object's text form.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import ipaddress
import math
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from uuid import UUID

import sqlalchemy as sa

from ...errors import WrongResult, did_you_mean
from ..bounded_text import bounded

if TYPE_CHECKING:
    from .lane_store import LaneStore

NOTE_LENGTH = 10_000
_DATA = (int, float, Decimal, UUID, date, time, timedelta)
_AS_TEXT = (PurePath, ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Interface, ipaddress.IPv6Interface,
            ipaddress.IPv4Network, ipaddress.IPv6Network)  # fmt: skip
_BYTES = (bytes, bytearray, memoryview)
#: Columns on SQLite that hold no bytes; one without a type, or of a type that SQLite does not know, may hold anything.
_NOT_BINARY = (sa.String, sa.JSON, sa.Integer, sa.Float, sa.Boolean, sa.DateTime, sa.Date, sa.Time)


class ColumnCheck:
    """What one column can hold. Called with a value, it returns the value to write or raises WrongResult."""

    def __init__(self, store: LaneStore, column: str) -> None:
        kind = store.binding.kinds[column]
        kind = getattr(kind, "data_type", kind)  # a domain's own
        leaf = kind.item_type if isinstance(kind, sa.ARRAY) else kind
        typed = store.database.sql.typed_columns
        self._column, self._database = column, store.database
        self._given = store.encoder(column)
        self._type = store.binding.sql_types.get(column) or str(kind)
        self._binary = isinstance(leaf, sa.LargeBinary) or (not typed and not isinstance(leaf, _NOT_BINARY))
        self._zoned = typed and isinstance(leaf, (sa.DateTime, sa.Time)) and bool(leaf.timezone)

    def __call__(self, value: Any) -> Any:
        if self._given is not None:
            self._checked(self._encoded(value))  # the user's own type makes of it what the database gets
            return value
        if type(value) is str and value.isascii() and "\0" not in value:
            return value
        return self._checked(value)

    def _encoded(self, value: Any) -> Any:
        assert self._given is not None
        try:
            return self._given(value)
        except Exception as error:
            raise WrongResult(
                f"column {self._column!r}: its type cannot encode the {type(value).__name__} that the handler returned:"
                f" {type(error).__name__}: {error}"
            ) from error

    def _checked(self, value: Any) -> Any:
        try:
            return self._data(value, f"column {self._column!r}")
        except RecursionError:
            raise WrongResult(
                f"column {self._column!r}: the {type(value).__name__} that the handler returned is nested too deeply,"
                " or contains itself"
            ) from None

    def _data(self, value: Any, where: str, *, nested: bool = False) -> Any:
        if value is None:
            return value
        if isinstance(value, enum.Enum):
            return self._data(value.value, where, nested=nested)
        if isinstance(value, str):
            return text(value, where, self._database.encoding)
        if isinstance(value, dict):
            return {self._key(k, where): self._data(v, f"{where}[{_brief(k)}]", nested=True) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._data(item, f"{where}[{i}]", nested=True) for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return {self._data(item, where, nested=True) for item in value}
        if isinstance(value, _BYTES) and not self._binary:
            raise WrongResult(
                f"{where}: the handler returned {type(value).__name__}, and the column's type {self._type} holds none",
                hint='decode it, value.decode("utf-8"), or change the column to a binary type',
            )
        if self._zoned and isinstance(value, (datetime, time)) and value.tzinfo is None:
            raise WrongResult(
                f"{where}: the handler returned a {type(value).__name__} without a time zone, and the column's type is"
                f" {self._type}",
                hint="datetime.now(UTC), or give it the zone it is in: value.replace(tzinfo=...)",
            )
        if nested and isinstance(value, float) and not math.isfinite(value):
            return str(value)  # JSON has no such number
        if isinstance(value, (*_DATA, *_BYTES)):
            return value
        if isinstance(value, _AS_TEXT):
            return text(str(value), where, self._database.encoding)
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of NumPy and its kind
            return self._data(value.item(), where, nested=nested)
        raise no_data(value, where)

    def _key(self, key: Any, where: str) -> Any:
        """A key of a JSON object."""
        if key is None or isinstance(key, (str, enum.Enum)):
            return self._data(key, where)
        if isinstance(key, _DATA):
            return key if isinstance(key, (int, float)) else str(key)
        raise no_data(key, f"{where}, a key")


class ColumnChecks(dict[str, Callable[[Any], Any]]):
    """The check of each column that a handler ever returned; raises WrongResult for one that it may not set."""

    def __init__(self, store: LaneStore) -> None:
        super().__init__()
        self._store = store

    def __missing__(self, column: Any) -> Callable[[Any], Any]:
        binding = self._store.binding
        if not isinstance(column, str) or column not in binding.table.c:
            raise WrongResult(
                f"the handler returned a column {column!r} that table {binding.table.fullname!r} does not have",
                hint=did_you_mean(str(column), binding.columns),
            )
        if column in binding.key or column in binding.state_columns():
            raise WrongResult(
                f"the handler returned {column!r}, which is the row's {'key' if column in binding.key else 'state'}",
                hint="end the run with an outcome (Done, Retry, Snooze, Wait, Dead, Cancel); the lane writes the state",
            )
        if column in binding.shard:
            raise WrongResult(
                f"the handler returned {column!r}, which says in which shard the row is, and a row stays in its shard",
                hint=f"another column for the result, or leave {column!r} out of shard",
            )
        if column in binding.lane.inputs:
            raise WrongResult(
                f"the handler returned {column!r}, which is an input of the lane: it could overwrite what others write",
                hint=f"another column for the result, or leave {column!r} out of inputs",
            )
        check = self[column] = ColumnCheck(self._store, column)
        return check


def text(value: str, where: str, encoding: str) -> str:
    """Text that a database of this encoding stores as it is; raises WrongResult for any other."""
    value = str.__str__(value)
    if "\0" in value:
        raise WrongResult(
            f"{where}: the text has a NUL character at position {value.index(chr(0))}, which a column cannot hold",
            hint='remove it: value.replace("\\0", "")',
        )
    try:
        value.encode(encoding)
    except UnicodeEncodeError as error:
        raise WrongResult(
            f"{where}: the text has the character {value[error.start]!a} at position {error.start}, and the"
            f" database's encoding {encoding} cannot hold it",
            hint=f'replace it, value.encode("{encoding}", "replace").decode("{encoding}"), or use a UTF-8 database',
        ) from None
    return value


def note_text(note: Any, encoding: str = "utf-8") -> str | None:
    """The note of ``job.progress``: shown to people, so what cannot be stored in it is replaced."""
    if note is None:
        return None
    if not isinstance(note, (str, *_DATA, *_AS_TEXT)):
        raise no_data(note, "the note of job.progress")
    return bounded(str(note), NOTE_LENGTH, encoding)


def no_data(value: Any, where: str) -> WrongResult:
    """The error for an object that is no data."""
    kind, hint = type(value).__name__, "return text, a number, a date or time, a UUID, a dict or a list of these"
    if inspect.iscoroutine(value):
        value.close()
        kind, hint = f"coroutine ({value.__qualname__})", f"an await is missing: await {value.__name__}(...)"
    elif inspect.isawaitable(value):
        hint = "an await is missing"
    elif dataclasses.is_dataclass(value):
        hint = "dataclasses.asdict(value)"
    elif hasattr(value, "model_dump"):
        hint = "value.model_dump()"
    elif hasattr(value, "tolist"):
        hint = "value.tolist()"
    elif hasattr(value, "__iter__"):
        hint = "list(value) or dict(value)"
    return WrongResult(f"{where}: expected data that a column can hold, got {kind}", hint=hint)


def _brief(key: Any) -> str:
    shown = repr(key) if isinstance(key, (str, int)) else type(key).__name__
    return shown if len(shown) <= 40 else f"{shown[:39]}…"
