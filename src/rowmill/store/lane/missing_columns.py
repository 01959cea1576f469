"""The columns that a lane would use and its table lacks: the purpose of each, and how to add it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ...declare import roles as roles_words
from ...declare.lane import Lane
from ...declare.states import NOW
from ..dialect import dialect_named

#: Roles worth adding a column for, in the order in which they are added, and the benefit of each.
WORTH = {
    "worker": "shows who holds a row, and keeps a late worker from overwriting another's outcome",
    "claimed_at": "shows since when a row runs, and tells two claims of one row apart",
    "heartbeat_at": "lets a run take longer than the lease, and shows soon that a worker is dead",
    "attempts": "counts attempts: a failed row is retried, and is dead after the last one",
    "run_after": "says when a retried or snoozed row is due",
    "error": "stores why a run failed",
}


@dataclass(frozen=True)
class MissingColumn:
    """A column to add: nullable or with a constant default, so that no row is rewritten."""

    role: str
    column: str
    kind: Any
    sql_type: str
    default: str | None
    why: str

    @property
    def nullable(self) -> bool:
        return self.default is None

    def ddl(self, quote: Callable[[str], str]) -> str:
        """The column definition as SQL for ALTER TABLE."""
        rest = f" not null default {self.default}" if self.default is not None else ""
        return f"{quote(self.column)} {self.sql_type}{rest}"


def lacking(lane: Lane, columns: Sequence[str], fits: Callable[[str, str], bool], dialect: str) -> list[MissingColumn]:
    """Missing columns that the declaration names, if their type is known; then columns for unassigned roles."""
    wanted = {role: column for role, column in lane.roles.items() if column and _new(column, columns)}
    named = set(wanted.values())
    for column in _times(lane):
        if column not in named and _new(column, columns):
            role = next((r for r, (_, twins) in roles_words.ROLES.items() if roles_words.snake(column) in twins), "")
            wanted[role or column] = column
    there = {role: column for role, column in lane.roles.items() if role not in wanted}
    role_columns: Mapping[str, str] = {**roles_words.resolve(there, columns, fits), **wanted}
    made = [_column(role, column, dialect) for role, column in wanted.items() if role in roles_words.ROLES]
    made += [_timed(column, dialect) for role, column in wanted.items() if role not in roles_words.ROLES]
    made += [
        MissingColumn("", column, sa.Text(), "text", None, f"the key of the lane's gates; filled from {source}")
        for column, (source, _) in lane.fills.items()
        if column not in columns
    ]
    names = [*columns, *wanted.values(), *lane.fills]
    for role in WORTH:
        if role not in role_columns and role not in lane.roles and _useful(role, lane, role_columns):
            column = roles_words.new_column_name(role, names)
            if column.startswith("rowmill_"):
                continue  # other columns have every name that the role is found by
            made.append(_column(role, column, dialect))
            names.append(column)
            role_columns = {**role_columns, role: column}
    return made


def _useful(role: str, lane: Lane, role_columns: Mapping[str, str]) -> bool:
    if role == "claimed_at":
        return "worker" not in role_columns or lane.roles.get("worker", "") is None
    if role == "heartbeat_at":
        return lane.renew in (None, "heartbeat_at")
    if role == "attempts":
        return "failures" not in role_columns and lane.max_attempts != 1
    return True


def _times(lane: Lane) -> list[str]:
    """Columns that the states set to the current time."""
    written = (lane.running, lane.done, lane.dead, lane.canceled, lane.expired, lane.retry)
    return [c for values in written if values for c, v in values.items() if v is NOW]


def _new(column: str, columns: Sequence[str]) -> bool:
    """Whether the column is missing and its name is not a misspelling of an existing one."""
    return column not in columns and not difflib.get_close_matches(
        column.lower(), [c.lower() for c in columns], 1, 0.85
    )


def _column(role: str, column: str, dialect: str) -> MissingColumn:
    why = WORTH.get(role, "the declaration names it")
    kind = roles_words.ROLES[role][0]
    if kind == roles_words.TIME:
        return _timed(column, dialect, role, why)
    if kind == roles_words.COUNT:
        default = None if role in roles_words.READ_ONLY else "0"
        return MissingColumn(role, column, sa.Integer(), "integer", default, why)
    return MissingColumn(role, column, sa.Text(), "text", None, why)


def _timed(column: str, dialect: str, role: str = "", why: str = "the declaration names it") -> MissingColumn:
    sql = dialect_named(dialect)
    return MissingColumn(role, column, sql.time_kind, sql.time_type, None, why)
