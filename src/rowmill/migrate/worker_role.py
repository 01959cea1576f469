"""A role for workers that may do what the lanes need, and nothing else; PostgreSQL only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..declare.roles import READ_ONLY
from ..declare.schedules import Schedules
from ..store.database import Database, Run
from ..store.lane.binding import Binding
from ..store.lane.reflect import table_name
from ..store.own import schema

#: What workers write of rowmill's own. Not the list of steps, nor what only operators change.
_WRITTEN = (
    "rowmill_workers", "rowmill_gates", "rowmill_failures", "rowmill_minutes", "rowmill_sightings", "rowmill_suspects",
    "rowmill_stale_runs", "rowmill_waits", "rowmill_run_logs",
)  # fmt: skip
_OF_TASKS = ("rowmill_jobs", "rowmill_steps", "rowmill_crons")
_RELATION = """
select n.nspname, c.relrowsecurity from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.oid = to_regclass($1::text)"""


async def grants(
    database: Database,
    bindings: Sequence[Binding],
    role: str,
    *,
    hidden: Mapping[str, Sequence[str]],
    written: Mapping[str, Sequence[str]],
    schedules: Sequence[Schedules] = (),
) -> list[str]:
    """The statements that make such a role, or bring one up to date. It reads tables of ``schedules``.

    ``hidden``: columns of a lane's table that the role does not see. ``written``: columns that the lane's handler
    returns. Both by lane. The states and what rowmill writes by itself are known.
    """
    quote = database.dialect.identifier_preparer.quote
    name = quote(role)
    literal = role.replace("'", "''")
    texts = [
        f"do $$ begin\n  if not exists (select 1 from pg_roles where rolname = '{literal}') then\n"
        f"    create role {name} login;\n  end if;\nend $$"
    ]
    tables: dict[str, tuple[list[str], list[str], set[str]]] = {}
    schemas: dict[str, None] = {}
    for binding in bindings:
        if binding.lane.own:
            continue
        full = binding.dialect.identifier_preparer.format_table(binding.table)
        seen, touched, secret = tables.setdefault(full, ([], [], set()))
        secret |= set(hidden.get(binding.lane.name, ()))
        roles = {column for kind, column in binding.roles.items() if kind not in READ_ONLY}
        touched += sorted(binding.state_columns() | roles | set(written.get(binding.lane.name, ())))
        seen += [c for c in binding.table.c.keys() if c not in seen]  # noqa: SIM118 - a column collection
    for full, (seen, touched, secret) in tables.items():
        namespace, secured = (await database.read(lambda run, full=full: run(_RELATION, (full,))))[0]  # type: ignore[misc]
        schemas[quote(namespace)] = None
        columns = ", ".join(quote(c) for c in seen if c not in secret)
        # Rows are found again by their place; and what is written back is the states, the roles, and what is named.
        texts.append(f"grant select ({columns}, ctid, tableoid) on {full} to {name}")
        texts.append(f"grant update ({', '.join(quote(c) for c in dict.fromkeys(touched))}) on {full} to {name}")
        if secured:
            policy = quote(f"rowmill worker {role}")
            texts.append(f"drop policy if exists {policy} on {full}")
            texts.append(f"create policy {policy} on {full} to {name} using (true) with check (true)")
    for source in schedules:
        namespace, table = table_name(source.table, database.dialect.name)
        texts.append(f"grant select on {'.'.join(quote(part) for part in (namespace, table) if part)} to {name}")
        if namespace is not None:
            schemas[quote(namespace)] = None
    made = set(schema.own_tables())
    own = [t for t in _WRITTEN if t in made]
    if any(binding.lane.own for binding in bindings):
        own += [t for t in _OF_TASKS if t in made]
        texts.append(f"grant usage on sequence {database.own('rowmill_jobs_id_seq')} to {name}")
    schemas[await database.read(lambda run: _own_schema(database, run))] = None
    texts.append(f"grant select on {database.own('rowmill_schema')} to {name}")
    listed = ", ".join(database.own(table) for table in own)
    texts.append(f"grant select, insert, update, delete on {listed} to {name}")
    texts[1:1] = [f"grant usage on schema {namespace} to {name}" for namespace in schemas]
    return texts


def _own_schema(database: Database, run: Run) -> str:
    quote = database.dialect.identifier_preparer.quote
    if database.schema is not None:
        return quote(database.schema)
    return quote(str(run("select current_schema()", ())[0][0]))
