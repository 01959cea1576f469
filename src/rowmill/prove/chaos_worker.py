"""A worker process for the chaos run: the user's declaration, on the copy, with a handler that does no real work.

``python -m rowmill.prove.chaos_worker APP LANE URL WORKER``
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ..config import find_app
from ..declare.gates import Concurrency
from ..declare.lane import Lane
from ..declare.outcome import Retry, Snooze
from ..declare.retry import fixed
from ..mill import Mill
from .fake_handler import faked

LEASE = timedelta(seconds=2)


async def handle(job: Any) -> None:
    """A very short run that ends in one of the ways that runs can end."""
    await asyncio.sleep(random.uniform(0.02, 0.3))
    roll = random.random()
    if roll < 0.08:
        raise RuntimeError("failed")
    if roll < 0.12:
        raise Retry("again", after=timedelta(milliseconds=100))
    if roll < 0.16:
        raise Snooze(timedelta(milliseconds=100))


def hurried(lane: Lane) -> Lane:
    """The lane with a short lease and only the gates that count runs. Rates and breakers would only make it wait."""
    policy: dict[str, Any] = {
        "lease": LEASE, "backoff": fixed(timedelta(milliseconds=200)), "poll": timedelta(milliseconds=200),
        "sweep_every": timedelta(milliseconds=500), "concurrency": 4, "pace": None,
    }  # fmt: skip
    if lane.untouched_for is not None:
        policy["untouched_for"] = timedelta(milliseconds=100)
    made = faked(lane, handle, **policy)
    return replace(made, gates=[gate for gate in lane.gates if isinstance(gate, Concurrency)])


def main(reference: str, lane: str, url: str, worker: str) -> None:
    """Work on the copy until killed."""
    theirs = find_app(reference)
    mill = Mill(url, schema=theirs.schema)
    mill.lanes[lane] = hurried(theirs.lanes[lane])
    mill.run(worker_id=worker)


if __name__ == "__main__":
    main(*sys.argv[1:])
