"""``rowmill_workers``: who works, on what, and when each was last heard of."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ...errors import Refused
from ..database import Database, Run
from ..dialect import iso_time
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
    #: Which process it is, for workers on the same host; None: the system does not tell.
    process: str | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker, as the workers table has it."""

    id: str
    incarnation: str
    #: When it was last heard of, as the database writes it, and how many seconds ago that is by the database's clock.
    seen_at: str
    silent_for: float
    process: str | None
    #: It said that it holds its lock, and nobody does.
    lock_missing: bool
    #: It was declared dead, and nobody has reported yet that its rows were given back.
    dead: bool = False


def lock_id(incarnation: str) -> int:
    """The number of the advisory lock that a worker holds on the session on which it listens."""
    return zlib.crc32(incarnation.encode())


class WorkersTable:
    """The workers table of one environment."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.table = database.own("rowmill_workers")
        self._own: schema.OwnTables | None = None
        self._age, self._now = database.sql.age(f"{self.table}.seen_at"), database.sql.now

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

    async def register(self, me: WorkerState, replaces: str | None = None) -> dict[str, Any] | None:
        """Take the id. Returns the live worker that has it already, if one does."""
        told: dict[str, Any] = {
            "id": me.id, "incarnation": me.incarnation, "host": me.host, "pid": me.pid,
            "lanes": json.dumps(me.lanes), "version": me.version,
        }  # fmt: skip
        if await self._has(schema.RECOVERY):
            told["leases"] = json.dumps(me.leases)
        if await self._has(schema.LIVENESS):
            told |= {"process": me.process, "lock_id": None}
        *marks, mine, its = self.database.sql.marks(len(told) + 2, kind="")
        renewed = ", ".join(f"{column} = excluded.{column}" for column in (*list(told)[1:], "started_at", "seen_at"))
        text = f"""insert into {self.table} ({", ".join(told)}, started_at, seen_at, state)
values ({", ".join(marks)}, {self._now}, {self._now}, 'idle')
on conflict (id) do update set {renewed},
  state = 'idle', current = '[]', completed = 0, failed = 0, lost = 0
where {self.table}.state in ('stopped', 'dead') or {self.table}.incarnation = {mine}
  or {self.table}.incarnation = {its} or {self._age} > {SILENT}
returning id"""
        values = (*told.values(), me.incarnation, replaces or "")
        if await self.database.write(lambda run: run(text, values)):
            return None
        holder = [worker for worker in await self.all() if worker["id"] == me.id]
        return holder[0] if holder else None

    async def beat(self, me: WorkerState, *, locked: bool = False) -> bool:
        """A sign of life; False when another incarnation has taken the id. ``locked``: it holds its advisory lock."""
        marks = self.database.sql.marks(7, kind="")
        memory = f", memory = {int(me.memory)}" if await self._has(schema.MINUTES) else ""
        if await self._has(schema.LIVENESS):
            memory += f", lock_id = {lock_id(me.incarnation) if locked else 'null'}"
        text = f"""update {self.table} set seen_at = {self._now}, state = {marks[0]}, current = {marks[1]},
  completed = {marks[2]}, failed = {marks[3]}, lost = {marks[4]}{memory}
where id = {marks[5]} and incarnation = {marks[6]} returning id"""
        values = (
            me.state, json.dumps(me.current, default=str), me.completed, me.failed, me.lost, me.id, me.incarnation,
        )  # fmt: skip
        return bool(await self.database.write(lambda run: run(text, values)))

    async def peers(self, me: WorkerState) -> list[Peer]:
        """The other workers that have not stopped, without the dead ones whose rows were given back."""
        if not await self._has(schema.LIVENESS):
            return []
        sql = self.database.sql
        text = f"""select id, incarnation, cast(seen_at as text), {self._age}, process, {sql.lock_missing("lock_id")},
  case when state = 'dead' then 1 else 0 end
from {self.table}
where state <> 'stopped' and incarnation <> {sql.mark(1)}
  and (state <> 'dead' or process is not null or lock_id is not null)"""
        rows = await self.database.read(lambda run: run(text, (me.incarnation,)))
        return [
            Peer(id, life, seen, float(age), process, bool(missing), bool(dead))
            for id, life, seen, age, process, missing, dead in rows
        ]

    async def declare_dead(self, id: str, incarnation: str, seen_at: str | None) -> bool:
        """Call a worker dead. Only one of those who find it dead is told True: that one gives its rows back.

        ``seen_at``: only if it was not heard of since.
        """
        sql = self.database.sql
        marks = sql.marks(3 if seen_at else 2)
        silent = f" and cast(seen_at as text) = {marks[2]}" if seen_at else ""
        text = f"""update {self.table} set state = 'dead', current = '[]'
where id = {marks[0]} and incarnation = {marks[1]} and state not in ('stopped', 'dead'){silent} returning id"""
        values = (id, incarnation, seen_at) if seen_at else (id, incarnation)
        return bool(await self.database.write(lambda run: run(text, values)))

    async def rows_given_back(self, id: str, incarnation: str) -> None:
        """Everything that this dead worker held was given back: nobody needs to look for its rows again."""
        if not await self._has(schema.LIVENESS):
            return
        marks = self.database.sql.marks(2)
        text = f"""update {self.table} set process = null, lock_id = null
where id = {marks[0]} and incarnation = {marks[1]} and state = 'dead' returning id"""
        await self.database.write(lambda run: run(text, (id, incarnation)))

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
            worker["alive"] = worker["state"] not in ("stopped", "dead") and worker["silent_for"] < SILENT
            for time in ("started_at", "seen_at"):
                worker[time] = iso_time(worker[time])
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
        text = f"delete from {self.table} where {self._age} > {older} returning id"
        await self.database.write(lambda run: run(text, ()))
