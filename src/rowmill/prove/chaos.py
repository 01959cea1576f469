"""A short chaos run: real worker processes on the copy are killed, paused past their lease, and disconnected."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock
from ..declare.lane import Lane
from ..errors import DatabaseError, RowmillError
from ..store import Database, open_lane
from ..store.dialect import POSTGRES, SQLITE
from .chaos_worker import LEASE, hurried
from .commit_checks import CommitChecks
from .sample_rows import SampleRows

_WORKERS, _AHEAD, _MOST = 3, 12, 5000
#: Seconds that rows get to reach an end state after the last fault.
_PATIENCE = 90.0
#: Faults for workers. SQLite workers have no connections that could be cut.
_FAULTS = {POSTGRES.name: ("kill", "stop", "cut"), SQLITE.name: ("kill", "stop")}
#: The trigger that records every row that ends: its table, its key and the condition of an end.
_TRIGGER: dict[str, Callable[[str, str, str], list[str]]] = {
    POSTGRES.name: lambda table, key, when: [
        "create or replace function rowmill_proved() returns trigger language plpgsql as"
        f" $$ begin insert into rowmill_proved values ({key}); return new; end $$",
        f"create or replace trigger rowmill_proved after update on {table} for each row"
        f" when ({when}) execute function rowmill_proved()",
    ],
    SQLITE.name: lambda table, key, when: [
        "drop trigger if exists rowmill_proved",
        f"create trigger rowmill_proved after update on {table} for each row when {when}"
        f" begin insert into rowmill_proved values ({key}); end",
    ],
}


@dataclass
class ChaosResult:
    """The faults of a chaos run, and how the rows ended."""

    rows: int = 0
    done: int = 0
    dead: int = 0
    killed: int = 0
    stopped: int = 0
    cut: int = 0
    lost: int = 0
    doubled: int = 0
    left: int = 0
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        """Whether every row ended exactly once."""
        return not (self.lost or self.doubled or self.left)


@dataclass
class Chaos:
    """One lane of an application, on its own copy."""

    reference: str
    lane: Lane
    url: str
    made: SampleRows
    schema: str | None = None
    seed: int = 1
    survived: ChaosResult = field(default_factory=ChaosResult)

    async def run(self, seconds: float) -> ChaosResult:
        """Add rows and inject faults for this many seconds. Then wait until every row has ended."""
        began, chance = time.monotonic(), random.Random(self.seed)
        database = Database.open(self.url, schema=self.schema)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        workers: list[subprocess.Popen[bytes]] = []
        try:
            self._store = await open_lane(hurried(self.lane), "prove", database, Clock(), "watch")
            notes = self._store.gate_learning
            self._dims = tuple(notes.dims.values()) if notes is not None else ()
            self._watch = CommitChecks(self._store, self._dims, Clock())
            await self._prepare(database)
            await self.made.prepare(self._store, lambda text: database.write(lambda run: run(text, ())))
            self._number = 0
            await self._feed(database, {})
            workers += [self._start(n) for n in range(1, _WORKERS + 1)]
            await self._until(database, workers, lambda rows: any(r != "ready" for r in rows.values()), _PATIENCE)
            ends = time.monotonic() + seconds
            for kind in itertools.cycle(_FAULTS[database.dialect.name]):
                await self._feed(database, await self._states(database))
                await asyncio.sleep(chance.uniform(0.2, 0.6))
                await self._fault(kind, chance, workers, database)
                if time.monotonic() > ends:
                    break
            await self._until(database, workers, lambda rows: not _open(rows), _PATIENCE)
            await self._count(database)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            await database.close()
            self._log.close()
        self.survived.seconds = time.monotonic() - began
        return self.survived

    # -- rows

    async def _prepare(self, database: Database) -> None:
        """Empty the tables and create a trigger that records every row that ends."""
        statements = self._store.statements
        texts = [f"delete from {statements.table}", "create table if not exists rowmill_proved (key text)",
                 "delete from rowmill_proved"]  # fmt: skip
        if statements.gates:
            texts.append(f"delete from {statements.gates}")  # the last schedule may have left the lane paused
        ends = [values for values in (self.lane.done, self.lane.dead, self.lane.canceled) if values]
        when = " or ".join(f"({statements.final(values, 'new.')})" for values in ends)
        key = " || ',' || ".join(f"cast(new.{statements.name(column)} as text)" for column in self._store.binding.key)
        for text in (*texts, *_TRIGGER[database.dialect.name](statements.table, key, when)):
            await database.write(lambda run, text=text: run(text, ()))  # type: ignore[misc]

    async def _feed(self, database: Database, states: dict[Any, str]) -> None:
        """Keep enough rows ready, but not so many that the run cannot finish."""
        waiting = sum(state == "ready" for state in states.values())
        texts: list[str] = []
        while len(texts) + waiting < _AHEAD and self._number < _MOST:
            self._number += 1
            texts.append(self.made.insert(self._store, self._dims, self._number))
        for text in texts:
            await database.write(lambda run, text=text: run(text, ()))  # type: ignore[misc]

    async def _states(self, database: Database) -> dict[Any, str]:
        text = self._watch.text()
        rows = await database.read(lambda run: run(text, ()))
        return {key: row.state for key, row in self._watch.read(rows).items()}

    async def _count(self, database: Database) -> None:
        states, result = await self._states(database), self.survived
        result.rows, result.lost = self._number, self._number - len(states)
        result.done = sum(state == "done" for state in states.values())
        result.dead = sum(state in ("dead", "canceled") for state in states.values())
        result.left = len(_open(states))
        text = "select count(*) - count(distinct key) from rowmill_proved"
        result.doubled = (await database.read(lambda run: run(text, ())))[0][0]

    # -- workers

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rowmill.prove.chaos_worker", self.reference, self.lane.name, self.url]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return subprocess.Popen(
            [*command, f"proof-{number}"], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment
        )

    async def _fault(
        self, what: str, chance: random.Random, workers: list[subprocess.Popen[bytes]], database: Database
    ) -> None:
        number, result = chance.randrange(len(workers)), self.survived
        if what == "kill":
            workers[number].kill()
            workers[number].wait()
            workers[number] = self._start(number + 1)
            result.killed += 1
        elif what == "stop":
            workers[number].send_signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE.total_seconds() * 1.3)
            workers[number].send_signal(signal.SIGCONT)
            result.stopped += 1
        else:
            text = (
                "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
            )
            await database.read(lambda run: run(text, ()))
            result.cut += 1

    async def _until(
        self, database: Database, workers: Sequence[subprocess.Popen[bytes]], test: Any, seconds: float
    ) -> None:
        """Wait until the rows satisfy the condition, or the time is up."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                if test(await self._states(database)):
                    return
            except DatabaseError:
                pass
            if all(worker.poll() is not None for worker in workers):
                self._log.seek(0)
                lines = self._log.read().decode(errors="replace").strip().splitlines()
                raise RowmillError(
                    f"lane {self.lane.name!r}: no worker process stays up: {lines[-1] if lines else 'no output'}",
                    hint=f"rowmill run {self.reference} --lanes {self.lane.name}, to see it start",
                )
            await asyncio.sleep(0.2)


def _open(states: dict[Any, str]) -> list[Any]:
    return [key for key, state in states.items() if state in ("ready", "running", "unknown")]
