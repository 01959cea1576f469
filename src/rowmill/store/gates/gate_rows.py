"""The rows of ``rowmill_gates``: read, locked and written, on both databases.

A claim that takes rows of a key, or changes its state, writes the key's row and increments ``version``. Another claim
compares the version to see that nothing changed since it read the row. (With all gates on one key, claims write the
rows of ranges instead.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ...clock import Clock
from ..database import Database, Run
from .rules import GateState

if TYPE_CHECKING:
    from ..lane.statements import Statements

Spot = tuple[str, str]  # dim, key
#: A pause without an end: more seconds than any real pause has left, and the value in the row.
ENDLESS = 1e11
_ENDLESS_FROM, _NEVER = 3e10, "9999-12-31 00:00:00"
#: PostgreSQL cannot index a key with more bytes than this. Rows with such a key are not claimed, and block no
#: others.
LONGEST = 2000
#: Types with several spellings of equal values (1.0 and 1.00), or of one value in two sessions.
_LOOSE = ("numeric", "float4", "float8", "interval", "timestamptz", "jsonb", "citext", "record")
_FORMAT = "'%Y-%m-%d %H:%M:%f'"
#: Fields that may be written: as they are, or as a time this many seconds from now.
_PLAIN = {"tokens": "double precision", "delay": "double precision", "cells": "text", "streak": "integer",
          "reason": "text", "most": "integer"}  # fmt: skip
_TIMES = ("open_until", "closed_until", "paused_until", "paused_at", "last_success_at",
          "last_failure_at", "touched_at")  # fmt: skip


@dataclass
class GateChange:
    """New values for a gate's row; None clears a value. Times are seconds from now, ``refilled_at`` since 1970."""

    dim: str
    key: str
    values: dict[str, Any] = field(default_factory=dict)


class GateRows:
    """The gate rows of one lane in one environment (or, with an empty lane, those of the environment)."""

    def __init__(self, database: Database, clock: Clock, lane: str) -> None:
        self.database, self.clock, self.lane = database, clock, lane
        self.sql, self.table = database.sql, database.own("rowmill_gates")

    @staticmethod
    def open(database: Database, clock: Clock, lane: str) -> GateRows:
        """The rows of a lane, for this database's dialect."""
        return _BY_DIALECT[database.dialect.name](database, clock, lane)

    # -- time, by the database's clock

    def now(self) -> str:
        """The database's time, in the format of these rows. On PostgreSQL: the start of the transaction."""
        raise NotImplementedError

    def present(self) -> str:
        """The current time, which advances within a transaction: a transaction may have waited for a lock."""
        return self.now().replace("now()", "clock_timestamp()")

    def until(self, column: str) -> str:
        """Seconds from the present to a column's time; negative if it is past."""
        raise NotImplementedError

    def after(self, seconds: str) -> str:
        """The time so many seconds (an SQL expression) from the present."""
        raise NotImplementedError

    def at(self, epoch: str) -> str:
        """The time so many seconds after 1970."""
        raise NotImplementedError

    def _epoch(self) -> str:
        """The present in seconds since 1970."""
        raise NotImplementedError

    #: The value in the row of a pause without an end.
    never: str

    def endless(self) -> str:
        """The condition for a pause without an end."""
        return f"{self.until('paused_until')} > {_ENDLESS_FROM}"

    @staticmethod
    def left(seconds: float) -> float:
        """The seconds that ``until`` returned for a pause; infinite if it has no end."""
        return math.inf if seconds > _ENDLESS_FROM else seconds

    def epoch(self, run: Run) -> float:
        """The database's present time in seconds since 1970."""
        return float(run(f"select {self._epoch()}", ())[0][0])

    def literal(self, text: str) -> str:
        """Text as SQL."""
        return "'" + text.replace("'", "''") + "'"

    # -- read

    def fields(self, g: str = "") -> str:
        """The columns that ``state`` reads; ``g`` is the row's alias with a dot."""
        times = [self.until(g + name) for name in ("refilled_at", "open_until", "closed_until", "paused_until")]
        plain = [g + name for name in ("dim", "key", "version", "tokens", "delay", "streak", "reason", "most", "cells")]
        return ", ".join([*plain, *times, self._epoch()])

    @staticmethod
    def state(row: Sequence[Any]) -> tuple[Spot, GateState]:
        """A row of ``fields`` as a key and a state."""
        dim, key, version, tokens, delay, streak, reason, most, cells, refilled, opened, closed, paused, at = row
        paused = GateRows.left(paused) if paused is not None else None
        state = GateState(
            key=key,
            version=version,
            at=at,
            tokens=tokens,
            elapsed=-refilled if refilled is not None else 0.0,
            delay=delay,
            streak=streak,
            open_for=opened,
            closed_for=closed,
            paused_for=paused,
            reason=reason,
            most=most,
            cells=cells,
        )
        return (dim, key), state

    def read(self, run: Run, spots: Iterable[Spot], *, lock: str = "") -> dict[Spot, GateState]:
        """Read these rows, if they exist; ``lock``: PostgreSQL's locking clause."""
        raise NotImplementedError

    def lock(self, run: Run, spots: Iterable[Spot], *, wait: bool) -> dict[Spot, GateState]:
        """Lock these rows until the transaction ends, and create those that are missing.

        Without ``wait``, rows that another transaction has locked are left out. All that wait lock in the order of the
        key.
        """
        wanted = sorted(dict.fromkeys(spots))
        if not wanted:
            return {}
        lock = "for no key update" + ("" if wait else " skip locked")
        states = self.read(run, wanted, lock=lock)
        missing = [spot for spot in wanted if spot not in states]
        if missing:
            # If two transactions create them at the same time, the second one waits in the insert for the first one's
            # commit.
            self.make(run, missing)
            states |= self.read(run, missing, lock=lock)
        return states

    def make(self, run: Run, spots: Sequence[Spot]) -> None:
        """Create rows for keys that have none."""
        raise NotImplementedError

    # -- write

    def write(self, run: Run, changes: Iterable[GateChange]) -> None:
        """Write rows that this transaction has locked (``lock``), and increment their versions."""
        alike: dict[tuple[str, ...], list[GateChange]] = {}
        for change in changes:
            alike.setdefault(tuple(sorted(change.values)), []).append(change)
        for names, group in alike.items():
            self._write_alike(run, names, group)

    def _write_alike(self, run: Run, names: tuple[str, ...], group: list[GateChange]) -> None:
        """Write changes that set the same columns."""
        raise NotImplementedError

    def _value(self, name: str, mark: str) -> str:
        """What is written to a column, from the value in a change."""
        if name in _PLAIN:
            return mark
        assert name in (*_TIMES, "refilled_at"), name
        return f"case when {mark} is null then null else {self._moment(name, mark)} end"

    @staticmethod
    def _assigned(names: Sequence[str], values: Sequence[str], version: str) -> str:
        """A change as the SET of an update."""
        written = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
        return ", ".join([f"version = {version} + 1", *written])

    def _moment(self, name: str, mark: str) -> str:
        if name == "refilled_at":  # the moment at which the tokens were counted
            return self.at(mark)
        if name != "paused_until":
            return self.after(mark)
        return f"case when {mark} > {_ENDLESS_FROM} then {self.never} else {self.after(mark)} end"

    # -- keys, and tables of the user's own

    def too_long(self, key: str) -> bool:
        """Whether the key is too long for an index. Its rows are not claimed, and block no others."""
        raise NotImplementedError

    def key_kind(self, run: Run, phrase: str, statements: Statements) -> tuple[str, bool]:
        """Return the SQL type of a key (empty if not needed), and whether equal keys may have several spellings.

        Each spelling would have its own gate row, and so its own limit. The check reads no rows.
        """
        raise NotImplementedError

    def time_kinds(self, types: dict[str, str], kinds: dict[str, Any]) -> dict[str, str]:
        """How the columns of a user's table store times, as ``until_in`` and ``after_in`` expect it."""
        raise NotImplementedError

    def until_in(self, name: str, kind: str) -> str:
        """Seconds from now to the time in a column of a user's table."""
        raise NotImplementedError

    def after_in(self, kind: str, seconds: str) -> str:
        """The time this many seconds from now, in the format of a column of a user's table."""
        raise NotImplementedError


class PostgresGateRows(GateRows):
    """Reads and writes many rows in one statement; compares keys in their own type and collation."""

    never = f"timestamptz '{_NEVER}Z'"

    def now(self) -> str:
        shift = self.clock.shift.total_seconds()
        return f"(now() + interval '{shift} seconds')" if shift else "now()"

    def until(self, column: str) -> str:
        return f"extract(epoch from {column} - {self.present()})::float8"

    def after(self, seconds: str) -> str:
        return f"{self.present()} + {seconds} * interval '1 second'"

    def at(self, epoch: str) -> str:
        return f"to_timestamp({epoch})"

    def _epoch(self) -> str:
        return f"extract(epoch from {self.present()})::float8"

    def read(self, run: Run, spots: Iterable[Spot], *, lock: str = "") -> dict[Spot, GateState]:
        text = f"""select {self.fields("g.")} from {self.table} g
where g.lane = {self.literal(self.lane)} and (g.dim, g.key) in (
  select s.dim, s.key from jsonb_to_recordset($1::text::jsonb) as s(dim text, key text))
order by g.dim, g.key {lock}"""
        return dict(self.state(row) for row in run(text, (_as_json(dict.fromkeys(spots)),)))

    def make(self, run: Run, spots: Sequence[Spot]) -> None:
        text = f"""insert into {self.table} (lane, dim, key, touched_at)
select {self.literal(self.lane)}, s.dim, s.key, {self.now()}
from jsonb_to_recordset($1::text::jsonb) as s(dim text, key text)
order by s.dim collate "C", s.key collate "C"
on conflict do nothing"""
        run(text, (_as_json(spots),))

    def _write_alike(self, run: Run, names: tuple[str, ...], group: list[GateChange]) -> None:
        kinds = ["dim text", "key text"] + [f"v{i} {_PLAIN.get(name, 'float8')}" for i, name in enumerate(names)]
        values = [f"{self._value(name, f's.v{i}')} as v{i}" for i, name in enumerate(names)]
        written = self._assigned(names, [f"s.v{i}" for i in range(len(names))], "g.version")
        # Times are columns of a step: an update that calls the clock is refused by a distributed planner.
        text = f"""update {self.table} g set {written}
from (
  select {", ".join(["s.dim", "s.key", *values])} from jsonb_to_recordset($1::text::jsonb) as s({", ".join(kinds)})
) s
where g.lane = {self.literal(self.lane)} and g.dim = s.dim and g.key = s.key"""
        rows = [{"dim": c.dim, "key": c.key} | {f"v{i}": c.values[name] for i, name in enumerate(names)} for c in group]
        run(text, (json.dumps(rows),))

    def too_long(self, key: str) -> bool:
        return len(key.encode()) > LONGEST

    def key_kind(self, run: Run, phrase: str, statements: Statements) -> tuple[str, bool]:
        probe, collation, loose = f"(select {phrase} from {statements.whole_table()} limit 0)", None, False
        kind = run(f"select pg_typeof({probe})::text", ())[0][0]
        if run(f"select typcollation <> 0 from pg_type where oid = '{kind}'::regtype", ())[0][0]:
            collation = run(f"select pg_collation_for({probe})", ())[0][0]
        if collation is not None:
            exact = "select collisdeterministic from pg_collation where oid = $1::text::regcollation"
            loose = not run(exact, (collation,))[0][0]
        text = """select b.typname, e.typname from pg_type t
join pg_type b on b.oid = case when t.typbasetype <> 0 then t.typbasetype else t.oid end
left join pg_type e on e.oid = b.typelem and b.typcategory = 'A'
where t.oid = $1::text::regtype"""
        loose = loose or any(name in _LOOSE for name in run(text, (kind,))[0])
        kind = "bpchar" if kind == "character" else kind
        # The gate's key has its own collation. Without the column's collation, no index on the column could be used.
        return f"{kind} collate {collation}" if collation else kind, loose

    def time_kinds(self, types: dict[str, str], kinds: dict[str, Any]) -> dict[str, str]:
        return types

    def until_in(self, name: str, kind: str) -> str:
        moment = self.now() if "with time zone" in kind else f"({self.now()} at time zone 'utc')"
        return f"extract(epoch from {name} - {moment})::float8"

    def after_in(self, kind: str, seconds: str) -> str:
        moment = self.after(seconds)
        return moment if "with time zone" in kind else f"(({moment}) at time zone 'utc')"


class SqliteGateRows(GateRows):
    """SQLite has one writer at a time, so nothing is locked. Rows are read and written one by one."""

    never = f"'{_NEVER}'"

    def now(self) -> str:
        return f"strftime({_FORMAT}, 'now', '{self.clock.shift.total_seconds():+} seconds')"

    def until(self, column: str) -> str:
        return f"(julianday({column}) - julianday({self.present()})) * 86400.0"

    def after(self, seconds: str) -> str:
        return f"strftime({_FORMAT}, {self.present()}, ({seconds}) || ' seconds')"

    def at(self, epoch: str) -> str:
        return f"strftime({_FORMAT}, {epoch}, 'unixepoch')"

    def _epoch(self) -> str:
        return f"(julianday({self.present()}) - 2440587.5) * 86400.0"

    def read(self, run: Run, spots: Iterable[Spot], *, lock: str = "") -> dict[Spot, GateState]:
        lane = self.literal(self.lane)
        text = f"select {self.fields()} from {self.table} where lane = {lane} and dim = :dim and key = :key"
        wanted = dict.fromkeys(spots)
        return dict(self.state(row) for dim, key in wanted for row in run(text, {"dim": dim, "key": key}))

    def make(self, run: Run, spots: Sequence[Spot]) -> None:
        lane = self.literal(self.lane)
        text = f"insert or ignore into {self.table} (lane, dim, key) values ({lane}, :dim, :key)"
        for dim, key in spots:
            run(text, {"dim": dim, "key": key})

    def _write_alike(self, run: Run, names: tuple[str, ...], group: list[GateChange]) -> None:
        written = self._assigned(names, [self._value(name, f":v{i}") for i, name in enumerate(names)], "version")
        text = f"""update {self.table} set {written}
where lane = {self.literal(self.lane)} and dim = :dim and key = :key"""
        for change in group:
            values = {f"v{i}": change.values[name] for i, name in enumerate(names)}
            run(text, {"dim": change.dim, "key": change.key, **values})

    def too_long(self, key: str) -> bool:
        return False

    def key_kind(self, run: Run, phrase: str, statements: Statements) -> tuple[str, bool]:
        text = f"select k = 'A' from (select {phrase} as k from {statements.table} where 0 union all select 'a')"
        return "", bool(run(text, ())[0][0])

    def time_kinds(self, types: dict[str, str], kinds: dict[str, Any]) -> dict[str, str]:
        numeric = (sa.Integer, sa.Numeric, sa.Float)
        return {column: "seconds" if isinstance(kind, numeric) else "text" for column, kind in kinds.items()}

    def until_in(self, name: str, kind: str) -> str:
        if kind == "seconds":
            return f"({name} - (julianday({self.now()}) - 2440587.5) * 86400.0)"
        return self.until(name)

    def after_in(self, kind: str, seconds: str) -> str:
        moment = self.after(seconds)
        return f"cast(strftime('%s', {moment}) as integer)" if kind == "seconds" else moment


_BY_DIALECT: dict[str, type[GateRows]] = {"postgresql": PostgresGateRows, "sqlite": SqliteGateRows}


def _as_json(spots: Iterable[Spot]) -> str:
    return json.dumps([{"dim": dim, "key": key} for dim, key in spots])


def as_text(value: str) -> str:
    """Text as an SQL literal, safe for any content and any server settings."""
    quoted = value.replace("'", "''")
    return "E'" + quoted.replace("\\", "\\\\") + "'" if "\\" in value else f"'{quoted}'"
