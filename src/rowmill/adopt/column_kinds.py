"""What columns hold: reflected types and sampled rows as the plain values that a proposal rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from . import vocabulary
from .table_facts import Column


def shares_of(columns: Sequence[Column], raw: Sequence[Sequence[Any]], at: int) -> dict[Any, dict[str, float]]:
    """By value of one column: the share of rows in which each other column is filled in."""
    total: Counter[Any] = Counter()
    filled: dict[Any, Counter[str]] = {}
    timed = columns[at].kind == "time"
    for row in raw:
        value = (True if row[at] else None) if timed else row[at]
        total[value] += 1
        counts = filled.setdefault(value, Counter())
        for i, column in enumerate(columns):
            if i != at and (row[i] if column.kind in ("time", "other") else row[i] not in (None, "")):
                counts[column.name] += 1
    names = [column.name for i, column in enumerate(columns) if i != at]
    return {value: {name: filled[value][name] / n for name in names} for value, n in total.items()}


def kind_of(of: Any) -> tuple[str, tuple[Any, ...], str]:
    """What a type holds, and the values it allows."""
    base = getattr(of, "data_type", of)  # a domain's own
    if isinstance(base, sa.Enum):
        return "enum", tuple(base.enums), f"the enum {base.name}" if base.name else "an enum"
    for kind, name in ((sa.Boolean, "bool"), (sa.Integer, "int"), (sa.DateTime, "time"), (sa.String, "text")):
        if isinstance(base, kind):
            return name, (), ""
    return "other", (), ""


def sql_type_of(kind: Any, dialect: sa.Dialect) -> str:
    """A type as the database writes it."""
    try:
        return str(kind.compile(dialect))
    except sa.exc.CompileError:
        return "?"


def typed(value: str, kind: str) -> Any:
    """A value that the server gave as text."""
    if kind == "int":
        return int(value)
    if kind == "bool":
        return value in ("t", "true", "True", "1")
    return value


def understood(column: Column, seen: Mapping[Any, int]) -> Column:
    """A column with what its rows hold; a number that is only ever 0 or 1 and is called a flag is one."""
    kind, default = column.kind, column.default
    if kind == "int" and seen.keys() <= {0, 1, None} and not column.refers_to and not column.meanings:
        event = vocabulary.event_name(column.name)
        flag = event is not None and event.state in (vocabulary.DONE, vocabulary.RUNNING)
        flag = flag and not vocabulary.time_name(column.name)  # seconds since 1970, and nothing has happened yet
        if flag and not vocabulary.state_name(column.name) and (seen or default in (0, 1)):
            kind, default = "bool", bool(default) if default is not None else None
            seen = {None if v is None else bool(v): n for v, n in seen.items()}
    return Column(**{**vars(column), "kind": kind, "default": default, "seen": dict(seen)})
