"""``rowmill_crons``: up to which tick each cron was enqueued.

The worker that moves a cron's ``last_tick`` on, from what it was when it was read, enqueues the ticks in between, in
the same transaction: each once, however many workers look, with no leader among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ...clock import Clock
from ...declare.call import Call
from ...declare.cron import Cron
from ...declare.options import Options
from ...declare.task import Task
from ..caller_transactions import drive
from ..database import Database, Run
from ..dialect import utc
from .enqueue import EnqueueStatements, add


class Ticks:
    """The crons of one environment."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database, self.clock = database, clock
        self.say = EnqueueStatements.to(database, clock)
        self.table = database.own("rowmill_crons")

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
            await self.database.write(lambda run, values=values: self.say.sql.named(run)(insert, values))  # type: ignore[misc]

    async def now(self, names: Sequence[str]) -> tuple[datetime, dict[str, datetime]]:
        """The database's time, and up to where each cron was enqueued."""
        text = f"select name, last_tick, {self.say.now()} from {self.table}"
        rows = await self.database.read(lambda run: self.say.sql.named(run)(text, {}))
        if not rows:
            found = await self.database.read(lambda run: self.say.sql.named(run)(f"select {self.say.now()}", {}))
            return utc(found[0][0]), {}
        return utc(rows[0][2]), {row[0]: utc(row[1]) for row in rows if row[0] in names}

    async def enqueue(self, task: Task[Any, Any], cron: Cron, last: datetime, now: datetime) -> int:
        """Enqueue the ticks that are due since ``last``, unless somebody else did; how many."""
        ticks, until = cron.due(last, now)
        if until == last:
            return 0
        calls = [Call(task, {}, Options(run_after=tick)) for tick in ticks]
        was, then = self.say.sent(":last", "timestamptz"), self.say.sent(":until", "timestamptz")
        text = f"update {self.table} set last_tick = {then} where name = :name and last_tick = {was} returning name"
        time = self.say.sql.time_text
        values = {"name": task.name, "last": time(last), "until": time(until)}

        def verb(plain: Run) -> int:
            run = self.say.sql.named(plain)
            if not run(text, values):
                return 0
            drive(add(self.say, calls, wake=True), run)
            return len(calls)

        return await self.database.long_transaction(verb)
