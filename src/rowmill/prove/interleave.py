"""The interleaver: a lane, a few rows, two to four workers, one seed; and what was seen."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ..clock import Clock
from ..declare.lane import Lane
from ..declare.retry import fixed
from ..store import Binding, Database, LaneStore, open_lane, set_gates, store_for
from ..store.dialect import POSTGRES, SQLITE
from ..store.gates.gate_binding import BoundGates
from ..store.lane.waits import WaitingRows
from ..store.own.schema import WAITS, WORKERS, ensure
from .commit_checks import CommitChecks
from .fake_handler import faked, nothing
from .sample_rows import SampleRows
from .schedules import Actor, Broken, Schedule
from .stepped_postgres import PostgresMonitor
from .stepped_sqlite import SqliteMonitor
from .worker_script import ScriptedHeartbeat, ScriptedWorker

_WORKERS = 4
#: A lease must outlive what a schedule takes by the real clock.
_LEAST_LEASE = timedelta(minutes=5)
_BACKOFF = timedelta(seconds=20)
#: After which part of a lease rows expire that do.
_EXPIRES = 0.7
_ROUNDS, _VACUUM_EVERY = 14, 100
_LONGEST = timedelta(days=400)
_MONITORS: dict[str, type[PostgresMonitor | SqliteMonitor]] = {
    POSTGRES.name: PostgresMonitor,
    SQLITE.name: SqliteMonitor,
}


@dataclass
class ScheduleResult:
    """One schedule: its seed, its steps, and what was broken by it, if anything was."""

    seed: int
    steps: list[str]
    broken: str | None = None


@dataclass
class InterleaveResult:
    """What many schedules came to."""

    schedules: int = 0
    steps: int = 0
    commits: int = 0
    claims: int = 0
    outcomes: int = 0
    swept: int = 0
    lost: int = 0
    waits: int = 0
    seconds: float = 0.0
    #: The last schedule, which is the broken one where one was.
    last: ScheduleResult | None = None

    @property
    def broken(self) -> ScheduleResult | None:
        """The schedule that broke something."""
        return self.last if self.last is not None and self.last.broken is not None else None

    def value(self) -> dict[str, Any]:
        document = {**vars(self), "seconds": round(self.seconds, 2)}
        del document["last"]
        return {**document, "broken": vars(self.broken) if self.broken else None}


@dataclass
class Interleaver:
    """One lane on one database that nobody else uses: its rows are deleted and made again for every schedule."""

    lane: Lane
    url: str
    made: SampleRows = field(default_factory=SampleRows)
    schema: str | None = None
    faults: bool = True
    #: An input of text that others than the workers edit, whatever state a row is in.
    edited: str | None = None

    async def __aenter__(self) -> Interleaver:
        # What was opened is closed, also where something behind it cannot be opened.
        async with contextlib.AsyncExitStack() as opened:
            await self._open(opened)
            self._close = opened.pop_all()
        return self

    async def _open(self, opened: contextlib.AsyncExitStack) -> None:
        self._close = opened
        self.clock = Clock()
        lease = max(self.lane.lease, _LEAST_LEASE)
        expires = {"expires_after": lease * _EXPIRES} if self.lane.expires_after is not None else {}
        self.lane = faked(self.lane, nothing, lease=lease, backoff=fixed(_BACKOFF), **expires)
        self.made = replace(self.made, expires=lease * _EXPIRES)
        self._opened = Database.open(self.url, schema=self.schema)
        opened.push_async_callback(self._opened.close)
        self._store = await open_lane(self.lane, "prove", self._opened, self.clock, "watch")
        notes = self._store.gate_learning
        self.dims: tuple[BoundGates, ...] = tuple(notes.dims.values()) if notes is not None else ()
        self.watch = CommitChecks(self._store, self.dims, self.clock)
        self.watch.expires = lease * _EXPIRES
        self._look = self.watch.text()
        self._monitor = _MONITORS[self._opened.dialect.name]()
        await self._monitor.open(self._opened)
        opened.callback(self._monitor.close)
        #: The dead processes of all workers; None where nobody can write beside a worker's transaction.
        self._dead: list[tuple[str, str]] | None = None
        if not self._opened.sql.one_writer and (await ensure(self._opened, (WORKERS,))).has(WORKERS):
            self._dead = []
        #: Rows may wait for a condition: there is a table that remembers it.
        self._waits = not self.lane.own and "run_after" in self._store.binding.roles
        self._waits = self._waits and (await ensure(self._opened, (WAITS,))).has(WAITS)
        self._rows = await self.made.rows(self._store, self.dims, self._run)
        self.workers = [await self._worker(f"w{n}") for n in range(1, _WORKERS + 1)]
        self._beats = [
            ScriptedHeartbeat(*await self._actor_with_store(f"{w.actor.name}'s heartbeat"), w) for w in self.workers[:2]
        ]
        self.tried = InterleaveResult()

    @property
    def binding(self) -> Binding:
        """The lane as it is bound to the table."""
        return self._store.binding

    async def __aexit__(self, *_: object) -> None:
        await self._close.aclose()

    async def _worker(self, name: str) -> ScriptedWorker:
        actor, store = await self._actor_with_store(name)
        return ScriptedWorker(actor, store, self.watch, self.dims, self._dead, self._run, self.edited)

    async def _actor_with_store(self, name: str) -> tuple[Actor, LaneStore]:
        actor = Actor(name)
        database = self._monitor.worker_database(self.url, actor, self.schema)
        self._close.push_async_callback(database.close)
        await database.connect()
        database.seen = self._seen
        gates = self._store.statements.gates is not None
        store = store_for(self._store.binding, database, self.clock, name, "", gates)
        store.opened_at = self._store.opened_at
        store.waits = WaitingRows(store) if self._waits else None
        if self.dims:
            set_gates(store, self.dims)
        return actor, store

    # -- beside the schedule

    async def _run(self, sql: str) -> Sequence[Any]:
        return await self._monitor.run(sql)

    async def _seen(self, actor: Actor) -> None:
        self.watch.commit(actor, await self._run(self._look))

    async def _reset(self, count: int) -> None:
        statements = self._store.statements
        if self._dead is not None:
            self._dead.clear()
        texts = [
            f"delete from {statements.table}",
            *([f"delete from {statements.workers}"] if self._dead is not None else []),
            *([f"delete from {statements.gates}"] if statements.gates else []),
            *([f"delete from {self._opened.own('rowmill_waits')}"] if self._waits else []),
            *self._rows[:count],
        ]
        if self.tried.schedules % _VACUUM_EVERY == _VACUUM_EVERY - 1:
            await self._monitor.vacuum(statements.table)
        await self._monitor.write("; ".join(texts))
        self.watch.begin(await self._run(self._look))

    # -- schedules

    async def run(self, seed: int) -> ScheduleResult:
        """One schedule, and its end: every row has to come to one."""
        # What the engine itself leaves to chance, such as how long a retry waits, is the seed's too; others' is not.
        others = random.getstate()
        random.seed(f"{seed} engine")
        try:
            return await self._run_schedule(seed)
        finally:
            random.setstate(others)

    async def _run_schedule(self, seed: int) -> ScheduleResult:
        first = random.Random(f"{seed} first")
        workers = self.workers[: first.choice([2, 2, 3, 3, 4])]
        self.clock.shift = timedelta(0)
        await self._reset(first.randint(2, len(self._rows)))
        lease = self.lane.lease
        schedule = Schedule(
            seed, self.clock, (lease * 0.45, lease * 1.1, lease * 1.1), self._monitor.blocked,
            faults=self.faults,
        )  # fmt: skip
        lives = []
        for worker in workers:
            await worker.begin(schedule)
            lives.append((worker.actor, worker.live))
        if self._store.binding.renew == "heartbeat_at":
            lives += [(beat.actor, beat.live) for beat in self._beats if first.random() < 0.5]
            for beat in self._beats:
                beat.store.database.schedule = schedule  # type: ignore[attr-defined]
        for actor, _ in lives:
            actor.over = actor.blocked = actor.fresh = False
            actor.turn = None
        ran = ScheduleResult(seed, schedule.steps)
        try:
            await schedule.run(lives)
            schedule.steps.append("every worker is gone but one, which finishes the open rows")
            await self._drain(workers[0])
        except Broken as broken:
            ran.broken = str(broken)
        tried, watch = self.tried, self.watch
        tried.schedules, tried.steps, tried.waits = (
            tried.schedules + 1,
            tried.steps + len(schedule.steps),
            tried.waits + schedule.waits,
        )
        tried.commits += watch.commits
        tried.claims, tried.outcomes, tried.swept, tried.lost = watch.claims, watch.outcomes, watch.swept, watch.lost
        return ran

    async def _drain(self, worker: ScriptedWorker) -> None:
        """One worker, alone, until every row has come to an end."""
        await worker.begin(None)
        step = self.lane.lease * 1.1
        for _ in range(_ROUNDS):
            if not self._left():
                return
            self.clock.advance(min(step, _LONGEST))
            step *= 2
            await worker.resume()
            await (worker.sweep() if self._store.sweeps else worker.release())
            await worker.look()
            await worker.expire()
            while True:
                await worker.claim(20)
                if not worker.held:
                    break
                await worker.settle(worker.done())
        left = self._left()
        if left:
            raise Broken(f"row {left[0]} never ends: it stays {self.watch.rows[left[0]].state}")

    def _left(self) -> list[Any]:
        return [k for k, row in self.watch.rows.items() if row.state in ("ready", "running", "unknown")]

    async def try_seeds(self, seeds: Sequence[int], *, seconds: float | None = None) -> InterleaveResult:
        """Schedule after schedule, until one is broken, or the time is up."""
        began = time.monotonic()
        for seed in seeds:
            self.tried.last = ran = await self.run(seed)
            self.tried.seconds = time.monotonic() - began
            if ran.broken is not None:
                break
            if seconds is not None and self.tried.seconds > seconds:
                break
        return self.tried
