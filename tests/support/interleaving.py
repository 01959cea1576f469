"""The long form of the interleaver: ``make interleave``. Every shape, on both databases."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import shapes
from databases import Db, Server
from rowmill.prove.interleave import Interleaver, InterleaveResult

DIALECTS = ("sqlite", "postgresql")


def prepared(db: Db) -> str:
    """The shapes' tables, in a fresh database."""
    for table in shapes.tables(db.dialect):
        db.execute(table)
    return db.url


async def interleave(url: str, shape: str, seeds: Sequence[int], seconds: float | None = None) -> InterleaveResult:
    """Schedules of one shape."""
    async with Interleaver(shapes.SHAPES[shape](), url, edited=shapes.EDITED.get(shape)) as interleaver:
        return await interleaver.try_seeds(seeds, seconds=seconds)


def main() -> int:
    """All shapes on all dialects that were asked for; 1 where a schedule was broken."""
    parser = argparse.ArgumentParser(prog="make interleave ARGS=...", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="per dialect, shared by the shapes")
    parser.add_argument("--dialect", choices=DIALECTS, action="append")
    parser.add_argument("--shape", choices=tuple(shapes.SHAPES), action="append")
    parser.add_argument("--seed", type=int, help="one schedule, with all its steps")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    given = parser.parse_args()
    chosen = given.shape or list(shapes.SHAPES)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="rowmill-interleave-") as folder:
        for dialect in given.dialect or DIALECTS:
            bad += _dialect(given, dialect, chosen, folder)
    return 1 if bad else 0


def _dialect(given: argparse.Namespace, dialect: str, chosen: Sequence[str], folder: str) -> int:
    server = Server() if dialect == "postgresql" else None
    try:
        url = server.create_database("interleave") if server else f"sqlite:///{Path(folder) / 'interleave.db'}"
        prepared(Db(url))
        bad, total, began = 0, 0, time.monotonic()
        each = -(-given.schedules // len(chosen))
        for shape in chosen:
            seeds = [given.seed] if given.seed is not None else range(given.first, given.first + each)
            tried = asyncio.run(interleave(url, shape, seeds))
            total += tried.schedules
            bad += tried.broken is not None
            _tell(dialect, shape, tried, whole=given.seed is not None)
        took = time.monotonic() - began
        print(f"{dialect}: {total:,} schedules in {took:.0f} s, {total / took:.0f} a second; {bad} broken", flush=True)
        return bad
    finally:
        if server is not None:
            server.close()


def _tell(dialect: str, shape: str, tried: InterleaveResult, *, whole: bool) -> None:
    print(
        f"{dialect:<10} {shape:<7} {tried.schedules:>6,} schedules {tried.steps:>9,} steps {tried.commits:>8,} commits"
        f" {tried.claims:>7,} claims {tried.swept:>6,} swept {tried.lost:>6,} lost {tried.waits:>6,} waits"
        f" {tried.schedules / tried.seconds:>6.0f}/s",
        flush=True,
    )
    if tried.broken is not None or whole:
        for number, step in enumerate(tried.last.steps, 1):
            print(f"  {number:>3} {step}")
    if tried.broken is not None:
        print(f"BROKEN, seed {tried.broken.seed}: {tried.broken.broken}")
        print(f"Try: make interleave ARGS='--dialect {dialect} --shape {shape} --seed {tried.broken.seed}'")


if __name__ == "__main__":
    sys.exit(main())
