"""What a gate's row lets through, and what it learns from how runs ended: arithmetic alone, on values.

The claim on PostgreSQL says the same in SQL; a test holds the two against each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...declare.gates import Breaker, Group, Rate

#: A window is counted in this many cells; one that is partly over still counts whole, so no window is ever exceeded.
_CELLS = 60
#: A full bucket begins to refill this much later: a run starts a moment after its row was taken. One of a single token
#: is full whenever it is taken from, and so loses no more than this share of its time.
START_LAG, LAG_SHARE = 0.025, 0.02
#: A token that lacks less than this is there: seconds are kept in binary fractions.
SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class GateState:
    """A gate's row as it stands; its times as seconds from the database's now, past ones negative."""

    key: str = ""
    version: int = 0
    #: When it was read, by the database, in seconds since 1970.
    at: float = 0.0
    tokens: float | None = None
    #: Seconds since ``tokens`` was written.
    elapsed: float = 0.0
    delay: float | None = None
    streak: int = 0
    open_for: float | None = None
    closed_for: float | None = None
    paused_for: float | None = None
    reason: str | None = None
    most: int | None = None
    cells: str | None = None
    #: What the user's own table says: the rate in force (None: no limit there).
    listed: float | None = None


@dataclass(frozen=True, slots=True)
class Allowed:
    """How many more rows of a key may start; where none, what holds them back and for how long (None: not by time)."""

    most: float
    why: str = ""
    wait: float | None = None


@dataclass(slots=True)
class Window:
    """What was used within the last ``seconds``, counted in cells of a sixtieth: never too little."""

    seconds: float
    cells: dict[int, float] = field(default_factory=dict)

    @property
    def cell(self) -> float:
        return self.seconds / _CELLS

    @classmethod
    def read(cls, seconds: float, text: str | None, now: float) -> Window:
        """From a gate's row; ``now`` in seconds since 1970."""
        window = cls(seconds)
        first = math.floor(now / window.cell) - _CELLS
        for cell, amount in json.loads(text or "{}").items():
            if int(cell) >= first:
                window.cells[int(cell)] = float(amount)
        return window

    @property
    def used(self) -> float:
        return sum(self.cells.values())

    def add(self, amount: float, now: float) -> None:
        """Use some, now."""
        at = max(math.floor(now / self.cell), *self.cells, 0) if self.cells else math.floor(now / self.cell)
        self.cells[at] = self.cells.get(at, 0.0) + amount

    def take_back(self, amount: float, at: float) -> None:
        """Less was used at that time than was added then. Where it is out of the window already, nothing is left to
        take back: elsewhere it would make room for others twice.
        """
        cell = math.floor(at / self.cell)
        if cell in self.cells:
            self.cells[cell] = max(self.cells[cell] - amount, 0.0)

    def wait(self, amount: float, limit: float, now: float) -> float:
        """Seconds until ``amount`` more is within ``limit``."""
        over = self.used + amount - limit
        if over <= 1e-9:
            return 0.0
        for cell in sorted(self.cells):
            over -= self.cells[cell]
            if over <= 1e-9:
                return max((cell + _CELLS + 1) * self.cell - now, 0.001)
        return math.inf

    def text(self) -> str:
        """For a gate's row."""
        return json.dumps({str(cell): round(amount, 9) for cell, amount in self.cells.items()})


def rate_in_force(rate: Rate, state: GateState) -> tuple[float, float] | None:
    """Tokens per second and the bucket's size; None: no limit."""
    if rate.adaptive is not None:
        delay = state.delay if state.delay is not None else rate.adaptive.start
        return (1.0 / delay, 1.0) if delay > 0 else None
    if rate.source is not None:
        if state.listed is None:
            return None
        n = max(state.listed, 0.0)
        return n / rate.per.total_seconds(), rate.capacity(n) if n > 0 else 0.0
    return rate.n / rate.per.total_seconds(), rate.capacity(rate.n)


def tokens_now(rate: Rate, state: GateState) -> float:
    """How full the bucket is."""
    force = rate_in_force(rate, state)
    if force is None:
        return math.inf
    speed, size = force
    if state.tokens is None:
        return size
    return min(size, state.tokens + max(state.elapsed, 0.0) * speed)


def refill_delay(rate: Rate, state: GateState, late: float) -> float:
    """Seconds after the state was told from which on the bucket refills, where a run may start up to ``late`` after it.

    Counted from when the run starts the bucket must hold no more than its size: what would run over until then is not
    refilled.
    """
    tokens, force = tokens_now(rate, state), rate_in_force(rate, state)
    if force is None or force[0] <= 0:
        return 0.0
    speed, size = force
    late += START_LAG if size >= 2 else min(START_LAG, LAG_SHARE / speed)
    return max((tokens - size) / speed + late, 0.0)


def allowance(group: Group, state: GateState, running: int, mine: int) -> Allowed:
    """What a key's row lets through; the tightest gate of the group decides."""
    found = [Allowed(math.inf), *allowances(group, state, running, mine)]
    return min(found, key=lambda allowed: (allowed.most, -(math.inf if allowed.wait is None else allowed.wait)))


def allowances(group: Group, state: GateState, running: int, mine: int) -> list[Allowed]:
    """The same, gate by gate."""
    found = []
    if (left := state.paused_for) is not None and left > 0:
        found.append(Allowed(0, "paused", None if left == math.inf else left))
    if (left := state.closed_for) is not None and left > 0:
        found.append(Allowed(0, "closed", left))
    if group.concurrency is not None:
        limit = state.most if state.most is not None else group.concurrency.limit
        found.append(Allowed(max(limit - running, 0), "concurrency"))
    if group.process is not None:
        found.append(Allowed(max(group.process.limit - mine, 0), "concurrency of this process"))
    if group.breaker is not None and state.streak >= group.breaker.failures:
        if state.open_for is not None and state.open_for > 0:
            found.append(Allowed(0, "breaker", state.open_for))
        else:
            found.append(Allowed(max(1 - running, 0), "breaker's probe"))
    if group.rate is not None:
        found.append(_rate_allows(group.rate, state))
    if group.pace is not None:
        window = Window.read(group.pace.seconds, state.cells, state.at)
        left = max(group.pace.n - math.ceil(window.used), 0)
        found.append(Allowed(left, "pace", window.wait(1, group.pace.n, state.at)))
    return found


def _rate_allows(rate: Rate, state: GateState) -> Allowed:
    tokens = tokens_now(rate, state)
    if tokens >= 1 - SLACK:
        return Allowed(math.floor(tokens + SLACK) if tokens < math.inf else math.inf, "rate")
    force = rate_in_force(rate, state)
    assert force is not None
    put_off = max(-state.elapsed, 0.0)
    return Allowed(0, "rate", put_off + (1 - tokens) / force[0] if force[0] > 0 else None)


# -- what a gate learns from how runs ended


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended, as a gate sees it. ``word``: the class of a failure; empty for success, None: says nothing."""

    word: str | None
    seconds: float = 0.0
    cause: BaseException | None = None
    #: The other side asked to be left alone for so many seconds.
    closes: float | None = None


@dataclass(slots=True)
class Learned:
    """What is to be written to a key's row; times as seconds from now."""

    values: dict[str, Any] = field(default_factory=dict)
    opened: bool = False
    shut: bool = False  # a breaker that was open or probing is closed again


def learn(group: Group, state: GateState, ends: Iterable[Ended]) -> Learned:
    """What the ends of some runs of one key, in this order, make of its row."""
    found = Learned()
    for end in ends:
        if end.closes is not None:
            left = max(found.values.get("closed_until", 0.0), end.closes)
            if left > (state.closed_for or 0.0):
                found.values["closed_until"] = left
        if end.word is None:
            continue
        if group.breaker is not None:
            _learn_breaker(group.breaker, state, end, found)
        if group.rate is not None and (adaptive := group.rate.adaptive) is not None:
            before = state.delay if state.delay is not None else adaptive.start
            delay = found.values.get("delay", before)
            failed = bool(end.word)
            found.values["delay"] = adaptive.after(delay, end.seconds, refused=end.word == "rate", failed=failed)
    if group.breaker is not None:
        # One that opened and closed again within these has not turned.
        stands = found.values.get("streak", state.streak) >= group.breaker.failures
        found.opened = found.opened and stands
        found.shut = state.streak >= group.breaker.failures and not stands
    return found


def _learn_breaker(breaker: Breaker, state: GateState, end: Ended, found: Learned) -> None:
    streak = found.values.get("streak", state.streak)
    if not end.word:
        found.values |= {"streak": 0, "open_until": None, "last_success_at": 0.0}
        return
    if not breaker.counted(end.word, end.cause):
        return
    streak += 1
    found.values |= {"streak": streak, "last_failure_at": 0.0}
    still_open = found.values.get("open_until", state.open_for)
    # One that ends badly while the gate is open was under way before; it does not keep it open longer.
    if streak >= breaker.failures and not (still_open is not None and still_open > 0):
        found.values["open_until"] = breaker.cooldown.total_seconds()
        found.opened = True
