"""A lane's rate over all environments, as one worker minds it: it leases slices, and starts runs only within one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import DatabaseError, RowmillError
from ..store import Database, probe
from ..store.gates.rules import START_LAG
from ..store.gates.shared_rate import SharedWindow, Used
from .execute import runs_in_loop

if TYPE_CHECKING:
    from .lane_state import LaneState
    from .slots import Slots
    from .worker import Worker

#: Seconds between two leases of a rate that is used up: this part of its period, at least and at most.
_PART, _SOONEST, _LATEST = 0.05, 0.02, 1.0
_LONGEST = 5.0  # seconds for which nothing is asked, because others may give back what they lease
_MARGIN = 2 * START_LAG  # seconds by which the use of a slice ends early: a run starts a moment after it was allowed to
_DOWN_AGAIN = (0.5, 10.0)  # backoff in seconds, first and longest, when the control database does not answer
_CLOCKS, _CLOCK = 16, 5.0  # comparisons of the two clocks that are kept, and seconds for which they hold
_CLOCK_ERROR = 0.005  # seconds by which they may drift apart in that time; SQLite's clock tells milliseconds
_GIVE_BACK = 0.5  # seconds for which claimed rows may wait for another slice
_LAST = 2.0  # seconds for the last word to the control database


class ControlDatabases:
    """The databases that hold shared rates and budgets, with one connection each, opened when first used."""

    def __init__(self, open_one: Callable[[str], Database]) -> None:
        self._open, self._databases = open_one, dict[str, Database]()

    def get(self, shared: str) -> Database:
        """The one that ``shared=`` names."""
        if shared not in self._databases:
            self._databases[shared] = self._open(shared)
        return self._databases[shared]

    async def close(self) -> None:
        """Close their connections."""
        for database in self._databases.values():
            await database.close()


@dataclass(eq=False, slots=True)
class _Slice:
    """Starts that may be made until ``ends`` (monotonic), and count until they were told, as if made at ``until``."""

    left: int
    ends: float
    until: float


class SharedRate:
    """One shared rate in this worker. ``serve`` is called in every round; nothing here waits for the control database.

    Rows are claimed for the starts at hand. A row whose slice is over before it starts waits for the next one.
    """

    def __init__(self, worker: Worker, slots: Slots, window: SharedWindow) -> None:
        self._worker, self._slots, self._window = worker, slots, window
        rate = window.rate
        self._every = min(max(window.seconds * _PART, _SOONEST), _LATEST)
        #: The most starts at hand: what the whole rate allows in two of these intervals.
        self._most = max(math.ceil(rate.n * 2 * self._every / window.seconds), 1)
        self._slices: deque[_Slice] = deque()
        #: Slices with starts left whose time is over; starts made just now; and others, with the time by which.
        self._over: list[_Slice] = []
        self._starting: Counter[_Slice] = Counter()
        self._started: list[tuple[_Slice, int, float]] = []
        #: Lanes that are known to have a row that waits for this rate.
        self._waiting: set[LaneState] = set()
        #: How many rows are being claimed now.
        self.claiming = 0
        self._again_at = self._tell_at = 0.0
        #: By how much the control database's clock was ahead of this process's at most, as the last leases show: each
        #: was made after it was sent. The smallest is the nearest to the truth.
        self._ahead: deque[tuple[float, float]] = deque(maxlen=_CLOCKS)
        plain = all(runs_in_loop(handler) for handler in slots.lane.handlers) and slots.lane.isolation == "auto"
        #: Seconds by which a run may start later than it seems here: in a thread, in another process, after a resource.
        self._lag = _CLOCK_ERROR if plain and not slots.lane.resources() else START_LAG
        self._failures = 0
        self._used_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    # -- starts at hand

    @property
    def at_hand(self) -> int:
        """How many runs may start now."""
        now = time.monotonic()
        while self._slices and (self._slices[0].ends <= now or not self._slices[0].left):
            self._over.append(self._slices.popleft())
        return sum(one.left for one in self._slices)

    @property
    def free(self) -> int:
        """How many more rows may be claimed."""
        return max(self.at_hand - self._slots.buffered - self.claiming, 0)

    def start(self) -> None:
        """A run starts now; ``at_hand`` was asked before, without a pause in between."""
        one = self._slices[0]
        one.left -= 1
        if not self._starting:
            # Called when the run has come to its first pause: by then it has started.
            asyncio.get_running_loop().call_soon(self._have_started)
        self._starting[one] += 1
        self._used_at = time.monotonic()

    def _have_started(self) -> None:
        now = time.monotonic()
        self._started += [(one, count, now) for one, count in self._starting.items()]
        self._starting.clear()

    # -- rows that wait

    async def look(self, lane_state: LaneState) -> bool:
        """Whether this lane, for which no start is at hand, has a ready row; then a slice is leased."""
        if lane_state not in self._waiting:
            database = lane_state.environment.database
            self.note(lane_state, more=bool(await probe(database, [lane_state.store])))
        return lane_state in self._waiting

    def note(self, lane_state: LaneState, *, more: bool) -> None:
        """What a claim or a look has shown."""
        (self._waiting.add if more else self._waiting.discard)(lane_state)

    def _needed(self, now: float) -> int:
        """How many starts there is a use for."""
        for one in list(self._waiting):
            environment = one.environment
            if one not in environment.lane_states or not environment.reachable or one.paused_until > now:
                self._waiting.discard(one)
        room = self._slots.room() if self._waiting and not self._worker.stopping else 0
        return self._slots.buffered + max(room, self.claiming, 0)

    # -- leases

    def serve(self, now: float) -> None:
        """Begin to lease a slice, or to tell what became of others, where it is time for that."""
        waiting, here = self._slots.buffered, self.at_hand
        if waiting > here and self._again_at - now > _GIVE_BACK:
            self._worker.shutdown.give_back(self._slots)
        if self._task is None and now >= self._next_time(now):
            wanted = self._wanted(now)
            self._task = asyncio.create_task(self._lease(wanted))

    def _wanted(self, now: float) -> int:
        here = self.at_hand
        return max(min(self._needed(now), self._most) - here, 0) if here <= self._most // 2 else 0

    def _next_time(self, now: float) -> float:
        if self._wanted(now):
            return self._again_at
        idle = self.at_hand and not self._needed(now)
        tell = min(self._used_at + self._every if idle else math.inf, self._tell_at if self._untold else math.inf)
        return max(tell, self._again_at)

    @property
    def _untold(self) -> bool:
        return bool(self._started or self._over)

    def next_time(self, now: float) -> float:
        """When to call ``serve`` next; it wakes the worker when a lease was answered."""
        if self._task is not None:
            return math.inf
        ends = self._slices[0].ends if self._slices and self._slots.buffered else math.inf
        return min(self._next_time(now), ends)

    async def _lease(self, wanted: int) -> None:
        used, sent = self._account(all_of_it=not self._needed(time.monotonic())), time.monotonic()
        try:
            leased = await self._window.lease(wanted, used)
            if leased.count:
                until = leased.at + self._window.valid_for
                ends = sent + self._window.valid_for - _MARGIN
                self._slices.append(_Slice(leased.count, ends, until))
                self._used_at, self._tell_at = time.monotonic(), ends
            self._ahead.append((sent, leased.at - sent))
            self._answered()
            if leased.count < wanted:  # it is used up: not all ask again at the same moment
                soonest = sent + self._every * random.uniform(0.7, 1.3)
                self._again_at = max(soonest, sent + min(leased.wait, _LONGEST))
        except (DatabaseError, RowmillError) as error:
            self._not_answered(error)
        except Exception as error:
            self._worker.fail(error)
        finally:
            self._task = None
            self._worker.wake()

    def _account(self, *, all_of_it: bool) -> list[Used]:
        """What is to be told, once: if no answer comes, it counts as told, and what was not told counts as used."""
        recent = [ahead for sent, ahead in self._ahead if sent > time.monotonic() - _CLOCK]
        ahead = min(recent or [ahead for _, ahead in self._ahead], default=0.0) + self._lag
        used = [Used(one.until, count, by + ahead) for one, count, by in self._started]
        self._started = []
        if all_of_it:
            self._over += self._slices
            self._slices.clear()
        used += [Used(one.until, one.left, None) for one in self._over if one.left]
        self._over = []
        return used

    def _answered(self) -> None:
        if self._failures:
            self._emit("shared_rate_back", logging.INFO)
        self._failures = 0

    def _not_answered(self, error: RowmillError) -> None:
        """The control database is away: nothing is claimed for this lane until it answers. It is said once."""
        pause = min(_DOWN_AGAIN[0] * 2.0**self._failures, _DOWN_AGAIN[1]) * random.uniform(0.7, 1.3)
        self._again_at = time.monotonic() + pause
        if not self._failures:
            hint = "nothing is claimed for this lane until the database that holds its rate answers; others go on"
            self._emit("shared_rate_down", logging.ERROR, error=error.message, hint=hint)
        self._failures = min(self._failures + 1, 10)

    def _emit(self, name: str, level: int, **fields: str) -> None:
        self._worker.events.emit(name, level, worker=self._worker.id, lane=self._slots.lane.name, **fields)

    async def close(self) -> None:
        """Tell what became of all slices."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._have_started()
        if used := self._account(all_of_it=True):
            with contextlib.suppress(RowmillError, TimeoutError):
                async with asyncio.timeout(_LAST):
                    await self._window.lease(0, used)
