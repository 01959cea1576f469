"""A lane's gates bound to its table: keys as SQL, and settings in the user's own tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ...declare.gates import BreakerColumns, Group
from ...errors import DeclarationError, Refused
from ..database import Database, Run
from ..lane.binding import Binding
from ..lane.reflect import reflect_table, table_name
from ..lane.statements import Statements
from .gate_rows import GateRows
from .rules import GateState


@dataclass(frozen=True)
class UserTable:
    """A table of the user's own that a gate reads or writes: one row per key."""

    rows: GateRows
    table: str
    key: str
    key_type: str
    #: The type of each column, as a word.
    types: dict[str, str]
    quote: Callable[[str], str]

    def of(self, key: str) -> str:
        """The condition for the row of a key (SQL text for the key, as text)."""
        return f"{self.key} = {self.rows.sql.as_type(key, self.key_type)}"

    def of_first(self) -> str:
        """The condition for the row of the key that is the statement's first parameter."""
        return self.of(self.rows.sql.mark(1))

    def value(self, column: str, key: str) -> str:
        """A column of the row of a key, as an SQL expression."""
        return f"(select {self.quote(column)} from {self.table} where {self.of(key)})"

    def until(self, column: str) -> str:
        """Seconds from now to the time in a column."""
        return self.rows.until_in(self.quote(column), self.types[column])

    def after(self, column: str, seconds: str) -> str:
        """The time so many seconds from now, as the column holds it."""
        return self.rows.after_in(self.types[column], seconds)


@dataclass(frozen=True, eq=False)
class BoundGates:
    """One group of gates, bound to the lane's table."""

    group: Group
    #: The key as SQL over the lane's row; None: the whole lane.
    phrase: str | None
    #: PostgreSQL's name for the key's type, with its collation.
    kind: str
    #: Rows may have no key (NULL). These gates do not hold such rows back.
    nullable: bool
    rate: UserTable | None = None
    breaker: UserTable | None = None

    @property
    def label(self) -> str:
        """The value in the ``dim`` column."""
        return self.group.label

    @property
    def columns(self) -> BreakerColumns:
        """The columns of the user's table that store the breaker's state."""
        assert self.group.breaker is not None
        assert isinstance(self.group.breaker.columns, BreakerColumns)
        return self.group.breaker.columns

    def matches(self, key: str) -> str:
        """The condition for the lane's rows of a key (SQL for the key, as text)."""
        return f"{self.phrase} = {key}::{self.kind}" if self.kind else f"{self.phrase} = {key}"

    def within(self, key: str) -> str:
        """The same condition as a range.

        With equality the planner could choose an index that only has the lane's order, and discard the rows of all
        other keys. With a range, only an index that begins with the key gives the order.
        """
        cast = f"{key}::{self.kind}" if self.kind else key
        return f"{self.phrase} >= {cast} and {self.phrase} <= {cast}"

    def overlay(self, run: Run, states: dict[str, GateState]) -> dict[str, GateState]:
        """Return the states, each with the values from the user's own tables."""
        overlaid = dict(states)
        for key in states:
            if self.rate is not None and self.group.rate is not None and self.group.rate.source is not None:
                text = f"select {self.rate.quote(self.group.rate.source.column)} from {self.rate.table}"
                rows = run(f"{text} where {self.rate.of_first()}", (key,))
                listed = float(rows[0][0]) if rows and rows[0][0] is not None else None
                overlaid[key] = replace(overlaid[key], listed=listed)
            if self.breaker is not None:
                names, own = self.columns, self.breaker
                text = f"select {own.quote(names.streak)}, {own.until(names.open_until)} from {own.table}"
                rows = run(f"{text} where {own.of_first()}", (key,))
                streak, opened = rows[0] if rows else (0, None)
                overlaid[key] = replace(overlaid[key], streak=streak or 0, open_for=opened)
        return overlaid


class KeylessShare:
    """Rows without a key have no turn. They get this share of a claim, and the room that keys leave."""

    def __init__(self) -> None:
        self._owed = 0.0

    def of(self, count: int) -> int:
        """How many rows of a claim of this size they get first."""
        self._owed = min(self._owed, 1.0) + count / 16
        due = int(self._owed)
        self._owed -= due
        return due


async def bind_gates(
    binding: Binding, database: Database, statements: Statements, rows: GateRows
) -> tuple[BoundGates, ...]:
    """Resolve a lane's gates against its table; raises DeclarationError for what cannot work."""
    where = f"lane {binding.lane.name!r}, table {binding.table.fullname!r}"
    bound = []
    for group in binding.lane.groups:
        if group.process is not None and "worker" not in binding.roles:
            raise DeclarationError(
                f'{where}: Concurrency(scope="process") needs a column with the role worker',
                hint='a worker text column, or roles={"worker": "..."}',
            )
        phrase, kind, nullable = await _key(binding, statements, rows, group, where)
        rate = breaker = None
        if group.rate is not None and (source := group.rate.source) is not None:
            rate = await _foreign(database, rows, source.table, source.key, [source.column], where)
        if group.breaker is not None and isinstance(names := group.breaker.columns, BreakerColumns):
            wanted = [names.streak, names.open_until, names.last_success_at, names.last_failure_at]
            breaker = await _foreign(database, rows, names.table, names.key, [c for c in wanted if c], where)
        bound.append(BoundGates(group, phrase, kind, nullable, rate, breaker))
    return tuple(bound)


def key_phrase(binding: Binding, statements: Statements, by: str) -> str:
    """A gate's key as SQL over the lane's row: a column, or an expression."""
    return statements.name(by) if by in binding.table.c else f"({by})"


async def _key(
    binding: Binding, statements: Statements, rows: GateRows, group: Group, where: str
) -> tuple[str | None, str, bool]:
    if group.by is None:
        return None, "", False
    by = group.by.strip()
    phrase, nullable = key_phrase(binding, statements, by), by not in binding.table.c or binding.nullable(by)

    def verb(run: Run) -> tuple[str, bool]:
        # Keys are compared and sorted, which some types do not support.
        run(f"select 1 from {statements.table} where {phrase} > {phrase}{statements.shard()} limit 0", ())
        return rows.key_kind(run, phrase, statements)

    try:
        kind, loose = await rows.database.read(verb)
    except Refused as error:
        if by in binding.lane.fills:
            raise DeclarationError(
                f"{where}: there is no column {by!r} yet", hint="rowmill migrate APP --apply adds it and fills it"
            ) from error
        raise DeclarationError(
            f"{where}: by={by!r} cannot be a gate's key: {error.message}",
            hint=f"one of the columns {', '.join(binding.columns)}, or SQL over them that gives text or a number",
        ) from error
    fixed = by in binding.table.c and re.fullmatch(r"numeric\(.*\)", binding.sql_types[by]) is not None
    if loose and not fixed:
        raise DeclarationError(
            f"{where}: by={by!r} cannot be a gate's key: equal values of it may be written differently",
            hint='SQL that gives each one form: "lower(domain::text)", "trim_scale(amount)::text"',
        )
    return phrase, kind, nullable


async def _foreign(
    database: Database, rows: GateRows, table: str, key: str, columns: Iterable[str], where: str
) -> UserTable:
    schema, name = table_name(table, database.dialect.name)
    reflected, types, _, kinds = await database.reflect(
        lambda connection: reflect_table(connection, table, schema, name, where)
    )
    preparer = database.dialect.identifier_preparer
    for column in [key, *columns]:
        if column not in reflected.c:
            raise DeclarationError(
                f"{where}: a gate looks at {table}.{column}, and there is no such column",
                hint=f"one of {', '.join(reflected.c.keys())}",
            )
    types = rows.time_kinds(types, kinds)
    return UserTable(rows, preparer.format_table(reflected), preparer.quote(key), types[key], types, preparer.quote)
