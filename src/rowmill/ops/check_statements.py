"""``rowmill check``: the database is asked about every statement of a lane. Nothing is executed."""

from __future__ import annotations

import re

import sqlalchemy as sa

from ..declare.lane import Lane
from ..errors import DatabaseError, DeclarationError
from ..mill import Mill
from ..store import Database
from ..store.database import Run, runner
from ..store.driver_errors import translate
from ..store.inspect import distribution, plans, sql_listing
from ..store.inspect.lane_view import LaneView, view_lane

#: Whether it is certain that the lane does not work, a code for scripts, the text, and what to do.
Problem = tuple[bool, str, str, str]
_WRITES = re.compile(r"\bupdate\b|\binsert into\b|\bdelete from\b", re.IGNORECASE)
#: Tables that the first worker creates, and rights that are reported by themselves.
_NOT_YET = re.compile(r"relation \S*rowmill_\w+\S* does not exist|no such table: rowmill_|permission denied")


async def statement_problems(mill: Mill, lane: Lane, environment: str, database: Database) -> list[Problem]:
    """What the database would refuse of a lane, each once."""
    try:
        view = await view_lane(lane, environment, database, mill.clock)
        texts = await sql_listing.every(view)
    except (DatabaseError, DeclarationError):
        return []  # reported by itself
    return await database.read_only(lambda c: _problems(runner(c), view, texts))


def _problems(run: Run, view: LaneView, texts: dict[str, str]) -> list[Problem]:
    one_task = False
    if view.sql.has_catalog and distribution.on_citus(run):
        mine = distribution.spread(run, view.statements.table)
        if mine is not None:
            own = {name: distribution.spread(run, name) for name in _own_tables(run, view, texts)}
            if broken := distribution.problem(view.lane.name, list(view.binding.shard), mine, own):
                return [(True, *broken)]
            one_task = True
    problems: dict[str, Problem] = {}
    for name, text in texts.items():
        if found := _refusal(run, view, name, text, one_task=one_task):
            problems.setdefault(found[2].partition(": ")[2], found)
    return list(problems.values())


def _own_tables(run: Run, view: LaneView, texts: dict[str, str]) -> list[str]:
    """rowmill's own tables that the lane's statements name, and that exist."""
    names = ("rowmill_gates", "rowmill_stale_runs", "rowmill_workers")
    named = [view.database.own(name) for name in names if any(name in text for text in texts.values())]
    return [name for name in named if run("select to_regclass($1::text) is not null", (name,))[0][0]]


def _refusal(run: Run, view: LaneView, name: str, text: str, *, one_task: bool) -> Problem | None:
    certain = "rowmill_waits" not in text  # only handlers that wait need these
    try:
        plan = plans.generic(run, view.statements, text)
    except sa.exc.DBAPIError as error:
        translated = translate(error, view.database)
        message = translated.message if translated is not None else str(error.orig)
        if _NOT_YET.search(message):
            return None
        hint = f"rowmill sql {view.lane.name} shows the statement; change what the message names"
        return certain, "statement_refused", f"the database refuses the statement {name!r}: {message}", hint
    reason = distribution.many_tasks(plan) if one_task and _WRITES.search(text) else None
    if reason is None:
        return None
    several = any(len(values) > 1 for values in view.binding.shard.values())
    hint = "one value in shard= for each lane, or a lane for each" if several else "a table in a distributed schema"
    return certain, "many_tasks", f"the statement {name!r} does not stay on one node: {reason}", hint
