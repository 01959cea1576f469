"""Filling a column from another one, in the user's own table: in steps, beside the traffic, and again where it stopped.

For gates by something that a row only implies: ``fills={"domain": ("url", rowmill.domain)}``.
"""

from __future__ import annotations

import functools
import json
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
    """Fill what is empty, for all columns that the lane says how to fill; how many rows were written."""
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
    """One page by key; the last key of it, and how many rows were written. None: there are no more."""
    say, marks = plans.statements(binding), Placeholders(binding)
    keys = say.names(binding.key)
    behind = f" and ({keys}) > {marks.key(last)}" if last is not None else ""
    text = (
        f"select {keys}, {say.name(source)} from {say.table} where {say.name(column)} is null"
        f" and {say.name(source)} is not null{behind} order by {keys} limit {STEP}"
    )
    rows = run(text, marks.given())
    if not rows:
        return None
    found = [(tuple(row[:-1]), function(row[-1])) for row in rows]
    written = [(key, value) for key, value in found if value is not None]
    if written and binding.dialect.name == "postgresql":
        types = binding.sql_types
        fields = ", ".join([f"_k{i} {types[c]}" for i, c in enumerate(binding.key)] + [f"_v {types[column]}"])
        same = " and ".join(f"t.{say.name(c)} = s._k{i}" for i, c in enumerate(binding.key))
        document = [{f"_k{i}": str(part) for i, part in enumerate(key)} | {"_v": value} for key, value in written]
        run(
            f"update {say.table} t set {say.name(column)} = s._v"
            f" from jsonb_to_recordset($1::text::jsonb) as s({fields})"
            f" where {same} and t.{say.name(column)} is null",
            (json.dumps(document, default=str),),
        )
    elif written:
        same = " and ".join(f"{say.name(c)} = :k{i}" for i, c in enumerate(binding.key))
        update = f"update {say.table} set {say.name(column)} = :v where {same} and {say.name(column)} is null"
        for key, value in written:
            run(update, {f"k{i}": part for i, part in enumerate(key)} | {"v": value})
    return tuple(rows[-1][:-1]), len(written)
