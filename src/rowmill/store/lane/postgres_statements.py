"""What a lane says to PostgreSQL.

Rules that hold for every statement here (docs/decisions has the measurements):
rows are locked FOR NO KEY UPDATE SKIP LOCKED, so nobody waits and no child row's foreign key hides a parent;
each limited step is MATERIALIZED, so the walk stops at the limit and is never run twice;
the update finds its rows by ctid, which plans as a TID scan for any key, except on partitioned tables;
an update assigns no volatile function, gives no column to a stable one, and has neither in CASE, COALESCE or RETURNING:
times are columns of an earlier step. A distributed planner refuses the rest (docs/explanation/scale.md).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta

from .statements import Statements

_MOMENT = "_rm_moment"  # the step that tells the time at which rows were locked
MOST = 1000  # rows that one claim takes, except where somebody asks for more
_LENGTH = re.compile(r"\(\d+\)")
#: Types that the driver sends in an array just as they came.
_IN_ARRAYS = (
    "bigint", "integer", "smallint", "uuid", "text", "character varying", "timestamp with time zone",
    "timestamp without time zone",
)  # fmt: skip


class PostgresStatements(Statements):
    """What a lane says to PostgreSQL."""

    def _now(self) -> str:
        shift = self.clock.shift.total_seconds()
        return f"(now() + interval '{shift} seconds')" if shift else "now()"

    def _time(self, column: str, moment: str) -> str:
        zoned = "with time zone" in self.binding.sql_types[column]
        return moment if zoned else f"(({moment}) at time zone '{self.lane.timezone or 'utc'}')"

    def only_arguments(self, names: str) -> str:
        others = f"args - array[{names}]::text[]"
        return f"case when jsonb_typeof(args) = 'object' then {others} = '{{}}'::jsonb else true end"

    def typed(self, column: str, value: str) -> str:
        return f"{value}::{self.binding.sql_types[column]}"

    def now(self, column: str) -> str:
        return self._time(column, self._now())

    def present(self, column: str) -> str:
        return self._time(column, f"{_MOMENT}._rm_at")

    def moment(self, written: Mapping[str, str], step: str | None = None, indent: str = "") -> str:
        """The FROM of an update that writes the ``present``; ``step``: after the rows of this step were locked."""
        if not any(_MOMENT in value for value in written.values()):
            return ""
        # now() is when the statement was sent: a claim that then waited for a lock would begin with a spent lease.
        clock = self._now().replace("now()", "clock_timestamp()")
        locked = f" from {step} having count(*) > 0" if step else ""
        return f"\n{indent}from (select {clock} as _rm_at{locked}) {_MOMENT}"

    def update(self, written: Mapping[str, str], step: str, indent: str = "    ") -> str:
        """The update of the rows that a step has locked."""
        _, matching = self._match(step)
        return f"""update {self.table} set
{indent}{self.assignments(written, indent)}{self.moment(written, step, indent[2:])}
{indent[2:]}where {matching}"""

    def claim_one(self, worker: str, condition: str) -> str:
        taken = f"{super().claim_one(worker, condition)}"
        if not self.lane.inputs:
            return taken
        return f"with taken as (\n{taken}\n)\nselect {self.shown()}{self.and_inputs('taken.')} from taken"

    def later(self, column: str, seconds: str) -> str:
        return self._time(column, f"{self._now()} + {seconds} * interval '1 second'")

    def due(self, column: str) -> str:
        return f"{self.name(column)} <= {self.now(column)}"

    def older(self, column: str, than: timedelta, prefix: str = "") -> str:
        moment = self._time(column, f"{self._now()} - interval '{than.total_seconds()} seconds'")
        return f"{prefix}{self.name(column)} < {moment}"

    def older_own(self, column: str, than: timedelta) -> str:
        return f"{column} < {self._now()} - interval '{than.total_seconds()} seconds'"

    def instant(self, column: str, prefix: str = "") -> str:
        name = prefix + self.name(column)
        zoned = "with time zone" in self.binding.sql_types[column]
        return name if zoned else f"({name} at time zone '{self.lane.timezone or 'utc'}')"

    def own_instant(self, column: str) -> str:
        return column

    def instant_now(self, by: timedelta) -> str:
        seconds = by.total_seconds()
        return f"{self._now()} {'-' if seconds < 0 else '+'} interval '{abs(seconds)} seconds'"

    def plain_now(self) -> str:
        return self._now()

    def order(self, prefix: str = "", names: Sequence[str] = ()) -> str:
        """``names``: what the columns of the order are called instead."""
        parts = []
        for i, (column, descending) in enumerate(self.binding.order):
            nulls = " nulls last" if descending and self.binding.nullable(column) else ""
            name = names[i] if names else f"{prefix}{self.name(column)}"
            parts.append(f"{name}{' desc' if descending else ''}{nulls}")
        return ", ".join(parts)

    def _match(self, step: str) -> tuple[str, str]:
        """How a step names rows, and how the update finds them."""
        if self.lane.own:
            return "ctid", f"ctid = any(array(select ctid from {step}))"
        if not self.binding.partitioned:
            # A table may get children (INHERITS, a hypertable's chunks) while workers run, and a ctid repeats in each.
            # Mostly all rows are of one table; to look them up in pairs would make the claim a tenth dearer.
            one = " and ".join(f"tableoid = (select {end}(tableoid) from {step})" for end in ("min", "max"))
            pairs = f"(tableoid, ctid) in (select tableoid, ctid from {step})"
            return "ctid, tableoid", f"ctid = any(array(select ctid from {step})) and ({one} or {pairs}){self.shard()}"
        # A ctid repeats from partition to partition.
        keys = self.names(self.binding.key)
        return keys, f"({keys}) in (select {keys} from {step}){self.shard()}"

    def write_rows(self, written: Mapping[str, str], condition: str) -> str:
        picked, _ = self._match("picked")
        return f"""with picked as materialized (
  select {picked} from {self.table} where {condition} for no key update skip locked
)
{self.update(written, "picked")} returning 1"""

    def write_step(self, written: Mapping[str, str], condition: str, limit: int) -> list[str]:
        keys, (picked, _) = self.names(self.binding.key), self._match("picked")
        return [
            f"""with picked as materialized (
  select {picked} from {self.table}
  where {condition}
  order by {keys}
  limit {limit}
  for no key update skip locked
), taken as (
  {self.update(written, "picked")}
  returning {keys}
)
select {keys} from taken order by {keys}"""
        ]

    def bound(self) -> str | None:
        """The lower bound on the order, as a condition over the last parameters; None where the order goes down."""
        if any(descending for _, descending in self.binding.order):
            return None
        columns = [column for column, _ in self.binding.order]
        values = ", ".join(
            f"${i}::{self.binding.sql_types[column]}"
            for i, column in enumerate(columns, 3 if "worker" in self.roles else 2)
        )
        return f"({self.names(columns)}) >= ({values})"

    def claim(self, most: int = MOST, *, bounded: bool = False) -> str:
        """$1 how many, then worker where there is such a column, then the remembered lower bound.

        The inner limit tells the planner that few rows are wanted, whatever the count; the outer one, which hides the
        count from it, lets the server keep the plan. Rows are fetched one by one, and locked only as they are.
        """
        return f"""{self._picking(most, bounded)}, taken as (
  {self._taking(self.names(self.binding.taken))}
)
select {self.shown()}{self.and_inputs()} from taken
order by {self.order()}"""

    def claim_texts(self) -> dict[str, str]:
        """The claim's statements, by what they do."""
        texts = {"claim": self.claim()}
        if self.bound() is not None:
            texts["claim, from the remembered lower bound"] = self.claim(bounded=True)
        return texts

    def done_texts(self) -> dict[str, str]:
        """The statements for done, by what they do."""
        settle = self.settle("done", ())
        if not self.in_arrays:
            return {"settle, done": settle}
        return {"settle, done": self.settle_done(), "settle, done, with columns": settle}

    def sweep_texts(self, lease: timedelta) -> dict[str, str]:
        """The sweep's statements, by what they do."""
        return {"sweep": self.sweep(lease)}

    def _picking(self, most: int, bounded: bool) -> str:
        rows, _ = self._match("picked")
        bound = f"\n    and {self.bound()}" if bounded else ""
        return f"""with picked as materialized (
  select * from (
    select {rows} from {self.table}
    where {self.ready()}{bound}{self._unpaused()}
    order by {self.order()}
    limit {most}
    for no key update skip locked
  ) first
  limit (select $1::bigint)
)"""

    def _taking(self, returned: str) -> str:
        return f"""{self.update(self.claim_set("$2::text"), "picked")}
  returning {returned}"""

    def shown(self) -> str:
        """The columns of a claimed row, as the worker gets them."""
        return self.names(self.binding.taken)

    def _unpaused(self) -> str:
        return f"\n    and {self.unpaused()}" if self.gates is not None else ""

    def claim_units(self, phrases: Sequence[str], kinds: Sequence[str], absent: Sequence[str]) -> str:
        """$1 units and how many rows of each, $2 worker: rows of several keys at once (see walk)."""
        rows, _ = self._match("picked")
        keys = [f"{phrase} = s.k{i}::{kind}" for i, (phrase, kind) in enumerate(zip(phrases, kinds, strict=True))]
        fields = ", ".join(["n bigint", *(f"k{i} text" for i in range(len(keys)))])
        shown = "".join(f", {phrase}::text as _k{i}" for i, phrase in enumerate(phrases))
        columns = self.names(self.binding.columns)
        return f"""with picked as materialized (
  select _j.* from jsonb_to_recordset($1::text::jsonb) as s({fields})
  cross join lateral (
    select {rows} from {self.table}
    where {" and ".join([*keys, *absent, self.ready()])}
    order by {self.order()}
    limit s.n
    for no key update skip locked
  ) _j
), taken as (
  {self.update(self.claim_set("$2::text"), "picked")}
  returning {columns}
)
select {columns}{self.and_inputs()}{shown} from taken
order by {self.order()}"""

    def sent(self, columns: Sequence[str] = (), extra: Sequence[str] = ()) -> str:
        """The claims this statement is about, from one JSON document that the server itself types: $1."""
        types = self.binding.sql_types
        fields = ["_ord int"] + [f"_k{i} {types[column]}" for i, column in enumerate(self.binding.key)]
        if at := self.binding.fence_time:
            fields.append(f"_at {types[at]}")
        if "attempts" in self.roles:
            fields.append(f"_n {types[self.roles['attempts']]}")
        fields += extra
        fields += [f"_v{i} {types[column]}" for i, column in enumerate(columns)]
        return f"jsonb_to_recordset($1::text::jsonb) as s({', '.join(fields)})"

    def _same_key(self, row: str, other: str) -> str:
        same = " and ".join(f"{row}.{self.name(c)} = {other}._k{i}" for i, c in enumerate(self.binding.key))
        return f"{same}{self.shard(f'{row}.')}"

    def _fence(self, time: str = "s._at", attempts: str = "s._n", worker: str = "$2::text") -> str:
        """In a form from which no partial index follows: where few rows were running when the table was analysed, any
        index on running rows looks as good as the key's own, and would be read whole for each row.
        """
        return f"coalesce({self.fence('t', time, attempts, worker)}, false)"

    def _held(self, sent: str, fence: str | None = None, computed: str = "") -> str:
        """The rows behind the claims that still hold, locked; a row somebody else has locked is passed over.
        ``computed``: further columns of the step.

        Lateral, so that each is found by its key: joined, a table that was never analysed is read whole, all its
        running rows against all claims.
        """
        return f"""with held as materialized (
  select l.*, s.*{computed} from {sent}
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from {self.table} t
    where {self._same_key("t", "s")} and {fence or self._fence()}
    for no key update skip locked
  ) l
)"""

    def _of_held(self) -> str:
        if self.binding.partitioned:
            return self._same_key("t", "held")
        return f"t.ctid = held._row and t.tableoid = held._table{self.shard('t.')}"

    # -- inputs: compared by a fingerprint, whatever their type and size, and whatever the session's settings

    def fingerprint(self, prefix: str = "") -> str:
        """The row's inputs as one short text."""
        return f"encode(sha256(record_send(row({self.names(self.lane.inputs, prefix)}))), 'hex')"

    def and_inputs(self, prefix: str = "") -> str:
        return f", {self.fingerprint(prefix)} as _inputs" if self.lane.inputs else ""

    def row_id(self, parts: Sequence[str]) -> str:
        texts = [f"{part}::text" for part in parts]
        return texts[0] if len(texts) == 1 else f"array[{', '.join(texts)}]::text"

    def _forgotten(self, kind: str) -> str:
        """The step that forgets a row whose inputs changed, with an outcome that is final."""
        if not self.bounded or not self.compares(kind):
            return ""
        row_id = self.row_id([f"held._k{i}" for i in range(len(self.binding.key))])
        ids = f"(select {row_id} as _id from held) h"
        return f", forgotten as (\n  delete from {self.stale_runs} using {ids} where {self.noted('h._id')}\n)"

    def note_stale_runs(self) -> str:
        """$1 claims whose rows' inputs changed."""
        row_id = self.row_id([f"s._k{i}" for i in range(len(self.binding.key))])
        return self.note_stale(row_id, f"\nfrom {self.sent()}\norder by 2")

    def settle(self, kind: str, columns: Sequence[str], *, compare: bool = True) -> str:
        """$1 the claims with their values, $2 worker. ``compare``: only where the inputs are as they were."""
        written, computed = self.settle_set(kind, "held._error", "held._delay"), ""
        if kind in ("retry", "snooze") and (column := self.roles.get("run_after")):
            written[column], computed = "held._due", f", {self.later(column, 's._delay')} as _due"
        written |= {column: f"held._v{i}" for i, column in enumerate(columns)}
        compared = compare and self.compares(kind)
        inputs = ("_inputs text",) if compared else ()
        sent = self.sent(columns, ("_error text", "_delay double precision", *inputs))
        fence = f"{self._fence()} and {self.fingerprint('t.')} = s._inputs" if compared else None
        return f"""{self._held(sent, fence, computed)}{self._forgotten(kind)}
update {self.table} t set
    {self.assignments(written)}
from held
where {self._of_held()}
returning held._ord"""

    def settle_wait(self, until: str, columns: Sequence[str], waits: str) -> list[str]:
        """$1 the claims with their values, $2 worker: the rows wait. Then, of those that were written, $1 alone:
        ``waits`` remembers for what.
        """
        due, keys = self.roles["run_after"], [f"s._k{i}" for i in range(len(self.binding.key))]
        same = " and ".join(f"{self.name(c)} = {key}" for c, key in zip(self.binding.key, keys, strict=True))
        same += self.shard()
        written = self.settle_wait_set(until, "s._delay", same)
        computed, written[due] = f", {written[due]} as _due", "held._due"
        written |= {column: f"held._v{i}" for i, column in enumerate(columns)}
        settle = f"""{self._held(self.sent(columns, ("_delay double precision",)), computed=computed)}
update {self.table} t set
    {self.assignments(written)}
from held
where {self._of_held()}
returning held._ord"""
        values = f"""(
  select s._id, jsonb_build_array({", ".join(keys)}) as _key, s._condition, {self.due_text("t.")} as _due,
    s._seconds, s._then
  from {self.sent(extra=("_seconds double precision", "_then text", "_id text", "_condition text"))}
  join {self.table} t on {self._same_key("t", "s")}
  where not (t.{self.name(due)} <= {self.now(due)})
) w"""
        return [settle, self.wait_row(waits, values)]

    def due_text(self, prefix: str = "") -> str:
        return f"cast(extract(epoch from {prefix}{self.name(self.roles['run_after'])}) as text)"

    def same_waiting_key(self, row: str) -> str:
        types = self.binding.sql_types
        return " and ".join(
            f"{row}{self.name(c)} = cast(_w.key ->> {i} as {types[c]})" for i, c in enumerate(self.binding.key)
        )

    def in_time(self, seconds: str) -> str:
        return f"{self._now()} + ({seconds}) * interval '1 second'"

    @property
    def in_arrays(self) -> bool:
        """What tells one claim from another is of types that the driver sends as arrays, just as they came."""
        columns = [*self.binding.key, *filter(None, self._common())]
        return all(_LENGTH.sub("", self.binding.sql_types[column]) in _IN_ARRAYS for column in columns)

    def _common(self) -> tuple[str | None, str | None]:
        """The columns of the fence that rows of one claim have in common: its time, and mostly the count."""
        return self.binding.fence_time, self.roles.get("attempts")

    def settle_done(self, *, compare: bool = True) -> str:
        """Done with nothing beside it, which is how nearly all runs end: arrays instead of a document.

        An array for each column of the key, one with the number of each row's group, then the time, the count and
        the worker of the groups: rows that one claim took have these in common.
        """
        types, key, number = self.binding.sql_types, self.binding.key, itertools.count(1)
        compared = compare and self.compares("done")
        keys = [f"${next(number)}::{types[column]}[]" for column in key]
        sent = f"unnest({', '.join(keys)}, ${next(number)}::int[]{f', ${next(number)}::text[]' if compared else ''})"
        names = ", ".join(f"_k{i}" for i in range(len(key)))
        time, count = (f"(${next(number)}::{types[c]}[])[s._g]" if c else "" for c in self._common())
        fence = self._fence(time, count, f"${next(number)}::text")
        fence += f" and {self.fingerprint('t.')} = s._inputs" if compared else ""
        fields = f"{names}, _g{', _inputs' if compared else ''}, _ord"
        # Which of them were written comes as one array, which the driver reads at once: a row each takes it longer.
        return f"""{self._held(f"{sent} with ordinality as s({fields})", fence)}{self._forgotten("done")}, written as (
  update {self.table} t set
    {self.assignments(self.settle_set("done", "null", "0"))}
  from held
  where {self._of_held()}
  returning held._ord
)
select array_agg(_ord - 1) from written"""

    def renew(self) -> str:
        """$1 the claims, $2 worker."""
        column = self.roles[self.binding.renew]
        return f"""{self._held(self.sent())}
update {self.table} t set {self.name(column)} = {self.now(column)}
from held
where {self._of_held()}
returning held._ord, t.{self.name(column)}"""

    def progress(self) -> str:
        """$1 the claim with its progress, $2 worker."""
        column = self.roles["progress"]
        return f"""{self._held(self.sent([column]))}
update {self.table} t set {self.name(column)} = held._v0
from held
where {self._of_held()}
returning held._ord"""

    def read(self) -> str:
        """$1 the claims, $2 worker: the rows as they are, and whether the claim holds; with inputs also whether these
        are as they were, and whether they have kept changing for too long.
        """
        inputs, extra = "", list[str]()
        if self.lane.inputs:
            row_id = self.row_id([f"s._k{i}" for i in range(len(self.binding.key))])
            inputs = f",\n  {self.fingerprint('t.')} = s._inputs, {self.kept_changing(row_id)}"
            extra = ["_inputs text"]
        return f"""select s._ord, {self._fence()},
  {self.names(self.binding.columns, "t.")}{inputs}
from {self.sent(extra=extra)}
join {self.table} t on {self._same_key("t", "s")}"""

    def expire(self, most: int) -> str:
        rows, _ = self._match("picked")
        return f"""with picked as materialized (
  select {rows} from {self.table}
  where {self.expired()}
  limit {most}
  for no key update skip locked
)
{self.update(self.expired_set(), "picked")}
returning {self.names(self.binding.key)}"""

    def sweep(self, lease: timedelta) -> str:
        """$1 how many at most."""
        back, dead = self.sweep_set()
        poison = self.poison()
        if poison is not None:
            types = self.binding.sql_types  # inside a case a bare literal would be text, whatever the column is

            def chosen(column: str) -> str:
                own, now = self.name(column), self.now(column)
                ends = [set_.get(column, own) for set_ in (dead, back)]
                if ends[0] == ends[1]:
                    return ends[0]
                ends = [self._time(column, "held._now") if end == now else end for end in ends]
                return f"case when held._poison then {ends[0]}::{types[column]} else {ends[1]} end"

            written = {column: chosen(column) for column in dict.fromkeys([*back, *dead])}
        else:
            written = back
        now = f", {self._now()} as _now" if any("held._now" in value for value in written.values()) else ""
        worker = f"t.{self.name(self.roles['worker'])}" if "worker" in self.roles else "null"
        keys = ", ".join(f"t.{self.name(c)} as _k{i}" for i, c in enumerate(self.binding.key))
        stale = f"{self.running('t.')} and {self.stale(lease, 't.')}{self.not_passed('t.')}"
        return f"""with held as materialized (
  select t.ctid as _row, t.tableoid as _table, {keys}, {worker} as _worker, {poison or "false"} as _poison{now}
  from {self.table} t
  where {stale}
  limit $1::bigint
  for no key update skip locked
)
update {self.table} t set
    {self.assignments(written)}
from held
where {self._of_held()}
returning held._worker, held._poison, {self.names(self.binding.key, "t.")}"""
