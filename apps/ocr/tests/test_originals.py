"""ocr on the table as it was, beside a worker and a monitor with the original's own statements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from apps.ocr.__main__ import active_workers
from apps.ocr.tests.office import Office
from apps.registre.tests import originals
from apps.registre.tests.at_work import until
from apps.registre.tests.originals import ACTIVE, KINDS, Foreign
from databases import Db, as_time
from rowmill import Mill
from rowmill.testing import Kit

_PAST = {"postgresql": "now() - interval '11 minutes'", "sqlite": "datetime('now', '-11 minutes')"}


@pytest.fixture
def office(db: Db, make_office: Callable[..., Office]) -> Office:
    """The originals' table, with rows that wait for OCR, and then ocr's set-up."""
    originals.create(db, ocr=True)
    originals.rows(db, "ocr", 20)
    return make_office(db)


def quick(office: Office, runs: list[Any]) -> Mill:
    """The application, with a handler that takes a note of its document, and reads nothing."""
    mill = office.mill()

    async def handler(job: Any) -> dict[str, Any]:
        runs.append(job.id)
        return {"ocr_text": "ours"}

    mill.lanes["ocr"].handler = handler
    return mill


@asynccontextmanager
async def monitored(mill: Mill, worker_id: str) -> Any:
    worker = mill.worker(worker_id=worker_id)
    work = asyncio.create_task(worker.run())
    try:
        await asyncio.wait_for(worker.started.wait(), 60)
        yield
    finally:
        worker.stop()
        await asyncio.wait_for(work, 60)


def seen(rows: list[Any]) -> list[tuple[str, int]]:
    return [(row["ocr_worker_id"], row["active_jobs"]) for row in rows]


async def test_two_workers_of_different_make_share_the_documents_and_lose_none(office: Office) -> None:
    """B2, X1: who loses the race goes on to the next; what the other holds is not touched; each is read once."""
    db, runs = office.db, list[Any]()
    foreign = Foreign(db, KINDS["ocr"])
    held = [foreign.claim() for _ in range(5)]
    as_claimed = originals.by_id(db, "ocr", held)
    async with monitored(quick(office, runs), "worker-1"):
        await asyncio.to_thread(foreign.drain, 0.01)
        await until(lambda: len(runs) + len(foreign.finished) == 15)
        assert originals.by_id(db, "ocr", held) == as_claimed
        for id in held:
            foreign.finish(id)
        await until(lambda: db.value("select count(*) from extraction_queue where status_id = 5") == 20)
    assert runs
    assert sorted([*map(str, runs), *foreign.finished]) == sorted(str(i) for i in range(1, 21))
    rows = db.query("select * from extraction_queue")
    assert {row["ocr_attempts"] for row in rows} == {1}
    assert {(row["ocr_worker_id"], row["ocr_text"]) for row in rows} == {("theirs", "theirs"), ("worker-1", "ours")}


async def test_the_originals_view_of_its_workers_counts_both(office: Office) -> None:
    """B8: by the start of each run, which no heartbeat moves; and the view of the set-up says the same."""
    db, mill, foreign = office.db, quick(office, []), Foreign(office.db, KINDS["ocr"])
    theirs = [foreign.claim() for _ in range(2)]
    async with Kit(mill, worker_id="worker-1") as kit:
        claims = await kit.claim(count=3)
        before = db.query(ACTIVE)
        assert seen(before) == [("theirs", 2), ("worker-1", 3)]
        assert all(as_time(row["oldest_job"]) <= as_time(row["newest_job"]) for row in before)
        await (await kit.store()).renew(claims)
        assert db.query(ACTIVE) == before
        assert seen(await active_workers(mill)) == seen(before)
        await kit.run(claims[0])
        foreign.finish(theirs[0])
        assert seen(db.query(ACTIVE)) == [("theirs", 1), ("worker-1", 2)]


async def test_the_stale_monitors_of_both_take_back_what_died_and_nothing_else(office: Office) -> None:
    """B7, X1: ours takes a dead foreign worker's document; theirs, which knows no heartbeat, one of ours that runs for
    longer than ten minutes: then the outcome of who has it now stands, and ours is dropped.
    """
    db, runs = office.db, list[Any]()
    foreign = Foreign(db, KINDS["ocr"])
    dead, living = foreign.claim(), foreign.claim()
    old = f"update extraction_queue set ocr_started_at = {_PAST[db.dialect]} where id = ?"
    db.execute(old, dead)
    async with Kit(quick(office, runs), worker_id="worker-1") as kit:
        assert [swept.id for swept in await kit.sweep()] == [dead]
        row = office.row(dead)
        assert (row["status_id"], row["ocr_worker_id"], office.row(living)["ocr_worker_id"]) == (3, None, "theirs")
        first, second = await kit.claim(count=2)
        assert first.id == dead
        db.execute(old, second.id)
        foreign.reset_stuck(10)
        assert (office.row(first.id)["status_id"], office.row(second.id)["status_id"]) == (6, 3)
        assert foreign.claim() == second.id
        assert (await kit.run(first)).outcome == "done"
        assert (await kit.run(second)).outcome == "lost"
        foreign.finish(second.id)
    assert office.row(second.id)["ocr_text"] == "theirs"
    assert office.row(dead)["ocr_text"] == "ours"
