"""The gated claim on PostgreSQL where all gates of a lane look at one key: exact, and one statement.

A statement sees one snapshot, taken before any lock: what it counts may be old by the time it holds the lock. So
every claim bumps the version of the gate rows it takes from, and the lock is had only where the version still is
the one that the snapshot shows: then nobody has claimed of that key since, and nobody can until the commit. Rows
running can only have become fewer. There is no counter that could leak. A key that has no gate row yet gets one in the
claim itself: of two that make it only one succeeds, and takes.

Keys take turns: each worker walks the keys that have ready rows from the one it was served last on, and then from the
first, by a loose index scan: key by key, whatever number of rows stands behind each, and only as far as it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .gate_binding import BoundGates
from .gate_rows import LONGEST
from .rules import LAG_SHARE, SLACK, START_LAG

if TYPE_CHECKING:
    from ..lane.postgres_statements import PostgresStatements

#: Gate rows of keys that are idle for so many seconds are forgotten.
IDLE = 60.0
_NO_LIMIT = "'infinity'::float8"
#: What is asked of a gate's row.
_STATE = ("version", "tokens", "refilled_at", "delay", "streak", "open_until", "closed_until", "paused_until", "most")


class ClaimByKeyStatements:
    """What is said to PostgreSQL. The gate's row is ``_g``, so that no column of the user's is meant by mistake."""

    #: SQL for how many rows a claim is to take, and for the key that was served last.
    count, last = "$1::bigint", "$2::text"

    def __init__(self, say: PostgresStatements, dim: BoundGates, table: str) -> None:
        self.say, self.dim, self.group, self.table = say, dim, dim.group, table
        self.where = f"lane = {as_text(say.lane.name)} and dim = {as_text(dim.label)}"

    # -- how many of a key may go

    def _counted(self, me: str) -> str:
        """All running rows, counted by key in one step: two arrays, in which each key is then looked up.

        ``me`` is SQL for the worker. (A document takes five times as long to make, and is not read any faster.)

        Not key by key: where few rows run when a table is analysed, the planner takes any index on running rows for
        as good as the one by key, and reads all of them for each.
        """
        say, phrase = self.say, self.dim.phrase
        counted = ['array_agg(_c.key collate "C") as keys', "array_agg(_c.n) as n"]
        inner = [f"{phrase}::text as key", "count(*) as n"]
        if self.group.process is not None:
            counted.append("array_agg(_c.mine) as mine")
            inner.append(f"count(*) filter (where {say.name(say.roles['worker'])} = {me}) as mine")
        return f"""_rm_running as materialized (
  select {", ".join(counted)} from (
    select {", ".join(inner)} from {say.table}
    where {say.running()} and {phrase} is not null group by 1
  ) _c
)"""

    def _running(self, of: str = "n") -> str:
        place = 'array_position((select keys from _rm_running), _g.key collate "C")'
        return f"coalesce((select {of} from _rm_running)[{place}], 0)"

    def _breaker(self) -> tuple[str, str]:
        """SQL for the streak, and for whether it is open."""
        if self.dim.breaker is None:
            return "coalesce(_g.streak, 0)", f"_g.open_until > {self.say.plain_now()}"
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

    def _behind(self, begun: bool) -> str:
        """The condition for keys that come behind the one served last."""
        # What is known only when it runs stands in a query of its own: a plan made for one value would look so much
        # cheaper than one for all values that the server would plan every claim anew.
        phrase = self.dim.phrase
        return f"{phrase} > (select {self.last}::{self.dim.kind})" if begun else f"{phrase} is not null"

    def _walk(self, begun: bool) -> str:
        """The keys of ready rows, one after the other."""
        say, phrase, after = self.say, self.dim.phrase, self._behind(begun)
        ready = f"from {say.table} where {say.ready_state()}"
        return f"""_rm_walk as (
  (select {phrase} as key, 1 as _rm_turn {ready} and {after} order by {phrase} limit 1)
  union all
  select _n.key, _w._rm_turn + 1 from _rm_walk _w cross join lateral (
    select {phrase} as key {ready} and {phrase} > _w.key order by {phrase} limit 1) _n
)"""

    def _gate(self) -> str:
        """The gate's row of a key as the snapshot has it; its version is NULL where there is none yet."""
        state = ", ".join(f"_o.{name}" for name in _STATE)
        return f"""(select _k.key::text as key, {state} from (select) _e
    left join {self.table} _o on {self.where} and _o.key = _k.key::text limit 1)"""

    def claim(self, *, begun: bool = False, loose: int = 0) -> str:
        """$1 how many, $2 the key that was served last where there is one, then worker where it is asked for.
        ``loose``: for how many rows without a key room is kept.
        """
        say, dim = self.say, self.dim
        rows, _ = say._match("")
        tokens, kept = "", ""
        if self.group.rate is not None:
            tokens = ", _t.tokens, _s.speed, _s.size"
            kept = ", _h.tokens as _tokens, _h.speed as _speed, _h.size as _size"
        me = self._me(begun)
        running = f"{self._counted(me)}, " if self._counts else ""
        return f"""with recursive {running}{self._walk(begun)}, _rm_turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select _g.key, _g.version, _x.free, _k._rm_turn as turn{tokens}
  from _rm_walk _k
  cross join lateral {self._gate()} _g{self._states()}
  where octet_length(_g.key) <= {LONGEST} and {self._open()}
), _rm_held as materialized (
  -- locked only if nothing has changed since the snapshot
  select _t.*, _l.spot from _rm_turns _t left join lateral (
    select _g.ctid as spot from {self.table} _g
    where {self.where} and _g.key = _t.key and _g.version = _t.version
    for no key update skip locked
  ) _l on true
  where _t.version is null or _l.spot is not null
), _rm_picked as materialized (
  select _j.*, _h.spot as _spot, _h.key as _key, _h.turn as _turn{kept} from _rm_held _h cross join lateral (
    select {rows} from {say.table}
    where {dim.within("_h.key")} and {say.ready()}
    order by {dim.phrase}, {say.order()}
    limit least(_h.free, (select {self.count}))::bigint
    for no key update skip locked
  ) _j
  limit (select {self.count}){self._kept_free(loose)}
), _rm_made as (
  -- whoever was faster has changed what was counted; in the order of the key, so that no two wait for each other
  insert into {self.table} (lane, dim, key, version, touched_at)
  select {as_text(say.lane.name)}, {as_text(dim.label)}, _n._key, 1, {say.plain_now()}
  from (select distinct _key from _rm_picked where _spot is null) _n order by _n._key
  on conflict do nothing
  returning key
){self._loose(rows, loose if begun else None)}, _rm_chosen as (
  select {rows} from _rm_picked where _spot is not null{self._or_made()}{self._and_loose(rows)}
{self._end(me)}"""

    def _end(self, me: str) -> str:
        """The gate rows that were taken from are bumped, and the chosen rows taken."""
        say = self.say
        _, found = say._match("_rm_chosen")
        return f"""), _rm_bump as (
  update {self.table} _g set {self._bumped()}
  where _g.ctid = any(array(select _spot from _rm_picked where _spot is not null))
), _rm_taken as (
  update {say.table} set
    {say.assignments(say.claim_set(me))}
  where {found}
  {self._taken()}
order by {say.order("_rm_taken.")}"""

    def _me(self, begun: bool) -> str:
        """SQL for the worker."""
        return "$3::text" if begun else "$2::text"

    def _taken(self) -> str:
        """What the claim answers with: the rows and their keys, the key served last, how many gate rows were made. That
        last is told in a row of its own where nothing was taken.
        """
        columns = self.say.binding.columns
        return f"""returning {self.say.names(columns)}, {self.dim.phrase}::text as _rm_of
)
select {self.say.names(columns, "_rm_taken.")}, _rm_taken._rm_of,
  (select _key from _rm_picked order by _turn desc limit 1) as _rm_last, _m.n as _rm_made
from (select count(*) as n from _rm_made) _m left join _rm_taken on true"""

    def _or_made(self) -> str:
        """Tokens are taken from a row that is there, after the rows were: a new key's first turn is the next."""
        return " or _key in (select key from _rm_made)" if self.group.rate is None else ""

    def _and_loose(self, rows: str) -> str:
        return f"\n  union all select {rows} from _rm_loose" if self.dim.nullable else ""

    def _kept_free(self, loose: int) -> str:
        """Room for so many rows without a key, as far as there are any."""
        if not loose:
            return ""
        say = self.say
        some = f"select 1 from {say.table} where {self.dim.phrase} is null and {say.ready()} limit {loose}"
        return f" - (select count(*) from ({some}) _e)"

    def _loose(self, rows: str, most: int | None) -> str:
        """Rows without a key are not held back: they take the room that is left, once all keys have had their turn
        (``most`` is None), and their share before.
        """
        if not self.dim.nullable:
            return ""
        say = self.say
        left = f"greatest({self.count} - (select count(*) from _rm_picked), 0)"
        return f""", _rm_loose as materialized (
  select {rows} from {say.table}
  where {self.dim.phrase} is null and {say.ready()} and {say.unpaused()}
  order by {say.order()}
  limit {left if most is None else f"least({left}, {most})"}
  for no key update skip locked
)"""

    def _bumped(self) -> str:
        now = self.say.plain_now()
        parts = ["version = _g.version + 1", f"touched_at = {now}"]
        if self.group.rate is not None:
            mine = "from _rm_picked where _spot = _g.ctid"
            parts.append(f"tokens = (select nullif(min(_tokens) - count(*), 'infinity') {mine})")
            # As refill_delay has it. This step runs last, so that the time it reads is none before a row's claimed_at.
            late = f"extract(epoch from {now.replace('now()', 'clock_timestamp()')} - {now})::float8"
            lag = f"case when _size >= 2 then {START_LAG} else least({START_LAG}, {LAG_SHARE} / nullif(_speed, 0)) end"
            delay = f"greatest(min((_tokens - _size) / nullif(_speed, 0) + {late} + {lag}), 0) * interval '1 second'"
            delay = f"(select case when min(_speed) > 0 then {delay} else '0' end {mine})"
            parts.append(f"refilled_at = greatest({now}, coalesce(_g.refilled_at, {now})) + {delay}")
        return ", ".join(parts)

    def forget(self) -> str:
        """Gate rows that say nothing: no row ready or running, and no state that a fresh one would not have."""
        now, refilled = self.say.plain_now(), ""
        if self.group.rate is not None:
            refilled = f"\n  and (select _t.tokens >= _s.size from (select 1) _o{self._tokens()})"
        return f"""delete from {self.table} _g
where {self.where} and _g.touched_at < {now} - interval '{IDLE} seconds'{refilled}
  and _g.streak = 0 and _g.most is null and _g.delay is null and _g.last_failure_at is null
  and coalesce(_g.paused_until < {now}, true) and coalesce(_g.closed_until < {now}, true){self._unused()}"""

    def _unused(self) -> str:
        """The condition for gate rows that no claim will ask for soon."""
        say = self.say
        return "".join(
            f"\n  and not exists (select 1 from {say.table} where {self.dim.matches('_g.key')} and {state})"
            for state in (say.ready_state(), say.running())
        )

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
        return f"""{self._seen()}select coalesce(({self._any_free()}), (
  select _w.wait from (
    select _g.key, {wait} as wait from {self.table} _g{tokens}
    where {self.where} and {wait} > 0 order by 2
  ) _w
  cross join lateral ({self._first("_w.key")}) _y
  limit 1
))::float8, {say.ready_probe()}"""

    def _seen(self) -> str:
        """What has to be known to say which keys are free."""
        return f"with {self._counted('$1::text')}\n" if self._counts else ""

    def _any_free(self) -> str:
        """0 if there is a key that has ready rows and may go on."""
        return f"""select 0 from {self.table} _g{self._states()}
  cross join lateral ({self._first("_g.key")}) _y where {self.where} and {self._open()} limit 1"""


def as_text(value: str) -> str:
    """Text as SQL, whatever is in it and whatever the server's settings are."""
    quoted = value.replace("'", "''")
    return "E'" + quoted.replace("\\", "\\\\") + "'" if "\\" in value else f"'{quoted}'"
