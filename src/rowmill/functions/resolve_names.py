"""A lane's names as the server itself understands them, for SQL that is to run under any search_path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import DeclarationError, Refused
from ..store.database import Database, Run
from ..store.lane.binding import Binding
from ..store.lane.postgres_statements import PostgresStatements
from ..store.lane.sql_literals import resolve_conditions

_TABLE = """
select c.oid, n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.oid = to_regclass($1::text)"""
#: A type's operators are in its own schema, except those of an enum; a domain has those of what it stands on.
_TYPES = """
with recursive based as (
  select a.attname, a.attnum, t.oid, t.typtype, t.typbasetype, t.typnamespace
  from pg_attribute a join pg_type t on t.oid = a.atttypid
  where a.attrelid = $1::oid and a.attnum > 0 and not a.attisdropped
  union all
  select b.attname, b.attnum, t.oid, t.typtype, t.typbasetype, t.typnamespace
  from based b join pg_type t on t.oid = b.typbasetype where b.typtype = 'd'
)
select a.attname, format_type(a.atttypid, a.atttypmod),
  b.typtype <> 'e' and b.typnamespace <> 'pg_catalog'::regnamespace
from pg_attribute a join based b on b.attnum = a.attnum and b.typtype <> 'd'
where a.attrelid = $1::oid and a.attnum > 0 and not a.attisdropped"""
#: 16: on update. One that sets its own search_path, or is not written in a language, finds its names anyway.
_TRIGGERS = """
select distinct t.tgname from pg_trigger t join pg_proc p on p.oid = t.tgfoid join pg_language l on l.oid = p.prolang
where (t.tgrelid = $1::oid or t.tgrelid in (select inhrelid from pg_inherits where inhparent = $1::oid))
  and not t.tgisinternal and t.tgenabled <> 'D' and t.tgtype & 16 <> 0 and l.lanname not in ('c', 'internal')
  and not exists (select 1 from unnest(p.proconfig) s where s like 'search\\_path=%')
order by 1"""
_PATH = """
select s.name::text, has_schema_privilege('public', s.name, 'create')
from unnest(current_schemas(false)) with ordinality s(name, place) order by s.place"""


@dataclass(frozen=True)
class Resolved:
    """A lane's table as the server describes it."""

    schema: str
    name: str
    #: Column types under their full names.
    types: Mapping[str, str]
    #: The lane's own SQL, ``ready`` and ``where``, with every name in full.
    conditions: Mapping[str, str]
    #: Triggers that look their names up in the writer's search_path, and the schemas they find them in.
    triggers: tuple[str, ...]
    path: tuple[str, ...]
    #: Those of the schemas in which everybody may create.
    open: tuple[str, ...]
    #: rowmill's table of rows whose inputs keep changing; None: the lane needs none.
    stale_runs: str | None = None


async def resolve(binding: Binding, database: Database, statements: PostgresStatements) -> Resolved:
    """Ask the server, in a transaction that is rolled back."""
    own = {}
    if isinstance(binding.lane.ready, str):
        own["ready"] = statements.ready_state()
    if binding.lane.where is not None:
        own["where"] = statements.further()

    noted = database.own("rowmill_stale_runs") if binding.lane.bounded else None
    return await database.trial(lambda run: _resolve(run, binding, statements.table, own, noted))


def _resolve(run: Run, binding: Binding, table: str, own: Mapping[str, str], noted: str | None) -> Resolved:
    stale_runs = None
    if noted is not None:
        if not (rows := run(_TABLE, (noted,))):
            raise DeclarationError(
                f"lane {binding.lane.name!r} has inputs, and the table {noted} is not there yet",
                hint="run rowmill migrate APP --apply with a role that may create tables",
            )
        quote = binding.dialect.identifier_preparer.quote
        stale_runs = f"{quote(rows[0][1])}.{quote(rows[0][2])}"
    ((oid, schema, name),) = run(_TABLE, (table,))
    triggers = tuple(row[0] for row in run(_TRIGGERS, (oid,)))
    path = [(row[0], row[1]) for row in run(_PATH, ())] if triggers else []
    try:
        conditions = resolve_conditions(run, table, own)
    except Refused as error:
        raise DeclarationError(
            f"lane {binding.lane.name!r}: its own SQL cannot be put into a function: {error.message}",
            hint="render the functions with a role that may create temporary tables in this database",
        ) from error
    types = run(_TYPES, (oid,))
    _check_operators(binding, {row[0]: row[1] for row in types if row[2]})
    return Resolved(
        schema=schema,
        name=name,
        types={row[0]: row[1] for row in types},
        conditions=conditions,
        triggers=triggers,
        path=tuple(schema for schema, _ in path if schema != "pg_catalog"),
        open=tuple(schema for schema, everybody in path if everybody),
        stale_runs=stale_runs,
    )


def _check_operators(binding: Binding, foreign: Mapping[str, str]) -> None:
    """Without the schema of its type in the search_path, a column would be compared by another type's rules."""
    compared = {*binding.key, *binding.running, *binding.state_columns(), *binding.roles.values(), *binding.shard}
    if isinstance(binding.lane.ready, Mapping):
        compared |= binding.lane.ready.keys()
    for column in sorted(compared & foreign.keys()):
        raise DeclarationError(
            f"lane {binding.lane.name!r}: the functions would have to compare column {column!r}, whose type"
            f" {foreign[column]} has operators of its own outside pg_catalog",
            hint="a text, number or enum column for keys, states and roles",
        )
