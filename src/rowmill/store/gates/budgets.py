"""Budgets in ``rowmill_gates``: one row for each limit, with what was spent within its period."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...clock import Clock
from ...declare.budget import Limit
from ...errors import RowmillError
from ..database import Database, Run
from ..own import schema
from .gate_rows import GateChange, GateRows
from .rules import Window


@dataclass(frozen=True, slots=True)
class BudgetTaken:
    """``wait``: 0, or the seconds until all of it could be had. ``at``: when it was taken, in seconds since 1970."""

    wait: float
    at: float


async def take(
    database: Database,
    clock: Clock,
    name: str,
    asked: Sequence[tuple[Limit, float]],
    returned: Sequence[tuple[Limit, float, float]] = (),
    *,
    used: bool = False,
) -> BudgetTaken:
    """Spend all of it, or nothing; ``returned`` (limit, amount, when it was taken) is given back before. What is
    ``used`` up already is counted, whether there was room for it or not.
    """
    own = await schema.taken(database)
    if not own.has(schema.GATES):
        raise RowmillError(
            f"budget {name!r}: its table rowmill_gates is not there",
            hint="run rowmill migrate APP --apply with a role that may create tables",
        )
    rows = GateRows.open(database, clock, "")

    def verb(run: Run) -> BudgetTaken:
        limits = [*(limit for limit, _ in asked), *(limit for limit, _, _ in returned)]
        spots = {limit: (f"budget:{name}", f"{limit.unit}/{limit.seconds:g}") for limit in limits}
        # Held until the commit, in the order of the key: who comes second sees what the first has spent.
        states = rows.lock(run, spots.values(), wait=True)
        now = rows.epoch(run)
        windows = {limit: Window.read(limit.seconds, states[spots[limit]].cells, now) for limit in spots}
        for limit, amount, at in returned:
            windows[limit].take_back(amount, at)
        wait = max((windows[limit].wait(amount, limit.most, now) for limit, amount in asked), default=0.0)
        if wait > 0 and not used:
            return BudgetTaken(wait, now)
        for limit, amount in asked:
            windows[limit].add(amount, now)
        rows.write(run, [GateChange(*spots[limit], {"cells": windows[limit].text()}) for limit in spots])
        return BudgetTaken(0.0, now)

    return await database.transact(verb)
