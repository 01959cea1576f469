"""The rules of ``rules`` as SQL over a gate's row, for single-statement claims and functions on PostgreSQL.

The alias of the gate's row is ``_g``, so it does not clash with the user's columns. Tests compare the two versions.
"""

from __future__ import annotations

import math

from .gate_binding import BoundGates
from .rules import LAG_SHARE, SLACK, START_LAG

_NO_LIMIT = "'infinity'::float8"
#: The columns of a gate's row that the rules read.
STATE = ("tokens", "refilled_at", "delay", "streak", "open_until", "closed_until", "paused_until", "most")


class RulesSql:
    """The rules of one group of gates. ``now`` is SQL for the time."""

    def __init__(self, dim: BoundGates, now: str) -> None:
        self.dim, self.group, self.now = dim, dim.group, now

    @property
    def most(self) -> float:
        """The most rows of a key that may run, or start at once; infinite without a limit."""
        group, rate = self.group, self.group.rate
        limits = [float(gate.limit) for gate in (group.concurrency, group.process) if gate is not None]
        if rate is not None and rate.adaptive is not None:
            limits.append(1.0)
        elif rate is not None and rate.source is None:
            limits.append(math.ceil(rate.capacity(rate.n)))
        return min(limits, default=math.inf)

    def free(self, running: str, mine: str) -> str:
        """How many more rows of a key may start, if ``running`` run, ``mine`` of them in this process."""
        group, parts = self.group, []
        if group.concurrency is not None:
            parts.append(f"coalesce(_g.most, {group.concurrency.limit}) - {running}")
        if group.process is not None:
            parts.append(f"{group.process.limit} - {mine}")
        if group.breaker is not None:
            streak, opened = self._breaker()
            probe = f"case when {streak} < {group.breaker.failures} then {_NO_LIMIT}"
            parts.append(f"{probe} when {opened} then 0 else 1 - {running} end")
        if group.rate is not None:
            parts.append(f"floor(_t.tokens + {SLACK})")
        return f"least({', '.join(parts)})" if len(parts) > 1 else parts[0]

    def open(self) -> str:
        """The condition for keys that are neither paused nor closed."""
        return f"coalesce(_g.paused_until <= {self.now}, true) and coalesce(_g.closed_until <= {self.now}, true)"

    def _breaker(self) -> tuple[str, str]:
        """The streak, and whether the breaker is open, as SQL."""
        if self.dim.breaker is None:
            return "coalesce(_g.streak, 0)", f"_g.open_until > {self.now}"
        own, names = self.dim.breaker, self.dim.columns
        streak = f"coalesce({own.value(names.streak, '_g.key')}, 0)"
        opened = f"(select {own.until(names.open_until)} from {own.table} where {own.of('_g.key')})"
        return streak, f"coalesce({opened}, 0) > 0"

    def _speed(self) -> tuple[str, str]:
        """Tokens per second and the size of the bucket; the first is NULL if there is no limit."""
        rate = self.group.rate
        assert rate is not None
        if rate.adaptive is not None:
            return f"1 / nullif(coalesce(_g.delay, {rate.adaptive.start}), 0)", "1.0::float8"
        per = rate.per.total_seconds()
        if rate.source is None:
            return f"{rate.n / per!r}::float8", f"{rate.capacity(rate.n)!r}::float8"
        size = f"{rate.burst}.0" if rate.burst is not None else "greatest(floor(_f.listed), 1.0)"
        speed = f"case when _f.listed > 0 then _f.listed / {per!r} when _f.listed <= 0 then 0.0 end"
        return speed, f"case when _f.listed > 0 then {size} else 0.0 end"

    def tokens(self) -> str:
        """Joins that provide ``_s.speed``, ``_s.size`` and ``_t.tokens``; empty without a rate."""
        if self.group.rate is None:
            return ""
        speed, size = self._speed()
        listed = ""
        if (source := self.group.rate.source) is not None:
            assert self.dim.rate is not None
            value = self.dim.rate.value(source.column, "_g.key")
            listed = f"\n  cross join lateral (select {value}::float8 as listed) _f"
        return f"""{listed}
  cross join lateral (select {speed} as speed, {size} as size) _s
  cross join lateral (select case when _s.speed is null then {_NO_LIMIT} else least(_s.size, coalesce(
    _g.tokens + greatest(extract(epoch from {self.now} - _g.refilled_at), 0)::float8 * _s.speed,
    _s.size)) end as tokens) _t"""

    def refill_delay(self) -> str:
        """The same as ``rules.refill_delay``, over the claimed rows. It is evaluated at the write, so never before a
        row's claimed_at.
        """
        late = f"extract(epoch from {self.now.replace('now()', 'clock_timestamp()')} - {self.now})::float8"
        lag = f"case when _size >= 2 then {START_LAG} else least({START_LAG}, {LAG_SHARE} / nullif(_speed, 0)) end"
        delay = f"greatest(min((_tokens - _size) / nullif(_speed, 0) + {late} + {lag}), 0) * interval '1 second'"
        return f"case when min(_speed) > 0 then {delay} else '0' end"

    def wait(self) -> str:
        """Seconds until a key may continue, as far as that depends on time."""
        waits = [f"extract(epoch from _g.{name} - {self.now})" for name in ("paused_until", "closed_until")]
        if self.group.breaker is not None and self.dim.breaker is None:
            waits.append(f"extract(epoch from _g.open_until - {self.now})")
        elif self.group.breaker is not None and (own := self.dim.breaker) is not None:
            names = self.dim.columns
            waits.append(f"(select {own.until(names.open_until)} from {own.table} where {own.of('_g.key')})")
        if self.group.rate is not None:
            put_off = f"greatest(extract(epoch from _g.refilled_at - {self.now})::float8, 0)"
            waits.append(f"(1 - _t.tokens) / nullif(_s.speed, 0) + {put_off} + {SLACK}")
        return f"greatest({', '.join(waits)})"

    def as_new(self) -> str:
        """The condition for gate rows that hold no more than a new row would."""
        refilled = ""
        if self.group.rate is not None:
            refilled = f"\n  and (select _t.tokens >= _s.size from (select 1) _o{self.tokens()})"
        return f"""_g.streak = 0 and _g.most is null and _g.delay is null and _g.last_failure_at is null{refilled}
  and coalesce(_g.paused_until < {self.now}, true) and coalesce(_g.closed_until < {self.now}, true)"""
