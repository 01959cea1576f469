"""Stuck jobs: rows of workers that died go back and are worked on again; rows of workers that live do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

from apps.registre.lanes import mill
from databases import Db
from rowmill import Job
from rowmill.testing import Kit

from . import rows
from .at_work import at_work, until
from .conftest import environments
from .test_order import CLAIMED, INSERT, KINDS, TABLES

DONE = {"extraction": 3, "req": "pending_name_selection", "rdprm": "completed"}


def left_by(db: Db, kind: str, silent: float) -> Any:
    """A row whose worker was last heard of so many seconds ago."""
    moment = datetime.now(UTC) - td(seconds=silent)
    column, value = CLAIMED[kind]
    held = {"worker_id": "unified-worker-gone", "processing_started_at": moment, "heartbeat_at": moment}
    return INSERT[kind](db, **{column: value}, **held)[0]


def row(db: Db, kind: str, id: Any) -> dict[str, Any]:
    found = db.one(f"select * from {TABLES[kind]} where id = ?", id)
    return found | {"state": found[CLAIMED[kind][0]]}


async def test_a_worker_that_starts_takes_back_what_was_silent_for_two_minutes_everywhere(
    place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch, noted: list[Job]
) -> None:
    """A12: all three kinds, in every environment; a reclaimed row is worked on again; one of 100 seconds is left."""
    dbs = await environments(fresh, monkeypatch, prod="postgresql", dev="sqlite")
    stuck = {(name, kind): left_by(db, kind, 130) for name, db in dbs.items() for kind in KINDS}
    fresh_ones = {(name, kind): left_by(db, kind, 60) for name, db in dbs.items() for kind in KINDS}
    async with at_work():
        await until(lambda: len(noted) == 6)
    for (name, kind), id in stuck.items():
        found = row(dbs[name], kind, id)
        assert (found["state"], found["error_message"]) == (DONE[kind], None)
        assert found["worker_id"] != "unified-worker-gone"
    for (name, kind), id in fresh_ones.items():
        found = row(dbs[name], kind, id)
        assert (found["state"], found["worker_id"]) == (CLAIMED[kind][1], "unified-worker-gone")


@pytest.mark.parametrize("kind", KINDS)
async def test_during_the_run_the_threshold_is_five_minutes_and_the_holder_is_cleared(
    place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A12: 200 seconds of silence are not enough, 310 are; worker and start time are cleared, no failure is counted."""
    db = (await environments(fresh, monkeypatch, prod="sqlite"))["prod"]
    slow, gone = left_by(db, kind, 200), left_by(db, kind, 310)
    ready = mill.lanes[kind].ready_again
    async with Kit(mill) as kit:
        assert [swept.id for swept in await kit.sweep(kind)] == [gone]
        found = row(db, kind, gone)
        assert (found["worker_id"], found["processing_started_at"], found["error_message"]) == (None, None, None)
        assert {column: found[column] for column in ready} == ready
        assert row(db, kind, slow)["state"] == CLAIMED[kind][1]
        assert len(await kit.claim(kind, 5)) == 1


async def test_a_reclaim_is_never_final(
    place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12: a failure is final, a reclaim is not: the tenth worker that dies leaves a row that waits."""
    db = (await environments(fresh, monkeypatch, prod="sqlite"))["prod"]
    rows.documents(db)
    async with Kit(mill) as kit:
        shift = mill.clock.shift
        try:
            for _ in range(10):
                assert len(await kit.claim("extraction")) == 1
                kit.advance(td(seconds=301))
                assert len(await kit.sweep("extraction")) == 1
        finally:
            mill.clock.shift = shift
    assert db.value("select status_id from extraction_queue") == 1


async def test_a_row_of_a_worker_that_lives_is_never_taken(
    place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12, X1: a run that outlives the lease many times over keeps its row, while others start and sweep beside it."""
    dbs = await environments(fresh, monkeypatch, prod="postgresql")
    begun: list[str] = []
    go_on = asyncio.Event()

    async def long(job: Job) -> None:
        begun.append(job.worker)
        await go_on.wait()

    lane = mill.lanes["extraction"]
    monkeypatch.setattr(lane, "handler", long)
    for name, value in {"lease": 3.0, "startup_lease": 3.0, "heartbeat": 0.2, "sweep_every": 0.2}.items():
        monkeypatch.setattr(lane, name, td(seconds=value))
    rows.documents(dbs["prod"])
    async with at_work(worker_id="one", lanes=["extraction"]):
        await until(lambda: begun)
        async with at_work(worker_id="two", lanes=["extraction"]):
            await asyncio.sleep(5)
        go_on.set()
        await until(lambda: dbs["prod"].value("select status_id from extraction_queue") == 3)
    assert begun == ["one"]
    assert dbs["prod"].value("select worker_id from extraction_queue") == "one"
