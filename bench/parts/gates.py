"""What a gate costs: the same rows with and without a limit by key, side by side."""

from __future__ import annotations

from ..peers import Peer
from .drain import alone
from .part import Column, Context, Figures, Part

_LIMIT, _PROCESSES, _BATCHES = 2, 2, (10, 100)


def measure(context: Context, peer: Peer) -> Figures:
    """For each batch size once without the gate and once with it, each on a database of its own."""
    found: Figures = {"left": 0, "twice": 0}
    for batch in _BATCHES:
        for name, gate in (("free", None), ("gated", _LIMIT)):
            drained = alone(context, peer, _PROCESSES, batch=batch, gate=gate)
            found[f"{name}_{batch}"] = drained.rate
            found["left"] += drained.left
            found["twice"] += drained.twice
        found[f"ratio_{batch}"] = found[f"gated_{batch}"] / found[f"free_{batch}"]
    return found


PART = Part(
    "gates",
    "Gates on and off",
    f"The same table, its rows spread over 200 and over 20,000 domains and indexed by domain too, worked off by "
    f'{_PROCESSES} processes without a gate and with `Concurrency({_LIMIT}, by="domain")`.',
    measure,
    ("rowmill-200-keys", "rowmill-20000-keys"),
    (
        *(Column(f"free_{b}", f"without, batches of {b}, jobs/s", plot=f"without, {b}") for b in _BATCHES),
        *(Column(f"gated_{b}", f"gated, batches of {b}, jobs/s", plot=f"gated, {b}") for b in _BATCHES),
        *(Column(f"ratio_{b}", f"ratio, batches of {b}", 2) for b in _BATCHES),
        Column("left", "left"),
        Column("twice", "twice"),
    ),
)
