"""A Job: a claimed row as the handler sees it, and the block that ends a run together with its own writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from ..declare.budget import Spent
from ..declare.call import Call
from ..declare.outcome import Snooze
from ..errors import (
    Busy,
    DatabaseError,
    DeclarationError,
    InputsChanged,
    LostClaim,
    RowmillError,
    Unreachable,
    UnreadableValue,
    WrongResult,
    did_you_mean,
)
from ..store import LaneStore, Tx, shielded
from ..store.gates.budgets import take as take_budget
from ..store.lane.claim import Claim, Settlement
from ..store.lane.result_values import note_text
from ..store.lane.row_keys import written
from .job_steps import JobSteps, Joined
from .lane_state import LaneState
from .records.run_log import JobLog

T = TypeVar("T")
_PROGRESS_EVERY = 1.0
_PATIENT = timedelta(minutes=1)
_LOCKED_TRIES, _LOCKED_WAIT = 25, 0.1


class Job(Mapping[str, Any]):
    """A claimed row: its columns as ``job["column"]``, and calls for the handler, such as ``job.progress``."""

    # Defaults that most runs never change are on the class, so that a job is created fast.
    latest: tuple[float, str | None] | None = None
    finished: Settlement | None = None
    #: Its finish block was rolled back because an input of its row has changed.
    inputs_changed = False
    #: The line at which the heartbeat thread saw it block the event loop past its timeout.
    blocked_at: str | None = None
    _workdir: Path | None = None
    _told = 0.0
    _flowing: JobSteps | None = None
    _spending: Spent | None = None

    def __init__(self, lane_state: LaneState, claim: Claim, worker: str, slot: str) -> None:
        self._lane_state, self._store, self._claim = lane_state, lane_state.store, claim
        #: The worker's id and the slot's name, as they show on the dashboard.
        self.worker, self.slot = worker, slot

    # -- the row

    @overload
    def __getitem__(self, column: str) -> Any: ...
    @overload
    def __getitem__(self, column: InstrumentedAttribute[T]) -> T: ...
    def __getitem__(self, column: Any) -> Any:
        try:
            claim = self._claim
            return claim.holder.readers[column](claim.row)
        except (KeyError, IndexError):
            if isinstance(column, InstrumentedAttribute):  # of a model: Link.url
                return self[column.property.columns[0].name]
            raise KeyError(f"{column!r}: {did_you_mean(column, self._store.binding.taken)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.binding.taken)

    def __len__(self) -> int:
        return len(self._store.binding.taken)

    def __repr__(self) -> str:
        return f"<Job {self.lane} {self.id!r} attempt {self.attempt} in {self.environment}>"

    @property
    def id(self) -> Any:
        """The row's key: a value, or a tuple for a composite key."""
        claim = self._claim
        try:
            values = tuple(claim.holder.readers[column](claim.row) for column in self._store.binding.key)
        except UnreadableValue:
            return claim.id
        return values[0] if len(values) == 1 else values

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._claim.attempt

    @property
    def lane(self) -> str:
        """The lane's name: the kind of job."""
        return self._claim.lane

    @property
    def environment(self) -> str:
        """Where the row came from, and where all that this job writes goes."""
        return self._claim.environment

    @property
    def lost(self) -> bool:
        """True when the run has lost its lease: stop then, because nothing that it returns will be written."""
        claim, binding = self._claim, self._store.binding
        if claim.lost or binding.renew == "none":
            return claim.lost
        return time.monotonic() - claim.renewed > binding.lane.lease.total_seconds()

    # -- what a handler may use

    @property
    def workdir(self) -> Path:
        """A private temporary directory, made on first use, removed after the run."""
        if self._workdir is None:
            self._workdir = Path(tempfile.mkdtemp(prefix=workdir_prefix(self.lane)))
        return self._workdir

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that says which job speaks. What it is told from INFO on is kept, and shown with the row."""
        fields = {"lane": self.lane, "id": self.id, "environment": self.environment, "attempt": self.attempt}
        if self._lane_state.run_logs is None:
            return logging.LoggerAdapter(logging.getLogger("rowmill.job"), {"fields": fields})
        return JobLog(fields, self.keep_line)

    def keep_line(self, level: str, text: str, clean: bool = False) -> None:
        """Keep a line of the run's log, to be shown with the row; ``job.log`` does so by itself."""
        row = written(self._claim.id) if self._store.lane.chunk is not None else None
        self._lane_state.lines(self._claim).add(level, text, clean, row)

    async def progress(self, fraction: float, note: str | None = None) -> None:
        """Report the progress of the run. ``rowmill workers`` shows it; a progress column stores it."""
        note = note_text(note, self._store.database.encoding)
        self.latest = (float(fraction), note)
        column = self._store.binding.roles.get("progress")
        if column is None or (time.monotonic() - self._told < _PROGRESS_EVERY and fraction < 1):
            return
        self._told = time.monotonic()
        value = _progress_value(self._store.binding.kinds[column], fraction, note)
        with contextlib.suppress(DatabaseError):  # a note on the way is no reason to fail a run
            await self._store.progress(self._claim, value)

    async def spend(self, budget: str, *, wait: timedelta = _PATIENT, instead: bool = False, **amounts: float) -> None:
        """Take from a budget of the Mill: ``await job.spend("gemini", tokens=1200)``; all of it or nothing.

        Waits while it can be had within ``wait``; otherwise the run ends as ``Snooze``, no attempt spent, until it can.
        A negative amount gives back what this run has taken too much, as if it had never been taken. With ``instead``
        the amount is what was used up in the end, in place of all that this run has taken: it counts from now on.
        """
        known = self._store.lane.budgets
        if budget not in known:
            raise DeclarationError(f"there is no budget {budget!r}", hint=did_you_mean(budget, known))
        self._spending = self._spending or Spent()
        asked = known[budget].asked(amounts, used=instead)
        back = [(limit, -math.inf) for limit, _ in asked] if instead else asked
        returned, more = self._spending.returned(budget, back), [(limit, n) for limit, n in asked if n > 0]
        if not returned and not more:
            return
        shared, controls = known[budget].shared, self._lane_state.controls
        database = self._store.database if shared is None or controls is None else controls.get(shared)
        clock, deadline = self._store.clock, time.monotonic() + wait.total_seconds()
        while (taken := await take_budget(database, clock, budget, more, returned, used=instead)).wait > 0:
            if time.monotonic() + taken.wait > deadline:
                raise Snooze(timedelta(seconds=taken.wait), f"the budget {budget!r} is used up")
            await asyncio.sleep(taken.wait + random.uniform(0, 0.02))
        self._spending.note(budget, more, taken.at)

    async def timed_out(self) -> bool:
        """This run began because a ``Wait(..., then="run")`` of the row was over before its condition was true."""
        facts = await self._store.waits.facts(self._claim.key) if self._store.waits is not None else None
        return facts is not None and facts.left <= 0

    # -- flows: for tasks

    @property
    def _flow(self) -> JobSteps:
        if self._flowing is None:
            self._flowing = JobSteps(self._store, self._claim, self)
        return self._flowing

    async def step(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args)`` once for this job. Its result is stored, and a later run gets it without a call."""
        return await self._flow.step(name, function, args, kwargs)

    async def spawn(self, *calls: Call, name: str | None = None) -> Joined:
        """Add child jobs and wait for them. The run ends here. When all children have ended, the handler runs again
        from its beginning, and this returns their counts. Give a ``name`` if a handler spawns in more than one place.
        """
        return await self._flow.spawn(calls, name)

    async def joined(self, name: str | None = None) -> Joined:
        """How the jobs that this one waited for ended."""
        return await self._flow.joined(name)

    async def results(self, name: str | None = None) -> list[Any]:
        """The results of the jobs that this one waited for, in order; None for a job that failed."""
        return await self._flow.results(name)

    def finish(self) -> Finish:
        """``async with job.finish() as tx``: the handler's own writes and the outcome Done commit together."""
        return Finish(self._lane_state, self._claim, self)

    def close(self) -> None:
        """Remove the temporary files of the run."""
        if self._workdir is not None:
            shutil.rmtree(self._workdir, ignore_errors=True)
            self._workdir = None


class ChunkJobs(list[Job]):
    """The jobs of one call, as the handler of a chunk gets them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs)
        self._first = jobs[0]

    @property
    def blocked_at(self) -> str | None:
        """The line at which the call was seen to block the event loop past its timeout."""
        return self._first.blocked_at


class SyncJob(Job):
    """A Job for a handler that runs in a thread: the same calls, without ``await``."""

    def __init__(
        self, lane_state: LaneState, claim: Claim, worker: str, slot: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(lane_state, claim, worker, slot)
        self._loop = loop

    def progress(self, fraction: float, note: str | None = None) -> None:  # type: ignore[override]
        """Report the progress of the run."""
        _wait(self._loop, super().progress(fraction, note))

    def spend(  # type: ignore[override]
        self, budget: str, *, wait: timedelta = _PATIENT, instead: bool = False, **amounts: float
    ) -> None:
        """Take from a budget of the Mill; all of it or nothing."""
        _wait(self._loop, super().spend(budget, wait=wait, instead=instead, **amounts))

    def timed_out(self) -> bool:  # type: ignore[override]
        """A ``Wait`` of the row was over before its condition was true."""
        return bool(_wait(self._loop, super().timed_out()))

    def step(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args)`` once for this job, here in this thread."""
        return self._flow.step_in_thread(self._loop, name, function, args, kwargs)

    def spawn(self, *calls: Call, name: str | None = None) -> Joined:  # type: ignore[override]
        """Add child jobs and wait for them: see ``Job.spawn``."""
        joined: Joined = _wait(self._loop, super().spawn(*calls, name=name))
        return joined

    def joined(self, name: str | None = None) -> Joined:  # type: ignore[override]
        """How the jobs that this one waited for ended."""
        joined: Joined = _wait(self._loop, super().joined(name))
        return joined

    def results(self, name: str | None = None) -> list[Any]:  # type: ignore[override]
        """The results of the jobs that this one waited for."""
        results: list[Any] = _wait(self._loop, super().results(name))
        return results

    def finish(self) -> SyncFinish:  # type: ignore[override]
        """``with job.finish() as tx``: the handler's own writes and the outcome Done commit together."""
        return SyncFinish(super().finish(), self._loop)


def workdir_prefix(lane: str) -> str:
    """How a run's directory is called: by as much of its lane's name as any file system takes."""
    return f"rowmill-{re.sub('[^A-Za-z0-9_.-]', '_', lane)[:50]}-"


def _progress_value(kind: Any, fraction: float, note: str | None) -> Any:
    if isinstance(kind, sa.JSON):
        return {"fraction": fraction, "note": note}
    if isinstance(kind, sa.Integer):
        return round(fraction * 100)
    if isinstance(kind, (sa.Numeric, sa.Float)):
        return fraction
    return f"{fraction:.0%} {note or ''}".strip()[: getattr(kind, "length", None)]


class FinishTx(Tx):
    """The transaction of a ``finish`` block: a SQLAlchemy async connection, and ``set`` for the row's own columns."""

    def __init__(self, connection: AsyncConnection) -> None:
        super().__init__(connection)
        self.columns: dict[str, Any] = {}

    def set(self, **columns: Any) -> None:
        """Columns of the row, written with the outcome."""
        self.columns.update(columns)


class Finish:
    """The end of a run. Leaving the block settles the claim, fenced; if that fails, nothing of it was written."""

    def __init__(self, lane_state: LaneState, claim: Claim, job: Job) -> None:
        self._lane_state, self._store, self._claim, self._job = lane_state, lane_state.store, claim, job

    def __enter__(self) -> None:
        raise RowmillError("an async handler must await its finish block", hint="async with job.finish() as tx:")

    def __exit__(self, *exc: object) -> None: ...

    async def __aenter__(self) -> FinishTx:
        if self._job.finished is not None:
            raise RowmillError("this run already ended in a finish block", hint="use one job.finish() per run")
        try:
            if self._store.database.sql.one_writer:
                # One writer at a time: a renewal that is under way needs the lock that this block is about to take.
                await self._lane_state.begin_settle([self._claim])
            self._context = self._store.database.begin()
            self._tx = FinishTx(await self._context.__aenter__())
        except BaseException:
            self._lane_state.end_settle([self._claim])  # the run goes on, and so do its renewals
            raise
        return self._tx

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                await self._context.__aexit__(kind, error, trace)
                return
            self._lane_state.ending.add(id(self._claim))
            await shielded(self._end())
        finally:
            self._lane_state.ending.discard(id(self._claim))
            self._lane_state.end_settle([self._claim])

    async def _end(self) -> None:
        try:
            # Where renewal moves the fence, it must not move it between the settling and the commit.
            await self._lane_state.begin_settle([self._claim])
            settlement = await self._settle()
        except BaseException as failure:
            await self._context.__aexit__(type(failure), failure, failure.__traceback__)
            raise
        await self._commit(settlement)

    async def _settle(self) -> Settlement:
        settlement = Settlement(self._claim, "done", columns=self._store.checked(self._tx.columns))
        compare = True
        for attempt in range(_LOCKED_TRIES):
            if await self._store.settle_in(self._tx.connection, [settlement], compare=compare):
                await self._store.run_hooks(self._tx.connection, [settlement])
                return settlement
            if compare and self._store.lane.inputs and await self._inputs_kept_changing():
                compare, settlement.kept_changing = False, True
                continue
            held = (await self._store.still_held([self._claim]))[0]
            if held and await self._store.deleted_in(self._tx.connection, self._claim):
                return settlement  # gone in here and there outside: the handler's own writes took the row away
            if not held:
                self._claim.lost = True
                raise LostClaim(f"lane {self._claim.lane!r}: row {self._claim.id!r} is no longer claimed by this run")
            await asyncio.sleep(
                min(0.002 * 2**attempt, _LOCKED_WAIT)
            )  # somebody else has the row locked at this moment
        raise Busy(f"lane {self._claim.lane!r}: row {self._claim.id!r} stayed locked by another transaction")

    async def _inputs_kept_changing(self) -> bool:
        """Whether the row's inputs have changed for so long that the outcome is final; False where they are as they
        were. Raises InputsChanged where the outcome is not final.
        """
        store, claim, inside = self._store, self._claim, self._tx.connection
        if (too_long := await store.changed_in(inside, claim)) is not False:
            return bool(too_long)
        row = f"lane {claim.lane!r}: row {claim.id!r}"
        if await store.changed_in(None, claim) is None and await store.changed_in(inside, claim) is False:
            raise WrongResult(
                f"{row}: the finish block itself wrote an input of its row ({', '.join(store.lane.inputs)})",
                hint="write another column, or leave that one out of inputs",
            )
        self._job.inputs_changed = True
        raise InputsChanged(f"{row}: its inputs changed during the run; it is ready again")

    async def _commit(self, settlement: Settlement) -> None:
        try:
            await self._context.__aexit__(None, None, None)
        except Unreachable:
            # The reply to the commit was lost: the row itself says whether it was committed.
            if not await _patiently(self._store, settlement):
                raise
        self._job.finished = settlement
        self._lane_state.drop([self._claim])  # what the handler still does is not renewed, so it cannot be lost either


async def _patiently(store: LaneStore, settlement: Settlement, tries: int = 60) -> bool:
    for attempt in range(tries):
        if settlement.claim.lost:
            return False
        try:
            return await store.landed(settlement)
        except Unreachable:
            if attempt == tries - 1:
                raise
            await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
    raise AssertionError


class SyncFinish:
    """``with job.finish() as tx`` in a handler that runs in a thread."""

    def __init__(self, finish: Finish, loop: asyncio.AbstractEventLoop) -> None:
        self._finish, self._loop = finish, loop

    def __enter__(self) -> SyncTx:
        return SyncTx(_wait(self._loop, self._finish.__aenter__()), self._loop)

    def __exit__(self, *exc: Any) -> None:
        _wait(self._loop, self._finish.__aexit__(*exc))


class SyncTx:
    """The transaction of a ``finish`` block, without ``await``."""

    def __init__(self, tx: FinishTx, loop: asyncio.AbstractEventLoop) -> None:
        self._tx, self._loop = tx, loop
        self.set = tx.set

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Run a statement: SQLAlchemy Core, or SQL text with ``:names``."""
        return _wait(self._loop, self._tx.execute(statement, parameters))


def _wait(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result()
