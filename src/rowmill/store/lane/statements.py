"""A lane in SQL: the phrases that all its statements are made of.

State values stand in the text as literals, never as parameters: a generic plan cannot match a parameter with a
partial index, and the claim would fall from a millisecond to a scan. Names and literals are rendered by
SQLAlchemy from the reflected table, so quoting, enums and types are right for any table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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

    def shows(self, column: str, found: Any, value: Any) -> bool:
        """Whether what was read from a row is this value; a Python enum and its name are one to the database."""
        if test := states.null_test(value):
            return (found is None) is (test == "is null")
        if found is None:
            return value is None
        return self.literal(column, found) == self.literal(column, value)

    def final(self, values: states.Values, prefix: str = "") -> str:
        """Rows in a final state, by the columns that identify it."""
        return self.condition(self.binding.recognised(values), prefix)

    def ended_by_others(self) -> str | None:
        """Dead rows that hold no error of this lane but one in a column of another program's; None where nothing tells.

        This lane writes its error with every row that it ends, so such rows are not its own.
        """
        own, table = self.roles.get("error"), self.binding.table
        others = [c.name for c in table.c if c.name not in self.roles.values() and roles_words.like("error", c.name)]
        if self.lane.dead is None or own is None or not others:
            return None
        told = " or ".join(f"{self.name(column)} is not null" for column in others)
        return f"{self.final(self.lane.dead)} and {self.name(own)} is null and ({told})"

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
        return f"({ready})" if isinstance(ready, str) else self.condition(ready)

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
        for task, names in self.lane.narrowed.items():
            only = self.only_arguments(", ".join(map(_quoted, sorted(names))))
            parts[f"arguments of {task}"] = f"(task <> {_quoted(task)} or {only})"
        return parts

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
        now = self.plain_now()
        return _NOW.sub(lambda found: now if found.group() == ":now" else found.group(), str(where))

    def running(self, prefix: str = "") -> str:
        return self.condition(self.binding.running, prefix)

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
        parts = [self.running(f"{row}.")]
        if column := self.roles.get("worker"):
            parts.append(f"{row}.{self.name(column)} = {worker}")
        if at := self.binding.fence_time:
            parts.append(f"{row}.{self.name(at)} = {time}")
        if counter := self.roles.get("attempts"):
            parts.append(f"{row}.{self.name(counter)} = {attempts}")
        return " and ".join(parts)

    # -- what is written

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
            "retry": self.binding.retry_values,
            "snooze": self.binding.ready_again,
            "release": self.binding.ready_again,
        }
        values = states.written(states_of[kind] or {})
        written = {column: self.literal(column, value) for column, value in values.items()}
        if column := r.get("updated_at"):
            written[column] = self.now(column)
        if kind in FINAL:
            if column := r.get("finished_at"):
                written[column] = self.now(column)
        else:
            written |= self._cleared()
        if kind in ("retry", "snooze") and (column := r.get("run_after")):
            written[column] = self.later(column, delay)
        if kind in ("snooze", "release") and (column := r.get("attempts")):
            written[column] = f"{self.greatest}({self.name(column)} - 1, 0)"
        if kind in ("retry", "dead") and (column := r.get("failures")):
            written[column] = self.plus_one(column)
        stateless = kind == "dead" or (kind == "canceled" and lane.canceled is None)
        if stateless and lane.dead is None and (column := self.binding.counter):
            # No state says dead: the counter, at its limit, does.
            counted = written.get(column, f"coalesce({self.name(column)}, 0)")
            written[column] = f"{self.greatest}({counted}, {self.exhausted()})"
        if kind in ("retry", "dead", "canceled") and (column := r.get("error")):
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
        return f"select {self.names(self.binding.columns)} from {self.table}\nwhere {' and '.join(parts)}"

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


POISONED = "'taken back too often: its worker died or stopped renewing in every run'"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
