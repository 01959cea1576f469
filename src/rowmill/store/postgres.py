"""A lane on PostgreSQL: the statements, and the verbs that run them.

Rules that hold for every statement here (docs/decisions has the measurements):
rows are locked FOR NO KEY UPDATE SKIP LOCKED, so nobody waits and no child row's foreign key hides a parent;
each limited step is MATERIALIZED, so the walk stops at the limit and is never run twice;
the update finds its rows by ctid, which plans as a TID scan for any key, except on partitioned tables.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ..claim import Claim, Settlement, Swept
from ..clock import Clock
from .base import LaneStore
from .binding import Binding, fence_time
from .database import Database, Run
from .documents import clean, plain
from .gating import Dimension
from .guise import Guise
from .settled import encoding
from .statements import Statements
from .swept import sweep

#: A plain claim dearer than this walks dead index entries, which only a lower bound can skip.
_DEAR, _DEAR_PER_ROW = 0.020, 0.00005
_DEAR_IN_A_ROW = 3  # one slow claim is a busy server, not a long transaction
_RESCAN, _RESCAN_SHARE = 1.0, 10.0
_MOST = 1000  # rows that one claim takes, except where somebody asks for more
_LENGTH = re.compile(r"\(\d+\)")
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
        # Columns without a time zone are UTC.
        zoned = "with time zone" in self.binding.sql_types[column]
        return moment if zoned else f"(({moment}) at time zone 'utc')"

    def now(self, column: str) -> str:
        return self._time(column, self._now())

    def present(self, column: str) -> str:
        # now() is when the statement was sent: a claim that then waited for a lock would begin with a spent lease.
        return self._time(column, self._now().replace("now()", "(select clock_timestamp())"))

    def later(self, column: str, seconds: str) -> str:
        return self._time(column, f"{self._now()} + {seconds} * interval '1 second'")

    def due(self, column: str) -> str:
        return f"{self.name(column)} <= {self.now(column)}"

    def older(self, column: str, than: timedelta, prefix: str = "") -> str:
        moment = self._time(column, f"{self._now()} - interval '{than.total_seconds()} seconds'")
        return f"{prefix}{self.name(column)} < {moment}"

    def older_own(self, column: str, than: timedelta) -> str:
        return f"{column} < {self._now()} - interval '{than.total_seconds()} seconds'"

    def plain_now(self) -> str:
        return self._now()

    def order(self, prefix: str = "") -> str:
        parts = []
        for column, descending in self.binding.order:
            nulls = " nulls last" if descending and self.binding.nullable(column) else ""
            parts.append(f"{prefix}{self.name(column)}{' desc' if descending else ''}{nulls}")
        return ", ".join(parts)

    def _match(self, step: str) -> tuple[str, str]:
        """How a step names rows, and how the update finds them."""
        if not self.binding.partitioned:
            return "ctid", f"ctid = any(array(select ctid from {step}))"
        # A ctid repeats from partition to partition.
        keys = self.names(self.binding.key)
        return keys, f"({keys}) in (select {keys} from {step})"

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

    def claim(self, most: int = _MOST, *, bounded: bool = False) -> str:
        """$1 how many, then worker where there is such a column, then the remembered lower bound.

        The inner limit tells the planner that few rows are wanted, whatever the count; the outer one, which hides the
        count from it, lets the server keep the plan. Rows are fetched one by one, and locked only as they are.
        """
        rows, found = self._match("picked")
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
), taken as (
  update {self.table} set
    {self.assignments(self.claim_set("$2::text"))}
  where {found}
  returning {self.names(self.binding.taken)}
)
select {self.shown()} from taken
order by {self.order()}"""

    def shown(self) -> str:
        """The columns of a claimed row, as the worker gets them."""
        return self.names(self.binding.taken)

    def _unpaused(self) -> str:
        return f"\n    and {self.unpaused()}" if self.gates is not None else ""

    def claim_units(self, phrases: Sequence[str], kinds: Sequence[str], absent: Sequence[str]) -> str:
        """$1 units and how many rows of each, $2 worker: rows of several keys at once (see walk)."""
        rows, found = self._match("picked")
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
  update {self.table} set
    {self.assignments(self.claim_set("$2::text"))}
  where {found}
  returning {columns}{shown}
)
select {columns}{"".join(f", _k{i}" for i in range(len(keys)))} from taken
order by {self.order()}"""

    def sent(self, columns: Sequence[str] = (), extra: Sequence[str] = ()) -> str:
        """The claims this statement is about, from one JSON document that the server itself types: $1."""
        types = self.binding.sql_types
        fields = ["_ord int"] + [f"_k{i} {types[column]}" for i, column in enumerate(self.binding.key)]
        if at := fence_time(self.binding):
            fields.append(f"_at {types[at]}")
        if "attempts" in self.roles:
            fields.append(f"_n {types[self.roles['attempts']]}")
        fields += extra
        fields += [f"_v{i} {types[column]}" for i, column in enumerate(columns)]
        return f"jsonb_to_recordset($1::text::jsonb) as s({', '.join(fields)})"

    def _same_key(self, row: str, other: str) -> str:
        return " and ".join(f"{row}.{self.name(c)} = {other}._k{i}" for i, c in enumerate(self.binding.key))

    def _fence(self, time: str = "s._at", attempts: str = "s._n", worker: str = "$2::text") -> str:
        """In a form from which no partial index follows: where few rows were running when the table was analysed, any
        index on running rows looks as good as the key's own, and would be read whole for each row.
        """
        return f"coalesce({self.fence('t', time, attempts, worker)}, false)"

    def _held(self, sent: str, fence: str | None = None) -> str:
        """The rows behind the claims that still hold, locked; a row somebody else has locked is passed over.

        Lateral, so that each is found by its key: joined, a table that was never analysed is read whole, all its
        running rows against all claims.
        """
        return f"""with held as materialized (
  select l._row, s.* from {sent}
  cross join lateral (
    select t.ctid as _row from {self.table} t
    where {self._same_key("t", "s")} and {fence or self._fence()}
    for no key update skip locked
  ) l
)"""

    def _of_held(self) -> str:
        return self._same_key("t", "held") if self.binding.partitioned else "t.ctid = held._row"

    def settle(self, kind: str, columns: Sequence[str]) -> str:
        """$1 the claims with their values, $2 worker."""
        written = self.settle_set(kind, "held._error", "held._delay")
        written |= {column: f"held._v{i}" for i, column in enumerate(columns)}
        sent = self.sent(columns, ("_error text", "_delay double precision"))
        return f"""{self._held(sent)}
update {self.table} t set
    {self.assignments(written)}
from held
where {self._of_held()}
returning held._ord"""

    @property
    def in_arrays(self) -> bool:
        """What tells one claim from another is of types that the driver sends as arrays, just as they came."""
        told = [*self.binding.key, *filter(None, self._common())]
        return all(_LENGTH.sub("", self.binding.sql_types[column]) in _IN_ARRAYS for column in told)

    def _common(self) -> tuple[str | None, str | None]:
        """The columns of the fence that rows of one claim have in common: its time, and mostly the count."""
        return fence_time(self.binding), self.roles.get("attempts")

    def settle_done(self) -> str:
        """Done with nothing beside it, which is how nearly all runs end: arrays instead of a document.

        An array for each column of the key, one with the number of each row's group, then the time, the count and
        the worker of the groups: rows that one claim took have these in common.
        """
        types, key, number = self.binding.sql_types, self.binding.key, itertools.count(1)
        keys = [f"${next(number)}::{types[column]}[]" for column in key]
        sent = f"unnest({', '.join(keys)}, ${next(number)}::int[])"
        names = ", ".join(f"_k{i}" for i in range(len(key)))
        time, count = (f"(${next(number)}::{types[c]}[])[s._g]" if c else "" for c in self._common())
        fence = self._fence(time, count, f"${next(number)}::text")
        return f"""{self._held(f"{sent} with ordinality as s({names}, _g, _ord)", fence)}
update {self.table} t set
    {self.assignments(self.settle_set("done", "null", "0"))}
from held
where {self._of_held()}
returning held._ord"""

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
        """$1 the claims, $2 worker: the rows as they are, and whether the claim holds."""
        return f"""select s._ord, {self._fence()},
  {self.names(self.binding.columns, "t.")}
from {self.sent()}
join {self.table} t on {self._same_key("t", "s")}"""

    def sweep(self, lease: timedelta) -> str:
        """$1 how many at most."""
        back, dead = self.sweep_set()
        poison = self.poison()
        if poison is not None:
            types = self.binding.sql_types  # inside a case a bare literal would be text, whatever the column is
            written = {
                c: f"case when held._poison then {dead.get(c, self.name(c))}::{types[c]}"
                f" else {back.get(c, self.name(c))} end"
                for c in dict.fromkeys([*back, *dead])
            }
        else:
            written = back
        worker = f"t.{self.name(self.roles['worker'])}" if "worker" in self.roles else "null"
        keys = ", ".join(f"t.{self.name(c)} as _k{i}" for i, c in enumerate(self.binding.key))
        stale = f"{self.running('t.')} and {self.stale(lease, 't.')}"
        return f"""with held as materialized (
  select t.ctid as _row, {keys}, {worker} as _worker, {poison or "false"} as _poison
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


class PostgresLane(LaneStore):
    """The verbs on PostgreSQL."""

    _say = PostgresStatements

    def __init__(
        self, binding: Binding, database: Database, clock: Clock, worker: str, incarnation: str, gates: bool = False
    ) -> None:
        super().__init__(binding, database, clock, worker, incarnation)
        own = (database.own("rowmill_workers"), database.own("rowmill_gates") if gates else None)
        self.statements: PostgresStatements = self._say(binding, clock, *own)
        self._texts: dict[Any, str] = {}
        self._boundable = self.statements.bound() is not None
        self._bound: tuple[Any, ...] | None = None
        self._plain_cost = 0.0
        self._plain_at = 0.0
        self._dear = 0
        self._guise = Guise(dear=0.004, per_row=0.00003)
        # Asked of the fence itself: a state's own text may hold a dollar sign and a number, too.
        self._in_arrays = self.statements.in_arrays
        self._asks_for_worker = "\0" in self.statements.fence("t", "", "", "\0")

    def _text(self, key: Any, render: Any) -> str:
        """A statement is rendered once, and again only when a test has moved the time."""
        key = (key, self.clock.shift)
        if key not in self._texts:
            self._texts[key] = render()
        return self._texts[key]

    # -- claim

    async def claim_ungated(self, count: int) -> list[Claim]:
        """Plain while that is cheap. Behind a long transaction the head of the index fills with dead entries, and
        every plain claim walks them all: then from the remembered lower bound, and plain again now and then for the
        rows that came in below it. Plain claims take a tenth of the time at most; a late row waits a second or so.
        """
        began = time.monotonic()
        bounded_now = self._bound is not None and began < self._rescan_at()
        rows = await self._claim(count, self._bound if bounded_now else None)
        self._guise.claimed(time.monotonic() - began, count)
        if bounded_now:
            self.look_again = self._rescan_at() if len(rows) < count else None
        else:
            self._plain_cost, self._plain_at = time.monotonic() - began, time.monotonic()
            self.look_again = None
            self._dear = self._dear + 1 if self._plain_cost > _DEAR + _DEAR_PER_ROW * count else 0
            if self._dear < _DEAR_IN_A_ROW or not self._boundable:
                self._bound = None
                return self.make_claims(rows, began)
        if rows and self._boundable and (bounded_now or self._bound is None):
            first = tuple(rows[0][self._at[column]] for column, _ in self.binding.order)
            if None not in first:
                self._bound = first
        return self.make_claims(rows, began)

    def forget_bound(self) -> None:
        self._bound, self._dear, self.look_again = None, 0, None

    def _rescan_at(self) -> float:
        return self._plain_at + max(_RESCAN, _RESCAN_SHARE * self._plain_cost)

    async def _claim(self, count: int, bound: tuple[Any, ...] | None) -> Sequence[Any]:
        most = _MOST if count <= _MOST else count
        text = self._text(
            ("claim", most, bound is not None, self._guise.number),
            lambda: self._guise.of(self.statements.claim(most, bounded=bound is not None)),
        )
        worker = (self.worker,) if "worker" in self.binding.roles else ()
        return await self.database.write(lambda run: run(text, (count, *worker, *(bound or ()))))

    def take_units(
        self, run: Run, present: Sequence[Dimension], absent: Sequence[str], asked: Sequence[tuple[Any, int]]
    ) -> list[list[Any]]:
        phrases = [str(dim.phrase) for dim in present]
        kinds = [dim.kind for dim in present]
        text = self._text(
            ("units", *(dim.label for dim in present)), lambda: self.statements.claim_units(phrases, kinds, absent)
        )
        document = json.dumps([{"n": n} | {f"k{i}": part for i, part in enumerate(unit)} for unit, n in asked])
        worker = (self.worker,) if "worker" in self.binding.roles else ()
        found: dict[Any, list[Any]] = {unit: [] for unit, _ in asked}
        for row in run(text, (document, *worker)):
            found[tuple(row[len(self.binding.columns) :])].append(row)
        return [found[unit] for unit, _ in asked]

    # -- settle, renew, read

    def _parameters(self, document: str) -> tuple[str, ...]:
        return (document, self.worker) if self._asks_for_worker else (document,)

    def _document(self, claims: Sequence[Claim], values: Sequence[dict[str, Any]] | None = None) -> str:
        rows = []
        times: dict[Any, Any] = {None: None}  # one claim's rows all have the same
        for i, claim in enumerate(claims):
            at = claim.claimed_at
            if at not in times:
                times[at] = plain(at)
            row: dict[str, Any] = {"_ord": i, "_at": times[at], "_n": claim.attempts}
            for k, part in enumerate(claim.key):
                row[f"_k{k}"] = part
            if values is not None:
                row.update(values[i])
            rows.append(row)
        return json.dumps(rows, default=plain, ensure_ascii=True)

    def settle_group(self, run: Run, group: Sequence[Settlement]) -> set[int]:
        kind, columns = group[0].kind, tuple(sorted(group[0].columns))
        if kind == "done" and not columns and self._in_arrays:
            text = self._text("done", self.statements.settle_done)
            return {row[0] - 1 for row in run(text, self._arrays(group))}
        text = self._text(("settle", kind, columns), lambda: self.statements.settle(kind, columns))
        with encoding():
            values = [
                {
                    "_error": s.error,
                    "_delay": s.delay.total_seconds() if s.delay is not None else 0,
                    **{f"_v{i}": self._json(column, s.columns[column]) for i, column in enumerate(columns)},
                }
                for s in group
            ]
            document = self._document([s.claim for s in group], values)
        return {row[0] for row in run(text, self._parameters(document))}

    def _arrays(self, group: Sequence[Settlement]) -> tuple[Any, ...]:
        claims = [settlement.claim for settlement in group]
        alike: dict[tuple[Any, Any], int] = {}
        groups = [alike.setdefault((claim.claimed_at, claim.attempts), len(alike) + 1) for claim in claims]
        sent: list[Any] = [*map(list, zip(*(claim.key for claim in claims), strict=True)), groups]
        if fence_time(self.binding):
            sent.append([at for at, _ in alike])
        if "attempts" in self.binding.roles:
            sent.append([count for _, count in alike])
        return (*sent, self.worker) if self._asks_for_worker else tuple(sent)

    def _json(self, column: str, value: Any) -> Any:
        if isinstance(value, datetime) and value.tzinfo and "without time zone" in self.binding.sql_types[column]:
            value = value.astimezone(UTC).replace(tzinfo=None)  # columns without a time zone are UTC
        return clean(self.encode(column, value))

    def read_claims(self, run: Run, claims: Sequence[Claim]) -> dict[int, tuple[bool, Sequence[Any]]]:
        text = self._text("read", self.statements.read)
        return {row[0]: (row[1], row[2:]) for row in run(text, self._parameters(self._document(claims)))}

    async def mine(self) -> list[Claim]:
        text = self._text("mine", lambda: self.statements.mine("$1::text", "$2"))
        values = (self.worker, self.opened_at) if fence_time(self.binding) else (self.worker,)
        rows = await self.database.read(lambda run: run(text, values))
        return self.make_claims(rows)

    async def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        text = self._text("renew", self.statements.renew)
        document = self._document(claims)
        rows = await self.database.write(lambda run: run(text, self._parameters(document)))
        renewed = []
        for position, moment in rows:
            claim = claims[position]
            if self.binding.renew == "claimed_at":
                claim.claimed_at = moment  # the fence moves with the renewal
            renewed.append(claim)
        return renewed

    async def progress(self, claim: Claim, value: Any) -> bool:
        text = self._text("progress", self.statements.progress)
        document = self._document([claim], [{"_v0": clean(value)}])
        return bool(await self.database.write(lambda run: run(text, self._parameters(document))))

    async def sweep(self, lease: timedelta, most: int = 1000) -> list[Swept]:
        text = self._text(("sweep", lease), lambda: self.statements.sweep(lease))

        def swept(row: Any) -> Swept:
            return Swept(row[2] if len(row) == 3 else tuple(row[2:]), row[0], row[1])

        return await sweep(self, lambda run: [swept(row) for row in run(text, (most,))], lease, most)

    def ready_probe(self) -> str:
        return self._text("ready", self.statements.ready_probe)

    def running_probe(self) -> str:
        return self._text("running", self.statements.running_probe)
