"""Failures in families: what is shown of them, and what may be done to the rows of exactly one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

from ..errors import RowmillError
from ..ops.environments import EnvironmentFailure
from ..ops.row_actions import Operator, Selection
from ..store.inspect.failure_families import errors, members
from ..store.inspect.lane_view import OPEN, LaneView
from ..store.lane.row_keys import Key
from .actions import ACTIONS, ActionTarget, Given
from .problem import Problem
from .views import CachedMill, Sees

BUCKETS = 48
#: Hours that the page offers.
HOURS = (1, 24, 168, 720)
_PATIENCE = 20.0
#: In which states the rows of a family may be for each action.
FROM = {"retry": ("waiting", "excluded", "dead"), "bury": OPEN}


async def families(sight: CachedMill, sees: Sees, hours: float = 24.0) -> dict[str, Any]:
    """Failures of the last hours by fingerprint, in every environment, those that were seen last first."""

    async def ask(name: str) -> dict[str, Any]:
        views, failed = [], []
        for lane in sight.lookout.lanes:
            if lane.serves(name) and sees(lane.name):
                try:
                    views.append(await sight.view(name, lane.name))
                except RowmillError as error:
                    failed.append(EnvironmentFailure(name, lane.name, error).value())
        found: dict[str, Any] = {"environment": name, "families": [], "recorded": True, "unknown": [], "errors": failed}
        if views:
            try:
                for part, sample in await _apart(sight, views):
                    told = await errors(part, hours=hours, buckets=BUCKETS, sample=sample)
                    found["recorded"] = told.recorded
                    found["unknown"] += told.unknown if sample else [view.lane.name for view in part]
                    found["families"] += [family.value() for family in told.families]
            except RowmillError as error:
                return {**found, "errors": [*failed, EnvironmentFailure(name, None, error).value()]}
            found["families"].sort(key=lambda family: family["last_seen"] or "", reverse=True)
        return found

    async def everywhere() -> dict[str, Any]:
        return {"hours": hours, "environments": await asyncio.gather(*(ask(name) for name in sight.databases))}

    lanes = frozenset(lane.name for lane in sight.lookout.lanes if sees(lane.name))
    return await sight.once(("families", lanes, hours), everywhere, 2.0)


async def _apart(sight: CachedMill, views: list[LaneView]) -> list[tuple[list[LaneView], bool]]:
    """Lanes whose dead rows are quickly found, and may be looked at for failures that nobody wrote down; the others."""
    quick, dear = list[LaneView](), list[LaneView]()
    for view in views:
        cheap = (await sight.glance(view)).counts["dead"].how in ("exact", "none")
        (quick if cheap else dear).append(view)
    return [(part, sample) for part, sample in ((quick, True), (dear, False)) if part]


async def _act(here: ActionTarget, given: Given, verb: str) -> dict[str, Any]:
    """Write the rows whose latest failure is of the family; which they are is found first, whether each still is in
    the right state is decided by the statement that writes it.
    """
    if not given.get("error"):
        raise Problem(422, "which family of failures?")
    view, began, count, more = await here.view(), time.monotonic(), 0, False
    operator, reason = Operator(view), str(given.get("reason") or "buried by an operator")
    async for keys in members(view, str(given["error"]), FROM[verb]):
        count += await _step(here, operator, keys, verb, reason)
        if time.monotonic() - began > _PATIENCE:
            more = True
            break
    if count and verb == "retry":
        await here.wake()
    where = {"environment": here.environment, "lane": view.lane.name, "error": given["error"]}
    return {**where, "action": f"{verb}_family", "count": count, "more": more}


async def _step(here: ActionTarget, operator: Operator, keys: list[Key], verb: str, reason: str) -> int:
    chosen = replace(Selection(FROM[verb]), keys=tuple(keys))
    work = operator.retry(chosen) if verb == "retry" else operator.cancel(chosen, reason)
    count = 0
    async with contextlib.aclosing(work) as steps:  # type: ignore[type-var]
        async for step in steps:
            count += len(step)
            here.progress.rows += len(step)
    return count


async def _retry(here: ActionTarget, given: Given) -> dict[str, Any]:
    return await _act(here, given, "retry")


async def _bury(here: ActionTarget, given: Given) -> dict[str, Any]:
    return await _act(here, given, "bury")


ACTIONS |= {"retry_family": ("operate", _retry), "bury_family": ("operate", _bury)}
