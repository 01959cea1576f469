"""How fast a backlog is worked off, with one process and with two."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..peers import Peer
from ..session import Drained, session
from .part import PEERS_ON_POSTGRES, Column, Context, Figures, Part


def measure(context: Context, peer: Peer) -> Figures:
    """Each on a database of its own: what finished rows cost is the matter of growth."""
    one, two = (alone(context, peer, processes) for processes in (1, 2))
    return told("one", one) | told("two", two) | {"left": one.left + two.left, "twice": one.twice + two.twice}


def alone(context: Context, peer: Peer, processes: int, **options: Any) -> Drained:
    """One drain on a database that is empty but for its jobs."""
    with session(peer, context.server) as run:
        return run.drain(context.jobs(peer), processes, **options)


def told(name: str, drained: Drained) -> Figures:
    """A drain's figures under a name."""
    return {name: drained.rate, f"{name}_worker_us": drained.worker_us, f"{name}_server_us": drained.server_us}


COLUMNS = (
    Column("one", "1 process, jobs/s", plot="1 process"),
    Column("two", "2 processes, jobs/s", plot="2 processes"),
    Column("one_worker_us", "worker CPU, µs/job, 1", 1),
    Column("one_server_us", "server CPU, µs/job, 1", 1),
    Column("two_worker_us", "worker CPU, µs/job, 2", 1),
    Column("two_server_us", "server CPU, µs/job, 2", 1),
    Column("left", "left"),
    Column("twice", "twice"),
)
PART = Part(
    "drain",
    "Drain",
    "No-op jobs are there, each time in a new database, the tables are vacuumed and analysed, a checkpoint is done; "
    "workers, started and connected, are released together. The clock runs from the first handler call until the "
    "database shows no unfinished job. `rowmill` works on a user's own table (`enrichment_jobs`: 14 columns, two of "
    "them uuids, four indexes) and keeps its rows. CPU per job is steadier than jobs/s on a machine with other work.",
    measure,
    PEERS_ON_POSTGRES,
    COLUMNS,
)
WOKEN = Part(
    "woken",
    "Drain of rows that come all at once",
    "The workers are idle on an empty table; then all rows come in one transaction with a NOTIFY. Nothing is analysed "
    "in between, so the server plans with the statistics of the empty table until it looks again by itself.",
    measure,
    ("rowmill-woken",),
    tuple(dataclasses.replace(column, plot=None) for column in COLUMNS if "us" not in column.key),
    quick=False,
)
