"""From one claim to what is written for it: run the handler, name its end, decide by the lane's or task's policy."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from ..declare import retry
from ..declare.arguments import Unfit, encode
from ..declare.outcome import Cancel, Dead, Done, NotForThisVersion, Outcome, Release, Retry, Snooze, Wait
from ..declare.task import Queue, Task
from ..errors import InputsChanged, LostClaim, ResourceFailed, UnreadableValue, WrongAnswer, WrongResult
from ..events import Event, to_log
from ..store import LaneStore
from ..store.bounded_text import tail
from ..store.dialect import utc
from ..store.driver_errors import from_standby
from ..store.lane.claim import Claim, Settlement, WaitCondition
from ..store.lane.row_keys import written
from ..store.lane.waits import MARGIN
from .counters import users_traceback
from .isolate import HandlerDied, HandlerProcess
from .job import ChunkJobs, Job, SyncJob
from .lane_state import LaneState
from .resources import Resources
from .tracing import Tracer, kept_with, wrote_row

#: What a job's row keeps of its failed runs, and of each run's traceback.
HISTORY, TRACEBACK = 20, 4000
_FALLBACK, _SWITCHOVER, _UNOPENED = timedelta(minutes=1), timedelta(seconds=1), timedelta(seconds=5)
#: A snooze until a time ends so much later: what the claim took on its way is not known.
_AFTER_TICK = timedelta(milliseconds=250)


@dataclass(frozen=True)
class RunPlan:
    """How a claim is run: by which function, with which resources, and how long at most."""

    handler: Callable[..., Any]
    names: list[str]
    is_async: bool
    timeout: float | None
    #: It runs in a thread of this process: nothing stops it from outside.
    in_thread: bool

    @functools.cached_property
    def plain(self) -> bool:
        """There is nothing to do around the handler."""
        return self.is_async and self.timeout is None and not self.names


class Execution:
    """How the handler of one lane is run in this process."""

    def __init__(self, lane_state: LaneState, resources: Resources, threads: Callable[[], ThreadPoolExecutor]) -> None:
        self.lane_state, self.lane = lane_state, lane_state.store.lane
        self.resources, self.threads = resources, threads
        #: Run the handler to its end. None: there is nothing left to write (lost, or finished by itself).
        self.run: Callable[[RunPlan, Job, Claim, HandlerProcess | None], Awaitable[Settlement | None]]
        self.run = self._run if lane_state.tracer is None else functools.partial(self._traced, lane_state.tracer)
        timeout = self.store.binding.timeout
        seconds = timeout.total_seconds() if timeout else None
        self._plan = self._planned(self.lane.handler, self.lane.handler, self.lane.resources(), seconds)
        #: Resources without which nothing is claimed. A queue has tasks that do without; a child process opens its own.
        self.needs = [] if self.lane.own or self.lane.isolation == "process" else self._plan.names

    @property
    def store(self) -> LaneStore:
        """The lane's verbs: those of the table as it was last looked at."""
        return self.lane_state.store

    def _planned(
        self, handler: Callable[..., Any], inner: Callable[..., Any], names: list[str], timeout: float | None
    ) -> RunPlan:
        """``inner``: the user's own function, which ``handler`` calls."""
        is_async = runs_in_loop(inner)
        return RunPlan(handler, names, is_async, timeout, self.lane.isolation == "auto" and not is_async)

    def plan(self, claim: Claim) -> RunPlan:
        return self._plan

    def job(self, plan: RunPlan, claim: Claim, worker: str, slot: str) -> Job:
        """The claim as its handler will see it."""
        if not plan.in_thread:
            return Job(self.lane_state, claim, worker, slot)
        return SyncJob(self.lane_state, claim, worker, slot, asyncio.get_running_loop())

    def settlement(self, claim: Claim, ended: Any) -> Settlement:
        """What a run's end means for its row. An object that raises while it is read fails this run alone."""
        if ended is None:  # nearly all runs
            return Settlement(claim, "done")
        try:
            return self._decided(claim, ended)
        except BaseException as error:
            reason = f"cannot read the result of the handler: {type(ended).__name__} raised {type(error).__name__}"
            return self._decided(claim, Dead(reason))

    def _decided(self, claim: Claim, ended: Any) -> Settlement:
        settlement = decide(self.store, claim, ended)
        settlement.cause = ended if isinstance(ended, BaseException) else None
        return settlement

    async def _traced(
        self, tracer: Tracer, plan: RunPlan, job: Job, claim: Claim, child: HandlerProcess | None
    ) -> Settlement | None:
        facts = {name: getattr(job, name) for name in ("lane", "environment", "attempt", "worker", "slot")}
        with tracer.run(
            {**facts, "id": written(claim.id)}, kept_with(self.store, claim), wrote_row(self.store, claim)
        ) as ended:
            settlement = await self._run(plan, job, claim, child)
            ended(settlement or job.finished)
            return settlement

    async def _run(self, plan: RunPlan, job: Job, claim: Claim, child: HandlerProcess | None) -> Settlement | None:
        try:
            plain = plan.plain and child is None
            ended = await (plan.handler(job) if plain else self.within(plan, job, claim, child))
        except LostClaim:
            claim.lost = True
            return None
        except Outcome as outcome:
            ended = outcome
        except asyncio.CancelledError:
            raise  # whose doing it was, the slot knows
        except BaseException as error:  # SystemExit too: a handler's exit() ends its run, not the worker
            ended = error
        finally:
            job.close()
        return None if job.finished is not None else self.settlement(claim, ended)

    async def within(self, plan: RunPlan, job: Job | ChunkJobs, claim: Claim, child: HandlerProcess | None) -> Any:
        """The handler, with its resources, in its time, in the place where it runs; ``claim``: a chunk's oldest one."""
        if child is not None:
            lease_began = claim.taken if self.store.binding.renew == "none" else None
            trace = self.lane_state.tracer.here() if self.lane_state.tracer is not None else None
            return await child.run(job, plan.timeout, lease_began, self.threads(), trace)
        resources = await self.resources.get(plan.names) if plan.names else {}
        if plan.timeout is None:
            return await self._handler(plan, job, resources)
        # A run that is not renewed must end before its lease does, and the lease began with the claim.
        left = plan.timeout
        if self.store.binding.renew == "none":
            left -= time.monotonic() - claim.taken
        if plan.is_async:
            try:
                async with asyncio.timeout(left) as scope:
                    result = await self._handler(plan, job, resources)
            except TimeoutError:
                if scope.expired():
                    raise TimedOut(plan.timeout, job.blocked_at) from None
                raise
            if asyncio.get_running_loop().time() > (scope.when() or 0.0):
                raise TimedOut(plan.timeout, job.blocked_at)  # it blocked the loop, so nothing could stop it in time
            return result
        deadline = time.monotonic() + left
        result = await self._handler(plan, job, resources)
        if time.monotonic() > deadline:
            raise TimedOut(plan.timeout)
        return result

    async def _handler(self, plan: RunPlan, job: Job | ChunkJobs, resources: dict[str, Any]) -> Any:
        if plan.is_async:
            return await plan.handler(job, **resources)
        loop = asyncio.get_running_loop()
        # What the context holds here, a trace or a log's fields, holds in the thread too.
        within = contextvars.copy_context().run
        result = await loop.run_in_executor(self.threads(), within, _in_thread, plan.handler, job, resources)
        return await result if inspect.isawaitable(result) else result


class TaskExecution(Execution):
    """How the jobs of one queue are run: each by its own task, with the task's own policy and record."""

    def __init__(self, lane_state: LaneState, resources: Resources, threads: Callable[[], ThreadPoolExecutor]) -> None:
        super().__init__(lane_state, resources, threads)
        self._plans: dict[str, RunPlan] = {}
        self._task_at = self.store.binding.columns.index("task")

    def plan(self, claim: Claim) -> RunPlan:
        name = claim.row[self._task_at]
        plan = self._plans.get(name)
        if plan is None:
            task = self._task(claim)
            timeout = task.timeout.total_seconds() if task.timeout else self._plan.timeout
            invoke = task.invoke if task.chunk is None else task.invoke_chunk
            plan = self._plans[name] = self._planned(invoke, task.handler, task.resources(), timeout)
        return plan

    def _task(self, claim: Claim) -> Task[Any, Any]:
        lane = self.lane
        assert isinstance(lane, Queue)
        return lane.tasks[claim.row[self._task_at]]

    def _decided(self, claim: Claim, ended: Any) -> Settlement:
        """What the handler returned is the job's result; how it failed goes into the job's history."""
        task = self._task(claim)
        if isinstance(ended, NotForThisVersion):
            self._leave_to_newer(task, ended)
        settlement = super()._decided(claim, _result(task, ended))
        settlement.cause = ended if isinstance(ended, BaseException) else None
        if settlement.kind in ("retry", "dead"):
            settlement.columns = {"history": self._history(claim, settlement)}
        return settlement

    def _leave_to_newer(self, task: Task[Any, Any], ended: NotForThisVersion) -> None:
        """A rolling deploy: jobs that this version of a task cannot run are not claimed again by it."""
        assert isinstance(self.lane, Queue)
        if self.lane.narrow(task.name):
            hint = "this worker leaves jobs with such arguments to workers with a newer version of the task"
            fields = {"lane": self.lane.name, "task": task.name, "error": ended.reason, "hint": hint}
            to_log(Event("arguments_unknown", logging.WARNING, fields))
        self.store.forget_texts()

    def _history(self, claim: Claim, settlement: Settlement) -> list[dict[str, Any]]:
        try:
            history = self.store.value(claim.row, "history") or []
        except UnreadableValue:
            history = []
        shown = users_traceback(settlement.cause)
        entry = {
            "attempt": claim.attempt,
            "started_at": utc(claim.claimed_at).isoformat(),
            "outcome": settlement.kind,
            "error": settlement.error,
            "traceback": None if shown is None else tail(shown, TRACEBACK, self.store.database.encoding),
            "worker": claim.worker,
        }
        return [*history[1 - HISTORY :], entry]


def _result(task: Task[Any, Any], ended: Any) -> Any:
    """A handler's value as an outcome with the column it goes to."""
    if isinstance(ended, Done):
        return Done({"result": dict(ended.columns)}) if ended.columns else ended
    if isinstance(ended, (BaseException, type)) or inspect.iscoroutine(ended):
        return ended
    for hint in (task.signature.returns, Any):
        try:
            return Done({"result": encode(ended, hint)})
        except Unfit as unfit:
            words = str(unfit)
    return Dead(f"the handler returned a {type(ended).__name__}, which cannot be stored as a result: it needs {words}")


def _in_thread(handler: Callable[..., Any], job: Job | ChunkJobs, resources: dict[str, Any]) -> Any:
    try:
        return handler(job, **resources)
    except (StopIteration, GeneratorExit) as error:  # a bare next(), a close(): no future can carry these over
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def runs_in_loop(handler: Any) -> bool:
    """An async function, however it is wrapped: a partial, a decorator that says what it wraps, an object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = inspect.unwrap(handler)
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


class TimedOut(TimeoutError):
    """The run took longer than the lane's timeout."""

    def __init__(self, seconds: float, blocked_at: str | None = None) -> None:
        blocked = f": it blocked the event loop at {blocked_at}" if blocked_at else ""
        super().__init__(f"timed out after {seconds:g} s{blocked}")


def decide(store: LaneStore, claim: Claim, ended: Any) -> Settlement:
    """What a run's end means for its row, by the lane's policy; whatever a handler did, there is an answer."""
    if ended is None:
        return Settlement(claim, "done")
    if isinstance(ended, dict):
        ended = Done(ended)
    if isinstance(ended, type) and issubclass(ended, (Dead, Cancel, Retry, Done)):
        ended = ended()
    match ended:
        case Done(columns=columns):
            try:
                return Settlement(claim, "done", columns=store.checked(columns))
            except WrongResult as error:
                return _ended(store, claim, "dead", str(error))
        case Snooze(after=after, until=until, closes=closes):
            delay = retry.bounded_delay(after if until is None else _left(store, claim, until)) or timedelta(0)
            settlement = Settlement(claim, "snooze", delay=delay, closes=delay if closes else None)
            settlement.closes_lane = closes == "lane"
            return settlement
        case Wait():
            return _waiting(store, claim, ended)
        case Dead(reason=reason):
            return _ended(store, claim, "dead", _words(reason) or "dead", retry.PERMANENT)
        case Cancel(reason=reason):
            return _ended(store, claim, "canceled", _words(reason) or "canceled")
        case Release():
            return Settlement(claim, "release")
        case Retry(reason=reason, after=after):
            return _failed(store, claim, _words(reason) or "the handler asked for a retry", after)
        case InputsChanged():  # of its finish block, which was rolled back
            return Settlement(claim, "stale", delay=timedelta(0))
        case BaseException():
            return _raised(store, claim, ended)
    kind = type(ended).__name__
    if inspect.iscoroutine(ended):
        ended.close()
        kind = f"a coroutine ({ended.__qualname__}): an await is missing"
    return _ended(
        store, claim, "dead", f"the handler returned {kind}; a run ends with a dict of columns, None or an outcome"
    )


def _waiting(store: LaneStore, claim: Claim, wait: Wait) -> Settlement:
    """The row waits for a condition; dead where nothing could hold it back meanwhile."""
    lacks = None
    if store.lane.own:
        lacks = "a task's job has no columns of yours to wait for; use Snooze, or a lane over your own table"
    elif "run_after" not in store.binding.roles:
        lacks = "the table needs a column with the role run_after, which rowmill migrate adds"
    elif store.waits is None:
        lacks = "there is no table rowmill_waits that this role may write; rowmill migrate makes it"
    if lacks is not None:
        return _ended(store, claim, "dead", f"the handler returned Wait: {lacks}")
    try:
        columns = store.checked(wait.columns)
    except WrongResult as error:
        return _ended(store, claim, "dead", str(error))
    timeout = retry.bounded_delay(wait.timeout) or timedelta(0)
    delay = timeout if wait.then == "run" else timeout + MARGIN
    settlement = Settlement(claim, "wait", columns=columns, delay=delay)
    settlement.wait = WaitCondition(wait.until, timeout, wait.then)
    return settlement


def _left(store: LaneStore, claim: Claim, until: datetime) -> timedelta:
    """How long until a time, by the database's clock, as far as the claim told its time: never too short, so that a
    row that waits for a tick is not claimed just before it.
    """
    now, at = datetime.now(UTC) + store.clock.shift, claim.claimed_at
    if isinstance(at, datetime) and store.binding.renew != "claimed_at":
        zone = UTC if at.tzinfo is not None else ZoneInfo(store.lane.timezone or "UTC")
        began = at if at.tzinfo is not None else at.replace(tzinfo=zone)
        now = began + timedelta(seconds=time.monotonic() - claim.taken)
    return max(until - now, timedelta(0)) + _AFTER_TICK


def unhooked(store: LaneStore, settlement: Settlement, error: BaseException) -> Settlement:
    """A run whose outcome the lane's own ``on_settled`` would not have is settled without the hook: one that was done
    has failed; one that had ended otherwise ends so.
    """
    reason = f"on_settled failed: {_words(error)}"
    if settlement.kind == "done":
        again = decide(store, settlement.claim, error)
    else:
        again = Settlement(settlement.claim, settlement.kind, delay=settlement.delay)
        again.wait = settlement.wait
        reason = f"{settlement.error} ({reason})" if settlement.error else reason
    again.error = store.error_text(reason)
    again.hooked, again.duration = False, settlement.duration
    return again


def shared_word(store: LaneStore, claim: Claim, error: BaseException) -> str | None:
    """What an error of a call for several rows says of all of them: ``outcome``, ``rate`` or ``transient``. None: one
    of them may be at fault.
    """
    if isinstance(error, (Outcome, ResourceFailed)) or from_standby(error):
        return "outcome"
    verdict: Any = None
    if (classify := store.policy(claim).classify) is not None:
        with contextlib.suppress(Exception):
            verdict = classify(error)
    if verdict is None:
        verdict = retry.classify(error)
        if verdict == retry.TRANSIENT and (isinstance(error, TimedOut) or not retry.is_passing(error)):
            return None
    if isinstance(verdict, Outcome) or (isinstance(verdict, type) and issubclass(verdict, Outcome)):
        return "outcome"
    word = verdict[0] if isinstance(verdict, tuple) and verdict else verdict
    return word if word in (retry.RATE, retry.TRANSIENT) else None


def _raised(store: LaneStore, claim: Claim, error: BaseException) -> Settlement:
    text = _words(error) or type(error).__name__
    if from_standby(error):
        return Settlement(claim, "snooze", delay=_SWITCHOVER)  # the row is not at fault, and costs no attempt
    if isinstance(error, ResourceFailed):
        return Settlement(claim, "snooze", delay=_UNOPENED)  # nor here
    verdict: Any = None
    policy = store.policy(claim)
    if policy.classify is not None:
        try:
            verdict = policy.classify(error)
        except Exception as broken:  # the classifier's own bug must not cost the row its record
            text = f"{text} (classify failed: {_words(broken)})"
    verdict = verdict if verdict is not None else retry.classify(error)
    if isinstance(verdict, type) and issubclass(verdict, Outcome):
        verdict = verdict()
    if isinstance(verdict, Outcome):
        if verdict.reason is None and not isinstance(verdict, (Done, Snooze)):
            verdict.reason = text
        return decide(store, claim, verdict)
    word, after = (*verdict, None)[:2] if isinstance(verdict, tuple) and verdict else (verdict, None)
    if word == retry.PERMANENT:
        return _ended(store, claim, "dead", text, retry.PERMANENT)
    return _failed(store, claim, text, after, retry.RATE if word == retry.RATE else retry.TRANSIENT)


def _failed(store: LaneStore, claim: Claim, text: str, after: Any, word: str = retry.TRANSIENT) -> Settlement:
    """A failure that may be tried again, while attempts are left."""
    delay = retry.bounded_delay(after)
    closes = delay if word == retry.RATE else None
    if claim.attempt >= store.limit(claim):
        return Settlement(claim, "dead", error=store.error_text(text), word=word, closes=closes)
    if delay is None:
        try:
            delay = retry.bounded_delay(store.policy(claim).backoff(claim.attempt))
            if delay is None:
                raise TypeError("backoff must return a timedelta")
        except Exception as broken:
            delay, text = _FALLBACK, f"{text} (backoff failed: {_words(broken)})"
    return Settlement(claim, "retry", error=store.error_text(text), delay=delay, word=word, closes=closes)


def _ended(store: LaneStore, claim: Claim, kind: str, text: str, word: str | None = None) -> Settlement:
    return Settlement(claim, kind, error=store.error_text(text), word=word)


def _words(reason: Any) -> str:
    """What a reason or an exception says; an exception may fail even at that."""
    try:
        if isinstance(reason, (TimedOut, HandlerDied, WrongAnswer, WrongResult)) or not isinstance(
            reason, BaseException
        ):
            return "" if reason is None else str(reason)
        return f"{type(reason).__name__}: {reason}"
    except Exception:
        return f"{type(reason).__name__} (it cannot be shown as text)"
