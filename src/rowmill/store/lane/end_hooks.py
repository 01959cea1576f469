"""Rows that end by other hands than their run's, by a sweep or an operator: the lane's ``on_settled`` hears of them,
in the transaction that ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from ..database import Run, runner
from ..driver_errors import translated
from ..handler_connections import shielded
from .claim import Settlement
from .row_keys import Key, Placeholders, among

if TYPE_CHECKING:
    from .lane_store import LaneStore

T = TypeVar("T")


async def ending(
    store: LaneStore, verb: Callable[[Run], T], ended: Callable[[T], Sequence[Key]], kind: str, error: str
) -> T:
    """Run a verb in a transaction, and the hooks for the rows it ended. ``error``: for a lane with no column for it."""
    async with store.database.begin() as connection:
        with translated(store.database):
            result: T = await shielded(connection.run_sync(lambda c: verb(runner(c))))
        if store.lane.settled_hooks and (keys := ended(result)):
            await store.run_hooks(connection, await _settlements(store, connection, keys, kind, error))
    return result


async def _settlements(
    store: LaneStore, connection: AsyncConnection, keys: Sequence[Key], kind: str, error: str
) -> list[Settlement]:
    """The rows as they stand now, as settled ones."""
    say, marks, column = store.statements, Placeholders(store.binding), store.binding.roles.get("error")
    test = among(say, keys, marks)
    text = f"select {say.names(store.binding.columns)}{say.and_inputs()} from {say.table} where {test}"
    with translated(store.database):
        rows = await shielded(connection.run_sync(lambda c: runner(c)(text, marks.given())))
    return [
        Settlement(claim, kind, error=store.value(claim.row, column) if column else error)
        for claim in store.make_claims(rows)
    ]
