"""The test kit: step one claim, drain a lane in-process, move the database's time. On a real database, made for tests.

async with Kit(mill, copy=True) as kit:
    await kit.execute("insert into links (url) values ('https://example.org')")
    stepped = await kit.step("enrich")
    assert stepped.outcome == "retry"
    kit.advance(timedelta(minutes=5))
    await kit.drain()
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import sqlalchemy as sa

from .declare.task import Task
from .engine.chunks import ChunkRun
from .engine.counters import Counters
from .engine.cron_scheduler import Scheduler
from .engine.execute import Execution, TaskExecution, decide, unhooked
from .engine.isolate import HandlerProcess
from .engine.job import Job
from .engine.lane_state import LaneState
from .engine.resources import Resources
from .errors import RowmillError, UnreadableReply
from .migrate.schema_copy import copied
from .mill import Mill
from .store import Database, LaneStore, bind, open_lane, store_for
from .store.caller_transactions import caller, drive
from .store.driver_errors import translated
from .store.jobs import flows
from .store.jobs.enqueue import EnqueueStatements
from .store.jobs.job_rows import Enqueued as Enqueued
from .store.jobs.job_rows import enqueued as select_enqueued
from .store.lane.claim import Claim, Report, Settlement, Swept
from .store.lane.reflect import table_name
from .store.lane.waits import WaitingRows
from .store.own import schema
from .store.own.workers import WorkersTable
from .store.urls import redact, sqlite_path


@dataclass(frozen=True)
class Stepped:
    """One run, stepped through: the row's id, how it ended, and what was written.

    ``outcome`` is done, retry, snooze, wait, dead, canceled or release; ``lost`` where the claim no longer held,
    ``stuck`` where the database refused even the bare outcome.
    """

    id: Any
    outcome: str
    error: str | None
    columns: dict[str, Any]
    attempt: int


class Kit:
    """Steps a Mill's lanes without worker processes, on a real database, with time you can move.

    A test must not work off production's rows, so the Mill's own databases are refused unless they are recognisable as
    a test's (``is_test_database``).
    """

    def __init__(
        self,
        mill: Mill,
        *,
        worker_id: str = "test-worker",
        environments: str | Mapping[str, str] | None = None,
        copy: bool = False,
        real: bool = False,
    ) -> None:
        """``copy``: work on an empty copy of the Mill's tables, removed afterwards. ``environments``: work on these
        databases, whatever they are called. ``real``: work on the rows of the Mill's own databases.
        """
        if copy + real + (environments is not None) > 1:
            raise RowmillError("a Kit takes one of copy=True, real=True and environments=", hint="leave out the others")
        self.mill, self.worker_id = mill, worker_id
        self._moved, self._shift = environments, mill.clock.shift
        self._copy, self._real = copy, real
        self._copies = AsyncExitStack()
        self._incarnation = os.urandom(4).hex()
        self._databases: dict[str, Database] = {}
        self._stores: dict[tuple[str, str], LaneStore] = {}
        self._resources = Resources(mill.resources)
        self._threads = ThreadPoolExecutor(4, "rowmill-kit")
        #: What it has claimed, by key and time.
        self._claimed: set[tuple[Any, Any]] = set()

    async def __aenter__(self) -> Kit:
        if self._copy:
            self._moved = await self._copied()
        if self._moved is not None:
            self._moved = await self._move(self._moved)
            if self.mill.tasks:
                await self.mill.prepare()
        self._databases = dict(self.mill.databases())
        return self

    async def _copied(self) -> dict[str, str]:
        """Where the copies are, by environment. Tables and indexes are copied; rows, foreign keys and triggers not."""
        urls = {}
        async with AsyncExitStack() as stack:
            for name, database in self.mill.databases():
                stack.push_async_callback(database.close)
                database.needs_sessions("a copy of the tables needs sessions of its own")
                tables, texts = [], []
                for lane in self.mill.select(None):
                    if lane.serves(name) and not lane.own:
                        store = store_for(await bind(lane, name, database), database, self.mill.clock, "", "")
                        tables.append(table_name(lane.table, database.dialect.name))
                        texts += [repr(lane.gates), store.statements.ready()]
                try:
                    urls[name] = await stack.enter_async_context(copied(database, tables, texts, None))
                except RowmillError as error:
                    error.hint = "Kit(mill, environments=url) with the URL of a test database"
                    raise
            self._copies = stack.pop_all()
        return urls

    async def _move(self, environments: Any) -> Any:
        """Put the Mill elsewhere; where it was."""
        await self.mill.close()
        was, self.mill._given = self.mill._given, environments
        return was if was is not None else ""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resources.close()
        for database in self._databases.values():
            await database.close()
        self._threads.shutdown(wait=False)
        if self._moved is not None:
            await self._move(self._moved or None)
            self.mill.clock.shift = self._shift
        await self._copies.aclose()

    async def _allowed(self, *environments: str) -> None:
        """Refuse the Mill's own databases, all or these, unless they are a test's. Before anything is written there."""
        for name in environments or self._databases:
            database = self._databases[name]
            if self._moved is not None or self._real or is_test_database(database.url):
                continue
            database.must_exist()
            await database.reach()
            raise RowmillError(
                f"a Kit would use the rows of {redact(database.url)}, which does not look like a test database",
                hint="Kit(mill, copy=True) works on an empty copy of its tables, Kit(mill, environments=url) on another"
                " database, Kit(mill, real=True) on the rows of this one",
            )

    async def execute(self, sql: str, environment: str | None = None, **values: Any) -> Sequence[sa.Row[Any]]:
        """Run a statement of the test's own, with ``:names`` for values; its rows, if it returns any."""
        environment = environment or next(iter(self._databases))
        await self._allowed(environment)
        database = self._databases[environment]
        async with database.begin() as connection:
            with translated(database):
                result = await connection.execute(sa.text(sql), values)
                return result.fetchall() if result.returns_rows else []

    def advance(self, by: timedelta) -> None:
        """Move the time that every further statement of this Mill sees."""
        self.mill.clock.advance(by)

    async def store(self, lane: str | None = None, environment: str | None = None) -> LaneStore:
        """The verbs over one lane: claim, settle, renew, sweep."""
        name = lane or next(iter(self.mill.lanes))
        environment = environment or next(iter(self._databases))
        if (name, environment) not in self._stores:
            (chosen,) = self.mill.select([name])
            await self._allowed(environment)
            database = self._databases[environment]
            store = await open_lane(chosen, environment, database, self.mill.clock, self.worker_id, self._incarnation)
            if store.needs_workers_table:
                await WorkersTable(database).ensure()
            if store.waits is None and (await schema.ensure(database, (schema.WAITS,))).has(schema.WAITS):
                store.waits = await WaitingRows.open(store)
            self._stores[name, environment] = store
        return self._stores[name, environment]

    async def claim(self, lane: str | None = None, count: int = 1, environment: str | None = None) -> list[Claim]:
        """Claim rows and do nothing with them."""
        store = await self.store(lane, environment)
        store.forget_bound()  # what a busy worker may leave for a moment later, a test wants to see at once
        try:
            claims = await store.claim(count)
        except UnreadableReply:  # it was committed: the rows are there, and ours
            claims = [c for c in await store.mine() if (c.key, c.claimed_at) not in self._claimed]
        self._claimed.update((claim.key, claim.claimed_at) for claim in claims)
        return claims

    async def settle(self, claim: Claim, ended: Any = None) -> Report:
        """Settle a claim as if its handler had returned or raised ``ended``."""
        store = await self.store(claim.lane, claim.environment)
        settlement = ended if isinstance(ended, Settlement) else decide(store, claim, ended)
        return await self._settle(store, settlement)

    @staticmethod
    async def _settle(store: LaneStore, settlement: Settlement) -> Report:
        """Write one outcome, and let the lane's gates learn from it."""
        report = await store.settle([settlement])
        if store.gate_learning is not None:
            await store.gate_learning.note([*report.written, *report.refused])
        return report

    async def step(self, lane: str | None = None, environment: str | None = None) -> Stepped | None:
        """Claim one row, run its handler, settle. None when nothing is ready."""
        claims = await self.claim(lane, 1, environment)
        return await self.run(claims[0]) if claims else None

    async def step_chunk(
        self, lane: str | None = None, count: int | None = None, environment: str | None = None
    ) -> list[Stepped]:
        """Claim up to ``count`` rows of a lane with chunks (default: a whole chunk), call the handler for them, and
        settle each. In the order of the claim; empty when nothing is ready.
        """
        store = await self.store(lane, environment)
        if store.lane.chunk is None:
            raise RowmillError(
                f"lane {store.lane.name!r} has no chunks: its handler gets one job",
                hint="kit.step(), or declare chunk=",
            )
        claims = await self.claim(lane, count or store.lane.chunk, environment)
        return await self.run_chunk(claims) if claims else []

    async def run_chunk(self, claims: Sequence[Claim]) -> list[Stepped]:
        """Call the handler for claims of one lane as a chunk, in as many calls as it takes, and settle each."""
        store = await self.store(claims[0].lane, claims[0].environment)
        execution = self._execution(store)
        child = HandlerProcess(store.lane) if store.lane.isolation == "process" else None
        slot = store.lane.slot_name.format(lane=store.lane.name, n=1)
        run = ChunkRun(execution, execution.plan(claims[0]), claims, self.worker_id, slot)
        stepped: dict[int, Stepped] = {}
        try:
            while run.parts:
                run.begin()
                for job, settlement in run.end(await self._contained(run.call(child))):
                    stepped[id(job._claim)] = await self._ended(store, job, settlement)
        finally:
            if child is not None:
                await asyncio.to_thread(child.kill)
        return [stepped[id(claim)] for claim in claims]

    def _execution(self, store: LaneStore) -> Execution:
        kind = TaskExecution if store.lane.own else Execution
        return kind(
            LaneState(store, Counters(self.mill.events, self.worker_id)), self._resources, lambda: self._threads
        )

    @staticmethod
    async def _contained(run: Awaitable[Any]) -> Any:
        """A run, or the cancellation that was its handler's own doing."""
        try:
            return await run
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return cancelled

    async def run(self, claim: Claim) -> Stepped:
        """Run the handler for a claim and settle it."""
        store = await self.store(claim.lane, claim.environment)
        if store.lane.chunk is not None:
            return (await self.run_chunk([claim]))[0]
        execution = self._execution(store)
        plan = execution.plan(claim)
        job = execution.job(plan, claim, self.worker_id, store.lane.slot_name.format(lane=claim.lane, n=1))
        child = HandlerProcess(store.lane) if store.lane.isolation == "process" else None
        try:
            settlement = await self._contained(execution.run(plan, job, claim, child))
            if isinstance(settlement, asyncio.CancelledError):
                settlement = execution.settlement(claim, settlement)
        finally:
            if child is not None:
                await asyncio.to_thread(child.kill)
        return await self._ended(store, job, settlement)

    async def _ended(self, store: LaneStore, job: Job, settlement: Settlement | None) -> Stepped:
        """Write what a run's end means for its row."""
        if settlement is None:
            settlement = job.finished
            outcome = settlement.kind if settlement is not None else "lost"
            if settlement is not None and store.gate_learning is not None:
                await store.gate_learning.note([settlement])
        else:
            report = await self._settle(store, settlement)
            if report.unhooked:
                settlement = unhooked(store, *report.unhooked[0])
                report = await self._settle(store, settlement)
            settlement = (report.written + report.refused + report.lost + [settlement])[0]
            outcome = "lost" if report.lost else "stuck" if report.stuck else settlement.kind
        if store.lane.own:
            await flows.join(store.database, EnqueueStatements.to(store.database, self.mill.clock))
        error, columns = (settlement.error, dict(settlement.columns)) if settlement is not None else (None, {})
        return Stepped(job.id, outcome, error, columns, job.attempt)

    async def sweep(self, lane: str | None = None, environment: str | None = None) -> list[Swept]:
        """Take back rows whose lease has run out."""
        store = await self.store(lane, environment)
        return await store.sweep(store.lane.lease)

    async def expire(self, lane: str | None = None, environment: str | None = None) -> list[Any]:
        """End rows that were not started in time; their ids."""
        return [row.id for row in await (await self.store(lane, environment)).expire()]

    async def look(self, lane: str | None = None, environment: str | None = None) -> list[Any]:
        """Make waiting rows due whose condition is true, and end those whose time is over; their ids."""
        store = await self.store(lane, environment)
        if store.waits is None:
            return []
        ended = await store.waits.look()
        return [*ended.woken, *ended.timed_out]

    async def tick(self, environment: str | None = None) -> None:
        """Enqueue the crons and the schedules that are due."""
        environment = environment or next(iter(self._databases))
        await self._allowed(environment)
        database = self._databases[environment]
        sources = [source for source in self.mill.schedule_tables if source.serves(environment)]
        tasks = list(self.mill.tasks.values())
        scheduler = Scheduler(database, self.mill.clock, self.mill.events, tasks, sources, environment)
        await scheduler.tick()

    async def enqueued(self, task: Task[..., Any] | None = None, environment: str | None = None) -> list[Enqueued]:
        """The jobs that are in the table, or those of one task, whatever their state, the oldest first."""
        return await _read(self._databases[environment or next(iter(self._databases))], self.mill, task)

    async def drain(self, *lanes: str) -> Counters:
        """Work in this process until nothing is ready or running."""
        await self._allowed()
        # What all environments share is held by a test's database, too.
        first = next(iter(self._databases.values()))
        worker = self.mill.worker(
            lanes=lanes or None, worker_id=f"{self.worker_id}-{self._incarnation}", drain=True,
            control=lambda shared: Database.open(first.url, schema=first.schema, pool=1),
        )  # fmt: skip
        return await worker.run()


#: Parts of a name that say that a database is a test's: app_test, test-12, MyTests, scratch; not latest, contest.
_TEST = re.compile(r"(?:^|[\W_]|\d)(?:tests?|testing|testdb|scratch)(?:$|[\W_]|\d)")


def is_test_database(url: str) -> bool:
    """Whether a database is recognisable as a test's.

    By its name: ``test``, ``tests``, ``testing``, ``testdb`` or ``scratch`` is a part of it (on SQLite also of its
    folder's). By its place: a file, or the socket of a PostgreSQL server, inside the system's temporary folder.
    """
    if url.startswith("sqlite"):
        path = os.path.abspath(sqlite_path(url))
        names, location = [os.path.basename(path), os.path.basename(os.path.dirname(path))], path
    else:
        parts = urlsplit(url)
        hosts = [*parse_qs(parts.query).get("host", []), unquote(parts.hostname or "")]
        names, location = [unquote(parts.path)], next((host for host in hosts if host.startswith("/")), "")
    words = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in names]
    return any(map(_TEST.search, words)) or (location != "" and _is_temporary(location))


def _is_temporary(path: str) -> bool:
    folders = [os.path.realpath(folder) for folder in (tempfile.gettempdir(), "/tmp", "/dev/shm")]
    return any(os.path.realpath(path).startswith(folder + os.sep) for folder in folders)


def enqueued(
    mill: Mill, task: Task[..., Any] | None = None, *, tx: Any = None, env: str | None = None
) -> list[Enqueued]:
    """The jobs that are in the table, or those of one task, for tests that do not await. ``tx``: as the transaction of
    a test sees them, such as Django's ``connection`` in a TestCase.
    """
    if tx is not None:
        theirs = caller(tx)
        if theirs.awaited:
            raise RowmillError(f"tx={tx!r} must be awaited", hint="await kit.enqueued(...)")
        return drive(select_enqueued(theirs.sql, mill.schema, task.name if task else None), theirs.run)

    async def read() -> list[Enqueued]:
        ((_, database),) = mill.databases([env or next(iter(mill.environments))])
        try:
            return await _read(database, mill, task)
        finally:
            await database.close()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(read())
    raise RowmillError("a blocking call inside a running event loop", hint="await kit.enqueued(...)")


async def _read(database: Database, mill: Mill, task: Task[..., Any] | None) -> list[Enqueued]:
    verb = select_enqueued(database.sql, mill.schema, task.name if task else None)
    return await database.read(lambda run: drive(verb, database.sql.named(run)))
