"""``rowmill adopt``: a proposed lane over a live table, with the DDL and the plans that it would have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ..adopt.lane_file import lane_source, quoted_table
from ..adopt.proposal import Proposal
from ..adopt.row_types import row_types
from ..adopt.survey import survey
from ..clock import Clock
from ..declare import lane as lanes_words
from ..errors import DeclarationError, RowmillError
from ..migrate import ddl
from ..store import Database, bind, store_for
from ..store import redact as redact
from ..store.database import runner
from ..store.inspect import plans
from ..store.inspect.indexes import needed
from ..store.inspect.lane_view import check_file
from ..store.inspect.plans import QueryPlan as QueryPlan
from ..store.lane.refused_states import check_states
from .check import zones


@dataclass
class Adoption:
    """The result of adopt."""

    proposal: Proposal
    source: str = ""
    changes: Sequence[ddl.SchemaChange] = ()
    #: The claim's plan as the table is, and with the proposed index.
    now: QueryPlan | None = None
    later: QueryPlan | None = None
    #: Why the lane cannot run before migrate; None: it can.
    first: str | None = None
    #: With the trigger that wakes workers.
    wake: bool = False


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    """The database with the table."""
    database = Database.open(url)
    try:
        check_file(database)
        yield database
    finally:
        await database.close()


async def types(url: str, table: str) -> str:
    """A module with the types of a table's rows."""
    async with opened(url) as database:
        return row_types(await survey(database, table))


async def adopt(database: Database, made: Proposal, url: str | None, *, wake: bool = False) -> Adoption:
    """The proposal as a lane: bound, with its DDL and its plans. ``url``: what the file says of the database.

    ``wake``: with the trigger that wakes workers.
    """

    async def handler(job: Any) -> None: ...

    options = {**made.options, "name": made.name}
    lane = lanes_words.declare(quoted_table(made.facts.schema, made.facts.name), handler, options)
    adoption = Adoption(made, lane_source(made, url), wake=wake)
    outline = await ddl.outline(lane, "default", database)
    adoption.changes = await ddl.changes(database, [outline], wake=wake)
    try:
        binding = await bind(lane, "default", database)
    except DeclarationError as error:
        adoption.first = error.message
        binding = outline.binding
    else:
        await check_states(store_for(binding, database, Clock(), "", ""), trial=False)
        statements = plans.statements(binding)
        adoption.now = await database.read_only(lambda c: plans.explain(runner(c), statements))
    doubts = await database.read_only(lambda c: zones(runner(c), plans.statements(binding)))
    made.notes += [f"{doubt.text}. Try: {doubt.hint}" for doubt in doubts]
    need = needed(outline.binding, plans.statements(outline.binding))[0]
    if any(change.kind == "index" for change in adoption.changes):
        lacks = {lack.column: lack.sql_type for lack in outline.lacking}
        try:
            adoption.later = await plans.with_index(database, outline.binding, need, lacks)
        except RowmillError:  # what could not be tried is not shown
            adoption.later = None
    return adoption
