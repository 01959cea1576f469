"""A rate over several databases. One of them, the control database, holds its window; workers lease slices of it.

A slice is a number of starts that a worker may make within a short time, in whichever database. It counts as if all of
its starts were made at the last moment of that time, until the worker has told when they were made, or that they were
not. A worker that dies tells nothing: what it had left is lost for that window, and is never leased twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...clock import Clock
from ...declare.gates import Rate
from ..database import Database, Run
from ..own import schema
from .gate_rows import GateChange, GateRows
from .rules import Window

#: For how long a slice may be used: this part of the rate's period, at least and at most so many seconds.
_PART, _LEAST, _MOST = 0.5, 0.5, 10.0
#: A start counts for up to one cell too long.
_CELLS = 200


@dataclass(frozen=True, slots=True)
class Leased:
    """A slice. ``at``: when it was leased, in seconds since 1970 by the control database's clock."""

    count: int
    at: float
    #: Seconds until one more start may be had.
    wait: float


@dataclass(frozen=True, slots=True)
class Used:
    """What became of starts of a slice that counts until ``until``: made by ``started``; None: not made."""

    until: float
    count: int
    started: float | None


@dataclass(frozen=True, slots=True)
class SharedState:
    """How many starts of a shared rate count now, and the seconds until one more may be had."""

    used: float
    wait: float


class SharedWindow:
    """The window of one shared rate, a row of ``rowmill_gates`` in the control database."""

    def __init__(self, database: Database, clock: Clock, name: str, rate: Rate) -> None:
        self.database, self.name, self.rate = database, name, rate
        self.seconds = rate.per.total_seconds()
        #: Seconds for which a slice may be used.
        self.valid_for = min(max(self.seconds * _PART, _LEAST), _MOST)
        self._rows = GateRows.open(database, clock, "")
        self._spot = (f"rate:{name}", f"{self.seconds:g}")
        self._prepared = False

    async def lease(self, wanted: int, used: Sequence[Used]) -> Leased:
        """Lease a slice of up to so many starts, after telling what became of others."""
        if not self._prepared:
            await schema.need(self.database, schema.GATES)
            self._prepared = True
        return await self.database.transact(lambda run: self._lease(run, wanted, used))

    def _lease(self, run: Run, wanted: int, used: Sequence[Used]) -> Leased:
        # Locked until the commit: the next lease sees this one. The time may be that before a wait for the lock, which
        # only lets earlier starts count for longer.
        state = self._rows.lock(run, [self._spot], wait=True)[self._spot]
        now, window = state.at, Window.read(self.seconds, state.cells, state.at, _CELLS)
        for one in used:
            window.take_back(one.count, one.until)
            if one.started is not None:
                window.note(one.count, one.started)
        count = min(wanted, max(math.floor(self.rate.n - window.used + 1e-6), 0))
        if count:
            window.note(count, now + self.valid_for)
        if count or used:
            self._rows.write(run, [GateChange(*self._spot, {"cells": window.text()})])
        return Leased(count, now, window.wait(1, self.rate.n, now))

    async def state(self) -> SharedState:
        """What counts now."""
        if not (await schema.taken(self.database)).has(schema.GATES):
            return SharedState(0.0, 0.0)

        def verb(run: Run) -> SharedState:
            known, now = self._rows.read(run, [self._spot]), self._rows.epoch(run)
            window = Window.read(self.seconds, known[self._spot].cells if known else None, now, _CELLS)
            return SharedState(window.used, window.wait(1, self.rate.n, now))

        return await self.database.read(verb)
