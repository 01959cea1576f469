"""The bodies of a lane's functions, made of the same phrases as the statements of the Python workers.

What differs: a verb is about one claim, so it waits for the row's lock instead of passing over it; the claim's time is
compared to the millisecond, which is as much as other languages keep of it; and a claim sweeps where nothing is ready,
since there may be no Python worker to do so. Parameters stand as $1, $2: a column may have any name.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from ..clock import Clock
from ..declare import states
from ..declare.retry import LONGEST, Exponential, Fixed
from ..store.bounded_text import ERROR_LENGTH
from ..store.gates.gate_rows import as_text
from ..store.lane.binding import Binding
from ..store.lane.postgres_statements import PostgresStatements
from ..store.lane.statements import POISONED
from ..store.lane.sweep import NOT_BACK
from .gate_bodies import FunctionGates, GateBodies
from .resolve_names import Resolved

_SWEPT_BY_A_CLAIM = 100
#: How often a claim through gates looks before it answers with nothing.
_TRIES = 3


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function; its default is SQL."""

    name: str
    type: str
    default: str = ""


class FunctionStatements(PostgresStatements):
    """The phrases of a lane with every name in full."""

    def __init__(self, binding: Binding, resolved: Resolved, gates: FunctionGates | None = None) -> None:
        super().__init__(
            replace(binding, sql_types=resolved.types), Clock(), gates=gates.table if gates is not None else None
        )
        self.resolved, self._gates = resolved, gates
        self.table = f"{self.name(resolved.schema)}.{self.name(resolved.name)}"
        self.stale_runs = resolved.stale_runs
        # With schemas in the path an operator there could fit a column's type better than the server's own.
        self.equals = " operator(pg_catalog.=) " if resolved.path else " = "

    def name(self, column: str) -> str:
        # Words of PL/pgSQL that mean nothing to SQL, and would end a statement here.
        if column in ("loop", "begin", "if", "while", "foreach", "exception", "execute", "declare", "strict", "by"):
            return f'"{column}"'
        return super().name(column)

    def condition(self, values: states.Values, prefix: str = "") -> str:
        if not self.resolved.path:
            return super().condition(values, prefix)
        parts = []
        for column, value in values.items():
            name = prefix + self.name(column)
            if test := states.null_test(value):
                parts.append(f"{name} {test}")
                continue
            tests = [
                f"{name} is null" if option is None else f"{name}{self.equals}{self.literal(column, option)}"
                for option in states.options(value)
            ]
            parts.append(tests[0] if len(tests) == 1 else f"({' or '.join(tests)})")
        return " and ".join(parts)

    def ready_state(self) -> str:
        return self.resolved.conditions.get("ready") or super().ready_state()

    def further(self) -> str:
        return self.resolved.conditions["where"]

    def stale(self, lease: timedelta, prefix: str = "") -> str:
        # No function remembers when it first saw a row: one that tells no time is taken back at once.
        return f"({super().stale(lease, prefix)} or {self.timeless(lease, prefix)})"

    def _same_key(self, row: str, other: str) -> str:
        key = " and ".join(f"{row}.{self.name(c)}{self.equals}{other}._k{i}" for i, c in enumerate(self.binding.key))
        return f"{key}{self.shard(f'{row}.')}"

    # -- the parameters of a verb about one claim, and the condition they make

    @property
    def fenced(self) -> list[Parameter]:
        """The key, and the columns that must be unchanged for the claim to hold."""
        return [Parameter(name, kind) for name, kind, _ in self._fenced()]

    def _fenced(self) -> list[tuple[str, str, str]]:
        """Parameter, its type, its column."""
        roles, types = self.roles, self.binding.sql_types
        fields = [("worker", "text", roles.get("worker")), ("claimed_at", "", self.binding.fence_time),
                 ("attempts", "", roles.get("attempts"))]  # fmt: skip
        mark = [(role, kind or types[c], c) for role, kind, c in fields if c]
        taken = {"worker", "claimed_at", "attempts", "result", "error", "delay", "permanent", "batch", "poison",
                 "previous_worker", *(["inputs"] if self.lane.inputs else [])}  # fmt: skip
        keys = [(f"key_{c}" if c in taken else c, types[c], c) for c in self.binding.key]
        return keys + mark

    def holds(self) -> str:
        """The fence as SQL: the row is this one, as the claim left it. $1 and on are the ``fenced`` parameters."""
        parts = []
        for place, (parameter, _, column) in enumerate(self._fenced(), 1):
            name, mark = self.name(column), f"${place}"
            if parameter != "claimed_at":
                parts.append(f"{name}{self.equals}{mark}")
                continue
            # Not the column's own date_trunc: a distributed planner gives no column to a stable function.
            since, at_least, below = f"pg_catalog.date_trunc('milliseconds'::text, {mark})", " >= ", " < "
            if self.resolved.path:
                at_least, below = (f" operator(pg_catalog.{each.strip()}) " for each in (at_least, below))
            parts += [f"{name}{at_least}{since}", f"{name}{below}({since} + interval '1 millisecond')"]
        return "\n    and ".join([" and ".join(parts), self.running()])

    # -- inputs

    @property
    def ended(self) -> list[Parameter]:
        """What a verb takes that ends a run: also the inputs that it worked from."""
        return [*self.fenced, *([Parameter("inputs", "text")] if self.lane.inputs else [])]

    def fingerprint(self, prefix: str = "") -> str:
        sent = f"pg_catalog.record_send(row({self.names(self.lane.inputs, prefix)}))"
        return f"pg_catalog.encode(pg_catalog.sha256({sent}), 'hex'::text)"

    def _row_id(self) -> str:
        return self.row_id([f"${place}" for place in range(1, len(self.binding.key) + 1)])

    def _is_stale(self) -> str:
        """The row's inputs are not those that the run worked from, and may still be waited for."""
        changed = f"not ({self.fingerprint()}{self.equals}${len(self.ended)})"
        return f"{changed} and not {self.kept_changing(self._row_id())}" if self.bounded else changed

    def _unnamed(self, verb: str) -> str:
        """Refuse an end that does not say what the run worked from."""
        if not self.lane.inputs:
            return ""
        seen = "what the function for inputs gives for the row as it was claimed"
        return _refusal(f"${len(self.ended)} is null", f"{verb} needs inputs: {seen}")

    def _note(self, indent: str) -> str:
        """One more run of a row whose inputs changed."""
        return _indented(f"{self.note_stale(self._row_id())};", indent) if self.bounded else ""

    def _forget(self, indent: str) -> str:
        """An outcome is final: the row's runs whose inputs changed are forgotten."""
        text = f"delete from {self.stale_runs} where {self.noted(self._row_id())};"
        return _indented(text, indent) if self.bounded else ""

    def _go_back(self, indent: str) -> str:
        """The row is ready again."""
        written = self.assignments(self.settle_set("stale", "null", "null"), "  ")
        return _indented(f"update {self.table} set\n  {written}\nwhere {self.holds()};", indent)

    def inputs_body(self) -> str:
        """$1 a row as a claim returned it."""
        return f"begin\n  return {self.fingerprint('($1).')};\nend"

    def _stale_first(self, place: int) -> str:
        """Where the inputs changed, complete ends here; unless what the run returned is to be written all the same."""
        if not self.lane.inputs:
            return ""
        if self.lane.stale == "write":
            then = f"""{self._note("    ")}    if ${place} is null or ${place} = '{{}}'::jsonb then
{self._go_back("      ")}      return false;
    end if;
  else
{self._forget("    ")}  end if;
"""
        else:
            then = f"""{self._note("    ")}{self._go_back("    ")}    return false;
  end if;
{self._forget("  ")}"""
        return f"""  -- The inputs are compared on the locked row: an edit comes before this, or after the outcome.
  select {self._is_stale()} into _rm_stale from {self.table}
  where {self.holds()}
  for no key update;
  if not found then
    return false;
  end if;
  if _rm_stale then
{then}"""

    # -- bodies

    def take(self, count: str, worker: str) -> str:
        """The claim, returning whole rows: also with columns that the table gets later."""
        rows, _ = self._match("picked")
        return f"""with picked as materialized (
    select {rows} from {self.table}
    where {self.ready()}
    order by {self.order()}
    limit {count}
    for no key update skip locked
  ), taken as (
    {self.update(self.claim_set(worker), "picked", "      ")}
    returning {self.table}.*
  )
  select * from taken order by {self.order()}"""

    def claim_body(self, count: str) -> str:
        worker = "$1" if "worker" in self.roles else ""
        every = max(round(self.lane.sweep_every.total_seconds()), 1)
        second = "pg_catalog.floor(extract(epoch from pg_catalog.clock_timestamp()))::bigint"
        turn = f"pg_catalog.mod({second}, {every}::bigint) = 0::bigint"
        named = _refusal("$1 is null or $1 = ''::text", "a claim needs the name of its worker") if worker else ""
        if self._gates is not None:
            return self._gated_claim_body(GateBodies(self, self._gates, count), turn, named)
        return f"""declare
  _rm_row record;
begin
{named}  -- Rows whose holder is gone go back first: where nothing else is ready, and once in {every} s in any case,
  -- so that a lane that is never empty is swept too.
  if {turn}
    or not exists (select 1 from {self.table} where {self.ready()})
  then
{self.sweep_loop(str(_SWEPT_BY_A_CLAIM), told=False)}
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  {self.take(count, worker)};
end"""

    def _gated_claim_body(self, gates: GateBodies, turn: str, named: str) -> str:
        return f"""declare
  _rm_row record;
  _rm_last text;{gates.claim_variables()}
begin
{named}  for _rm_try in 1..{_TRIES} loop
    -- Rows whose holder is gone: where nothing was to be had, and now and then in any case.
    if _rm_try = 2 or _rm_try = 1 and {turn} then
{self.sweep_loop(str(_SWEPT_BY_A_CLAIM), told=False)}
      exit when not exists (select 1 from {self.table} where {self.ready()});
    end if;
    {gates.find_last()};
    if _rm_last is not null then
      {gates.claim(after_last=True)}
    end if;
    {gates.claim(after_last=False)}
    -- Somebody else may have had the keys locked at that moment.
    perform pg_catalog.pg_sleep(case when _rm_try = 2 then 0.02 * pg_catalog.random() else 0 end);
  end loop;
end"""

    def heartbeat_body(self) -> str:
        column = self.roles[self.binding.renew]
        moves = self.binding.renew == "claimed_at"
        after = f"\n  returning {self.name(column)} into _rm_renewed" if moves else ""
        declared = f"declare\n  _rm_renewed {self.binding.sql_types[column]};\n" if moves else ""
        written = {column: self.present(column)}
        return f"""{declared}begin
  update {self.table} set {self.assignments(written)}{self.moment(written)}
  where {self.holds()}{after};
  return {"_rm_renewed" if moves else "found"};
end"""

    def complete_body(self) -> str:
        place, writes = len(self.ended) + 1, bool(self.lane.inputs) and self.lane.stale == "write"
        written = self.settle_set("done", "null", "null")
        computed = {c.name for c in self.binding.table.c if c.computed is not None}
        kept = {*self.binding.key, *self.binding.state_columns(), *computed, *self.lane.inputs, *self.binding.shard}
        free = [column for column in self.binding.columns if column not in kept]
        listed = [("false, " if writes else "", written)]
        listed += [("true, ", self.settle_set("stale", "null", "null"))] if writes else []
        pairs = ",\n      ".join(
            f"({which}{as_text(c)}::text, {as_text(value)}::text)" for which, of in listed for c, value in of.items()
        )
        which, of_which = ("s, ", " and v.s = _rm_stale") if writes else ("", "")
        given = f" from pg_catalog.jsonb_populate_record(null::{self.table}, ${place}) _rm_given)"
        marks = ", ".join(f"${i}" for i in range(1, place + 1))
        read_key = ""
        if self._gates is not None and (learnt := GateBodies(self, self._gates).succeeded()):
            read_key = f"""  select {self._gates.dim.phrase}::text into _rm_key from {self.table}
  where {self.holds()}
  for no key update;
  if not found then
    return false;
  end if;
{learnt}"""
        return f"""declare
  _rm_list text;
  _rm_count bigint;{self._key_declared()}{self._stale_declared()}
begin
{self._unnamed("complete")}{read_key}{self._stale_first(place)}  if ${place} is null or ${place} = '{{}}'::jsonb then
    update {self.table} set
      {self.assignments(written, "      ")}
    where {self.holds()};
    return found;
  end if;
  select pg_catalog.string_agg(k, ', '::text) into _rm_list
  from pg_catalog.jsonb_object_keys(${place}) k
  where k <> all (array[{", ".join(as_text(c) for c in free)}]::text[]);
  if _rm_list is not null then
    raise exception using errcode = '22023', message = 'result has columns that it may not set: '::text || _rm_list,
      hint = {as_text("the columns of " + self.resolved.name + " except its key and its state: " + ", ".join(free))};
  end if;
  -- The columns of result are written with the outcome in one statement, typed by the table.
  select pg_catalog.string_agg(a, ', '::text) into _rm_list from (
    select pg_catalog.quote_ident(v.c) || ' = '::text || v.e from (values
      {pairs}
    ) v({which}c, e) where not ${place} ? v.c{of_which}
    union all
    select pg_catalog.quote_ident(k) || ' = (select _rm_given.'::text || pg_catalog.quote_ident(k)
      || {as_text(given)}::text
    from pg_catalog.jsonb_object_keys(${place}) k
  ) s(a);
  execute {as_text(f"update {self.table} set ")}::text || _rm_list || {as_text(f" where {self.holds()}")}::text
    using {marks};
  get diagnostics _rm_count = row_count;
  return _rm_count > 0{" and not _rm_stale" if writes else ""};
end"""

    def fail_body(self) -> str:
        place = len(self.ended)
        error, delay, permanent, retry_after, closes = (f"${place + i}" for i in (1, 2, 3, 4, 5))
        text = f"pg_catalog.left(coalesce({error}, 'failed'::text), {self._error_length()})"
        dead, retry = self.settle_set("dead", text, "null"), self.settle_set("retry", text, "_rm_delay")
        key, into, learnt, asked, refused = "", "", "", "", self._unnamed("fail")
        stale = ""
        if self.lane.inputs:
            key, into = f", {self._is_stale()}", ", _rm_stale"
            stale = f"""    if _rm_stale then
{self._note("      ")}{self._go_back("      ")}      return 'stale';
    end if;
{self._forget("    ")}"""
        if self._gates is not None:
            key, into = f"{key}, {self._gates.dim.phrase}::text", f"{into}, _rm_key"
            asked = f"\n    extract(epoch from {retry_after})::double precision,"
            learnt = GateBodies(self, self._gates).failed(f"coalesce({permanent}, false)", retry_after, closes)
            refused += _refusal(f"{closes} <> 'lane'", "closes must be 'lane' or null")
        return f"""declare
  _rm_attempt bigint;
  _rm_limit bigint;
  _rm_delay double precision;{self._key_declared()}{self._stale_declared()}
begin
{refused}  select {self.attempt()}, {self.limit()}{key} into _rm_attempt, _rm_limit{into} from {self.table}
  where {self.holds()}
  for no key update;
  if not found then
    return null;
  end if;
{learnt}  if coalesce({permanent}, false) or _rm_attempt >= _rm_limit then
{stale}    update {self.table} set
      {self.assignments(dead, "      ")}
    where {self.holds()};
    return 'dead';
  end if;
  _rm_delay := least(greatest(coalesce(
    extract(epoch from {delay})::double precision,{asked}
    {self.backoff()}
  ), 0::double precision), {LONGEST.total_seconds()}::double precision);
  update {self.table} set
    {self.assignments(retry)}
  where {self.holds()};
  return 'retry';
end"""

    def _key_declared(self) -> str:
        return "\n  _rm_key text;" if self._gates is not None else ""

    def _stale_declared(self) -> str:
        return "\n  _rm_stale boolean;" if self.lane.inputs else ""

    def release_body(self) -> str:
        return f"""begin
  update {self.table} set
    {self.assignments(self.settle_set("release", "null", "null"))}
  where {self.holds()};
  return found;
end"""

    def sweep_body(self) -> str:
        return f"""declare
  _rm_row record;
begin
{self.sweep_loop("greatest(coalesce($1, 0), 0)", told=True)}
end"""

    def sweep_loop(self, most: str, *, told: bool) -> str:
        """Move stale rows back to ready, or to dead after too many reclaims; ``told``: return each row."""
        message = f"case when _rm_row._poison then sqlerrm else {as_text(NOT_BACK)}::text || sqlerrm end"
        back, dead = self.sweep_set(f"pg_catalog.left({message}, {self._error_length()})")
        keys = ", ".join(f"t.{self.name(c)} as _k{i}" for i, c in enumerate(self.binding.key))
        worker = f"t.{self.name(self.roles['worker'])}" if "worker" in self.roles else "null::text"
        parts = ", ".join(f"_rm_row._k{i}" for i in range(len(self.binding.key)))
        tell = [
            f"\n        return query select _rm_row._worker, {p}, {parts};" if told else "" for p in ("false", "true")
        ]
        mine = f"where {self._same_key('t', '_rm_row')}"
        # What the user's own constraints and triggers say no with.
        refused = "exception when integrity_constraint_violation or raise_exception then"
        expiry = self._expiry(most) if self.binding.expires else ""
        return f"""    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select {keys}, {worker} as _worker, {self.poison() or "false"} as _poison from {self.table} t
      where {self.running("t.")} and {self.stale(self.lane.lease, "t.")}
      limit {most}
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = {POISONED};
        end if;
        update {self.table} t set
          {self.assignments(back, "          ")}
        {mine};{tell[0]}
      {refused}
        begin
          update {self.table} t set
            {self.assignments(dead, "            ")}
          {mine};{tell[1]}
        {refused}
          raise warning 'a row of % can neither go back nor end: %', {as_text(self.resolved.name)}, sqlerrm;
        end;
      end;
    end loop;{expiry}"""

    def _expiry(self, most: str) -> str:
        """End rows that were not started in time."""
        rows, _ = self._match("picked")
        return f"""
    -- Rows that expired before they were started.
    with picked as materialized (
      select {rows} from {self.table}
      where {self.expired()}
      limit {most}
      for no key update skip locked
    )
    {self.update(self.expired_set(), "picked", "      ")};"""

    def attempt(self) -> str:
        """The attempt of a running row."""
        if failures := self.roles.get("failures"):
            return f"coalesce({self.name(failures)}, 0) + 1"
        attempts = self.roles.get("attempts")
        return f"greatest(coalesce({self.name(attempts)}, 1), 1)" if attempts else "1"

    def backoff(self) -> str:
        """Seconds until the next attempt, from the number of this one."""
        policy: Any = self.lane.backoff
        if type(policy) is Fixed:
            return f"{policy.delay.total_seconds()}::double precision"
        assert type(policy) is Exponential  # see check
        base, cap = policy.base.total_seconds(), policy.cap.total_seconds()
        doubled = "pg_catalog.power(2::double precision, least(_rm_attempt - 1::bigint, 62::bigint)::double precision)"
        grown = f"least({base}::double precision * {doubled}, {cap}::double precision)"
        half = "0.5::double precision"
        return f"{grown} * ({half} + {half} * pg_catalog.random())" if policy.jitter else grown

    def _error_length(self) -> int:
        column = self.roles.get("error")
        length = getattr(self.binding.table.c[column].type, "length", None) if column else None
        return min(length or ERROR_LENGTH, ERROR_LENGTH)


def _indented(text: str, by: str) -> str:
    """Lines of a body, each this far to the right."""
    return textwrap.indent(text, by) + "\n"


def _refusal(when: str, message: str) -> str:
    return f"""  if {when} then
    raise exception using errcode = '22023', message = {as_text(message)};
  end if;
"""
