"""From one claim to what is written for it: run the handler, name its end, decide by the lane's policy."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..declare import retry
from ..declare.outcome import Cancel, Dead, Done, Outcome, Release, Retry, Snooze
from ..errors import LostClaim, ResourceFailed, WrongResult
from ..store import LaneStore
from ..store.driver_errors import from_standby
from ..store.lane.claim import Claim, Settlement
from ..store.lane.row_keys import written
from .isolate import HandlerDied, HandlerProcess
from .job import Job, SyncJob
from .lane_state import LaneState
from .resources import Resources
from .traced_lane import kept_with
from .tracing import Tracer

_FALLBACK, _SWITCHOVER, _UNOPENED = timedelta(minutes=1), timedelta(seconds=1), timedelta(seconds=5)


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

    def __init__(self, held: LaneState, resources: Resources, threads: Callable[[], ThreadPoolExecutor]) -> None:
        self.held, self.lane = held, held.store.lane
        self.resources, self.threads = resources, threads
        #: Run the handler to its end. None: there is nothing left to write (lost, or finished by itself).
        self.run: Callable[[RunPlan, Job, Claim, HandlerProcess | None], Awaitable[Settlement | None]]
        self.run = self._run if held.tracer is None else functools.partial(self._traced, held.tracer)
        timeout = self.store.binding.timeout
        seconds = timeout.total_seconds() if timeout else None
        self._plan = self._planned(self.lane.handler, self.lane.handler, self.lane.resources(), seconds)
        #: Resources without which nothing is claimed. A queue has tasks that do without; a child process opens its own.
        self.needs = [] if self.lane.own or self.lane.isolation == "process" else self._plan.names

    @property
    def store(self) -> LaneStore:
        """The lane's verbs: those of the table as it was last looked at."""
        return self.held.store

    def _planned(
        self, handler: Callable[..., Any], inner: Callable[..., Any], names: list[str], timeout: float | None
    ) -> RunPlan:
        """``inner``: the user's own function, which ``handler`` calls."""
        is_async = runs_in_loop(inner)
        return RunPlan(handler, names, is_async, timeout, self.lane.isolation == "auto" and not is_async)

    def plan(self, claim: Claim) -> RunPlan:
        """How this claim is run."""
        return self._plan

    def job(self, plan: RunPlan, claim: Claim, worker: str, slot: str) -> Job:
        """The claim as its handler will see it."""
        if not plan.in_thread:
            return Job(self.held, claim, worker, slot)
        return SyncJob(self.held, claim, worker, slot, asyncio.get_running_loop())

    def settlement(self, claim: Claim, ended: Any) -> Settlement:
        """What a run's end means for its row. An object that raises while it is read fails this run alone."""
        if ended is None:  # nearly all runs
            return Settlement(claim, "done")
        try:
            return self._decided(claim, ended)
        except BaseException as error:
            said = f"what the handler ended with cannot be read: {type(ended).__name__} raised {type(error).__name__}"
            return self._decided(claim, Dead(said))

    def _decided(self, claim: Claim, ended: Any) -> Settlement:
        settlement = decide(self.store, claim, ended)
        settlement.cause = ended if isinstance(ended, BaseException) else None
        return settlement

    async def _traced(
        self, tracer: Tracer, plan: RunPlan, job: Job, claim: Claim, child: HandlerProcess | None
    ) -> Settlement | None:
        facts = {name: getattr(job, name) for name in ("lane", "environment", "attempt", "worker", "slot")}
        with tracer.run({**facts, "id": written(claim.id)}, kept_with(self.store, claim)) as ended:
            settlement = await self._run(plan, job, claim, child)
            ended(settlement or job.finished)
            return settlement

    async def _run(self, plan: RunPlan, job: Job, claim: Claim, child: HandlerProcess | None) -> Settlement | None:
        try:
            plain = plan.plain and child is None
            ended = await (plan.handler(job) if plain else self._within(plan, job, claim, child))
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

    async def _within(self, plan: RunPlan, job: Job, claim: Claim, child: HandlerProcess | None) -> Any:
        """The handler, with its resources, in its time, in the place where it runs."""
        if child is not None:
            lease_began = claim.taken if self.store.binding.renew == "none" else None
            trace = self.held.tracer.here() if self.held.tracer is not None else None
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

    async def _handler(self, plan: RunPlan, job: Job, resources: dict[str, Any]) -> Any:
        if plan.is_async:
            return await plan.handler(job, **resources)
        loop = asyncio.get_running_loop()
        # What the context holds here, a trace or a log's fields, holds in the thread too.
        within = contextvars.copy_context().run
        result = await loop.run_in_executor(self.threads(), within, _in_thread, plan.handler, job, resources)
        return await result if inspect.isawaitable(result) else result


def _in_thread(handler: Callable[..., Any], job: Job, resources: dict[str, Any]) -> Any:
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
        case Snooze(after=after, closes=closes):
            delay = retry.bounded_delay(after) or timedelta(0)
            settlement = Settlement(claim, "snooze", delay=delay, closes=delay if closes else None)
            settlement.closes_lane = closes == "lane"
            return settlement
        case Dead(reason=reason):
            return _ended(store, claim, "dead", _words(reason) or "dead", retry.PERMANENT)
        case Cancel(reason=reason):
            return _ended(store, claim, "canceled", _words(reason) or "canceled")
        case Release():
            return Settlement(claim, "release")
        case Retry(reason=reason, after=after):
            return _failed(store, claim, _words(reason) or "retry asked for by the handler", after)
        case BaseException():
            return _raised(store, claim, ended)
    kind = type(ended).__name__
    if inspect.iscoroutine(ended):
        ended.close()
        kind = f"a coroutine ({ended.__qualname__}): an await is missing"
    return _ended(
        store, claim, "dead", f"the handler returned {kind}; a run ends with a dict of columns, None or an outcome"
    )


def unhooked(store: LaneStore, settlement: Settlement, error: BaseException) -> Settlement:
    """A run whose outcome the lane's own ``on_settled`` would not have is settled without the hook: one that was done
    has failed; one that had ended otherwise ends so.
    """
    said = f"on_settled failed: {_words(error)}"
    if settlement.kind == "done":
        again = decide(store, settlement.claim, error)
    else:
        again = Settlement(settlement.claim, settlement.kind, delay=settlement.delay)
        said = f"{settlement.error} ({said})" if settlement.error else said
    again.error = store.error_text(said)
    again.hooked, again.duration = False, settlement.duration
    return again


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
                raise TypeError("backoff must answer with a timedelta")
        except Exception as broken:
            delay, text = _FALLBACK, f"{text} (backoff failed: {_words(broken)})"
    return Settlement(claim, "retry", error=store.error_text(text), delay=delay, word=word, closes=closes)


def _ended(store: LaneStore, claim: Claim, kind: str, text: str, word: str | None = None) -> Settlement:
    return Settlement(claim, kind, error=store.error_text(text), word=word)


def _words(said: Any) -> str:
    """What a reason or an exception says; an exception may fail even at that."""
    try:
        if isinstance(said, (TimedOut, HandlerDied, WrongResult)) or not isinstance(said, BaseException):
            return "" if said is None else str(said)
        return f"{type(said).__name__}: {said}"
    except Exception:
        return f"{type(said).__name__} (it cannot be shown as text)"
