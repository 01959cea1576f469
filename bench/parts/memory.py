"""What a worker's memory grows by, for every thousand jobs it holds."""

from __future__ import annotations

import time

from ..peers import Peer
from ..session import IDLE, session
from .part import Column, Context, Figures, Part

_LONG = 600.0
_PATIENCE = 60.0


def measure(context: Context, peer: Peer) -> Figures:
    assert peer.in_flight is not None
    held = 1000 if context.quick else 4000
    with session(peer, context.server) as run, run.workers(sleep=_LONG, **peer.in_flight(held)) as workers:
        workers.go()
        time.sleep(IDLE)
        before = workers.memory()
        run.enqueue(held)
        deadline = time.monotonic() + _PATIENCE
        while workers.count < held and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        grown, count = workers.memory() - before, workers.count
    return {"idle": before / 2**20, "per_1000": grown / 2**20 / max(count, 1) * 1000, "held": count}


PART = Part(
    "memory",
    "Memory per 1,000 claims held",
    "Resident memory of one idle worker, then with all those jobs running at once (handlers that sleep).",
    measure,
    ("rowmill", "graphile-max", "pg-boss", "pgqueuer", "chancy", "procrastinate"),
    (
        Column("idle", "idle worker, MB", 1),
        Column("per_1000", "per 1,000 held, MB", 2),
        Column("held", "held"),
    ),
    unit="MB",
    quick=False,
    once=True,
)
