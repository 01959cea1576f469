"""A user's own table of schedules: found, read, and checked again in the statement that enqueues a tick.

Values are read as text, so every row can be read. ``declare/schedules.py`` decides what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from ...declare.roles import snake
from ...declare.schedules import COLUMNS, NEEDED, ON, ScheduleRow, Schedules, schedule
from ...errors import DeclarationError, Refused, did_you_mean
from ..database import Database
from ..dialect import utc
from ..lane.binding import key_of
from ..lane.reflect import reflect_table, table_name
from ..own import schema

#: The most schedules that one table may have.
MOST = 10_000


@dataclass(frozen=True)
class _Bound:
    """The table's columns as SQL: the name of each row, its key, and its other columns as text, by role."""

    table: str
    prefix: str
    name: str
    #: The columns of the key, each with its type.
    key: Mapping[str, str]
    columns: Mapping[str, str]


class ScheduleTable:
    """One table of schedules in one environment."""

    def __init__(self, source: Schedules, environment: str, database: Database) -> None:
        self.source, self.environment, self.database = source, environment, database
        self._bound: _Bound | None = None
        #: The parsed rows, reused as long as their texts do not change.
        self._known: dict[str, ScheduleRow] = {}

    async def bind(self) -> _Bound:
        """Find the table and its columns; raises DeclarationError."""
        if self._bound is not None:
            return self._bound
        source, database, where = self.source, self.database, str(self.source)
        schema_name, name = table_name(source.table, database.dialect.name)
        place = f" in environment {self.environment!r}"
        table, types, *_ = await database.reflect(
            lambda c: reflect_table(c, source.table, schema_name, name, where, place)
        )
        preparer = database.dialect.identifier_preparer
        prefix = f"{table.fullname} "
        key = key_of(table, where)
        id = " || ',' || ".join(f"cast({preparer.quote(column)} as text)" for column in key)
        quoted = prefix.replace("'", "''")
        self._bound = _Bound(
            table=preparer.format_table(table),
            prefix=prefix,
            name=f"'{quoted}' || {id}",
            key={preparer.quote(column): types[column] for column in key},
            columns={role: f"cast({preparer.quote(c)} as text)" for role, c in _columns(source, table, where).items()},
        )
        return self._bound

    async def read(self) -> list[ScheduleRow]:
        """Read all rows, including disabled and invalid ones; raises DeclarationError if there are too many."""
        bound = await self.bind()
        roles = list(bound.columns)
        key = [f"cast({column} as text)" for column in bound.key]
        text = f"select {', '.join([*key, *bound.columns.values()])} from {bound.table}"
        text += f" order by {', '.join(bound.key)} limit {MOST + 1}"
        try:
            rows = await self.database.read(lambda run: run(text, ()))
        except Refused:
            self._bound = None  # the table may have been altered
            raise
        if len(rows) > MOST:
            raise DeclarationError(f"{self.source}: there are more than {MOST:,} rows", hint="split the table")
        known, self._known = self._known, {}
        for row in rows:
            parts, texts = tuple(row[: len(key)]), dict(zip(roles, row[len(key) :], strict=True))
            name = bound.prefix + ",".join(parts)
            before = known.get(name)
            tasks_known = before is not None and (before.problem is None or before.task is not None)
            if before is None or before.texts != texts or not tasks_known:
                before = schedule(self.source, self.environment, name, parts, texts)
            self._known[name] = before
        return list(self._known.values())

    @property
    def prefix(self) -> str:
        """The prefix of the names of its rows."""
        assert self._bound is not None
        return self._bound.prefix

    def unchanged(self, row: ScheduleRow) -> tuple[str, dict[str, Any]]:
        """SQL that is true while the row is the same as when it was read, and its values."""
        assert self._bound is not None
        sql, values, tests = self.database.sql, dict[str, Any](), []
        for n, ((column, kind), part) in enumerate(zip(self._bound.key.items(), row.key, strict=True)):
            values[f"key_{n}"] = part
            tests.append(f"{column} = {sql.typed(sql.typed(f':key_{n}', 'text'), kind)}")
        for role, column in self._bound.columns.items():
            values[f"row_{role}"] = row.texts[role]
            tests.append(f"not ({column} {sql.is_distinct} {sql.typed(f':row_{role}', 'text')})")
        return f"exists (select 1 from {self._bound.table} where {' and '.join(tests)})", values

    def on(self) -> str:
        """SQL that is true if the row named ``_cron.name`` exists and is enabled."""
        assert self._bound is not None
        tests = [f"{self._bound.name} = _cron.name"]
        if column := self._bound.columns.get("enabled"):
            tests.append(f"lower(trim({column})) in ({', '.join(repr(word) for word in ON)})")
        return f"exists (select 1 from {self._bound.table} where {' and '.join(tests)})"


def _columns(source: Schedules, table: sa.Table, where: str) -> dict[str, str]:
    """Which column has which role: the declared ones, then those that match by name."""
    names = list(table.c.keys())
    columns: dict[str, str] = {}
    for role, twins in COLUMNS.items():
        if role in source.roles:
            column = source.roles[role]
            if column is not None and column not in names:
                raise DeclarationError(
                    f"{where}: role {role}: there is no column {column!r}", hint=did_you_mean(column, names)
                )
        else:
            taken = set(source.roles.values())
            column = next((c for twin in twins for c in names if snake(c) == twin and c not in taken), None)
        if column is not None:
            columns[role] = column
        elif role in NEEDED:
            raise DeclarationError(
                f"{where}: no column has the role {role}", hint=f'roles={{"{role}": "..."}}; it has {", ".join(names)}'
            )
    return columns


async def schedule_list(source: Schedules, environment: str, database: Database) -> list[dict[str, Any]]:
    """A table's rows for an operator: values, next tick, last enqueued tick, problem."""
    rows = await ScheduleTable(source, environment, database).read()
    ticks: dict[str, Any] = {}
    if (await schema.taken(database)).has(schema.CRONS):
        text = f"select name, last_tick from {database.own('rowmill_crons')}"
        ticks = {row[0]: row[1] for row in await database.read(lambda run: run(text, ()))}
    now = datetime.now(UTC)
    return [_document(source, row, ticks.get(row.name), now) for row in rows]


def _document(source: Schedules, row: ScheduleRow, last: Any, now: datetime) -> dict[str, Any]:
    coming = row.cron.next(now) if row.cron is not None and row.enabled and row.problem is None else None
    return {
        "table": row.name.removesuffix(f" {row.id}"),
        "id": row.id,
        "task": row.texts["task"],
        "queue": row.task.queue if row.task is not None else None,
        "cron": row.texts["expression"],
        "tz": row.texts.get("tz") or source.tz,
        "enabled": row.enabled,
        "next_tick": coming.isoformat() if coming is not None else None,
        "last_tick": utc(last).isoformat() if last is not None else None,
        "problem": row.problem,
        "hint": row.hint,
    }
