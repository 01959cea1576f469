"""Pauses of an environment, of a lane, or of one key of a lane's gates. Each is a row of ``rowmill_gates``.

A pause keeps rows from being claimed. Running rows continue. A pause writes nothing to the rows themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from ...clock import Clock
from ...errors import RowmillError
from ..database import Database, Run
from ..lane.lane_store import LaneStore
from ..own import schema
from .gate_rows import ENDLESS, GateChange, GateRows

#: The most pauses that are listed, and the most ready rows that are counted.
_LISTED, COUNTED = 200, 10_000


@dataclass(frozen=True, slots=True)
class Target:
    """What is paused: an environment (no lane), a lane (no key), or one key of one group of its gates."""

    lane: str = ""
    dim: str = ""
    key: str = ""

    @property
    def kind(self) -> str:
        """environment, lane or key."""
        return "environment" if not self.lane else "key" if self.dim else "lane"


@dataclass(frozen=True, slots=True)
class Pause:
    """An active pause. ``since`` is seconds ago; ``left`` is the seconds until it ends, infinite if it has no end."""

    target: Target
    reason: str | None
    since: float | None
    left: float


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The rest of a lane when a drain ends: ready rows (``COUNTED`` at most), and which pauses hold them back."""

    count: int
    why: str


async def ensure_gates(database: Database) -> bool:
    """Create the table of pauses and gates. Returns whether it was missing; raises if the role may not create it."""
    if (await schema.taken(database)).has(schema.GATES):
        return False
    own = await schema.ensure(database)
    if not own.has(schema.GATES):
        raise RowmillError(
            f"the table rowmill_gates, which stores pauses, does not exist and cannot be created: {own.refused}",
            hint="run rowmill migrate APP --apply with a role that may create tables",
        )
    return True


async def standing(database: Database, clock: Clock, lanes: Iterable[str]) -> list[Pause]:
    """The active pauses of an environment and of these lanes: the environment's first, those of keys last."""
    if not (await schema.taken(database)).has(schema.GATES):
        return []
    return await database.read(lambda run: read_standing(run, GateRows.open(database, clock, ""), lanes))


def read_standing(run: Run, rows: GateRows, lanes: Iterable[str]) -> list[Pause]:
    """The same, for when the table is known to exist."""
    listed = ", ".join(rows.literal(lane) for lane in ("", *lanes))
    text = f"""select lane, dim, key, reason, {rows.until("paused_at")}, {rows.until("paused_until")}
from {rows.table} where paused_until > {rows.now()} and lane in ({listed})
order by case when lane = '' then 0 when dim = '' then 1 else 2 end, lane, dim, key limit {_LISTED}"""
    return [_pause(Target(*row[:3]), row[3], row[4], row[5]) for row in run(text, ())]


def _pause(target: Target, reason: str | None, at: float | None, until: float) -> Pause:
    since = None if at is None else max(-float(at), 0.0)
    return Pause(target, reason, since, GateRows.left(float(until)))


async def pause(
    database: Database, clock: Clock, target: Target, reason: str | None, end: timedelta | datetime | None
) -> Pause:
    """Pause from now until ``end``, or until it is resumed. If it is paused already, the pause gets this end."""

    def verb(run: Run) -> Pause:
        rows = GateRows.open(database, clock, target.lane)
        left = ENDLESS
        if isinstance(end, timedelta):
            left = end.total_seconds()
        elif end is not None:
            left = end.timestamp() - rows.epoch(run)
            if left <= 0:
                raise RowmillError(f"{end.isoformat()} is in the past by the database's clock", hint="--for 10m")
        spot = (target.dim, target.key)
        state = rows.lock(run, [spot], wait=True)[spot]
        values = {"paused_until": left, "reason": reason}
        if not (state.paused_for or 0.0) > 0:
            values["paused_at"] = 0.0
        rows.write(run, [GateChange(*spot, values)])
        return next(p for p in read_one(run, rows, target))

    return await database.transact(verb)


async def resume(database: Database, clock: Clock, target: Target) -> Pause | None:
    """End a pause. Returns the pause that was active, or None."""
    if not (await schema.taken(database)).has(schema.GATES):
        return None

    def verb(run: Run) -> Pause | None:
        rows = GateRows.open(database, clock, target.lane)
        stood = read_one(run, rows, target)
        if stood:
            rows.lock(run, [(target.dim, target.key)], wait=True)
            ended = {"paused_until": None, "paused_at": None, "reason": None}
            rows.write(run, [GateChange(target.dim, target.key, ended)])
        return stood[0] if stood else None

    return await database.transact(verb)


def read_one(run: Run, rows: GateRows, target: Target) -> list[Pause]:
    """The active pause of exactly this target, if there is one."""
    spot = " and ".join(f"{name} = {rows.literal(getattr(target, name))}" for name in ("lane", "dim", "key"))
    text = f"""select reason, {rows.until("paused_at")}, {rows.until("paused_until")} from {rows.table}
where {spot} and paused_until > {rows.now()}"""
    return [_pause(target, *row) for row in run(text, ())]


async def held_back(store: LaneStore) -> HeldBack | None:
    """The ready rows of a lane if no row runs and every ready row is paused without end; None if rows may still run."""
    if store.statements.gates is None:
        return None
    rows, statements = GateRows.open(store.database, store.clock, store.lane.name), store.statements
    dims = [dim for dim in (store.gate_learning.dims.values() if store.gate_learning else ()) if dim.phrase is not None]

    def verb(run: Run) -> HeldBack | None:
        labels = {"", *(dim.label for dim in dims)}
        standing = read_standing(run, rows, [store.lane.name])
        endless = [pause for pause in standing if pause.left == math.inf and pause.target.dim in labels]
        if not endless:
            return None
        tests = [statements.ready()]
        if any(not pause.target.dim for pause in endless):
            tests.append("1 = 0")
        for dim in dims:
            # Outside the inner select: a column of the user's table may have the same name as one of the gate's
            # columns.
            paused = f"""select key from {rows.table} where lane = {rows.literal(rows.lane)}
  and dim = {rows.literal(dim.label)} and paused_until > {rows.now()} and {rows.endless()}"""
            tests.append(f"coalesce(cast({dim.phrase} as text) not in ({paused}), true)")
        free = f"exists (select 1 from {statements.table} where {' and '.join(tests)})"
        if run(f"select 1 where {store.running_probe()} or {free}", ()):
            return None
        some = f"select 1 from {statements.table} where {statements.ready()} limit {COUNTED}"
        count = run(f"select count(*) from ({some}) x", ())[0][0]
        return HeldBack(count, "; ".join(dict.fromkeys(_said(pause) for pause in endless[:3])))

    return await store.database.read(verb)


def _said(pause: Pause) -> str:
    """``the lane is paused: maintenance``"""
    target = pause.target
    what = f"{target.dim} {target.key}" if target.kind == "key" else f"the {target.kind}"
    return f"{what} is paused{f': {pause.reason}' if pause.reason else ''}"
