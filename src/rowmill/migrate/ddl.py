"""The DDL that serves a Mill's lanes: what to add, why, and how to remove it. Additive only.

Columns are nullable or have a constant default, so no row is rewritten; indexes are partial and built beside the
traffic; a setting that the user made himself is left as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..declare.lane import Lane
from ..plural import plural
from ..store.database import Database, Run, runner
from ..store.dialect import Dialect
from ..store.inspect import plans
from ..store.inspect.indexes import NeededIndex, in_words, needed
from ..store.lane.binding import Binding, bind, look
from ..store.lane.missing_columns import MissingColumn
from ..store.lane.postgres_wake_trigger import installed, served, wake_trigger
from ..store.lane.statements import Statements
from ..store.own import schema
from ..store.own.ddl_ledger import Record

#: Up to so many rows ANALYZE looks at every one with the default target; then rare states go unseen.
SEEN_WHOLE, TARGET = 30_000, 1000
#: From so many rows on, a fifth of them dead is too many before autovacuum comes.
HOT = 100_000
AUTOVACUUM = {"autovacuum_vacuum_scale_factor": "0.01", "autovacuum_analyze_scale_factor": "0.02"}
FILLFACTOR = {"fillfactor": "80"}


@dataclass(frozen=True)
class SchemaChange:
    """One change: its statement, the reason, and how to undo each thing that it adds."""

    kind: str
    relation: str
    statement: str
    why: str
    records: tuple[Record, ...] = ()
    #: Built concurrently, outside a transaction.
    concurrent: bool = False
    #: A failed build left an index of this name: it is replaced.
    leftover: bool = False
    #: The statements in order, if there are several.
    steps: tuple[str, ...] = ()

    @property
    def reasons(self) -> str:
        """Why, as lines of an SQL comment."""
        return self.why.replace("; ", "\n-- ")

    @property
    def what(self) -> str:
        """A short description."""
        named = [record.name for record in (self.records[-1:] if self.steps else self.records)]
        names = ", ".join(named)
        columns = plural(len(named), "column")
        return {"columns": f"{columns} {names}", "index": f"index {names}", "own": "rowmill's own tables",
                "statistics": f"statistics target of {names}", "storage": f"storage parameters {names}",
                "wake": "wake trigger"}[self.kind]  # fmt: skip


@dataclass(frozen=True)
class LaneOutline:
    """A lane in one environment as it will be, and what its table lacks."""

    lane: Lane
    binding: Binding
    lacking: tuple[MissingColumn, ...]
    table: sa.Table


async def outline(lane: Lane, environment: str, database: Database) -> LaneOutline:
    """A lane with the columns that it will have; raises if adding columns cannot make it work."""
    table, lacks = await look(lane, environment, database)
    return LaneOutline(lane, await bind(lane, environment, database, planned=True), tuple(lacks), table)


async def outlines(lanes: Iterable[Lane], environment: str, database: Database) -> list[LaneOutline]:
    """Every lane as it will be. Queues of tasks only once rowmill's own tables are there: they are made as needed."""
    own = (await schema.taken(database)).has(schema.JOBS)
    return [await outline(lane, environment, database) for lane in lanes if own or not lane.own]


async def changes(
    database: Database, outlines: Sequence[LaneOutline], *, wake: bool | None = False
) -> list[SchemaChange]:
    """What is still to be done in one environment: to the user's tables, in order, then to rowmill's own.

    ``wake``: True also makes the wake triggers, None only brings those up to date that are there.
    """
    own = await schema.taken(database)
    missing = [step for step in schema.STEPS if not own.has(step)]
    made: list[SchemaChange] = []
    by_table: dict[str, list[LaneOutline]] = {}
    for each in sorted(outlines, key=lambda each: each.lane.own):
        by_table.setdefault(plans.statements(each.binding).table, []).append(each)
    for relation, several in by_table.items():
        made += _columns(relation, several)
    for several in by_table.values():
        made += await database.read_only(functools.partial(_for_rows, several=several))
    if missing:
        texts = await database.read(lambda run: schema.script(database, run, missing))
        made.append(SchemaChange("own", "", ";\n".join(texts), "; ".join(step.what for step in missing)))
    if wake is not False and database.sql.notify is not None:
        for relation, several in by_table.items():
            made += await _wake(database, relation, several, wanted=bool(wake))
    return made


async def _wake(
    database: Database, relation: str, several: Sequence[LaneOutline], *, wanted: bool
) -> list[SchemaChange]:
    """The trigger that wakes workers; it comes after rowmill's own schema, where its function is."""
    bindings = served([each.binding for each in several])
    if not bindings or not (wanted or await database.read(lambda run: installed(run, relation) is not None)):
        return []
    trigger = await wake_trigger(database, relation, bindings, planned=any(each.lacking for each in several))
    if trigger is None:
        return []
    records = tuple(
        Record(kind, trigger.sequence if kind == "sequence" else relation, name, made, undo)
        for kind, name, made, undo in trigger.parts
    )
    why = (
        "rows that any client makes ready start within milliseconds, and not at the next poll"
        "; at most 50 notifications a second, 200 at once"
    )
    return [SchemaChange("wake", relation, ";\n".join(trigger.steps), why, records, steps=trigger.steps)]


def _columns(relation: str, several: Sequence[LaneOutline]) -> list[SchemaChange]:
    lacks = {lack.column: lack for each in several for lack in each.lacking}
    if not lacks:
        return []
    statements = plans.statements(several[0].binding)
    records = [
        Record("column", relation, name, f"alter table {relation} add column {lack.ddl(statements.name)}",
               f"alter table {relation} drop column {statements.name(name)}")
        for name, lack in lacks.items()
    ]  # fmt: skip
    texts = statements.sql.add_columns(relation, [lack.ddl(statements.name) for lack in lacks.values()])
    each = len(records) // len(texts)  # all of them, or one
    changes = []
    for position, text in enumerate(texts):
        added = tuple(records[position * each : (position + 1) * each])
        why = "; ".join(f"{record.name}: {lacks[record.name].why}" for record in added)
        changes.append(SchemaChange("columns", relation, text, why, added))
    return changes


def _for_rows(connection: sa.Connection, several: Sequence[LaneOutline]) -> list[SchemaChange]:
    """Indexes, and on PostgreSQL statistics and storage, of one table."""
    run = runner(connection)
    made = [change for each in several for change in _indexes(run, each)]
    statements = plans.statements(several[0].binding)
    if statements.sql.has_catalog:
        made += _statistics(run, several, statements.table)
        made += _storage(run, several, statements.table)
    return list({change.statement: change for change in made}.values())


def _indexes(run: Run, each: LaneOutline) -> Iterable[SchemaChange]:
    binding = each.binding
    statements = plans.statements(binding)
    planned = {lack.column for lack in each.lacking}
    for need in needed(binding, statements):
        name = need.name(binding.lane.name, statements.table)
        state = index_state(run, statements.sql, statements.table, name)
        if state == "valid":
            continue
        text = in_words(need, statements, name, concurrently=True)
        unseen = any(statements.name(column) in f"{need.sort} {need.predicate}" for column in planned)
        if state is None and not unseen and plans.serves(run, statements, need) is not None:
            continue
        schema_of = ""
        if statements.sql.has_catalog:
            if parts := _parts(run, statements.table):
                yield _in_parts(run, statements, need, name, parts)
                continue
            schema_of = _qualified(run, statements.table)
        how = statements.sql.concurrently
        record = Record(
            "index", statements.table, name, text, f"drop index {how}if exists {schema_of}{statements.name(name)}"
        )
        yield SchemaChange("index", statements.table, text, need.why, (record,), bool(how), state == "invalid")


def _parts(run: Run, relation: str) -> list[tuple[str, str | None, bool, int]]:
    """A partitioned table's parts, with each one's parent, whether it is a leaf, and its number; itself first."""
    rows = run(
        "select quote_ident(n.nspname) || '.' || quote_ident(c.relname), t.isleaf, c.oid::bigint,"
        " (select quote_ident(pn.nspname) || '.' || quote_ident(p.relname) from pg_class p"
        "  join pg_namespace pn on pn.oid = p.relnamespace where p.oid = t.parentrelid and t.level > 0)"
        " from pg_partition_tree(to_regclass($1::text)) t join pg_class c on c.oid = t.relid"
        " join pg_namespace n on n.oid = c.relnamespace order by t.level, c.oid",
        (relation,),
    )
    parts = [(row[0], row[3], row[1], row[2]) for row in rows]
    return parts if len(parts) > 1 or (parts and not parts[0][2]) else []


def _in_parts(run: Run, statements: Statements, need: NeededIndex, name: str, parts: Sequence[Any]) -> SchemaChange:
    """An index of a partitioned table: none can be built on it beside the traffic, but one on each part, and attached.

    The list has the parts before the whole, so that the whole, which holds them, goes first when it is taken away.
    """
    table, names = statements.table, {parts[0][0]: name}
    steps, records = [], []
    for relation, _, leaf, number in parts:
        names.setdefault(relation, f"{name[:50]}_{number}")
        own, index_schema = statements.name(names[relation]), _qualified(run, relation)
        how, only = ("concurrently ", "") if leaf else ("", "only ")
        steps.append(f"create index {how}{own} on {only}{relation} ({need.order}) where {need.predicate}")
        undo = f"drop index {'concurrently ' if leaf else ''}if exists {index_schema}{own}"
        records.append(
            Record("index", relation if relation != parts[0][0] else table, names[relation], steps[-1], undo)
        )
    for relation, parent, _, _ in reversed(parts):
        if parent is not None:
            whole, part = (f"{_qualified(run, r)}{statements.name(names[r])}" for r in (parent, relation))
            steps.append(f"alter index {whole} attach partition {part}")
    return SchemaChange("index", table, ";\n".join(steps), need.why, tuple(reversed(records)), True, steps=tuple(steps))


def _qualified(run: Run, relation: str) -> str:
    """The schema that an index goes to, with its dot: the one its table is in."""
    rows = run(
        "select quote_ident(n.nspname) from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where c.oid = to_regclass($1::text)",
        (relation,),
    )
    return f"{rows[0][0]}." if rows else ""


def index_state(run: Run, sql: Dialect, relation: str, name: str) -> str | None:
    """``valid``, ``invalid`` (a build under way, or one that failed), or None."""
    rows = run(*sql.index_state(relation, name))
    return rows[0][0] if rows else None


def settings(run: Run, relation: str) -> dict[str, str]:
    """A table's storage parameters."""
    rows = run(
        "select option_name, option_value from pg_class, pg_options_to_table(reloptions)"
        " where oid = to_regclass($1::text)",
        (relation,),
    )
    return {row[0]: row[1] for row in rows}


def targets(run: Run, relation: str) -> dict[str, int]:
    """Statistics targets that were set by hand, by column."""
    rows = run(
        "select attname, attstattarget::int from pg_attribute where attrelid = to_regclass($1::text) and attnum > 0"
        " and not attisdropped and coalesce(attstattarget, -1) >= 0",
        (relation,),
    )
    return {row[0]: row[1] for row in rows}


def size(run: Run, relation: str) -> int:
    """About how many rows a table has, its parts included."""
    rows = run(
        "select coalesce(sum(greatest(case when c.relpages > 0 then c.reltuples / c.relpages"
        " * (pg_relation_size(c.oid) / 8192) else pg_relation_size(c.oid) / 100.0 end, 0)), 0)::bigint"
        " from pg_class c where c.oid = to_regclass($1::text)"
        " or c.oid in (select inhrelid from pg_inherits where inhparent = to_regclass($1::text))",
        (relation,),
    )
    return int(rows[0][0])


def _statistics(run: Run, several: Sequence[LaneOutline], relation: str) -> list[SchemaChange]:
    if size(run, relation) < SEEN_WHOLE:
        return []
    set_already = targets(run, relation)
    made: dict[str, SchemaChange] = {}
    for each in several:
        binding = each.binding
        statements = plans.statements(binding)
        for column in sorted(states_in(binding)):
            if column in set_already or column not in each.table.c:
                continue
            statement = f"alter table {relation} alter column {statements.name(column)} set statistics {TARGET}"
            undo = f"alter table {relation} alter column {statements.name(column)} set statistics -1"
            record = Record("statistics", relation, column, statement, undo, str(TARGET))
            why = "tells the planner about states that few rows are in"
            made[column] = SchemaChange("statistics", relation, statement, why, (record,))
    return list(made.values())


def states_in(binding: Binding) -> set[str]:
    """Columns whose values are states: no flags, no times."""
    kinds = (sa.String, sa.Integer, sa.Enum)
    columns = binding.state_columns() - binding.claimed - binding.only_written
    return {column for column in columns if isinstance(binding.kinds[column], kinds)}


def _storage(run: Run, several: Sequence[LaneOutline], relation: str) -> list[SchemaChange]:
    if any(each.binding.partitioned for each in several):
        return []  # a parent has none; its parts are the user's affair
    wanted = dict(AUTOVACUUM) if size(run, relation) >= HOT else {}
    if any(each.binding.renew != "none" for each in several):
        wanted |= FILLFACTOR
    there = settings(run, relation)
    wanted = {name: value for name, value in wanted.items() if name not in there}
    if not wanted:
        return []
    reasons = []
    if "fillfactor" in wanted:
        reasons.append("leaves free space on each new page, so that a heartbeat does not have to write to the indexes")
    if wanted.keys() & AUTOVACUUM.keys():
        reasons.append("dead row versions are cleared early")
    records = tuple(
        Record("storage", relation, name, f"alter table {relation} set ({name} = {value})",
               f"alter table {relation} reset ({name})", value)
        for name, value in wanted.items()
    )  # fmt: skip
    pairs = ", ".join(f"{name} = {value}" for name, value in wanted.items())
    return [SchemaChange("storage", relation, f"alter table {relation} set ({pairs})", "; ".join(reasons), records)]
