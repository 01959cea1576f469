"""A lane in SQL: the phrases that all its statements are made of.

State values stand in the text as literals, never as parameters: a generic plan cannot match a parameter with a
partial index, and the claim would fall from a millisecond to a scan. Names and literals are rendered by
SQLAlchemy from the reflected table, so quoting, enums and types are right for any table.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import sqlalchemy as sa

from ...clock import Clock
from ...declare import roles as roles_words
from ...declare import states
from ...declare.states import FINAL
from ..dialect import dialect_named
from .binding import Binding

if TYPE_CHECKING:
    from .refused_rows import RefusedRows

#: What stands between a worker's id and its incarnation in a worker column.
INCARNATION = "~"
#: The end of PostgreSQL's types for counters. SQLite's integers have one, too, but no counter reaches it.
_MOST = {"smallint": 2**15 - 1, "integer": 2**31 - 1, "bigint": 2**63 - 1}
_NOW = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|(?<![:\w]):now\b""")


class Statements:
    """The phrases of one lane; the two dialects add how time is told and how a statement is put together."""

    def __init__(
        self, binding: Binding, clock: Clock, workers: str = "rowmill_workers", gates: str | None = None
    ) -> None:
        self.binding = binding
        #: rowmill's table of gates and pauses; None where there is none.
        self.gates = gates
        self.clock = clock
        self.workers = workers
        #: rowmill's table of rows whose inputs changed while they were worked on; None where there is none.
        self.stale_runs: str | None = "rowmill_stale_runs"
        self.lane = binding.lane
        #: Rows that the database will not let be changed.
        self.passed: RefusedRows | None = None
        self.roles = binding.roles
        self.sql = dialect_named(binding.dialect.name)
        self._preparer = binding.dialect.identifier_preparer
        self.table = self._preparer.format_table(binding.table)

    # -- names and literals

    def name(self, column: str) -> str:
        return str(self._preparer.quote(column))

    def names(self, columns: Iterable[str], prefix: str = "") -> str:
        return ", ".join(prefix + self.name(column) for column in columns)

    def literal(self, column: str, value: Any) -> str:
        """A value as SQL text of the column's type."""
        if value is None:
            return "null"
        if value is states.NOW:
            return self.now(column)
        kind = self.binding.table.c[column].type
        if isinstance(kind, sa.Integer) and isinstance(value, bool):
            value = int(value)
        processor = kind.dialect_impl(self.binding.dialect).literal_processor(self.binding.dialect)
        if processor is None:
            return "'" + str(value).replace("'", "''") + "'"
        return str(processor(value))

    def shard(self, prefix: str = "") -> str:
        """`` and tenant_id = 7``, to stand beside every mention of the table; empty on a lane without a shard."""
        return f" and {self.condition(self.binding.shard, prefix)}" if self.binding.lane.shard else ""

    def whole_table(self) -> str:
        """Rows of the lane in any state, for FROM: the table, and WHERE with the shard alone if it has one."""
        return f"{self.table} where {self.shard()[5:]}" if self.binding.lane.shard else self.table

    def ready_shards(self) -> str:
        """The positions of the lane's shards with a ready row. One look into each: to read all rows takes as long as
        there are many.
        """
        ((column, values),) = self.binding.shard.items()
        listed = ", ".join(f"({i}, {self.typed(column, self.literal(column, v))})" for i, v in enumerate(values))
        ready = f"{self.name(column)} = s.column2 and {self.unsharded().ready()}"
        one = f"select 1 from {self.table} where {ready} limit 1"
        return f"select s.column1 from (values {listed}) s where ({one}) is not null"

    def typed(self, column: str, value: str) -> str:
        """A literal that is of the column's type also where no column stands beside it."""
        return value

    @property
    def beyond(self) -> Self:
        """The phrases about rows of all the lane's shards, where these are about one of several."""
        return self._about(None) if self.binding.bucket is not None else self

    def of(self, bucket: Any) -> Self:
        """The phrases about rows of one of the lane's shards."""
        return self._about(bucket)

    def one(self) -> Self:
        """The phrases that a claim is made of: about the first of several shards."""
        for values in self.binding.shard.values():
            return self.of(values[0])
        return self

    def unsharded(self) -> Self:
        """The phrases without the shard, for what is true of rows of any."""
        other, lane = copy.copy(self), copy.copy(self.lane)
        lane.shard = {}
        other.lane, other.binding = lane, replace(self.binding, lane=lane)
        return other

    def _about(self, bucket: Any) -> Self:
        other = copy.copy(self)
        other.binding = replace(self.binding, bucket=bucket)
        return other

    def shows(self, column: str, stored: Any, value: Any) -> bool:
        """Whether what was read from a row is this value; a Python enum and its name are one to the database."""
        if test := states.null_test(value):
            return (stored is None) is (test == "is null")
        if stored is None:
            return value is None
        return self.literal(column, stored) == self.literal(column, value)

    def final(self, values: states.Values, prefix: str = "") -> str:
        """Rows in a final state, by the columns that identify it."""
        return f"{self.condition(self.binding.recognised(values), prefix)}{self.shard(prefix)}"

    def ended_by_others(self) -> str | None:
        """Dead rows that hold no error of this lane but one in a column of another program's; None where nothing tells.

        This lane writes its error with every row that it ends, so such rows are not its own.
        """
        own, table = self.roles.get("error"), self.binding.table
        others = [c.name for c in table.c if c.name not in self.roles.values() and roles_words.like("error", c.name)]
        if self.lane.dead is None or own is None or not others:
            return None
        other_errors = " or ".join(f"{self.name(column)} is not null" for column in others)
        return f"{self.final(self.lane.dead)} and {self.name(own)} is null and ({other_errors})"

    def condition(self, values: states.Values, prefix: str = "") -> str:
        """``status in ('queued', 'failed') and flag is null``."""
        parts = []
        for column, value in values.items():
            name = prefix + self.name(column)
            if test := states.null_test(value):
                parts.append(f"{name} {test}")
                continue
            options = states.options(value)
            known = [self.literal(column, option) for option in options if option is not None]
            tests = []
            if len(known) == 1:
                tests.append(f"{name} = {known[0]}")
            elif known:
                tests.append(f"{name} in ({', '.join(known)})")
            if None in options:
                tests.append(f"{name} is null")
            parts.append(tests[0] if len(tests) == 1 else f"({' or '.join(tests)})")
        return " and ".join(parts)

    # -- time, told by the database

    def now(self, column: str) -> str:
        """The database's time in the column's own type."""
        raise NotImplementedError

    def present(self, column: str) -> str:
        """The time at which the statement really runs, where that can be later than when it was sent."""
        return self.now(column)

    def later(self, column: str, seconds: str) -> str:
        """The time ``seconds`` (an SQL expression) from now, in the column's own type."""
        raise NotImplementedError

    def loose(self) -> str | None:
        """The leading column of the order, where rows without a place in it are claimed last, by a second statement."""
        return None

    def due(self, column: str) -> str:
        """The column's time has come."""
        raise NotImplementedError

    def older(self, column: str, than: timedelta, prefix: str = "") -> str:
        """The column's time is longer ago than that."""
        raise NotImplementedError

    def plain_now(self) -> str:
        """The time as ``:now`` in the user's own conditions."""
        raise NotImplementedError

    greatest = "greatest"

    # -- conditions

    def ready_state(self) -> str:
        """The state alone: the immutable part, fit for a partial index."""
        ready = self.lane.ready
        return f"{f'({ready})' if isinstance(ready, str) else self.condition(ready)}{self.shard()}"

    def ready(self) -> str:
        """All that makes a row claimable now."""
        return " and ".join(self.ready_parts().values()) + self.not_passed()

    def not_passed(self, prefix: str = "", *, waiting: bool = True) -> str:
        """And not one of the rows that this worker passes over; mostly there are none, and nothing is said."""
        return self.passed.condition(prefix, waiting=waiting) if self.passed is not None else ""

    def ready_parts(self) -> dict[str, str]:
        """The same, condition by condition, under the name of what asks for it."""
        parts = {"state": self.ready_state()}
        if due := self.roles.get("run_after"):
            test = self.due(due)
            parts["run_after"] = f"({self.name(due)} is null or {test})" if self.binding.nullable(due) else test
        if self.lane.untouched_for and (touched := self.roles.get("updated_at")):
            older = self.older(touched, self.lane.untouched_for)
            parts["untouched_for"] = f"({self.name(touched)} is null or {older})"
        if self.lane.backfills is not None:
            column = str(self.lane.version_column)
            below = f"{self.name(column)} < {self.literal(column, self.lane.version)}"
            parts["version"] = f"({self.name(column)} is null or {below})" if self.binding.nullable(column) else below
        elif self.lane.dead is None and (counter := self.binding.counter):
            parts["attempts"] = f"coalesce({self.name(counter)}, 0) < {self.exhausted()}"
        if self.lane.where is not None:
            parts["where"] = f"({self.further()})"
        if self.binding.expires:
            parts["expires_at"] = f"({self.past_expiry()}) is not true"
        for task, names in self.lane.narrowed.items():
            only = self.only_arguments(", ".join(map(_quoted, sorted(names))))
            parts[f"arguments of {task}"] = f"(task <> {_quoted(task)} or {only})"
        return parts

    def past_expiry(self) -> str:
        """The row's time to be started is over: by its own ``expires_at``, or else by its age."""
        own, most = self.roles.get("expires_at"), self.lane.expires_after
        if most is None:
            return self.due(str(own))
        by_age = self.older(str(self.binding.created), most)
        return f"{self.due(own)} or {self.name(own)} is null and {by_age}" if own else by_age

    def expired(self) -> str:
        """Rows to be ended because they expired: ready or waiting ones that the lane would otherwise start."""
        timed = ("run_after", "untouched_for", "expires_at")
        parts = [test for name, test in self.ready_parts().items() if name not in timed]
        return " and ".join([*parts, f"({self.past_expiry()})"]) + self.not_passed()

    def expired_words(self) -> str:
        """Why an expired row ended, as SQL that fits its error column."""
        column = self.roles.get("error")
        length = getattr(self.binding.table.c[column].type, "length", None) if column else None
        return _quoted(EXPIRED[:length])

    def expired_set(self) -> dict[str, str]:
        """Assignments for a row that expired."""
        return self.settle_set("expired", self.expired_words(), "null")

    def expire(self, most: int) -> str:
        """End at most so many expired rows; returns their keys."""
        raise NotImplementedError

    def only_arguments(self, names: str) -> str:
        """Of rowmill's own table: a job has no arguments but these. Arguments that are no object pass."""
        raise NotImplementedError

    def unpaused(self) -> str:
        """Neither the lane nor the environment is paused: asked once per claim."""
        if self.gates is None:
            return "1 = 1"
        # Each by its whole key: a planner that saw these rows when they were few would read all of them otherwise.
        lanes = ("", self.lane.name.replace("'", "''"))
        pauses = (
            f"select paused_until from {self.gates} where lane = '{lane}' and dim = '' and key = ''" for lane in lanes
        )
        return " and ".join(f"coalesce(({pause}) <= {self.plain_now()}, true)" for pause in pauses)

    def further(self) -> str:
        """The lane's ``where``, as SQL."""
        where = self.lane.where
        if callable(where):
            # Compiled inside a select over the table, so that subqueries find the row they are about.
            whole: sa.Select[Any] = (
                sa.select(sa.literal_column("1")).select_from(self.binding.table).where(where(self.binding.table))
            )
            text = str(whole.compile(dialect=self.binding.dialect, compile_kwargs={"literal_binds": True}))
            head, _, condition = text.partition("WHERE ")
            if "," in head.replace(self.table, "", 1):
                raise TypeError("it names another table outside of a subquery: use exists() or in_()")
            return condition
        return self.at_now(str(where))

    def at_now(self, condition: str) -> str:
        """The user's own SQL, with the database's time for ``:now``."""
        now = self.plain_now()
        return _NOW.sub(lambda match: now if match.group() == ":now" else match.group(), condition)

    def running(self, prefix: str = "") -> str:
        return f"{self.condition(self.binding.running, prefix)}{self.shard(prefix)}"

    def stale(self, lease: timedelta, prefix: str = "") -> str:
        """A running row whose holder gave its last sign of life longer ago than the lease.

        NULL for a row that tells no time at all: see ``timeless``.
        """
        sign = self.last_sign(lease, prefix)
        return f"{sign} < {self.instant_now(-lease)}" if sign else "false"

    def timeless(self, lease: timedelta, prefix: str = "") -> str:
        """A running row that tells no time to go by: only when a worker first saw it running can be known."""
        sign = self.last_sign(lease, prefix)
        return f"{sign} is null" if sign else "false"

    def last_sign(self, lease: timedelta, prefix: str = "") -> str | None:
        """The latest sign of life of a row's holder; NULL where the row tells none. None: no column could tell one.

        Another program's claim may write no heartbeat: then the claim's time counts, then updated_at. A time further
        in the future than the lease is ignored.
        """
        signs = self._signs()
        if not signs:
            return self._last_seen(prefix) if "worker" in self.roles else None
        parts = [self._plausible(column, lease, prefix) for column in signs]
        return f"coalesce({', '.join(parts)})" if len(parts) > 1 else parts[0]

    def _plausible(self, column: str, lease: timedelta, prefix: str) -> str:
        instant = self.instant(column, prefix)
        return f"case when {instant} < {self.instant_now(lease)} then {instant} end"

    def _last_seen(self, prefix: str) -> str:
        """When the workers table last heard of the holder; long ago where its id has begun again since."""
        worker = prefix + self.name(self.roles["worker"])
        seen = f"case when {worker} = w.id || '{INCARNATION}' || w.incarnation then {self.own_instant('w.seen_at')}"
        return (
            f"(select max({seen} else {self.long_ago} end) from {self.workers} w"
            f" where substr({worker}, 1, length(w.id) + 1) = w.id || '{INCARNATION}')"
        )

    def instant(self, column: str, prefix: str = "") -> str:
        """A column's time, whatever its type, in a form in which all times compare."""
        raise NotImplementedError

    def instant_now(self, by: timedelta) -> str:
        """The time so much later than now, in the form of ``instant``."""
        raise NotImplementedError

    def own_instant(self, column: str) -> str:
        """Like ``instant``, for a time column of rowmill's own tables."""
        raise NotImplementedError

    #: A time before all others, in the form of ``instant``.
    long_ago = "'-infinity'::timestamptz"

    def plus_one(self, column: str) -> str:
        """A counter, one higher; it stays where it is at the end of its type."""
        most = _MOST.get(self.binding.sql_types.get(column, ""))
        counted = f"coalesce({self.name(column)}, 0)"
        return f"least({counted}, {most - 1}) + 1" if most else f"{counted} + 1"

    def older_own(self, column: str, than: timedelta) -> str:
        """Like ``older``, for a time column of rowmill's own tables."""
        raise NotImplementedError

    def evidence(self) -> str | None:
        """The column that shows the holder's last sign of life; None where only the workers table can tell."""
        return next(iter(self._signs()), None)

    def _signs(self) -> list[str]:
        """The columns that show a sign of life, the one to go by first."""
        order: tuple[str, ...] = roles_words.SIGNS_OF_LIFE
        if self.binding.renew == "claimed_at":
            order = ("claimed_at", "heartbeat_at", "updated_at")
        return list(dict.fromkeys(self.roles[role] for role in order if role in self.roles))

    def limit(self) -> str:
        """Failures before dead, per row where the table says so."""
        own = self.roles.get("max_attempts")
        return f"coalesce({self.name(own)}, {self.binding.max_attempts})" if own else str(self.binding.max_attempts)

    def exhausted(self) -> str:
        """Where no state says dead: the count from which on a row is. One that counts claims counts sweeps too."""
        return self.limit() if "failures" in self.roles else f"{self.limit()} + {self.lane.max_reclaims + 1}"

    def poison(self) -> str | None:
        """At the sweep: ended badly more often than its limit and the reclaims beyond it allow."""
        attempts, reclaims, failures = (self.roles.get(r) for r in ("attempts", "reclaims", "failures"))
        allowed = f"{self.limit()} + {self.lane.max_reclaims}"
        if reclaims:
            if failures == reclaims:  # one counter for both: the limit is the limit
                return f"coalesce({self.name(reclaims)}, 0) >= {self.limit()} - 1"
            failed = f" - coalesce({self.name(failures)}, 0)" if failures else ""
            return f"coalesce({self.name(reclaims)}, 0) >= {allowed}{failed}"
        return f"coalesce({self.name(attempts)}, 0) > {allowed}" if attempts else None

    def fence(self, row: str, time: str, attempts: str, worker: str) -> str:
        """The row still is as this claim left it. The arguments are SQL for the claim's own values."""
        parts = [self.condition(self.binding.running, f"{row}.")]
        if column := self.roles.get("worker"):
            parts.append(f"{row}.{self.name(column)} = {worker}")
        if at := self.binding.fence_time:
            parts.append(f"{row}.{self.name(at)} = {time}")
        if counter := self.roles.get("attempts"):
            parts.append(f"{row}.{self.name(counter)} = {attempts}")
        return " and ".join(parts)

    # -- inputs

    def and_inputs(self, prefix: str = "") -> str:
        """What a claim returns behind the row's columns, by which a change of its inputs is found later."""
        return ""

    def compares(self, kind: str) -> bool:
        """An outcome of this kind is final only where the row's inputs are as its claim returned them."""
        return bool(self.lane.inputs) and kind in FINAL

    @property
    def bounded(self) -> bool:
        """It is remembered which rows' inputs keep changing, so that these are settled at last."""
        return self.lane.bounded and self.stale_runs is not None

    def kept_changing(self, row_id: str) -> str:
        """The row's inputs have kept changing for as long as the lane allows."""
        if not self.bounded:
            return "1 = 0"
        runs, time = self.lane.settle_bound or (None, None)
        tests = [f"runs >= {runs}"] if runs is not None else []
        tests += [self.older_own("since", time)] if time is not None else []
        tests.append(f"not {self.older_own('last_at', APART)}")
        return f"exists (select 1 from {self.stale_runs} where {self.noted(row_id)} and {' and '.join(tests)})"

    def of_lane(self) -> str:
        """Notes of this lane's rows."""
        return f"lane = {_quoted(self.lane.name)}"

    def noted(self, row_id: str) -> str:
        """The note of this row's runs whose inputs changed."""
        return f"{self.of_lane()} and row_id = {row_id}"

    def note_stale(self, row_id: str, source: str = "") -> str:
        """Note one more run of a row whose inputs changed; ``source``: where the row comes from."""
        # A condition over the two rows alone: a distributed planner allows nothing else there.
        now, apart = self.plain_now(), f"{self.sql.seconds('excluded.last_at', 'r.last_at')} > {APART.total_seconds()}"
        again = f"runs = case when {apart} then 1 else r.runs + 1 end"
        since = f"since = case when {apart} then excluded.since else r.since end"
        return f"""insert into {self.stale_runs} as r (lane, row_id, since, last_at)
select {_quoted(self.lane.name)}, {row_id}, {now}, {now}{source or " where true"}
on conflict (lane, row_id) do update set {again}, {since}, last_at = excluded.last_at"""

    def forget_old(self) -> str:
        """Forget rows of which nothing was heard for long: deleted, or ended by other hands."""
        return f"delete from {self.stale_runs} where {self.of_lane()} and {self.older_own('last_at', APART)}"

    def row_id(self, parts: Sequence[str]) -> str:
        """A row's key as one text."""
        raise NotImplementedError

    # -- rows that wait for a condition

    def due_text(self, prefix: str = "") -> str:
        """When the row is due, as a text that differs where the times differ."""
        raise NotImplementedError

    def same_waiting_key(self, row: str) -> str:
        """The row is the one that ``_w``, a row of rowmill_waits, is about."""
        raise NotImplementedError

    def in_time(self, seconds: str) -> str:
        """The time so many seconds from now, in a column of rowmill's own."""
        raise NotImplementedError

    def holds_for(self, until: str, same_key: str) -> str:
        """A wait's condition is true for the row of this key. No other row is looked at: the condition may fail there.

        In the row's own scope: what its columns are called is what the condition means.
        """
        name = self.name(self.binding.table.name)
        only = f"select {self.names(self.binding.columns)} from {self.table} _rm_row where {same_key} limit 1 offset 0"
        return f"exists (select 1 from ({only}) {name} where ({self.at_now(until)}))"

    def settle_wait_set(self, until: str, delay: str, same_key: str) -> dict[str, str]:
        """Assignments for a row that begins to wait; it is due at once where its condition is true already."""
        column = self.roles["run_after"]
        due = (
            f"case when {self.holds_for(until, same_key)} then {self.now(column)} else {self.later(column, delay)} end"
        )
        return {**self.settle_set("wait", "null", delay), column: due}

    def wait_row(self, table: str, values: str) -> str:
        """Remember what a row waits for; ``values`` gives its id, key, condition, due, seconds and what then."""
        columns = "lane, row_id, key, condition, due, since, until_at, on_timeout"
        written = ", ".join(f"{c} = excluded.{c}" for c in columns.split(", ")[2:])
        lane = _quoted(self.lane.name)
        return f"""insert into {table} ({columns})
select {lane}, _id, _key, _condition, _due, {self.plain_now()}, {self.in_time("_seconds")}, _then
from {values}
on conflict (lane, row_id) do update set {written}"""

    def find_waiting(self, table: str, also: str, condition: str, most: int) -> str:
        """Keys of waiting rows for which a condition is true; ``also``: a test of ``_w``, a row of rowmill_waits.

        The condition is asked of waiting rows alone, as it may fail for others: the inner limit keeps it outside.
        """
        name = self.name(self.binding.table.name)
        columns = self.names(self.binding.columns, f"{name}.")
        return f"""select {self.names(self.binding.key)} from (
  select {columns} from {table} _w join {self.table} {name} on {self._remembered(name)}
  where _w.lane = {_quoted(self.lane.name)} and {also}
  limit {_ALL} offset 0
) {name}
where {self.ready_state()} and ({condition})
limit {most}"""

    def still_waits(self, table: str, ids: Iterable[str]) -> str:
        """The row, one of these, waits as rowmill_waits remembers it: asked again in the statement that writes it."""
        mine = f"_w.lane = {_quoted(self.lane.name)} and _w.row_id in ({', '.join(map(_quoted, ids))})"
        return f"exists (select 1 from {table} _w where {mine} and {self._remembered()})"

    def _remembered(self, row: str | None = None) -> str:
        """``_w`` is about this row, and the row has not been given another time since."""
        prefix = f"{row or self.table}."
        return f"{self.same_waiting_key(prefix)}{self.shard(prefix)} and _w.due = {self.due_text(prefix)}"

    def waits_no_more(self, table: str) -> str:
        """Forget rows that are gone, have ended, or were given another time."""
        ends = (self.lane.done, self.lane.dead, self.lane.canceled, self.lane.expired)
        over = " or ".join(f"({self.final(values)})" for values in ends if values)
        here = f"({self.ready_state()}) or ({self.running()}) or ({over}) is not true"
        return f"""delete from {table} as _w where lane = {_quoted(self.lane.name)}
and not exists (select 1 from {self.table} where {self._remembered()} and ({here}))"""

    # -- what is written

    def moment(self, written: Mapping[str, str], step: str | None = None, indent: str = "") -> str:
        """What an update needs beside its table to write the ``present``."""
        return ""

    def claim_one(self, worker: str, condition: str) -> str:
        """The statement that claims the row of a key, whatever the lane's order."""
        written = self.claim_set(worker)
        return f"""update {self.table} set
    {self.assignments(written)}{self.moment(written)}
where {condition}{self.shard()}
returning {self.names(self.binding.taken)}"""

    def claim_set(self, worker: str) -> dict[str, str]:
        written = {column: self.literal(column, value) for column, value in self.lane.running.items()}
        for role in ("updated_at", "heartbeat_at", "claimed_at"):
            if column := self.roles.get(role):
                written[column] = self.present(column)
        if column := self.roles.get("worker"):
            written[column] = worker
        if column := self.roles.get("attempts"):
            written[column] = f"coalesce({self.name(column)}, 0) + 1"
        if self.lane.backfills is not None:  # a new beginning: what the row's first life took does not count
            counts = {"attempts": "1", "failures": "0", "reclaims": "0"}
            written |= {self.roles[role]: count for role, count in counts.items() if role in self.roles}
        return written

    def settle_set(self, kind: str, error: str, delay: str) -> dict[str, str]:
        """Assignments for one kind of settlement. ``error`` and ``delay`` are SQL for the claim's own values."""
        lane, r = self.lane, self.roles
        states_of: Mapping[str, Mapping[str, Any] | None] = {
            "done": lane.done,
            "dead": lane.dead or self.binding.retry_values,
            "canceled": lane.canceled or lane.dead or self.binding.retry_values,
            "expired": lane.expired or lane.canceled,
            "retry": self.binding.retry_values,
            "snooze": self.binding.ready_again,
            "wait": self.binding.ready_again,
            "release": self.binding.ready_again,
            "stale": self.binding.ready_again,
        }
        values = states.written(states_of[kind] or {})
        written = {column: self.literal(column, value) for column, value in values.items()}
        if column := r.get("updated_at"):
            written[column] = self.now(column)
        if kind in FINAL or kind == "expired":
            if column := r.get("finished_at"):
                written[column] = self.now(column)
        else:
            written |= self._cleared()
        if kind in ("retry", "snooze", "wait") and (column := r.get("run_after")):
            written[column] = self.later(column, delay)
        if kind in ("snooze", "wait", "release", "stale") and (column := r.get("attempts")):
            written[column] = f"{self.greatest}({self.name(column)} - 1, 0)"
        if kind in ("retry", "dead") and (column := r.get("failures")):
            written[column] = self.plus_one(column)
        stateless = kind == "dead" or (kind == "canceled" and lane.canceled is None)
        if stateless and lane.dead is None and (column := self.binding.counter):
            # No state says dead: the counter, at its limit, does.
            counted = written.get(column, f"coalesce({self.name(column)}, 0)")
            written[column] = f"{self.greatest}({counted}, {self.exhausted()})"
        if kind in ("retry", "dead", "canceled", "expired") and (column := r.get("error")):
            written[column] = error
        return written

    def _cleared(self) -> dict[str, str]:
        """A row that goes back has no holder; a NOT NULL column keeps what it has."""
        columns = [self.roles.get(role) for role in ("worker", "claimed_at", "heartbeat_at")]
        shared = {self.roles.get(role) for role in ("updated_at", "run_after")}
        return {c: "null" for c in columns if c and c not in shared and self.binding.nullable(c)}

    def sweep_set(self, error: str | None = None) -> tuple[dict[str, str], dict[str, str]]:
        """Assignments for a swept row: one that goes back, and one that is poison, or ends for another ``error``."""
        back = {column: self.literal(column, value) for column, value in self.binding.swept_back.items()}
        back |= self._cleared()
        if column := self.roles.get("updated_at"):
            back[column] = self.now(column)
        reclaimed = {c: self.plus_one(c) for c in [self.roles.get("reclaims")] if c}
        back |= reclaimed
        dead = self.settle_set("dead", error or POISONED, "null")
        # A sweep is not a failure; only the reclaim is counted.
        if (failures := self.roles.get("failures")) and self.lane.dead is not None:
            dead.pop(failures, None)
        return back, {**dead, **(reclaimed if self.lane.dead is not None else {})}

    def mine(self, worker: str, since: str) -> str:
        """Running rows that this very process claimed."""
        parts = [self.running(), f"{self.name(self.roles['worker'])} = {worker}"]
        if at := self.binding.fence_time:
            parts.append(f"{self.name(at)} >= {since}")
        columns = f"{self.names(self.binding.columns)}{self.and_inputs()}"
        return f"select {columns} from {self.table}\nwhere {' and '.join(parts)}"

    def write_rows(self, written: Mapping[str, str], condition: str) -> str:
        """The statement that writes rows where a condition holds, those left out that somebody else has locked."""
        raise NotImplementedError

    def write_step(self, written: Mapping[str, str], condition: str, limit: int) -> list[str]:
        """The same for so many rows at most, in the order of their keys; the first statement returns these."""
        raise NotImplementedError

    def assignments(self, written: Mapping[str, str], indent: str = "    ") -> str:
        return f",\n{indent}".join(f"{self.name(column)} = {value}" for column, value in written.items())

    def ready_probe(self) -> str:
        ready = " and ".join(self.ready_parts().values())
        return f"exists (select 1 from {self.table} where {ready}{self.not_passed(waiting=False)})"

    def running_probe(self) -> str:
        return f"exists (select 1 from {self.table} where {self.running()}{self.not_passed()})"

    def order(self) -> str:
        """The lane's order, for ORDER BY."""
        raise NotImplementedError


#: Runs of a row whose inputs changed, so far apart, are not in a row.
APART = timedelta(days=1)
#: Waiting rows of a lane that are looked at.
_ALL = 1_000_000
#: Why a row ended that expired.
EXPIRED = "expired: it was not started in time"
POISONED = "'taken back too often: its worker died or stopped renewing in every run'"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
