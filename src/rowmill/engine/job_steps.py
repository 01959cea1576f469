"""Inside a run of a task: steps that run once, and children that it waits for."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..declare.arguments import Unfit, decode, encode
from ..declare.call import Call
from ..declare.outcome import Dead
from ..declare.states import CANCELED, DEAD, DONE, FINAL
from ..errors import Busy, LostClaim, RowmillError
from ..store import LaneStore
from ..store.jobs import flows
from ..store.jobs.enqueue import EnqueueStatements
from ..store.jobs.job_rows import Jobs
from ..store.lane.claim import Claim, Settlement
from .tracing import enqueued

if TYPE_CHECKING:
    from .job import Job

_TRIES, _WAIT = 25, 0.1


class Suspended(BaseException):
    """The run ends here, and the job goes on when its children have ended. Not an Exception: no handler's
    ``except Exception`` may keep it.
    """


@dataclass(frozen=True, slots=True)
class Joined:
    """How a job's children ended."""

    done: int = 0
    #: Dead ones.
    failed: int = 0
    canceled: int = 0
    unfinished: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.done + self.failed + self.canceled + self.unfinished

    @classmethod
    def of(cls, states: dict[str, int]) -> Joined:
        """From counts by state."""
        ended = {state: states.get(state, 0) for state in FINAL}
        rest = sum(states.values()) - sum(ended.values())
        return cls(ended[DONE], ended[DEAD], ended[CANCELED], rest)


class JobSteps:
    """The steps and children of one run."""

    def __init__(self, store: LaneStore, claim: Claim, job: Job) -> None:
        if not store.lane.own:
            raise RowmillError(
                f"lane {store.lane.name!r} works on a table of your own, and only tasks have job.step and job.spawn",
                hint="store the result of a step in a column, make each step a lane on this table, or use @mill.task",
            )
        self._store, self._claim, self._job = store, claim, job
        self._jobs = Jobs(store.database, store.clock)
        self._steps: dict[str, Any] | None = None
        self._spawned = 0
        self._used: set[tuple[str, str]] = set()

    def _once(self, what: str, name: str) -> None:
        """A second of the same name would be given what the first one got, without having run."""
        if (what, name) in self._used:
            raise Dead(
                f"job.{what} {name!r} is used twice in one run: give each its own name, such as f'{name} {{number}}'"
            )
        self._used.add((what, name))

    async def _known(self) -> dict[str, Any]:
        if self._steps is None:
            self._steps = await flows.steps(self._store, self._claim.id)
        return self._steps

    async def step(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function once: what it returned is kept, and given back by every later run of the job."""
        hint = _returns(function)
        known = await self._known()
        if name in known:
            self._once("step", name)
            return decode(known[name], hint)
        result = function(*args, **kwargs)
        value = await result if inspect.isawaitable(result) else result
        await self._keep(name, value, hint)
        return value

    def step_in_thread(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The same in a handler's thread: the function is called there, the rest is done in the loop."""
        hint = _returns(function)
        known = asyncio.run_coroutine_threadsafe(self._known(), loop).result()
        if name in known:
            self._once("step", name)
            return decode(known[name], hint)
        value = function(*args, **kwargs)
        asyncio.run_coroutine_threadsafe(self._keep(name, value, hint), loop).result()
        return value

    async def _keep(self, name: str, value: Any, hint: Any) -> None:
        try:
            kept = encode(value, hint)
        except Unfit as unfit:
            raise RowmillError(
                f"step {name!r} returned a {type(value).__name__}, which cannot be stored: it needs {unfit}"
            ) from None
        for attempt in range(_TRIES):
            if await flows.keep_step(self._store, self._claim, name, kept):
                (await self._known())[name] = kept
                self._once("step", name)
                return
            await self._still_held(attempt)
        raise Busy(f"job {self._claim.id!r} stayed locked by another transaction")

    async def _still_held(self, attempt: int) -> None:
        """The row was locked at that moment, by a renewal for one, or it is no longer ours."""
        if not (await self._store.still_held([self._claim]))[0]:
            self._claim.lost = True
            raise LostClaim(f"job {self._claim.id!r} is no longer claimed by this run")
        await asyncio.sleep(min(0.002 * 2**attempt, _WAIT))

    async def spawn(self, calls: Iterable[Call], name: str | None) -> Joined:
        """Add child jobs and wait for them: this run ends, and the handler runs again when all children have ended."""
        if self._store.lane.chunk is not None:
            raise Dead(
                "job.spawn does not work in a chunk: the call would end for all of its jobs; spawn from a task without"
                " chunk="
            )
        self._spawned += 1
        branch = name or f"spawn-{self._spawned}"
        self._once("spawn", branch)
        wanted = list(calls)
        for call in wanted:
            if not isinstance(call, Call):
                raise RowmillError(f"job.spawn takes calls, not {call!r}", hint="job.spawn(task.call(...), ...)")
            if call.options.tx is not None or call.options.env not in (None, self._job.environment):
                raise RowmillError("a child is stored with its parent, so its call cannot have tx or another env")
            if call.options.key is not None:
                raise RowmillError("a child cannot have a key: an existing job cannot become its child")
        joined = await self.joined(branch)
        if not joined.unfinished and (joined.total or not wanted):
            return joined
        # Where some are under way already, somebody made the job ready before its time: it only waits on.
        await self._held_apart([] if joined.total else wanted, branch)
        raise Suspended

    async def _held_apart(self, wanted: Sequence[Call], branch: str) -> None:
        for attempt in range(_TRIES):
            try:
                settlement: Settlement | None = None
                with enqueued(self._job._lane_state.tracer, wanted) as traced:
                    async with self._store.database.begin() as connection:
                        settlement = await flows.suspend(self._store, connection, self._claim, traced, branch)
                self._job.finished = settlement
                return
            except LostClaim:
                await self._still_held(attempt)
        raise Busy(f"job {self._claim.id!r} stayed locked by another transaction")

    async def joined(self, name: str | None) -> Joined:
        """How the job's children stand now."""
        return Joined.of((await self._jobs.children([self._claim.id], name)).get(self._claim.id, {}))

    async def results(self, name: str | None) -> list[Any]:
        """What the job's children returned, in order; None for those that did not end well."""
        statements = EnqueueStatements.to(self._store.database, self._store.clock)
        return await flows.results(self._store.database, statements, self._claim.id, name)


def _returns(function: Callable[..., Any]) -> Any:
    try:
        return typing.get_type_hints(inspect.unwrap(function), include_extras=True).get("return", Any)
    except Exception:
        return Any
