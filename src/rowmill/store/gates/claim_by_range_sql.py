"""The gated claim on PostgreSQL where a lane's only gate is a limit by key: a lock for a stretch of keys, not for each.

What has to be locked and bumped (see ``turn_statements``) is then nothing but the right to claim: a limit has no state
of its own. So one gate row stands for all keys from its own up to the next row's, in the order of their bytes. A claim
walks the keys in their order and meets one or two of these stretches; two claims seldom meet in one. Which stretch a
key is in is read from the very rows whose versions are checked, so that nobody goes by bounds that have been moved.

Rows of their own only those keys have that an operator or a refusal has said something about. In a stretch's row
``refilled_at`` is when stretches were made (in the first one's), ``cells`` the key that a function served last.
"""

from __future__ import annotations

from ..lane.postgres_statements import MOST
from .claim_by_key_sql import IDLE, ClaimByKeyStatements, as_text
from .gate_rows import LONGEST

#: Rows read in one step of the walk where keys have few each, and rows that a quick look may read for each it takes.
_STEP, _READ = 32, 8
#: How many stretches are made at first, and at most.
STRETCHES, MOST_STRETCHES = 32, 256
#: Seconds for which few stretches are left as they are; many are for longer.
_FEW = 5.0
#: The version that a stretch begins with: none that one of its name has had before. Claims are counted on top of it, in
#: the lower bits, and are transactions too: they do not catch up.
_NEW, _BITS = "txid_current() << 20", (1 << 20) - 1
#: What is looked at to divide keys: so many ready rows in the lane's order, and a sample of so many bytes of the table.
_LOOKED_AT, _SAMPLED = 2048, 256 * 8192


class ClaimByRangeStatements(ClaimByKeyStatements):
    """What is said to PostgreSQL. In it ``_i`` is what is known before the walk, ``_k`` a row of the walk."""

    @property
    def span(self) -> str:
        """What stands in the ``dim`` column of a stretch's row."""
        return f"stretch:{self.dim.label}"

    @property
    def spans(self) -> str:
        """The condition for the rows of stretches."""
        return f"lane = {as_text(self.say.lane.name)} and dim = {as_text(self.span)}"

    def _hash(self, key: str) -> str:
        """Keys are looked up by number: in a sorted array of these that takes a few steps, however many there are."""
        return f"""hashtextextended({key}::text collate "C", 0)"""

    def _known(self, begun: bool, quick: bool, me: str) -> str:
        """One row: running rows by key, as the walk will meet them; the stretches; whether anything was said of single
        keys, and the most rows of a key that may run. ``quick``: only so many running rows are read, and nothing is
        known of the last of their keys nor of those behind it. (Rows run mostly where a walk has been already.)
        """
        say, phrase = self.say, self.dim.phrase
        cut, until = "", f"null::{self.dim.kind}"
        if quick:
            most = f"({self.count} + {_STEP})"
            cut = f" limit (select {most})"
            until = f"case when sum(_c.n) >= {most} then percentile_disc(1) within group (order by _c.key) end"
        counts, mine = {"n": "count(*)"}, ""
        if self.group.process is not None:
            mine = f", {say.name(say.roles['worker'])} = {me} as mine"
            counts["mine"] = "count(*) filter (where _a.mine)"
        # Of keys that have one number the most is kept, and found: rather too many than too few.
        arrays = ", ".join(f"array_agg(_c.{each} order by _c.hash, _c.{each}) as {each}" for each in counts)
        return f"""_rm_known as materialized (
  select * from (
    select array_agg(_c.hash order by _c.hash) as hash, {arrays}, {until} as until
    from (
      select _a.key, {self._hash("_a.key")} as hash, {", ".join(f"{sql} as {each}" for each, sql in counts.items())}
      from (
        select {phrase} as key{mine} from {say.table}
        where {say.running()} and {self._behind(begun)} order by 1{cut}
      ) _a group by 1
    ) _c
  ) _r, (
    select array_agg(_g.key order by _g.key) as first, array_agg(_g.version order by _g.key) as version
    from {self.table} _g where {self.spans}
  ) _s, (
    select count(*) > 0 as told, greatest(max(_o.most), {self._limit()}) as most from {self.table} _o where {self.where}
  ) _t
)"""

    def _rows(self, behind: str, limit: str, most: int, numbered: bool = True) -> str:
        """Ready rows in the order of their keys, with the place of each among the rows of its key; ``limit`` of them.

        A limit that the planner cannot see makes it take an index that gives the order, also for a table that it knows
        nothing of; ``most`` then tells it that they are few.
        """
        say, phrase = self.say, self.dim.phrase
        rows, _ = say._match("")
        columns = [column for column, _ in say.binding.order]
        names = [f"_rm_o{i}" for i in range(len(columns))]
        listed = ", ".join(f"{say.name(column)} as {name}" for column, name in zip(columns, names, strict=True))
        order = say.order(names=names)
        number = f", row_number() over () as _rm_n, {limit} as _rm_most" if numbered else ""
        return f"""(
    select _c.*, row_number() over (partition by _c._rm_key order by {order}) as _rm_place{number} from (
      select * from (
        select {rows}, {phrase} as _rm_key, {listed} from {say.table} where {behind} and {say.ready()}
        order by {phrase}, {say.order()} limit {limit}
      ) _f order by _rm_key, {order} limit {most}
    ) _c
  )"""

    def _walk(self, begun: bool) -> str:
        """Ready rows, some at a time, each time of keys that come behind: as many as may run at most of a key that has
        many, and else a fixed number.
        """
        few = f"least((select most from _rm_known), {self._step()})"
        step = f"case when _w._rm_place = _w._rm_n then {few} else {self._step()} end"
        first = self._rows(self._behind(begun), f"(select {self._step()})", self._step())
        return f"""_rm_walk as (
  select _r.* from {first} _r where {self.say.unpaused()}
  union all
  select _r.* from (
    select _w._rm_key, {step} as most from _rm_walk _w where _w._rm_n = _w._rm_most
  ) _w
  cross join lateral {self._rows(f"{self.dim.phrase} > _w._rm_key", "_w.most", self._step())} _r
)"""

    def _limit(self) -> int:
        group = self.group
        return min(each.limit for each in (group.concurrency, group.process) if each is not None)

    def _step(self) -> int:
        return max(_STEP, min(self._limit(), MOST))

    def _running(self, of: str = "n") -> str:
        hash = self._hash("_k._rm_key")
        spot = f"width_bucket({hash}, _i.hash)"
        return f"case when _i.hash is null then 0 when _i.hash[{spot}] = {hash} then _i.{of}[{spot}] else 0 end"

    def _free(self) -> str:
        """How many rows of a key may run, less those that do."""
        group, now = self.group, self.say.plain_now()

        def left(most: str) -> str:
            parts = [f"{most} - {self._running()}"] if group.concurrency is not None else []
            if group.process is not None:
                parts.append(f"{group.process.limit} - {self._running('mine')}")
            return f"least({', '.join(parts)})"

        limit = str(group.concurrency.limit) if group.concurrency is not None else ""
        return f"""case when _i.told then coalesce((
      select case when _o.paused_until > {now} or _o.closed_until > {now} then 0
        else {left(f"coalesce(_o.most, {limit})")} end
      from {self.table} _o where {self.where} and _o.key = _k._rm_key::text), {left(limit)}) else {left(limit)} end"""

    def _open_rows(self, walk: str) -> str:
        """The rows of a walk that may go."""
        return f"""from _rm_known _i cross join {walk} _k
  where _k._rm_place <= _i.most and _k._rm_place <= {self._free()}
    and octet_length(_k._rm_key::text) <= {LONGEST}"""

    def claim(self, *, begun: bool = False, loose: int = 0, quick: bool = False) -> str:
        """$1 how many, $2 the key that was served last where there is one, then worker where it is asked for.
        ``loose``: for how many rows without a key room is kept. ``quick``: of the keys that come next, as far as a
        few steps lead, and nothing in the place of rows that somebody else has locked.
        """
        say, me = self.say, self._me(begun)
        rows, _ = say._match("")
        walk, steps, until = "_rm_walk", f", {self._walk(begun)}", ""
        if quick:
            walk = self._rows(self._behind(begun), f"(select {_READ} * {self.count})", _READ * MOST, numbered=False)
            steps, until = "", f"\n    and coalesce(_k._rm_key < _i.until, true) and {say.unpaused()}"
        names = ", ".join(f"_k.{name}" for name in rows.split(", "))
        return f"""with recursive {self._known(begun, quick, me)}{steps}, _rm_turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select {names}, _k._rm_key, {self._stretch()} as _rm_stretch
  {self._open_rows(walk)}{until}
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
  {self._those(rows) if quick else self._as_many(rows)}
){self._loose(rows, loose if begun or quick else None)}, _rm_chosen as (
  select {rows} from _rm_picked{self._and_loose(rows)}
{self._end(me)}"""

    @property
    def looks_ahead(self) -> bool:
        """Whether claims may go by a look ahead: a row's place says which row it is, and all workers count alike."""
        return not self.say.binding.partitioned and self.group.process is None

    @property
    def _of_one_table(self) -> str:
        """Where rows are known by their place alone: not those of children that the table has got since."""
        return f"tableoid = {as_text(self.say.table)}::regclass"

    def ahead(self, *, begun: bool) -> str:
        """$1 how many, $2 the key that was served last where there is one. What quick claims would take one after the
        other: where the rows stand, their keys and the number of each one's stretch; where stretches begin, and their
        versions. Nothing where something was said of single keys.
        """
        behind = f"{self._behind(begun)} and {self._of_one_table}"
        walk = self._rows(behind, f"(select {_READ} * {self.count})", _READ * MOST, numbered=False)
        return f"""with {self._known(begun, True, "")}, _rm_turns as materialized (
  select _k.ctid, _k._rm_key::text as _rm_key, {self._stretch()} as _rm_stretch
  {self._open_rows(walk)}
    and coalesce(_k._rm_key < _i.until, true) and not _i.told
  limit (select {self.count})
)
select _t.*, _i.first, _i.version from (
  select array_agg(ctid::text), array_agg(_rm_key), array_agg(_rm_stretch) from _rm_turns
) _t cross join _rm_known _i"""

    def claim_those(self) -> str:
        """$1 where rows stand and $2 their keys, both as the text of an array (the driver takes longer to put one
        together than the server to read it), $3 where their stretches begin, $4 the versions of these; $5 worker if it
        is asked for. The claim of rows that ``ahead`` has found: they may go if nobody has claimed there since (see
        ``turn_statements``), in none of the stretches, and if nothing was said of single keys meanwhile.
        """
        say, columns = self.say, self.say.binding.columns
        # A place may have got another row since. What is ready is said so that no index on ready rows serves: one that
        # was analysed when nothing was ready looks cheaper than the places themselves.
        asked = "(select rows from _rm_asked)"
        same = f"{self.dim.phrase}::text = ((select keys from _rm_asked))[array_position({asked}, ctid)]"
        seen = "((select $4::bigint[]))[array_position((select $3::text[]), _g.key)]"
        return f"""with _rm_asked as materialized (
  select $1::text::tid[] as rows, $2::text::text[] as keys
), _rm_held as materialized (
  -- locked only if nothing has changed since the look
  select _g.ctid as spot from {self.table} _g
  where {self.spans} and _g.key = any((select $3::text[])::text[]) and _g.version = {seen}
    and {say.unpaused()} and not exists (select 1 from {self.table} where {self.where})
  for no key update skip locked
), _rm_picked as materialized (
  select ctid from {say.table}
  where ctid = any({asked}::tid[]) and {self._of_one_table}
    and (select count(*) from _rm_held) = cardinality((select $3::text[]))
    and {same} and coalesce({say.ready()}, false)
  for no key update skip locked
), _rm_bump as (
  update {self.table} _g set {self._bumped()}
  where _g.ctid = any(array(select spot from _rm_held)) and exists (select 1 from _rm_picked)
), _rm_taken as (
  update {say.table} set
    {say.assignments(say.claim_set("$5::text"))}
  where ctid = any(array(select ctid from _rm_picked)) and {self._of_one_table}
  returning {say.names(columns)}, {self.dim.phrase}::text as _rm_of
)
select {say.names(columns)}, _rm_of from _rm_taken
order by {say.order()}"""

    def _stretch(self) -> str:
        """SQL for the number of a key's stretch."""
        return 'coalesce(width_bucket(_k._rm_key::text collate "C", _i.first), 0)'

    def _those(self, rows: str) -> str:
        """The very rows of the walk, if they are still there to be had."""
        same = " and ".join(f"{name} = _t.{name}" for name in rows.split(", "))
        return f"""select _j.*, _h.spot as _spot from _rm_turns _t
  join _rm_held _h on _h._rm_stretch = _t._rm_stretch and _h.spot is not null
  cross join lateral (
    select {rows} from {self.say.table}
    where {same} and {self.dim.within("_t._rm_key")} and {self.say.ready()}
    for no key update skip locked
  ) _j"""

    def _as_many(self, rows: str) -> str:
        """As many rows of each key: others, where somebody has the first ones locked."""
        return f"""select _j.*, _h.spot as _spot from (
    select _rm_key, _rm_stretch, count(*) as n from _rm_turns group by 1, 2
  ) _t
  join _rm_held _h on _h._rm_stretch = _t._rm_stretch and _h.spot is not null
  cross join lateral (
    select {rows} from {self.say.table}
    where {self.dim.within("_t._rm_key")} and {self.say.ready()}
    order by {self.dim.phrase}, {self.say.order()} limit _t.n
    for no key update skip locked
  ) _j"""

    def _bumped(self) -> str:
        return f"version = _g.version + 1, touched_at = {self.say.plain_now()}"

    def _served_last(self) -> str:
        """SQL for the key that the walk came to."""
        return "select _rm_key::text from _rm_turns order by _rm_key desc limit 1"

    def _taken(self) -> str:
        """What the claim answers with: the rows and their keys, the key that the walk came to, how many stretches there
        are, if others were met on the way, where any other one begins, and how many rows the walk found, whoever has
        them locked. In a row of its own if nothing was taken.
        """
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

    def _seen(self) -> str:
        return f"with recursive {self._known(False, False, '$1::text')}, {self._walk(False)}\n"

    def _any_free(self) -> str:
        return f"select 0 {self._open_rows('_rm_walk')} limit 1"

    def _unused(self) -> str:
        return ""

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
        """Whoever has seen these takes nothing by them any more."""
        return f"delete from {self.table} where {self.spans}"
