"""The wake trigger: workers hear of rows that anybody's SQL makes ready. PostgreSQL only; installed on request.

NOTIFY takes one lock over the whole server until its transaction is committed, so notifying transactions commit one
after the other. Therefore few of many writers notify. A sequence holds a token bucket: until when the tokens are spent,
in milliseconds since 1970. A sequence is not transactional, so no writer waits for another one, and nothing bloats.

A writer that does not notify follows one that did, at most ``_SPACING`` milliseconds before. It holds an advisory lock
until its transaction ends. A worker that was notified looks again ``LOOK_AGAIN`` seconds later, and goes on until no
writer holds that lock. A writer takes the lock and then reads the sequence; a worker tries the lock and then looks at
the table. So whatever the order, a worker sees either the lock or the committed rows.
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
from .postgres_full_names import resolve_conditions
from .postgres_statements import PostgresStatements
from .sql_literals import dollar_quoted, mentions

#: What a notification of the trigger says: look now, and look again.
AGAIN = "again"
#: Seconds until a worker looks again; longer than the spacing of notifications.
LOOK_AGAIN = 0.05
#: Whether no writer that did not notify is still uncommitted. The lock is released with the statement.
ALL_COMMITTED = "select pg_try_advisory_xact_lock(1919906669, 0)"
#: In milliseconds: the spacing of notifications once the tokens are spent; what one costs that had to wait for another;
#: and how many tokens there are, in the time that it takes to get them back. 50 a second, and 200 at once.
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
    """A wake trigger that is there: its function under its full name, what it was made for, whether it works."""

    function: str
    mark: str
    #: Both triggers are there and enabled.
    complete: bool


@dataclass(frozen=True)
class WakeTrigger:
    """The statements that make a table's wake trigger, or bring it up to date; and what removes each thing."""

    function: str
    sequence: str
    #: What is made: kind, name, the statement that makes it, the one that undoes it.
    parts: tuple[tuple[str, str, str, str], ...]
    steps: tuple[str, ...]


class _Phrases(PostgresStatements):
    """The lane's conditions as they are soon: a row that is due at the second look wakes workers, too."""

    def _now(self) -> str:
        return f"(clock_timestamp() + interval '{_SPACING} milliseconds')"


def served(bindings: Sequence[Binding]) -> list[Binding]:
    """The lanes whose rows wake workers. Tasks notify by themselves, and a backfill is in no hurry."""
    return [binding for binding in bindings if not binding.lane.own and binding.lane.backfills is None]


def _conditions(bindings: Sequence[Binding]) -> dict[str, str]:
    """When a row is ready, by lane. The user's own SQL is left out where it reads other tables: writers would wait."""
    conditions = {}
    for binding in bindings:
        say = _Phrases(binding, Clock())
        parts = [text for name, text in say.ready_parts().items() if not (_own(name) and mentions(text, "select"))]
        conditions[binding.lane.name] = " and ".join(parts) or "true"
    return conditions


def _own(part: str) -> bool:
    return part in ("state", "where")


def mark(bindings: Sequence[Binding]) -> str:
    """What a trigger for these lanes is known by: the comment on its function. It changes with their conditions."""
    told = "\n".join([_BODY, *sorted(_conditions(bindings).values())])
    return _MARK + hashlib.sha256(told.encode()).hexdigest()[:16]


def installed(run: Run, relation: str) -> Installed | None:
    """The wake trigger of a table."""
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
    """What is to be done for the wake trigger of one table; None where it is as it should be.

    ``planned``: the table still lacks columns, so the server cannot be asked what the conditions mean.
    """
    present = await database.read(lambda run: installed(run, relation))
    wanted = mark(bindings)
    if present is not None and present.complete and present.mark == wanted:
        return None
    place = await database.read(lambda run: _place(database, run, relation))
    conditions = _conditions(bindings)
    if not planned:
        table = _Phrases(bindings[0], Clock()).table
        try:
            conditions = await database.trial(lambda run: resolve_conditions(run, table, conditions))
        except Refused as error:
            raise DeclarationError(
                f"the wake trigger of {relation} cannot be made: {error.message}",
                hint="a role that may read the table, and create temporary tables in this database",
            ) from error
    quote = database.dialect.identifier_preparer.quote
    name = f"rowmill_wake_{hashlib.sha256(relation.encode()).hexdigest()[:10]}"
    function = present.function if present is not None else f"{quote(place)}.{name}"
    await database.read(lambda run: _check_names(run, relation, place, name))
    return _steps(function, f"{quote(place)}.rowmill_wake", relation, bindings, conditions, wanted, present)


def _steps(
    function: str, sequence: str, relation: str, bindings: Sequence[Binding], conditions: Mapping[str, str],
    wanted: str, present: Installed | None,
) -> WakeTrigger:  # fmt: skip
    alias = _Phrases(bindings[0], Clock()).name(bindings[0].table.name)
    condition = "\n    or ".join(f"({text})" for text in dict.fromkeys(conditions.values()))
    texts = {"{sequence}": sequence.replace("'", "''"), "{alias}": alias, "{condition}": condition}
    body = re.sub("|".join(map(re.escape, texts)), lambda found: texts[found.group()], _BODY)
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
    """The schema of rowmill's own things. Raises where the table cannot have such a trigger."""
    kind = run(_KIND, (relation,))
    if kind and kind[0][0] not in ("r", "p"):
        raise DeclarationError(
            f"{relation} is no ordinary table, so it cannot have a wake trigger",
            hint="without --wake; whoever writes there can run: notify rowmill",
        )
    return database.schema or str(run("select current_schema()", ())[0][0])


def _check_names(run: Run, relation: str, place: str, name: str) -> None:
    """Raises where a name is taken by something that is not rowmill's."""
    for trigger, _, function, comment in _named_so(run, relation):
        if not comment.startswith(_MARK):
            raise DeclarationError(
                f"table {relation} has a trigger {trigger} already, and it is not rowmill's: it calls {function}",
                hint=f"rename it: alter trigger {trigger} on {relation} rename to ...",
            )
    for (comment,) in run(_NAMED, (place, name)):
        if not comment.startswith(_MARK):
            raise DeclarationError(
                f"there is a function {place}.{name}() already, and it is not rowmill's",
                hint=f"drop function {place}.{name}()",
            )
