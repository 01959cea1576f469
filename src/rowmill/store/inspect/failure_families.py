"""Failures in families: those on record, and dead rows whose failure is not, which show it themselves."""

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

#: Dead rows of a lane that are looked at for failures that nobody wrote down, and seconds PostgreSQL may take for them.
SAMPLE, _SECONDS = 1000, 0.25
_PAGE, _PAGE_SECONDS = 5000, 30.0
_of = lru_cache(10_000)(fingerprint)


@dataclass(slots=True)
class Errors:
    """The failures of one environment, in families, those that were seen last first."""

    environment: str
    families: list[Family]
    #: There is a table for them. Where there is not, dead rows are all that tells.
    recorded: bool
    #: Lanes whose dead rows could not be looked at in time.
    unknown: list[str] = field(default_factory=list)


async def errors(views: Sequence[LaneView], *, hours: float = 24.0, buckets: int = 24, sample: bool = True) -> Errors:
    """The failures of lanes of one environment. ``sample``: also dead rows that have no failure on record."""
    environment, failures = views[0].environment, Failures(views[0].database)
    recorded = await failures.exists()
    names = [view.lane.name for view in views]
    found = Errors(environment, [], recorded)
    log = failures if recorded else None

    async def of_lanes() -> list[list[_DeadRow] | None]:
        return [await _dead_rows(view, log, names) for view in views] if sample else []

    async def on_record() -> list[Family]:
        return await failures.families(environment, names, hours=hours, buckets=buckets) if recorded else []

    found.families, samples = await asyncio.gather(on_record(), of_lanes())
    known = {(family.lane, family.fingerprint): family for family in found.families}
    for view, rows in zip(views, samples, strict=False):
        if rows is None:
            found.unknown.append(view.lane.name)
        elif "error" in view.binding.roles:
            for family in found.families:
                if family.lane == view.lane.name:
                    family.dead = 0
        for row in rows or ():
            place = (view.lane.name, _of(row.error))
            if place not in known:
                if row.recorded:  # its failure is older than what is asked for
                    continue
                example = {"row_id": row.id, "message": bounded(row.error, MESSAGE), "outcome": "dead"}
                known[place] = Family(
                    environment, *place, shape(row.error), None, 0, 0, 0, None, None, [0] * buckets, example
                )  # fmt: skip
                found.families.append(known[place])
            known[place].dead = (known[place].dead or 0) + 1
            known[place].unrecorded += not row.recorded
        if rows is not None and len(rows) >= SAMPLE:  # one family may fill the sample: this holds for all of the lane
            for family in found.families:
                family.dead_at_least = family.dead_at_least or family.lane == view.lane.name
    return found


@dataclass(frozen=True, slots=True)
class _DeadRow:
    id: str
    error: str
    #: It has a failure on record.
    recorded: bool


async def _dead_rows(view: LaneView, failures: Failures | None, lanes: Sequence[str]) -> list[_DeadRow] | None:
    """A few dead rows, each with what its error column says; None: that took too long."""
    try:
        rows = [(written(_id(key)), said) async for key, said in _errors_of(view, ("dead",), SAMPLE, _SECONDS)]
    except Busy:
        return None
    on_record = await failures.recorded(lanes, [row_id for row_id, _ in rows]) if failures and rows else set()
    return [_DeadRow(row_id, said, row_id in on_record) for row_id, said in rows]


async def members(view: LaneView, family: str, states: Sequence[str]) -> AsyncIterator[list[Key]]:
    """The rows of a family: those whose latest failure on record is of it; and, of those without a record, the ones in
    one of these states whose error column shows it. In steps, each row once.
    """
    failures = Failures(view.database)
    recorded = await failures.exists()
    found = [parse(view.binding, text) for text in await failures.members(view.lane.name, family)] if recorded else []
    if found:
        yield found
    page: dict[str, Key] = {}
    async for key, said in _errors_of(view, states, None, _PAGE_SECONDS):
        if _of(said) == family:
            page[written(_id(key))] = key
        if len(page) >= _PAGE:
            yield await _without_record(failures if recorded else None, view, page)
            page = {}
    if page:
        yield await _without_record(failures if recorded else None, view, page)


async def _without_record(failures: Failures | None, view: LaneView, page: dict[str, Key]) -> list[Key]:
    """What is on record is known by it, and was said already."""
    on_record = await failures.recorded([view.lane.name], list(page)) if failures else set()
    return [key for row_id, key in page.items() if row_id not in on_record]


async def _errors_of(
    view: LaneView, states: Sequence[str], most: int | None, seconds: float
) -> AsyncIterator[tuple[Key, str]]:
    """Rows in these states with what their error column says: the first that are met, or all, in the key's order."""
    column = view.binding.roles.get("error")
    tests = [test for state in states if (test := view.condition(state))]
    if column is None or not tests:
        return
    say, keys, last = view.statements, view.statements.names(view.binding.key), None
    met = f"({' or '.join(f'({test})' for test in tests)}) and {say.name(column)} is not null"
    while True:
        marks = Placeholders(view.binding)
        text = f"select {keys}, {view.cell(column, READ)} from {say.table} where {met}"
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
