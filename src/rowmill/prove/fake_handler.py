"""A user's lane with nothing of his to run: the same table, states, roles and gates, and a handler that does nothing.

His functions (handlers, ``on_settled``, ``classify``, ``backoff``) say nothing about who holds a row, and may do
anything: none of them is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ..declare.lane import Lane
from ..declare.task import Queue, Task, queue


async def nothing(job: Any) -> None:
    """A handler that does nothing."""


def faked(lane: Lane, handler: Callable[..., Any], **policy: Any) -> Lane:
    """The lane, with this handler and this policy instead of its own."""
    lease: timedelta = policy.get("lease", lane.lease)
    plain: dict[str, Any] = {
        "startup_lease": None, "heartbeat": lease / 5, "timeout": None, "classify": None, "settled_hooks": [],
        "isolation": "auto", **policy,
    }  # fmt: skip
    if isinstance(lane, Queue):
        made = queue(lane.name, {})
        for name, task in lane.tasks.items():
            made.tasks[name] = fake_task(name, lane.name, handler, max_attempts=task.max_attempts)
        return replace(made, **{"gates": lane.gates, "pace": lane.pace, **plain})
    return replace(lane, handler=handler, environments=None, **plain)


def fake_task(name: str, queue: str, handler: Callable[..., Any], **options: Any) -> Task[..., Any]:
    """A task that nobody enqueues."""
    desk: Any = None
    return Task(handler=handler, name=name, desk=desk, known_resources={}, queue=queue, **options)
