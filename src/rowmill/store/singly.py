"""A sweep that the database refused, row by row: one row that may not go back holds no other up.

A unique index on waiting rows (one pending job per key) is enough: while a row ran, another was queued in its place.
Such a row ends as dead, with the database's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..claim import Swept
from ..errors import Refused
from .keys import Marks, among
from .statements import Statements

if TYPE_CHECKING:
    from .base import LaneStore


NOT_BACK = "the database would not take it back: "


async def sweep_singly(store: LaneStore, lease: timedelta, most: int) -> list[Swept]:
    """Take back up to ``most`` stale rows, each in a transaction of its own."""
    say, binding = store.statements, store.binding
    stale = f"{say.running()} and {say.stale(lease, say.table + '.')}"
    worker = say.name(binding.roles["worker"]) if "worker" in binding.roles else "null"
    told = f"{worker}, {say.poison() or '0'}, {say.names(binding.key)}"
    find = f"select {told} from {say.table} where {stale} limit {most}"
    swept = []
    for holder, poison, *parts in await store.database.read(lambda run: run(find, ())):
        key = parts[0] if len(parts) == 1 else tuple(parts)
        refused = None
        try:
            if not poison:
                if await _write(store, say.sweep_set()[0], Marks(binding), stale, parts):
                    swept.append(Swept(key, holder, False))
                continue
        except Refused as error:
            refused = store.error_text(f"{NOT_BACK}{error.message}")
        try:
            marks = Marks(binding)
            said = marks.add(refused) if refused and "error" in binding.roles else None
            if await _write(store, say.sweep_set(said)[1], marks, stale, parts):
                swept.append(Swept(key, holder, True, refused))
        except Refused as error:
            swept.append(Swept(key, holder, False, error.message))
    return swept


async def _write(store: LaneStore, written: Mapping[str, str], marks: Marks, stale: str, key: list[Any]) -> bool:
    """Write one row, if it still is stale and nobody else has it locked."""
    say: Statements = store.statements
    keys = say.names(store.binding.key)
    mine = f"{among(keys, [tuple(key)], marks)} and {stale}"
    assignments = say.assignments(written)
    if store.database.dialect.name == "postgresql":
        picked, found = say._match("picked")  # type: ignore[attr-defined]
        text = f"""with picked as materialized (
  select {picked} from {say.table} where {mine} for no key update skip locked
)
update {say.table} set
    {assignments}
where {found} returning 1"""
    else:
        text = f"update {say.table} set\n    {assignments}\nwhere {mine} returning 1"
    return bool(await store.database.write(lambda run: run(text, marks.given())))
