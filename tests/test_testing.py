"""The kit on another database, and what was enqueued, read from the table itself."""

from __future__ import annotations

import asyncio
import enum
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace as Some

import pytest

import gated
from databases import Db, as_time
from rowmill import Job, Mill, RowmillError
from rowmill.pytest import kit as kit
from rowmill.testing import Kit, enqueued


def declared(url: str | None, **options: str) -> Mill:
    mill = Mill(url, **options)

    @mill.task
    async def send(to: str, pages: int = 1) -> None: ...

    @mill.task
    async def other() -> None: ...

    return mill


async def test_the_kit_puts_a_mill_elsewhere_and_back(lite: Db, kit: Callable[..., Kit], tmp_path: Path) -> None:
    mill = declared(lite.url)
    send = mill.tasks["send"]
    for _ in range(2):  # the second finds what the first has left: nothing but the file
        async with kit(mill) as k:
            assert mill.environments == {"default": f"sqlite:///{tmp_path}/default.db"}
            await send.enqueue(to="a", run_after=timedelta(hours=1))
            k.advance(timedelta(hours=1))
            assert (await k.drain()).completed == 1
        assert mill.environments == {"default": lite.url}
        assert not mill.clock.shift
    assert lite.query("select name from sqlite_master") == []
    await send.enqueue(to="b")
    await mill.close()
    assert lite.value("select count(*) from rowmill_jobs") == 1


async def test_the_kit_gives_a_mill_a_database_that_has_none(
    kit: Callable[..., Kit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROWMILL_DATABASE_URL", raising=False)
    mill = declared(None)
    async with kit(mill) as k:
        await mill.tasks["other"].enqueue()
        assert [job.task for job in await k.enqueued()] == ["other"]
    with pytest.raises(RowmillError, match="no database"):
        _ = mill.environments


async def test_what_was_enqueued_is_listed_with_its_arguments(db: Db) -> None:
    schema = {"schema": "own rowmill"} if db.dialect == "postgresql" else {}
    mill = declared(db.url, **schema)
    send, other = mill.tasks["send"], mill.tasks["other"]
    async with Kit(mill) as k:
        await send.enqueue("a", priority=-5, key="once")
        await other.enqueue()
        await send.enqueue_many([("b",), ("c", 3)])
        jobs = await k.enqueued(send)
        assert [job.args for job in jobs] == [{"to": "a"}, {"to": "b"}, {"to": "c", "pages": 3}]
        assert (jobs[0].priority, jobs[0].key, jobs[0].state, jobs[0].queue) == (-5, "once", "ready", "default")
        assert jobs[0].run_after.tzinfo is not None
        assert len(await k.enqueued()) == 4
        with pytest.raises(RowmillError, match="inside a running event loop"):
            enqueued(mill)
    await mill.close()


def test_a_test_that_does_not_await_sees_what_its_transaction_sees(lite: Db) -> None:
    mill = declared(lite.url)
    mill.prepare_sync()
    send = mill.tasks["send"]
    with closing(sqlite3.connect(lite.url.removeprefix("sqlite:///"))) as tx:
        send.enqueue_sync(to="a", tx=tx)
        assert [job.args for job in enqueued(mill, send, tx=tx)] == [{"to": "a"}]
        assert enqueued(mill) == []
        tx.commit()
    (job,) = enqueued(mill)
    found = send.handle(job.id).status_sync()
    assert found is not None
    assert (found.task, found.state) == ("send", "ready")
    assert send.handle(job.id + 1).status_sync() is None
    asyncio.run(mill.close())


def test_a_models_fields_and_choices_are_taken_for_columns_and_values() -> None:
    """A Django model, by what it says of itself; Django is not needed for it."""

    class Status(enum.StrEnum):
        NEW, BUSY, OVER = "new", "busy", "over"

    fields = [
        Some(name="state", attname="state", column="theState"),
        Some(name="owner", attname="owner_id", column="owner_id"),
        Some(name="seen", attname="seen", column="seen"),
    ]  # fmt: skip
    model = type("Thing", (), {"_meta": Some(db_table="a.b", pk=Some(column="key"), concrete_fields=fields)})
    mill = Mill("sqlite:///nowhere.db")

    @mill.lane(
        model, ready={"state": [Status.NEW, None], "owner": 1}, running={"state": Status.BUSY},
        done={"state": Status.OVER}, roles={"updated_at": "seen", "worker": None}, order_by="-owner, pk desc",
    )  # fmt: skip
    async def work(job: Job) -> None: ...

    assert work.table == '"a.b"'
    assert work.ready == {"theState": ["new", None], "owner_id": 1}
    assert type(work.running["theState"]) is str
    assert work.roles == {"updated_at": "seen", "worker": None}
    assert work.order_by == ["-owner_id", " key desc"]


async def test_a_stepped_job_has_the_name_of_a_slot_as_the_lane_declares_it(lite: Db) -> None:
    gated.make(lite)
    gated.fill(lite, ["a"])
    mill = Mill(lite.url)
    slots: list[str] = []

    async def look(job: Job) -> None:
        slots.append(job.slot)

    gated.lane(mill, look, slot_name="{lane}-processor-{n}")
    async with Kit(mill) as k:
        await k.step()
    assert slots == ["crawl-processor-1"]


async def test_a_job_enqueued_in_moved_time_is_due_in_that_time(db: Db) -> None:
    """DESIGN, time: tests inject it, and whatever way a job comes in, it is the same time."""
    mill = declared(db.url)
    send = mill.tasks["send"]
    async with Kit(mill) as k:
        k.advance(timedelta(hours=5))
        await send.enqueue(to="plain")
        await send.enqueue(to="keyed", key="k")
        await send.enqueue_many([{"to": str(n)} for n in range(120)])
        due = [as_time(job.run_after) for job in await k.enqueued()]
        await mill.close()
    assert len(due) == 122
    assert max(due) - min(due) < timedelta(minutes=5)
