"""Jobs of ``rowmill_jobs`` as callers and tests see them: enqueued jobs, status, cancel, prune."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ...clock import Clock
from ...declare.call import Status
from ...declare.options import Keep
from ...declare.states import UNFINISHED
from ..bounded_text import bounded
from ..caller_transactions import Verb
from ..database import Database
from ..dialect import Dialect, utc
from ..json_documents import readable
from .enqueue import EnqueueStatements

_STATUS = ("id", "task", "state", "attempts", "run_after", "progress", "error", "result", "history")
_JSON = ("progress", "result", "history")
PRUNE = 1000  # rows in one step


def listed(values: Iterable[str]) -> str:
    """Words as SQL literals."""
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)


class Jobs:
    """The jobs of one environment."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database, self.clock = database, clock
        self.statements = EnqueueStatements.to(database, clock)
        self.table = self.statements.table

    async def _run(self, sql: str, values: dict[str, Any], *, write: bool = False) -> Sequence[Any]:
        verb = self.database.write if write else self.database.read
        return await verb(lambda run: self.database.sql.named(run)(sql, values))

    # -- status

    async def status(self, id: int) -> Status | None:
        """One job as it is now."""
        # JSON as text: a value that Python cannot read is shown as it is.
        columns = ", ".join(f"cast({c} as text)" if c in _JSON else c for c in _STATUS)
        rows = await self._run(f"select {columns} from {self.table} where id = :id", {"id": id})
        if not rows:
            return None
        children = await self.children([id])
        task = rows[0]
        return Status(
            id=task[0], task=task[1], state=task[2], attempts=task[3], run_after=utc(task[4]),
            progress=_shown(task[5]), error=task[6], result=_shown(task[7]), history=_shown(task[8]) or [],
            children=children.get(id, {}),
        )  # fmt: skip

    async def children(self, parents: Sequence[int], branch: str | None = None) -> dict[int, dict[str, int]]:
        """Count the children of each parent, by state."""
        ids = ", ".join(str(int(parent)) for parent in parents)
        which = "" if branch is None else " and branch = :branch"
        text = (
            f"select parent_id, state, count(*) from {self.table} where parent_id in ({ids}){which}"
            " group by parent_id, state"
        )
        counts: dict[int, dict[str, int]] = {}
        for parent, state, count in await self._run(text, {} if branch is None else {"branch": branch}):
            counts.setdefault(parent, {})[state] = count
        return counts

    async def over(self, ids: Iterable[int]) -> set[int]:
        """The ids among these that have ended or are gone."""
        wanted = set(ids)
        if not wanted:
            return wanted
        text = f"select id, state from {self.table} where id in ({', '.join(str(int(id)) for id in wanted)})"
        states = {row[0]: row[1] for row in await self._run(text, {})}
        return {id for id in wanted if states.get(id) not in UNFINISHED}

    # -- cancel

    async def cancel(self, id: int, reason: str) -> tuple[bool, int | None]:
        """Cancel a job in any unfinished state. Returns whether this call did it, and the job's parent."""
        text = (
            f"update {self.table} set state = 'canceled', finished_at = {self.statements.now()}, error = :reason"
            f" where id = :id and state in ({listed(UNFINISHED)}) returning parent_id"
        )
        rows = await self._run(
            text, {"id": id, "reason": bounded(str(reason), encoding=self.database.encoding)}, write=True
        )
        return bool(rows), rows[0][0] if rows else None

    # -- retention

    async def prune(self, tasks: Sequence[str], keep: Keep) -> int:
        """Delete jobs of these tasks past their retention, in one bounded step for each rule. Returns how many."""
        deletes = []
        if keep.age is not None:
            deletes.append(self._delete(tasks, f"state <> 'dead' and {self._older('finished_at', keep.age)}"))
        if keep.dead is not None:
            deletes.append(self._delete(tasks, f"state = 'dead' and {self._older('finished_at', keep.dead)}"))
        for task in tasks if keep.count is not None else ():
            oldest = (
                f"(select finished_at, id from {self.table} where task = {listed([task])} and finished_at is not null"
                f" and state <> 'dead' order by finished_at desc, id desc limit 1 offset {keep.count})"
            )
            deletes.append(self._delete([task], f"state <> 'dead' and (finished_at, id) <= {oldest}"))
        return sum([len(await self._run(text, {}, write=True)) for text in deletes])

    def _older(self, column: str, than: timedelta) -> str:
        since = self.statements.now(f"-{than.total_seconds()}")
        return f"{self.statements.sql.instant(column)} <= {self.statements.sql.instant(since)}"

    def _delete(self, tasks: Sequence[str], test: str) -> str:
        """Delete jobs, except the children of a job that still has to read them."""
        return f"""delete from {self.table} where id in (
  select id from {self.table} j
  where task in ({listed(tasks)}) and finished_at is not null and {test}
    and (parent_id is null or not exists (
      select 1 from {self.table} p where p.id = j.parent_id and p.state in ({listed(UNFINISHED)})))
  limit {PRUNE}{self.statements.sql.lock_to_delete}
) returning id"""


def _shown(text: str | None) -> Any:
    return None if text is None else readable(text)


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A job in the table: its task, and its handler's arguments as JSON."""

    id: int
    task: str
    args: Mapping[str, Any]
    state: str
    run_after: datetime
    priority: int
    key: str | None
    queue: str


def enqueued(sql: Dialect, schema: str | None, task: str | None) -> Verb[list[Enqueued]]:
    """All jobs, or those of one task, in the order in which they were enqueued."""
    table = sql.own(schema, "rowmill_jobs")
    which, values = ("", {}) if task is None else (" where task = :task", {"task": task})
    text = f"select id, task, args, state, run_after, priority, key, queue from {table}{which} order by id"
    return [_job(*row) for row in (yield text, values)]


def _job(id: int, task: str, args: Any, state: str, run_after: Any, *rest: Any) -> Enqueued:
    given = json.loads(args) if isinstance(args, str) else args
    return Enqueued(id, task, given, state, utc(run_after), *rest)
