"""The gated claim on PostgreSQL where all gates of a lane look at one key: exact, and one statement.

A statement sees one snapshot, taken before any lock. What it counts may be old by the time it holds the lock. So every
claim increments the version of what it locks, and it gets the lock only if the version is still the one in its
snapshot. Then nobody has claimed there since the snapshot, and nobody can until the commit. Running rows can only have
become fewer. There is no counter that could leak.

A lock covers a range of keys, not one key. One row of ``rowmill_gates`` (``dim`` is ``range:`` and the key's name)
stands for all keys from its own up to the next row's, in byte order. A claim reads the keys in order and touches one or
two ranges, so two claims seldom need the same one. A key's range is read from the same rows whose versions are checked,
so no claim uses bounds that have moved. A key has a row of its own only if something is known of it: tokens, a failure
streak, a setting of an operator, a refusal.

Keys take turns: each worker continues after the key that it served last, and then starts from the first. In a range's
row ``refilled_at`` is the time at which the ranges were created (first range only), and ``cells`` is the key that an
SQL function served last.
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
#: How many ranges are created at first, and at most.
RANGES, MOST_RANGES = 32, 256
#: Seconds for which ranges are left as they are while there are few; many are left for longer.
_FEW = 5.0
#: The version that a range starts with. No earlier range of its name had it: claims increment the lower bits only, and
#: every claim is a transaction, so a version never catches up with the next transaction's number.
_NEW, _BITS = "txid_current() << 20", (1 << 20) - 1
#: What is read to divide the keys: so many ready rows in the lane's order, and a sample of so many bytes of the table.
_LOOKED_AT, _SAMPLED = 2048, 256 * 8192


class ClaimByKeyStatements:
    """The statements. In them ``_i`` is what is known before keys are read, and ``_k`` is a key with its ready rows.

    ``in_function``: SQL for how many rows a claim inside a function takes. There the worker is ``$1`` and the key
    served last is ``_rm_last``. The claim returns whole rows and stores the key at which it ended, because a function
    has no memory.
    """

    def __init__(
        self, statements: PostgresStatements, dim: BoundGates, table: str, in_function: str | None = None
    ) -> None:
        self.statements, self.dim, self.group, self.table = statements, dim, dim.group, table
        self.in_function = in_function is not None
        self.count = f"{in_function}::bigint" if in_function is not None else "$1::bigint"
        self.last = "_rm_last" if self.in_function else "$2::text"
        lane = f"lane = {as_text(statements.lane.name)}"
        #: The conditions for the gate rows of keys, and for those of ranges.
        self.where = f"{lane} and dim = {as_text(dim.label)}"
        self.range_dim = f"range:{dim.label}"
        self.range_rows = f"{lane} and dim = {as_text(self.range_dim)}"

    @property
    def rules(self) -> RulesSql:
        """The rules, by the time of now: a test may have moved it."""
        return RulesSql(self.dim, self.statements.plain_now())

    def _worker(self, after_last: bool) -> str:
        return "$1" if self.in_function else "$3::text" if after_last else "$2::text"

    # -- the keys of ready rows

    def _hash(self, key: str) -> str:
        """Keys are looked up by number: in a sorted array of these that takes a few steps, however many there are."""
        return f"""hashtextextended({key}::text collate "C", 0)"""

    def _behind(self, after_last: bool) -> str:
        """The condition for keys that come behind the one served last."""
        # What is known only when it runs is in a subquery: a plan made for one value would look so much
        # cheaper than one for all values that the server would plan every claim again.
        phrase = self.dim.phrase
        return f"{phrase} > (select {self.last}::{self.dim.kind})" if after_last else f"{phrase} is not null"

    def _known(self, after_last: bool, worker: str) -> str:
        """One row: running rows by key, as the walk will meet them; the ranges; whether anything is known of single
        keys, and the most rows of a key that may run.

        Running rows are counted in one step, not key by key: where few rows run when a table is analysed, the planner
        takes any index on running rows for as good as the one by key, and reads all of them for each.
        """
        statements, phrase = self.statements, self.dim.phrase
        counts, mine = {"n": "count(*)"}, ""
        if self.group.process is not None:
            mine = f", {statements.name(statements.roles['worker'])} = {worker} as mine"
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
        select {phrase} as key{mine} from {statements.table}
        where {statements.beyond.running()} and {self._behind(after_last)}
      ) _a group by 1
    ) _c
  ) _r, (
    select array_agg(_g.key order by _g.key) as first, array_agg(_g.version order by _g.key) as version
    from {self.table} _g where {self.range_rows}
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
        statements, phrase = self.statements, self.dim.phrase
        columns = [column for column, _ in statements.binding.order]
        names = [f"_rm_o{i}" for i in range(len(columns))]
        listed = ", ".join(f"{statements.name(column)} as {name}" for column, name in zip(columns, names, strict=True))
        order = statements.order(names=names)
        return f"""(
    select _c._rm_key, row_number() over (partition by _c._rm_key order by {order}) as _rm_place,
      row_number() over () as _rm_n, {limit} as _rm_most
    from (
      select * from (
        select {phrase} as _rm_key, {listed} from {statements.table} where {behind} and {statements.ready()}
        order by {phrase}, {statements.order()} limit {limit}
      ) _f order by _rm_key, {order} limit {max(_STEP, self._most())}
    ) _c
  )"""

    def _walk(self, after_last: bool, count: str) -> str:
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
  select _r.* from {self._rows(self._behind(after_last), read)} _r where {self.statements.unpaused()}
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

    def claim(self, *, after_last: bool = False, keyless: int = 0) -> str:
        """$1 how many, $2 the key that was served last where there is one, then worker where it is asked for.
        ``keyless``: for how many rows without a key room is kept.
        """
        statements, worker, rated = self.statements, self._worker(after_last), self.group.rate is not None
        rows, _ = statements._match("")
        bucket = "_t.tokens as _tokens, _s.speed as _speed, _s.size as _size, _g.refilled_at as _refilled"
        tokens = f", {bucket}, _g.version as _seen" if rated else ""
        kept = ", _tokens, _speed, _size, _refilled" if rated else ""
        seen = ", _seen" if rated else ""
        steps = f"{self._known(after_last, worker)}, {self._walk(after_last, self.count)}"
        return f"""with recursive {steps}, _rm_turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select _k._rm_key, {self._range()} as _rm_range{tokens}
  {self._open_rows()}
  limit (select {self.count}){self._kept_free(keyless)}
), _rm_held as materialized (
  -- locked only if nothing has changed since the snapshot
  select _s._rm_range, _l.spot from (select distinct _rm_range from _rm_turns) _s cross join _rm_known _i
  left join lateral (
    select _g.ctid as spot from {self.table} _g
    where {self.range_rows} and _g.key = _i.first[_s._rm_range] and _g.version = _i.version[_s._rm_range]
    for no key update skip locked
  ) _l on true
), _rm_picked as materialized (
  -- as many rows of each key: others, where somebody has the first ones locked
  select _j.*, _h.spot as _spot, _t._rm_key::text as _key{kept} from (
    select _rm_key, _rm_range{kept}{seen}, count(*) as n from _rm_turns group by _rm_key, _rm_range{kept}{seen}
  ) _t
  join _rm_held _h on _h._rm_range = _t._rm_range and _h.spot is not null{self._unchanged_key()}
  cross join lateral (
    select {rows} from {statements.table}
    where {self.dim.within("_t._rm_key")} and {statements.ready()}
    order by {self.dim.phrase}, {statements.order()} limit _t.n
    for no key update skip locked
  ) _j
){self._keyless(rows, keyless if after_last else None)}, _rm_chosen as (
  select {rows} from _rm_picked{self._and_keyless(rows)}
){self._bump()}, _rm_taken as (
  {statements.update(statements.claim_set(worker), "_rm_chosen")}
  {self._taken()}
order by {statements.order("_rm_taken.")}"""

    def _unchanged_key(self) -> str:
        """A rate writes the rows of its keys. A key whose row another session holds, or has changed since the snapshot,
        is left out, so that no claim waits for it. So is a key that has no row yet: the claim names it, ``create_keys``
        creates its row, and the next claim takes its rows.
        """
        if self.group.rate is None:
            return ""
        return f"""
  join lateral (
    select 1 from {self.table} _g where {self.where} and _g.key = _t._rm_key::text and _g.version = _t._seen
    for no key update skip locked
  ) _u on true"""

    def _range(self) -> str:
        """SQL for the number of a key's range."""
        return 'coalesce(width_bucket(_k._rm_key::text collate "C", _i.first), 0)'

    def _bump(self) -> str:
        """Increment the version of the ranges that rows were taken from, and take tokens from rates."""
        now, last = self.statements.plain_now(), f", cells = ({self._served_last()})" if self.in_function else ""
        bump = f""", _rm_bump as (
  update {self.table} _g set version = _g.version + 1, touched_at = {now}{last}
  where _g.ctid = any(array(select _spot from _rm_picked))
)"""
        if self.group.rate is None:
            return bump
        # These rows are locked, and as the snapshot has them. All is computed in a step: a distributed planner takes no
        # clock in an update, and no INSERT beside one.
        return f"""{bump}, _rm_tokens as (
  update {self.table} _g set version = _g.version + 1, touched_at = _p.now, tokens = _p.tokens,
    refilled_at = _p.refilled
  from (
    select _key, {now} as now, nullif(min(_tokens) - count(*), 'infinity') as tokens,
      greatest({now}, coalesce(min(_refilled), {now})) + {self.rules.refill_delay()} as refilled
    from _rm_picked group by _key
  ) _p
  where {self.where} and _g.key = _p._key
)"""

    def create_keys(self, keys: str = "$1::text[]") -> str:
        """Create the rows of keys that have none, and of keys that come behind: the next claims would need them one by
        one. In the order of the key, as all that create gate rows.
        """
        statements, phrase = self.statements, self.dim.phrase
        lane, dim = as_text(statements.lane.name), as_text(self.dim.label)
        last = f"(select ({keys})[cardinality({keys})]::{self.dim.kind})"
        return f"""insert into {self.table} (lane, dim, key, touched_at)
select {lane}, {dim}, _n.key, {statements.plain_now()} from (
  select unnest({keys}) as key
  union
  select _f.key::text from (
    select {phrase} as key from {statements.table} where {phrase} > {last} and {statements.ready()}
    order by {phrase} limit {_LOOKED_AT}
  ) _f where octet_length(_f.key::text) <= {LONGEST}
) _n order by _n.key collate "C"
on conflict do nothing"""

    def _kept_free(self, keyless: int) -> str:
        """Room for so many rows without a key, as far as there are any."""
        if not keyless:
            return ""
        statements = self.statements
        some = (
            f"select 1 from {statements.table} where {self.dim.phrase} is null and {statements.ready()} limit {keyless}"
        )
        return f" - (select count(*) from ({some}) _e)"

    def _keyless(self, rows: str, most: int | None) -> str:
        """Rows without a key are not held back. Once all keys have had their turn (``most`` is None), they take the
        room that is left; before that, their share.
        """
        if not self.dim.nullable:
            return ""
        statements = self.statements
        left = f"greatest({self.count} - (select count(*) from _rm_picked), 0)"
        return f""", _rm_loose as materialized (
  select {rows} from {statements.table}
  where {self.dim.phrase} is null and {statements.ready()} and {statements.unpaused()}
  order by {statements.order()}
  limit {left if most is None else f"least({left}, {most})"}
  for no key update skip locked
)"""

    def _and_keyless(self, rows: str) -> str:
        return f"\n  union all select {rows} from _rm_loose" if self.dim.nullable else ""

    def _served_last(self) -> str:
        """SQL for the key that the walk came to, or that comes before the first one without a row."""
        if self.group.rate is None:
            return "select _rm_key::text from _rm_turns order by _rm_key desc limit 1"
        return """select _s._rm_key::text from (
    select _rm_key, bool_or(_seen is null) over (order by _rm_key) as new from _rm_turns
  ) _s where not _s.new order by _s._rm_key desc limit 1"""

    def _missing(self) -> str:
        """SQL for the keys that the walk met and that need a row first."""
        if self.group.rate is None:
            return "null::text[]"
        return "(select array_agg(_rm_key::text order by _rm_key) from _rm_turns where _seen is null)"

    def _taken(self) -> str:
        """What the claim returns: the rows and their keys; the last key that was read; how many ranges there are; if
        another session held a range, where some other range starts; how many rows were read, locked ones included; and
        the keys that need a row, in their order. One row without a job if nothing was taken.
        """
        if self.in_function:
            returned = f"returning {self.statements.table}.*\n)\n"
            if self.group.rate is None:
                return f"{returned}select _rm_taken.* from _rm_taken"
            return f"""{returned}select _rm_taken as _rm_job, _m._rm_missing
from (select {self._missing()} as _rm_missing) _m left join _rm_taken on true"""
        columns = self.statements.binding.columns
        taken = self.statements.names(columns, "_rm_taken.") + self.statements.and_inputs("_rm_taken.")
        # Any other, and yet the same one each time: a schedule that broke something must break it again.
        return f"""returning {self.statements.names(columns)}
)
select {taken}, {self.dim.phrase}::text, _m.*
from (
  select ({self._served_last()}) as _rm_last, coalesce(cardinality(first), 0) as _rm_ranges, (
    select coalesce(first[1 + ((7 * (version[_rm_range] & {_BITS}) + _rm_range) % cardinality(first))::int], '')
    from _rm_held where spot is null limit 1) as _rm_elsewhere, (select count(*) from _rm_turns) as _rm_found,
    {self._missing()} as _rm_missing
  from _rm_known limit 1
) _m left join _rm_taken on true"""

    def when(self) -> str:
        """$1 worker where it is asked for. Seconds until a key that has ready rows may go on: 0 for one that others had
        locked at the moment of the claim; and whether any row is ready at all.
        """
        statements, wait = self.statements, self.rules.wait()
        first = f"""select 1 from {statements.table} where {self.dim.within("_w.key")} and {statements.ready()}
    order by {self.dim.phrase}, {statements.order()} limit 1"""
        return f"""with recursive {self._known(False, "$1::text")}, {self._walk(False, str(_MOST_STEP))}
select coalesce((select 0 {self._open_rows()} limit 1), (
  select _w.wait from (
    select _g.key, {wait} as wait from {self.table} _g{self.rules.tokens()}
    where {self.where} and {wait} > 0 order by 2
  ) _w
  cross join lateral ({first}) _y
  limit 1
))::float8, {statements.ready_probe()}"""

    def forget(self) -> str:
        """Gate rows of idle keys that say nothing."""
        idle = f"_g.touched_at < {self.statements.plain_now()} - interval '{IDLE} seconds'"
        return f"""delete from {self.table} where ctid = any(array(
  select _g.ctid from {self.table} _g
  where {self.where} and {idle} and {self.rules.as_new()}
  for update skip locked
))"""

    # -- the ranges

    def range_starts(self, parts: str = str(RANGES)) -> str:
        """The first keys of ranges of similar size, without the first range. It is one pass, so it needs no index by
        the key.
        """
        statements, phrase = self.statements, self.dim.phrase
        ready = f"{statements.ready_state()} and {phrase} is not null"
        size = f"select sum(pg_relation_size(relid)) from pg_partition_tree({as_text(statements.table)}::regclass)"
        share = f"least(100, {_SAMPLED} * 100.0 / greatest(({size}), 1))"
        return f"""select min(_p.key) as key from (
  select _s.key, ntile({parts}) over (order by _s.key) as part from (
    select {phrase}::text collate "C" as key from {statements.table} tablesample system ({share}) where {ready}
    union
    select _f.key::text from (
      select {phrase} as key from {statements.table} where {ready} order by {statements.order()} limit {_LOOKED_AT}
    ) _f
  ) _s where octet_length(_s.key) <= {LONGEST}
) _p where _p.part > 1 group by _p.part"""

    def create_first_range(self) -> str:
        """Create the first range, if there is none. The session that creates it creates all of them."""
        lane, now = as_text(self.statements.lane.name), self.statements.plain_now()
        return f"""insert into {self.table} (lane, dim, key, version, touched_at, refilled_at)
values ({lane}, {as_text(self.range_dim)}, '', {_NEW}, {now}, {now})
on conflict do nothing"""

    def create_ranges(self, keys: str) -> str:
        """Create ranges that start at these keys (a query), in the transaction that created the first range or has
        locked all.
        """
        lane, now = as_text(self.statements.lane.name), self.statements.plain_now()
        return f"""insert into {self.table} (lane, dim, key, version, touched_at)
select {lane}, {as_text(self.range_dim)}, _n.key, {_NEW}, {now} from ({keys}) _n
on conflict do nothing"""

    def renew_ranges(self) -> str:
        """Let further ranges be added, if there are few and they are not new. All are locked as the snapshot has them,
        and their versions incremented, so that no claim uses the old bounds.
        """
        now = self.statements.plain_now()
        fresh = f"select {self._fresh()} from {self.table} where {self.range_rows}"
        return f"""with _rm_seen as materialized (
  select _g.key, _g.version from {self.table} _g where {self.range_rows}
), _rm_mine as materialized (
  select _l.spot, {now} as now from _rm_seen _s cross join lateral (
    select _g.ctid as spot from {self.table} _g
    where {self.range_rows} and _g.key = _s.key and _g.version = _s.version
    for no key update skip locked
  ) _l
  where (select count(*) < {RANGES} from _rm_seen) and not ({fresh})
)
update {self.table} _g set version = _g.version + 1, refilled_at = case when _g.key = '' then _n.now end
from (select min(now) as now from _rm_mine) _n
where _g.ctid = any(array(select spot from _rm_mine))
  and (select count(*) from _rm_mine) = (select count(*) from _rm_seen)"""

    def _fresh(self) -> str:
        """Whether the ranges were created a short while ago. Few are created when there is little to divide."""
        age = f"case when count(*) < {RANGES} then interval '{_FEW} seconds' else interval '{IDLE} seconds' end"
        return f"coalesce(max(refilled_at) > {self.statements.plain_now()} - {age}, false)"

    def lock_all(self) -> str:
        """Lock every range that no other session has locked."""
        return f"select 1 from {self.table} where {self.range_rows} for update skip locked"

    def count_all(self) -> str:
        """How many ranges there are, and whether they were created a short while ago."""
        return f"select count(*), {self._fresh()} from {self.table} where {self.range_rows}"

    def drop_all(self) -> str:
        """Delete all ranges. A claim that has seen them takes no row."""
        return f"delete from {self.table} where {self.range_rows}"
