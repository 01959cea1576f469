"""A row that the database will not let go back to ready: it ends, and holds no other up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from databases import Db
from rowmill import Mill
from rowmill.testing import Kit

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


async def handle(job: Any) -> None:
    return None


def stale(db: Db, checked: str = "") -> Mill:
    """Three rows of one key each whose holders are gone; in place of the second another row waits."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table jobs (id integer primary key, site text, status text{checked}, worker text, claimed_at {time},"
        " attempts integer not null default 0, error text)"
    )
    db.execute("create unique index one_waiting on jobs (site) where status = 'ready'")
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    gone = {"status": "running", "worker": "gone", "claimed_at": long_ago, "attempts": 1}
    db.insert("jobs", [{"id": i, "site": site, **gone} for i, site in ((1, "a"), (2, "b"), (3, "c"))])
    db.insert("jobs", [{"id": 4, "site": "b", "status": "ready"}])
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", max_attempts=3, **STATES)(handle)
    return mill


async def test_a_row_whose_place_was_taken_ends_as_dead_and_the_others_go_back(db: Db) -> None:
    """X2: a unique index on waiting rows; the sweep of the others, and a worker's start, do not depend on it."""
    mill = stale(db)
    async with Kit(mill) as kit:
        swept = {row.id: row for row in await kit.sweep()}
        assert {id: row.poison for id, row in swept.items()} == {1: False, 2: True, 3: False}
        assert swept[2].worker == "gone"
        assert await kit.sweep() == []
    dead = db.one("select * from jobs where id = 2")
    assert dead["status"] == "dead"
    assert dead["error"].startswith("the database would not take it back: ")
    assert "unique" in dead["error"].lower()
    assert db.value("select count(*) from jobs where status = 'ready' and worker is null") == 3


async def test_a_worker_starts_although_a_row_can_neither_go_back_nor_end(db: Db) -> None:
    """X2: it is told, the row stays as it is, and everything else is worked off."""
    mill = stale(db, " check (status <> 'dead')")
    told: list[Any] = []
    mill.on_event(lambda event: told.append(event) if event.name == "sweep_refused" else None)
    worker = mill.worker(worker_id="w")

    def stop_when_done(event: Any) -> None:
        if event.name == "job_settled" and db.value("select count(*) from jobs where status = 'done'") == 3:
            worker.stop()

    mill.on_event(stop_when_done)
    await worker.run()
    assert {event.fields["id"] for event in told} == {2}
    assert "check" in told[0].fields["error"].lower()
    assert db.value("select status from jobs where id = 2") == "running"
