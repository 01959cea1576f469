"""A lane over Procrastinate's own table, filled and looked at by Procrastinate's own client."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from databases import Db
from foreign import Place
from rowmill.testing import Kit

pytestmark = pytest.mark.no_pooler("the other library connects to the database by itself, with settings of its own")

HEAD = """
import asyncio, json, os, procrastinate
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["DATABASE_URL"]))

@app.task(name="read", queue="pages")
def read(url): ...

@app.task(name="other", queue="elsewhere")
def other(): print("worked by procrastinate")

async def main():
    async with app.open_async():
        print(json.dumps(await work()))
"""
TAIL = "\nasyncio.run(main())"
STATUS = """
async def work():
    jobs = sorted(await app.job_manager.list_jobs_async(), key=lambda job: job.id)
    return [[job.task_kwargs.get("url"), job.status, job.attempts] for job in jobs]
"""


@pytest.fixture
def place(pg: Db, tmp_path: Path) -> Place:
    here = Place(tmp_path, pg, "procrastinate_lane.py")
    here.script(HEAD + "\nasync def work(): await app.schema_manager.apply_schema_async()" + TAIL)
    return here


def events(db: Db, id: int) -> list[str]:
    return [row["type"] for row in db.query("select type from procrastinate_events where job_id = ? order by id", id)]


def test_jobs_that_procrastinate_deferred_are_worked_off_and_it_sees_them_finished(pg: Db, place: Place) -> None:
    """Issue 3, foreign tables: its client defers, rowmill works, its client and its events tell the outcome."""
    ids = place.script(
        HEAD
        + """
async def work():
    read_late = read.configure(schedule_in={"hours": 1})
    return [await read.defer_async(url="a"), await read_late.defer_async(url="late"),
            await read.defer_async(url="broken:1"), await other.defer_async()]
"""
        + TAIL
    )
    theirs = "update procrastinate_jobs set status = ?::text::procrastinate_job_status where id = ?"
    pg.execute(theirs, "doing", ids[3])  # held by a worker of Procrastinate's, which shows no time at all
    place.drain("procrastinate_lane")
    assert pg.value("select status from procrastinate_jobs where id = ?", ids[1]) == "todo", "not before its time"
    pg.execute("update procrastinate_jobs set scheduled_at = now() where id = ?", ids[1])
    place.drain("procrastinate_lane")
    assert pg.value("select status from procrastinate_jobs where id = ?", ids[3]) == "doing", "not ours to sweep"
    pg.execute(theirs, "todo", ids[3])
    assert place.script(HEAD + STATUS + TAIL) == [
        ["a", "succeeded", 1], ["late", "succeeded", 1], ["broken:1", "failed", 3], [None, "todo", 0]]  # fmt: skip
    assert events(pg, ids[0]) == ["deferred", "started", "succeeded"]
    assert events(pg, ids[2]) == ["deferred", *["started", "scheduled", "deferred_for_retry"] * 2, "started", "failed"]
    # Procrastinate's own worker goes on with its own queue, on the same table.
    beside = STATUS.replace("):\n", "):\n    await app.run_worker_async(wait=False, listen_notify=False)\n", 1)
    assert place.script(HEAD + beside + TAIL)[3] == [None, "succeeded", 1]


async def test_locks_and_priorities_hold_as_procrastinate_means_them(pg: Db, place: Place) -> None:
    """Of jobs with one lock one runs at a time, the higher priority first, also within one claim."""
    place.script(
        HEAD
        + """
async def work():
    for lock, url, priority in (("x", "x1", 0), ("x", "x2", 5), ("y", "y1", 1), (None, "free", 0), ("x", "x3", 0)):
        await read.configure(lock=lock, priority=priority).defer_async(url=url)
"""
        + TAIL
    )
    sys.path.insert(0, str(place.folder))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DATABASE_URL", pg.url)
            from procrastinate_lane import mill
    finally:
        sys.path.remove(str(place.folder))
        sys.modules.pop("procrastinate_lane", None)
    async with Kit(mill) as kit:
        store = await kit.store()
        order = []
        while claims := await kit.claim("pages", 10):
            order.append([store.value(claim.row, "args")["url"] for claim in claims])
            for claim in claims:
                assert (await kit.settle(claim)).written
    assert order == [["x2", "y1", "free"], ["x1"], ["x3"]]


def test_a_job_whose_place_in_the_queue_was_taken_meanwhile_fails_and_holds_nobody_up(pg: Db, place: Place) -> None:
    """X2: a queueing lock is unique among waiting jobs; a swept one cannot go back."""
    place.script(
        HEAD
        + """
async def work():
    await read.configure(queueing_lock="q").defer_async(url="broken:q")
    await read.configure(queueing_lock="r").defer_async(url="r")
    await read.defer_async(url="plain")
"""
        + TAIL
    )
    pg.execute("update procrastinate_jobs set status = 'doing', scheduled_at = now() - interval '1 hour', attempts = 1")
    place.script(
        HEAD
        + """
async def work():
    await read.configure(queueing_lock="q").defer_async(url="q again")
    await read.configure(queueing_lock="r").defer_async(url="r again")
"""
        + TAIL
    )
    place.drain("procrastinate_lane")
    assert place.script(HEAD + STATUS + TAIL) == [
        ["broken:q", "failed", 1], ["r", "failed", 1], ["plain", "succeeded", 2],
        ["q again", "succeeded", 1], ["r again", "succeeded", 1]]  # fmt: skip
