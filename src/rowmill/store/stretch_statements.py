"""The gated claim on PostgreSQL where a lane's only gate is a limit by key: a lock for a stretch of keys, not for each.

What has to be locked and bumped (see ``turn_statements``) is then nothing but the right to claim: a limit has no state
of its own. So one gate row stands for all keys from its own up to the next row's, in the order of their bytes. A claim
walks the keys in their order and meets one or two of these stretches; two claims seldom meet in one. Which stretch a
key is in is read from the very rows whose versions are checked, so that nobody goes by bounds that have been moved.

Rows of their own only those keys have that an operator or a refusal has said something about.
"""

from __future__ import annotations

from .gate_rows import LONGEST
from .postgres_statements import MOST
from .turn_statements import IDLE, TurnStatements, as_text

#: Rows read in one step of the walk where keys have few each.
_STEP = 32
#: How many stretches are made at first, and at most.
STRETCHES, MOST_STRETCHES = 32, 256
#: Keys looked at one by one before a sample of the table's pages has to do, and how many bytes are sampled.
_LOOKED_AT, _SAMPLED = 2048, 256 * 8192


class StretchStatements(TurnStatements):
    """What is said to PostgreSQL."""

    #: SQL for how many stretches are to be made.
    stretches = str(STRETCHES)

    @property
    def spans(self) -> str:
        """The condition for the rows of stretches."""
        return f"lane = {as_text(self.say.lane.name)} and dim = {as_text(self.span)}"

    @property
    def span(self) -> str:
        """What stands in the ``dim`` column of a stretch's row."""
        return f"stretch:{self.dim.label}"

    def _behind(self, begun: bool) -> str:
        """The condition for keys that come behind the one served last."""
        # What is known only when it runs stands in a query of its own, see TurnStatements._walk.
        phrase = self.dim.phrase
        return f"{phrase} > (select {self.last}::{self.dim.kind})" if begun else f"{phrase} is not null"

    def _known(self, begun: bool, quick: bool, me: str) -> str:
        """One row: running rows by key, as the walk will meet them; the stretches; and whether anything was said of
        single keys. ``quick``: only so many running rows, and nothing is known of the last of their keys nor of those
        behind it. (Rows run mostly where a walk has been already.)
        """
        say, phrase = self.say, self.dim.phrase
        most = f"({self.count} + {_STEP})"
        cut, until = (
            (f" limit (select {most})", f"case when sum(_c.n) >= {most} then {{}} end") if quick else ("", "{}")
        )
        # The last one in order, of whatever type.
        last = "percentile_disc(1) within group (order by _c.key)" if quick else f"null::{self.dim.kind}"
        arrays, counted, mine = "", "", ""
        if self.group.process is not None:
            mine = f", {say.name(say.roles['worker'])} = {me} as mine"
            counted, arrays = ", count(*) filter (where _a.mine) as mine", ", array_agg(_c.mine) as mine"
        return f"""known as materialized (
  select _r.*, _s.*, exists (select 1 from {self.table} _o where {self.where}) as told
  from (
    select array_agg(_c.key::text collate "C") as keys, array_agg(_c.n) as n{arrays}, {until.format(last)} as until
    from (
      select _a.key, count(*) as n{counted} from (
        select {phrase} as key{mine} from {say.table}
        where {say.running()} and {self._behind(begun)} order by {phrase}{cut}
      ) _a group by 1
    ) _c
  ) _r, (
    select array_agg(_g.key order by _g.key) as first, array_agg(_g.version order by _g.key) as version
    from {self.table} _g where {self.spans}
  ) _s
)"""

    def _rows(self, behind: str, steps: int, most: str, numbered: bool = True) -> str:
        """Ready rows in the order of their keys, with the place of each among the rows of its key. ``steps`` tells the
        planner that they are few; what counts is ``most``.
        """
        say, phrase = self.say, self.dim.phrase
        rows, _ = say._match("")
        number = f", row_number() over () as n, {most} as most" if numbered else ""
        return f"""(
    select _c.*, row_number() over (partition by _c.key) as place{number} from (
      select * from (
        select {rows}, {phrase} as key from {say.table} where {behind} and {say.ready()}
        order by {phrase}, {say.order()} limit {steps}
      ) _f limit {most}
    ) _c
  )"""

    def _walk(self, begun: bool) -> str:
        """Ready rows, some at a time, each time of keys that come behind: as many as may run at most of a key that has
        many, and else a fixed number.
        """
        step = f"case when walk.place = walk.n then {self._limit()} else {self._step()} end"
        return f"""walk as (
  select _r.* from {self._rows(self._behind(begun), self._step(), str(self._step()))} _r where {self.say.unpaused()}
  union all
  select _r.* from (select walk.key, {step} as most from walk where walk.n = walk.most) _w
  cross join lateral {self._rows(f"{self.dim.phrase} > _w.key", self._step(), "_w.most")} _r
)"""

    def _limit(self) -> int:
        group = self.group
        return min(each.limit for each in (group.concurrency, group.process) if each is not None)

    def _step(self) -> int:
        return max(_STEP, min(self._limit(), 1000))

    def _running(self, of: str = "n") -> str:
        return f"""coalesce(_i.{of}[array_position(_i.keys, _k.key::text collate "C")], 0)"""

    def _free(self) -> str:
        """How many rows of a key may run, less those that do."""
        group, parts = self.group, []
        if group.concurrency is not None:
            parts.append(f"{group.concurrency.limit} - {self._running()}")
        if group.process is not None:
            parts.append(f"{group.process.limit} - {self._running('mine')}")
        plain = parts[0] if len(parts) == 1 else f"least({', '.join(parts)})"
        if group.concurrency is not None:
            parts[0] = f"coalesce(_o.most, {group.concurrency.limit}) - {self._running()}"
        now = self.say.plain_now()
        return f"""case when _i.told then coalesce((
      select case when _o.paused_until > {now} or _o.closed_until > {now} then 0 else least({", ".join(parts)}) end
      from {self.table} _o where {self.where} and _o.key = _k.key::text), {plain}) else {plain} end"""

    def _open_rows(self, walk: str) -> str:
        """The rows of a walk that may go."""
        return f"""from known _i cross join {walk} _k
  where _k.place <= {self._free()}
    and octet_length(_k.key::text) <= {LONGEST}"""

    def claim(self, *, begun: bool = False, loose: int = 0, quick: bool = False) -> str:
        """$1 how many, $2 the key that was served last where there is one, then worker where it is asked for.
        ``loose``: for how many rows without a key room is kept. ``quick``: of the keys that come next, as far as a
        few steps lead; for where keys have few rows each.
        """
        say, dim = self.say, self.dim
        rows, found = say._match("chosen")
        names = rows.split(", ")
        same = " and ".join(f"{name} = turns.{name}" for name in names)
        me = self._me(begun)
        walk, steps, until = "walk", f", {self._walk(begun)}", ""
        if quick:
            walk = self._rows(self._behind(begun), 8 * MOST, f"(select 8 * {self.count})", numbered=False)
            steps, until = "", f"\n    and coalesce(_k.key < _i.until, true) and {say.unpaused()}"
        return f"""with recursive {self._known(begun, quick, me)}{steps}, turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select {", ".join(f"_k.{name}" for name in names)}, _k.key,
    coalesce(width_bucket(_k.key::text collate "C", _i.first), 0) as stretch
  {self._open_rows(walk)}{until}
  limit (select {self.count}){self._kept_free(loose)}
), held as materialized (
  -- locked only if nothing has changed since the snapshot
  select _s.stretch, _l.spot from (select distinct stretch from turns) _s cross join known _i left join lateral (
    select _g.ctid as spot from {self.table} _g
    where {self.spans} and _g.key = _i.first[_s.stretch] and _g.version = _i.version[_s.stretch]
    for no key update skip locked
  ) _l on true
), picked as materialized (
  select _j.*, turns.key as _key from turns join held on held.stretch = turns.stretch and held.spot is not null
  cross join lateral (
    select {rows} from {say.table}
    where {same} and {dim.within("turns.key")} and {say.ready()}
    for no key update skip locked
  ) _j
){self._loose(rows, loose if begun or quick else None)}, chosen as (
  select {rows} from picked{self._and_loose(rows)}
), bump as (
  update {self.table} _g set {self._bumped()}
  where _g.ctid = any(array(select spot from held where spot is not null))
), taken as (
  update {say.table} set
    {say.assignments(say.claim_set(me))}
  where {found}
  {self._taken()}
order by {say.order("taken.")}"""

    def _bumped(self) -> str:
        return f"version = _g.version + 1, touched_at = {self.say.plain_now()}"

    def _taken(self) -> str:
        """What the claim answers with: the rows and their keys, the key that the walk came to, how many stretches there
        are, and, if others were met on the way, where any other one begins. In a row of its own if nothing was taken.
        """
        columns = self.say.binding.columns
        return f"""returning {self.say.names(columns)}, {self.dim.phrase}::text as _key
)
select {self.say.names(columns, "taken.")}, taken._key, _m.*
from (
  select (select key::text from turns order by key desc limit 1), coalesce(cardinality(first), 0), (
    select coalesce(first[1 + ((7 * version[stretch] + stretch) % cardinality(first))::int], '')
    from held where spot is null limit 1)
  from known
) _m left join taken on true"""

    def _seen(self) -> str:
        return f"with recursive {self._known(False, False, '$1::text')}, {self._walk(False)}\n"

    def _any_free(self) -> str:
        return f"select 0 {self._open_rows('walk')} limit 1"

    def _unused(self) -> str:
        return ""

    def mark_out(self) -> str:
        """Divide the keys of ready rows into stretches, where there are none. Of two that do so at a time one is late,
        and does nothing. Many keys are divided by a sample of the table's pages.
        """
        say, phrase, lane = self.say, self.dim.phrase, as_text(self.say.lane.name)
        ready = f"from {say.table} where {say.ready_state()}"
        size = f"select sum(pg_relation_size(relid)) from pg_partition_tree({as_text(say.table)}::regclass)"
        return f"""with recursive looked as (
  (select {phrase} as key, 1 as n {ready} and {phrase} is not null order by {phrase} limit 1)
  union all
  select _n.key, looked.n + 1 from looked cross join lateral (
    select {phrase} as key {ready} and {phrase} > looked.key order by {phrase} limit 1) _n
  where looked.n < {_LOOKED_AT}
), many as materialized (
  select count(*) = {_LOOKED_AT} as so from looked
), keys as (
  select key::text collate "C" as key from looked where not (select so from many) or n % 16 = 0
  union all
  select {phrase}::text from {say.table} tablesample system (least(100, {_SAMPLED} * 100.0 / greatest(({size}), 1)))
  where (select so from many) and {say.ready_state()} and {phrase} is not null
), parts as (
  select key, ntile({self.stretches}) over (order by key) as part from keys where octet_length(key) <= {LONGEST}
), made as (
  insert into {self.table} (lane, dim, key, version, touched_at, refilled_at)
  select {lane}, {as_text(self.span)}, '', 1, {say.plain_now()}, {say.plain_now()}
  on conflict do nothing
  returning 1
)
insert into {self.table} (lane, dim, key, version, touched_at)
select distinct {lane}, {as_text(self.span)}, min(key), 1, {say.plain_now()} from parts
where exists (select 1 from made) and part > 1 group by part
on conflict do nothing"""

    def lock_all(self) -> str:
        """Every stretch that nobody else holds."""
        return f"select 1 from {self.table} where {self.spans} for update skip locked"

    def all_of(self) -> str:
        """How many stretches there are, and whether they were made a short while ago."""
        fresh = f"max(refilled_at) > {self.say.plain_now()} - interval '{IDLE} seconds'"
        return f"select count(*), coalesce({fresh}, false) from {self.table} where {self.spans}"

    def drop_all(self) -> str:
        return f"delete from {self.table} where {self.spans}"
