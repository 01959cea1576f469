"""What rowmill is held against: ratios of medians, taken in one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .parts.part import PEERS_ON_POSTGRES, Results

_THEIRS = tuple(name for name in PEERS_ON_POSTGRES if not name.startswith("rowmill"))
_OTHERS = (*_THEIRS, "huey-sqlite")


@dataclass(frozen=True)
class Target:
    """``least``: the ratio should be at least this (0: it is only told); without it, below 1."""

    what: str
    ratio: float
    least: float | None

    @property
    def met(self) -> bool:
        return self.ratio >= self.least if self.least is not None else self.ratio < 1

    def row(self) -> str:
        if self.least == 0:
            return f"| {self.what} | {self.ratio:.2f} | – | – |"
        wanted = f"at least {self.least:g}" if self.least is not None else "below 1"
        return f"| {self.what} | {self.ratio:.2f} | {wanted} | {'yes' if self.met else '**no**'} |"


class _Medians:
    def __init__(self, results: Results) -> None:
        self._results = results

    def of(self, part: str, peer: str, *keys: str) -> float | None:
        """The best median of these figures."""
        rounds = self._results.get(part, {}).get(peer, [])
        found = [statistics.median(f[key] for f in rounds) for key in keys if rounds and all(key in f for f in rounds)]
        return max(found, default=None)

    def best(self, part: str, peers: Iterable[str], key: str, *, lowest: bool = False) -> tuple[float, str] | None:
        found = [(value, peer) for peer in peers if (value := self.of(part, peer, key)) is not None]
        return (min(found) if lowest else max(found)) if found else None


def targets(results: Results) -> list[Target]:
    """As far as both sides of a ratio were measured."""
    medians = _Medians(results)
    found: list[Target] = []

    def add(what: str, ours: float | None, theirs: float | None, least: float | None) -> None:
        if ours is not None and theirs:
            found.append(Target(what, ours / theirs, least))

    for key, words in (("one", "1 process"), ("two", "2 processes")):
        ours = medians.of("drain", "rowmill", key)
        graphile = medians.best("drain", ("graphile", "graphile-max"), key)
        limit = medians.of("limit", "rowmill", f"apart_{key}", f"merged_{key}")
        add(f"drain, {words}: to Graphile Worker at its best", ours, graphile and graphile[0], 1.1)
        add(f"drain, {words}: to PgQueuer", ours, medians.of("drain", "pgqueuer", key), 3)
        tasks = medians.of("drain", "rowmill-tasks", key)
        add(f"drain of tasks, {words}: to Graphile Worker at its best", tasks, graphile and graphile[0], 1.1)
        add(f"drain of tasks, {words}: to PgQueuer", tasks, medians.of("drain", "pgqueuer", key), 3)
        add(f"drain, {words}: to the drain of tasks", ours, tasks, 0.85)
        add(f"drain, {words}: to pgbench's best with the same statements", ours, limit, 0.8)
    for key, words in (("p50", "median"), ("p99", "99th percentile")):
        if least := medians.best("pickup", _OTHERS, key, lowest=True):
            add(f"pickup, {words}: to the best peer ({least[1]})", medians.of("pickup", "rowmill", key), least[0], None)
    for key, words, least_ratio in (("bulk", "in bulk", 2), ("single", "one by one", 1)):
        if most := medians.best("enqueue", _THEIRS, key):
            ours = medians.of("enqueue", "rowmill", key)
            add(f"enqueue {words}: to the best peer on PostgreSQL ({most[1]})", ours, most[0], least_ratio)
            tasks = medians.of("enqueue", "rowmill-tasks", key)
            add(f"enqueue of tasks {words}: to the best peer on PostgreSQL ({most[1]})", tasks, most[0], least_ratio)
    one, two = (medians.of("sqlite", "rowmill-sqlite", key) for key in ("one", "two"))
    add("SQLite, 1 process: to Huey", one, medians.of("sqlite", "huey-sqlite", "one"), 5)
    add("SQLite: 2 processes to 1", two, one, 1)
    add("SQLite, 1 process: to a bare sqlite3 loop", one, medians.of("sqlite", "bare-sqlite", "one"), 0)
    for keys, batch, least in (("200", 10, 0.7), ("200", 100, 0.5), ("20000", 10, 0.9), ("20000", 100, 0.9)):
        free, gated = (medians.of("gates", f"rowmill-{keys}-keys", f"{name}_{batch}") for name in ("free", "gated"))
        add(f"gates, {int(keys):,} keys, batches of {batch}: to the ungated lane", gated, free, least)
    one, two = (medians.of("ocr", "rowmill", key) for key in ("one", "two"))
    add("documents read, 2 workers: to 1", two, one, 1.7)
    return found
