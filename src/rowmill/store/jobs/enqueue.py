"""Enqueue: insert rows into ``rowmill_jobs``, one or many, with keys, in rowmill's or the caller's transaction.

NOTIFY is part of the statement that inserts the rows, so it is sent when they are committed. PostgreSQL sends equal
notifications of a transaction only once, however many rows it inserts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ...clock import Clock
from ...declare.call import Call
from ...declare.options import Key
from ...declare.states import JOINING, READY, UNFINISHED
from ...errors import KeyTaken, RowmillError
from ..caller_transactions import Verb
from ..database import Database
from ..dialect import Dialect, numbered
from ..json_documents import as_json
from ..postgres_database import AsyncpgPool

CHANNEL = "rowmill"
_CHUNK = 5000
_TRIES = 10
_TIMING = (("ord", "int"), ("run_after", "timestamptz"), ("delay", "double precision"))
_COLUMNS = (
    ("task", "text"), ("queue", "text"), ("args", "jsonb"), ("priority", "smallint"), ("max_attempts", "int"),
    ("key", "text"), ("only_one", "boolean"), ("parent_id", "bigint"), ("branch", "text"), ("needs", "text"),
    ("state", "text"),
)  # fmt: skip


@dataclass(frozen=True)
class FlowPosition:
    """A job's place in a flow: its parent, and whether all its own children must end (``all``) or be ``done``."""

    parent_id: int | None = None
    branch: str | None = None
    needs: str | None = None


@dataclass(frozen=True)
class EnqueueStatements:
    """The SQL of enqueue, in one database's dialect."""

    sql: Dialect
    table: str
    steps: str
    clock: Clock

    @staticmethod
    def to(database: Database, clock: Clock) -> EnqueueStatements:
        """The statements for a database."""
        return EnqueueStatements.of(database.sql, database.schema, clock)

    @staticmethod
    def of(sql: Dialect, schema: str | None, clock: Clock) -> EnqueueStatements:
        """The same for a transaction of the caller's own."""
        return EnqueueStatements(sql, sql.own(schema, "rowmill_jobs"), sql.own(schema, "rowmill_steps"), clock)

    def now(self, seconds: str = "0") -> str:
        """The database's time plus this many seconds."""
        return self.sql.later(f"{seconds} + {self.clock.shift.total_seconds()}")

    def _told(self, insert: str, wake: bool) -> str:
        """Add a notification to idle workers, which is sent at the commit."""
        return self.sql.notified(insert, CHANNEL) if wake else insert

    def sent(self, mark: str, kind: str) -> str:
        """A parameter that every client library sends as text."""
        return self.sql.typed(self.sql.typed(mark, "text"), kind)

    def one(self, wake: bool) -> str:
        """A job without time, key or place in a flow: the simplest and most frequent case."""
        args = self.sent(":args", "jsonb")
        # The column's default is the database's time, without the offset of a test's clock.
        due = (", run_after", f", {self.now()}") if self.clock.shift else ("", "")
        return self._told(
            f"insert into {self.table} (task, queue, args, priority, max_attempts{due[0]})\n"
            f"values (:task, :queue, {args}, :priority, :max_attempts{due[1]})\nreturning id",
            wake,
        )

    def many(self, wake: bool, conflict: str | None = None) -> str:
        """Insert jobs from one JSON document; ``conflict`` says what to do with a job whose key is taken."""
        sql, names = self.sql, [name for name, _ in _COLUMNS]
        given = ", ".join(sql.json_document(name) if name == "args" else sql.json_field(name) for name in names)
        source = sql.json_rows(":doc", [*_TIMING, *_COLUMNS])
        delay = self.now(f"coalesce({sql.json_field('delay')}, 0)")
        due = f"coalesce({sql.json_field('run_after')}, {delay})"
        # SQLite would parse "on conflict" after a select without a where clause as the ON of a join.
        insert = (
            f"insert into {self.table} as j ({', '.join(names)}, run_after)\n"
            f"select {given}, {due}\nfrom {source}\nwhere true\norder by {sql.json_order}\n"
        )
        if conflict is not None:
            insert += f"on conflict (task, key) where {self._only_one()} do {conflict}\n"
        return self._told(f"{insert}returning id", wake)

    def _only_one(self) -> str:
        unfinished = ", ".join(f"'{state}'" for state in UNFINISHED)
        return f"key is not null and only_one and state in ({unfinished})"

    def holder(self) -> str:
        """Find the job that holds a strict key."""
        return f"select id, state from {self.table} where task = :task and key = :key and {self._only_one()}"

    def hold(self, name: str) -> tuple[str, dict[str, Any]]:
        """The statement that lets one transaction at a time add a key, with its values. SQLite's takes the write lock:
        the caller's transaction may not have begun to write.
        """
        if self.sql.lock_name is not None:
            return self.sql.lock_name, {"name": name}
        return f"update {self.table} set id = id where 1 = 0", {}

    def counting(self, key: Key) -> str:
        """Find the newest job that counts for a key that checks more than the unique index does."""
        states = ", ".join(f"'{state}'" for state in key.states)
        recent = ""
        if key.within is not None:
            since = self.now(f"-{key.within.total_seconds()}")
            recent = f" and {self.sql.instant('created_at')} > {self.sql.instant(since)}"
        return (
            f"select id, state from {self.table} where task = :task and key = :key and state in ({states}){recent}"
            " order by id desc limit 1"
        )

    def replace(self, wake: bool, at_most: timedelta | None = None) -> str:
        """Give new arguments to a job that is not running, and all its attempts. ``at_most``: the longest time until
        its first run; one that waits for its retry has had that.
        """
        args, after = self.sent(":args", "jsonb"), self.sent(":run_after", "timestamptz")
        delay = self.sql.typed(":delay", "double precision")
        if at_most is not None:
            left = f"{at_most.total_seconds()} - {self.sql.seconds(self.now(), 'created_at')}"
            delay = f"case when attempts = 0 and {left} < {delay} then {left} else {delay} end"
        # The time is computed in a step: in the update itself a distributed planner would refuse it.
        due = f"select id as _id, coalesce({after}, {self.now(delay)}) as due from {self.table} where id = :id"
        return self._told(
            f"update {self.table} set args = {args}, priority = :priority, attempts = 0, run_after = s.due\n"
            f"from ({due} and state = 'ready') s where id = s._id and state = 'ready' returning id",
            wake,
        )

    def forget_steps(self) -> str:
        """Forget what the steps of a job returned for its old arguments."""
        return f"delete from {self.steps} where job_id = :id"


def simple(call: Call) -> bool:
    """Whether a job has nothing but its task and arguments."""
    return call.options.run_after is None and call.options.key is None


def add(
    statements: EnqueueStatements, calls: Sequence[Call], *, wake: bool, place: FlowPosition | None = None
) -> Verb[list[int]]:
    """Add jobs in order. Returns the id of each call's job, which may be an existing one."""
    ids: list[int] = []
    pending: list[Call] = []
    if place is None and len(calls) == 1 and simple(calls[0]):
        call = calls[0]
        rows = yield statements.one(wake), _plain_values(call)
        return [rows[0][0]]
    for call in calls:
        if call.options.unique is None:
            pending.append(call)
            continue
        ids += yield from _add_many(statements, pending, wake, place)
        pending = []
        ids.append((yield from _add_keyed(statements, call, call.options.unique, wake, place)))
    ids += yield from _add_many(statements, pending, wake, place)
    return ids


def _add_many(
    statements: EnqueueStatements, calls: Sequence[Call], wake: bool, place: FlowPosition | None
) -> Verb[list[int]]:
    ids: list[int] = []
    for start in range(0, len(calls), _CHUNK):
        rows = yield statements.many(wake), {"doc": _document(statements, calls[start : start + _CHUNK], place)}
        ids += sorted(row[0] for row in rows)
    return ids


def _add_keyed(
    statements: EnqueueStatements, call: Call, key: Key, wake: bool, place: FlowPosition | None
) -> Verb[int]:
    where = {"task": call.task.name, "key": key.value}
    if key.looks_back:
        # Another transaction that adds this key waits here until ours commits, and then sees our row.
        yield statements.hold(f"{call.task.name} {key.value}")
    text = statements.many(wake, "nothing" if key.strict else None)
    for _ in range(_TRIES):
        existing = (yield statements.counting(key), where) if key.looks_back else []
        if not existing:
            added = yield text, {"doc": _document(statements, [call], place)}
            if added:
                return int(added[0][0])
            existing = yield statements.holder(), where
        if existing:
            answer = yield from _taken(statements, call, key, int(existing[0][0]), wake)
            if answer is not None:
                return answer
    raise RowmillError(f"task {call.task.name!r}: the job with key {key.value!r} kept changing its state; try again")


def _taken(statements: EnqueueStatements, call: Call, key: Key, id: int, wake: bool) -> Verb[int | None]:
    """Decide what a call does if another job has its key."""
    if key.conflict == "raise":
        raise KeyTaken(f"task {call.task.name!r}: job {id} has the key {key.value!r}", id=id)
    if key.conflict == "replace":
        timing = _timing(statements, call)
        replaced = yield (
            statements.replace(wake, key.at_most),
            {
                "id": id,
                **_plain_values(call),
                "delay": timing.get("delay") or 0,
                "run_after": timing.get("run_after"),
            },
        )
        if replaced:
            yield statements.forget_steps(), {"id": id}
        elif key.debounce is not None:
            return None  # it has started since: this call makes the next job
    return id


def _timing(statements: EnqueueStatements, call: Call) -> dict[str, Any]:
    after, unique = call.options.run_after, call.options.unique
    if unique is not None and unique.debounce is not None:
        after = unique.debounce
    if isinstance(after, timedelta):
        return {"delay": after.total_seconds()}
    if isinstance(after, datetime):
        return {"run_after": statements.sql.time_text(after)}
    return {}


def _plain_values(call: Call) -> dict[str, Any]:
    """The values that every job has."""
    return {**common_values(call), "args": as_json(call.args)}


def common_values(call: Call) -> dict[str, Any]:
    """The values that calls of one task with the same options share."""
    task = call.task
    return {
        "task": task.name,
        "queue": task.queue,
        "priority": task.priority if call.options.priority is None else call.options.priority,
        "max_attempts": task.max_attempts,
    }


def _document(statements: EnqueueStatements, calls: Sequence[Call], place: FlowPosition | None) -> str:
    rows = []
    for number, call in enumerate(calls):
        unique = call.options.unique
        row = {
            **_plain_values(call),
            "args": call.args,
            "ord": number,
            "key": unique.value if unique else None,
            "only_one": unique is None or unique.strict,
            "state": JOINING if place is not None and place.needs is not None else READY,
            **_timing(statements, call),
        }
        if place is not None:
            row |= {"parent_id": place.parent_id, "branch": place.branch, "needs": place.needs}
        rows.append(row)
    return as_json(rows)


def one_statement(calls: Sequence[Call]) -> bool:
    """Whether these calls need no explicit transaction."""
    keys = [unique for call in calls if (unique := call.options.unique) is not None]
    if len(calls) == 1:
        return not keys or not (keys[0].looks_back or keys[0].conflict == "replace")
    return not keys and len(calls) <= _CHUNK


async def add_one(direct: AsyncpgPool, statements: EnqueueStatements, call: Call, wake: bool) -> int:
    """Add one job in the simplest and most frequent case."""
    return int((await direct.fetch(*numbered(statements.one(wake), _plain_values(call))))[0][0])
