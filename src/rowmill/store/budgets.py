"""Budgets in ``rowmill_gates``: one row for each limit, with what was spent within its period."""

from __future__ import annotations

from collections.abc import Sequence

from ..allowance import Window
from ..budget import Limit
from ..clock import Clock
from ..errors import RowmillError
from . import schema
from .database import Database, Run
from .gate_rows import Change, GateRows


async def take(database: Database, clock: Clock, name: str, asked: Sequence[tuple[Limit, float]]) -> float:
    """Spend all of it, or nothing: 0, or the seconds until all of it could be had."""
    own = await schema.taken(database)
    if not own.has(schema.GATES):
        raise RowmillError(
            f"budget {name!r}: its table rowmill_gates is not there",
            hint="let somebody who may create tables run: rowmill migrate APP --apply",
        )
    rows = GateRows(database, clock, "")

    def verb(run: Run) -> float:
        spots = {limit: (f"budget:{name}", f"{limit.unit}/{limit.seconds:g}") for limit, _ in asked}
        # Held until the commit, in the order of the key: who comes second sees what the first has spent.
        states = rows.lock(run, spots.values(), wait=True)
        now = rows.epoch(run)
        windows = {limit: Window.read(limit.seconds, states[spots[limit]].cells, now) for limit, _ in asked}
        wait = max(windows[limit].wait(amount, limit.most, now) for limit, amount in asked)
        if wait > 0:
            return wait
        for limit, amount in asked:
            windows[limit].add(amount, now)
        rows.write(run, [Change(*spots[limit], {"cells": windows[limit].text()}) for limit, _ in asked])
        return 0.0

    return await database.transact(verb)
