"""What a gate's row allows, and what it learns from how runs ended: only arithmetic, on values.

The claim on PostgreSQL has the same rules in SQL; a test compares the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...declare.gates import Breaker, Group, Rate

#: The usual number of cells in a window. A cell that is partly over counts in full, so no window is ever exceeded.
_CELLS = 60
#: Seconds by which the refill of a full bucket starts later, because a run starts a moment after its row was
#: claimed. A bucket for a single token is full at every claim, so it loses at most this share of its time.
START_LAG, LAG_SHARE = 0.025, 0.02
#: A token is complete if it lacks less than this: seconds are binary fractions.
SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class GateState:
    """The state of a gate's row; times are seconds from the database's now, and past times are negative."""

    key: str = ""
    version: int = 0
    #: When the database read it, in seconds since 1970.
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
    #: Values from the user's own table: the rate in force (None: no limit there).
    listed: float | None = None


@dataclass(frozen=True, slots=True)
class Allowed:
    """How many more rows of a key may start. If none: what holds them back, and for how long (None: not by time)."""

    most: float
    why: str = ""
    wait: float | None = None


@dataclass(slots=True)
class Window:
    """What was used within the last ``seconds``, counted in cells, ``parts`` of them: never too little."""

    seconds: float
    cells: dict[int, float] = field(default_factory=dict)
    parts: int = _CELLS

    @property
    def cell(self) -> float:
        return self.seconds / self.parts

    @classmethod
    def read(cls, seconds: float, text: str | None, now: float, parts: int = _CELLS) -> Window:
        """Parse the text of a gate's row; ``now`` in seconds since 1970."""
        window = cls(seconds, parts=parts)
        first = math.floor(now / window.cell) - parts
        for cell, amount in json.loads(text or "{}").items():
            if int(cell) >= first:
                window.cells[int(cell)] = float(amount)
        return window

    @property
    def used(self) -> float:
        return sum(self.cells.values())

    def add(self, amount: float, now: float) -> None:
        """Record an amount as used now."""
        at = max(math.floor(now / self.cell), *self.cells, 0) if self.cells else math.floor(now / self.cell)
        self.cells[at] = self.cells.get(at, 0.0) + amount

    def note(self, amount: float, at: float) -> None:
        """Record an amount as used at that time, which may be to come."""
        cell = math.floor(at / self.cell)
        self.cells[cell] = self.cells.get(cell, 0.0) + amount

    def take_back(self, amount: float, at: float) -> None:
        """Reduce an amount that was recorded at that time, because less was used.

        If that time has left the window, do nothing: taking it from another cell would free the same room twice.
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
                return max((cell + self.parts + 1) * self.cell - now, 0.001)
        return math.inf

    def text(self) -> str:
        """The text for a gate's row."""
        return json.dumps({str(cell): round(amount, 9) for cell, amount in self.cells.items()})


def rate_in_force(rate: Rate, state: GateState) -> tuple[float, float] | None:
    """Tokens per second and the size of the bucket; None: no limit."""
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
    """The number of tokens in the bucket."""
    force = rate_in_force(rate, state)
    if force is None:
        return math.inf
    speed, size = force
    if state.tokens is None:
        return size
    return min(size, state.tokens + max(state.elapsed, 0.0) * speed)


def refill_delay(rate: Rate, state: GateState, late: float) -> float:
    """Seconds after the state was read until the bucket refills, if a run may start up to ``late`` seconds after that.

    When the run starts, the bucket must hold no more than its size. So tokens that would overflow until then are not
    refilled.
    """
    tokens, force = tokens_now(rate, state), rate_in_force(rate, state)
    if force is None or force[0] <= 0:
        return 0.0
    speed, size = force
    late += START_LAG if size >= 2 else min(START_LAG, LAG_SHARE / speed)
    return max((tokens - size) / speed + late, 0.0)


def allowance(group: Group, state: GateState, running: int, mine: int) -> Allowed:
    """How many rows a key's state allows; the strictest gate of the group decides."""
    candidates = [Allowed(math.inf), *allowances(group, state, running, mine)]
    return min(candidates, key=lambda allowed: (allowed.most, -(math.inf if allowed.wait is None else allowed.wait)))


def allowances(group: Group, state: GateState, running: int, mine: int) -> list[Allowed]:
    """The same for each gate."""
    allowed = []
    if (left := state.paused_for) is not None and left > 0:
        allowed.append(Allowed(0, "paused", None if left == math.inf else left))
    if (left := state.closed_for) is not None and left > 0:
        allowed.append(Allowed(0, "closed", left))
    if group.concurrency is not None:
        limit = state.most if state.most is not None else group.concurrency.limit
        allowed.append(Allowed(max(limit - running, 0), "concurrency"))
    if group.process is not None:
        allowed.append(Allowed(max(group.process.limit - mine, 0), "concurrency of this process"))
    if group.breaker is not None and state.streak >= group.breaker.failures:
        if state.open_for is not None and state.open_for > 0:
            allowed.append(Allowed(0, "breaker", state.open_for))
        else:
            allowed.append(Allowed(max(1 - running, 0), "breaker's probe"))
    if group.rate is not None:
        allowed.append(_rate_allows(group.rate, state))
    if group.pace is not None:
        window = Window.read(group.pace.seconds, state.cells, state.at)
        left = max(group.pace.n - math.ceil(window.used), 0)
        allowed.append(Allowed(left, "pace", window.wait(1, group.pace.n, state.at)))
    return allowed


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
    """How a run ended, as a gate sees it. ``word``: the class of a failure; empty for success, None: ignore it."""

    word: str | None
    seconds: float = 0.0
    cause: BaseException | None = None
    #: The remote side asked for a pause of this many seconds.
    closes: float | None = None


@dataclass(slots=True)
class Learned:
    """Values to write to a key's row; times as seconds from now."""

    values: dict[str, Any] = field(default_factory=dict)
    opened: bool = False
    shut: bool = False  # an open or probing breaker has closed


def learn(group: Group, state: GateState, ends: Iterable[Ended]) -> Learned:
    """Compute the new state of one key's row from the ends of some runs, in this order."""
    learned = Learned()
    for end in ends:
        if end.closes is not None:
            left = max(learned.values.get("closed_until", 0.0), end.closes)
            if left > (state.closed_for or 0.0):
                learned.values["closed_until"] = left
        if end.word is None:
            continue
        if group.breaker is not None:
            _learn_breaker(group.breaker, state, end, learned)
        if group.rate is not None and (adaptive := group.rate.adaptive) is not None:
            before = state.delay if state.delay is not None else adaptive.start
            delay = learned.values.get("delay", before)
            failed = bool(end.word)
            learned.values["delay"] = adaptive.after(delay, end.seconds, refused=end.word == "rate", failed=failed)
    if group.breaker is not None:
        # A breaker that opened and closed again within these runs has not changed.
        stands = learned.values.get("streak", state.streak) >= group.breaker.failures
        learned.opened = learned.opened and stands
        learned.shut = state.streak >= group.breaker.failures and not stands
    return learned


def _learn_breaker(breaker: Breaker, state: GateState, end: Ended, learned: Learned) -> None:
    streak = learned.values.get("streak", state.streak)
    if not end.word:
        learned.values |= {"streak": 0, "open_until": None, "last_success_at": 0.0}
        return
    if not breaker.counted(end.word, end.cause):
        return
    streak += 1
    learned.values |= {"streak": streak, "last_failure_at": 0.0}
    still_open = learned.values.get("open_until", state.open_for)
    # A run that fails while the gate is open started before it opened. It does not keep the gate open longer.
    if streak >= breaker.failures and not (still_open is not None and still_open > 0):
        learned.values["open_until"] = breaker.cooldown.total_seconds()
        learned.opened = True
