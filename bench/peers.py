"""Who is measured, and with the settings that served each best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .tables import Jobs, table

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """One contender. ``runner`` is a module of bench.runners, or a Node script there."""

    name: str
    runner: str
    options: Options
    #: SQL for the number of jobs that are not durably finished.
    left: str
    #: Jobs to drain, for a few seconds of work; and in a quick run.
    jobs: tuple[int, int]
    #: Jobs to enqueue one by one, and how many go into one call for many (1: there is no such call).
    single: int = 2000
    chunk: int = 5000
    package: str = ""
    sqlite: bool = False
    #: What becomes of a finished job.
    finished: str = "kept"
    #: Other settings where latency matters, and for that many jobs in flight at once.
    at_pickup: Options = field(default_factory=dict)
    in_flight: Callable[[int], Options] | None = None
    #: SQL for whether anything is unfinished, where that is cheaper than to count.
    open: str | None = None
    #: SQL for the number of rows that show more than one claim; None where rows do not show it.
    wrong: str | None = None
    #: Rows come to idle workers in one transaction, instead of workers to rows.
    woken: bool = False

    @property
    def own(self) -> bool:
        """It runs in the project's own environment."""
        return not self.package

    @property
    def node(self) -> bool:
        return self.runner.endswith(".mjs")


def _rowmill(
    name: str, *, jobs: tuple[int, int] = (200_000, 40_000), peer: Options | None = None, **options: Any
) -> Peer:
    chosen = {"batch": 1000, "concurrency": 100, **options}
    return Peer(
        name,
        "rowmill",
        chosen,
        left=table(chosen).left,
        open=table(chosen).open,
        wrong=table(chosen).wrong,
        jobs=jobs,
        in_flight=lambda n: {"concurrency": n},
        **(peer or {}),
    )


def _tasks(name: str, *, jobs: tuple[int, int] = (200_000, 40_000), sqlite: bool = False) -> Peer:
    """Tasks on rowmill's own table, enqueued by their own calls."""
    return Peer(
        name,
        "rowmill_tasks",
        {"batch": 1000, "concurrency": 100, "table": "jobs"},
        left=Jobs.left,
        open=Jobs.open,
        wrong=Jobs.wrong,
        jobs=jobs,
        sqlite=sqlite,
        in_flight=lambda n: {"concurrency": n},
    )


# The high-throughput options of Graphile Worker's own documentation, and larger than it advises.
_GRAPHILE = {
    "concurrentJobs": 24,
    "localQueue": {"size": 500, "refetchDelay": {"durationMs": 10}},
    "completeJobBatchDelay": 0,
    "failJobBatchDelay": 0,
}
_GRAPHILE_MAX = _GRAPHILE | {"concurrentJobs": 100, "localQueue": {"size": 5000}}


def _graphile(name: str, worker: Options) -> Peer:
    return Peer(
        name,
        "graphile.mjs",
        {"worker": worker, "pool": 10},
        left="select count(*) from graphile_worker._private_jobs",
        jobs=(200_000, 40_000),
        package="graphile-worker",
        finished="deleted",
        at_pickup={"worker": {}},
        in_flight=lambda n: {"worker": {**_GRAPHILE_MAX, "concurrentJobs": n}},
    )


_ALL = [
    _rowmill("rowmill"),
    _tasks("rowmill-tasks"),
    _rowmill("rowmill-woken", peer={"woken": True}),
    *(_rowmill(f"rowmill-{keys}-keys", jobs=(100_000, 30_000), keys=keys) for keys in (200, 20_000)),
    _graphile("graphile", _GRAPHILE),
    _graphile("graphile-max", _GRAPHILE_MAX),
    Peer(
        "pg-boss",
        "pgboss.mjs",
        {"pool": 10, "work": {"batchSize": 1000, "burstWhenBatchFull": True, "localConcurrency": 2}},
        left="select count(*) from pgboss.job where state < 'completed'",
        jobs=(150_000, 30_000),
        package="pg-boss",
        in_flight=lambda n: {"work": {"batchSize": n // 2, "burstWhenBatchFull": True, "localConcurrency": 2}},
    ),
    Peer(
        "pgqueuer",
        "pgqueuer",
        {"batch_size": 500, "pool": 5},
        left="select count(*) from pgqueuer",
        jobs=(60_000, 10_000),
        chunk=1000,
        package="pgqueuer",
        finished="deleted, and a line in its log table",
        in_flight=lambda n: {"max_concurrent_tasks": 2 * n, "batch_size": n},
    ),
    Peer(
        "chancy",
        "chancy",
        {"concurrency": 5000},
        left="select count(*) from chancy_jobs where state <> 'succeeded'",
        jobs=(20_000, 3_000),
        chunk=1000,
        package="chancy",
        in_flight=lambda n: {"concurrency": n},
    ),
    Peer(
        "procrastinate",
        "procrastinate",
        {"concurrency": 10, "pool": 20},
        left="select count(*) from procrastinate_jobs where status <> 'succeeded'",
        jobs=(3_000, 600),
        single=1000,
        chunk=1000,
        package="procrastinate",
        in_flight=lambda n: {"concurrency": n},
    ),
    Peer(
        "huey-sqlite",
        "huey",
        {"workers": 1, "delay": 0.01},
        left="select count(*) from task",
        jobs=(10_000, 3_000),
        chunk=1,
        package="huey",
        sqlite=True,
        finished="deleted when taken",
    ),
    _tasks("rowmill-tasks-sqlite", jobs=(60_000, 15_000), sqlite=True),
    _rowmill("rowmill-sqlite", jobs=(60_000, 15_000), peer={"sqlite": True}),
    Peer(
        "bare-sqlite",
        "bare_sqlite",
        {},
        left=table({}).left,
        jobs=(60_000, 15_000),
        sqlite=True,
        wrong=table({}).wrong,
    ),
]
PEERS = {peer.name: peer for peer in _ALL}
