"""How the database finds a lane's rows: the plan of the claim's walk now, and whether an index serves it.

The walk is explained as a plain select: the same rows in the same order, without the claim's locks.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ...clock import Clock
from ...errors import Refused
from ..database import Database, Run, runner
from ..dialect import POSTGRES, SQLITE
from ..lane.binding import Binding
from ..lane.postgres_statements import PostgresStatements
from ..lane.sqlite import SqliteStatements
from ..lane.statements import Statements
from .indexes import NeededIndex, in_words, needed

BATCH = 10
TRIED = 20_000
_TRY = "rowmill_try"
_PARAMETERS = "select cardinality(parameter_types) from pg_prepared_statements where name = 'rowmill_plan'"


@dataclass(frozen=True)
class QueryPlan:
    """A query plan, in the planner's own words."""

    lines: tuple[str, ...]
    #: The index that the plan reads, if any.
    index: str | None
    #: Whether the plan reads rows from an index, in order, and only as many as requested.
    direct: bool
    cost: float | None = None

    def value(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {"lines": list(self.lines), "index": self.index, "uses_index": self.direct, "cost": self.cost}


def walk(statements: Statements, *, state_only: bool = False) -> str:
    """The rows that a claim would take, in its order; with gates by key, in the order of the keys."""
    statements = statements.one()
    condition = statements.ready_state() if state_only else statements.ready()
    order = needed(statements.binding, statements)[0].sort
    return (
        f"select {statements.names(statements.binding.key)} from {statements.table}\n"
        f"where {condition}\norder by {order}\nlimit {statements.lane.batch or BATCH}"
    )


def explain(run: Run, statements: Statements, text: str | None = None) -> QueryPlan:
    """The plan of the claim's walk, for the table as it is now."""
    return _planner(statements.binding).explain(run, text or walk(statements), statements.binding.state_columns())


def generic(run: Run, statements: Statements, text: str) -> str:
    """The plan of a statement, whatever values its parameters will have. Nothing is executed; in a transaction. Raises
    what the database refuses it with.
    """
    return _planner(statements.binding).generic(run, text)


def serves(run: Run, statements: Statements, need: NeededIndex) -> str | None:
    """An existing index that serves this need, if the planner finds one when scans are made expensive."""
    order = f" order by {need.sort}" if need.sort else ""
    keys = statements.names(statements.binding.key)
    text = (
        f"select {keys} from {statements.table} where {need.predicate}{statements.one().shard()}{order} limit {BATCH}"
    )
    plan = _planner(statements.binding).by_index(run, text, statements.binding.state_columns())
    return plan.index if plan.direct else None


async def with_index(
    database: Database, binding: Binding, need: NeededIndex, lacking: dict[str, str]
) -> QueryPlan | None:
    """Return the plan with the proposed index, tried on a temporary copy of some rows.

    ``lacking``: columns that the table does not have yet, with their types. None if the trial is not possible.
    """
    return await _planner(binding).with_index(database, statements(binding), need, lacking)


class PostgresPlanner:
    """Plans from PostgreSQL's planner."""

    statements = PostgresStatements

    def explain(self, run: Run, text: str, states: set[str]) -> QueryPlan:
        root = _document(run(f"explain (format json) {text}", ()))
        lines = tuple(str(row[0]) for row in run(f"explain {text}", ()))
        return _read(root, lines, states)

    def generic(self, run: Run, text: str) -> str:
        run("savepoint rowmill_plan", ())
        prepared = False
        try:
            run("set local plan_cache_mode = force_generic_plan", ())
            run(f"prepare rowmill_plan as {text}", ())
            prepared = True
            ((count,),) = run(_PARAMETERS, ())
            values = f"({', '.join(['null'] * count)})" if count else ""
            return "\n".join(str(row[0]) for row in run(f"explain execute rowmill_plan{values}", ()))
        finally:
            run("rollback to savepoint rowmill_plan", ())
            if prepared:  # it outlives its transaction
                run("deallocate rowmill_plan", ())

    def by_index(self, run: Run, text: str, states: set[str]) -> QueryPlan:
        settings = ("enable_seqscan", "enable_sort", "enable_bitmapscan")
        for setting in settings:
            run(f"set local {setting} = off", ())
        plan = _read(_document(run(f"explain (format json) {text}", ())), (), states)
        for setting in settings:
            run(f"set local {setting} = on", ())
        return plan

    async def with_index(
        self, database: Database, statements: Statements, need: NeededIndex, lacking: dict[str, str]
    ) -> QueryPlan | None:
        name = need.name(statements.lane.name, statements.table)

        def work(run: Run) -> QueryPlan:
            for limit in database.sql.time_limits(5, 1):
                run(limit, ())
            _copy(run, statements, lacking)
            statements.table = f"pg_temp.{_TRY}"
            run(in_words(need, statements, name), ())
            run(f"analyze {statements.table}", ())
            return explain(run, statements)

        try:
            return await database.trial(work)
        except Refused:  # a replica, or a role that may not create temporary tables: no trial
            return None


def _document(rows: Any) -> dict[str, Any]:
    given = rows[0][0]
    document = json.loads(given) if isinstance(given, str) else given
    root: dict[str, Any] = document[0]["Plan"]
    return root


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)


def _read(root: dict[str, Any], lines: tuple[str, ...], states: set[str]) -> QueryPlan:
    nodes = list(_nodes(root))
    kinds = {node["Node Type"] for node in nodes}
    walks = [node for node in nodes if "Index Name" in node]
    # A filter on the state means that the index skips all other rows, too.
    past = any(_mentioned(node.get("Filter", ""), states) for node in walks)
    direct = bool(walks) and not kinds & {"Seq Scan", "Sort"} and not past
    index = walks[0]["Index Name"] if walks else None
    return QueryPlan(lines, index, direct, float(root["Total Cost"]))


def _mentioned(text: str, columns: set[str]) -> bool:
    return any(re.search(rf'(?<![\w"]){re.escape(c)}(?![\w"])', text) or f'"{c}"' in text for c in columns)


def _copy(run: Run, statements: Statements, lacking: dict[str, str]) -> None:
    binding = statements.binding
    wanted = {*binding.key, *(c for c, _ in binding.order), *binding.roles.values(), *binding.state_columns()}
    wanted |= binding.shard.keys()
    if binding.lane.where is not None or isinstance(binding.lane.ready, str):
        wanted = set(binding.columns)
    elif isinstance(binding.lane.ready, dict):
        wanted |= binding.lane.ready.keys()
    fields = [f"null::{lacking[c]} as {statements.name(c)}" if c in lacking else statements.name(c)
              for c in binding.columns if c in wanted]  # fmt: skip
    table = statements.table
    pages = int(run("select coalesce(pg_relation_size(to_regclass($1::text)), 0) / 8192", (table,))[0][0])
    sample = f" tablesample system ({min(100.0, 100.0 * 1000 / pages)})" if pages > 2000 else ""
    run(
        f"create temp table {_TRY} on commit drop as select {', '.join(fields)} from {table}{sample} limit {TRIED}",
        (),
    )


class SqlitePlanner:
    """Plans from SQLite's planner."""

    statements = SqliteStatements

    def explain(self, run: Run, text: str, states: set[str]) -> QueryPlan:
        rows = [str(row[3]) for row in run(f"explain query plan {text}", ())]
        index, direct = None, False
        for row in rows:
            if used := re.search(r"USING (?:COVERING )?INDEX (\S.*?)(?: \((.*)\))?$", row):
                index = used.group(1)
                sql = run("select sql from sqlite_master where type = 'index' and name = :n", {"n": index})
                partial = bool(sql) and " where " in str(sql[0][0]).lower()
                direct = partial or (row.startswith("SEARCH") and "=?" in (used.group(2) or ""))
        # If only the rest of the order is sorted, the walk still stops at its limit.
        direct = direct and not any("TEMP B-TREE FOR ORDER BY" in row for row in rows)
        return QueryPlan(tuple(rows), index, direct)

    by_index = explain

    def generic(self, run: Run, text: str) -> str:
        # What looks like a parameter within quotes is given a value, too: it is not asked for.
        values = dict.fromkeys(re.findall(r"(?<![:\w]):(\w+)", text))
        return "\n".join(str(row[3]) for row in run(f"explain query plan {text}", values))

    async def with_index(
        self, database: Database, statements: Statements, need: NeededIndex, lacking: dict[str, str]
    ) -> QueryPlan | None:
        """SQLite plans by the schema alone, so this uses an empty copy of it in memory."""
        text = (
            "select sql from sqlite_master where tbl_name = :n and sql is not null and type in ('table', 'index')"
            " order by type desc"
        )
        schema = await database.reflect(
            lambda connection: runner(connection)(text, {"n": statements.binding.table.name})
        )
        with closing(sqlite3.connect(":memory:")) as copy:

            def run(sql: str, parameters: Any = ()) -> list[Any]:
                return copy.execute(sql, parameters).fetchall()

            for (statement,) in schema:
                run(statement)
            for column, sql_type in lacking.items():
                run(f"alter table {statements.table} add column {statements.name(column)} {sql_type}")
            run(in_words(need, statements, need.name(statements.lane.name, statements.table)))
            return explain(run, statements)


_PLANNERS: Mapping[str, PostgresPlanner | SqlitePlanner] = {
    POSTGRES.name: PostgresPlanner(),
    SQLITE.name: SqlitePlanner(),
}


def _planner(binding: Binding) -> PostgresPlanner | SqlitePlanner:
    return _PLANNERS[binding.dialect.name]


def statements(binding: Binding, clock: Clock | None = None) -> PostgresStatements | SqliteStatements:
    """The SQL phrases of a lane, without a store."""
    return _planner(binding).statements(binding, clock or Clock())
