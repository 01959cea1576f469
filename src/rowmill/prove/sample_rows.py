"""Generated rows for a lane: ready by its declaration, with a value in every column that requires one."""

from __future__ import annotations

import re
import sqlite3
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import asyncpg
import sqlalchemy as sa

from ..declare import states
from ..declare.roles import COUNTERS
from ..errors import DeclarationError
from ..store import LaneStore
from ..store.gates.gate_binding import BoundGates
from ..store.lane.reflect import add_constraints, reflect_table

Ask = Callable[[str], Awaitable[Sequence[Any]]]
_ROWS = 6
#: Roles whose columns are empty in a fresh row.
_EMPTY = ("worker", "claimed_at", "heartbeat_at", "finished_at", "error", "progress")
_LONG_AGO = "2001-01-01 00:00:00"
_QUOTED = re.compile(r"'((?:[^']|'')*)'")


@dataclass(frozen=True)
class Parent:
    """A column that refers to a row of another table that the lane's condition reads."""

    column: str
    schema: str | None
    table: str
    referred: str


@dataclass
class SampleRows:
    """Generates rows. ``given`` are column values, as text, that cannot be guessed."""

    given: Mapping[str, str] = field(default_factory=dict)

    #: How many different keys the rows of a gate have.
    keys: int = 2
    parents: Sequence[Parent] = ()
    #: After how long every second row expires, where a column says so; None: it does not.
    expires: timedelta | None = None

    async def rows(self, store: LaneStore, dims: Sequence[BoundGates], ask: Ask) -> list[str]:
        """Return one insert per row, tried on the table. Raises if the rows that they create are not ready."""
        for column in self.given:
            if column not in store.binding.table.c:
                raise DeclarationError(
                    f"lane {store.lane.name!r}: there is no column {column!r} to set",
                    hint=f"one of {', '.join(store.binding.columns)}",
                )
        await self.prepare(store, ask)
        texts = [self.insert(store, dims, number) for number in range(1, _ROWS + 1)]
        statements = store.statements
        await ask(f"delete from {statements.table}")
        for text in texts:
            try:
                await ask(text)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, sqlite3.Error) as error:
                raise DeclarationError(
                    f"lane {store.lane.name!r}: could not generate a row for {store.binding.table.fullname}:"
                    f" {str(error).splitlines()[0]}",
                    hint="--set COLUMN=VALUE gives a column a value that the table takes",
                ) from error
        await self._check(store, ask)
        return texts

    async def prepare(self, store: LaneStore, ask: Ask) -> None:
        """Create rows in the tables that the lane's condition reads, so that the lane's own rows can refer to them."""

        def read(connection: sa.Connection, of: Parent) -> tuple[sa.Table, dict[str, Any]]:
            table, _, _, kinds = reflect_table(connection, of.table, of.schema, of.table, f"lane {store.lane.name!r}")
            add_constraints(connection, table)
            return table, kinds

        preparer = store.database.dialect.identifier_preparer
        await store.database.reflect(lambda c: add_constraints(c, store.binding.table))
        for parent in self.parents:
            table, kinds = await store.database.reflect(lambda c, of=parent: read(c, of))  # type: ignore[misc]
            await ask(f"delete from {preparer.format_table(table)}")
            for number in range(1, _ROWS + 1):
                written = {
                    column.name: _of_kind(kinds[column.name], column, number)
                    for column in table.c
                    if column.name == parent.referred or not (column.nullable or _filled(column))
                }
                names = ", ".join(preparer.quote(name) for name in written)
                over = store.database.sql.overriding
                await ask(
                    f"insert into {preparer.format_table(table)} ({names}){over} values ({', '.join(written.values())})"
                )

    async def _check(self, store: LaneStore, ask: Ask) -> None:
        """Check that every row is ready. Raises with the reason if one is not."""
        statements = store.statements
        for name, part in store.statements.ready_parts().items():
            if (await ask(f"select count(*) from {statements.table} where {part}"))[0][0] != _ROWS:
                raise DeclarationError(
                    f"lane {store.lane.name!r}: the generated rows are not ready, because of its {name}: {part}",
                    hint="--set COLUMN=VALUE for the columns of this condition",
                )

    def insert(self, store: LaneStore, dims: Sequence[BoundGates], number: int) -> str:
        """Return the SQL that creates one row."""
        statements = store.statements
        written = self._values(store, dims, number)
        over = store.database.sql.overriding
        return (
            f"insert into {statements.table} ({statements.names(written)}){over} values ({', '.join(written.values())})"
        )

    def _values(self, store: LaneStore, dims: Sequence[BoundGates], number: int) -> dict[str, str]:
        binding, statements = store.binding, store.statements
        state = {c: v for c, v in store.lane.ready_again.items() if c not in binding.claimed}
        if store.lane.own:
            task = next(iter(store.lane.tasks), "task")  # type: ignore[attr-defined]
            state |= {"task": task, "queue": store.lane.name}
        ready = store.lane.ready if isinstance(store.lane.ready, Mapping) else {}
        state |= {c: _NOW for c, value in ready.items() if value is states.NOW}
        turns = {column for dim in dims for column in _columns(dim, binding.table)}
        turns |= {parent.column for parent in self.parents}
        roles = {column: role for role, column in binding.roles.items()}
        state |= {column: values[number % len(values)] for column, values in binding.shard.items()}
        written: dict[str, str] = {}
        for column in binding.table.c:
            name = column.name
            if column.computed is not None:
                continue
            if name in self.given:
                written[name] = _quoted(self.given[name])
            elif name in state:
                written[name] = _quoted(_LONG_AGO) if state[name] is _NOW else statements.literal(name, state[name])
            elif name in turns:
                written[name] = _of_kind(binding.kinds[name], column, 1 + number % self.keys)
            elif name in binding.key:
                written[name] = _of_kind(binding.kinds[name], column, number)
            elif name == binding.created and store.lane.expires_after is not None:
                written[name] = statements.now(name)
            elif (role := roles.get(name)) is not None:
                if (text := self._of_role(store, column, role, number)) is not None:
                    written[name] = text
            elif not column.nullable and not _filled(column):
                written[name] = _of_kind(binding.kinds[name], column, number)
        return written

    def _of_role(self, store: LaneStore, column: sa.Column[Any], role: str, number: int) -> str | None:
        if role in (*COUNTERS, "priority"):
            return "0"
        if role == "max_attempts":
            return None if column.nullable or _filled(column) else str(store.binding.max_attempts)
        if role in _EMPTY and column.nullable:
            return "null"
        if role == "expires_at" and number % 2 and self.expires is not None:
            return store.statements.later(column.name, str(self.expires.total_seconds()))
        if role in ("run_after", "expires_at") and column.nullable:
            return "null"
        if role in ("run_after", "updated_at"):
            return _of_kind(store.binding.kinds[column.name], column, 1)
        return None if _filled(column) else _of_kind(store.binding.kinds[column.name], column, number)


class _SampleNow:
    """A clock with a fixed time."""


_NOW = _SampleNow()


def _of_kind(kind: Any, column: sa.Column[Any], number: int) -> str:
    """Return a value of the column's type, as SQL. A different number gives a different value."""
    allowed = _allowed(column)
    if isinstance(kind, sa.Enum):
        return _quoted(kind.enums[0])
    if allowed is not None:
        return _quoted(allowed)
    if isinstance(kind, sa.Boolean):
        return "false"
    if isinstance(kind, (sa.Integer, sa.Numeric, sa.Float)):
        return str(number)
    if isinstance(kind, sa.Uuid):
        return _quoted(str(uuid.UUID(int=number)))
    if isinstance(kind, (sa.DateTime, sa.Date)):
        return _quoted(_LONG_AGO)
    if isinstance(kind, sa.Time):
        return _quoted("12:00:00")
    if isinstance(kind, sa.Interval):
        return _quoted("1 minute")
    if isinstance(kind, (sa.JSON, sa.ARRAY)):
        return _quoted("{}")
    if isinstance(kind, sa.LargeBinary):
        return _quoted("")
    words = f"made-{number}"
    length = getattr(kind, "length", None)
    return _quoted(words if not length or length >= len(words) else str(number)[-length:])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _filled(column: sa.Column[Any]) -> bool:
    """Whether the database fills the column itself."""
    return column.server_default is not None or column.identity is not None


def _columns(dim: BoundGates, table: sa.Table) -> list[str]:
    """The columns that make up a gate's key."""
    by = dim.group.label if dim.phrase is not None else ""
    if by in table.c:
        return [by]
    return [c.name for c in table.c if re.search(rf"\b{re.escape(c.name)}\b", str(dim.phrase or ""))]


def _allowed(column: sa.Column[Any]) -> str | None:
    """The first word that a check constraint allows for a column."""
    for check in column.table.constraints:
        if isinstance(check, sa.CheckConstraint):
            text = str(check.sqltext)
            if re.search(rf'(?<![\w"]){re.escape(column.name)}(?![\w"])', text) or f'"{column.name}"' in text:
                match = _QUOTED.search(text)
                if match and isinstance(column.type, sa.String):
                    return match.group(1).replace("''", "'")
    return None
