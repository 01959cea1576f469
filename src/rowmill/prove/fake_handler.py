"""A user's lane with nothing of his to run: the same table, states, roles and gates, and a handler that does nothing.

His functions (handlers, ``on_settled``, ``classify``, ``backoff``) say nothing about who holds a row, and may do
anything: none of them is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ..declare.lane import Lane
from ..declare.task import Queue, Task, queue


async def nothing(job: Any) -> None:
    """A handler that does nothing."""


def in_chunks(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a chunk that does for each job what this one does for one."""

    async def each(jobs: list[Any]) -> list[Any]:
        return await asyncio.gather(*[handler(job) for job in jobs], return_exceptions=True)

    return each


def faked(lane: Lane, handler: Callable[..., Any], **policy: Any) -> Lane:
    """The lane, with this handler and this policy instead of its own."""
    lease: timedelta = policy.get("lease", lane.lease)
    if lane.chunk is not None:
        handler = in_chunks(handler)
        if lane.chunk_wait is not None:
            policy["chunk_wait"] = min(lane.chunk_wait, lease / 10)
    plain: dict[str, Any] = {
        "startup_lease": None, "heartbeat": lease / 5, "timeout": None, "classify": None, "settled_hooks": [],
        "isolation": "auto", **policy,
    }  # fmt: skip
    if isinstance(lane, Queue):
        made = queue(lane.name, {"chunk": lane.chunk})
        for name, task in lane.tasks.items():
            options: dict[str, Any] = {"max_attempts": task.max_attempts, "chunk": lane.chunk}
            made.tasks[name] = fake_task(name, lane.name, handler, **options)
        return replace(made, **{"gates": lane.gates, "pace": lane.pace, **plain})
    return replace(lane, handler=handler, environments=None, **plain)


def fake_task(name: str, queue: str, handler: Callable[..., Any], **options: Any) -> Task[..., Any]:
    """A task that is never enqueued."""
    client: Any = None
    return Task(handler=handler, name=name, client=client, known_resources={}, queue=queue, **options)
