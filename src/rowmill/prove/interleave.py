"""The interleaver: a lane, a few rows, two to four workers, one seed; and what was seen."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..clock import Clock
from ..declare.lane import Lane
from ..declare.retry import fixed
from ..store import Binding, Database, LaneStore, open_lane, set_gates, store_for
from ..store.gates.gate_binding import BoundGates
from ..store.own.schema import WORKERS, ensure
from .commit_checks import CommitChecks
from .fake_handler import faked, nothing
from .sample_rows import SampleRows
from .schedules import Actor, Broken, Schedule
from .statement_points import INSTALL, StatementLocks
from .stepped_postgres import SteppedPostgres, connect_postgres
from .stepped_sqlite import SteppedSqlite, connect_sqlite
from .worker_script import ScriptedHeartbeat, ScriptedWorker

_WORKERS = 4
#: A lease must outlive what a schedule takes by the real clock.
_LEAST_LEASE = timedelta(minutes=5)
_BACKOFF = timedelta(seconds=20)
_ROUNDS, _VACUUM_EVERY = 14, 100
_LONGEST = timedelta(days=400)


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
        """For scripts."""
        found = {**vars(self), "seconds": round(self.seconds, 2)}
        del found["last"]
        return {**found, "broken": vars(self.broken) if self.broken else None}


@dataclass
class Interleaver:
    """One lane on one database that nobody else uses: its rows are deleted and made again for every schedule."""

    lane: Lane
    url: str
    made: SampleRows = field(default_factory=SampleRows)
    schema: str | None = None
    faults: bool = True

    async def __aenter__(self) -> Interleaver:
        self.clock = Clock()
        self.lane = faked(self.lane, nothing, lease=max(self.lane.lease, _LEAST_LEASE), backoff=fixed(_BACKOFF))
        self._opened = Database.open(self.url, schema=self.schema)
        self._store = await open_lane(self.lane, "prove", self._opened, self.clock, "watch")
        notes = self._store.notes
        self.dims: tuple[BoundGates, ...] = tuple(notes.dims.values()) if notes is not None else ()
        self.watch = CommitChecks(self._store, self.dims, self.clock)
        self.postgres = self._opened.dialect.name == "postgresql"
        self._look = self.watch.text()
        opened: Any = self._opened
        self._monitor: Any = None
        self._doorman: StatementLocks | None = None
        #: The dead processes of all workers; None on SQLite, where nobody can write beside a worker's transaction.
        self._dead: list[tuple[str, str]] | None = None
        if self.postgres:
            self._monitor, self._doors = await connect_postgres(opened.dsn), await connect_postgres(opened.dsn)
            await self._monitor.execute(INSTALL)
            self._doorman = StatementLocks(self._doors)
            if (await ensure(opened, (WORKERS,))).has(WORKERS):
                self._dead = []
        else:
            self._monitor = connect_sqlite(opened.path)
        self._rows = await self.made.rows(self._store, self.dims, self._run)
        self.workers = [await self._worker(f"w{n}") for n in range(1, _WORKERS + 1)]
        self._beats = [
            ScriptedHeartbeat(*await self._speaker(f"{w.actor.name}'s heartbeat"), w) for w in self.workers[:2]
        ]
        self.tried = InterleaveResult()
        return self

    @property
    def binding(self) -> Binding:
        """The lane as it is bound to the table."""
        return self._store.binding

    async def __aexit__(self, *_: object) -> None:
        for store in [*(worker.store for worker in self.workers), *(beat.store for beat in self._beats)]:
            await store.database.close()
        if self.postgres:
            self._monitor.terminate()
            self._doors.terminate()
        else:
            self._monitor.close()
        await self._opened.close()

    async def _worker(self, name: str) -> ScriptedWorker:
        actor, store = await self._speaker(name)
        return ScriptedWorker(actor, store, self.watch, self.dims, self._dead, self._run)

    async def _speaker(self, name: str) -> tuple[Actor, LaneStore]:
        actor = Actor(name)
        kind = SteppedPostgres if self.postgres else SteppedSqlite
        database = kind(self.url, actor, self.schema)
        if isinstance(database, SteppedPostgres):
            database.doorman = self._doorman
        await database.connect()
        database.seen = self._seen
        gates = self._store.statements.gates is not None
        store = store_for(self._store.binding, database, self.clock, name, "", gates)
        store.opened_at = self._store.opened_at
        if self.dims:
            set_gates(store, self.dims)
        return actor, store

    # -- beside the schedule

    async def _run(self, sql: str) -> Sequence[Any]:
        if self.postgres:
            rows: Sequence[Any] = await self._monitor.fetch(sql)
        else:
            rows = self._monitor.execute(sql).fetchall()
        return rows

    async def _seen(self, actor: Actor) -> None:
        self.watch.commit(actor, await self._run(self._look))

    async def _blocked(self, pids: Sequence[int]) -> set[int]:
        assert self._doorman is not None
        found = await self._doorman.ask(
            # Who waits for the doorman is about to stand, and waits for nobody else.
            "select p from unnest($1::int[]) p"
            " where cardinality(array_remove(pg_blocking_pids(p), pg_backend_pid())) > 0",
            pids,
        )
        return {row[0] for row in found}

    async def _reset(self, count: int) -> None:
        say = self._store.statements
        if self._dead is not None:
            self._dead.clear()
        fleet = [f"delete from {say.workers}"] if self._dead is not None else []
        texts = [
            f"delete from {say.table}",
            *fleet,
            *([f"delete from {say.gates}"] if say.gates else []),
            *self._rows[:count],
        ]
        if self.postgres:
            if self.tried.schedules % _VACUUM_EVERY == _VACUUM_EVERY - 1:
                await self._monitor.execute(f"vacuum {say.table}")
            await self._monitor.execute("; ".join(texts))
        else:
            self._monitor.executescript(f"begin immediate; {'; '.join(texts)}; commit")
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
            seed, self.clock, (lease * 0.45, lease * 1.1, lease * 1.1), self._blocked if self.postgres else None,
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
            schedule.steps.append("all are gone; one worker is left, and ends what is open")
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
            while True:
                await worker.claim(20)
                if not worker.held:
                    break
                await worker.settle(worker.done())
        left = self._left()
        if left:
            raise Broken(f"row {left[0]} comes to no end: it stays {self.watch.rows[left[0]].state}")

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
