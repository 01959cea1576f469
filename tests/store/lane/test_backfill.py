"""A lane with a version: rows that are done, but below it, are worked on again behind the live ones."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from databases import Db
from rowmill import DeclarationError, Job, Mill, fixed
from rowmill.testing import Kit

td = timedelta
TABLE = """create table links (id integer primary key, status text not null default 'queued', title text,
  worker text, claimed_at {time}, heartbeat_at {time}, attempts integer not null default 0, run_after {time},
  error text, enriched_version integer)"""
STATES: dict[str, Any] = {
    state: {"status": word}
    for state, word in (("ready", "queued"), ("running", "running"), ("done", "done"), ("dead", "dead"))
}


def made(db: Db, rows: dict[int, tuple[str, int | None]], attempts: int = 2) -> None:
    db.execute(TABLE.format(time="timestamptz" if db.dialect == "postgresql" else "datetime"))
    for id, (status, version) in rows.items():
        db.execute(
            "insert into links (id, status, enriched_version, attempts) values (?, ?, ?, ?)",
            id, status, version, attempts if status == "done" else 0,
        )  # fmt: skip


def shown(db: Db) -> dict[int, tuple[str, int | None]]:
    return {r["id"]: (r["status"], r["enriched_version"]) for r in db.query("select * from links")}


async def test_rows_below_the_version_are_worked_on_after_the_live_ones(db: Db) -> None:
    made(db, {1: ("done", None), 2: ("done", 1), 3: ("done", 2), 4: ("queued", None), 5: ("dead", 1)})
    mill, order = Mill(db.url), list[int]()

    @mill.lane("links", version=2, version_column="enriched_version", max_attempts=2, concurrency=1, **STATES)
    async def enrich(job: Job) -> dict[str, Any]:
        order.append(job.id)
        return {"title": f"v2 of {job.id}"}

    assert set(mill.lanes) == {"enrich", "enrich-backfill"}
    await mill.worker(drain=True).run()
    assert order == [4, 1, 2]
    assert shown(db) == {1: ("done", 2), 2: ("done", 2), 3: ("done", 2), 4: ("done", 2), 5: ("dead", 1)}
    assert db.value("select title from links where id = 1") == "v2 of 1"
    await mill.worker(drain=True).run()
    assert len(order) == 3, "once"


async def test_a_backfilled_row_that_fails_is_a_live_row_with_all_its_attempts(db: Db) -> None:
    made(db, {1: ("done", 1)}, attempts=2)
    mill = Mill(db.url)

    @mill.lane("links", version=2, version_column="enriched_version", max_attempts=2, backoff=fixed(td(0)), **STATES)
    async def enrich(job: Job) -> None:
        raise ValueError("no")

    async with Kit(mill) as kit:
        stepped = await kit.step("enrich-backfill")
        assert stepped is not None
        assert (stepped.outcome, stepped.attempt) == ("retry", 1)
        assert shown(db) == {1: ("queued", 1)}
        stepped = await kit.step("enrich")
        assert stepped is not None
        assert (stepped.outcome, stepped.attempt) == ("dead", 2)


async def test_a_backfilled_row_goes_back_to_done_when_released_and_to_live_when_its_worker_dies(db: Db) -> None:
    made(db, {1: ("done", 1)})
    mill = Mill(db.url)

    @mill.lane("links", version=2, version_column="enriched_version", **STATES)
    async def enrich(job: Job) -> None: ...

    from rowmill.declare.outcome import Release

    async with Kit(mill) as kit:
        (claim,) = await kit.claim("enrich-backfill")
        await kit.settle(claim, Release())
        assert shown(db) == {1: ("done", 1)}
        await kit.claim("enrich-backfill")
        kit.advance(td(minutes=6))
        await kit.sweep("enrich-backfill")
        assert shown(db) == {1: ("queued", 1)}, "a sweep cannot tell a live row from one that was done"


async def test_a_backfill_keeps_its_pace(lite: Db) -> None:
    made(lite, dict.fromkeys(range(1, 9), ("done", 1)))
    mill, began = Mill(lite.url), list[float]()

    @mill.lane("links", version=2, version_column="enriched_version", backfill_pace=(2, td(milliseconds=200)), **STATES)
    async def enrich(job: Job) -> None:
        began.append(time.monotonic())

    await mill.worker(drain=True).run()
    assert len(began) == 8
    assert began[-1] - began[0] >= 0.55, "two in each fifth of a second"


def test_wrong_versions_are_told() -> None:
    for options in (
        {"version": 2}, {"version_column": "v"}, {"version": "2", "version_column": "v"},
        {"version": 2, "version_column": "v", "backfill_pace": 3}, {"backfill_pace": (3, td(seconds=1))},
    ):  # fmt: skip
        with pytest.raises(DeclarationError, match=r"version|backfill_pace"):
            Mill("sqlite:///x.db").lane("t", **STATES, **options)(_handler)


def _handler(job: Job) -> None: ...
