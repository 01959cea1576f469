"""How the database would find a lane's rows: the claim's walk at today's size, and whether an index carries it.

The walk is explained as a plain select: the same rows in the same order, without the locks that a claim takes.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ...clock import Clock
from ...errors import Refused
from ..database import Database, Run, runner
from ..dialect import POSTGRES, SQLITE
from ..lane.binding import Binding
from ..lane.postgres_statements import PostgresStatements
from ..lane.sqlite import SqliteStatements
from ..lane.statements import Statements
from .indexes import NeededIndex, in_words, needed

_STATEMENTS: Mapping[str, type[PostgresStatements | SqliteStatements]] = {
    POSTGRES.name: PostgresStatements,
    SQLITE.name: SqliteStatements,
}
BATCH = 10
TRIED = 20_000
_TRY = "rowmill_try"


@dataclass(frozen=True)
class QueryPlan:
    """How rows are found: in the planner's own words."""

    lines: tuple[str, ...]
    #: The index that is walked, if one is.
    index: str | None
    #: Rows are read from an index, in order, and only those that are asked for.
    direct: bool
    cost: float | None = None


def statements(binding: Binding, clock: Clock | None = None) -> PostgresStatements | SqliteStatements:
    """The phrases of a lane, without a store around them."""
    return _STATEMENTS[binding.dialect.name](binding, clock or Clock())


def walk(say: Statements, *, state_only: bool = False) -> str:
    """The rows a claim would take, in its order; with gates by key, in the order of the keys."""
    condition = say.ready_state() if state_only else say.ready()
    order = needed(say.binding, say)[0].sort
    return (
        f"select {say.names(say.binding.key)} from {say.table}\n"
        f"where {condition}\norder by {order}\nlimit {say.lane.batch or BATCH}"
    )


def explain(run: Run, say: Statements, text: str | None = None) -> QueryPlan:
    """The plan of the claim's walk, as the table is today."""
    text = text or walk(say)
    states = say.binding.state_columns()
    if not isinstance(say, PostgresStatements):
        rows = [str(row[3]) for row in run(f"explain query plan {text}", ())]
        return _lite(rows, run)
    root = _document(run(f"explain (format json) {text}", ()))
    lines = tuple(str(row[0]) for row in run(f"explain {text}", ()))
    return _read(root, lines, states)


def serves(run: Run, say: Statements, need: NeededIndex) -> str | None:
    """An index that is there and carries this need, if the planner finds one: asked as if scans were expensive."""
    order = f" order by {need.sort}" if need.sort else ""
    text = f"select {say.names(say.binding.key)} from {say.table} where {need.predicate}{order} limit {BATCH}"
    if isinstance(say, PostgresStatements):
        for setting in ("enable_seqscan", "enable_sort", "enable_bitmapscan"):
            run(f"set local {setting} = off", ())
        plan = _read(_document(run(f"explain (format json) {text}", ())), (), say.binding.state_columns())
        for setting in ("enable_seqscan", "enable_sort", "enable_bitmapscan"):
            run(f"set local {setting} = on", ())
    else:
        plan = _lite([str(row[3]) for row in run(f"explain query plan {text}", ())], run)
    return plan.index if plan.direct else None


def _document(rows: Any) -> dict[str, Any]:
    found = rows[0][0]
    document = json.loads(found) if isinstance(found, str) else found
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
    # A filter on the state means that the index leads past all the other rows, too.
    past = any(_mentioned(node.get("Filter", ""), states) for node in walks)
    direct = bool(walks) and not kinds & {"Seq Scan", "Sort"} and not past
    index = walks[0]["Index Name"] if walks else None
    return QueryPlan(lines, index, direct, float(root["Total Cost"]))


def _mentioned(text: str, columns: set[str]) -> bool:
    return any(re.search(rf'(?<![\w"]){re.escape(c)}(?![\w"])', text) or f'"{c}"' in text for c in columns)


def _lite(rows: list[str], run: Run) -> QueryPlan:
    index, direct = None, False
    for row in rows:
        if found := re.search(r"USING (?:COVERING )?INDEX (\S.*?)(?: \((.*)\))?$", row):
            index = found.group(1)
            sql = run("select sql from sqlite_master where type = 'index' and name = :n", {"n": index})
            partial = bool(sql) and " where " in str(sql[0][0]).lower()
            direct = partial or (row.startswith("SEARCH") and "=?" in (found.group(2) or ""))
    # Where only the rest of the order is sorted, the walk still stops at its limit.
    direct = direct and not any("TEMP B-TREE FOR ORDER BY" in row for row in rows)
    return QueryPlan(tuple(rows), index, direct)


async def with_index(
    database: Database, binding: Binding, need: NeededIndex, lacking: dict[str, str]
) -> QueryPlan | None:
    """The plan with the proposed index, tried on a temporary copy of some rows that is gone afterwards.

    ``lacking``: columns that the table does not have yet, with their types. None where nothing can be tried.
    """
    say = statements(binding)
    if not isinstance(say, PostgresStatements):
        return await database.reflect(lambda connection: _try_lite(connection, say, need, lacking))
    name = need.name(binding.lane.name, say.table)

    def work(run: Run) -> QueryPlan:
        for limit in database.sql.time_limits(5, 1):
            run(limit, ())
        _copy(run, say, lacking)
        say.table = f"pg_temp.{_TRY}"
        run(in_words(need, say, name), ())
        run(f"analyze {say.table}", ())
        return explain(run, say)

    try:
        return await database.trial(work)
    except Refused:  # a replica, or no right to temporary tables: then it is not tried
        return None


def _copy(run: Run, say: PostgresStatements | SqliteStatements, lacking: dict[str, str]) -> None:
    binding = say.binding
    wanted = {*binding.key, *(c for c, _ in binding.order), *binding.roles.values(), *binding.state_columns()}
    if binding.lane.where is not None or isinstance(binding.lane.ready, str):
        wanted = set(binding.columns)
    elif isinstance(binding.lane.ready, dict):
        wanted |= binding.lane.ready.keys()
    fields = [f"null::{lacking[c]} as {say.name(c)}" if c in lacking else say.name(c)
              for c in binding.columns if c in wanted]  # fmt: skip
    table = say.table
    pages = int(run("select coalesce(pg_relation_size(to_regclass($1::text)), 0) / 8192", (table,))[0][0])
    sample = f" tablesample system ({min(100.0, 100.0 * 1000 / pages)})" if pages > 2000 else ""
    run(
        f"create temp table {_TRY} on commit drop as select {', '.join(fields)} from {table}{sample} limit {TRIED}",
        (),
    )


def _try_lite(connection: sa.Connection, say: Any, need: NeededIndex, lacking: dict[str, str]) -> QueryPlan:
    """SQLite plans by the schema: a copy of it, without rows, in memory."""
    table = say.binding.table.name
    texts = [
        row[0]
        for row in runner(connection)(
            "select sql from sqlite_master where tbl_name = :n and sql is not null and type in ('table', 'index')"
            " order by type desc",
            {"n": table},
        )
    ]
    with closing(sqlite3.connect(":memory:")) as copy:

        def run(sql: str, parameters: Any = ()) -> list[Any]:
            return copy.execute(sql, parameters).fetchall()

        for text in texts:
            run(text)
        for column, sql_type in lacking.items():
            run(f"alter table {say.table} add column {say.name(column)} {sql_type}")
        run(in_words(need, say, need.name(say.lane.name, say.table)))
        return explain(run, say)
