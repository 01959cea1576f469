"""``rowmill_minutes``: what each lane did in each minute. Written by workers, a few seconds' counts at once; read for
charts, for the rates on the edges of the state diagram, and for the forecast of when a backlog is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...clock import Clock
from ..database import Database, Run
from . import schema

#: Outcomes that are counted, in the order of the columns.
COUNTS = ("started", "done", "retried", "dead", "snoozed", "canceled", "lost", "swept", "stale")
#: Upper ends of the run times that are told apart, in seconds; the last column takes what is longer.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
#: The columns of the run times' histogram.
TIMES = tuple(f"t{n}" for n in range(len(BOUNDS) + 1))
#: Every number of a row; ``run_us`` is the sum of the run times in microseconds.
NUMBERS = (*COUNTS, "run_us", *TIMES)
#: Days that minutes are kept.
KEPT = 8
#: Minutes over which a rate is told.
RECENT = 5
#: The step that a column came with, where it came later than the table.
_STEPS = {"stale": schema.INPUTS}
#: Points of a chart at most: longer times have more minutes in each.
_POINTS = 72


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane did in some minutes, from ``start`` (seconds since 1970) on."""

    start: int
    seconds: float
    numbers: Mapping[str, int]

    def __getitem__(self, name: str) -> int:
        return self.numbers.get(name, 0)

    @property
    def runs(self) -> int:
        """Runs that ended, one way or another."""
        return sum(self[name] for name in TIMES)

    @property
    def mean(self) -> float | None:
        """Of the run times, in seconds."""
        return self["run_us"] / 1e6 / self.runs if self.runs else None

    def quantile(self, share: float) -> float | None:
        """The run time that this share of the runs did not exceed: inside its step of the histogram, by proportion."""
        left, low = share * self.runs, 0.0
        for name, high in zip(TIMES, (*BOUNDS, BOUNDS[-1]), strict=True):
            count = self[name]
            if count and left <= count:
                return low + (high - low) * left / count
            left, low = left - count, high
        return None if not self.runs else BOUNDS[-1]

    def rate(self, *names: str) -> float:
        """How many a minute."""
        return max(sum(self[name] for name in names), 0) / max(self.seconds, 1.0) * 60.0

    def value(self) -> dict[str, Any]:
        """As plain values."""
        times = {"mean_seconds": self.mean, "p50_seconds": self.quantile(0.5), "p95_seconds": self.quantile(0.95)}
        return {
            "start": self.start,
            "seconds": round(self.seconds, 1),
            **{name: max(self[name], 0) for name in COUNTS},
            **{name: None if seconds is None else round(seconds, 4) for name, seconds in times.items()},
        }


@dataclass(frozen=True, slots=True)
class History:
    """A lane's last hours, in equal steps, and its last minutes together."""

    spans: tuple[Span, ...]
    recent: Span

    def value(self) -> dict[str, Any]:
        """As plain values."""
        rates = {name: round(self.recent.rate(name), 2) for name in COUNTS}
        return {"per_minute": rates, "recent": self.recent.value(), "spans": [span.value() for span in self.spans]}


class Minutes:
    """The minutes of one environment."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database, self.clock = database, clock
        self.sql = database.sql
        self.table = database.own("rowmill_minutes")
        self._names: tuple[str, ...] | None = None

    async def exists(self) -> bool:
        """Whether the table is there."""
        return (await schema.taken(self.database)).has(schema.MINUTES)

    async def _numbers(self) -> tuple[str, ...]:
        """The columns that are there: a role that may not change tables counts without the newer ones."""
        if self._names is None:
            own = await schema.taken(self.database)
            self._names = tuple(name for name in NUMBERS if name not in _STEPS or own.has(_STEPS[name]))
        return self._names

    def _epoch(self) -> str:
        shift = self.clock.shift.total_seconds()
        return f"({self.sql.epoch} + {shift})" if shift else f"({self.sql.epoch})"

    async def add(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add what lanes did to the present minute: one statement for all of them, in the order of their names."""
        minute, names = self.sql.whole(f"{self._epoch()} / 60"), await self._numbers()
        lines, given = [], []
        for lane in sorted(counts):
            given.append(lane)
            mark = self.sql.mark(len(given))
            numbers = ", ".join(str(int(counts[lane].get(name, 0))) for name in names)
            lines.append(f"({mark}, {minute}, {numbers})")
        if not lines:
            return
        sums = ", ".join(f"{name} = m.{name} + excluded.{name}" for name in names)
        text = f"""insert into {self.table} as m (lane, minute, {", ".join(names)})
values {", ".join(lines)}
on conflict (lane, minute) do update set {sums}"""
        await self.database.write(lambda run: run(text, tuple(given)))

    async def prune(self) -> None:
        """Drop what is older than is kept."""
        oldest = f"{self._epoch()} / 60 - {KEPT * 1440}"
        await self.database.write(lambda run: run(f"delete from {self.table} where minute < {oldest}", ()))

    async def history(self, lanes: Sequence[str], hours: float = 1.0) -> dict[str, History]:
        """The last hours of these lanes."""
        minutes = max(int(hours * 60), RECENT + 1)
        step, names = max(-(-minutes // _POINTS), 1), await self._numbers()

        def verb(run: Run) -> dict[str, History]:
            now = float(run(f"select {self._epoch()}", ())[0][0])
            last = int(now // 60)
            first = (last - minutes) // step * step + step
            marks = ", ".join(self.sql.marks(len(lanes)))
            sums = ", ".join(f"sum({name})" for name in names)
            # Of the newest minutes each by itself, of the others by step: a week is no more to send than an hour.
            bucket = f"case when minute >= {last - RECENT} then minute else minute / {step} * {step} end"
            text = f"""select lane, {bucket} as b, {sums} from {self.table}
where lane in ({marks}) and minute between {min(first, last - RECENT)} and {last} group by 1, 2 order by 1, 2"""
            by_lane: dict[str, dict[int, dict[str, int]]] = {lane: {} for lane in lanes}
            for row in run(text, tuple(lanes)) if lanes else ():
                by_lane[row[0]][int(row[1])] = {name: int(n) for name, n in zip(names, row[2:], strict=True)}
            return {lane: _history(rows, first, last, step, now) for lane, rows in by_lane.items()}

        return await self.database.read(verb)


def _history(rows: Mapping[int, Mapping[str, int]], first: int, last: int, step: int, now: float) -> History:
    spans = []
    for start in range(first, last + 1, step):
        inside = [numbers for minute, numbers in rows.items() if start <= minute < start + step]
        spans.append(Span(start * 60, min(step * 60.0, now - start * 60), _sum(inside)))
    # A lane that began two minutes ago has a rate over two minutes.
    known = [minute for minute in rows if minute >= last - RECENT]
    since = min(known, default=last - RECENT)
    if any(minute < last - RECENT for minute in rows):
        since = last - RECENT
    return History(tuple(spans), Span(since * 60, now - since * 60, _sum([rows[minute] for minute in known])))


def _sum(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: total for name in NUMBERS if (total := sum(part[name] for part in parts))}
