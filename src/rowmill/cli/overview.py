"""What ``rowmill top`` shows, as plain values: lanes, workers and failures of all environments at one moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RowmillError
from ..store.gates.pauses import Pause
from ..store.inspect import json_values
from ..store.inspect.gauges import MOST, Gauges, gauges
from ..store.inspect.lane_view import LaneView
from ..store.own.failures import Failures, Family
from ..store.own.workers import WorkersTable
from .environments import CommandDirectory, PrintedFailure

STATES = ("ready", "waiting", "excluded", "running", "stuck", "done", "dead")


@dataclass
class Overview:
    """One look."""

    at: float
    lanes: list[tuple[LaneView, Gauges]]
    pauses: list[tuple[str, Pause]]
    workers: list[tuple[str, dict[str, Any]]]
    families: list[Family]
    failures: list[PrintedFailure]
    #: Runs that ended per second since the look before, by environment; not known at the first.
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)

    def paused(self, environment: str, lane: str) -> bool:
        """Nothing of it is claimed: it is paused itself, or with its environment."""
        whole = {(name, pause.target.lane) for name, pause in self.pauses if not pause.target.dim}
        return bool({(environment, lane), (environment, "")} & whole)

    def value(self) -> dict[str, Any]:
        """For scripts."""
        lanes = [
            {
                "environment": view.environment,
                "lane": view.lane.name,
                "paused": self.paused(view.environment, view.lane.name),
                "counts": {state: gauge.rows.get(state) for state in STATES},
                "at_least": [state for state, number in gauge.rows.items() if number >= MOST],
                "oldest_ready": gauge.oldest_ready,
                "held_keys": gauge.held_keys,
            }
            for view, gauge in self.lanes
        ]
        return {
            "lanes": lanes,
            "paused": [json_values.pause_value(pause, name) for name, pause in self.pauses],
            "workers": [{"environment": name, **worker} for name, worker in self.workers],
            "errors": [family.value() for family in self.families],
            "failures": [failure.value() for failure in self.failures],
        }


async def look(lookout: CommandDirectory, before: Overview | None = None) -> Overview:
    """All of it, now; with ``before``, also how fast things go."""

    async def ask(view: LaneView) -> Gauges:
        return await gauges(view, STATES)

    answers = await lookout.ask(ask)
    found = Overview(time.monotonic(), answers.found, await lookout.pauses(), [], [], answers.failures)
    reached = {view.environment for view, _ in answers.found}
    for name, database in lookout.databases:
        if name not in reached:
            continue
        names = [view.lane.name for view, _ in answers.found if view.environment == name]
        try:
            fleet, log = WorkersTable(database), Failures(database)
            if await fleet.exists():
                found.workers += [(name, worker) for worker in await fleet.all() if worker["state"] != "stopped"]
            if await log.exists():
                found.families += await log.families(name, names)
        except RowmillError as error:
            found.failures.append(PrintedFailure(name, None, error))
    found.rates = _rates(found, before)
    return found


def _rates(now: Overview, before: Overview | None) -> dict[str, tuple[float, float]]:
    """From what each worker says it has done; one that was not there before, or began anew, does not count yet."""
    if before is None or now.at <= before.at:
        return {}
    rates: dict[str, tuple[float, float]] = {}
    told = {(name, worker["id"], worker["incarnation"]): worker for name, worker in before.workers}
    for name, worker in now.workers:
        last = told.get((name, worker["id"], worker["incarnation"]))
        if last is not None:
            well, badly = rates.get(name, (0.0, 0.0))
            took = now.at - before.at
            rates[name] = (
                well + (worker["completed"] - last["completed"]) / took,
                badly + (worker["failed"] - last["failed"]) / took,
            )
    return rates


def busiest(workers: Sequence[tuple[str, dict[str, Any]]], most: int) -> list[tuple[str, dict[str, Any]]]:
    """Workers worth a line, where there are more than fit: those at work first, then the silent."""
    return sorted(workers, key=lambda w: (not w[1]["current"], w[1]["alive"], w[1]["id"]))[:most]
