"""The gated claim on PostgreSQL where all gates of a lane look at one key: exact, and one statement.

A statement sees one snapshot, taken before any lock: what it counts may be old by the time it holds the lock. So
every claim bumps the version of what it locks, and gets the lock only where the version still is the one that its
snapshot shows: then nobody has claimed there since, and nobody can until the commit. Rows running can only have become
fewer. There is no counter that could leak.

A lock is not for a key but for a stretch of keys: one row of ``rowmill_gates`` (``dim`` is ``stretch:`` and the key's
name) stands for all keys from its own up to the next row's, in the order of their bytes. A claim walks the keys in
order and meets one or two stretches; two claims seldom meet in one. Which stretch a key is in is read from the very
rows whose versions are checked, so that nobody goes by bounds that have been moved. A key has a row of its own only
where something is known of it: tokens, a streak, what an operator or a refusal said.

Keys take turns: each worker goes on behind the one it was served last, and then from the first. In a stretch's row
``refilled_at`` is when stretches were made (in the first one's), ``cells`` the key that a function served last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .gate_binding import BoundGates
from .gate_rows import LONGEST, as_text
from .rules_sql import STATE, RulesSql

if TYPE_CHECKING:
    from ..lane.postgres_statements import PostgresStatements

#: Gate rows of keys that are idle for so many seconds are forgotten.
IDLE = 60.0
#: Rows read in one step of the walk where keys have few each, and at most.
_STEP, _MOST_STEP = 32, 1000
#: How many stretches are made at first, and at most.
STRETCHES, MOST_STRETCHES = 32, 256
#: Seconds for which few stretches are left as they are; many are for longer.
_FEW = 5.0
#: The version that a stretch begins with: none that one of its name has had before. Claims are counted on top of it, in
#: the lower bits, and are transactions too: they do not catch up.
_NEW, _BITS = "txid_current() << 20", (1 << 20) - 1
#: What is looked at to divide keys: so many ready rows in the lane's order, and a sample of so many bytes of the table.
_LOOKED_AT, _SAMPLED = 2048, 256 * 8192


class ClaimByKeyStatements:
    """What is said to PostgreSQL. In it ``_i`` is what is known before the walk, ``_k`` a row of the walk.

    ``in_function``: SQL for how many rows a claim inside a function takes. There the worker is ``$1``, the key that was
    served last ``_rm_last``; the claim answers with whole rows, and writes down where it ended, since a function
    remembers nothing.
    """

    def __init__(
        self, statements: PostgresStatements, dim: BoundGates, table: str, in_function: str | None = None
    ) -> None:
        self.say, self.dim, self.group, self.table = statements, dim, dim.group, table
        self.in_function = in_function is not None
        self.count = f"{in_function}::bigint" if in_function is not None else "$1::bigint"
        self.last = "_rm_last" if self.in_function else "$2::text"
        lane = f"lane = {as_text(statements.lane.name)}"
        #: The conditions for the gate rows of keys, and for those of stretches.
        self.where = f"{lane} and dim = {as_text(dim.label)}"
        self.span = f"stretch:{dim.label}"
        self.spans = f"{lane} and dim = {as_text(self.span)}"

    @property
    def rules(self) -> RulesSql:
        """The rules, by the time of now: a test may have moved it."""
        return RulesSql(self.dim, self.say.plain_now())

    def _worker(self, begun: bool) -> str:
        return "$1" if self.in_function else "$3::text" if begun else "$2::text"

    # -- the keys of ready rows

    def _hash(self, key: str) -> str:
        """Keys are looked up by number: in a sorted array of these that takes a few steps, however many there are."""
        return f"""hashtextextended({key}::text collate "C", 0)"""

    def _behind(self, begun: bool) -> str:
        """The condition for keys that come behind the one served last."""
        # What is known only when it runs is in a subquery: a plan made for one value would look so much
        # cheaper than one for all values that the server would plan every claim again.
        phrase = self.dim.phrase
        return f"{phrase} > (select {self.last}::{self.dim.kind})" if begun else f"{phrase} is not null"

    def _known(self, begun: bool, worker: str) -> str:
        """One row: running rows by key, as the walk will meet them; the stretches; whether anything is known of single
        keys, and the most rows of a key that may run.

        Running rows are counted in one step, not key by key: where few rows run when a table is analysed, the planner
        takes any index on running rows for as good as the one by key, and reads all of them for each.
        """
        say, phrase = self.say, self.dim.phrase
        counts, mine = {"n": "count(*)"}, ""
        if self.group.process is not None:
            mine = f", {say.name(say.roles['worker'])} = {worker} as mine"
            counts["mine"] = "count(*) filter (where _a.mine)"
        # Of keys that have one number the most is kept, and found: rather too many than too few.
        arrays = ", ".join(f"array_agg(_c.{each} order by _c.hash, _c.{each}) as {each}" for each in counts)
        known = "select true as told, null::bigint as most"
        if self.group.only_limits:
            known = f"""select count(*) > 0 as told, greatest(max(_o.most), {self._most()}) as most
    from {self.table} _o where {self.where}"""
        return f"""_rm_known as materialized (
  select * from (
    select array_agg(_c.hash order by _c.hash) as hash, {arrays}
    from (
      select _a.key, {self._hash("_a.key")} as hash, {", ".join(f"{sql} as {each}" for each, sql in counts.items())}
      from (
        select {phrase} as key{mine} from {say.table}
        where {say.running()} and {self._behind(begun)}
      ) _a group by 1
    ) _c
  ) _r, (
    select array_agg(_g.key order by _g.key) as first, array_agg(_g.version order by _g.key) as version
    from {self.table} _g where {self.spans}
  ) _s, (
    {known}
  ) _t
)"""

    def _most(self) -> int:
        """How many rows of a key a claim takes at most, by what was declared."""
        return int(min(self.rules.most, _MOST_STEP))

    def _rows(self, behind: str, limit: str) -> str:
        """Ready rows in the order of their keys, with the place of each among the rows of its key; ``limit`` of them.

        A limit that the planner cannot see makes it take an index that gives the order, also for a table that it knows
        nothing of; another around it then tells it that they are few.
        """
        say, phrase = self.say, self.dim.phrase
        columns = [column for column, _ in say.binding.order]
        names = [f"_rm_o{i}" for i in range(len(columns))]
        listed = ", ".join(f"{say.name(column)} as {name}" for column, name in zip(columns, names, strict=True))
        order = say.order(names=names)
        return f"""(
    select _c._rm_key, row_number() over (partition by _c._rm_key order by {order}) as _rm_place,
      row_number() over () as _rm_n, {limit} as _rm_most
    from (
      select * from (
        select {phrase} as _rm_key, {listed} from {say.table} where {behind} and {say.ready()}
        order by {phrase}, {say.order()} limit {limit}
      ) _f order by _rm_key, {order} limit {max(_STEP, self._most())}
    ) _c
  )"""

    def _walk(self, begun: bool, count: str) -> str:
        """Ready rows, some at a time, each time of keys that come behind: as many as may run at most of a key that has
        many, and else a fixed number.
        """
        most = self._most()
        read = (
            f"(select greatest({_STEP}, least({most}, {count}))::bigint)"
            if most > _STEP
            else f"(select {_STEP}::bigint)"
        )
        few = f"least(coalesce((select most from _rm_known), {most}), {read})"
        step = f"case when _w._rm_place = _w._rm_n then {few} else {read} end"
        return f"""_rm_walk as (
  select _r.* from {self._rows(self._behind(begun), read)} _r where {self.say.unpaused()}
  union all
  select _r.* from (
    select _w._rm_key, {step} as most from _rm_walk _w where _w._rm_n = _w._rm_most
  ) _w
  cross join lateral {self._rows(f"{self.dim.phrase} > _w._rm_key", "_w.most")} _r
)"""

    def _running(self, of: str = "n") -> str:
        hash = self._hash("_k._rm_key")
        spot = f"width_bucket({hash}, _i.hash)"
        return f"case when _i.hash is null then 0 when _i.hash[{spot}] = {hash} then _i.{of}[{spot}] else 0 end"

    def _open_rows(self) -> str:
        """The rows of the walk that may go, each with its key's gate row as the snapshot has it."""
        state = ", ".join(f"_o.{name}" for name in ("version", *STATE))
        return f"""from _rm_known _i cross join _rm_walk _k
  cross join lateral (
    select _k._rm_key::text as key, {state} from (select) _e
    left join {self.table} _o on _i.told and {self.where} and _o.key = _k._rm_key::text limit 1) _g{self.rules.tokens()}
  where _k._rm_place <= {self.rules.free(self._running(), self._running("mine"))}
    and octet_length(_g.key) <= {LONGEST} and {self.rules.open()}"""

    # -- statements

    def claim(self, *, begun: bool = False, loose: int = 0) -> str:
        """$1 how many, $2 the key that was served last where there is one, then worker where it is asked for.
        ``loose``: for how many rows without a key room is kept.
        """
        say, worker, rated = self.say, self._worker(begun), self.group.rate is not None
        rows, _ = say._match("")
        tokens = ", _t.tokens as _tokens, _s.speed as _speed, _s.size as _size, _g.version as _seen" if rated else ""
        kept = ", _tokens, _speed, _size" if rated else ""
        seen = ", _seen" if rated else ""
        steps = f"{self._known(begun, worker)}, {self._walk(begun, self.count)}"
        return f"""with recursive {steps}, _rm_turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select _k._rm_key, {self._stretch()} as _rm_stretch{tokens}
  {self._open_rows()}
  limit (select {self.count}){self._kept_free(loose)}
), _rm_held as materialized (
  -- locked only if nothing has changed since the snapshot
  select _s._rm_stretch, _l.spot from (select distinct _rm_stretch from _rm_turns) _s cross join _rm_known _i
  left join lateral (
    select _g.ctid as spot from {self.table} _g
    where {self.spans} and _g.key = _i.first[_s._rm_stretch] and _g.version = _i.version[_s._rm_stretch]
    for no key update skip locked
  ) _l on true
), _rm_picked as materialized (
  -- as many rows of each key: others, where somebody has the first ones locked
  select _j.*, _h.spot as _spot, _t._rm_key::text as _key{kept} from (
    select _rm_key, _rm_stretch{kept}{seen}, count(*) as n from _rm_turns group by _rm_key, _rm_stretch{kept}{seen}
  ) _t
  join _rm_held _h on _h._rm_stretch = _t._rm_stretch and _h.spot is not null{self._unchanged_key()}
  cross join lateral (
    select {rows} from {say.table}
    where {self.dim.within("_t._rm_key")} and {say.ready()}
    order by {self.dim.phrase}, {say.order()} limit _t.n
    for no key update skip locked
  ) _j
){self._loose(rows, loose if begun else None)}, _rm_chosen as (
  select {rows} from _rm_picked{self._and_loose(rows)}
){self._bump()}, _rm_taken as (
  update {say.table} set
    {say.assignments(say.claim_set(worker))}
  where {say._match("_rm_chosen")[1]}
  {self._taken()}
order by {say.order("_rm_taken.")}"""

    def _unchanged_key(self) -> str:
        """A rate writes the rows of its keys. A key whose row another session holds, or has changed since the snapshot,
        is left out, so that no claim waits for it.
        """
        if self.group.rate is None:
            return ""
        return f"""
  join lateral (
    select 1 where _t._seen is null
    union all
    select 1 from (
      select 1 from {self.table} _g where {self.where} and _g.key = _t._rm_key::text and _g.version = _t._seen
      for no key update skip locked
    ) _q
  ) _u on true"""

    def _stretch(self) -> str:
        """SQL for the number of a key's stretch."""
        return 'coalesce(width_bucket(_k._rm_key::text collate "C", _i.first), 0)'

    def _bump(self) -> str:
        """The stretches that were taken from get another version, and rates fewer tokens."""
        now, last = self.say.plain_now(), f", cells = ({self._served_last()})" if self.in_function else ""
        bump = f""", _rm_bump as (
  update {self.table} _g set version = _g.version + 1, touched_at = {now}{last}
  where _g.ctid = any(array(select _spot from _rm_picked))
)"""
        if self.group.rate is None:
            return bump
        # In the order of the key, as all that make gate rows; nobody else takes tokens of these keys meanwhile.
        return f"""{bump}, _rm_tokens as (
  insert into {self.table} as _g (lane, dim, key, version, touched_at, tokens, refilled_at)
  select {as_text(self.say.lane.name)}, {as_text(self.dim.label)}, _key, 1, {now},
    nullif(min(_tokens) - count(*), 'infinity'), {now} + {self.rules.refill_delay()}
  from _rm_picked group by _key order by _key collate "C"
  on conflict (lane, dim, key) do update set version = _g.version + 1, touched_at = {now}, tokens = excluded.tokens,
    refilled_at = greatest({now}, coalesce(_g.refilled_at, {now})) + (excluded.refilled_at - {now})
)"""

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

    def _and_loose(self, rows: str) -> str:
        return f"\n  union all select {rows} from _rm_loose" if self.dim.nullable else ""

    def _served_last(self) -> str:
        """SQL for the key that the walk came to."""
        return "select _rm_key::text from _rm_turns order by _rm_key desc limit 1"

    def _taken(self) -> str:
        """What the claim answers with: the rows and their keys, the key that the walk came to, how many stretches there
        are, if others were met on the way, where any other one begins, and how many rows the walk found, locked
        ones included. In a row of its own if nothing was taken.
        """
        if self.in_function:
            return "returning *\n)\nselect _rm_taken.* from _rm_taken"
        columns = self.say.binding.columns
        # Any other, and yet the same one each time: a schedule that broke something must break it again.
        return f"""returning {self.say.names(columns)}, {self.dim.phrase}::text as _rm_of
)
select {self.say.names(columns, "_rm_taken.")}, _rm_taken._rm_of, _m.*
from (
  select ({self._served_last()}) as _rm_last, coalesce(cardinality(first), 0) as _rm_stretches, (
    select coalesce(first[1 + ((7 * (version[_rm_stretch] & {_BITS}) + _rm_stretch) % cardinality(first))::int], '')
    from _rm_held where spot is null limit 1) as _rm_elsewhere, (select count(*) from _rm_turns) as _rm_found
  from _rm_known limit 1
) _m left join _rm_taken on true"""

    def when(self) -> str:
        """$1 worker where it is asked for. Seconds until a key that has ready rows may go on: 0 for one that others had
        locked at the moment of the claim; and whether any row is ready at all.
        """
        say, wait = self.say, self.rules.wait()
        first = f"""select 1 from {say.table} where {self.dim.within("_w.key")} and {say.ready()}
    order by {self.dim.phrase}, {say.order()} limit 1"""
        return f"""with recursive {self._known(False, "$1::text")}, {self._walk(False, str(_MOST_STEP))}
select coalesce((select 0 {self._open_rows()} limit 1), (
  select _w.wait from (
    select _g.key, {wait} as wait from {self.table} _g{self.rules.tokens()}
    where {self.where} and {wait} > 0 order by 2
  ) _w
  cross join lateral ({first}) _y
  limit 1
))::float8, {say.ready_probe()}"""

    def forget(self) -> str:
        """Gate rows of idle keys that say nothing."""
        return f"""delete from {self.table} where ctid = any(array(
  select _g.ctid from {self.table} _g
  where {self.where} and _g.touched_at < {self.say.plain_now()} - interval '{IDLE} seconds' and {self.rules.as_new()}
  for update skip locked
))"""

    # -- the stretches

    def divide(self, parts: str = str(STRETCHES)) -> str:
        """Where stretches of like size would begin, but for the first. One pass over what is looked at, so that it
        does not matter whether there is an index by the key.
        """
        say, phrase = self.say, self.dim.phrase
        ready = f"{say.ready_state()} and {phrase} is not null"
        size = f"select sum(pg_relation_size(relid)) from pg_partition_tree({as_text(say.table)}::regclass)"
        share = f"least(100, {_SAMPLED} * 100.0 / greatest(({size}), 1))"
        return f"""select min(_p.key) as key from (
  select _s.key, ntile({parts}) over (order by _s.key) as part from (
    select {phrase}::text collate "C" as key from {say.table} tablesample system ({share}) where {ready}
    union
    select _f.key::text from (
      select {phrase} as key from {say.table} where {ready} order by {say.order()} limit {_LOOKED_AT}
    ) _f
  ) _s where octet_length(_s.key) <= {LONGEST}
) _p where _p.part > 1 group by _p.part"""

    def mark_out(self, keys: str) -> str:
        """Stretches that begin at these keys (a query), where there are none: who makes the first makes them all."""
        lane, now = as_text(self.say.lane.name), self.say.plain_now()
        return f"""with _rm_made as (
  insert into {self.table} (lane, dim, key, version, touched_at, refilled_at)
  values ({lane}, {as_text(self.span)}, '', {_NEW}, {now}, {now})
  on conflict do nothing
  returning 1
)
insert into {self.table} (lane, dim, key, version, touched_at)
select {lane}, {as_text(self.span)}, _n.key, {_NEW}, {now} from ({keys}) _n where exists (select 1 from _rm_made)
on conflict do nothing"""

    def cut(self) -> str:
        """More stretches among those that are there, where these are few and not new: all are held, as the snapshot has
        them, and bumped, so that nobody goes by what they were.
        """
        lane, now = as_text(self.say.lane.name), self.say.plain_now()
        fresh = f"select {self._fresh()} from {self.table} where {self.spans}"
        return f"""with _rm_seen as materialized (
  select _g.key, _g.version from {self.table} _g where {self.spans}
), _rm_mine as materialized (
  select _l.spot from _rm_seen _s cross join lateral (
    select _g.ctid as spot from {self.table} _g
    where {self.spans} and _g.key = _s.key and _g.version = _s.version
    for no key update skip locked
  ) _l
  where (select count(*) < {STRETCHES} from _rm_seen) and not ({fresh})
), _rm_bump as (
  update {self.table} _g set version = _g.version + 1, refilled_at = case when _g.key = '' then {now} end
  where _g.ctid = any(array(select spot from _rm_mine))
    and (select count(*) from _rm_mine) = (select count(*) from _rm_seen)
  returning 1
)
insert into {self.table} (lane, dim, key, version, touched_at)
select {lane}, {as_text(self.span)}, _n.key, {_NEW}, {now} from ({self.divide()}) _n
where exists (select 1 from _rm_bump)
on conflict do nothing"""

    def _fresh(self) -> str:
        """Whether stretches were made a short while ago: few were made when there was little to divide."""
        age = f"case when count(*) < {STRETCHES} then interval '{_FEW} seconds' else interval '{IDLE} seconds' end"
        return f"coalesce(max(refilled_at) > {self.say.plain_now()} - {age}, false)"

    def lock_all(self) -> str:
        """Every stretch that nobody else holds."""
        return f"select 1 from {self.table} where {self.spans} for update skip locked"

    def count_all(self) -> str:
        """How many stretches there are, and whether they were made a short while ago."""
        return f"select count(*), {self._fresh()} from {self.table} where {self.spans}"

    def drop_all(self) -> str:
        """A claim that has seen these takes nothing by them any more."""
        return f"delete from {self.table} where {self.spans}"
