"""``rowmill check``: every lane against every environment: errors, and warnings that say what each costs.

A lane is examined in one transaction that cannot write and takes no lock that a reader does not. Triggers and claims
are tried in transactions that are rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from ..adopt.lane_file import quoted_table
from ..adopt.propose_roles import WORKER_LENGTH
from ..adopt.survey import look_at
from ..adopt.table_facts import TableFacts
from ..declare import states
from ..declare.lane import Lane
from ..declare.roles import SHOWN
from ..engine.environment import _refuse_overlaps
from ..engine.resources import Resources
from ..engine.worker import check_handler
from ..errors import DatabaseError, DeclarationError, RowmillError, Unserved
from ..migrate import ddl
from ..mill import Mill
from ..plural import plural
from ..store import Database, LaneStore, examine_lane, store_for
from ..store.database import Run, runner
from ..store.inspect import plans
from ..store.inspect.indexes import needed
from ..store.inspect.lane_view import check_file
from ..store.jobs.schedule_rows import schedule_list
from ..store.lane.binding import Binding
from ..store.lane.postgres_wake_trigger import installed, mark, served
from ..store.lane.refused_rows import refused_claims
from ..store.lane.refused_states import doubtful_states
from ..store.lane.row_keys import written
from ..store.lane.statements import Statements
from .check_statements import statement_problems
from .row_actions import ended_by_others

ERROR, WARNING = "error", "warning"
#: Below this many rows a table is read whole, and that is quick.
SMALL = 10_000
#: How many values that no lane knows are named.
_NAMED = 5
#: Ready rows whose claim is tried.
_TRIED = 100
#: Connections of one process in one environment, beside the engine's own: heartbeat, listener, finish blocks; and
#: how many more heartbeats may open while tables are locked.
_HEARTBEAT, _LISTEN, _FINISH, _LOCKED = 1, 1, 4, 4


@dataclass(frozen=True)
class CheckFinding:
    """One finding: its level, a code for scripts, the text with the cost, and a hint."""

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
    #: Whether a trigger wakes workers when any client makes rows ready; None where none is needed.
    wake_trigger: bool | None = None

    def error(self, code: str, text: str, hint: str | None = None) -> None:
        """Add an error: the lane cannot work."""
        self.findings.append(CheckFinding(ERROR, code, text, hint))

    def warn(self, code: str, text: str, hint: str | None = None) -> None:
        """Add a warning: the lane works, at a cost."""
        self.findings.append(CheckFinding(WARNING, code, text, hint))


def examine(connection: sa.Connection, binding: Binding, table: str) -> ExaminedLane:
    run = runner(connection)
    facts = look_at(connection, table)
    statements = plans.statements(binding)
    examined = ExaminedLane(binding, facts.rows, facts.exact, plans.explain(run, statements), facts=facts)
    if statements.sql.has_roles:
        _rights(run, statements.table, examined)
    examined.findings += zones(run, statements)
    _roles(binding, facts, examined)
    for role, cost in binding.lacks().items():
        examined.warn(f"no_{role}", f"no column has the role {role}: {cost}", "rowmill migrate APP --apply adds one")
    lane = binding.lane
    if lane.unfenced and "worker" not in binding.roles and binding.fence_time is None:
        text = "nothing tells two claims apart: a worker that comes back late could overwrite another's outcome"
        examined.warn("unfenced", text, "rowmill migrate APP --apply adds worker")
    if lane.leads_to_ready(lane.done):
        text = "a done row is ready again: it runs over and over, as often as its due time and conditions allow"
        examined.warn("done_is_ready", text, "give done another value, if this is not intended")
    _indexes(run, binding, facts, examined)
    if statements.sql.has_catalog:
        _upkeep(run, binding, facts, statements.table, examined)
    return examined


def _rights(run: Run, relation: str, examined: ExaminedLane) -> None:
    may_read, may_write, hidden, replica = run(
        "select has_any_column_privilege(c.oid, 'select'), has_any_column_privilege(c.oid, 'update'),"
        " row_security_active(c.oid), pg_is_in_recovery()"
        " from pg_class c where c.oid = to_regclass($1::text)",
        (relation,),
    )[0]
    if replica:
        examined.error("replica", "this server is a replica: nothing can be claimed here", "use the primary's address")
    if not (may_read and may_write):
        text = "this role may not read and update the table"
        examined.error("rights", text, f"grant select, update on {relation} to the worker's role")
    if hidden:
        text = "row level security applies to this role: rows that its policies hide are never claimed"
        examined.warn("row_security", text, "use a role that bypasses it (Supabase: postgres, service role)")


def _roles(binding: Binding, facts: TableFacts, examined: ExaminedLane) -> None:
    for role in SHOWN:
        column = facts.column(binding.roles.get(role, ""))
        if column is None:
            continue
        where = f"column {column.name}, which has the role {role},"
        if column.generated:
            examined.error("role_generated", f"{where} is computed by the database", _off(role))
        if column.refers_to and role in ("worker", "error"):
            examined.error("role_refers", f"{where} refers to {column.refers_to}: the claim fails", _off(role))
        if role == "worker" and column.length is not None and column.length < WORKER_LENGTH:
            text = f"{where} holds {column.length} characters, and a worker's id may have more: the claim would fail"
            examined.warn("worker_short", text, "use a short --worker-id, or change the column's type to text")


def zones(run: Run, statements: Statements) -> list[CheckFinding]:
    """Columns without a time zone whose times the lane would read and write in another zone than other programs do."""
    binding, relation = statements.binding, statements.table
    kinds = binding.sql_types
    naive = sorted({c for c in binding.roles.values() if "timestamp" in kinds[c] and "without time zone" in kinds[c]})
    if not naive or not statements.sql.typed_columns:
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
            f"the default of {', '.join(local)} is the server's local time ({server}), but the lane reads it as {zone}:"
            " rows wait, or are taken back, hours too late or too early"
        )
        return [CheckFinding(ERROR, "time_zone", text, hint)]
    left = [column for column in naive if column not in defaults]
    if binding.lane.timezone is not None or not left:
        return []
    text = (
        f"{', '.join(left)} {plural(len(left), 'has', 'have')} no time zone, and the server's is {server}: the lane"
        " reads and writes UTC there, but programs that write now() write local time"
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


def _indexes(run: Run, binding: Binding, facts: TableFacts, examined: ExaminedLane) -> None:
    statements = plans.statements(binding)
    for need in needed(binding, statements):
        name = need.name(binding.lane.name, statements.table)
        made = ddl.index_state(run, statements.sql, statements.table, name) == "valid"
        if made or plans.serves(run, statements, need) is not None:
            continue
        if need.purpose in ("ready", "turns"):
            at = "reads the whole table" if facts.rows >= SMALL else "will read the whole table once it is large"
            text = f"no index supports the claim: it {at}"
            examined.warn(f"no_{need.purpose}_index", text, "rowmill migrate APP --apply")
        elif facts.rows >= SMALL:
            text = f"an index is missing that {need.why}"
            examined.warn(f"no_{need.purpose}_index", text, "rowmill migrate APP --apply")
    for index in facts.indexes:
        if not index.valid:
            text = f"index {index.name} is left over from a failed build: it slows every write and is never used"
            examined.warn("invalid_index", text, f"rowmill migrate APP --apply, or drop index {index.name}")
    beat = binding.roles.get("heartbeat_at", "") if binding.renew == "heartbeat_at" else ""
    for index in facts.indexes if beat else ():
        if beat in index.columns or beat in (index.predicate or ""):
            text = f"index {index.name} holds {beat}: every heartbeat writes to all indexes of the table"
            examined.warn("heartbeat_indexed", text, f"drop index {index.name}; the sweep does not need it")


def _upkeep(run: Run, binding: Binding, facts: TableFacts, relation: str, examined: ExaminedLane) -> None:
    there = ddl.settings(run, relation)
    if facts.rows >= ddl.SEEN_WHOLE:
        targets = ddl.targets(run, relation)
        for column in sorted(ddl.states_in(binding) - targets.keys()):
            text = (
                f"column {column} has no statistics target: the planner may not know about states that few rows are in"
            )
            examined.warn("no_statistics", text, "rowmill migrate APP --apply")
    if facts.rows >= ddl.HOT and not any(name.startswith("autovacuum") for name in there) and not facts.partitioned:
        text = f"autovacuum has its default settings: it runs only after {facts.rows // 5:,} dead row versions"
        examined.warn("autovacuum", text, "rowmill migrate APP --apply")
    renews = binding.renew != "none"
    if renews and "fillfactor" not in there and not facts.partitioned:
        text = "fillfactor is 100: pages have no free space, so every heartbeat writes to all indexes"
        examined.warn("fillfactor", text, "rowmill migrate (it helps new pages only)")
    touched = binding.roles.get("updated_at")
    indexed = any(touched in index.columns for index in facts.indexes) if touched else False
    if renews and indexed and facts.update_triggers:
        text = f"a trigger ({', '.join(facts.update_triggers)}) runs at every heartbeat, and {touched} is indexed"
        examined.warn("touching_trigger", text, f"change the trigger so that a heartbeat alone does not set {touched}")


def across(bindings: Sequence[tuple[Binding, TableFacts | None]]) -> list[tuple[Binding, CheckFinding]]:
    """Check all lanes of an environment against each other."""
    findings: list[tuple[Binding, CheckFinding]] = []
    by_table: dict[str, list[tuple[Binding, TableFacts | None]]] = {}
    for binding, facts in bindings:
        by_table.setdefault(binding.table.fullname, []).append((binding, facts))
    for several in by_table.values():
        for at, (one, _) in enumerate(several):
            for other, _ in several[at + 1 :]:
                if _claim_the_same(one, other):
                    names = f"{one.lane.name} and {other.lane.name}"
                    text = f"lanes {names} claim overlapping rows: either of them may claim a row"
                    findings.append(
                        (one, CheckFinding(WARNING, "overlap", text, "a value in ready that tells them apart"))
                    )
        findings += [
            (one, _done_is_running(one.lane, other.lane))
            for one, _ in several
            for other, _ in several
            if one is not other and one.lane.overlaps({}, other.lane, {}) and _ends_as_running(one.lane, other.lane)
        ]
        findings += _left_alone([binding for binding, _ in several], several[0][1])
    return findings


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
    return a.overlaps(a.ready, b, b.ready)


def _left_alone(bindings: Sequence[Binding], facts: TableFacts | None) -> list[tuple[Binding, CheckFinding]]:
    """State values of rows that no lane declares."""
    findings = []
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
            named = (
                lane.ready,
                lane.running,
                lane.done,
                lane.retry,
                lane.dead,
                lane.canceled,
                lane.expired,
                *lane.ignore_states,
            )
            for values in named:
                known |= {str(option) for option in states.options((values or {}).get(name, []))}
        strange = [value for value in column.seen if value is not None and str(value) not in known]
        if strange:
            shown = ", ".join(f"{v!r} ({column.seen[v]:,})" for v in strange[:_NAMED])
            more = f" and {len(strange) - _NAMED} more" if len(strange) > _NAMED else ""
            text = f"rows are in states that no lane declares: {name} = {shown}{more}"
            ignored = [{name: strange[:_NAMED] if len(strange) > 1 else strange[0]}]
            hint = f"declare a lane for them; or, if they should stay there, add ignore_states={ignored!r} on the lane"
            findings.append((bindings[0], CheckFinding(WARNING, "left_alone", text, hint)))
    return findings


def _server(run: Run) -> dict[str, int]:
    """What the server allows, and what is in use."""
    row = run(
        "select current_setting('max_connections')::int, current_setting('superuser_reserved_connections')::int,"
        " (select count(*) from pg_stat_activity where backend_type = 'client backend')::int",
        (),
    )[0]
    return {"allowed": row[0] - row[1], "in_use": row[2]}


# -- a whole Mill


@dataclass
class CheckedLane:
    """One lane in one environment, or (lane None) the environment itself."""

    environment: str
    lane: Lane | None
    examined: ExaminedLane | None = None
    findings: list[CheckFinding] = field(default_factory=list)


async def check_mill(
    mill: Mill, env: Sequence[str] | None = None, processes: int = 1
) -> tuple[list[CheckedLane], dict[str, dict[str, Any]]]:
    """Every lane in every environment, or in the named ones; and the connections that each environment needs."""
    checked: list[CheckedLane] = []
    needs: dict[str, dict[str, Any]] = {}
    for name, database in mill.databases(env):
        try:
            part = await _environment(mill, name, database)
            checked += part
            if any(each.examined for each in part):
                needs[name] = await _connections(mill, database, processes)
        except RowmillError as error:
            checked.append(
                CheckedLane(name, None, findings=[CheckFinding(ERROR, "unreachable", error.message, error.hint)])
            )
        finally:
            await database.close()
    for name, need in needs.items():
        if need.get("free") is not None and need["at_most"] > need["free"]:
            text = f"{processes} processes need up to {need['at_most']} connections, and {need['free']} are free"
            hint = "fewer processes, Mill(connections=...), or a pooler"
            checked.append(CheckedLane(name, None, findings=[CheckFinding(WARNING, "connections", text, hint)]))
    return checked, needs


async def _environment(mill: Mill, name: str, database: Database) -> list[CheckedLane]:
    check_file(database)
    lanes = sorted((lane for lane in mill.lanes.values() if lane.serves(name)), key=lambda lane: lane.priority)
    checked = [await _lane(mill, lane, name, database) for lane in lanes]
    if database.sql.notify is not None:
        await _wake_triggers(database, checked)
    bound = [(c.examined.binding, c.examined.facts) for c in checked if c.examined]
    for binding, finding in across(bound):
        next(c for c in checked if c.lane is binding.lane).findings.append(finding)
    try:
        _refuse_overlaps([store_for(binding, database, mill.clock, "", "") for binding, _ in bound])
    except DeclarationError as error:
        checked.append(CheckedLane(name, None, findings=[CheckFinding(ERROR, "sweeps", error.message, error.hint)]))
    if findings := await _schedules(mill, name, database):
        checked.append(CheckedLane(name, None, findings=findings))
    return checked


async def _schedules(mill: Mill, name: str, database: Database) -> list[CheckFinding]:
    """Tables of schedules that cannot be used, and rows in them."""
    findings = []
    for source in mill.schedule_tables:
        if not source.serves(name):
            continue
        try:
            rows = await schedule_list(source, name, database)
        except DeclarationError as error:
            findings.append(CheckFinding(ERROR, "schedules", error.message, error.hint))
            continue
        for row in [row for row in rows if row["enabled"] and row["problem"] is not None][:_NAMED]:
            text = f"{source}, row {row['id']}, is not enqueued: {row['problem']}"
            findings.append(CheckFinding(WARNING, "schedule", text, row["hint"]))
    return findings


async def _wake_triggers(database: Database, checked: Sequence[CheckedLane]) -> None:
    """Which tables have a wake trigger, and whether it is for the lanes as they are declared now."""
    by_table: dict[str, list[CheckedLane]] = {}
    for each in checked:
        if each.examined is not None and served([each.examined.binding]):
            by_table.setdefault(plans.statements(each.examined.binding).table, []).append(each)
    for relation, several in by_table.items():
        trigger = await database.read(lambda run, relation=relation: installed(run, relation))  # type: ignore[misc]
        bindings = [each.examined.binding for each in several if each.examined is not None]
        for each in several:
            if each.examined is not None:
                each.examined.wake_trigger = trigger is not None and trigger.complete and not database.pooled
        if trigger is not None and trigger.mark != mark(bindings) and all(each.examined for each in checked):
            text = f"the wake trigger of {relation} was made for other conditions, so rows may wait until the next poll"
            several[0].findings.append(
                CheckFinding(WARNING, "stale_wake_trigger", text, "rowmill migrate APP --wake --apply")
            )


async def _lane(mill: Mill, lane: Lane, name: str, database: Database) -> CheckedLane:
    checked = CheckedLane(name, lane)
    try:
        check_handler(lane, Resources(mill.resources))
    except DeclarationError as error:
        checked.findings.append(CheckFinding(ERROR, "handler", error.message, error.hint))
    try:
        store = await examine_lane(lane, name, database)
    except DeclarationError as error:
        hint = error.hint
        if "rowmill migrate" not in (hint or "") and await _helped(lane, name, database):
            hint = f"rowmill migrate APP --apply adds what is missing; or {error.hint}"
        checked.findings.append(CheckFinding(ERROR, "declaration", error.message, hint))
        return checked
    binding = store.binding
    table = quoted_table(binding.table.schema, binding.table.name)
    checked.examined = await database.read_only(lambda c: examine(c, binding, table))
    checked.findings += checked.examined.findings
    unindexed = any(finding.code in ("no_ready_index", "no_turns_index") for finding in checked.findings)
    if checked.examined.rows < SMALL or not unindexed:  # else the trial would read the whole table
        checked.findings += await _refused_claims(store)
    for certain, code, text, hint in await statement_problems(mill, lane, name, database):
        checked.findings.append(CheckFinding(ERROR if certain else WARNING, code, text, hint))
    for state, reason in (await doubtful_states(store)).items():
        text = f"a trigger of the table refused a test update to {state}: {reason}"
        hint = "nothing, if the handler writes the columns that the trigger asks for; otherwise another value"
        checked.findings.append(CheckFinding(WARNING, "trigger", text, hint))
    if foreign := await ended_by_others(store):
        own = binding.roles["error"]
        text = (
            f"{foreign:,} dead rows were ended by another program ({own} is null, another error is not): status counts"
            " them, and retry would send them into this lane"
        )
        hint = (
            f"add to dead= a column that tells this lane's rows apart: {own!r}: NOT_NULL, or IS_NULL for the"
            " other's column"
        )
        checked.findings.append(CheckFinding(WARNING, "shared_dead", text, hint))
    return checked


async def _refused_claims(store: LaneStore) -> list[CheckFinding]:
    """Ready rows whose claim the database would refuse: tried and rolled back, where this role may."""
    try:
        refused = await refused_claims(store, _TRIED)
    except DatabaseError:
        return []
    hint = "fix the row, or the trigger or constraint that refuses it; workers end it as dead or skip it"
    return [
        CheckFinding(
            WARNING, "claim_refused", f"the database refuses the claim of row {written(key)}: {error.message}", hint
        )
        for key, error in refused
        if not isinstance(error, Unserved) and not error.in_the_way
    ]


async def _helped(lane: Lane, name: str, database: Database) -> bool:
    """Whether the columns that migrate adds would make the lane work."""
    try:
        return bool((await ddl.outline(lane, name, database)).lacking)
    except RowmillError:
        return False


async def _connections(mill: Mill, database: Database, processes: int) -> dict[str, Any]:
    if not database.needs:
        return {"processes": processes, "at_most": None, "free": None}
    listen = 0 if database.pooled else _LISTEN
    each = mill.connections + _HEARTBEAT + listen + _FINISH
    server = await database.read_only(lambda c: _server(runner(c)))
    return {
        "processes": processes,
        "each": each,
        "at_most": processes * each,
        "while_locked": processes * (each + _LOCKED),
        "allowed": server["allowed"],
        "in_use": server["in_use"],
        "free": None if database.pooled else max(0, server["allowed"] - server["in_use"] + 1),
        "pooler": database.pooled,
    }


def value(checked: CheckedLane) -> dict[str, Any]:
    document: dict[str, Any] = {
        "environment": checked.environment,
        "lane": checked.lane.name if checked.lane else None,
        "findings": [vars(finding) for finding in checked.findings],
    }
    if checked.examined is not None:
        binding: Binding = checked.examined.binding
        plan = checked.examined.plan
        document |= {
            "table": binding.table.fullname,
            "rows": checked.examined.rows,
            "exact": checked.examined.exact,
            "key": list(binding.key),
            "roles": dict(binding.roles),
            "lacks": binding.lacks(),
            "order": [{"column": column, "descending": down} for column, down in binding.order],
            "max_attempts": binding.max_attempts,
            "renew": binding.renew,
            "plan": None if plan is None else plan.value(),
        }
        if checked.examined.wake_trigger is not None:
            poll = None if binding.lane.poll is None else binding.lane.poll_seconds
            document["pickup"] = {"poll": poll, "wake_trigger": checked.examined.wake_trigger}
    return document
