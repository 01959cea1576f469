"""``rowmill_workers``: who works, on what, and when each was last heard of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ...errors import Refused
from ..database import Database, Run
from . import schema

#: A worker that has not been heard of for this long is dead.
SILENT = 60.0

_COLUMNS = "id, incarnation, host, pid, lanes, started_at, seen_at, state, current, completed, failed, lost, version"
#: Told only where the step that made rowmill_minutes was taken.
_MEMORY = "memory"


@dataclass(slots=True)
class WorkerState:
    """What a worker says of itself with every sign of life."""

    id: str
    incarnation: str
    host: str
    pid: int
    lanes: list[str]
    version: str
    #: The lease and the lease at start of each lane, in seconds: what this worker's claims are judged by.
    leases: dict[str, tuple[float, float]] = field(default_factory=dict)
    state: str = "idle"
    current: list[dict[str, Any]] = field(default_factory=list)
    completed: int = 0
    failed: int = 0
    lost: int = 0
    #: Resident, in bytes; 0: not known.
    memory: int = 0


class WorkersTable:
    """The workers table of one environment."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.postgres = database.dialect.name == "postgresql"
        self.table = database.own("rowmill_workers")
        self._own: schema.OwnTables | None = None
        self._age = (
            "extract(epoch from now() - seen_at)"
            if self.postgres
            else "(julianday('now') - julianday(seen_at)) * 86400.0"
        )
        self._now = "now()" if self.postgres else "strftime('%Y-%m-%d %H:%M:%f', 'now')"

    async def ensure(self) -> None:
        """Make the table where it is not there; raises Refused where the role may not."""
        own = await schema.ensure(self.database)
        if not own.has(schema.WORKERS) and not await self.exists():
            raise Refused(own.refused or "rowmill_workers is not there")

    async def exists(self) -> bool:
        """Whether the table is there."""
        return await self.database.read(lambda run: schema.exists(self.database, run, "rowmill_workers"))

    async def _has(self, step: schema.Step) -> bool:
        """Whether the table has the columns of a step: a role that may not change tables works without."""
        if self._own is None:
            self._own = await schema.taken(self.database)
        return self._own.has(step)

    def _marks(self, count: int) -> list[str]:
        return [f"${i}" if self.postgres else f"?{i}" for i in range(1, count + 1)]

    async def register(self, me: WorkerState, replaces: str | None = None) -> dict[str, Any] | None:
        """Take the id. Returns the live worker that has it already, if one does."""
        leases = await self._has(schema.RECOVERY)
        marks = self._marks(9 if leases else 8)
        silent = (
            f"{self.table}.seen_at < now() - interval '{SILENT} seconds'"
            if self.postgres
            else f"julianday({self.table}.seen_at) < julianday('now', '-{SILENT} seconds')"
        )
        text = f"""insert into {self.table} (id, incarnation, host, pid, lanes, version, started_at, seen_at, state
  {", leases" if leases else ""})
values ({", ".join(marks[:6])}, {self._now}, {self._now}, 'idle'{", " + marks[8] if leases else ""})
on conflict (id) do update set incarnation = excluded.incarnation, host = excluded.host, pid = excluded.pid,
  lanes = excluded.lanes, version = excluded.version, started_at = excluded.started_at, seen_at = excluded.seen_at,
  state = 'idle', current = '[]', completed = 0, failed = 0, lost = 0{", leases = excluded.leases" if leases else ""}
where {self.table}.state = 'stopped' or {self.table}.incarnation = {marks[6]}
  or {self.table}.incarnation = {marks[7]} or {silent}
returning id"""
        values = (
            me.id,
            me.incarnation,
            me.host,
            me.pid,
            json.dumps(me.lanes),
            me.version,
            me.incarnation,
            replaces or "",
            *([json.dumps(me.leases)] if leases else []),
        )
        if await self.database.write(lambda run: run(text, values)):
            return None
        holder = [worker for worker in await self.all() if worker["id"] == me.id]
        return holder[0] if holder else None

    async def beat(self, me: WorkerState) -> bool:
        """A sign of life; False when another incarnation has taken the id."""
        marks = self._marks(7)
        memory = f", memory = {int(me.memory)}" if await self._has(schema.MINUTES) else ""
        text = f"""update {self.table} set seen_at = {self._now}, state = {marks[0]}, current = {marks[1]},
  completed = {marks[2]}, failed = {marks[3]}, lost = {marks[4]}{memory}
where id = {marks[5]} and incarnation = {marks[6]} returning id"""
        values = (
            me.state, json.dumps(me.current, default=str), me.completed, me.failed, me.lost, me.id, me.incarnation,
        )  # fmt: skip
        return bool(await self.database.write(lambda run: run(text, values)))

    async def all(self) -> list[dict[str, Any]]:
        """Every worker that has not been forgotten, the latest heard of first."""
        columns = f"{_COLUMNS}, {_MEMORY if await self._has(schema.MINUTES) else 'null as memory'}"

        def verb(run: Run) -> list[dict[str, Any]]:
            rows = run(f"select {columns}, {self._age} from {self.table} order by seen_at desc", ())
            names = [*_COLUMNS.split(", "), _MEMORY, "silent_for"]
            return [dict(zip(names, row, strict=True)) for row in rows]

        found = await self.database.read(verb)
        for worker in found:
            worker["lanes"], worker["current"] = json.loads(worker["lanes"]), json.loads(worker["current"])
            worker["silent_for"] = max(float(worker["silent_for"]), 0.0)
            worker["alive"] = worker["state"] != "stopped" and worker["silent_for"] < SILENT
            for moment in ("started_at", "seen_at"):
                value = worker[moment]
                worker[moment] = (
                    value.isoformat() if isinstance(value, datetime) else f"{value}+00:00".replace(" ", "T")
                )
        return found

    async def longest_lease(self, lane: str, *, at_start: bool) -> timedelta:
        """The longest lease under which a worker may hold rows of a lane: one that has not stopped, and that was
        heard of since its own lease ran out. After a deploy with a shorter lease, older workers renew by theirs.
        """
        if not await self._has(schema.RECOVERY):
            return timedelta(0)
        text = f"select leases, {self._age} from {self.table} where state <> 'stopped'"
        longest = 0.0
        for leases, silent_for in await self.database.read(lambda run: run(text, ())):
            lease = json.loads(leases).get(lane)
            if lease is not None and float(silent_for) < lease[0] + SILENT:
                longest = max(longest, lease[at_start])
        return timedelta(seconds=longest)

    async def forget(self, older: float = 7 * 86400.0) -> None:
        """Drop workers that have been gone for a week."""
        test = (
            f"seen_at < now() - interval '{older} seconds'"
            if self.postgres
            else f"julianday(seen_at) < julianday('now', '-{older} seconds')"
        )
        await self.database.write(lambda run: run(f"delete from {self.table} where {test} returning id", ()))
