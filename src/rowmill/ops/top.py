"""``rowmill top``: lanes, workers and failures of all environments at one moment, as a document."""

from __future__ import annotations

from typing import Any

from ..errors import RowmillError
from ..store.inspect.gauges import MOST, Gauges, gauges
from ..store.inspect.lane_view import LaneView
from ..store.own.failures import Failures
from ..store.own.workers import WorkersTable
from . import documents
from .directory import EnvironmentFailure, LaneDirectory
from .questions import Document, is_paused

STATES = ("ready", "waiting", "excluded", "running", "stuck", "done", "dead")


async def top(directory: LaneDirectory) -> Document:
    """All of it, now."""

    async def ask(view: LaneView) -> Gauges:
        return await gauges(view, STATES)

    answers = await directory.ask(ask)
    pauses = await directory.pauses()
    workers: list[Document] = []
    families: list[Document] = []
    failures = list(answers.failures)
    for name, database in directory.databases.items():
        names = [view.lane.name for view, _ in answers.lanes if view.environment == name]
        if not names:
            continue
        try:
            workers_table, log = WorkersTable(database), Failures(database)
            if await workers_table.exists():
                for worker in await workers_table.all():
                    del worker["process"], worker["lock_id"]
                    workers += [{"environment": name, **worker}] if worker["state"] != "stopped" else []
            if await log.exists():
                families += [family.value() for family in await log.families(name, names)]
        except RowmillError as error:
            failures.append(EnvironmentFailure(name, None, error))
    return {
        "lanes": [_lane(view, gauge, is_paused(view, pauses)) for view, gauge in answers.lanes],
        "paused": [documents.pause_value(pause, name) for name, pause in pauses],
        "workers": workers,
        "errors": families,
        "failures": [failure.value() for failure in failures],
    }


def _lane(view: LaneView, gauge: Gauges, paused: bool) -> Document:
    return {
        "environment": view.environment,
        "lane": view.lane.name,
        "paused": paused,
        "counts": {state: gauge.rows.get(state) for state in STATES},
        "at_least": [state for state, number in gauge.rows.items() if number >= MOST],
        "unknown": [state for state in STATES if state not in gauge.rows and view.condition(state)],
        "oldest_ready": gauge.oldest_ready,
        "held_keys": gauge.held_keys,
    }


def rates(now: Document, before: Document, seconds: float) -> dict[str, dict[str, float]]:
    """Runs that ended per second between two looks, by environment, from each worker's own counts.

    A worker that was not there before, or was restarted, does not count yet.
    """
    ended: dict[str, dict[str, float]] = {}
    last = {_process(worker): worker for worker in before["workers"]}
    for worker in now["workers"] if seconds > 0 else ():
        if (earlier := last.get(_process(worker))) is not None:
            rate = ended.setdefault(worker["environment"], {"completed": 0.0, "failed": 0.0})
            for name in rate:
                rate[name] += (worker[name] - earlier[name]) / seconds
    return ended


def _process(worker: Document) -> tuple[Any, ...]:
    return worker["environment"], worker["id"], worker["incarnation"]


def busiest(workers: list[Document], most: int) -> list[Document]:
    """The workers to show if there are more than fit: busy ones first, then silent ones."""
    return sorted(workers, key=lambda worker: (not worker["current"], worker["alive"], worker["id"]))[:most]
