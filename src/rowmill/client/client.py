"""The client: where an application hands in calls and asks for results, whether it awaits or not.

Connections belong to an event loop, so there is one set per loop. Code that does not await is served by a loop in a
thread of its own, made on first use, and again in a process that was forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..clock import Clock
from ..declare.call import Call, CallBatch, Handle, Status
from ..declare.dry_run import dry_calls
from ..engine.tracing import enqueued
from ..errors import RowmillError, TaskCanceled, TaskFailed, WrongArguments, did_you_mean, no_such_table
from ..events import Events
from ..store import Database
from ..store.caller_transactions import Verb, caller, drive, drive_async
from ..store.dialect import Dialect
from ..store.jobs import flows
from ..store.jobs.enqueue import EnqueueStatements, FlowPosition, add
from .connection import EnvironmentConnection

T = TypeVar("T")


class Client:
    """Takes calls for all environments of a Mill."""

    def __init__(
        self,
        environments: Callable[[], Mapping[str, str]],
        schema: str | None,
        clock: Clock,
        notify: bool,
        events: Events,
    ) -> None:
        self._environments, self._schema, self._clock, self._notify = environments, schema, clock, notify
        self._events = events
        #: Reads the list of environments again, where there is one.
        self.relist: Callable[[], Mapping[str, str]] | None = None
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, EnvironmentConnection]] = (
            weakref.WeakKeyDictionary()
        )
        self._own: _BackgroundLoop | None = None
        self._guard = threading.Lock()

    def environment(self, name: str | None) -> str:
        """The named environment, or the first."""
        known = self._environments()
        if name not in known and self.relist is not None:
            if name is None:
                raise WrongArguments(
                    "this Mill lists its environments, so a call must name one",
                    hint='task.options(env="...").enqueue(...)',
                )
            known = self.relist()
        if name is None:
            return next(iter(known))
        if name not in known:
            raise WrongArguments(f"there is no environment {name!r}", hint=did_you_mean(str(name), known))
        return name

    def _unopened(self, name: str) -> EnvironmentConnection:
        connections = self._loops.setdefault(asyncio.get_running_loop(), {})
        if name not in connections:
            database = Database.open(self._environments()[name], schema=self._schema, pool=3)
            connections[name] = EnvironmentConnection(name, database, self._clock)
        return connections[name]

    async def connection(self, environment: str | None = None) -> EnvironmentConnection:
        """An environment, opened in the running loop."""
        return await self._unopened(self.environment(environment)).open()

    async def close(self) -> None:
        """Close what the running loop has opened, and the thread for code that does not await."""
        for connection in self._loops.pop(asyncio.get_running_loop(), {}).values():
            await connection.close()
        with self._guard:
            own, self._own = self._own, None
            idle = own is not None and not own.calls
        # Where other threads still wait for something in it, the last of them ends it.
        if own is not None and idle and own.pid == os.getpid():
            await asyncio.to_thread(_stop, own.loop, self)

    async def close_here(self) -> None:
        """Close what the running loop has opened."""
        for connection in self._loops.pop(asyncio.get_running_loop(), {}).values():
            await connection.close()

    # -- enqueue

    async def enqueue(self, calls: Sequence[Call]) -> list[Handle[Any]]:
        """Hand in calls; in one transaction where they are for one environment."""
        if (listed := dry_calls.get()) is not None:
            return self._only_listed(listed, calls)
        with enqueued(self._events.tracer, calls) as traced:
            return await self._enqueue(traced)

    async def _enqueue(self, calls: Sequence[Call]) -> list[Handle[Any]]:
        groups = self._groups(calls)
        handles: dict[int, Handle[Any]] = {}
        for (tx, environment), indexes in groups.items():
            group = calls if len(groups) == 1 else [calls[index] for index in indexes]
            if tx is not None:
                ids = await self._in_tx(group[0].options.tx, group)
            else:
                ids = await (await self._unopened(environment).open()).add(group, self._notify)
            tasks = [group.task] * len(ids) if isinstance(group, CallBatch) else [call.task for call in group]
            handed: list[Handle[Any]] = [
                Handle(self, task, environment, id) for task, id in zip(tasks, ids, strict=True)
            ]
            if len(groups) == 1:
                return handed
            handles.update(zip(indexes, handed, strict=True))
        return [handles[index] for index in range(len(calls))]

    def enqueue_sync(self, calls: Sequence[Call]) -> list[Handle[Any]]:
        """The same for code that does not await."""
        if (listed := dry_calls.get()) is not None:
            return self._only_listed(listed, calls)
        groups = self._groups(calls)
        if not any(tx is not None for tx, _ in groups):
            made: list[Handle[Any]] = self.wait(self.enqueue(calls))
            return made
        handles: list[Handle[Any] | None] = [None] * len(calls)
        for (tx, environment), indexes in groups.items():
            group = [calls[index] for index in indexes]
            if tx is None:
                handed: list[Handle[Any]] = self.wait(self.enqueue(group))
                ids = [handle.id for handle in handed]
            else:
                ids = self._in_tx_sync(group[0].options.tx, group)
            for index, id in zip(indexes, ids, strict=True):
                handles[index] = Handle(self, calls[index].task, environment, id)
        return [handle for handle in handles if handle is not None]

    def _only_listed(self, listed: list[Call], calls: Sequence[Call]) -> list[Handle[Any]]:
        """In a dry run: nothing is enqueued, and the handles are those of job 0, which does not exist."""
        listed += calls
        return [Handle(self, call.task, self._environment_of(call), 0) for call in calls]

    def _groups(self, calls: Sequence[Call]) -> dict[tuple[int | None, str], Sequence[int]]:
        """Which calls, by their indexes, go together: into which transaction, of which environment."""
        if isinstance(calls, CallBatch):
            return {self._goes_to(calls[0]): range(len(calls))}
        groups: dict[tuple[int | None, str], list[int]] = {}
        indexes: list[int] = []
        task = options = None
        for index, call in enumerate(calls):
            if call.task is not task or call.options is not options:  # many have both in common
                task, options = call.task, call.options
                indexes = groups.setdefault(self._goes_to(call), [])
            indexes.append(index)
        return dict(groups)

    def _goes_to(self, call: Call) -> tuple[int | None, str]:
        tx = call.options.tx
        return None if tx is None else id(tx), self._environment_of(call)

    def _environment_of(self, call: Call) -> str:
        """As the call says; else the first that its task's queue is served in."""
        served = call.task.environments
        return self.environment(call.options.env or (served[0] if served else None))

    def _say(self, sql: Dialect) -> EnqueueStatements:
        return EnqueueStatements.of(sql, self._schema, self._clock)

    async def _in_tx(self, tx: Any, calls: Sequence[Call]) -> list[int]:
        theirs = caller(tx)
        verb = add(self._say(theirs.sql), calls, wake=self._notify)
        with _explained():
            if theirs.awaited:
                return await drive_async(verb, theirs.run)
            return drive(verb, theirs.run)

    def _in_tx_sync(self, tx: Any, calls: Sequence[Call]) -> list[int]:
        theirs = caller(tx)
        if theirs.awaited:
            raise RowmillError(f"tx={tx!r} must be awaited", hint="await task.enqueue(..., tx=tx)")
        with _explained(), enqueued(self._events.tracer, calls) as traced:
            return drive(add(self._say(theirs.sql), traced, wake=self._notify), theirs.run)

    async def batch(self, calls: Sequence[Call], then: Call) -> Handle[Any]:
        """Jobs, and one that waits for all of them to end, in one transaction."""
        with enqueued(self._events.tracer, _all_calls([*calls, then])) as traced:
            return await self._flow(
                traced[-1], traced[:-1], lambda say: _batch(say, traced[-1], traced[:-1], self._notify)
            )

    async def chain(self, calls: Sequence[Call]) -> Handle[Any]:
        """Jobs of which each waits for the one before it to be done, in one transaction."""
        if not calls:
            raise WrongArguments(
                "a chain needs at least one call", hint="mill.chain(first.call(...), second.call(...))"
            )
        with enqueued(self._events.tracer, _all_calls(calls)) as traced:
            return await self._flow(traced[-1], traced[:-1], lambda say: _chain(say, traced, self._notify))

    async def _flow(
        self, last: Call, others: Sequence[Call], verb: Callable[[EnqueueStatements], Verb[int]]
    ) -> Handle[Any]:
        for call in (last, *others):
            if call.options.key is not None:
                raise WrongArguments("a call in a flow cannot have a key: an existing job cannot join the flow")
        if any(call.options.tx is not None or call.options.env is not None for call in others):
            raise WrongArguments("tx and env are for a flow as a whole", hint="give them to its last call")
        if (listed := dry_calls.get()) is not None:
            return self._only_listed(listed, [*others, last])[-1]
        environment, tx = self._environment_of(last), last.options.tx
        if tx is not None:
            theirs = caller(tx)
            made = verb(self._say(theirs.sql))
            with _explained():
                id = await drive_async(made, theirs.run) if theirs.awaited else drive(made, theirs.run)
        else:
            connection = await self.connection(environment)
            id = await connection.transact(verb(connection.say))
        return Handle(self, last.task, environment, id)

    # -- what became of it

    async def result(self, handle: Handle[Any], timeout: float | None) -> Any:
        """What a job returned, when it has."""
        connection = await self.connection(handle.environment)
        status = await connection.standing(handle.id, timeout)
        if status is not None and not status.over:
            async with asyncio.timeout(timeout):
                await connection.ended(handle.id)
            status = await connection.standing(handle.id, None)
        if status is None:
            raise TaskFailed(
                f"job {handle.id} of task {handle.task!r} was deleted after its retention time, with its result"
            )
        if status.state == "done":
            return status.result
        trace = status.history[-1].get("traceback") if status.history else None
        kind = TaskCanceled if status.state == "canceled" else TaskFailed
        raise kind(
            f"job {handle.id} of task {handle.task!r} is {status.state}: {status.error}",
            error=status.error,
            traceback=trace,
        )

    async def status(self, handle: Handle[Any]) -> Status | None:
        """How a job stands."""
        return await (await self.connection(handle.environment)).jobs.status(handle.id)

    async def cancel(self, handle: Handle[Any], reason: str) -> bool:
        """Cancel a job; one that waited for it goes on, or not, by what it needs."""
        connection = await self.connection(handle.environment)
        canceled, parent = await connection.jobs.cancel(handle.id, reason)
        if parent is not None:
            await flows.join(connection.database, connection.say, [parent])
        return canceled

    # -- for code that does not await

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the client's own loop, and wait for it."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._wait(work)
        work.close()
        raise RowmillError(
            "a blocking call inside a running event loop would block the loop",
            hint="await task.enqueue(...), or call it in a thread",
        )

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        with self._guard:
            if self._own is None or self._own.pid != os.getpid():  # a forked process has the loop, but not its thread
                self._own = _BackgroundLoop(os.getpid(), asyncio.new_event_loop())
                thread = threading.Thread(target=_serve, args=(self._own.loop,), name="rowmill-client", daemon=True)
                thread.start()
            own = self._own
            own.calls += 1
        try:
            return asyncio.run_coroutine_threadsafe(work, own.loop).result()
        finally:
            with self._guard:
                own.calls -= 1
                last = not own.calls and own is not self._own
            if last:
                _stop(own.loop, self)


@dataclass(eq=False)
class _BackgroundLoop:
    """The loop for code that does not await, and how many calls wait for something in it."""

    pid: int
    loop: asyncio.AbstractEventLoop
    calls: int = 0


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, client: Client) -> None:
    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(client.close_here(), loop).result(timeout=10)
    loop.call_soon_threadsafe(loop.stop)


def _all_calls(given: Sequence[Any]) -> Sequence[Call]:
    for call in given:
        if not isinstance(call, Call):
            raise WrongArguments(f"expected task.call(...), got {call!r}", hint="task.call(...)")
    return given


def _batch(say: EnqueueStatements, then: Call, calls: Sequence[Call], wake: bool) -> Verb[int]:
    last = yield from add(say, [then], wake=wake, place=FlowPosition(needs="all" if calls else None))
    yield from add(say, calls, wake=wake, place=FlowPosition(parent_id=last[0]))
    return last[0]


def _chain(say: EnqueueStatements, calls: Sequence[Call], wake: bool) -> Verb[int]:
    """From the last to the first: each is the child of the one behind it."""
    last = behind = None
    for number in range(len(calls) - 1, -1, -1):
        position = FlowPosition(parent_id=behind, needs="done" if number else None)
        (behind,) = yield from add(say, [calls[number]], wake=wake and not number, place=position)
        last = last or behind
    assert last is not None
    return last


@contextlib.contextmanager
def _explained() -> Any:
    """The caller's own transaction raises the caller's own errors; but that a table is missing is ours to explain."""
    try:
        yield
    except RowmillError:
        raise
    except Exception as error:
        if "rowmill_jobs" in str(error) and ("does not exist" in str(error) or "no such table" in str(error)):
            hint = "create it first: await mill.prepare(), or start a worker once"
            raise no_such_table("rowmill_jobs", " in the database of this transaction", (), hint=hint) from error
        raise
