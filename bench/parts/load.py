"""Latency while jobs come steadily, at half of what the worker could do at its best."""

from __future__ import annotations

from ..peers import Peer
from ..session import session
from .part import PEERS_ON_POSTGRES, Column, Context, Figures, Part
from .pickup import told

_TICK = 0.01


def measure(context: Context, peer: Peer) -> Figures:
    wanted, seconds = peak_of(context, peer) / 2, 4 if context.quick else 15
    per = max(1, round(wanted * _TICK))
    with session(peer, context.server) as run:
        run.calm()
        found, rate = run.latencies(int(wanted * seconds), per / wanted, per)
    return told(found) | {"wanted": wanted, "rate": rate}


def peak_of(context: Context, peer: Peer) -> float:
    """Jobs per second of one process: as this run has measured it, else by a short drain."""
    known = context.median("drain", peer.name, "one")
    if known is not None:
        return known
    with session(peer, context.server) as run:
        return run.drain(peer.jobs[1]).rate


PART = Part(
    "load",
    "Latency under a steady load of half the peak",
    "One worker; jobs come every 10 ms, as many at a time as make half of the peer's own drain rate with one process, "
    "by its call for many. Where the second column falls short of the first, the enqueuing process was the limit.",
    measure,
    PEERS_ON_POSTGRES,
    (
        Column("wanted", "half the peak, jobs/s"),
        Column("rate", "came, jobs/s"),
        Column("p50", "median, ms", 1, plot="median"),
        Column("p99", "99th percentile, ms", 1, plot="99th percentile"),
        Column("max", "longest, ms", 1),
    ),
    unit="ms",
    quick=False,
)
