"""Find values that a lane would write and its table refuses, before the first claim instead of after the first run.

The database itself is asked. Each check constraint that only reads columns of a state is evaluated on that state's
values, without a stored row. Each foreign key is looked up in the table that it references. Triggers are tried on one
ready row, in a transaction that is rolled back. Without this check, a row whose outcome is refused would become dead
although its work was done. With a wrong value in ``done`` that is every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from ...declare import states
from ...errors import DatabaseError, DeclarationError, Refused, did_you_mean
from ..database import Run
from .lane_store import LaneStore
from .row_keys import Placeholders, among
from .sql_literals import allowed_by_check, mentions

#: From PostgreSQL 18 on, a constraint may be declared as not enforced.
_CHECKS = """select pg_get_expr(c.conbin, c.conrelid) from pg_constraint c
where c.contype = 'c' and c.conrelid = to_regclass($1::text)
  and coalesce((to_jsonb(c) ->> 'conenforced')::boolean, true)"""


_NAMES = """array(select a.attname from unnest(c.{0}key) with ordinality k(n, o)
  join pg_attribute a on a.attrelid = c.{0}relid and a.attnum = k.n order by k.o)::text[]"""
#: The server adds a constraint for each partition of a referenced table. Those are left out.
_REFERENCES = f"""select {_NAMES.format("con")}, c.confrelid::regclass::text, {_NAMES.format("conf")}
from pg_constraint c
where c.contype = 'f' and c.conrelid = to_regclass($1::text)
  and coalesce((to_jsonb(c) ->> 'conenforced')::boolean, true)
  and not exists (select 1 from pg_constraint p where p.oid = c.conparentid and p.conrelid = c.conrelid)"""
#: 16: on update. The trigger's definition has its WHEN condition; the function has the rest.
_TRIGGERS = """select pg_get_triggerdef(t.oid) || ' ' || p.prosrc from pg_trigger t join pg_proc p on p.oid = t.tgfoid
where t.tgrelid = to_regclass($1::text) and not t.tgisinternal and t.tgenabled <> 'D' and t.tgtype & 16 <> 0"""
#: A foreign key: its columns, the referenced table as SQL, and the referenced columns.
Reference = tuple[Sequence[str], str, Sequence[str]]
#: The most values of a referenced table that an error lists.
_NAMED = 20


async def check_states(store: LaneStore, written: Sequence[str] = states.WRITTEN, *, trial: bool = True) -> None:
    """Raises DeclarationError for the first value in these states that the table would refuse.

    ``trial``: ask the triggers, too, by writing to a row in a transaction that is rolled back.
    """
    if store.lane.own:
        return
    for text in await _constraints_of(store).checks():
        for state in written:
            await _ask(store, text, state, _plain(getattr(store.lane, state)))
    for reference in await _constraints_of(store).references():
        for state in written:
            await _look_up(store, reference, state, _plain(getattr(store.lane, state)))
    for state, reason in (await _tried(store, written, certain=True) if trial else {}).items():
        raise DeclarationError(
            f"lane {store.lane.name!r}, table {store.binding.table.fullname!r}: a trigger of the table refuses {state}"
            f" ({_said(_plain(getattr(store.lane, state)))}): {reason}",
            hint=f"another value in {state}, or a trigger that allows it",
        )


async def doubtful_states(store: LaneStore) -> dict[str, str]:
    """States that a trigger refused in the trial, with its message, if the trigger also reads other columns.

    The handler may write those columns, so a real run may succeed.
    """
    refusals = {} if store.lane.own else await _tried(store, states.WRITTEN, certain=False)
    return {f"{state} ({_said(_plain(getattr(store.lane, state)))})": reason for state, reason in refusals.items()}


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{column} = {value!r}" for column, value in values.items())


def _plain(values: Any) -> Mapping[str, Any]:
    """The values of a state that are known in advance."""
    if not isinstance(values, Mapping):
        return {}
    return {column: value for column, value in states.written(values).items() if value is not states.NOW}


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
        return  # it reads values that are only in the table, so only a real row can show the result
    if refused:
        impossible = _said({column: values[column] for column in about})
        allowed = allowed_by_check(text, about[0], about, "int" if isinstance(values[about[0]], int) else "text")
        raise DeclarationError(
            f"lane {store.lane.name!r}, table {table.fullname!r}: {state} sets {impossible}, and a check constraint of"
            f" the table refuses that: {text}",
            hint=did_you_mean(str(values[about[0]]), [str(each) for each in allowed])
            if allowed
            else "a value it allows",
        )


async def _look_up(store: LaneStore, reference: Reference, state: str, values: Mapping[str, Any]) -> None:
    columns, relation, referred = reference
    if any(values.get(column) is None for column in columns):
        return  # NULL references nothing, and columns outside the state keep the row's own values
    say = store.statements
    pairs = zip(columns, referred, strict=True)
    tests = " and ".join(f"{say.name(other)} = {_typed(store, column, values[column])}" for column, other in pairs)
    name = say.name(referred[0])
    try:
        if await store.database.read(lambda run: run(f"select 1 from {relation} where {tests} limit 1", ())):
            return
        text = f"select distinct {name} from {relation} order by {name} limit {_NAMED + 1}"
        known = [str(row[0]) for row in await store.database.read(lambda run: run(text, ()))]
    except Refused:
        return  # the role may not read that table, so only a real row can show the result
    listed = len(columns) == 1 and 0 < len(known) <= _NAMED
    raise DeclarationError(
        f"lane {store.lane.name!r}, table {store.binding.table.fullname!r}: {state} sets"
        f" {_said({column: values[column] for column in columns})}, and table {relation!r} has no such row: a foreign"
        " key refuses that",
        hint=f"one of {', '.join(known)}; or insert it into {relation}" if listed else f"insert it into {relation}",
    )


async def _tried(store: LaneStore, written: Sequence[str], *, certain: bool) -> dict[str, str]:
    """States that a trigger refused on one ready row, with its message.

    ``certain``: only states where the triggers read no other columns than the state's own; otherwise only the others.
    """
    sources = await _constraints_of(store).triggers()
    about = {column.name for column in store.binding.table.c if any(mentions(text, column.name) for text in sources)}
    wanted = [s for s in written if (v := getattr(store.lane, s)) and (about <= _plain(v).keys()) is certain]
    refused: dict[str, str] = {}
    if not sources or not wanted:
        return refused
    # Without the right to write, or on a read-only database, there is no trial.
    with suppress(DatabaseError, sa.exc.DBAPIError):
        await store.database.trial(lambda run: _try(store, run, wanted, refused))
    return refused


def _try(store: LaneStore, run: Run, wanted: Sequence[str], refused: dict[str, str]) -> None:
    say, marks = store.statements, Placeholders(store.binding)
    keys = say.names(store.binding.key)
    for text in say.sql.time_limits(5, 2):
        run(text, ())
    rows = run(f"select {keys} from {say.table} where {say.ready_state()} limit 1{say.sql.lock_to_write}", ())
    if not rows:
        return
    this = among(say, [tuple(rows[0])], marks)

    def write(values: dict[str, str]) -> None:
        run(f"update {say.table} set {say.assignments(values)}{say.moment(values)} where {this}", marks.given())
        if say.sql.check_deferred:
            run(say.sql.check_deferred, ())

    for state in wanted:
        run("savepoint trial", ())
        reached = "running"  # a refusal of an earlier step says nothing about the state itself
        try:
            write(say.claim_set("'w'"))
            if state != "running":
                reached = state
                write(say.settle_set(state, "'trial'", "0"))
        except sa.exc.DBAPIError as error:
            if reached == state and (message := _raised_by_trigger(error)) is not None:
                refused[state] = message
        run("rollback to savepoint trial", ())


def _raised_by_trigger(error: BaseException | None) -> str | None:
    """The trigger's message; None if the refusal has another cause."""
    while error is not None:
        if getattr(error, "context", None) or getattr(error, "sqlite_errorname", "") == "SQLITE_CONSTRAINT_TRIGGER":
            return str(error).splitlines()[0]
        error = getattr(error, "orig", None) or error.__cause__
    return None


def _typed(store: LaneStore, column: str, value: Any) -> str:
    say = store.statements
    return say.sql.typed(say.literal(column, value), store.binding.sql_types.get(column, ""))


class PostgresConstraints:
    """The constraints and triggers of a table, from PostgreSQL's catalog."""

    def __init__(self, store: LaneStore) -> None:
        self.store = store

    async def _rows(self, text: str) -> Sequence[Any]:
        return await self.store.database.read(lambda run: run(text, (self.store.statements.table,)))

    async def checks(self) -> Sequence[str]:
        """The check constraints, as SQL."""
        return [row[0] for row in await self._rows(_CHECKS)]

    async def references(self) -> Sequence[Reference]:
        return [(row[0], row[1], row[2]) for row in await self._rows(_REFERENCES)]

    async def triggers(self) -> Sequence[str]:
        """The triggers that run when a row is updated, as SQL."""
        return [row[0] for row in await self._rows(_TRIGGERS)]


class SqliteConstraints:
    """The same for SQLite, from the SQL texts that created the table."""

    def __init__(self, store: LaneStore) -> None:
        self.store, self.table = store, store.binding.table.name

    async def checks(self) -> Sequence[str]:
        """The check constraints, as SQL."""

        def read(connection: sa.Connection) -> list[str]:
            text = connection.exec_driver_sql("select sql from sqlite_master where name = ?", (self.table,)).scalar()
            # The table's own collation decides which texts are equal, and a row that is not stored has no collation.
            if "collate" in str(text).lower():
                return []
            return [str(check["sqltext"]) for check in sa.inspect(connection).get_check_constraints(self.table)]

        return await self.store.database.reflect(read)

    async def references(self) -> Sequence[Reference]:

        def read(connection: sa.Connection) -> list[Reference]:
            quote = connection.dialect.identifier_preparer.quote
            keys = sa.inspect(connection).get_foreign_keys(self.table)
            return [(key["constrained_columns"], quote(key["referred_table"]), key["referred_columns"]) for key in keys]

        return await self.store.database.reflect(read)

    async def triggers(self) -> Sequence[str]:
        """The triggers that run when a row is updated, as SQL."""
        text = "select sql from sqlite_master where type = 'trigger' and tbl_name = :n and sql like '%update%'"
        return [row[0] for row in await self.store.database.read(lambda run: run(text, {"n": self.table}))]


def _constraints_of(store: LaneStore) -> PostgresConstraints | SqliteConstraints:
    return _BY_DIALECT[store.database.dialect.name](store)


_BY_DIALECT: dict[str, type[PostgresConstraints | SqliteConstraints]] = {
    "postgresql": PostgresConstraints,
    "sqlite": SqliteConstraints,
}
