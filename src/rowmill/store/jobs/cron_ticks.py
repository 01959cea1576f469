"""``rowmill_crons``: up to which tick each cron was enqueued.

Whoever moves a cron's ``last_tick`` on, from what it was when it was read, enqueues the ticks in between, in the same
transaction: each once, however many workers look, with no leader among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ...clock import Clock
from ...declare.call import Call
from ...declare.cron import Cron
from ...declare.options import Options
from ...declare.task import Task
from ..caller_transactions import drive, on
from ..database import Database, runner
from ..driver_errors import translated
from ..handler_connections import uncut
from .enqueue import EnqueueStatements, add
from .job_rows import moment


class Ticks:
    """The crons of one environment."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database, self.clock = database, clock
        self.say = EnqueueStatements.to(database, clock)
        self.table = database.own("rowmill_crons")

    def _time(self, at: datetime) -> Any:
        return at if self.say.postgres else at.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "milliseconds")

    async def register(self, tasks: Sequence[Task[Any, Any]]) -> None:
        """Crons that are new, or have another expression than before, are counted from now on."""
        insert = (
            f"insert into {self.table} as c (name, expression, tz, last_tick) values (:name, :expression, :tz,"
            f" {self.say.now()}) on conflict (name) do update set expression = excluded.expression, tz = excluded.tz,"
            " last_tick = excluded.last_tick where c.expression <> excluded.expression or c.tz <> excluded.tz"
        )
        for task in tasks:
            assert task.cron is not None
            values = {"name": task.name, "expression": task.cron.expression, "tz": task.cron.tz}
            await self.database.write(lambda run, values=values: on(run, self.say.dialect)(insert, values))  # type: ignore[misc]

    async def now(self, names: Sequence[str]) -> tuple[datetime, dict[str, datetime]]:
        """The database's time, and up to where each cron was enqueued."""
        text = f"select name, last_tick, {self.say.now()} from {self.table}"
        rows = await self.database.read(lambda run: on(run, self.say.dialect)(text, {}))
        if not rows:
            found = await self.database.read(lambda run: on(run, self.say.dialect)(f"select {self.say.now()}", {}))
            return moment(found[0][0]), {}
        return moment(rows[0][2]), {row[0]: moment(row[1]) for row in rows if row[0] in names}

    async def enqueue(self, task: Task[Any, Any], cron: Cron, last: datetime, now: datetime) -> int:
        """Enqueue the ticks that are due since ``last``, unless somebody else did; how many."""
        ticks, until = cron.due(last, now)
        if until == last:
            return 0
        calls = [Call(task, {}, Options(run_after=tick)) for tick in ticks]
        text = f"update {self.table} set last_tick = :until where name = :name and last_tick = :last returning name"
        values = {"name": task.name, "last": self._time(last), "until": self._time(until)}

        def verb(connection: Any) -> int:
            run = on(runner(connection), self.say.dialect)
            if not run(text, values):
                return 0
            drive(add(self.say, calls, wake=True), run)
            return len(calls)

        async with self.database.begin() as connection:
            with translated(self.database):
                return await uncut(connection.run_sync(verb))
