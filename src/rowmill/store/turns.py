"""The gated claim on PostgreSQL where all gates of a lane look at one key: exact, and one statement.

A statement sees one snapshot, taken before any lock: what it counts may be old by the time it holds the lock. So
every claim bumps the version of the gate rows it takes from, and the lock is had only where the version still is
the one that the snapshot shows: then nobody has claimed of that key since, and nobody can until the commit. Rows
running can only have become fewer. There is no counter that could leak.

Keys take turns: each worker walks the keys that have ready rows from the one it was served last, and then around, by
a loose index scan: key by key, whatever number of rows stands behind each, and only as far as it takes.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from ..allowance import LAG_SHARE, SLACK, START_LAG
from ..claim import Claim
from .gate_rows import LONGEST
from .gating import Dimension, LooseShare

if TYPE_CHECKING:
    from .postgres import PostgresLane, PostgresStatements

#: Looking for new keys takes at most this share of the time; forgetting idle ones goes with it, now and then.
_SHARE, _KEYS_EVERY, _FORGET_EVERY, _IDLE = 0.05, 1.0, 30.0, 60.0
#: Rows held back by what runs elsewhere are looked for again after this, where no time is known.
HELD_AGAIN, _LOCKED_AGAIN = 1.0, 0.01
_NO_LIMIT = "'infinity'::float8"


class TurnStatements:
    """What is said to PostgreSQL. The gate's row is ``_g``, so that no column of the user's is meant by mistake."""

    #: SQL for how many rows a claim is to take, and for the key that was served last.
    count, last = "$1::bigint", "$2::text"

    def __init__(self, say: PostgresStatements, dim: Dimension, table: str) -> None:
        self.say, self.dim, self.group, self.table = say, dim, dim.group, table
        self.where = f"lane = {_text(say.lane.name)} and dim = {_text(dim.label)}"

    # -- how many of a key may go

    def _counted(self, me: str) -> str:
        """All running rows, counted by key in one step: a document, in which each key is then looked up.

        ``me`` is SQL for the worker.

        Not key by key: where few rows run when a table is analysed, the planner takes any index on running rows for
        as good as the one by key, and reads all of them for each.
        """
        say, phrase = self.say, self.dim.phrase
        counted = ["jsonb_object_agg(_c.key, _c.n) as n"]
        inner = [f"{phrase}::text as key", "count(*) as n"]
        if self.group.process is not None:
            counted.append("jsonb_object_agg(_c.key, _c.mine) as mine")
            inner.append(f"count(*) filter (where {say.name(say.roles['worker'])} = {me}) as mine")
        return f"""running as materialized (
  select {", ".join(counted)} from (
    select {", ".join(inner)} from {say.table}
    where {say.running()} and {phrase} is not null group by 1
  ) _c
)"""

    def _running(self, of: str = "n") -> str:
        return f"coalesce(((select {of} from running) ->> _g.key)::bigint, 0)"

    def _breaker(self) -> tuple[str, str]:
        """SQL for the streak, and for whether it is open."""
        if self.dim.breaker is None:
            return "_g.streak", f"_g.open_until > {self.say.plain_now()}"
        own, names = self.dim.breaker, self.dim.columns
        streak = f"coalesce({own.value(names.streak, '_g.key')}, 0)"
        opened = f"(select {own.until(names.open_until)} from {own.table} where {own.of('_g.key')})"
        return streak, f"coalesce({opened}, 0) > 0"

    def _speed(self) -> tuple[str, str]:
        """SQL for tokens per second and for the bucket's size; the first is NULL where there is no limit."""
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

    def _tokens(self) -> str:
        speed, size = self._speed()
        listed = ""
        if self.group.rate is not None and (source := self.group.rate.source) is not None:
            assert self.dim.rate is not None
            value = self.dim.rate.value(source.column, "_g.key")
            listed = f"\n  cross join lateral (select {value}::float8 as listed) _f"
        return f"""{listed}
  cross join lateral (select {speed} as speed, {size} as size) _s
  cross join lateral (select case when _s.speed is null then {_NO_LIMIT} else least(_s.size, coalesce(
    _g.tokens + greatest(extract(epoch from {self.say.plain_now()} - _g.refilled_at), 0)::float8 * _s.speed,
    _s.size)) end as tokens) _t"""

    def _free(self) -> str:
        """SQL for how many rows of a key may start."""
        group, parts = self.group, []
        if group.concurrency is not None:
            parts.append(f"coalesce(_g.most, {group.concurrency.limit}) - {self._running()}")
        if group.process is not None:
            parts.append(f"{group.process.limit} - {self._running('mine')}")
        if group.breaker is not None:
            streak, opened = self._breaker()
            probe = f"case when {streak} < {group.breaker.failures} then {_NO_LIMIT}"
            parts.append(f"{probe} when {opened} then 0 else 1 - {self._running()} end")
        if group.rate is not None:
            parts.append(f"floor(_t.tokens + {SLACK})")
        return f"least({', '.join(parts)})" if len(parts) > 1 else parts[0]

    def _states(self) -> str:
        """What is asked of each gate row on the way."""
        tokens = self._tokens() if self.group.rate is not None else ""
        return f"""{tokens}
  cross join lateral (select {self._free()} as free) _x"""

    def _first(self, key: str) -> str:
        """The first row of a key that waits for its turn, if there is one."""
        say = self.say
        return f"""select 1 from {say.table} where {self.dim.within(key)} and {say.ready()}
    order by {self.dim.phrase}, {say.order()} limit 1"""

    @property
    def _counts(self) -> bool:
        return self.group.counts_running or self.group.process is not None

    def _open(self) -> str:
        """The condition for keys that may go on."""
        say, now = self.say, self.say.plain_now()
        return f"""{say.unpaused()}
    and coalesce(_g.paused_until <= {now}, true) and coalesce(_g.closed_until <= {now}, true)
    and _x.free > 0"""

    # -- statements

    def _walk(self, name: str, bound: str, first: int) -> str:
        """The keys of ready rows within a bound, one after the other."""
        say, phrase = self.say, self.dim.phrase
        ready = f"from {say.table} where {say.ready_state()} and {bound}"
        return f"""{name} as (
  (select {phrase} as key, {first} as turn {ready} order by {phrase} limit 1)
  union all
  select _n.key, {name}.turn + 1 from {name} cross join lateral (
    select {phrase} as key {ready} and {phrase} > {name}.key order by {phrase} limit 1) _n
)"""

    def claim(self, *, begun: bool = False, loose: int = 0) -> str:
        """$1 how many, $2 the key that was served last where there is one, then worker where it is asked for.
        ``loose``: for how many rows without a key room is kept.
        """
        say, dim, phrase = self.say, self.dim, self.dim.phrase
        rows, found = say._match("chosen")
        tokens, kept = "", ""
        if self.group.rate is not None:
            tokens = ", _t.tokens, _s.speed, _s.size"
            kept = ", held.tokens as _tokens, held.speed as _speed, held.size as _size"
        # From the key served last, and then around.
        last, walks = f"{self.last}::{dim.kind}", [self._walk("ahead", f"{phrase} is not null", 1)]
        if begun:
            walks = [
                self._walk("ahead", f"{phrase} > {last}", 1),
                self._walk("around", f"{phrase} <= {last}", 1_000_000_000),
            ]
        keys = "select * from ahead" + (" union all select * from around" if begun else "")
        me = self._me(begun)
        walks[:0] = [self._counted(me)] if self._counts else []
        return f"""with recursive {", ".join(walks)}, turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select _g.key, _g.version, _x.free, _k.turn{tokens}
  from ({keys}) _k
  cross join lateral (select * from {self.table} where {self.where} and key = _k.key::text limit 1) _g{self._states()}
  where {self._open()}
), held as materialized (
  -- locked only if nothing has changed since the snapshot
  select turns.*, _l.spot from turns cross join lateral (
    select _g.ctid as spot from {self.table} _g
    where {self.where} and _g.key = turns.key and _g.version = turns.version
    for no key update skip locked
  ) _l
), picked as materialized (
  select _j.*, held.spot as _spot, held.key as _key, held.turn as _turn{kept} from held cross join lateral (
    select {rows} from {say.table}
    where {dim.within("held.key")} and {say.ready()}
    order by {dim.phrase}, {say.order()}
    limit least(held.free, {self.count})::bigint
    for no key update skip locked
  ) _j
  limit {self.count}{self._kept_free(loose)}
){self._loose(rows)}, chosen as (
  select {rows} from picked{f" union all select {rows} from loose" if dim.nullable else ""}
), bump as (
  update {self.table} _g set {self._bumped()}
  where _g.ctid = any(array(select _spot from picked))
), taken as (
  update {say.table} set
    {say.assignments(say.claim_set(me))}
  where {found}
  {self._taken()}
order by {say.order("taken.")}"""

    def _me(self, begun: bool) -> str:
        """SQL for the worker."""
        return "$3::text" if begun else "$2::text"

    def _taken(self) -> str:
        """What the claim answers with: the rows, and whose turn it was."""
        columns = self.say.binding.columns
        return f"""returning {self.say.names(columns)}, {self.dim.phrase}::text as _key
)
select {self.say.names(columns, "taken.")}, _p._turn, taken._key from taken
left join (select distinct _key, _turn from picked) _p on _p._key = taken._key"""

    def _kept_free(self, loose: int) -> str:
        """Room for so many rows without a key, as far as there are any."""
        if not loose:
            return ""
        say = self.say
        some = f"select 1 from {say.table} where {self.dim.phrase} is null and {say.ready()} limit {loose}"
        return f" - (select count(*) from ({some}) _e)"

    def _loose(self, rows: str) -> str:
        """Rows without a key are not held back; they take the room that is left."""
        if not self.dim.nullable:
            return ""
        say = self.say
        return f""", loose as materialized (
  select {rows} from {say.table}
  where {self.dim.phrase} is null and {say.ready()} and {say.unpaused()}
  order by {say.order()}
  limit greatest({self.count} - (select count(*) from picked), 0)
  for no key update skip locked
)"""

    def _bumped(self) -> str:
        now = self.say.plain_now()
        parts = ["version = _g.version + 1", f"touched_at = {now}"]
        if self.group.rate is not None:
            mine = "from picked where _spot = _g.ctid"
            parts.append(f"tokens = (select nullif(min(_tokens) - count(*), 'infinity') {mine})")
            # As refill_delay has it. This step runs last, so that the time it reads is none before a row's claimed_at.
            late = f"extract(epoch from {now.replace('now()', 'clock_timestamp()')} - {now})::float8"
            lag = f"case when _size >= 2 then {START_LAG} else least({START_LAG}, {LAG_SHARE} / nullif(_speed, 0)) end"
            delay = f"greatest(min((_tokens - _size) / nullif(_speed, 0) + {late} + {lag}), 0) * interval '1 second'"
            delay = f"(select case when min(_speed) > 0 then {delay} else '0' end {mine})"
            parts.append(f"refilled_at = greatest({now}, coalesce(_g.refilled_at, {now})) + {delay}")
        return ", ".join(parts)

    def refresh(self) -> str:
        """Gate rows for keys that have none: a loose index scan, key by key, whatever stands behind each."""
        say, phrase = self.say, self.dim.phrase
        ready = f"{say.ready_state()} and {phrase} is not null"
        return f"""with recursive k as (
  (select {phrase} as key from {say.table} where {ready} order by 1 limit 1)
  union all
  select (select {phrase} from {say.table} where {ready} and {phrase} > k.key order by 1 limit 1)
  from k where k.key is not null
)
insert into {self.table} (lane, dim, key, touched_at)
select {_text(say.lane.name)}, {_text(self.dim.label)}, k.key::text, {say.plain_now()} from k
where octet_length(k.key::text) <= {LONGEST}
  and not exists (select 1 from {self.table} _g where {self.where} and _g.key = k.key::text)
on conflict do nothing
returning 1"""

    def forget(self) -> str:
        """Gate rows that say nothing: no row ready or running, and no state that a fresh one would not have."""
        say, now = self.say, self.say.plain_now()
        refilled = ""
        if self.group.rate is not None:
            refilled = f"\n  and (select _t.tokens >= _s.size from (select 1) _o{self._tokens()})"
        return f"""delete from {self.table} _g
where {self.where} and _g.touched_at < {now} - interval '{_IDLE} seconds'{refilled}
  and _g.streak = 0 and _g.most is null and _g.delay is null and _g.last_failure_at is null
  and coalesce(_g.paused_until < {now}, true) and coalesce(_g.closed_until < {now}, true)
  and not exists (select 1 from {say.table} where {self.dim.matches("_g.key")} and {say.ready_state()})
  and not exists (select 1 from {say.table} where {self.dim.matches("_g.key")} and {say.running()})"""

    def when(self) -> str:
        """$1 worker where it is asked for. Seconds until a key that has ready rows may go on: 0 for one that others had
        locked at the moment of the claim; and whether any row is ready at all.
        """
        say, now, group = self.say, self.say.plain_now(), self.group
        waits = [f"extract(epoch from _g.{name} - {now})" for name in ("paused_until", "closed_until")]
        tokens = ""
        if group.breaker is not None and self.dim.breaker is None:
            waits.append(f"extract(epoch from _g.open_until - {now})")
        elif group.breaker is not None and (own := self.dim.breaker) is not None:
            names = self.dim.columns
            waits.append(f"(select {own.until(names.open_until)} from {own.table} where {own.of('_g.key')})")
        if group.rate is not None:
            tokens = self._tokens()
            put_off = f"greatest(extract(epoch from _g.refilled_at - {now})::float8, 0)"
            waits.append(f"(1 - _t.tokens) / nullif(_s.speed, 0) + {put_off} + {SLACK}")
        wait = f"greatest({', '.join(waits)})"
        free = f"""select 0 from {self.table} _g{self._states()}
  cross join lateral ({self._first("_g.key")}) _y where {self.where} and {self._open()} limit 1"""
        counted = f"with {self._counted('$1::text')}\n" if self._counts else ""
        return f"""{counted}select coalesce(({free}), (
  select _w.wait from (
    select _g.key, {wait} as wait from {self.table} _g{tokens}
    where {self.where} and {wait} > 0 order by 2
  ) _w
  cross join lateral ({self._first("_w.key")}) _y
  limit 1
))::float8, {say.ready_probe()}"""


class Turns:
    """The gated claim of one lane in this worker."""

    def __init__(self, store: PostgresLane, dim: Dimension, table: str) -> None:
        self.store, self.dim = store, dim
        self.say = TurnStatements(store.statements, dim, table)
        self._asks_for_worker = "worker" in store.binding.roles or dim.group.process is not None
        #: The key served last.
        self._last: str | None = None
        self._refresh_at = self._keys_at = self._forget_at = 0.0
        #: Whether new keys were looked for since the last claim that came short.
        self._fresh = False
        #: Claims in a row that got nothing although something was free: somebody holds the rows themselves.
        self._in_vain = 0
        self._share = LooseShare()

    async def claim(self, count: int) -> list[Claim]:
        """Rows of as many keys as it takes. New keys are looked for where it came short; and now and then where those
        that are known, or rows without a key, keep it full.
        """
        began = time.monotonic()
        claims = await self._take(count, began)
        self._fresh = began >= self._refresh_at
        if self._fresh and (len(claims) < count or began >= self._keys_at) and await self._refresh():
            claims += await self._take(count - len(claims), began) if len(claims) < count else []
        self._in_vain = 0 if claims else self._in_vain + 1
        self.store.look_again = None
        if len(claims) < count:
            self.store.look_again = await self._when()
        return claims

    async def _take(self, count: int, began: float) -> list[Claim]:
        begun, loose = self._last is not None, self._share.of(count) if self.dim.nullable else 0
        text = self.store._text(("turns", begun, loose), lambda: self.say.claim(begun=begun, loose=loose))
        values = [count, *([self._last] if begun else []), *([self.store.worker] if self._asks_for_worker else [])]
        rows = await self.store.database.write(lambda run: run(text, tuple(values)))
        served = [row for row in rows if row[-2] is not None]
        if served:
            self._last = max(served, key=lambda row: row[-2])[-1]
        claims = self.store.make_claims(rows, began)
        for claim, row in zip(claims, rows, strict=True):
            claim.gates = {self.dim.label: row[-1]} if row[-1] is not None else {}
        return claims

    async def _refresh(self) -> bool:
        began = time.monotonic()
        found = await self.store.database.write(lambda run: run(self.store._text("keys", self.say.refresh), ()))
        took = time.monotonic() - began
        self._refresh_at, self._keys_at = began + took / _SHARE, began + _KEYS_EVERY
        if began > self._forget_at:
            self._forget_at = began + _FORGET_EVERY * random.uniform(0.7, 1.3)
            await self.store.database.write(lambda run: run(self.store._text("forget", self.say.forget), ()))
        return bool(found)

    async def _when(self) -> float | None:
        """When to look again, by this process's clock; None: at the next poll."""
        text = self.store._text("when", self.say.when)
        me = (self.store.worker,) if self.dim.group.process is not None else ()
        wait, ready = (await self.store.database.read(lambda run: run(text, me)))[0]
        now = time.monotonic()
        if wait == 0:  # others were faster, or held its lock
            return now + random.uniform(0, min(_LOCKED_AGAIN * 2.0 ** min(self._in_vain, 10), HELD_AGAIN))
        times = [now + max(wait, _least_wait(self.dim))] if wait is not None else []
        if ready:  # rows held back by what others run, or of a key that is not known yet
            times += [now + HELD_AGAIN, *([] if self._fresh else [max(self._refresh_at, now)])]
        return min(times) if times else None


def _least_wait(dim: Dimension) -> float:
    """A fast rate is not followed token by token: half a bucket, or a twentieth of a second, at a time."""
    rate = dim.group.rate
    if rate is None or rate.source is not None or rate.adaptive is not None:
        return 0.005
    return min(0.05, rate.capacity(rate.n) / 2 / (rate.n / rate.per.total_seconds()))


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
