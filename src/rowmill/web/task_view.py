"""Tasks, crons and flows as plain data."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ..errors import RowmillError
from ..ops.environments import EnvironmentFailure
from ..store.jobs.job_rows import Jobs, moment
from ..store.own import schema
from .views import CachedMill, Sees

#: Jobs that wait for their children, of which as many are shown.
_JOINING = 50


async def tasks(sight: CachedMill, sees: Sees) -> dict[str, Any]:
    """Every task with its queue and its clock, and the jobs that wait for others, by environment."""
    declared = [task for task in sight.mill.tasks.values() if sees(task.queue)]
    environments = []
    for name in sight.databases:
        try:
            environments.append(await _environment(sight, name, sees))
        except RowmillError as error:
            empty: dict[str, Any] = {"environment": name, "ticks": {}, "joining": []}
            environments.append({**empty, "errors": [EnvironmentFailure(name, None, error).value()]})
    now = datetime.now(UTC)
    listed = []
    for task in declared:
        cron = task.cron
        coming = cron.next(now) if cron is not None else None
        listed.append({
            "task": task.name, "queue": task.queue, "max_attempts": task.max_attempts,
            "cron": cron.expression if cron is not None else None, "tz": cron.tz if cron is not None else None,
            "next_tick": coming.isoformat() if coming is not None else None,
        })  # fmt: skip
    return {"tasks": listed, "environments": environments}


async def _environment(sight: CachedMill, name: str, sees: Sees) -> dict[str, Any]:
    database = sight.databases[name]
    own = await schema.taken(database)
    found: dict[str, Any] = {"environment": name, "ticks": {}, "joining": [], "errors": []}
    if own.has(schema.CRONS):
        text = f"select name, last_tick from {database.own('rowmill_crons')}"
        rows = await database.read(lambda run: run(text, ()))
        found["ticks"] = {row[0]: moment(row[1]).isoformat() for row in rows}
    if own.has(schema.JOBS):
        jobs = Jobs(database, sight.mill.clock)
        text = f"select id, task, queue from {jobs.table} where state = 'joining' order by id desc limit {_JOINING}"
        rows = [row for row in await database.read(lambda run: run(text, ())) if sees(row[2])]
        children = await jobs.children([row[0] for row in rows]) if rows else {}
        found["joining"] = [
            {"id": row[0], "task": row[1], "queue": row[2], "children": children.get(row[0], {})} for row in rows
        ]
    return found
