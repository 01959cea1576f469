"""A lane on SQLite: the statements, and the verbs that run them.

Every write is one transaction that begins IMMEDIATE, so there is one writer at a time and what was read inside
it still holds when it is written. RETURNING gives rows in whatever order they were found: claims are sorted here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from ...clock import Clock
from ..database import Database, Run
from ..gates.gate_binding import BoundGates
from ..unreadable_values import Unreadable
from .binding import Binding
from .claim import Claim, Settlement, Swept, encoding
from .lane_store import LaneStore
from .statements import Statements
from .sweep import sweep
from .waits import waiting_values

_NUMBERS = (sa.Integer, sa.Numeric, sa.Float)  # Float is a Numeric only before SQLAlchemy 2.1
_FORMAT = "'%Y-%m-%d %H:%M:%f'"


class SqliteStatements(Statements):
    """What a lane says to SQLite."""

    greatest = "max"

    def _moment(self, *modifiers: str) -> str:
        shift = self.clock.shift.total_seconds()
        moved = [f"'{shift:+} seconds'"] if shift else []
        return ", ".join(["'now'", *moved, *modifiers])

    def _in(self, column: str, moment: str) -> str:
        """A moment in the column's own form: text, or seconds since 1970."""
        kind = self.binding.kinds[column]
        if isinstance(kind, sa.Integer):
            return f"cast(strftime('%s', {moment}) as integer)"
        if isinstance(kind, (sa.Numeric, sa.Float)):
            return f"(julianday({moment}) - 2440587.5) * 86400.0"
        return f"strftime({_FORMAT}, {moment})"

    def _read(self, column: str, prefix: str = "") -> str:
        """A column's time in a form that compares, whichever way it was written (with T, with Z, with neither)."""
        kind = self.binding.kinds[column]
        name = prefix + self.name(column)
        return name if isinstance(kind, _NUMBERS) else f"julianday({name})"

    def _compared(self, column: str, moment: str) -> str:
        kind = self.binding.kinds[column]
        return self._in(column, moment) if isinstance(kind, _NUMBERS) else f"julianday({moment})"

    def now(self, column: str) -> str:
        return self._in(column, self._moment())

    def later(self, column: str, seconds: str) -> str:
        return self._in(column, self._moment(f"{seconds} || ' seconds'"))

    def due(self, column: str) -> str:
        if self.lane.own:  # one form of times is sure there: the index itself can be compared, parked rows and all
            return f"{self.name(column)} <= {self.now(column)}"
        return f"{self._read(column)} <= {self._compared(column, self._moment())}"

    def older(self, column: str, than: timedelta, prefix: str = "") -> str:
        moment = self._moment(f"'-{than.total_seconds()} seconds'")
        return f"{self._read(column, prefix)} < {self._compared(column, moment)}"

    def older_own(self, column: str, than: timedelta) -> str:
        moment = self._moment(f"'-{than.total_seconds()} seconds'")
        return f"julianday({column}) < julianday({moment})"

    def instant(self, column: str, prefix: str = "") -> str:
        kind, name = self.binding.kinds[column], prefix + self.name(column)
        if isinstance(kind, sa.Integer):  # the end of that second: no lease is cut short
            return f"(({name} + 1) / 86400.0 + 2440587.5)"
        return f"({name} / 86400.0 + 2440587.5)" if isinstance(kind, _NUMBERS) else f"julianday({name})"

    def own_instant(self, column: str) -> str:
        return f"julianday({column})"

    def instant_now(self, by: timedelta) -> str:
        moment = self._moment(f"'{by.total_seconds():+} seconds'")
        return f"julianday({moment})"

    long_ago = "0.0"

    def plain_now(self) -> str:
        return f"strftime({_FORMAT}, {self._moment()})"

    def order(self) -> str:
        """SQLite sorts NULL first going up; here it goes last. The leading column is left as its index has it."""
        parts = []
        for n, (column, descending) in enumerate(self.binding.order):
            last = " nulls last" if n and not descending and self.binding.nullable(column) else ""
            parts.append(f"{self.name(column)}{' desc' if descending else ''}{last}")
        return ", ".join(parts)

    def write_rows(self, written: Mapping[str, str], condition: str) -> str:
        return f"update {self.table} set\n    {self.assignments(written)}\nwhere {condition} returning 1"

    def write_step(self, written: Mapping[str, str], condition: str, limit: int) -> list[str]:
        keys = self.names(self.binding.key)
        find = f"select {keys} from {self.table} where {condition} order by {keys} limit {limit}"
        # One transaction, one writer: the update finds the very rows that were found before it.
        return [
            find,
            f"update {self.table} set\n    {self.assignments(written)}\nwhere ({keys}) in ({find}){self.shard()}",
        ]

    def loose(self) -> str | None:
        """The leading column of the order, if it goes up and may be NULL: rows without a place in it go last."""
        column, descending = self.binding.order[0]
        return column if self.binding.nullable(column) and column not in self.binding.key and not descending else None

    def only_arguments(self, names: str) -> str:
        others = f"exists (select 1 from json_each(args) where key not in ({names}))"
        return f"case when not json_valid(args) or json_type(args) <> 'object' then 1 else not {others} end"

    def claim(self, *, placed: bool | None = None, also: Sequence[str] = ()) -> str:
        """:worker, :count. ``placed`` True: only rows with a place in the order; False: only those without."""
        keys = self.names(self.binding.key)
        place = ""
        if (column := self.loose()) and placed is not None:
            place = f" and {self.name(column)} is {'not ' if placed else ''}null"
        further = "".join(f" and {test}" for test in (also or ([self.unpaused()] if self.gates else [])))
        return f"""update {self.table} set
    {self.assignments(self.claim_set(":worker"))}
where ({keys}) in (
  select {keys} from {self.table}
  where {self.ready()}{place}{further}
  order by {self.order()}
  limit :count
){self.shard()}
returning {self.names(self.binding.taken)}"""

    # -- inputs: compared by value, as SQLite keeps it, whatever the column's collation

    def unchanged(self) -> str:
        """The row's inputs are as its claim returned them."""
        tests = []
        for i, column in enumerate(self.lane.inputs):
            name = self.name(column)
            kept = f"cast({name} as blob) is cast(:_i{i} as blob)"
            tests.append(f"case typeof({name}) when 'text' then {kept} else {name} is :_i{i} end")
        return " and ".join(tests)

    def row_id(self, parts: Sequence[str]) -> str:
        return f"cast({parts[0]} as text)" if len(parts) == 1 else " || ',' || ".join(f"quote({p})" for p in parts)

    def sent_id(self) -> str:
        """The key of a claim's row as one text."""
        return self.row_id([f":_k{i}" for i in range(len(self.binding.key))])

    def forget_stale(self) -> str:
        """An outcome is final: forget the row's runs whose inputs changed."""
        return f"delete from {self.stale_runs} where {self.noted(self.sent_id())}"

    def claim_texts(self) -> dict[str, str]:
        """The claim's statements, by what they do."""
        if not self.loose():
            return {"claim": self.claim()}
        without = "claim, of rows without a place in the order"
        return {"claim": self.claim(placed=True), without: self.claim(placed=False)}

    def done_texts(self) -> dict[str, str]:
        """The statements for done, by what they do."""
        return {"settle, done": self.settle("done", ())}

    def sweep_texts(self, lease: timedelta) -> dict[str, str]:
        """The sweep's statements, by what they do."""
        texts = {"sweep, find": self.find_stale(lease), "sweep, back to ready": self.sweep(poison=False)}
        return texts if self.poison() is None else {**texts, "sweep, poison": self.sweep(poison=True)}

    def _this(self) -> str:
        """The one row of a claim, if the claim still holds."""
        return f"{self.same_key()} and {self.fence(self.table, ':_at', ':_n', ':worker')}"

    def same_key(self) -> str:
        same = " and ".join(f"{self.name(column)} = :_k{i}" for i, column in enumerate(self.binding.key))
        return f"{same}{self.shard()}"

    def settle(self, kind: str, columns: Sequence[str], *, compare: bool = True) -> str:
        """``compare``: only where the inputs are as they were."""
        written = self.settle_set(kind, ":_error", ":_delay")
        written |= {column: f":_v{i}" for i, column in enumerate(columns)}
        same = f" and {self.unchanged()}" if compare and self.compares(kind) else ""
        return f"""update {self.table} set
    {self.assignments(written)}
where {self._this()}{same}
returning 1"""

    def settle_wait(self, until: str, columns: Sequence[str], waits: str) -> list[str]:
        """The row waits: what writes it and says whether it is due at once, and what remembers for what it waits."""
        written = self.settle_wait_set(until, ":_delay", self.same_key())
        written |= {column: f":_v{i}" for i, column in enumerate(columns)}
        key = ", ".join(f":_k{i}" for i in range(len(self.binding.key)))
        values = (
            f"(select :_id as _id, json_array({key}) as _key, :_condition as _condition, :_due as _due,"
            " :_seconds as _seconds, :_then as _then) where true"
        )
        settle = f"""update {self.table} set
    {self.assignments(written)}
where {self._this()}
returning {self.due_text()}, {self.due(self.roles["run_after"])}"""
        return [settle, self.wait_row(waits, values)]

    def due_text(self, prefix: str = "") -> str:
        return f"cast({prefix}{self.name(self.roles['run_after'])} as text)"

    def same_waiting_key(self, row: str) -> str:
        return " and ".join(
            f"{row}{self.name(column)} = json_extract(_w.key, '$[{i}]')" for i, column in enumerate(self.binding.key)
        )

    def in_time(self, seconds: str) -> str:
        return f"strftime({_FORMAT}, {self._moment(f'({seconds}) || ' + repr(' seconds'))})"

    def renew(self) -> str:
        column = self.roles[self.binding.renew]
        return f"""update {self.table} set {self.name(column)} = {self.now(column)}
where {self._this()}
returning {self.name(column)}"""

    def progress(self) -> str:
        column = self.roles["progress"]
        return f"update {self.table} set {self.name(column)} = :_v0\nwhere {self._this()}\nreturning 1"

    def read(self) -> str:
        fence = self.fence(self.table, ":_at", ":_n", ":worker")
        inputs = f", {self.unchanged()}, {self.kept_changing(self.sent_id())}" if self.lane.inputs else ""
        return f"""select coalesce({fence}, 0), {self.names(self.binding.columns)}{inputs}
from {self.table}
where {self.same_key()}"""

    def expire(self, most: int) -> str:
        keys = self.names(self.binding.key)
        return f"""update {self.table} set
    {self.assignments(self.expired_set())}
where ({keys}) in (
  select {keys} from {self.table}
  where {self.expired()}
  limit {most}
){self.shard()}
returning {keys}"""

    def find_stale(self, lease: timedelta) -> str:
        worker = self.name(self.roles["worker"]) if "worker" in self.roles else "null"
        return f"""select {worker}, {self.poison() or "0"}, {self.names(self.binding.key)}
from {self.table}
where {self.running()} and {self.stale(lease, self.table + ".")}{self.not_passed()}
limit :most"""

    def sweep(self, *, poison: bool) -> str:
        back, dead = self.sweep_set()
        return f"""update {self.table} set
    {self.assignments(dead if poison else back)}
where {self.same_key()} and {self.running()}"""


class SqliteLane(LaneStore):
    """The verbs on SQLite."""

    def __init__(
        self, binding: Binding, database: Database, clock: Clock, worker: str, incarnation: str, gates: bool = False
    ) -> None:
        super().__init__(binding, database, clock, worker, incarnation)
        self.statements: SqliteStatements = SqliteStatements(binding, clock, gates="rowmill_gates" if gates else None)
        self.statements.passed = self.passed
        self._texts = {}

    def _text(self, key: Any, render: Any) -> str:
        key = (key, self.clock.shift, self.passed.version)
        if key not in self._texts:
            self._texts[key] = render()
        return self._texts[key]

    async def claim_ungated(self, count: int) -> list[Claim]:
        began = time.monotonic()
        rows = await self.database.write(lambda run: self._take(run, count), tolerant=self.tolerant)
        return self.make_claims(rows, began)

    @property
    def claims_in_transaction(self) -> bool:
        return True

    def _take(self, run: Run, count: int, also: tuple[str, ...] = (), given: dict[str, Any] | None = None) -> list[Any]:
        """Rows with a place in the order first; those without only where room is left."""
        rows: list[Any] = []
        for placed in [True, False] if self.statements.loose() else [None]:
            text = self._text(
                ("claim", placed, also), lambda placed=placed: self.statements.claim(placed=placed, also=also)
            )
            values = {"worker": self.worker, "count": count - len(rows), **(given or {})}
            rows += self._sorted(run(text, values))
            if len(rows) >= count:
                break
        return rows

    def take_units(
        self, run: Run, present: Sequence[BoundGates], absent: Sequence[str], asked: Sequence[tuple[Any, int]]
    ) -> list[list[Any]]:
        also = (*(dim.matches(f":k{i}") for i, dim in enumerate(present)), *absent) or ("1 = 1",)
        return [self._take(run, n, also, {f"k{i}": part for i, part in enumerate(unit)}) for unit, n in asked]

    def _sorted(self, rows: Sequence[Any]) -> list[Any]:
        """In the lane's order, one column after the other from the last to the first; NULL last both ways."""
        listed = list(rows)
        for column, descending in reversed(self.binding.order):
            at = self._at[column]
            placed = sorted((row for row in listed if row[at] is not None), key=_sort_key(at), reverse=descending)
            listed = placed + [row for row in listed if row[at] is None]
        return listed

    def _values(self, claim: Claim) -> dict[str, Any]:
        values = {f"_k{i}": part for i, part in enumerate(claim.key)}
        values |= {f"_i{i}": value for i, value in enumerate(claim.inputs or ())}
        return {**values, "_at": claim.claimed_at, "_n": claim.attempts, "worker": self.worker}

    def inputs_of(self, row: Sequence[Any]) -> Any:
        values = [row[self._at[column]] for column in self.lane.inputs]
        return tuple(value.raw if isinstance(value, Unreadable) else value for value in values)

    async def keep_step(self, claim: Claim, table: str, name: str, result: Any) -> bool:
        say = self.statements
        text = f"""insert into {table} (job_id, name, result)
select :_k0, :_name, :_result where exists (select 1 from {say.table} where {say._this()})
on conflict (job_id, name) do update set result = excluded.result
returning 1"""
        values = {**self._values(claim), "_name": name, "_result": json.dumps(result)}
        return bool(await self.database.write(lambda run: run(text, values)))

    def settling(self, group: Sequence[Settlement], *, compare: bool = True) -> Callable[[Run], set[int]]:
        return lambda run: self._settle_one_by_one(run, group, compare)

    def _settle_one_by_one(self, run: Run, group: Sequence[Settlement], compare: bool) -> set[int]:
        kind, columns = group[0].kind, tuple(sorted(group[0].columns))
        remember = None
        if group[0].wait is not None and self.waits is not None:
            text, remember = self.statements.settle_wait(group[0].wait.until, columns, self.waits.table)
        else:
            text = self._text(
                ("settle", kind, columns, compare), lambda: self.statements.settle(kind, columns, compare=compare)
            )
        note = self._note_text(run, kind) if self.lane.inputs else None
        written = set()
        for position, settlement in enumerate(group):
            values = self._values(settlement.claim)
            values["_error"] = settlement.error
            values["_delay"] = settlement.delay.total_seconds() if settlement.delay is not None else 0
            with encoding():
                for i, column in enumerate(columns):
                    values[f"_v{i}"] = self._stored(column, settlement.columns[column])
            if settlement.wait is not None:
                values |= waiting_values(settlement.claim, settlement.wait)
            if rows := run(text, values):
                written.add(position)
                if note is not None:
                    run(note, values)
                if remember is not None and not rows[0][1]:
                    run(remember, {**values, "_due": rows[0][0]})
        return written

    def _note_text(self, run: Run, kind: str) -> str | None:
        """What is written beside an outcome about rows whose inputs changed; None: nothing."""
        say = self.statements
        if not say.bounded:
            return None
        if kind == "stale":
            return self._text("note stale", lambda: say.note_stale(say.sent_id()))
        if not say.compares(kind):
            return None
        some = self._text("some stale", lambda: f"select 1 from {say.stale_runs} where {say.of_lane()} limit 1")
        return self._text("forget stale", say.forget_stale) if run(some, ()) else None

    def _stored(self, column: str, value: Any) -> Any:
        kind = self.binding.table.c[column].type
        if isinstance(kind, sa.DateTime) and isinstance(value, datetime) and value.tzinfo is not None:
            value = value.astimezone(UTC).replace(tzinfo=None)  # columns without a time zone are UTC
        value = self.encode(column, value)
        if isinstance(kind, sa.JSON) or isinstance(value, (dict, list, tuple, set, frozenset)):
            return None if value is None else json.dumps(value, default=_plain)
        if isinstance(value, datetime):
            plain = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
            return plain.isoformat(" ", "microseconds")
        if isinstance(value, clock_time):
            return value.isoformat()
        if isinstance(value, (date, UUID, Decimal)):
            return str(value)
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode("utf-8")
        return value

    def _read_claims(self, run: Run, claims: Sequence[Claim]) -> dict[int, tuple[bool, Sequence[Any]]]:
        text = self._text("read", self.statements.read)
        rows_by_claim = {}
        for position, claim in enumerate(claims):
            for row in run(text, self._values(claim)):
                rows_by_claim[position] = (bool(row[0]), row[1:])
        return rows_by_claim

    async def mine(self) -> list[Claim]:
        text = self._text("mine", lambda: self.statements.mine(":worker", ":since"))
        rows = await self.database.read(lambda run: run(text, {"worker": self.worker, "since": self.opened_at}))
        return self.find_claims(rows)

    async def _renew(self, claims: Sequence[Claim]) -> list[Claim]:
        text = self._text("renew", self.statements.renew)

        def verb(run: Run) -> list[tuple[Claim, Any]]:
            renewed = [(claim, run(text, self._values(claim))) for claim in claims]
            return [(claim, rows[0][0]) for claim, rows in renewed if rows]

        renewed = await self.database.write(verb)
        if self.binding.renew == "claimed_at" and self.binding.fence_time:
            for claim, moment in renewed:
                claim.claimed_at = moment  # the fence moves with the renewal
        return [claim for claim, _ in renewed]

    async def _progress(self, claim: Claim, value: Any) -> bool:
        text = self._text("progress", self.statements.progress)
        values = {**self._values(claim), "_v0": self._stored(self.binding.roles["progress"], value)}
        return bool(await self.database.write(lambda run: run(text, values)))

    async def sweep(self, lease: timedelta, most: int = 1000) -> list[Swept]:
        find = self._text(("stale", lease), lambda: self.statements.find_stale(lease))
        texts = {p: self._text(("sweep", p), lambda p=p: self.statements.sweep(poison=p)) for p in (False, True)}

        def verb(run: Run) -> list[Swept]:
            swept = []
            for worker, poison, *key in run(find, {"most": most}):
                run(texts[bool(poison)], {f"_k{i}": part for i, part in enumerate(key)})
                swept.append(Swept(key[0] if len(key) == 1 else tuple(key), worker, bool(poison)))
            return swept

        return await sweep(self, verb, lease, most, look=True)

    def ready_probe(self) -> str:
        return self._text("ready", self.statements.ready_probe)

    def running_probe(self) -> str:
        return self._text("running", self.statements.running_probe)


def _plain(value: Any) -> Any:
    """Values JSON has no word for."""
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def _sort_key(position: int) -> Callable[[Any], tuple[int, Any]]:
    """One column in SQLite's own order: numbers, text, blobs."""

    def key(row: Any) -> tuple[int, Any]:
        value = row[position].raw if isinstance(row[position], Unreadable) else row[position]
        return (0 if isinstance(value, (int, float)) else 1 if isinstance(value, str) else 2, value)

    return key
