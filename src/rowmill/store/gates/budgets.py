"""Budgets in ``rowmill_gates``: one row for each limit, with the amount spent in its period."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...clock import Clock
from ...declare.budget import Budget, Limit
from ...errors import RowmillError
from ..database import Database, Run
from ..own import schema
from .gate_rows import GateChange, GateRows
from .rules import Window


@dataclass(frozen=True, slots=True)
class BudgetTaken:
    """``wait``: 0, or the seconds until the amount is available. ``at``: when it was taken (seconds since 1970)."""

    wait: float
    at: float


async def spent(database: Database, clock: Clock, budgets: Sequence[Budget]) -> list[tuple[str, Limit, float]]:
    """Return the amount spent of each limit within its period, as of now."""
    if not budgets or not (await schema.taken(database)).has(schema.GATES):
        return []
    rows = GateRows.open(database, clock, "")
    spots = {(budget.name, limit): _spot(budget.name, limit) for budget in budgets for limit in budget.limits}

    def verb(run: Run) -> list[tuple[str, Limit, float]]:
        states, now = rows.read(run, spots.values()), rows.epoch(run)
        return [
            (name, limit, Window.read(limit.seconds, states[spot].cells if spot in states else None, now).used)
            for (name, limit), spot in spots.items()
        ]

    return await database.read(verb)


def _spot(name: str, limit: Limit) -> tuple[str, str]:
    return f"budget:{name}", f"{limit.unit}/{limit.seconds:g}"


async def take(
    database: Database,
    clock: Clock,
    name: str,
    asked: Sequence[tuple[Limit, float]],
    returned: Sequence[tuple[Limit, float, float]] = (),
    *,
    used: bool = False,
) -> BudgetTaken:
    """Spend the whole amount or nothing. ``returned`` (limit, amount, when it was taken) is given back first. An amount
    that is ``used`` already is counted even if it exceeds the limit.
    """
    own = await schema.taken(database)
    if not own.has(schema.GATES):
        own = await schema.ensure(database)  # where it is no environment, no lane has made it
    if not own.has(schema.GATES):
        raise RowmillError(
            f"budget {name!r}: its table rowmill_gates does not exist",
            hint="run rowmill migrate APP --apply with a role that may create tables",
        )
    rows = GateRows.open(database, clock, "")

    def verb(run: Run) -> BudgetTaken:
        limits = [*(limit for limit, _ in asked), *(limit for limit, _, _ in returned)]
        spots = {limit: _spot(name, limit) for limit in limits}
        # Locked until the commit, in the order of the key: a second transaction sees what the first one spent.
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
