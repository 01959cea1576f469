"""The scheduler: any worker enqueues the crons that are due. The first one does; each tick is enqueued once.

Crons are declared, or are rows of a user's own table of schedules. The table is read again before every tick, at every
wake-up and at every poll, so that a change takes effect within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from ..clock import Clock
from ..declare.cron import MOST, Cron
from ..declare.schedules import ScheduleRow, Schedules
from ..declare.task import Task
from ..errors import DatabaseError, DeclarationError, Refused, Unserved
from ..events import Events
from ..store import Database
from ..store.jobs.cron_ticks import Scheduled, Ticks
from ..store.jobs.schedule_rows import ScheduleTable
from .wake import jittered

_LONGEST, _AFTER_ERROR = 30.0, 5.0
#: Seconds between two reads of the schedules: without a wake-up, and at least, however many wake-ups there are.
_LOOK, _APART = 5.0, 1.0
#: The scheduler yields to the event loop after this many rows.
_TURN = 100


class Scheduler:
    """Enqueues the crons of one environment, in one worker.

    ``served``: the tasks whose schedules it enqueues; None: all.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        events: Events,
        tasks: Sequence[Task[Any, Any]],
        schedules: Sequence[Schedules] = (),
        environment: str = "default",
        served: Collection[str] | None = None,
    ) -> None:
        self._events, self._environment, self._served = events, environment, served
        self._crons = {task.name: Scheduled.of(task) for task in tasks if task.cron is not None}
        self._ticks = Ticks(database, clock)
        self._tables = [ScheduleTable(source, environment, database) for source in schedules]
        #: Reported problems, by the name of the cron or row.
        self._reported: dict[str, str] = {}
        #: Registered rows, by name, with their cron at that time.
        self._registered: dict[str, Cron] = {}
        #: The next tick of each cron, with the values that it was computed from.
        self._coming: dict[str, tuple[Cron, datetime, datetime | None]] = {}
        self._woken = asyncio.Event()
        #: The rows of the last read.
        self._read: list[tuple[ScheduleTable, list[ScheduleRow]]] = []

    @property
    def needed(self) -> bool:
        """Whether there is anything to schedule."""
        return bool(self._crons or self._tables)

    async def start(self) -> None:
        """Register new crons, which count from now on."""
        await self._ticks.register(list(self._crons.values()))

    def look(self) -> None:
        """Read the schedules again soon, because rows may have changed."""
        if self._tables:
            self._woken.set()

    async def run(self) -> None:
        """Enqueue due ticks, and sleep until the next one. Runs until cancelled."""
        while True:
            self._woken.clear()
            looked = time.monotonic()
            try:
                pause = await self.tick()
            except Exception as error:  # after any error, the next tick tries again
                level = logging.WARNING if isinstance(error, DatabaseError) else logging.ERROR
                self._events.emit("cron_failed", level, error=str(error))
                pause = jittered(_AFTER_ERROR)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()
                    await asyncio.sleep(max(looked + _APART - time.monotonic(), 0))

    async def tick(self) -> float:
        """Enqueue what is due now. Returns the seconds until the next tick."""
        rows = await self._rows()
        crons = {**self._crons, **rows}
        names = None if self._tables else list(crons)
        now, last = await self._ticks.now(names)
        new = [
            one
            for name, one in crons.items()
            if name not in last or (name in rows and self._registered.get(name) != one.cron)
        ]
        if new:  # or changed, or its last tick was deleted
            await self._ticks.register(new)
            self._registered.update({one.name: one.cron for one in new})
            now, last = await self._ticks.now(names)
        nearest = now.timestamp() + jittered(_LOOK if self._tables else _LONGEST)
        for number, (name, one) in enumerate(crons.items(), 1):
            if number % _TURN == 0:
                await asyncio.sleep(0)
            if name not in last:
                continue  # the row has changed since it was read
            try:
                nearest = min(nearest, await self._enqueue(name, one, last[name], now))
            except Refused as error:
                if isinstance(error, Unserved) or name not in rows:
                    raise
                self._report(f"{name}: tick", error.message, None, id=name)
        await self._forget(last, rows)
        return max(nearest - now.timestamp(), 0.0) + 0.001

    async def _enqueue(self, name: str, one: Scheduled, last: datetime, now: datetime) -> float:
        """Enqueue the due ticks of one cron. Returns when to check it again."""
        if self._next(name, one.cron, last) > now.timestamp():
            return self._next(name, one.cron, last)
        count = await self._ticks.enqueue(one, one.cron, last, now)
        if count:
            fields: dict[str, Any] = {} if name in self._crons else {"schedule": name}
            self._events.emit("cron_enqueued", task=one.task.name, count=count, **fields)
        if count >= MOST:
            return now.timestamp()  # there are more missed ticks to enqueue
        return self._next(name, one.cron, max(now, last))

    def _next(self, name: str, cron: Cron, moment: datetime) -> float:
        """The first tick after a moment; infinite if there is none."""
        known = self._coming.get(name)
        if known is None or known[:2] != (cron, moment):
            known = self._coming[name] = cron, moment, cron.next(moment)
        return known[2].timestamp() if known[2] is not None else float("inf")

    # -- rows

    async def _rows(self) -> dict[str, Scheduled]:
        """The enabled, valid rows for tasks that this worker serves. Reports the problems of the others."""
        usable: dict[str, Scheduled] = {}
        self._read = []
        for table in self._tables:
            try:
                rows = await table.read()
            except (DeclarationError, Refused) as error:
                self._report(str(table.source), error.message, error.hint, table=str(table.source))
                continue
            self._reported.pop(str(table.source), None)
            self._read.append((table, rows))
            for row in rows:
                if not row.enabled or row.problem is None:
                    self._reported.pop(row.name, None)
                if not row.enabled:
                    continue
                if row.problem is not None:
                    self._report(row.name, row.problem, row.hint, id=row.id)
                    continue
                assert row.cron is not None
                assert row.task is not None
                if self._served is None or row.task.name in self._served:
                    usable[row.name] = Scheduled(row.name, row.cron, row.task, row.args, *table.unchanged(row))
        return usable

    async def _forget(self, last: dict[str, datetime], rows: dict[str, Scheduled]) -> None:
        """Forget the last ticks of rows that are gone or disabled. If a row comes back, it counts from then on."""
        for table, there in self._read:
            on = {row.name for row in there if row.enabled}
            if gone := [name for name in last if name.startswith(table.prefix) and name not in on]:
                await self._ticks.forget(gone, table.on())
        known = {*self._crons, *rows}
        self._registered = {name: cron for name, cron in self._registered.items() if name in known}
        self._coming = {name: tick for name, tick in self._coming.items() if name in known}

    def _report(self, name: str, problem: str, hint: str | None, **fields: str) -> None:
        """Report a problem once, until it changes."""
        if self._reported.get(name) != problem:
            self._reported[name] = problem
            event = "schedule_refused" if "id" in fields else "schedules_failed"
            self._events.emit(
                event, logging.WARNING, environment=self._environment, schedule=name, error=problem,
                **({"hint": hint} if hint else {}), **fields,
            )  # fmt: skip
