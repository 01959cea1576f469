"""``rowmill_workers``: which workers there are, what each does, and its last heartbeat."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ...errors import Refused
from ..database import Database, Run
from ..dialect import iso_time
from . import schema
from .process_identity import process_is_gone, same_kernel

#: Seconds without a heartbeat after which a worker counts as dead.
SILENT = 60.0
#: Seconds between two heartbeats of a worker, and between two checks of the other workers. A dead host is found within
#: twice this, or within this plus the suspicion, whichever is longer.
BEAT_EVERY = 4.0
#: Seconds between two checks whether the other workers of this host still exist. Two checks confirm a death.
KERNEL_EVERY = 0.5

_COLUMNS = "id, incarnation, host, pid, lanes, started_at, seen_at, state, current, completed, failed, lost, version"
#: Written only if the migration step that added rowmill_minutes was applied.
_MEMORY = "memory"


@dataclass(slots=True)
class WorkerState:
    """What a worker reports with every heartbeat."""

    id: str
    incarnation: str
    host: str
    pid: int
    lanes: list[str]
    version: str
    #: The lease and the lease at start of each lane, in seconds: other workers judge this worker's claims by them.
    leases: dict[str, tuple[float, float]] = field(default_factory=dict)
    state: str = "idle"
    current: list[dict[str, Any]] = field(default_factory=list)
    completed: int = 0
    failed: int = 0
    lost: int = 0
    #: Resident memory in bytes; 0: unknown.
    memory: int = 0
    #: The identity of the process, for workers on the same host; None: the system does not provide one.
    process: str | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker, as recorded in the workers table."""

    id: str
    incarnation: str
    #: The time of its last heartbeat as the database writes it, and its age in seconds by the database's clock.
    seen_at: str
    silent_for: float
    process: str | None
    #: It reported that it holds its lock, but no session holds it.
    lock_missing: bool
    #: It was declared dead, and no worker has reported yet that all its rows were given back.
    dead: bool = False


def lock_id(incarnation: str) -> int:
    """The number of the advisory lock that a worker holds on its listening session."""
    return zlib.crc32(incarnation.encode())


class WorkersTable:
    """The workers table of one environment."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.table = database.own("rowmill_workers")
        self._own: schema.OwnTables | None = None
        self._age, self._now = database.sql.age(f"{self.table}.seen_at"), database.sql.now
        self._lock_missing: str | None = None
        #: At the last heartbeat, no session held the lock that this worker believes it holds.
        self.lock_lost = False

    async def ensure(self) -> None:
        """Create the table if it is missing; raises Refused if the role may not."""
        own = await schema.ensure(self.database)
        if not own.has(schema.WORKERS) and not await self.exists():
            raise Refused(own.refused or "rowmill_workers is not there")

    async def exists(self) -> bool:
        """Whether the table exists."""
        return await self.database.read(lambda run: schema.exists(self.database, run, "rowmill_workers"))

    async def _has(self, step: schema.Step) -> bool:
        """Whether the table has the columns of a step. A role that may not alter tables works without them."""
        if self._own is None:
            self._own = await schema.taken(self.database)
        return self._own.has(step)

    async def _missing(self) -> str:
        """SQL that says whether a worker's lock is missing. False if this role may not see locks."""
        if self._lock_missing is None:
            sql = self.database.sql
            sees = sql.sees_locks
            seen = sees is None or (await self.database.read(lambda run: run(sees, ())))[0][0]
            self._lock_missing = sql.lock_missing("lock_id") if seen else "false"
        return self._lock_missing

    async def register(self, me: WorkerState, replaces: str | None = None) -> dict[str, Any] | None:
        """Take the id. Returns the live worker that already has it, if there is one."""
        columns: dict[str, Any] = {
            "id": me.id, "incarnation": me.incarnation, "host": me.host, "pid": me.pid,
            "lanes": json.dumps(me.lanes), "version": me.version,
        }  # fmt: skip
        if await self._has(schema.RECOVERY):
            columns["leases"] = json.dumps(me.leases)
        if await self._has(schema.LIVENESS):
            columns |= {"process": me.process, "lock_id": None}
        *marks, mine, its = self.database.sql.marks(len(columns) + 2, kind="")
        renewed = ", ".join(f"{column} = excluded.{column}" for column in (*list(columns)[1:], "started_at", "seen_at"))
        silent = self.database.sql.seconds("excluded.seen_at", f"{self.table}.seen_at")
        text = f"""insert into {self.table} ({", ".join(columns)}, started_at, seen_at, state)
values ({", ".join(marks)}, {self._now}, {self._now}, 'idle')
on conflict (id) do update set {renewed},
  state = 'idle', current = '[]', completed = 0, failed = 0, lost = 0
where {self.table}.state in ('stopped', 'dead') or {self.table}.incarnation = {mine}
  or {self.table}.incarnation = {its} or {silent} > {SILENT}
returning id"""
        values = (*columns.values(), me.incarnation, replaces or "")
        if await self.database.write(lambda run: run(text, values)):
            return None
        return await self.find(me.id)

    async def find(self, id: str) -> dict[str, Any] | None:
        """The entry of one worker."""
        return next((worker for worker in await self.all() if worker["id"] == id), None)

    async def beat(self, me: WorkerState, *, locked: bool = False) -> bool:
        """Write a heartbeat. Returns False if another incarnation has the id. ``locked``: it holds its own lock."""
        marks = self.database.sql.marks(9, kind="")
        memory = f", memory = {int(me.memory)}" if await self._has(schema.MINUTES) else ""
        process: tuple[str | None, ...] = ()
        of, missing = "id", "1 = 0"
        if await self._has(schema.LIVENESS):
            of, missing = "lock_id", await self._missing()
            # Others set these if they presumed it dead and gave its rows back. It is alive, and can die again.
            memory += f", lock_id = {lock_id(me.incarnation) if locked else 'null'}"
            memory += f", process = {marks[7]}, lanes = {marks[8]}"
            process = (me.process, json.dumps(me.lanes))
        text = f"""update {self.table} set seen_at = {self._now}, state = {marks[0]}, current = {marks[1]},
  completed = {marks[2]}, failed = {marks[3]}, lost = {marks[4]}{memory}
where id = {marks[5]} and incarnation = {marks[6]}"""
        text = self.database.sql.written(text, of, missing)
        values = (
            me.state, json.dumps(me.current, default=str), me.completed, me.failed, me.lost, me.id, me.incarnation,
            *process,
        )  # fmt: skip
        rows = await self.database.write(lambda run: run(text, values))
        self.lock_lost = bool(rows and rows[0][0])
        return bool(rows)

    async def peers(self, me: WorkerState) -> list[Peer]:
        """The other workers that have not stopped and serve a lane of this one.

        Leaves out dead workers whose rows of these lanes were given back.
        """
        if not await self._has(schema.LIVENESS):
            return []
        sql = self.database.sql
        text = f"""select id, incarnation, cast(seen_at as text), {self._age}, process, {await self._missing()},
  case when state = 'dead' then 1 else 0 end, lanes
from {self.table}
where state <> 'stopped' and incarnation <> {sql.mark(1)}
  and (state <> 'dead' or process is not null or lock_id is not null)"""
        rows = await self.database.read(lambda run: run(text, (me.incarnation,)))
        return [
            Peer(id, life, seen, float(age), process, bool(missing), bool(dead))
            for id, life, seen, age, process, missing, dead, lanes in rows
            if not set(me.lanes).isdisjoint(json.loads(lanes))
        ]

    async def declare_dead(self, id: str, incarnation: str, seen_at: str | None) -> bool:
        """Declare a worker dead. Only one of the workers that find it dead gets True, and gives its rows back.

        ``seen_at``: declare it dead only if there was no heartbeat since.
        """
        sql = self.database.sql
        marks = sql.marks(3 if seen_at else 2)
        silent = f" and cast(seen_at as text) = {marks[2]}" if seen_at else ""
        text = f"""update {self.table} set state = 'dead', current = '[]'
where id = {marks[0]} and incarnation = {marks[1]} and state not in ('stopped', 'dead'){silent} returning id"""
        values = (id, incarnation, seen_at) if seen_at else (id, incarnation)
        return bool(await self.database.write(lambda run: run(text, values)))

    async def rows_given_back(self, id: str, incarnation: str, lanes: Collection[str]) -> None:
        """Record that the rows of a dead worker in these lanes were given back.

        Its other lanes stay recorded: a worker that serves one of them gives back the rest. If two workers write at
        once and one overwrites the other's lanes, the lanes that stayed by mistake are checked again.
        """
        if not await self._has(schema.LIVENESS):
            return
        marks = self.database.sql.marks(3)
        this = f"id = {marks[0]} and incarnation = {marks[1]} and state = 'dead'"

        def verb(run: Run) -> None:
            for (served,) in run(f"select lanes from {self.table} where {this}", (id, incarnation)):
                if left := [lane for lane in json.loads(served) if lane not in lanes]:
                    text = f"update {self.table} set lanes = {marks[2]} where {this} returning id"
                    run(text, (id, incarnation, json.dumps(left)))
                else:
                    text = f"update {self.table} set process = null, lock_id = null where {this} returning id"
                    run(text, (id, incarnation))

        await self.database.write(verb)

    async def all(self) -> list[dict[str, Any]]:
        """Every worker in the table, the latest heartbeat first."""
        columns = f"{_COLUMNS}, {_MEMORY if await self._has(schema.MINUTES) else 'null as memory'}"
        known = await self._has(schema.LIVENESS)
        columns += f", process, lock_id, {await self._missing()}" if known else ", null, null, 0"

        def verb(run: Run) -> list[dict[str, Any]]:
            rows = run(f"select {columns}, {self._age} from {self.table} order by seen_at desc", ())
            names = [*_COLUMNS.split(", "), _MEMORY, "process", "lock_id", "lock_missing", "silent_for"]
            return [dict(zip(names, row, strict=True)) for row in rows]

        entries = await self.database.read(verb)
        for worker in entries:
            worker["lanes"], worker["current"] = json.loads(worker["lanes"]), json.loads(worker["current"])
            worker["silent_for"] = max(float(worker["silent_for"]), 0.0)
            ended = worker["state"] in ("stopped", "dead")
            worker["process_gone"] = not ended and process_is_gone(worker["process"])
            worker["lock_missing"] = not ended and bool(worker["lock_missing"])
            worker["alive"] = not ended and worker["silent_for"] < SILENT and not worker["process_gone"]
            for time in ("started_at", "seen_at"):
                worker[time] = iso_time(worker[time])
        return entries

    async def longest_lease(self, lane: str, *, at_start: bool) -> timedelta:
        """The longest lease under which a worker may hold rows of a lane.

        Counts workers that have not stopped, with a heartbeat within their own lease. After a deploy with a shorter
        lease, older workers still renew by their longer one.
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
        """Delete workers that have been gone for a week."""
        text = f"delete from {self.table} where {self._age} > {older} returning id"
        await self.database.write(lambda run: run(text, ()))


def is_suspect(worker: dict[str, Any], suspicion: float | None) -> bool:
    """Whether a worker's lock is missing and its heartbeat is late."""
    return suspicion is not None and worker["lock_missing"] and worker["silent_for"] > BEAT_EVERY


def evidence(worker: dict[str, Any], suspicion: float | None) -> str | None:
    """The evidence that a worker is dead or seems dead, as text; None: it seems alive."""
    if worker["process_gone"]:
        return "its process is gone"
    if is_suspect(worker, suspicion):
        return "its session with the database is gone, and its heartbeat is late"
    if worker["alive"]:
        return None
    return {"dead": "another worker found it dead", "stopped": "it has stopped"}.get(worker["state"], "it is silent")


def taken_back_within(
    worker: dict[str, Any], others: Sequence[dict[str, Any]], suspicion: float | None
) -> float | None:
    """The most seconds until a live worker among ``others`` takes back what a dead worker held.

    ``others`` serve the lane. None: only the lease will end the claims.
    """
    others = [other for other in others if other["alive"] and other["incarnation"] != worker["incarnation"]]
    bounds = []
    if worker["state"] == "dead" and others and (worker["process"] is not None or worker["lock_id"] is not None):
        bounds.append(2 * BEAT_EVERY)  # if the worker that found it dead fails, others see that at their second check
    if worker["process_gone"] and any(same_kernel(worker["process"], other["process"]) for other in others):
        bounds.append(2 * KERNEL_EVERY)
    locked = [other for other in others if other["lock_id"] is not None and not other["lock_missing"]]
    if suspicion is not None and is_suspect(worker, suspicion) and locked:
        # It died within one heartbeat interval after its last heartbeat. The first check that misses its lock comes one
        # interval later.
        bounds.append(2 * BEAT_EVERY + suspicion - worker["silent_for"])
    return min((bound for bound in bounds if bound > 0), default=None)
