"""Gates: the limits that may hold a ready row back. A row that is held back is not claimed and costs nothing.

``Concurrency``, ``Rate`` and ``Breaker`` are declared on a lane, for all its rows or by a key (a column, or a SQL
expression over the row). All workers share their state, which is one row per key in ``rowmill_gates``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from ..errors import DeclarationError, did_you_mean

#: The classes of failures for a breaker.
CLASSES = ("transient", "permanent", "rate")


@dataclass(frozen=True)
class Concurrency:
    """At most ``limit`` rows running at once: of one key, or of the whole lane without ``by``.

    The limit is exact across all processes and hosts on the database; ``scope="process"`` limits each process
    separately. ``closes=True``: a refusal closes this gate (see ``closed_by_refusal``).
    """

    limit: int
    by: str | None = None
    scope: Literal["all", "process"] = "all"
    closes: bool = False

    def __post_init__(self) -> None:
        if not _whole(self.limit, 1):
            raise DeclarationError(f"Concurrency({self.limit!r}): the limit must be a whole number of at least 1")
        _check_by("Concurrency", self.by)
        if self.scope not in ("all", "process"):
            raise DeclarationError(
                f"Concurrency: scope={self.scope!r} is not valid",
                hint=did_you_mean(str(self.scope), ("all", "process")),
            )


@dataclass(frozen=True)
class FromTable:
    """A rate from a table of the user's own. Changes in the table apply without a restart."""

    table: str
    column: str
    key: str = "id"


@dataclass(frozen=True)
class Adaptive:
    """How an adaptive rate adjusts its delay, in seconds."""

    target: float
    start: float
    least: float
    most: float

    def after(self, delay: float, latency: float, *, refused: bool, failed: bool) -> float:
        """The next delay between starts. Errors increase it and never reduce it; a refusal at least doubles it."""
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

    All workers share one token bucket: any window has at most ``burst + n * window`` starts. ``burst=1`` spreads the
    starts evenly. ``closes=True``: a refusal closes this gate (see ``closed_by_refusal``).

    ``shared``: one rate over all environments of the Mill, held in this one (its name, or the URL of another database).
    Then any window of ``per`` has at most ``n`` starts in all of them together.
    """

    n: float
    per: timedelta = timedelta(minutes=1)
    by: str | None = None
    burst: int | None = None
    source: FromTable | None = None
    adaptive: Adaptive | None = None
    closes: bool = False
    #: Not in texts: a URL may contain a password.
    shared: str | None = field(default=None, repr=False)

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
        if self.shared is None:
            return
        check_shared("Rate", self.shared)
        if (self.by, self.burst, self.closes) != (None, None, False) or not _whole(self.n, 1):
            raise DeclarationError(
                "Rate: with shared= it is a whole number of starts of the whole lane, without by, burst and closes",
                hint='Rate(100, per=timedelta(seconds=1), shared="control")',
            )

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
        closes: bool = False,
    ) -> Rate:
        """``n`` is ``column`` of the row of ``table`` whose ``key`` is the gate's key. NULL, or no such row: no limit.

        ``Rate.from_table("sources", "rate_limit_per_minute", by="source_id")``
        """
        return cls(1, per, by, burst, source=FromTable(table, column, key), closes=closes)

    @classmethod
    def auto(
        cls,
        *,
        by: str,
        target: float = 1.0,
        start: timedelta = timedelta(seconds=1),
        least: timedelta = timedelta(0),
        most: timedelta = timedelta(seconds=60),
        closes: bool = False,
    ) -> Rate:
        """A rate that adapts to the remote side.

        The delay between two starts of a key follows the duration of its runs, so that about ``target`` of them run at
        once. Errors slow it down and never speed it up; refusals (429, 503) double the delay.
        """
        if not isinstance(target, (int, float)) or not target > 0:
            raise DeclarationError(f"Rate.auto: target={target!r} must be a number above 0")
        if not timedelta(0) <= least <= start <= most:
            raise DeclarationError("Rate.auto: least <= start <= most must hold for the delays")
        seconds = [delay.total_seconds() for delay in (start, least, most)]
        return cls(1, timedelta(seconds=1), by, 1, adaptive=Adaptive(target, *seconds), closes=closes)

    def capacity(self, n: float) -> float:
        """How many rows may start at once at the rate ``n``."""
        return float(self.burst if self.burst is not None else max(math.floor(n), 1))


@dataclass(frozen=True)
class BreakerColumns:
    """The columns of a user's table that store a breaker's state, in place of rowmill's table."""

    table: str
    key: str = "id"
    streak: str = "failure_streak"
    open_until: str = "paused_until"
    last_success_at: str | None = "last_success_at"
    last_failure_at: str | None = "last_failure_at"


@dataclass(frozen=True)
class Breaker:
    """Close the gate for ``cooldown`` after ``failures`` failed runs in a row.

    After that, one row at a time runs as a probe, until one succeeds. ``counts``: which failures count: classes
    (``"transient", "permanent", "rate"``), or a function of the exception. ``table``: keep the state in columns of that
    table (see ``columns``) instead of rowmill's own. ``closes=True``: a refusal closes this gate (see
    ``closed_by_refusal``).
    """

    failures: int
    cooldown: timedelta
    by: str | None = None
    counts: Sequence[str] | Callable[[BaseException], bool] = CLASSES
    table: str | None = None
    columns: BreakerColumns | Mapping[str, str | None] | None = None
    closes: bool = False

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
                    raise DeclarationError(
                        f"Breaker: counts={word!r} is not valid", hint=did_you_mean(str(word), CLASSES)
                    )
        if isinstance(self.columns, Mapping) or (self.columns is None and self.table is not None):
            given: dict[str, Any] = dict(self.columns or {})
            known = set(BreakerColumns.__dataclass_fields__)
            for name in given:
                if name not in known:
                    raise DeclarationError(f"Breaker: columns[{name!r}] is not valid", hint=did_you_mean(name, known))
            if self.table is not None:
                given["table"] = self.table
            if "table" not in given:
                raise DeclarationError("Breaker: columns= needs table=", hint='table="sources"')
            object.__setattr__(self, "columns", BreakerColumns(**given))
        if self.columns is not None and self.by is None:
            raise DeclarationError("Breaker: columns= needs by=, the key that finds the row of the table")

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
    """Gates of a lane with the same key: they share one row per key, and its lock."""

    label: str
    by: str | None
    concurrency: Concurrency | None = None
    process: Concurrency | None = None
    rate: Rate | None = None
    breaker: Breaker | None = None
    pace: Pace | None = None
    #: The position of the group among those of the lane, in declaration order.
    place: int = 0

    @property
    def closes(self) -> bool:
        """Whether one of its gates closes on refusals."""
        return any(
            gate is not None and gate.closes for gate in (self.concurrency, self.process, self.rate, self.breaker)
        )

    @property
    def counts_running(self) -> bool:
        """Whether it needs the number of running rows of a key."""
        return self.concurrency is not None or self.breaker is not None

    @property
    def only_limits(self) -> bool:
        """Whether it only counts running rows: such a group has no state of its own by key."""
        return self.rate is None and self.breaker is None and self.pace is None


def grouped(gates: Iterable[Gate], pace: Any, where: str) -> tuple[Group, ...]:
    """Group a lane's gates by key. A second gate of one kind on the same key starts another group."""
    groups: list[Group] = []

    def place(kind: str, by: str | None, gate: Any) -> None:
        same = [group for group in groups if group.by == by]
        free = next((group for group in same if getattr(group, kind) is None), None)
        if free is None:
            label = (by or "") + (f"#{len(same) + 1}" if same else "")
            free = Group(label, by, place=len(groups))
            groups.append(free)
        setattr(free, kind, gate)

    for gate in _listed(gates):
        match gate:
            case Rate(shared=str()):
                pass  # no gate of one database: see ``shared_rate``
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


def _listed(gates: Any) -> Iterable[Any]:
    return [gates] if isinstance(gates, (Concurrency, Rate, Breaker)) else gates


def shared_rate(gates: Any, where: str) -> Rate | None:
    """The lane's rate over all environments."""
    rates = [gate for gate in _listed(gates) if isinstance(gate, Rate) and gate.shared is not None]
    if len(rates) > 1:
        raise DeclarationError(
            f"{where}: there are two rates with shared=, and a lane may have one",
            hint='for the second, a budget: mill.budget("api", shared=..., calls=(5000, timedelta(hours=1)))',
        )
    return rates[0] if rates else None


def closed_by_refusal(groups: Sequence[Group], labels: Collection[str]) -> set[str]:
    """Return the groups that a refusal with a time (Retry-After) closes, of those in ``labels``, the row's keys.

    Gates with ``closes=True`` close. If there are none, one group closes: one by a key before the whole lane, one with
    a rate or a breaker before a limit alone, and the first declared of these. The whole lane closes only if none of its
    gates has a key.
    """
    known = [group for group in groups if group.label in labels]
    if asked := {group.label for group in known if group.closes}:
        return asked
    if any(group.by is not None for group in groups):
        known = [group for group in known if group.by is not None]
    known.sort(key=lambda group: (group.rate is None and group.breaker is None, group.place))
    return {group.label for group in known[:1]}


def _pace(given: Any, where: str) -> Pace:
    try:
        n, per = given
        seconds = per.total_seconds()
    except (TypeError, ValueError, AttributeError):
        n, seconds = 0, 0.0
    if not _whole(n, 1) or seconds <= 0:
        raise DeclarationError(
            f"{where}: pace={given!r} is not a number of starts and a period", hint="pace=(3, timedelta(seconds=5))"
        )
    return Pace(n, seconds)


def check_shared(kind: str, shared: Any) -> None:
    """Refuse what cannot name the database of a shared limit."""
    if not isinstance(shared, str) or not shared:
        raise DeclarationError(
            f"{kind}: shared={shared!r} must name the database that holds it",
            hint='an environment of the Mill, or a URL: shared="postgresql://app@db/control"',
        )


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_by(kind: str, by: Any) -> None:
    if by is not None and (not isinstance(by, str) or not by.strip()):
        raise DeclarationError(
            f"{kind}: by={by!r} must be a column or a SQL expression over the row", hint='by="domain"'
        )
