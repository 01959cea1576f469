"""``rowmill_crons``: the last tick that was enqueued for each cron, and for each row of a table of schedules.

A worker moves ``last_tick`` forward only if it has not changed since the read, and enqueues the ticks in between in the
same transaction. So each tick is enqueued once with any number of workers, without a leader. For a schedule row the
statement also checks that the row has not changed since the read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Scheduled:
    """A cron's name in ``rowmill_crons``, and the call that is enqueued at its ticks."""

    name: str
    cron: Cron
    task: Task[Any, Any]
    args: Mapping[str, Any] = field(default_factory=dict)
    #: SQL that must be true at the write, with its values.
    still: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(one: Task[Any, Any] | Scheduled) -> Scheduled:
        """A task that is itself a cron, or a schedule row."""
        if isinstance(one, Scheduled):
            return one
        assert one.cron is not None
        return Scheduled(one.name, one.cron, one)


class Ticks:
    """The crons and schedules of one environment."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database, self.clock = database, clock
        self.statements = EnqueueStatements.to(database, clock)
        self.table = database.own("rowmill_crons")

    async def register(self, crons: Sequence[Task[Any, Any] | Scheduled]) -> None:
        """Start to count crons from now if they are new or have a new expression."""
        for one in map(Scheduled.of, crons):
            names = [self.statements.sql.typed(f":{name}", "text") for name in ("name", "expression", "tz")]
            text = (
                f"insert into {self.table} as c (name, expression, tz, last_tick) select {', '.join(names)},"
                f" {self.statements.now()} where {one.still or 'true'} on conflict (name) do update"
                " set expression = excluded.expression, tz = excluded.tz, last_tick = excluded.last_tick"
                " where c.expression <> excluded.expression or c.tz <> excluded.tz"
            )
            values = {"name": one.name, "expression": one.cron.expression, "tz": one.cron.tz, **one.values}
            await self.database.write(
                lambda run, text=text, values=values: self.statements.sql.named(run)(text, values)  # type: ignore[misc]
            )

    async def now(self, names: Sequence[str] | None) -> tuple[datetime, dict[str, datetime]]:
        """The database's time, and the last enqueued tick of each cron; None: of all crons."""
        text = f"select name, last_tick, {self.statements.now()} from {self.table}"
        rows = await self.database.read(lambda run: self.statements.sql.named(run)(text, {}))
        if not rows:
            answer = await self.database.read(
                lambda run: self.statements.sql.named(run)(f"select {self.statements.now()}", {})
            )
            return utc(answer[0][0]), {}
        return utc(rows[0][2]), {row[0]: utc(row[1]) for row in rows if names is None or row[0] in names}

    async def enqueue(self, cron: Task[Any, Any] | Scheduled, when: Cron, last: datetime, now: datetime) -> int:
        """Enqueue the ticks that are due since ``last``, unless another worker did. Returns how many."""
        one = Scheduled.of(cron)
        ticks, until = when.due(last, now)
        if until == last:
            return 0
        calls = [Call(one.task, one.args, Options(run_after=tick)) for tick in ticks]
        was, then = self.statements.sent(":last", "timestamptz"), self.statements.sent(":until", "timestamptz")
        text = f"update {self.table} set last_tick = {then} where name = :name and last_tick = {was}"
        text += f"{f' and {one.still}' if one.still else ''} returning name"
        time = self.statements.sql.time_text
        values = {"name": one.name, "last": time(last), "until": time(until), **one.values}

        def verb(plain: Run) -> int:
            run = self.statements.sql.named(plain)
            if not run(text, values):
                return 0
            drive(add(self.statements, calls, wake=True), run)
            return len(calls)

        return await self.database.long_transaction(verb)

    async def forget(self, names: Sequence[str], on: str) -> None:
        """Delete the last ticks of rows that are gone or disabled. If a row comes back, it counts from that time.

        ``on``: SQL that is true if the row named ``_cron.name`` exists and is enabled.
        """
        mark = self.statements.sql.mark(1, "")
        text = f"delete from {self.table} as _cron where _cron.name {self.statements.sql.among(mark)} and not {on}"
        await self.database.write(lambda run: run(text, (self.statements.sql.list_value(names),)))
