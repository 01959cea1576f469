"""What decides whether a row runs, read from the database. Nothing is written, and no lock outlives the look."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ...declare import states
from ...errors import Busy, Refused, Unreachable, Unserved
from ..database import Run
from ..gates.gate_binding import BoundGates
from ..gates.pauses import Target, read_one
from ..gates.rules import GateState
from ..lane.refused_rows import try_claim
from ..lane.row_keys import Key, Placeholders, among, written
from ..lane.statements import INCARNATION
from ..lane.waits import WaitFacts, WaitingRows
from ..own.workers import WorkersTable, evidence, taken_back_within
from ..postgres_database import rows_of
from .gate_view import LaneGates, has_table, lane_gates
from .lane_view import LaneView, Row
from .why_rules import GateFacts, LockFacts, PauseFacts, RowFacts, Runner, WorkerFacts

#: Rows of a line that are counted, and running rows that are named.
LINE, _NAMED = 1000, 5
#: A claim or a settle has a row locked for a moment: one that is locked is looked at again.
_TRIES, _PAUSE = 3, 0.05


class Inquiry:
    """One row of one lane in one environment."""

    def __init__(
        self,
        view: LaneView,
        gates: LaneGates,
        key: Key,
        all_workers: Sequence[dict[str, Any]] | None,
        suspicion: float | None,
    ) -> None:
        self.view, self.gates, self.key, self.all_workers, self.suspicion = view, gates, key, all_workers, suspicion
        self.statements, self.lane, self.binding = view.statements, view.lane, view.binding

    async def facts(self, above: Sequence[LaneView], beside: Sequence[LaneView]) -> RowFacts:
        """The row, and what is around it. ``above``: lanes that go first; ``beside``: others over the same table."""
        view, lane = self.view, self.lane
        parts = self.statements.ready_parts()
        phrases = [str(dim.phrase) for dim in self.gates.dims if dim.phrase is not None]
        keyed = [view.sql.key(phrase) for phrase in phrases]
        stuck = view.condition("stuck") or "1 = 0"
        tests = [*parts.values(), self.statements.running(), stuck]
        asked = [*(f"case when {test} then 1 else 0 end" for test in tests), self._limit(), *keyed]
        examined = await view.examine(self.key, asked)
        where: dict[str, Any] = {"environment": view.environment, "lane": lane.name}
        if examined is None:
            return RowFacts(**where, found=False)
        row, answers = examined
        holds = dict(zip(parts, answers, strict=False))
        running, is_stuck, limit = answers[len(parts) : len(parts) + 3]
        state = self._state(row, bool(running), holds)
        common: dict[str, Any] = {
            **where,
            "state": state,
            "ages": row.ages,
            "error": self._role(row, "error"),
            "workers": self._workers(),
            "served": lane.serves(view.environment),
            "served_in": tuple(lane.environments or ()),
        }
        if state in ("running", "open"):
            runs, since = await view.stale_runs(self.key)
            common |= {"stale_runs": runs, "stale_since": since, "inputs": lane.inputs}
        if state == "running":
            worker = self._worker(self._role(row, "worker"))
            seen_for = (await view.first_seen()).get(written(row.id)) if is_stuck and row.silent_for is None else None
            return RowFacts(
                **common, worker=worker, stuck=bool(is_stuck), silent_for=row.silent_for, seen_for=seen_for,
                lease=lane.lease.total_seconds(), sweep_every=lane.sweep_every.total_seconds(),
            )  # fmt: skip
        if state is None:
            elsewhere = await self._elsewhere(beside) or self._shown(row)
            return RowFacts(**common, ignored=self._ignored(row), elsewhere=elsewhere)
        if state not in ("open", "exhausted"):
            return RowFacts(**common)
        fails = tuple(name for name, holding in holds.items() if not holding)
        keys = dict(
            zip((d.label for d in self.gates.dims if d.phrase is not None), answers[len(parts) + 3 :], strict=True)
        )
        table = await has_table(view)
        pauses, gates = await view.database.read(lambda run: self._gates(run, keys, table))
        ready = not fails
        return RowFacts(
            **common,
            fails=fails,
            wait=await self._wait() if "run_after" in fails else None,
            attempts=row.values.get(self.binding.counter) if self.binding.counter else None,
            limit=limit,
            sweep_every=lane.sweep_every.total_seconds(),
            untouched_for=lane.untouched_for.total_seconds() if lane.untouched_for else 0.0,
            where=self.statements.further() if "where" in fails else "",
            pauses=pauses,
            gates=gates,
            slots=lane.concurrency,
            above=await self._above(above) if ready else (),
            locked=await self._locked() if ready else None,
            refused=await self._refused() if ready else None,
            ahead=await self._ahead(keys) if ready else None,
        )

    # -- the row

    async def _wait(self) -> WaitFacts | None:
        try:
            return None if self.lane.own else await WaitingRows(self.view.store).facts(self.key)
        except Refused:  # the table is not there, or this role may not read it
            return None

    def _limit(self) -> str:
        return self.statements.exhausted() if self.lane.dead is None and self.binding.counter else "null"

    def _role(self, row: Row, role: str) -> Any:
        column = self.binding.roles.get(role)
        return row.values.get(column) if column else None

    def _worker(self, value: Any) -> str | None:
        """A worker's id as it was given, without the process that had it."""
        if value is None:
            return None
        return str(value).partition(INCARNATION)[0] if self.binding.incarnated else str(value)

    def _state(self, row: Row, running: bool, holds: dict[str, Any]) -> str | None:
        """The row's state by the very conditions of the claim."""
        if running:
            return "running"
        if holds["state"]:
            return "exhausted" if not holds.get("attempts", 1) else "open"
        return {"waiting": "open", "excluded": "open", "ready": "open"}.get(row.state or "", row.state)

    async def _elsewhere(self, beside: Sequence[LaneView]) -> str | None:
        for other in beside:
            for row in await other.find([self.key], whole=False):
                if row.state is not None:
                    return f"in lane {other.lane.name!r} it is {row.state}"
        return None

    def _ignored(self, row: Row) -> str | None:
        """The state that the lane is told to leave alone, where the row is in one."""
        for state in self.lane.ignore_states:
            if all(row.values.get(column) in states.options(value) for column, value in state.items()):
                return " and ".join(f"{column} is {row.values[column]!r}" for column in state)
        return None

    def _shown(self, row: Row) -> str | None:
        """The values of the state columns, if no lane declares them."""
        columns = sorted(self.binding.state_columns() & row.values.keys())
        return ", ".join(f"{column} is {row.values[column]!r}" for column in columns) or None

    # -- gates

    def _gates(
        self, run: Run, keys: dict[str, Any], table: bool
    ) -> tuple[tuple[PauseFacts, ...], tuple[GateFacts, ...]]:
        rows, pauses, gates = self.gates.rows, [], []
        now = rows.epoch(run)
        spots = [Target(), Target(self.lane.name)]
        for dim in self.gates.dims:
            raw = keys.get(dim.label) if dim.phrase is not None else ""
            if raw is None:
                continue  # rows without a key are not held back
            key = str(raw)
            state = (rows.read(run, [(dim.label, key)]) if table else {}).get((dim.label, key), GateState(key))
            state = dim.overlay(run, {key: state})[key]
            total, by_process, runners = self._running(run, dim, raw)
            gates.append(GateFacts(dim.group, key, state, total, by_process, runners, now))
            if dim.phrase is not None:
                spots.append(Target(self.lane.name, dim.label, key))
        for target in spots if table else []:
            name = {"environment": f"environment {self.view.environment!r}", "lane": f"lane {self.lane.name!r}"}
            label = name.get(target.kind, f"{target.dim} {target.key}")
            standing = read_one(run, rows, target)
            pauses += [PauseFacts(target.kind, label, p.reason, p.since, p.left) for p in standing]
        return tuple(pauses), tuple(gates)

    def _running(self, run: Run, dim: BoundGates, raw: Any) -> tuple[int, dict[str, int], tuple[Runner, ...]]:
        """Running rows of a key: how many, how many in each live process, and some of them."""
        group = dim.group
        if not (group.counts_running or group.process is not None):
            return 0, {}, ()
        statements, marks = self.statements, Placeholders(self.binding)
        source = f"from {statements.table} where {statements.running()}"
        if dim.phrase is not None:
            source += f" and {dim.matches(marks.add(raw))}"
        given = marks.given()
        total = int(run(f"select count(*) {source}", given)[0][0])
        worker = statements.name(self.binding.roles["worker"]) if "worker" in self.binding.roles else "null"
        by_process: dict[str, int] = {}
        if group.process is not None:
            counted = {row[0]: int(row[1]) for row in run(f"select {worker}, count(*) {source} group by 1", given)}
            for one in self.live:
                mark = f"{one['id']}{INCARNATION}{one['incarnation']}" if self.binding.incarnated else one["id"]
                by_process[one["id"]] = counted.get(mark, 0)
        age = self.view.age_of("claimed_at") or "null"
        names = statements.names(self.binding.key)
        text = f"select {worker}, {age} as _age, {names} {source} order by 2 limit {_NAMED}"
        runners = [
            Runner(written(tuple(key) if len(key) > 1 else key[0]), self._worker(who), _number(seconds))
            for who, seconds, *key in run(text, given)
        ]
        return total, by_process, tuple(runners)

    # -- who works

    @property
    def live(self) -> list[dict[str, Any]]:
        """Workers that serve the lane and have been heard of."""
        return [w for w in self.all_workers or () if w["alive"] and self.lane.name in w["lanes"]]

    def _workers(self) -> tuple[WorkerFacts, ...] | None:
        if self.all_workers is None:
            return None
        workers = []
        for worker in self.all_workers:
            if self.lane.name not in worker["lanes"]:
                continue
            current = worker["current"]
            up = datetime.fromisoformat(worker["seen_at"]) - datetime.fromisoformat(worker["started_at"])
            workers.append(
                WorkerFacts(
                    worker["id"],
                    worker["alive"],
                    worker["silent_for"],
                    sum(1 for job in current if job["lane"] == self.lane.name),
                    len(current),
                    next((job["at_once"] for job in current if job.get("at_once")), None),
                    worker["silent_for"] + up.total_seconds(),
                    evidence(worker, self.suspicion),
                    taken_back_within(worker, self.live, self.suspicion),
                )
            )
        return tuple(workers)

    async def _above(self, views: Sequence[LaneView]) -> tuple[str, ...]:
        """Lanes that go first and have a ready row that is not paused."""
        counts = []
        for view in views:
            statements = view.statements
            try:
                ready = await view.ask(
                    f"select 1 where {statements.ready_probe()} and {statements.unpaused()}", seconds=1.0
                )
            except Busy:
                continue
            if ready:
                other = f" in {view.environment!r}" if view.environment != self.view.environment else ""
                gated = " (unless its gates hold them back)" if view.lane.groups else ""
                counts.append(f"lane {view.lane.name!r}{other}{gated}")
        return tuple(counts)

    # -- the line

    async def _ahead(self, keys: dict[str, Any]) -> int | None:
        """Ready rows that go before this one: of the same keys where there are gates, else of the lane."""
        marks = Placeholders(self.binding)
        tests = [self.statements.ready()]
        for dim in self.gates.dims:
            if dim.phrase is not None:
                raw = keys[dim.label]
                tests.append(f"{dim.phrase} is null" if raw is None else dim.matches(marks.add(raw)))
        this = among(self.statements, [self.key], marks)
        text = f"""select case when {this} then 1 else 0 end from {self.statements.table}
where {" and ".join(tests)} order by {self.view.order("ready")} limit {LINE + 1}"""
        try:
            line = [row[0] for row in await self.view.ask(text, marks)]
        except Busy:
            return None
        return line.index(1) if 1 in line else -1

    async def _locked(self) -> LockFacts | None:
        """Whether somebody's transaction has the row, which a claim would pass over. SQLite locks no rows."""
        if self.view.sql.one_writer:
            return None
        for n in range(_TRIES):
            if n:
                await asyncio.sleep(_PAUSE)
            marks = Placeholders(self.binding)
            one = f"{self.statements.table} where {among(self.statements, [self.key], marks)}"
            try:
                if await self.view.database.trial(
                    rows_of(f"select 1 from {one} for no key update skip locked", marks.given())
                ):
                    return None
            except Refused:  # a role that may only read cannot tell
                return None
        text = f"""select a.pid, a.application_name, a.usename, extract(epoch from now() - a.xact_start)::float8
from (select xmax from {one}) t
join pg_locks l on l.locktype = 'transactionid' and l.granted and l.transactionid::text = t.xmax::text
join pg_stat_activity a on a.pid = l.pid limit 1"""
        rows = await self.view.ask(text, marks)
        if not rows:
            return LockFacts()
        pid, application, user, since = rows[0]
        who = ", ".join(part for part in (f"pid {pid}", application, f"role {user}" if user else "") if part)
        return LockFacts(who, _number(since))

    async def _refused(self) -> str | None:
        """What the database says to the claim of this row, tried and rolled back; None: it takes it, or cannot tell."""
        try:
            await try_claim(self.view.store, [self.key])
        except (Unserved, Busy, Unreachable):  # a role that may only read, a replica, a lock
            return None
        except Refused as error:
            return error.message
        return None


def _number(value: Any) -> float | None:
    return None if value is None else max(float(value), 0.0)


async def inquire(view: LaneView, key: Key, suspicion: float | None = None) -> Inquiry:
    """Open an inquiry into one row. ``suspicion``: the seconds of ``Mill(suspicion=)``."""
    table = WorkersTable(view.database)
    workers = await table.all() if await table.exists() else None
    return Inquiry(view, await lane_gates(view), key, workers, suspicion)
