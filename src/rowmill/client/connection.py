"""One environment as one event loop uses it: to add jobs and to await their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TypeVar

from ..clock import Clock
from ..declare.call import Call, Status
from ..engine.wake import AWAIT, DONE, WakeUp, listen
from ..errors import Busy, RowmillError, Unreachable
from ..store import Database
from ..store.caller_transactions import Verb, drive
from ..store.jobs.bulk_copy import copies, copy
from ..store.jobs.enqueue import CHANNEL, EnqueueStatements, add, add_one, one_statement, simple
from ..store.jobs.job_rows import Jobs
from ..store.own import schema

T = TypeVar("T")
_POLL = (0.2, 2.0)  # how soon, and how late at most, a result is looked for without a word that it is there
_ANNOUNCE_EVERY = 10.0
_OUTAGE = 60.0  # how long those who await results are not told that the database is away


class EnvironmentConnection:
    """One environment as one event loop uses it."""

    def __init__(self, name: str, database: Database, clock: Clock) -> None:
        self.name, self.database, self.clock = name, database, clock
        self.statements, self.jobs = EnqueueStatements.to(database, clock), Jobs(database, clock)
        self._direct = database.client_pool()
        self._ready = False
        self._lock = asyncio.Lock()
        self._awaited: dict[int, list[asyncio.Future[None]]] = {}
        self._waiting: asyncio.Task[None] | None = None

    async def open(self) -> EnvironmentConnection:
        """With the tables there."""
        if not self._ready:
            async with self._lock:
                if not self._ready:
                    await schema.need(self.database, schema.JOBS, schema.FLOWS, schema.CRONS)
                    self._ready = True
        return self

    async def add(self, calls: Sequence[Call], wake: bool) -> list[int]:
        """Jobs in a transaction of their own: by COPY where they are many, else in as few statements as may be."""
        if self._direct is not None:
            if copies(calls):
                return await copy(self._direct, self.database, self.clock, calls, wake)
            if len(calls) == 1 and simple(calls[0]):
                return [await add_one(self._direct, self.statements, calls[0], wake)]
        verb = add(self.statements, calls, wake=wake)
        if self.statements.sql.one_writer or one_statement(calls):
            return await self.database.write(lambda run: drive(verb, self.statements.sql.named(run)))
        return await self.transact(verb)

    async def transact(self, verb: Verb[T]) -> T:
        """A verb in one transaction."""
        return await self.database.long_transaction(lambda run: drive(verb, self.statements.sql.named(run)))

    # -- results

    async def standing(self, id: int, timeout: float | None) -> Status | None:
        """How a job stands, through a restart of the database."""
        until = time.monotonic() + min(_OUTAGE, _OUTAGE if timeout is None else timeout)
        while True:
            try:
                return await self.jobs.status(id)
            except (Unreachable, Busy):
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(_POLL[0])

    async def ended(self, id: int) -> None:
        """Until a job is over, or no longer there."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(id, []).append(waiter)
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._watch())
        try:
            await waiter
        finally:
            waiters = self._awaited.get(id, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._awaited.pop(id, None)

    async def _watch(self) -> None:
        """One look for all that is awaited here: when a word comes that something is done, and now and then."""
        wake_up = WakeUp()
        listening = asyncio.create_task(listen(self.database, wake_up.wake, DONE))
        notify = self.database.sql.notify
        announced, pause, seen = 0.0, _POLL[0], time.monotonic()
        try:
            while self._awaited:
                known = len(self._awaited)
                try:
                    if notify is not None and time.monotonic() - announced > _ANNOUNCE_EVERY:
                        announced = time.monotonic()
                        await self.database.write(lambda run: run(notify, (CHANNEL, AWAIT)))
                    over = await self.jobs.over(self._awaited)
                    seen = time.monotonic()
                except (Unreachable, Busy):
                    # A restart of the database is no end of the job. What lasts longer is told to those who wait.
                    if time.monotonic() - seen > _OUTAGE:
                        raise
                    over, announced = set(), 0.0
                for id in over:
                    for waiter in self._awaited.pop(id, []):
                        if not waiter.done():
                            waiter.set_result(None)
                    pause = _POLL[0]
                pause = _POLL[0] if len(self._awaited) > known else min(pause * 1.5, _POLL[1])
                if self._awaited:
                    await wake_up.wait(pause)
        except Exception as error:
            for waiters in self._awaited.values():
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_exception(error)
            self._awaited.clear()
        finally:
            self._waiting = None  # before anything is awaited: who comes now begins another watch
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def close(self) -> None:
        """Let go of all connections."""
        if (waiting := self._waiting) is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        for waiter in [waiter for waiters in self._awaited.values() for waiter in waiters if not waiter.done()]:
            waiter.set_exception(RowmillError("the Mill was closed while a caller waited for this result"))
        if self._direct is not None:
            await self._direct.close()
        await self.database.close()
