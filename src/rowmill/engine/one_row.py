"""One row in the foreground: its handler runs in this process, as a dry run or for real.

A dry run claims nothing and writes nothing of rowmill's own: the claim, the settlement and ``job.finish()`` happen in
transactions that are rolled back. What a handler does by itself, such as an HTTP call, a file, or a transaction of its
own, really happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from ..declare.arguments import Unfit, encode
from ..declare.call import Call
from ..declare.dry_run import dry_calls
from ..errors import DatabaseError, DeclarationError, LostClaim, RowmillError, did_you_mean
from ..events import Events
from ..store import Database, LaneStore, store_for
from ..store.lane import one_row
from ..store.lane.claim import Claim, Settlement
from ..store.lane.row_keys import Key
from .chunks import run_alone
from .counters import Counters
from .execute import Execution, RunPlan, TaskExecution, unhooked
from .job import Finish, FinishTx, Job, SyncJob
from .job_steps import JobSteps
from .lane_state import LaneState
from .resources import Resource, Resources
from .shared_rate import ControlDatabases


@dataclass(frozen=True, slots=True)
class RowRun:
    """One run of one row: how it ended, and the row before and after, as the database has it."""

    key: Key
    #: done, retry, snooze, wait, dead, canceled or release; ``lost`` where the claim no longer held, ``stuck`` where
    #: the database refused even the bare outcome, ``joining`` where the job would wait for its children.
    outcome: str
    error: str | None
    #: What the handler returned, as it would be written.
    columns: dict[str, Any]
    delay: timedelta | None
    #: The row by column. ``after``: None where it would be deleted.
    before: dict[str, Any]
    after: dict[str, Any] | None
    duration: float
    cause: BaseException | None = None
    #: Calls that a dry run did not enqueue.
    calls: Sequence[Call] = field(default_factory=list)


class DrySteps(JobSteps):
    """Steps and children of a dry run: finished steps are read, new ones are not kept, children are not added."""

    async def _keep(self, name: str, value: Any, hint: Any) -> None:
        try:
            encode(value, hint)
        except Unfit as unfit:
            raise RowmillError(
                f"step {name!r} returned a {type(value).__name__}, which cannot be stored: it needs {unfit}"
            ) from None

    async def _held_apart(self, wanted: Sequence[Call], branch: str) -> None:
        if (listed := dry_calls.get()) is not None:
            listed += wanted
        self._job.finished = Settlement(self._claim, "joining")


class DryJob(Job):
    """A job whose calls write nothing."""

    #: The row as the finish block would leave it.
    after: Sequence[Any] | None = None

    async def progress(self, fraction: float, note: str | None = None) -> None:
        self.latest = (float(fraction), note)

    async def spend(self, budget: str, *, wait: Any = None, instead: bool = False, **amounts: float) -> None:
        known = self._store.lane.budgets
        if budget not in known:
            raise DeclarationError(f"there is no budget {budget!r}", hint=did_you_mean(budget, known))
        known[budget].asked(amounts, used=instead)

    @property
    def _flow(self) -> JobSteps:
        if self._flowing is None:
            self._flowing = DrySteps(self._store, self._claim, self)
        return self._flowing

    def finish(self) -> Finish:
        return DryFinish(self._lane_state, self._claim, self)


class DrySyncJob(SyncJob, DryJob):  # type: ignore[misc]  # SyncJob waits for what DryJob awaits
    """The same for a handler that runs in a thread."""


class DryFinish(Finish):
    """A finish block that is always rolled back; the row's claim is made inside of it."""

    async def __aenter__(self) -> FinishTx:
        tx = await super().__aenter__()
        try:
            if not await one_row.claim_inside(self._store, tx.connection, self._claim):
                raise LostClaim(f"lane {self._claim.lane!r}: row {self._claim.id!r} was deleted meanwhile")
        except BaseException as error:
            await self._context.__aexit__(type(error), error, error.__traceback__)
            raise
        return tx

    async def _end(self) -> None:
        job, connection = self._job, self._tx.connection
        assert isinstance(job, DryJob)
        try:
            settlement = Settlement(self._claim, "done", columns=self._store.checked(self._tx.columns))
            await self._store.settle_in(connection, [settlement])
            job.after = await one_row.read_inside(self._store, connection, self._claim.key)
        finally:
            undo = RowmillError("rolled back")
            await self._context.__aexit__(RowmillError, undo, None)
        job.finished = settlement


class Renewal(threading.Thread):
    """Renews the claims of one lane, also while the handler is in a debugger: a thread with its own connection."""

    def __init__(self, lane_state: LaneState) -> None:
        super().__init__(name="rowmill-renewal", daemon=True)
        self._lane_state, self._over = lane_state, threading.Event()

    def stop(self) -> None:
        """End after the statement that is under way."""
        self._over.set()
        self.join(timeout=10)

    def run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        mine, theirs = self._lane_state, self._lane_state.store
        database = Database.open(theirs.database.url, schema=theirs.database.schema, pool=1)
        store = store_for(theirs.binding, database, theirs.clock, "", "")
        store.worker = theirs.worker
        every = theirs.lane.heartbeat.total_seconds() if theirs.lane.heartbeat else 1.0
        try:
            while not await asyncio.to_thread(self._over.wait, every):
                claims = mine.begin_renewal()
                try:
                    await mine.find_fences(store, claims)
                    renewed = await store.renew(claims)
                    for claim in claims:
                        if claim in renewed:
                            claim.renewed = time.monotonic()
                except DatabaseError:
                    mine.renewal_unanswered(claims)  # the lease outlives several beats
                finally:
                    mine.end_renewal()
        finally:
            await database.close()


class RowRunner:
    """Runs single rows of one lane, in this process, one after the other."""

    def __init__(
        self,
        store: LaneStore,
        resources: dict[str, Resource],
        events: Events,
        timeout: timedelta | None = None,
        control: Callable[[str], Database] = Database.open,
    ) -> None:
        """``timeout``: what the handler may take; None: as long as it needs, for a debugger."""
        self.store, self._timeout = store, timeout
        self._lane_state = LaneState(store, Counters(events, store.worker))
        self._controls = self._lane_state.controls = ControlDatabases(control)
        self._resources = Resources(resources)
        self._threads = ThreadPoolExecutor(4, "rowmill-try")
        kind = TaskExecution if store.lane.own else Execution
        self._execution = kind(self._lane_state, self._resources, lambda: self._threads)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resources.close()
        await self._controls.close()
        self._threads.shutdown(wait=False)

    def _plan(self, claim: Claim) -> RunPlan:
        """In this process also where workers use another one: a debugger is here."""
        plan = self._execution.plan(claim)
        seconds = self._timeout.total_seconds() if self._timeout is not None else None
        return replace(plan, timeout=seconds, in_thread=not plan.is_async)

    async def dry(self, key: Key) -> RowRun | None:
        """Run the handler on a row that stays as it is, whatever its state; None where there is no such row."""
        before, claim = await one_row.read_row(self.store, key), await one_row.as_claimed(self.store, key)
        if before is None or claim is None:
            return None
        plan = self._plan(claim)
        given = (self._lane_state, claim, self.store.worker, self.store.lane.slot_name.format(lane=claim.lane, n=1))
        job = DrySyncJob(*given, asyncio.get_running_loop()) if plan.in_thread else DryJob(*given)
        listed: list[Call] = []
        token, began = dry_calls.set(listed), time.monotonic()
        try:
            settlement = await self._run(plan, job, claim)
        finally:
            dry_calls.reset(token)
        took, after = time.monotonic() - began, job.after
        if settlement is not None:
            settlement, after = await one_row.as_settled(self.store, settlement)
        else:
            settlement = job.finished
            if settlement is not None and settlement.kind == "joining":
                after = before
        return self._told(key, settlement, before, after, took, listed)

    async def commit(self, key: Key, when: str) -> RowRun | None:
        """Claim the row where ``when`` holds, run its handler and write the outcome; None where it does not hold."""
        before = await one_row.read_row(self.store, key)
        claim = await one_row.claim_row(self.store, key, when)
        if before is None or claim is None:
            return None
        self._lane_state.claimed([claim])
        plan = self._plan(claim)
        job = self._execution.job(
            plan, claim, self.store.worker, self.store.lane.slot_name.format(lane=claim.lane, n=1)
        )
        renewal = Renewal(self._lane_state) if self.store.binding.renew != "none" else None
        if renewal is not None:
            renewal.start()
        began = time.monotonic()
        try:
            settlement = await self._run(plan, job, claim)
        except BaseException:  # such as Ctrl-C: the row goes back at once
            settlement = Settlement(claim, "release")
            await self._settle(settlement, renewal)
            raise
        took = time.monotonic() - began
        if settlement is None:
            if renewal is not None:
                await asyncio.to_thread(renewal.stop)
            settlement, outcome = job.finished, None
        else:
            settlement, outcome = await self._settle(settlement, renewal)
        return self._told(key, settlement, before, await one_row.read_row(self.store, key), took, [], outcome)

    async def _settle(self, settlement: Settlement, renewal: Renewal | None) -> tuple[Settlement, str]:
        if renewal is not None:
            await asyncio.to_thread(renewal.stop)
        report = await self.store.settle([settlement])
        if report.unhooked:
            settlement = unhooked(self.store, *report.unhooked[0])
            report = await self.store.settle([settlement])
        self._lane_state.drop([settlement.claim])
        if self.store.gate_learning is not None:
            await self.store.gate_learning.note([*report.written, *report.refused])
        settlement = (report.written + report.refused + report.lost + [settlement])[0]
        return settlement, "lost" if report.lost else "stuck" if report.stuck else settlement.kind

    async def _run(self, plan: RunPlan, job: Job, claim: Claim) -> Settlement | None:
        try:
            if self.store.lane.chunk is not None:
                return await run_alone(self._execution, plan, job)
            return await self._execution.run(plan, job, claim, None)
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return self._execution.settlement(claim, cancelled)  # the handler's own doing

    def _told(
        self, key: Key, settlement: Settlement | None, before: Sequence[Any], after: Sequence[Any] | None, took: float,
        calls: Sequence[Call], outcome: str | None = None,
    ) -> RowRun:  # fmt: skip
        if settlement is None:
            return RowRun(key, "lost", None, {}, None, self._values(before), self._values(before), took)
        return RowRun(
            key, outcome or settlement.kind, settlement.error, dict(settlement.columns), settlement.delay,
            self._values(before), self._values(after) if after is not None else None, took, settlement.cause, calls,
        )  # fmt: skip

    def _values(self, row: Sequence[Any]) -> dict[str, Any]:
        """A row as Python has it; what Python cannot read as the database's text."""
        values: dict[str, Any] = {}
        for column, raw in zip(self.store.binding.columns, row, strict=False):
            values[column] = raw
            with contextlib.suppress(Exception):
                values[column] = self.store.value(row, column)
        return values
