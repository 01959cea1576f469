"""How many files of rowmill a row executes in, from ready to done. The architecture page follows the same way."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rowmill
from databases import Db
from rowmill import Concurrency, Mill

SOURCE = str(Path(rowmill.__file__).parent)
ROWS, BATCH = 6000, 50
STATES = {
    "ready": {"status": "queued"},
    "running": {"status": "running"},
    "done": {"status": "done"},
    "dead": {"status": "dead"},
}


class CountedFiles:
    """The files of rowmill in which the worker's thread executes, from one claim to the next, while rows from a third
    to two thirds of all are worked on.
    """

    def __init__(self) -> None:
        self.done = 0
        self.rounds: list[set[str]] = [set()]

    def row(self) -> None:
        """A handler runs."""
        self.done += 1
        if self.done == ROWS // 3:
            sys.setprofile(self._called)
        elif self.done == 2 * ROWS // 3:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            file = code.co_filename.removeprefix(f"{SOURCE}/")
            if code.co_name == "make_claims":
                self.rounds.append(set())
            self.rounds[-1].add(file)

    def steady(self) -> set[str]:
        """Files that the rows of at least a quarter of all claims go through: several may be settled together."""
        counts = Counter(file for files in self.rounds for file in files)
        return {file for file, count in counts.items() if count >= len(self.rounds) / 4}

    def at_all(self) -> set[str]:
        """Those, and what runs now and then: more than once, because what a start does is done once, and on a slow
        machine while the first rows run.
        """
        counts = Counter(file for files in self.rounds for file in files)
        return {file for file, count in counts.items() if count > 1}


async def follow(mill: Mill, path: CountedFiles) -> None:
    try:
        await asyncio.wait_for(mill.worker(drain=True).run(), 100)
    finally:
        sys.setprofile(None)
    assert path.done == ROWS
    assert len(path.rounds) >= 5


def table(pg: Db) -> None:
    pg.execute(
        "create table pages (id bigserial primary key, status text not null default 'queued', attempts int not null"
        " default 0, worker_id text, locked_at timestamptz, heartbeat_at timestamptz, run_after timestamptz,"
        " last_error text, domain text)"
    )
    pg.execute("create index on pages (domain, run_after, id) where status = 'queued'")
    pg.execute(f"insert into pages (domain) select 'd' || (i % 500) from generate_series(1, {ROWS}) i")


@pytest.mark.parametrize(
    ("gates", "steady", "at_all"), [([], 9, 12), ([Concurrency(2, by="domain")], 14, 18)], ids=["plain", "limit by key"]
)
async def test_a_row_goes_through_few_files(pg: Db, gates: list[Any], steady: int, at_all: int) -> None:
    """Issue, the house: 9 files for a plain lane, 14 under a limit by key; 12 and 18 with what runs now and then."""
    table(pg)
    mill, path = Mill(pg.url), CountedFiles()

    @mill.lane("pages", batch=BATCH, concurrency=20, gates=gates, **STATES)
    async def fetch(job: Any) -> None:
        path.row()

    await follow(mill, path)
    assert len(path.steady()) <= steady, "\n".join(sorted(path.steady()))
    assert len(path.at_all()) <= at_all, sorted(path.at_all())


async def test_a_task_goes_through_few_files(pg: Db) -> None:
    """Issue, the house: 12 files; 18 with what runs now and then."""
    mill, path = Mill(pg.url), CountedFiles()
    mill.queue("default", batch=BATCH, concurrency=20)

    @mill.task
    async def count(number: int) -> None:
        path.row()

    await mill.prepare()
    await count.enqueue_many([(number,) for number in range(ROWS)])
    await mill.close()
    await follow(mill, path)
    assert len(path.steady()) <= 12, "\n".join(sorted(path.steady()))
    assert len(path.at_all()) <= 18, sorted(path.at_all())
