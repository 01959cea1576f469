"""Failures grouped into families: recorded failures, and dead rows without a record, by their error column."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ...errors import Busy
from ..bounded_text import bounded
from ..lane.row_keys import Key, Placeholders, parse, written
from ..own.failures import MESSAGE, Failures, Family
from ..own.fingerprint import READ, fingerprint, shape
from .lane_view import LaneView

#: The most dead rows of a lane that are checked for unrecorded failures, and PostgreSQL's time limit for that in
#: seconds.
SAMPLE, _SECONDS = 1000, 0.25
_PAGE, _PAGE_SECONDS = 5000, 30.0
_of = lru_cache(10_000)(fingerprint)


@dataclass(slots=True)
class Errors:
    """The failures of one environment, in families, the latest seen first."""

    environment: str
    families: list[Family]
    #: Whether the table of failures exists. Without it, dead rows are the only source.
    recorded: bool
    #: Lanes whose dead rows could not be read in time.
    unknown: list[str] = field(default_factory=list)


async def errors(views: Sequence[LaneView], *, hours: float = 24.0, buckets: int = 24, sample: bool = True) -> Errors:
    """Return the failures of lanes of one environment. ``sample``: include dead rows without a recorded failure."""
    environment, failures = views[0].environment, Failures(views[0].database)
    recorded = await failures.exists()
    names = [view.lane.name for view in views]
    result = Errors(environment, [], recorded)
    log = failures if recorded else None

    async def of_lanes() -> list[list[_DeadRow] | None]:
        return [await _dead_rows(view, log, names) for view in views] if sample else []

    async def on_record() -> list[Family]:
        return await failures.families(environment, names, hours=hours, buckets=buckets) if recorded else []

    result.families, samples = await asyncio.gather(on_record(), of_lanes())
    known = {(family.lane, family.fingerprint): family for family in result.families}
    for view, rows in zip(views, samples, strict=False):
        if rows is None:
            result.unknown.append(view.lane.name)
        elif "error" in view.binding.roles:
            for family in result.families:
                if family.lane == view.lane.name:
                    family.dead = 0
        for row in rows or ():
            place = (view.lane.name, _of(row.error))
            if place not in known:
                if row.recorded:  # its failure is older than the requested hours
                    continue
                example = {"row_id": row.id, "message": bounded(row.error, MESSAGE), "outcome": "dead"}
                known[place] = Family(
                    environment, *place, shape(row.error), None, 0, 0, 0, None, None, [0] * buckets, example
                )  # fmt: skip
                result.families.append(known[place])
            known[place].dead = (known[place].dead or 0) + 1
            known[place].unrecorded += not row.recorded
        if rows is not None and len(rows) >= SAMPLE:  # one family may fill the sample, so this holds for the whole lane
            for family in result.families:
                family.dead_at_least = family.dead_at_least or family.lane == view.lane.name
    return result


@dataclass(frozen=True, slots=True)
class _DeadRow:
    id: str
    error: str
    #: Whether a failure is recorded for it.
    recorded: bool


async def _dead_rows(view: LaneView, failures: Failures | None, lanes: Sequence[str]) -> list[_DeadRow] | None:
    """A few dead rows, each with the text of its error column; None: the query took too long."""
    try:
        rows = [(written(_id(key)), error) async for key, error in _errors_of(view, ("dead",), SAMPLE, _SECONDS)]
    except Busy:
        return None
    on_record = await failures.recorded(lanes, [row_id for row_id, _ in rows]) if failures and rows else set()
    return [_DeadRow(row_id, error, row_id in on_record) for row_id, error in rows]


async def members(view: LaneView, family: str, states: Sequence[str]) -> AsyncIterator[list[Key]]:
    """Yield the rows of a family in pages, each row once.

    A row belongs to it if its latest recorded failure does. A row without a record belongs to it if it is in one of
    these states and its error column shows the family's error.
    """
    failures = Failures(view.database)
    recorded = await failures.exists()
    keys = [parse(view.binding, text) for text in await failures.members(view.lane.name, family)] if recorded else []
    if keys:
        yield keys
    page: dict[str, Key] = {}
    async for key, error in _errors_of(view, states, None, _PAGE_SECONDS):
        if _of(error) == family:
            page[written(_id(key))] = key
        if len(page) >= _PAGE:
            yield await _without_record(failures if recorded else None, view, page)
            page = {}
    if page:
        yield await _without_record(failures if recorded else None, view, page)


async def _without_record(failures: Failures | None, view: LaneView, page: dict[str, Key]) -> list[Key]:
    """The rows of the page without a recorded failure. Rows with one were returned before."""
    on_record = await failures.recorded([view.lane.name], list(page)) if failures else set()
    return [key for row_id, key in page.items() if row_id not in on_record]


async def _errors_of(
    view: LaneView, states: Sequence[str], most: int | None, seconds: float
) -> AsyncIterator[tuple[Key, str]]:
    """Rows in these states with their error column's text: the first ``most`` in any order, or all in key order."""
    column = view.binding.roles.get("error")
    tests = [test for state in states if (test := view.condition(state))]
    if column is None or not tests:
        return
    statements, keys, last = view.statements, view.statements.names(view.binding.key), None
    met = (
        f"({' or '.join(f'({test})' for test in tests)}) and {statements.name(column)} is not null{statements.shard()}"
    )
    while True:
        marks = Placeholders(view.binding)
        text = f"select {keys}, {view.cell(column, READ)} from {statements.table} where {met}"
        if last is not None:
            text += f" and ({keys}) > {marks.key(last)}"
        text += f" limit {most}" if most is not None else f" order by {keys} limit {_PAGE}"
        rows = await view.ask(text, marks, seconds)
        for row in rows:
            yield tuple(row[:-1]), str(row[-1])
        if most is not None or len(rows) < _PAGE:
            return
        last = tuple(rows[-1][:-1])


def _id(key: Key) -> Any:
    return key[0] if len(key) == 1 else key
