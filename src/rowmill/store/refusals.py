"""Values that a lane would write and its table refuses: found before the first claim, not after the first work.

The database is asked itself: each check constraint that is about nothing but the columns of a state is tried on the
values of that state, in a row that is nowhere. A row whose outcome is refused would be dead, and its work done for
nothing; with a wrong word in ``done`` that is every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from .. import states
from ..errors import DeclarationError, Refused, did_you_mean
from .base import LaneStore
from .literals import allowed_by_check, mentions
from .postgres_statements import PostgresStatements

#: What is written, by the name that it has in the declaration.
WRITTEN = ("running", "done", "retry", "dead", "canceled")
#: Constraints may be said to be not enforced from PostgreSQL 18 on.
_CHECKS = """select pg_get_expr(c.conbin, c.conrelid) from pg_constraint c
where c.contype = 'c' and c.conrelid = to_regclass($1::text)
  and coalesce((to_jsonb(c) ->> 'conenforced')::boolean, true)"""


async def check_states(store: LaneStore, written: Sequence[str] = WRITTEN) -> None:
    """Raises DeclarationError for the first value in these states that the table would refuse."""
    if store.lane.own:
        return
    for text in await _constraints(store):
        for state in written:
            await _ask(store, text, state, _plain(getattr(store.lane, state)))


def _plain(values: Any) -> Mapping[str, Any]:
    """What of a state is known beforehand."""
    return {c: v for c, v in values.items() if v is not states.NOW} if isinstance(values, Mapping) else {}


async def _constraints(store: LaneStore) -> Sequence[str]:
    if isinstance(store.statements, PostgresStatements):
        rows = await store.database.read(lambda run: run(_CHECKS, (store.statements.table,)))
        return [row[0] for row in rows]

    def read(connection: sa.Connection) -> list[str]:
        table = store.binding.table
        text = connection.exec_driver_sql("select sql from sqlite_master where name = ?", (table.name,)).scalar()
        # Which texts are the same, a collation of the table's own says, and a row that is nowhere does not have it.
        if "collate" in str(text).lower():
            return []
        return [str(check["sqltext"]) for check in sa.inspect(connection).get_check_constraints(table.name)]

    return await store.database.reflect(read)


async def _ask(store: LaneStore, text: str, state: str, values: Mapping[str, Any]) -> None:
    say, table = store.statements, store.binding.table
    about = [column.name for column in table.c if mentions(text, column.name)]
    if not about or not values.keys() >= set(about):
        return
    row = ", ".join(f"{_typed(store, column, values[column])} as {say.name(column)}" for column in about)
    question = f"select 1 from (select {row}) as {say.name(table.name)} where not ({text})"
    try:
        refused = await store.database.read(lambda run: run(question, ()))
    except Refused:
        return  # it speaks of something that is only in the table: what the first row will tell
    if refused:
        said = ", ".join(f"{column} = {values[column]!r}" for column in about)
        allowed = allowed_by_check(text, about[0], about, "int" if isinstance(values[about[0]], int) else "text")
        raise DeclarationError(
            f"lane {store.lane.name!r}, table {table.fullname!r}: {state} sets {said}, and a check constraint of the"
            f" table refuses that: {text}",
            hint=did_you_mean(str(values[about[0]]), [str(each) for each in allowed])
            if allowed
            else "a value it allows",
        )


def _typed(store: LaneStore, column: str, value: Any) -> str:
    literal = store.statements.literal(column, value)
    if not isinstance(store.statements, PostgresStatements):
        return literal
    return f"cast({literal} as {store.binding.sql_types[column]})"
