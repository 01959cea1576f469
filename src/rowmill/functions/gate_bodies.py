"""A lane's gates inside its functions: workers in other languages keep to the same limits, and teach them the same.

The claim is the very statement of the Python workers. What a run's end means to a breaker, ``rules.learn`` says for
them, and the bodies here say in SQL; a test holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sqlalchemy as sa

from ..declare.gates import Group
from ..errors import DeclarationError, Refused
from ..store.database import Database, Run, runner
from ..store.driver_errors import translated
from ..store.gates.claim_by_key_sql import ClaimByKeyStatements
from ..store.gates.gate_binding import BoundGates, UserTable
from ..store.gates.gate_learning import ASKED_TO_WAIT
from ..store.gates.gate_rows import as_text
from ..store.lane.binding import Binding
from ..store.lane.postgres_statements import PostgresStatements
from .resolve_names import Resolved

#: A success that changes nothing else is not written more often than this, in seconds.
_SUCCESS_EVERY = 1.0
_FOREIGN = """
select n.nspname, c.relname, c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.oid = to_regclass($1::text)"""
_KEY = """
select format_type(a.atttypid, a.atttypmod) from pg_attribute a
where a.attrelid = $1::oid and quote_ident(a.attname) = $2::text"""


@dataclass(frozen=True)
class FunctionGates:
    """The gates of a lane with every name in full: one key, and the table of gate rows."""

    dim: BoundGates
    table: str

    @property
    def tables(self) -> list[str]:
        """All tables that the gates use."""
        return list(dict.fromkeys([self.table, *(own.table for own in _own(self.dim).values())]))


def check_gates(binding: Binding, resolved: Resolved) -> None:
    """Refuse gates that functions cannot apply."""
    why = _beyond(binding, binding.lane.groups, resolved)
    if why is not None:
        raise DeclarationError(
            f"lane {binding.lane.name!r} has gates that functions cannot apply: {why[0]}", hint=why[1]
        )


def _beyond(binding: Binding, groups: tuple[Group, ...], resolved: Resolved) -> tuple[str, str] | None:
    group = groups[0]
    if len(groups) > 1 or group.by is None:
        return "they look at several keys, or at the whole lane", "gates by one column, and no pace"
    if group.by.strip() not in binding.table.c:
        return f"their key is an expression, {group.by}", 'a column as the key: by="domain"'
    if group.process is not None:
        return 'Concurrency(scope="process") is about a process of rowmill\'s', 'scope="all"'
    if group.rate is not None and group.rate.adaptive is not None:
        return "Rate.auto follows how long runs take, which only rowmill's workers tell", "Rate(n, per=...)"
    if group.breaker is not None and callable(group.breaker.counts):
        return "which failures its breaker counts, a Python function says", 'counts=("transient", "rate")'
    if resolved.path:
        return (
            f"the table's triggers ({', '.join(resolved.triggers)}) look names up in the search_path",
            "alter function ... set search_path = ... for the trigger functions",
        )
    return None


async def resolve_gates(dims: tuple[BoundGates, ...], database: Database, table: str) -> FunctionGates:
    """The gates under the names that the server gives them; ``table``: of the gate rows."""
    (dim,) = dims

    def ask(connection: sa.Connection) -> FunctionGates:
        run = runner(connection)
        with translated(database):
            schema, name, _ = run(_FOREIGN, (table,))[0]
            names = {part: run(_FOREIGN, (own.table,))[0] for part, own in _own(dim).items()}
            # From here on whatever is not the server's own is printed with its schema.
            run("set local search_path = pg_catalog", ())
            owned = {part: _named(run, database, own, names[part]) for part, own in _own(dim).items()}
            try:
                run(f"select null::{dim.kind}", ())
            except Refused as error:
                raise DeclarationError(
                    f"the gates' key {dim.group.by!r} is of a type that is not the server's own: {dim.kind}",
                    hint="a text or number column as the key",
                ) from error
            return FunctionGates(
                replace(dim, rate=owned.get("rate"), breaker=owned.get("breaker")), _full(database, schema, name)
            )

    async with database.begin() as connection:
        gates: FunctionGates = await connection.run_sync(ask)
    return gates


def _own(dim: BoundGates) -> dict[str, UserTable]:
    return {part: own for part in ("rate", "breaker") if (own := getattr(dim, part)) is not None}


def _named(run: Run, database: Database, own: UserTable, resolved: tuple[str, str, int]) -> UserTable:
    schema, name, oid = resolved
    ((kind,),) = run(_KEY, (oid, own.key))
    return replace(own, table=_full(database, schema, name), key_type=kind)


def _full(database: Database, schema: str, name: str) -> str:
    quote = database.dialect.identifier_preparer.quote
    return f"{quote(schema)}.{quote(name)}"


class GateBodies:
    """What a lane's functions say about its gates; ``count``: SQL for how many rows a claim takes."""

    def __init__(self, statements: PostgresStatements, gates: FunctionGates, count: str = "1") -> None:
        self.statements, self.dim, self.group, self.table = statements, gates.dim, gates.dim.group, gates.table
        self.claims = ClaimByKeyStatements(statements, gates.dim, gates.table, in_function=count)
        self.where = self.claims.where

    def find_last(self) -> str:
        """Behind the last key that was served; after a try that found nothing, anywhere: others may claim there."""
        claims, range_rows = self.claims, f"from {self.table} _g where {self.claims.range_rows}"
        return f"""if not exists (select 1 {range_rows}) then
      {claims.create_first_range()};
      if found then
        {claims.create_ranges(claims.range_starts())};
      end if;
    end if;
    if _rm_try = 1 then
      select _g.cells into _rm_last {range_rows} and _g.cells is not null order by _g.touched_at desc limit 1;
    else
      {claims.renew_ranges()};
      if found then
        {claims.create_ranges(claims.range_starts())};
      end if;
      select nullif(_g.key, '') into _rm_last {range_rows} order by random() limit 1;
    end if"""

    def claim_variables(self) -> str:
        """What ``claim`` declares."""
        return "" if self.group.rate is None else "\n  _rm_keys text[];\n  _rm_any boolean := false;"

    def claim(self, *, after_last: bool) -> str:
        """Return the rows that a claim takes, and leave the loop if there are any. Keys that need a row get it now: the
        next claim takes their rows.
        """
        claim = self.claims.claim(after_last=after_last)
        if self.group.rate is None:
            return f"return query\n    {claim};\n    exit when found;"
        return f"""for _rm_row in
      {claim}
    loop
      _rm_keys := _rm_row._rm_missing;
      if not (_rm_row._rm_job is null) then
        _rm_any := true;
        return next _rm_row._rm_job;
      end if;
    end loop;
    {self.claims.create_keys("_rm_keys")};
    exit when _rm_any;"""

    # -- what gates learn

    def _held(self) -> str:
        """The gate's row of ``_rm_key``, made where it is missing and locked: what two learn at a time adds up."""
        return f"""insert into {self.table} (lane, dim, key, touched_at)
    select {self._spot()}, now() where not exists (
      select 1 from {self.table} _g where {self.where} and _g.key = _rm_key)
    on conflict do nothing;
    perform 1 from {self.table} _g where {self.where} and _g.key = _rm_key for no key update;"""

    def _spot(self) -> str:
        lane, dim = (part.replace("'", "''") for part in (self.statements.lane.name, self.dim.label))
        return f"'{lane}', '{dim}', _rm_key"

    def _state(self) -> tuple[str, dict[str, str], str]:
        """Where the breaker's state stands: the table, its columns by what they mean, the condition for the row."""
        names = ("streak", "open_until", "last_success_at", "last_failure_at")
        if self.dim.breaker is None:
            return f"{self.table} _g", {name: name for name in names}, f"{self.where} and _g.key = _rm_key"
        own = self.dim.breaker
        columns = {name: column for name in names if (column := getattr(self.dim.columns, name)) is not None}
        return own.table, {name: own.quote(c) for name, c in columns.items()}, own.of("_rm_key")

    def _after(self, name: str, seconds: str) -> str:
        if self.dim.breaker is None:
            return f"clock_timestamp() + {seconds} * interval '1 second'"
        return self.dim.breaker.after(getattr(self.dim.columns, name), seconds)

    def _written(self, values: dict[str, str], times: dict[str, str], also: str = "") -> str:
        """The statement that updates the breaker's state; ``times``: by the name that ``values`` and ``also`` use."""
        table, columns, row = self._state()
        parts = [f"{columns[name]} = {value}" for name, value in values.items() if name in columns]
        if self.dim.breaker is None:
            parts.append("version = _g.version + 1")
        return f"update {table} set {', '.join(parts)}\n    {_step(times)}\n    where {row}{also}"

    def succeeded(self) -> str:
        """A run of ``_rm_key`` succeeded: reset its failure streak."""
        if self.group.breaker is None:
            return ""
        table, columns, row = self._state()
        worth = f"{columns['streak']} <> 0 or {columns['open_until']} is not null"
        times, values = {}, {"streak": "0", "open_until": "null", "last_success_at": "_rm_s._rm_now"}
        if (at := columns.get("last_success_at")) is not None:
            times = {"_rm_now": self._after("last_success_at", "0"),
                     "_rm_before": self._after("last_success_at", str(-_SUCCESS_EVERY))}  # fmt: skip
            worth += f" or {at} is null or {at} < _rm_s._rm_before"
        alone = f"{table} {_step(times).replace('from', 'cross join')}" if times else table
        return f"""  -- Where the key is well, and that was written a moment ago, there is nothing to lock and to write.
  if exists (select 1 from {alone} where {row} and ({worth})) then
    {self._held()}
    {self._written(values, times, f" and ({worth})")};
  end if;
"""

    def failed(self, permanent: str, retry_after: str, closes: str) -> str:
        """A run of ``_rm_key`` failed; ``retry_after`` (SQL): the other side asked to be left alone for so long, by all
        rows of the lane where ``closes`` (SQL) is 'lane'.
        """
        lane = as_text(self.statements.lane.name)
        until = {"_rm_now": "clock_timestamp()", "_rm_until": f"clock_timestamp() + {retry_after}"}
        # Before the key's row: all who lock gate rows do so in the order of their keys.
        parts = [
            f"""  if {closes} = 'lane' and {retry_after} > interval '0' then
    insert into {self.table} (lane, dim, key, touched_at) values ({lane}, '', '', now()) on conflict do nothing;
    update {self.table} _g set version = _g.version + 1, paused_until = _rm_s._rm_until, paused_at = _rm_s._rm_now,
      reason = {as_text(ASKED_TO_WAIT)}
    {_step(until)}
    where lane = {lane} and dim = '' and key = '' and coalesce(_g.paused_until < _rm_s._rm_until, true);
  end if;
  if _rm_key is not null then
    {self._held()}"""
        ]
        if (breaker := self.group.breaker) is not None:
            # In brackets: outside of them a condition ends for PL/pgSQL at the first "then".
            refused = f"when {retry_after} is not null then 'rate' else 'transient'"
            word = f"(case when {permanent} then 'permanent' {refused} end)"
            counted = ", ".join(f"'{each}'" for each in breaker.counts)  # type: ignore[union-attr]
            _, columns, _ = self._state()
            streak, opened = f"coalesce({columns['streak']}, 0) + 1", columns["open_until"]
            times = {"_rm_now": self._after("open_until", "0"),
                     "_rm_until": self._after("open_until", f"{breaker.cooldown.total_seconds()}")}  # fmt: skip
            if "last_failure_at" in columns:
                times["_rm_at"] = self._after("last_failure_at", "0")
            still = f"coalesce({opened} > _rm_s._rm_now, false)"
            values = {
                "streak": streak,
                # One that ends badly while the gate is open was under way before; it does not keep it open longer.
                "open_until": f"case when {streak} >= {breaker.failures} and not {still}"
                f" then _rm_s._rm_until else {opened} end",
                "last_failure_at": "_rm_s._rm_at",
            }
            parts.append(f"""    if {word} in ({counted}) then
      {self._written(values, times)};
    end if;""")
        parts.append(f"""    if {retry_after} > interval '0' then
      update {self.table} _g set version = _g.version + 1,
        closed_until = greatest(_g.closed_until, _rm_s._rm_until)
      {_step(until)}
      where {self.where} and _g.key = _rm_key;
    end if;
  end if;
""")
        return "\n".join(parts)


def _step(times: dict[str, str]) -> str:
    """The FROM of an update that writes these times: one that calls the clock is refused by a distributed planner."""
    listed = ", ".join(f"{time} as {name}" for name, time in times.items())
    return f"from (select {listed}) _rm_s" if times else ""
