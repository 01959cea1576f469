"""Fills a column of the user's table from another one: in steps, under live traffic, continuing where it stopped.

For gates by something that a row only implies: ``fills={"domain": ("url", rowmill.domain)}``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..errors import RowmillError
from ..plural import counted
from ..store.database import Database, Run
from ..store.inspect import plans
from ..store.lane.binding import Binding
from ..store.lane.row_keys import Key, Placeholders

STEP = 1000


async def fill(database: Database, binding: Binding, tell: Callable[[str, bool], None]) -> int:
    """Fill empty values of all columns in the lane's ``fills``; returns the number of rows written."""
    return sum([await _fill(database, binding, column, tell) for column in binding.lane.fills])


async def _fill(database: Database, binding: Binding, column: str, tell: Callable[[str, bool], None]) -> int:
    source, function = binding.lane.fills[column]
    for needed in (column, source):
        if needed not in binding.table.c:
            raise RowmillError(f"lane {binding.lane.name!r}: fills: there is no column {needed!r}")
    filled, last = 0, None
    while step := await database.write(functools.partial(_step, binding, column, source, function, last)):
        last, written = step
        filled += written
        tell(f"{binding.table.fullname}.{column}: {counted(filled, 'row')} filled", True)
    if filled:
        tell(f"done: {counted(filled, 'row')} of {binding.table.fullname}.{column} filled from {source}", False)
    return filled


def _step(
    binding: Binding, column: str, source: str, function: Callable[[Any], Any], last: Key | None, run: Run
) -> tuple[Key, int] | None:
    """Fill one page of rows by key; returns its last key and the rows written. None: there are no more."""
    statements, marks = plans.statements(binding), Placeholders(binding)
    keys = statements.names(binding.key)
    behind = f" and ({keys}) > {marks.key(last)}" if last is not None else ""
    text = (
        f"select {keys}, {statements.name(source)} from {statements.table} where {statements.name(column)} is null"
        f" and {statements.name(source)} is not null{behind} order by {keys} limit {STEP}"
    )
    rows = run(text, marks.given())
    if not rows:
        return None
    values = [(tuple(row[:-1]), function(row[-1])) for row in rows]
    written = [(key, value) for key, value in values if value is not None]
    if written:
        marks = Placeholders(binding)
        lines = ", ".join(
            f"({', '.join(map(marks.add, key, binding.key))}, {marks.add(value, column)})" for key, value in written
        )
        parts = [f"_k{i}" for i in range(len(binding.key))]
        same = " and ".join(f"t.{statements.name(c)} = s.{part}" for c, part in zip(binding.key, parts, strict=True))
        run(
            f"with s({', '.join(parts)}, _v) as (values {lines})"
            f" update {statements.table} as t set {statements.name(column)} = s._v from s"
            f" where {same} and t.{statements.name(column)} is null",
            marks.given(),
        )
    return tuple(rows[-1][:-1]), len(written)
