"""Gates: what may hold a ready row back. A row that is held back is not claimed and costs nothing.

``Concurrency``, ``Rate`` and ``Breaker`` are declared on a lane, for all its rows or by a key (a column, or a SQL
expression over the row). Their state is a row per key in ``rowmill_gates``, which all workers share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from .errors import DeclarationError, did_you_mean

#: What a failed run can be to a breaker.
CLASSES = ("transient", "permanent", "rate")
#: A window is counted in this many cells; one that is partly over still counts whole, so no window is ever exceeded.
_CELLS = 60
#: A full bucket begins to refill this much later: a run starts a moment after its row was taken. One of a single token
#: is full whenever it is taken from, and so loses no more than this share of its time.
START_LAG, LAG_SHARE = 0.025, 0.02
#: A token that lacks less than this is there: seconds are kept in binary fractions.
SLACK = 1e-6


@dataclass(frozen=True)
class Concurrency:
    """At most ``limit`` rows running at once: of one key, or of the whole lane without ``by``.

    Exact across all processes and hosts on the database; ``scope="process"`` limits each process by itself.
    """

    limit: int
    by: str | None = None
    scope: Literal["all", "process"] = "all"

    def __post_init__(self) -> None:
        if not _whole(self.limit, 1):
            raise DeclarationError(f"Concurrency({self.limit!r}): the limit must be a whole number of at least 1")
        _check_by("Concurrency", self.by)
        if self.scope not in ("all", "process"):
            raise DeclarationError(
                f"Concurrency: scope={self.scope!r}", hint=did_you_mean(str(self.scope), ("all", "process"))
            )


@dataclass(frozen=True)
class FromTable:
    """A rate that stands in a table of the user's own, and follows it without a restart."""

    table: str
    column: str
    key: str = "id"


@dataclass(frozen=True)
class Adaptive:
    """How an adaptive rate finds its delay; seconds."""

    target: float
    start: float
    least: float
    most: float

    def after(self, delay: float, latency: float, *, refused: bool, failed: bool) -> float:
        """The next delay between starts. Errors slow down, never speed up; a refusal at least doubles the delay."""
        wanted = latency / self.target
        following = max(wanted, (delay + wanted) / 2)
        if refused:
            following = max(following, 2 * delay, 0.1)
        elif failed:
            following = max(following, delay)
        return min(max(following, self.least), self.most)


@dataclass(frozen=True)
class Rate:
    """At most ``n`` starts ``per`` that time, of one key or of the whole lane; up to ``burst`` (default n) at once.

    A token bucket that all workers share: over any window never more than ``burst + n * window``.
    """

    n: float
    per: timedelta = timedelta(minutes=1)
    by: str | None = None
    burst: int | None = None
    source: FromTable | None = None
    adaptive: Adaptive | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.n, (int, float)) or isinstance(self.n, bool) or not 0 < self.n < math.inf:
            raise DeclarationError(f"Rate({self.n!r}): n must be a number above 0")
        if not isinstance(self.per, timedelta) or self.per <= timedelta(0):
            raise DeclarationError(
                f"Rate: per={self.per!r} is not a positive timedelta", hint="per=timedelta(seconds=1)"
            )
        if self.burst is not None and not _whole(self.burst, 1):
            raise DeclarationError(f"Rate: burst={self.burst!r} must be a whole number of at least 1")
        _check_by("Rate", self.by)

    @classmethod
    def from_table(
        cls,
        table: str,
        column: str,
        *,
        by: str,
        key: str = "id",
        per: timedelta = timedelta(minutes=1),
        burst: int | None = None,
    ) -> Rate:
        """``n`` is ``column`` of the row of ``table`` whose ``key`` is the gate's key. NULL, or no such row: no limit.

        ``Rate.from_table("sources", "rate_limit_per_minute", by="source_id")``
        """
        return cls(1, per, by, burst, source=FromTable(table, column, key))

    @classmethod
    def auto(
        cls,
        *,
        by: str,
        target: float = 1.0,
        start: timedelta = timedelta(seconds=1),
        least: timedelta = timedelta(0),
        most: timedelta = timedelta(seconds=60),
    ) -> Rate:
        """Politeness that adapts: the delay between two starts of a key follows how long its runs take, so that about
        ``target`` of them go on at once. Errors slow it down and never speed it up; refusals (429, 503) double it.
        """
        if not isinstance(target, (int, float)) or not target > 0:
            raise DeclarationError(f"Rate.auto: target={target!r} must be a number above 0")
        if not timedelta(0) <= least <= start <= most:
            raise DeclarationError("Rate.auto: least <= start <= most must hold for the delays")
        seconds = [delay.total_seconds() for delay in (start, least, most)]
        return cls(1, timedelta(seconds=1), by, 1, adaptive=Adaptive(target, *seconds))

    def capacity(self, n: float) -> float:
        """How many may start at once, where ``n`` is the rate in force."""
        return float(self.burst if self.burst is not None else max(math.floor(n), 1))


@dataclass(frozen=True)
class BreakerColumns:
    """Where a breaker keeps its state, if not in rowmill's table: columns of the user's own."""

    table: str
    key: str = "id"
    streak: str = "failure_streak"
    open_until: str = "paused_until"
    last_success_at: str | None = "last_success_at"
    last_failure_at: str | None = "last_failure_at"


@dataclass(frozen=True)
class Breaker:
    """After ``failures`` failed runs in a row the gate is shut for ``cooldown``; then one row at a time is let through
    as a probe, until one succeeds.

    ``counts``: which failures count: classes (``"transient", "permanent", "rate"``), or a function of the exception.
    ``table``: keep the state in columns of that table (see ``columns``) instead of rowmill's own.
    """

    failures: int
    cooldown: timedelta
    by: str | None = None
    counts: Sequence[str] | Callable[[BaseException], bool] = CLASSES
    table: str | None = None
    columns: BreakerColumns | Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        if not _whole(self.failures, 1):
            raise DeclarationError(f"Breaker({self.failures!r}): failures must be a whole number of at least 1")
        if not isinstance(self.cooldown, timedelta) or self.cooldown <= timedelta(0):
            raise DeclarationError(f"Breaker: cooldown={self.cooldown!r} is not a positive timedelta")
        _check_by("Breaker", self.by)
        if isinstance(self.counts, str):
            object.__setattr__(self, "counts", (self.counts,))
        if not callable(self.counts):
            for word in self.counts:
                if word not in CLASSES:
                    raise DeclarationError(f"Breaker: counts={word!r}", hint=did_you_mean(str(word), CLASSES))
        if isinstance(self.columns, Mapping) or (self.columns is None and self.table is not None):
            given: dict[str, Any] = dict(self.columns or {})
            known = set(BreakerColumns.__dataclass_fields__)
            for name in given:
                if name not in known:
                    raise DeclarationError(f"Breaker: columns[{name!r}]", hint=did_you_mean(name, known))
            if self.table is not None:
                given["table"] = self.table
            if "table" not in given:
                raise DeclarationError("Breaker: columns of which table?", hint='table="sources"')
            object.__setattr__(self, "columns", BreakerColumns(**given))
        if self.columns is not None and self.by is None:
            raise DeclarationError("Breaker: columns of the user's own need by=: which row is it about?")

    def counted(self, word: str, cause: BaseException | None) -> bool:
        """Whether a failed run counts."""
        if callable(self.counts):
            return bool(self.counts(cause if cause is not None else RuntimeError(word)))
        return word in self.counts


Gate = Concurrency | Rate | Breaker


@dataclass(frozen=True)
class Pace:
    """At most ``n`` starts within any ``seconds``, for the whole lane."""

    n: int
    seconds: float


@dataclass(eq=False)
class Group:
    """Gates of a lane that look at the same key: they share one row per key, and its lock."""

    label: str
    by: str | None
    concurrency: Concurrency | None = None
    process: Concurrency | None = None
    rate: Rate | None = None
    breaker: Breaker | None = None
    pace: Pace | None = None

    @property
    def counts_running(self) -> bool:
        """Whether it must know how many rows of a key are running."""
        return self.concurrency is not None or self.breaker is not None


def grouped(gates: Iterable[Gate], pace: Any, where: str) -> tuple[Group, ...]:
    """A lane's gates by what they look at; a second gate of one kind on one key makes a group of its own."""
    groups: list[Group] = []

    def place(kind: str, by: str | None, gate: Any) -> None:
        same = [group for group in groups if group.by == by]
        free = next((group for group in same if getattr(group, kind) is None), None)
        if free is None:
            label = (by or "") + (f"#{len(same) + 1}" if same else "")
            free = Group(label, by)
            groups.append(free)
        setattr(free, kind, gate)

    if isinstance(gates, (Concurrency, Rate, Breaker)):
        gates = [gates]
    for gate in gates:
        match gate:
            case Concurrency():
                place("process" if gate.scope == "process" else "concurrency", gate.by, gate)
            case Rate():
                place("rate", gate.by, gate)
            case Breaker():
                place("breaker", gate.by, gate)
            case _:
                raise DeclarationError(
                    f"{where}: {gate!r} is not a gate", hint='gates=[Concurrency(2, by="domain"), Rate(10, per=...)]'
                )
    if pace is not None:
        place("pace", None, _pace(pace, where))
    return tuple(sorted(groups, key=lambda group: group.label))


def _pace(given: Any, where: str) -> Pace:
    try:
        n, per = given
        seconds = per.total_seconds()
    except (TypeError, ValueError, AttributeError):
        n, seconds = 0, 0.0
    if not _whole(n, 1) or seconds <= 0:
        raise DeclarationError(
            f"{where}: pace={given!r} is not a number of starts and a time", hint="pace=(3, timedelta(seconds=5))"
        )
    return Pace(n, seconds)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_by(kind: str, by: Any) -> None:
    if by is not None and (not isinstance(by, str) or not by.strip()):
        raise DeclarationError(f"{kind}: by={by!r}: a column or a SQL expression over the row", hint='by="domain"')


# -- how a gate's row says what may go


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
