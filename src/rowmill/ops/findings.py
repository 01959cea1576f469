"""What is wrong, and what could be better, about a lane on its table: errors, and warnings that say what each costs.

Everything here is read in one transaction that cannot write and takes no lock that a reader does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from ..adopt.propose_roles import WORKER_LENGTH
from ..adopt.survey import look_at
from ..adopt.table_facts import TableFacts
from ..declare import states
from ..declare.lane import Lane
from ..migrate import ddl
from ..store.database import Run, runner
from ..store.inspect import plans
from ..store.inspect.indexes import needed
from ..store.lane.binding import Binding, fence_time
from ..store.lane.postgres_statements import PostgresStatements

ERROR, WARNING = "error", "warning"
#: Below this many rows a table is read whole, and that is quick.
SMALL = 10_000
#: How many values that no lane knows are named.
_NAMED = 5


@dataclass(frozen=True)
class CheckFinding:
    """One thing: how bad, a word for scripts, what it is and costs, and what to do."""

    level: str
    code: str
    text: str
    hint: str | None = None


@dataclass
class ExaminedLane:
    """A lane on its table: what it is bound to, how it finds its rows, and what was found."""

    binding: Binding
    rows: int
    exact: bool
    plan: plans.QueryPlan | None
    findings: list[CheckFinding] = field(default_factory=list)
    facts: TableFacts | None = None


def examine(connection: sa.Connection, binding: Binding, table: str) -> ExaminedLane:
    """Look at one lane."""
    run = runner(connection)
    facts = look_at(connection, table)
    say = plans.statements(binding)
    found = ExaminedLane(binding, facts.rows, facts.exact, plans.explain(run, say), facts=facts)
    add = found.findings.append
    postgres = isinstance(say, PostgresStatements)
    if postgres:
        _rights(run, say.table, add)
        found.findings += zones(run, binding, say.table)
    _roles(binding, facts, add)
    for role, cost in binding.lacks().items():
        add(CheckFinding(WARNING, f"no_{role}", f"no column has the role {role}: {cost}", "rowmill migrate adds one"))
    lane = binding.lane
    if lane.unfenced and "worker" not in binding.roles and fence_time(binding) is None:
        text = "nothing tells two claims apart: a worker that comes back late could overwrite another's outcome"
        add(CheckFinding(WARNING, "unfenced", text, "rowmill migrate adds worker"))
    if lane.leads_to_ready(lane.done):
        text = "a row that is done is ready again: it goes round, as often as its due time and conditions let it"
        add(CheckFinding(WARNING, "done_is_ready", text, "another value in done, if that is not meant"))
    _indexes(run, binding, facts, found, add)
    if postgres:
        _upkeep(run, binding, facts, say.table, add)
    return found


def _rights(run: Run, relation: str, add: Any) -> None:
    may_read, may_write, hidden, replica = run(
        "select has_any_column_privilege(c.oid, 'select'), has_any_column_privilege(c.oid, 'update'),"
        " row_security_active(c.oid), pg_is_in_recovery()"
        " from pg_class c where c.oid = to_regclass($1::text)",
        (relation,),
    )[0]
    if replica:
        add(
            CheckFinding(
                ERROR, "replica", "this server is a replica: nothing can be claimed here", "the primary's address"
            )
        )
    if not (may_read and may_write):
        text = "this role may not read and update the table"
        add(CheckFinding(ERROR, "rights", text, f"grant select, update on {relation} to the worker's role"))
    if hidden:
        text = "row level security applies to this role: rows that its policies hide are never claimed"
        add(CheckFinding(WARNING, "row_security", text, "a role that bypasses it (Supabase: postgres, service role)"))


def _roles(binding: Binding, facts: TableFacts, add: Any) -> None:
    written = ("worker", "claimed_at", "heartbeat_at", "attempts", "error", "finished_at", "updated_at", "run_after")
    for role in written:
        column = facts.column(binding.roles.get(role, ""))
        if column is None:
            continue
        where = f"column {column.name}, which has the role {role},"
        if column.generated:
            add(CheckFinding(ERROR, "role_generated", f"{where} is computed by the database", _off(role)))
        if column.refers_to and role in ("worker", "error"):
            add(
                CheckFinding(ERROR, "role_refers", f"{where} refers to {column.refers_to}: the claim fails", _off(role))
            )
        if role == "worker" and column.length is not None and column.length < WORKER_LENGTH:
            text = f"{where} holds {column.length} characters, and a worker's id may have more: the claim would fail"
            add(CheckFinding(WARNING, "worker_short", text, "a short --worker-id, or alter its type to text"))


def zones(run: Run, binding: Binding, relation: str) -> list[CheckFinding]:
    """Columns without a time zone whose times the lane would read and write in another zone than other programs do."""
    kinds = binding.sql_types
    naive = sorted({c for c in binding.roles.values() if "timestamp" in kinds[c] and "without time zone" in kinds[c]})
    if not naive:
        return []
    zone = binding.lane.timezone or "UTC"
    # At three moments: a zone may differ in summer alone.
    server, differs = run(
        "select current_setting('TimeZone'),"
        f" bool_or(t at time zone current_setting('TimeZone') <> t at time zone '{zone}')"
        " from (values (now()), (timestamptz '2024-01-15 12:00Z'), (timestamptz '2024-07-15 12:00Z')) v(t)",
        (),
    )[0]
    if not differs:
        return []
    hint = f'timezone="{server}" on the lane if other programs write local time there, or columns of type timestamptz'
    defaults = dict(
        run(
            "select a.attname, pg_get_expr(d.adbin, d.adrelid) from pg_attrdef d join pg_attribute a"
            " on a.attrelid = d.adrelid and a.attnum = d.adnum where d.adrelid = to_regclass($1::text)",
            (relation,),
        )
    )
    local = [column for column in naive if column in defaults and _is_local(run, defaults[column], zone)]
    if local:
        text = (
            f"a fresh default of {', '.join(local)} is the server's local time ({server}), and the lane takes it for"
            f" {zone}: rows wait, or are taken back, hours too late or too early"
        )
        return [CheckFinding(ERROR, "time_zone", text, hint)]
    left = [column for column in naive if column not in defaults]
    if binding.lane.timezone is not None or not left:
        return []
    text = (
        f"{', '.join(left)} have no time zone, and the server's is {server}: the lane reads and writes UTC there,"
        " programs that write now() local time"
    )
    return [CheckFinding(WARNING, "time_zone", text, f'{hint}; timezone="UTC" if they write UTC, too')]


def _is_local(run: Run, default: str, zone: str) -> bool:
    """Whether a fresh default is the session's local time, and not the zone's."""
    off = "abs(extract(epoch from ({})::timestamp - ({}))) {} 60"
    here = off.format(default, "localtimestamp", "<")
    away = off.format(default, f"now() at time zone '{zone}'", ">")
    run("savepoint fresh", ())
    try:
        return bool(run(f"select {here} and {away}", ())[0][0])
    except sa.exc.DBAPIError:  # a function that writes, or that the role may not call
        return False
    finally:
        run("rollback to savepoint fresh", ())


def _off(role: str) -> str:
    return f'roles={{"{role}": None}}, or another column'


def _indexes(run: Run, binding: Binding, facts: TableFacts, found: ExaminedLane, add: Any) -> None:
    say = plans.statements(binding)
    for need in needed(binding, say):
        name = need.name(binding.lane.name, say.table)
        made = ddl.index_state(run, say.table, name, isinstance(say, PostgresStatements)) == "valid"
        if made or plans.serves(run, say, need) is not None:
            continue
        if need.purpose in ("ready", "turns"):
            at = "reads the whole table" if facts.rows >= SMALL else "will read the whole table once it is large"
            text = f"no index carries the claim: it {at}"
            add(CheckFinding(WARNING, f"no_{need.purpose}_index", text, "rowmill migrate"))
        elif facts.rows >= SMALL:
            text = f"no index finds the {need.purpose} rows: {need.why}"
            add(CheckFinding(WARNING, f"no_{need.purpose}_index", text, "rowmill migrate"))
    for index in facts.indexes:
        if not index.valid:
            text = f"index {index.name} is what a failed build left: it costs on every write and serves nothing"
            add(CheckFinding(WARNING, "invalid_index", text, f"rowmill migrate, or drop index {index.name}"))
    beat = binding.roles.get("heartbeat_at", "") if binding.renew == "heartbeat_at" else ""
    for index in facts.indexes if beat else ():
        if beat in index.columns or beat in (index.predicate or ""):
            text = f"index {index.name} holds {beat}: every heartbeat writes to all indexes of the table"
            add(
                CheckFinding(WARNING, "heartbeat_indexed", text, f"drop index {index.name}; the sweep does not need it")
            )


def _upkeep(run: Run, binding: Binding, facts: TableFacts, relation: str, add: Any) -> None:
    there = ddl.settings(run, relation)
    if facts.rows >= ddl.SEEN_WHOLE:
        targets = ddl.targets(run, relation)
        for column in sorted(ddl.states_in(binding) - targets.keys()):
            text = (
                f"column {column} has no statistics target: a state that few rows are in may go unseen by the planner"
            )
            add(CheckFinding(WARNING, "no_statistics", text, "rowmill migrate"))
    if facts.rows >= ddl.HOT and not any(name.startswith("autovacuum") for name in there) and not facts.partitioned:
        text = f"autovacuum is at its defaults: it comes when {facts.rows // 5:,} row versions are dead"
        add(CheckFinding(WARNING, "autovacuum", text, "rowmill migrate"))
    renews = binding.renew != "none"
    if renews and "fillfactor" not in there and not facts.partitioned:
        text = "fillfactor is 100: on full pages every heartbeat writes to all indexes"
        add(CheckFinding(WARNING, "fillfactor", text, "rowmill migrate (it helps new pages only)"))
    touched = binding.roles.get("updated_at")
    indexed = any(touched in index.columns for index in facts.indexes) if touched else False
    if renews and indexed and facts.update_triggers:
        text = f"a trigger ({', '.join(facts.update_triggers)}) runs at every heartbeat, and {touched} is indexed"
        add(
            CheckFinding(
                WARNING, "touching_trigger", text, f"a trigger that leaves {touched} alone where only heartbeats change"
            )
        )


def across(bindings: Sequence[tuple[Binding, TableFacts | None]]) -> list[tuple[Binding, CheckFinding]]:
    """What only shows when all lanes of one environment are seen together."""
    found: list[tuple[Binding, CheckFinding]] = []
    by_table: dict[str, list[tuple[Binding, TableFacts | None]]] = {}
    for binding, facts in bindings:
        by_table.setdefault(binding.table.fullname, []).append((binding, facts))
    for several in by_table.values():
        for at, (one, _) in enumerate(several):
            for other, _ in several[at + 1 :]:
                if _claim_the_same(one, other):
                    names = f"{one.lane.name} and {other.lane.name}"
                    text = f"lanes {names} claim overlapping rows: whoever comes first has them"
                    found.append(
                        (one, CheckFinding(WARNING, "overlap", text, "a value in ready that tells them apart"))
                    )
        found += [
            (one, _done_is_running(one.lane, other.lane))
            for one, _ in several
            for other, _ in several
            if one is not other and _ends_as_running(one.lane, other.lane)
        ]
        found += _left_alone([binding for binding, _ in several], several[0][1])
    return found


def _ends_as_running(one: Lane, other: Lane) -> bool:
    """Whether a row that one lane has done looks like a running row of the other."""
    if isinstance(one.ready, str) or isinstance(other.ready, str):
        return False
    after = {**one.running_condition, **states.written(one.done)}
    running = other.running_condition
    return running.keys() <= after.keys() and states.overlaps(after, running)


def _done_is_running(one: Lane, other: Lane) -> CheckFinding:
    text = (
        f"a row that {one.name} has done looks like a running row of {other.name}: {other.name} cannot claim it before"
        " its lease is over"
    )
    ready = states.first({} if isinstance(other.ready, str) else other.ready)
    clear = {column: ready.get(column) for column in other.running if column not in one.done}
    hint = f"let done of {one.name} write what makes a row ready for {other.name} again: {clear!r}"
    return CheckFinding(ERROR, "done_is_running", text, hint)


def _claim_the_same(one: Binding, other: Binding) -> bool:
    a, b = one.lane, other.lane
    if isinstance(a.ready, str) or isinstance(b.ready, str) or a.where or b.where:
        return False
    if a.environments is not None and b.environments is not None and not set(a.environments) & set(b.environments):
        return False
    return states.overlaps(a.ready, b.ready)


def _left_alone(bindings: Sequence[Binding], facts: TableFacts | None) -> list[tuple[Binding, CheckFinding]]:
    """Values that rows have and that no lane leads out of, nor ends in."""
    found = []
    columns = {column for binding in bindings for column in ddl.states_in(binding)}
    for name in sorted(columns):
        column = facts.column(name) if facts else None
        if column is None or not column.seen or len(column.seen) > 60:
            continue
        known: set[str] = set()
        for binding in bindings:
            lane = binding.lane
            if isinstance(lane.ready, str):
                return []  # a condition of the user's own may mean any of them
            named = (lane.ready, lane.running, lane.done, lane.retry, lane.dead, lane.canceled, *lane.ignore_states)
            for values in named:
                known |= {str(option) for option in states.options((values or {}).get(name, []))}
        strange = [value for value in column.seen if value is not None and str(value) not in known]
        if strange:
            shown = ", ".join(f"{v!r} ({column.seen[v]:,})" for v in strange[:_NAMED])
            more = f" and {len(strange) - _NAMED} more" if len(strange) > _NAMED else ""
            text = f"rows are in states that no lane leads out of: {name} = {shown}{more}"
            ignored = [{name: strange[:_NAMED] if len(strange) > 1 else strange[0]}]
            hint = f"a lane for them; or, if they are meant to stay, ignore_states={ignored!r} on the lane"
            found.append((bindings[0], CheckFinding(WARNING, "left_alone", text, hint)))
    return found


def connections(run: Run) -> dict[str, int]:
    """What the server allows, and what is in use."""
    row = run(
        "select current_setting('max_connections')::int, current_setting('superuser_reserved_connections')::int,"
        " (select count(*) from pg_stat_activity where backend_type = 'client backend')::int",
        (),
    )[0]
    return {"allowed": row[0] - row[1], "in_use": row[2]}
