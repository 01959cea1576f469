"""Never stale, with processes: rows are edited at random while four workers are at them.

Why processes: what a worker knows of a row's inputs must come from the row, no matter which worker runs it next.
``ROWMILL_STALE_ROWS=20000 pytest tests/processes/test_never_stale.py`` is the full size.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from databases import Db
from farm import Farm
from waiting import eventually

ROWS = int(os.environ.get("ROWMILL_STALE_ROWS", "400"))
WORKERS, AT_ONCE = 4, 25
TABLE = """create table pages (
  id integer primary key, status text not null default 'queued', worker text, claimed_at {time}, heartbeat_at {time},
  attempts integer not null default 0, url text, body text, seen text, edits integer not null default 0)"""
LANE = """
import random

@mill.lane("pages", name="pages", {inputs} **OPTIONS)
async def work(job):
    started(job)
    await asyncio.sleep(random.uniform(0, 0.1))
    seen = job["url"] + " " + job["body"]
    if job.id % 3:
        return {{"seen": seen}}
    async with job.finish() as tx:
        tx.set(seen=seen)
"""
MakeFarm = Callable[[str], Farm]


@pytest.fixture
def farm(tmp_path: Path, db: Db) -> Iterator[MakeFarm]:
    farms: list[Farm] = []

    def make(inputs: str) -> Farm:
        db.execute(TABLE.format(time="timestamptz" if db.dialect == "postgresql" else "datetime"))
        for first in range(1, ROWS + 1, 5000):
            numbers = range(first, min(first + 5000, ROWS + 1))
            db.insert("pages", [{"id": n, "url": f"u{n}", "body": f"b{n}"} for n in numbers])
        farms.append(Farm(tmp_path, db, LANE.format(inputs=inputs), CONCURRENCY="20"))
        return farms[-1]

    yield make
    for each in farms:
        each.close()


def edit_at_random(db: Db, count: int) -> None:
    """Change the url or the body of rows that are not done, most of them at work: so many rows, some at a time."""
    chance = random.Random(7)
    while count > 0:
        found = db.query("select id from pages where status = 'running' limit 500")
        running = [row["id"] for row in found]
        if not running and not db.query("select 1 from pages where status <> 'done' limit 1"):
            return
        ids = {
            chance.choice(running) if running and chance.random() < 0.8 else chance.randint(1, ROWS)
            for _ in range(AT_ONCE)
        }
        column = chance.choice(["url", "body"])
        db.execute(
            f"update pages set {column} = ?, edits = edits + 1"
            f" where status <> 'done' and id in ({', '.join(map(str, sorted(ids)))})",
            f"edit {chance.random()}",
        )
        count -= len(ids)


def work_while_edited(here: Farm) -> tuple[int, int]:
    """Rows whose result was not computed from their final inputs, and runs that the workers found to be stale."""
    db = here.db
    for n in range(WORKERS):
        here.start(f"w{n}")
    eventually(lambda: here.started())
    edit_at_random(db, 2 * ROWS)
    eventually(lambda: not db.query("select 1 from pages where status <> 'done' limit 1"), seconds=600, every=0.2)
    assert db.one("select count(*) as n from pages where edits > 0")["n"] > ROWS / 20
    wrong = db.one("select count(*) as n from pages where seen is null or seen <> url || ' ' || body")["n"]
    told = [json.loads(line) for line in here.events.read_text().splitlines()]
    failed = {event["id"] for event in told if event["event"] == "job_failed"}  # a file that was locked for too long
    assert {row["id"] for row in db.query("select id from pages where attempts <> 1")} <= failed
    return wrong, sum(event["changed_count"] for event in told if event["event"] == "inputs_changed")


@pytest.mark.timeout(900)
def test_every_result_was_computed_from_the_rows_final_inputs(farm: MakeFarm) -> None:
    """``settle_after=None``: the last rows are edited over and over, and no outcome is to be final by the bound."""
    wrong, stale = work_while_edited(farm('inputs=["url", "body"], settle_after=None,'))
    assert wrong == 0
    assert stale > 0


@pytest.mark.timeout(900)
def test_without_inputs_some_results_are_of_old_ones(farm: MakeFarm) -> None:
    """The same lane and the same edits: what shows that the other test can fail."""
    wrong, _ = work_while_edited(farm(""))
    assert wrong > 0
