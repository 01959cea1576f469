"""The wake trigger: it notifies workers when any SQL makes rows ready. PostgreSQL only; installed on request.

NOTIFY takes a server-wide lock until its transaction commits, so notifying transactions commit one after the other.
Therefore only a few of many writers notify. A sequence implements a token bucket: it stores the time until which the
tokens are spent, in milliseconds since 1970. A sequence is not transactional, so no writer waits for another one, and
nothing bloats.

A writer that does not notify follows one that did, at most ``_SPACING`` milliseconds earlier. It holds an advisory lock
until its transaction ends. A notified worker looks again ``LOOK_AGAIN`` seconds later, and continues until no writer
holds that lock. A writer takes the lock and then reads the sequence; a worker tries the lock and then reads the table.
So in any order, a worker sees either the lock or the committed rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...clock import Clock
from ...errors import DeclarationError, Refused
from ..database import Database, Run
from .binding import Binding
from .postgres_statements import PostgresStatements
from .sql_literals import dollar_quoted, mentions, resolve_conditions

#: The payload of the trigger's notifications: look now, and look again.
AGAIN = "again"
#: Seconds until a worker looks again. Longer than the interval between notifications.
LOOK_AGAIN = 0.05
#: Whether every writer that did not notify has committed. The lock is released with the statement.
ALL_COMMITTED = "select pg_try_advisory_xact_lock(1919906669, 0)"
#: In milliseconds: the interval between notifications once the tokens are spent, the cost of a notification that had to
#: wait for another one, and the burst as the time to refill its tokens. 50 a second, and 200 at once.
_SPACING, _CONTENDED, _BURST = 20, 200, 4000
TRIGGERS = {event: f"rowmill_wake_{event}" for event in ("insert", "update")}
_MARK = "rowmill wake trigger "

_AHEAD = (
    "pg_sequence_last_value('{sequence}'::regclass) - (date_part('epoch', clock_timestamp()) * 1000)::bigint"
    f" between {_BURST + 1} and {_BURST + _SPACING}"
)
_BODY = f"""#variable_conflict use_column
declare
  _rm_now bigint;
  _rm_ahead bigint;
begin
  -- The tokens are spent: somebody notified a moment ago. The lock says that rows are on their way.
  if {_AHEAD} then
    if pg_try_advisory_xact_lock_shared(1919906669, 0) then
      if {_AHEAD} then
        return null;
      end if;
    end if;
  end if;
  -- This transaction will notify already.
  if current_setting('rowmill.notified', true) = 'yes' then
    return null;
  end if;
  perform 1 from rowmill_new as {{alias}} where {{condition}} limit 1;
  if found then
    _rm_now := (date_part('epoch', clock_timestamp()) * 1000)::bigint;
    _rm_ahead := pg_sequence_last_value('{{sequence}}'::regclass) - _rm_now;
    if _rm_ahead is null or _rm_ahead < 0 or _rm_ahead > {_BURST + _SPACING} then
      _rm_ahead := 0;
    end if;
    _rm_ahead := _rm_ahead + case when pg_try_advisory_xact_lock(1919906669, 1) then {_SPACING} else {_CONTENDED} end;
    perform setval('{{sequence}}'::regclass, _rm_now + least(_rm_ahead, {_BURST + _SPACING})),
      set_config('rowmill.notified', 'yes', true), pg_notify('rowmill', '{AGAIN}');
  end if;
  return null;
exception when others then
  -- No write fails because of this trigger; a notification too many is no harm.
  perform pg_notify('rowmill', '{AGAIN}');
  return null;
end"""
_INSTALLED = """
select t.tgname, t.tgenabled::text, quote_ident(n.nspname) || '.' || quote_ident(p.proname),
  coalesce(obj_description(p.oid, 'pg_proc'), '')
from pg_trigger t join pg_proc p on p.oid = t.tgfoid join pg_namespace n on n.oid = p.pronamespace
where t.tgrelid = to_regclass($1::text) and t.tgname = any($2::text[]) order by 1"""
_KIND = "select relkind::text from pg_class where oid = to_regclass($1::text)"
_NAMED = """
select coalesce(obj_description(p.oid, 'pg_proc'), '') from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname = $1::text and p.proname = $2::text and p.pronargs = 0"""


@dataclass(frozen=True)
class Installed:
    """An installed wake trigger: its function's full name, its mark, and whether it works."""

    function: str
    mark: str
    #: Whether both triggers exist and are enabled.
    complete: bool


@dataclass(frozen=True)
class WakeTrigger:
    """The statements that create or update a table's wake trigger, and those that remove it."""

    function: str
    sequence: str
    #: The parts that are created: kind, name, the statement that creates it, the one that removes it.
    parts: tuple[tuple[str, str, str, str], ...]
    steps: tuple[str, ...]


class _Phrases(PostgresStatements):
    """The lane's conditions in the near future: a row that is due at the second look wakes workers, too."""

    def _now(self) -> str:
        return f"(clock_timestamp() + interval '{_SPACING} milliseconds')"


def served(bindings: Sequence[Binding]) -> list[Binding]:
    """The lanes whose rows wake workers. Tasks notify on their own, and a backfill is not urgent."""
    return [binding for binding in bindings if not binding.lane.own and binding.lane.backfills is None]


def _conditions(bindings: Sequence[Binding]) -> dict[str, str]:
    """The ready condition of each lane, without user SQL that reads other tables: it would slow writers down."""
    conditions = {}
    for binding in bindings:
        say = _Phrases(binding, Clock())
        parts = [text for name, text in say.ready_parts().items() if not (_own(name) and mentions(text, "select"))]
        conditions[binding.lane.name] = " and ".join(parts) or "true"
    return conditions


def _own(part: str) -> bool:
    return part in ("state", "where")


def mark(bindings: Sequence[Binding]) -> str:
    """The comment on the trigger's function that identifies these lanes. It changes with their conditions."""
    text = "\n".join([_BODY, *sorted(_conditions(bindings).values())])
    return _MARK + hashlib.sha256(text.encode()).hexdigest()[:16]


def installed(run: Run, relation: str) -> Installed | None:
    """The installed wake trigger of a table, or None."""
    rows = [row for row in _named_so(run, relation) if row[3].startswith(_MARK)]
    if not rows:
        return None
    complete = len(rows) == len(TRIGGERS) and all(row[1] != "D" for row in rows)
    return Installed(rows[0][2], rows[0][3], complete)


def _named_so(run: Run, relation: str) -> Sequence[Any]:
    return run(_INSTALLED, (relation, list(TRIGGERS.values())))


async def wake_trigger(
    database: Database, relation: str, bindings: Sequence[Binding], *, planned: bool
) -> WakeTrigger | None:
    """The changes that the wake trigger of one table needs; None if it is up to date.

    ``planned``: the table still lacks columns, so the server cannot parse the conditions yet.
    """
    present = await database.read(lambda run: installed(run, relation))
    wanted = mark(bindings)
    if present is not None and present.complete and present.mark == wanted:
        return None
    schema = await database.read(lambda run: _place(database, run, relation))
    conditions = _conditions(bindings)
    if not planned:
        table = _Phrases(bindings[0], Clock()).table
        try:
            conditions = await database.trial(lambda run: resolve_conditions(run, table, conditions))
        except Refused as error:
            raise DeclarationError(
                f"the wake trigger of {relation} cannot be created: {error.message}",
                hint="use a role that may read the table and create temporary tables in this database",
            ) from error
    quote = database.dialect.identifier_preparer.quote
    name = f"rowmill_wake_{hashlib.sha256(relation.encode()).hexdigest()[:10]}"
    function = present.function if present is not None else f"{quote(schema)}.{name}"
    await database.read(lambda run: _check_names(run, relation, schema, name))
    return _steps(function, f"{quote(schema)}.rowmill_wake", relation, bindings, conditions, wanted, present)


def _steps(
    function: str, sequence: str, relation: str, bindings: Sequence[Binding], conditions: Mapping[str, str],
    wanted: str, present: Installed | None,
) -> WakeTrigger:  # fmt: skip
    alias = _Phrases(bindings[0], Clock()).name(bindings[0].table.name)
    condition = "\n    or ".join(f"({text})" for text in dict.fromkeys(conditions.values()))
    texts = {"{sequence}": sequence.replace("'", "''"), "{alias}": alias, "{condition}": condition}
    body = re.sub("|".join(map(re.escape, texts)), lambda match: texts[match.group()], _BODY)
    made = (
        f"create or replace function {function}() returns trigger language plpgsql security definer"
        f" set search_path = pg_catalog, pg_temp as {dollar_quoted(body)}"
    )
    counter = f"create sequence if not exists {sequence}"
    parts = [
        ("sequence", "rowmill_wake", counter, f"drop sequence if exists {sequence}"),
        ("function", function, made, f"drop function if exists {function}()"),
    ]
    steps = [counter, made, f"comment on function {function}() is '{wanted}'"]
    for event, trigger in TRIGGERS.items() if present is None or not present.complete else ():
        text = (
            f"create trigger {trigger} after {event} on {relation} referencing new table as rowmill_new"
            f" for each statement execute function {function}()"
        )
        removal = f"drop trigger if exists {trigger} on {relation}"
        parts.append(("trigger", trigger, text, removal))
        steps += [removal, text] if present is not None else [text]
    return WakeTrigger(function, sequence, tuple(parts), tuple(steps))


def _place(database: Database, run: Run, relation: str) -> str:
    """The schema of rowmill's own tables. Raises if the table cannot have such a trigger."""
    kind = run(_KIND, (relation,))
    if kind and kind[0][0] not in ("r", "p"):
        raise DeclarationError(
            f"{relation} is not an ordinary table, so it cannot have a wake trigger",
            hint="leave out --wake; programs that write there can run: notify rowmill",
        )
    return database.schema or str(run("select current_schema()", ())[0][0])


def _check_names(run: Run, relation: str, schema: str, name: str) -> None:
    """Raises if an object that is not rowmill's already has one of the names."""
    for trigger, _, function, comment in _named_so(run, relation):
        if not comment.startswith(_MARK):
            raise DeclarationError(
                f"table {relation} has a trigger {trigger} already, and it is not rowmill's: it calls {function}",
                hint=f"rename it: alter trigger {trigger} on {relation} rename to ...",
            )
    for (comment,) in run(_NAMED, (schema, name)):
        if not comment.startswith(_MARK):
            raise DeclarationError(
                f"there is a function {schema}.{name}() already, and it is not rowmill's",
                hint=f"drop function {schema}.{name}()",
            )
