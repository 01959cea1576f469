"""A part: one thing that is measured, how it is told, and who takes part."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field

from ..peers import Peer
from ..server import Server

Figures = dict[str, float]
#: The rounds of each peer, by part and by peer.
Results = dict[str, dict[str, list[Figures]]]

PEERS_ON_POSTGRES = (
    "rowmill",
    "rowmill-tasks",
    "graphile",
    "graphile-max",
    "pg-boss",
    "pgqueuer",
    "chancy",
    "procrastinate",
)
#: Where Graphile Worker's two sets of options make no difference.
ONCE_EACH = tuple(name for name in PEERS_ON_POSTGRES if name != "graphile-max")


@dataclass
class Context:
    """What a measurement may look at."""

    server: Server
    arguments: Namespace
    results: Results = field(default_factory=dict)
    #: Part, peer and words, where a measurement could not be taken.
    failures: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def quick(self) -> bool:
        return bool(self.arguments.quick)

    def jobs(self, peer: Peer) -> int:
        """How many jobs make a few seconds of work; in a quick run one or two."""
        return peer.jobs[self.quick]

    def median(self, part: str, peer: str, key: str) -> float | None:
        """What was measured so far in this run."""
        found = [figures[key] for figures in self.results.get(part, {}).get(peer, []) if key in figures]
        return statistics.median(found) if found else None


@dataclass(frozen=True)
class Column:
    """One figure in a part's table, and in its plot where ``plot`` names one."""

    key: str
    head: str
    digits: int = 0
    plot: str | None = None


@dataclass(frozen=True)
class Part:
    """``measure`` takes one round of one peer. Without ``columns`` the figures' own names are the table's head."""

    name: str
    title: str
    method: str
    measure: Callable[[Context, Peer], Figures]
    peers: tuple[str, ...]
    columns: tuple[Column, ...] = ()
    #: The unit of the plots.
    unit: str = "jobs/s"
    #: Figures that are drawn as one line over their names.
    line: bool = False
    quick: bool = True
    #: What does not vary is measured in the first round only.
    once: bool = False
    #: Only where it is asked for.
    on_request: bool = False
