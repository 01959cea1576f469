"""How a table is spread over the nodes of Citus, and whether a statement is sent to one of them as one task."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..database import Run

_CITUS = "select 1 from pg_extension where extname = 'citus'"
#: partmethod n: one shard, or a copy on every node where repmodel is t; otherwise by the values of a column.
_SPREAD = """select p.partmethod::text, p.repmodel::text, p.colocationid::bigint,
  case when p.partmethod <> 'n' then column_to_column_name(p.logicalrelid, p.partkey::text) end
from pg_dist_partition p where p.logicalrelid = to_regclass($1::text)"""
_TASKS = re.compile(r"\bTask Count: (\d+)")


@dataclass(frozen=True)
class Spread:
    """``column``: by whose values rows are spread; None: all are in one shard, or every node has a copy of all."""

    column: str | None
    everywhere: bool
    colocation: int


def on_citus(run: Run) -> bool:
    """Whether the database has the extension."""
    return bool(run(_CITUS, ()))


def spread(run: Run, table: str) -> Spread | None:
    """How Citus spreads a table; None where it does not: a table of the node itself, or none of this name."""
    rows = run(_SPREAD, (table,))
    if not rows:
        return None
    method, replication, colocation, column = rows[0]
    return Spread(column, method == "n" and replication == "t", int(colocation))


def problem(
    lane: str, shard: Sequence[str], mine: Spread, own: dict[str, Spread | None]
) -> tuple[str, str, str] | None:
    """What Citus will refuse of a lane over a table that is spread so, with a code and what to do. ``own``: rowmill's
    tables that its statements name.
    """
    if mine.everywhere:
        text = "it is a reference table: each node claims in its own copy, so a row runs twice and the copies diverge"
        return "reference_table", text, "a table with one shard, in a distributed schema; or one local to its node"
    if mine.column is not None and mine.column not in shard:
        text = f"its rows are distributed by {mine.column}, and lane {lane} does not say by which value it works"
        return "unpinned", text, f'shard={{"{mine.column}": ...}}'
    apart = [table for table, there in own.items() if there is None or there.colocation != mine.colocation]
    if apart:
        text = f"{', '.join(apart)} is not where the lane's table is, and a statement that names both is refused"
        hint = "Mill(schema=\"...\") with the distributed schema of the lane's table: rowmill's own tables go there"
        return "own_tables_elsewhere", text, hint
    return None


def many_tasks(plan: str) -> str | None:
    """Why a statement is not sent to one node as one task, by Citus' plan of it; None: it is."""
    if "Distributed Subplan" in plan:
        return "Citus would run it in several steps, and would not hold its locks from one to the next"
    counts = [int(count) for count in _TASKS.findall(plan)]
    if counts == [1]:
        return None
    return (
        f"Citus would send it as {sum(counts)} tasks" if counts else "Citus would run it outside of the table's nodes"
    )
