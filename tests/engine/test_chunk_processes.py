"""Chunks with ``isolation="process"``: the handler's process gets the whole chunk, and may die of one of its rows."""

from __future__ import annotations

import asyncio
import os

import chunk_app
from databases import Db
from rowmill.testing import Kit


def table(db: Db, rows: int = 8) -> None:
    db.execute(
        "create table jobs (id integer primary key, status text not null default 'ready', worker text, result text,"
        " claimed_at datetime, heartbeat_at datetime, error text, progress text)"
    )
    db.insert("jobs", [{"id": n} for n in range(1, rows + 1)])


async def test_a_chunk_runs_in_one_process_and_each_job_talks_for_itself(lite: Db) -> None:
    """Progress, budgets and directories are the jobs' own."""
    table(lite, 3)
    async with Kit(chunk_app.mill, environments=lite.url) as kit:
        steps = await kit.step_chunk("lists")
    assert [step.outcome for step in steps] == ["done"] * 3
    found = [str(row["result"]).split(" in ") for row in lite.query("select result from jobs order by id")]
    assert [id for id, _ in found] == ["1", "2", "3"]
    assert {pid for _, pid in found} not in ({str(os.getpid())}, set())
    assert len({pid for _, pid in found}) == 1
    assert [row["progress"] for row in lite.query("select progress from jobs order by id")] == [
        f"50% job {n}" for n in (1, 2, 3)
    ]


async def test_a_list_that_was_changed_in_the_process_settles_no_row(lite: Db) -> None:
    table(lite, 2)
    async with Kit(chunk_app.mill, environments=lite.url) as kit:
        steps = await kit.step_chunk("sorts")
    assert [step.outcome for step in steps] == ["dead"] * 2
    assert "changed the list" in str(steps[0].error)


async def test_a_row_that_kills_the_handlers_process_is_found(lite: Db) -> None:
    """Issue 23: by dividing, and the others lose no attempt."""
    table(lite)
    async with Kit(chunk_app.mill, environments=lite.url) as kit:
        steps = await kit.step_chunk("dies")
    assert {step.id: step.error for step in steps if step.outcome != "done"} == {
        5: "the handler's process died (exit code 9)"
    }


async def test_a_row_on_which_the_process_hangs_is_found(lite: Db) -> None:
    table(lite, 2)
    lite.execute("update jobs set id = 5 where id = 2")
    async with Kit(chunk_app.mill, environments=lite.url) as kit:
        steps = await kit.step_chunk("hangs")
    assert {step.id: step.error for step in steps if step.outcome != "done"} == {5: "timed out after 1 s"}


async def test_a_task_runs_its_chunk_in_a_process(lite: Db) -> None:
    async with Kit(chunk_app.mill, environments=lite.url) as kit:
        handles = await chunk_app.double.enqueue_many([(n,) for n in range(6)])
        lite.execute("update rowmill_jobs set args = '{}' where id = ?", handles[5].id)
        async with asyncio.timeout(60):
            await kit.drain("double")
        assert [await handle.result(60) for handle in handles[:5]] == [0, 2, 4, 6, 8]
        assert lite.value("select state from rowmill_jobs where id = ?", handles[5].id) == "dead"
