"""What a dead worker held is given back row by row: none holds up another, and none runs through its reclaims."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from rowmill.clock import Clock
from rowmill.store import LaneStore, open_lane
from rowmill.store.lane.sweep import NOT_BACK, take_over
from rowmill.store.own.schema import ensure
from workers import STATES

OpenLane = Callable[..., Awaitable[LaneStore]]


@pytest.fixture
async def lane(db: Db) -> AsyncIterator[OpenLane]:
    """Make the table with these further columns, and open a lane over it."""
    opened: list[LaneStore] = []

    async def open(columns: str = "", **options: Any) -> LaneStore:
        time = "timestamptz" if db.dialect == "postgresql" else "datetime"
        db.execute(
            "create table jobs (id integer primary key, status text default 'queued', worker text, attempts integer"
            f" default 0, claimed_at {time}, heartbeat_at {time}, error text, name text {columns.format(time=time)})"
        )
        mill = Mill(db.url)
        database = mill.databases()[0][1]

        async def handle(job: Any) -> None: ...

        declared = mill.lane("jobs", name="jobs", **STATES, **options)(handle)
        await ensure(database)
        opened.append(await open_lane(declared, "default", database, Clock(), "w"))
        return opened[0]

    yield open
    for store in opened:
        await store.database.close()


@pytest.mark.parametrize("started", [False, True])
async def test_a_row_that_may_not_go_back_holds_up_no_other(db: Db, lane: OpenLane, started: bool) -> None:
    """While it ran, another row was queued in its place: a unique index on waiting rows. As after a sweep, it ends."""
    store = await lane()
    db.execute("create unique index one_waiting on jobs (name) where status = 'queued'")
    db.insert("jobs", [{"id": i, "name": name} for i, name in enumerate("abc", 1)])
    assert len(await store.claim(3)) == 3
    db.insert("jobs", [{"id": 4, "name": "b"}])
    released, swept, done = await take_over(store, "w", "", lambda _: started, succeeds=True)
    assert done
    assert released == (0 if started else 2)
    assert {row.id: row.poison for row in swept} == ({1: False, 3: False} if started else {}) | {2: True}
    rows = {row["id"]: row for row in db.query("select * from jobs")}
    assert {id: row["status"] for id, row in rows.items()} == {1: "queued", 2: "dead", 3: "queued", 4: "queued"}
    assert rows[2]["error"].startswith(NOT_BACK)
    assert {rows[1]["attempts"], rows[3]["attempts"]} == {int(started)}


async def test_a_row_without_a_time_to_wait_for_is_left_to_its_lease_the_third_time(db: Db, lane: OpenLane) -> None:
    """A row that kills its process must not run through its reclaims within seconds, and no column can hold it back.

    A row beside it that was never taken back before goes back at once.
    """
    store = await lane(max_attempts=10)
    db.insert("jobs", [{"id": 1}])
    for _ in range(2):
        assert [claim.id for claim in await store.claim(1)] == [1]
        _, swept, done = await take_over(store, "w", "", lambda _: True, succeeds=True)
        assert ([row.id for row in swept], done) == ([1], True)
    db.insert("jobs", [{"id": 2}])
    assert len(await store.claim(2)) == 2
    _, swept, done = await take_over(store, "w", "", lambda _: True, succeeds=True)
    assert ([row.id for row in swept], done) == ([2], True)
    assert db.value("select status from jobs where id = 1") == "running"
    assert await take_over(store, "w", "", lambda _: False, succeeds=True) == (1, [], True), "it had not started"
