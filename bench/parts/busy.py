"""Jobs that take a little while, many of them in flight."""

from __future__ import annotations

from ..peers import Peer
from ..session import session
from .part import Column, Context, Figures, Part

IN_FLIGHT = 200
_SECONDS = 3


def measure(context: Context, peer: Peer) -> Figures:
    assert peer.in_flight is not None
    figures: Figures = {"left": 0, "twice": 0}
    with session(peer, context.server) as run:
        for key, sleep in (("ms1", 0.001), ("ms20", 0.02)):
            jobs = min(context.jobs(peer), int(_SECONDS * IN_FLIGHT / sleep))
            drained = run.drain(jobs, sleep=sleep, **peer.in_flight(IN_FLIGHT))
            figures[key] = drained.rate
            figures["left"] += drained.left
            figures["twice"] += drained.twice
    return figures


PART = Part(
    "busy",
    f"Jobs of 1 ms and of 20 ms, {IN_FLIGHT} in flight",
    f"A drain with one process, where every handler sleeps. {IN_FLIGHT} jobs of 20 ms at once are 10,000 jobs/s at "
    "most; jobs of 1 ms are held back by the engine alone.",
    measure,
    ("rowmill", "graphile-max", "pg-boss", "pgqueuer", "chancy", "procrastinate"),
    (
        Column("ms1", "1 ms, jobs/s", plot="1 ms"),
        Column("ms20", "20 ms, jobs/s", plot="20 ms"),
        Column("left", "left"),
        Column("twice", "twice"),
    ),
    quick=False,
)
