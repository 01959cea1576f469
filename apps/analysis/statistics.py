"""Live statistics: how long the queues are, what each processor is doing, and whether all is well."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from rowmill import Mill
from rowmill.store import Database
from rowmill.store.inspect.lane_view import LaneView, view_lane
from rowmill.store.own.workers import WorkersTable

from . import tables
from .phases import PHASES
from .processors import BUSY, ERROR, IDLE, STATES
from .settings import Settings

COUNTS = ("ready", "waiting", "running", "stuck", "dead")


class Statistics:
    """Asks the database, so it tells of all workers, wherever they run."""

    def __init__(self, mill: Mill, settings: Settings) -> None:
        self._mill, self._settings = mill, settings
        self._database: Database | None = None
        self._views: dict[str, LaneView] = {}

    async def close(self) -> None:
        """Close the connections."""
        if self._database is not None:
            await self._database.close()

    @property
    def database(self) -> Database:
        """Connections of its own, opened when first asked."""
        if self._database is None:
            ((self._environment, self._database),) = self._mill.databases(list(self._mill.environments)[:1])
        return self._database

    async def gather(self) -> dict[str, Any]:
        """All of it, as a plain value."""
        queues = [await self._queue(phase.name) for phase in PHASES]
        async with self.database.begin() as connection:
            tokens, completed = await self._tokens(connection), await _completed(connection)
            reports = {row.worker: row.report for row in await connection.execute(sa.select(tables.workers))}
        workers = await self._workers(reports)
        processors = [processor for worker in workers for processor in worker.pop("processors")]
        return {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "health": health(queues, workers, processors),
            "queues": queues,
            "completed": completed,
            "processors": processors,
            "workers": workers,
            "tokens": tokens,
        }

    async def _queue(self, phase: str) -> dict[str, Any]:
        database = self.database
        if phase not in self._views:
            lane = self._mill.lanes[phase]
            self._views[phase] = await view_lane(lane, self._environment, database, self._mill.clock)
        found = await self._views[phase].count()
        return {"phase": phase, **{state: found.states[state] or 0 for state in COUNTS}, "oldest": found.oldest_ready}

    async def _tokens(self, connection: Any) -> dict[str, Any]:
        """What the answers of the last minute and day have used up, of what may be."""
        told: dict[str, Any] = {}
        spent = tables.answers.c.inputTokens + tables.answers.c.outputTokens
        for name, seconds in (("minute", self._settings.minute_seconds), ("day", 86400.0)):
            age = sa.extract("epoch", sa.func.now()) - sa.extract("epoch", tables.answers.c.createdAt)
            asked = sa.select(sa.func.coalesce(sa.func.sum(spent), 0)).where(age < seconds)
            limit = getattr(self._settings, f"tokens_per_{name}")
            told[name] = {"used": int((await connection.execute(asked)).scalar_one()), "limit": limit}
        return told

    async def _workers(self, reports: dict[str, Any]) -> list[dict[str, Any]]:
        """Those that are alive, each with its processors; one that has not reported yet has idle ones."""
        fleet = WorkersTable(self.database)
        known = [worker for worker in await fleet.all() if worker["alive"]] if await fleet.exists() else []
        told = []
        for worker in known:
            report = reports.get(worker["id"], {})
            if report.get("pid") != worker["pid"]:  # of a process that had the same name before
                report = {}
            busy = {run["slot"]: run for run in worker["current"]}
            processors = [
                {**processor, "worker": worker["id"]}
                for processor in report.get("processors") or self._idle(worker["lanes"], busy)
            ]
            states = {state: sum(p["state"] == state for p in processors) for state in STATES}
            told.append(
                {"worker": worker["id"], "pid": worker["pid"], "silent_for": round(worker["silent_for"], 1),
                 "completed": worker["completed"], "failed": worker["failed"], **states,
                 "check": report.get("health"), "processors": processors}
            )  # fmt: skip
        return told

    def _idle(self, lanes: list[str], busy: dict[str, Any]) -> list[dict[str, Any]]:
        names = [(lane, f"{lane}-processor-{n}") for lane in lanes for n in range(1, self._settings.processors + 1)]
        return [
            {"name": name, "phase": phase, "state": BUSY if name in busy else IDLE, "error": None,
             "job": busy.get(name, {}).get("id"), "seconds": busy.get(name, {}).get("seconds")}
            for phase, name in names
        ]  # fmt: skip


async def _completed(connection: Any) -> int:
    done = sa.select(sa.func.count()).select_from(tables.jobs).where(tables.jobs.c.status == PHASES[-1].gives)
    return int((await connection.execute(done)).scalar_one())


def health(queues: list[dict[str, Any]], workers: list[dict[str, Any]], processors: list[Any]) -> dict[str, Any]:
    """Whether all is well, and in words what is not."""
    problems = [] if workers else ["no worker is alive"]
    for queue in queues:
        phase = queue["phase"]
        mine = [processor for processor in processors if processor["phase"] == phase]
        if queue["stuck"]:
            problems.append(f"{phase}: {queue['stuck']} in progress without a sign of life")
        if mine and all(processor["state"] == ERROR for processor in mine):
            problems.append(f"{phase}: all processors are in error")
        if workers and not mine:
            problems.append(f"{phase}: no worker serves it")
    stuck = {worker["worker"]: (worker["check"] or {}).get("stuck") for worker in workers}
    problems += [f"{worker}: stuck: {', '.join(names)}" for worker, names in stuck.items() if names]
    return {"ok": not problems, "problems": problems}
