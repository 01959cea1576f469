"""The columns that a lane would use and its table does not have: what each is for, and how it would be added."""

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

#: Roles worth a column where nothing takes them, in the order in which they are added, and what each is good for.
WORTH = {
    "worker": "who holds a row is shown, and a late worker cannot overwrite another's outcome",
    "claimed_at": "two claims of one row are told apart, and since when it runs is known",
    "heartbeat_at": "runs may be longer than the lease, and a dead worker is noticed soon",
    "attempts": "failures are counted, so that they can be tried again, and end",
    "run_after": "retries and snoozes wait for their time",
    "error": "why a run failed stands in the row",
}


@dataclass(frozen=True)
class MissingColumn:
    """A column to be added: nullable, or with a constant default, so that no row is rewritten."""

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
        """The column as it stands in ALTER TABLE."""
        rest = f" not null default {self.default}" if self.default is not None else ""
        return f"{quote(self.column)} {self.sql_type}{rest}"


def lacking(lane: Lane, columns: Sequence[str], fits: Callable[[str, str], bool], dialect: str) -> list[MissingColumn]:
    """Columns named in the declaration that are not there, as far as their type is known; then roles nothing takes."""
    wanted = {role: column for role, column in lane.roles.items() if column and _new(column, columns)}
    named = set(wanted.values())
    for column in _times(lane):
        if column not in named and _new(column, columns):
            role = next((r for r, (_, twins) in roles_words.ROLES.items() if roles_words.snake(column) in twins), "")
            wanted[role or column] = column
    there = {role: column for role, column in lane.roles.items() if role not in wanted}
    found: Mapping[str, str] = {**roles_words.resolve(there, columns, fits), **wanted}
    made = [_column(role, column, dialect) for role, column in wanted.items() if role in roles_words.ROLES]
    made += [_timed(column, dialect) for role, column in wanted.items() if role not in roles_words.ROLES]
    made += [
        MissingColumn("", column, sa.Text(), "text", None, f"gates go by it; filled from {source}")
        for column, (source, _) in lane.fills.items()
        if column not in columns
    ]
    names = [*columns, *wanted.values(), *lane.fills]
    for role in WORTH:
        if role not in found and role not in lane.roles and _useful(role, lane, found):
            column = roles_words.new_column_name(role, names)
            if column.startswith("rowmill_"):
                continue  # every name that the role is found by is taken by something else
            made.append(_column(role, column, dialect))
            names.append(column)
            found = {**found, role: column}
    return made


def _useful(role: str, lane: Lane, found: Mapping[str, str]) -> bool:
    if role == "claimed_at":
        return "worker" not in found or lane.roles.get("worker", "") is None
    if role == "heartbeat_at":
        return lane.renew in (None, "heartbeat_at")
    if role == "attempts":
        return "failures" not in found and lane.max_attempts != 1
    return True


def _times(lane: Lane) -> list[str]:
    """Columns that the states set to the present time."""
    written = (lane.running, lane.done, lane.dead, lane.canceled, lane.retry)
    return [c for values in written if values for c, v in values.items() if v is NOW]


def _new(column: str, columns: Sequence[str]) -> bool:
    """Not there, and not a slip of the pen for one that is."""
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
