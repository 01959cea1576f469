"""How soon an idle worker starts a job that has just come."""

from __future__ import annotations

import math

from ..peers import Peer
from ..session import session
from .part import ONCE_EACH, Column, Context, Figures, Part

_EVERY = 0.02


def measure(context: Context, peer: Peer) -> Figures:
    with session(peer, context.server) as run:
        run.calm()
        found, _ = run.latencies(100 if context.quick else 500, _EVERY, **peer.at_pickup)
    return told(found)


def told(sorted_ms: list[float]) -> Figures:
    count = len(sorted_ms)
    return {"p50": sorted_ms[count // 2], "p99": sorted_ms[math.ceil(count * 0.99) - 1], "max": sorted_ms[-1]}


PART = Part(
    "pickup",
    "Pickup on an idle worker",
    "One worker, one job every 20 ms; from before the enqueue call to the start of the handler, so the call and its "
    "commit are in it. For rowmill that is an INSERT with `pg_notify` in one statement.",
    measure,
    (*ONCE_EACH, "huey-sqlite", "rowmill-sqlite", "rowmill-tasks-sqlite"),
    (
        Column("p50", "median, ms", 2, plot="median"),
        Column("p99", "99th percentile, ms", 2, plot="99th percentile"),
        Column("max", "longest, ms", 1),
    ),
    unit="ms",
)
