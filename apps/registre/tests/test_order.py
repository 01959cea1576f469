"""What is taken, in which order, and what a claim writes: registre's own lanes, with handlers that only take notes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

from apps.registre.lanes import mill
from databases import Db, as_time
from rowmill import Job
from rowmill.testing import Kit

from . import rows
from .at_work import at_work, until
from .conftest import environments

KINDS = ("extraction", "req", "rdprm")
TABLES = {"extraction": "extraction_queue", "req": "search_sessions", "rdprm": "rdprm_searches"}
INSERT: dict[str, Callable[..., list[Any]]] = {
    "extraction": rows.documents, "req": rows.sessions, "rdprm": rows.searches,
}  # fmt: skip
Make = Callable[..., Any]


@pytest.fixture
def make(place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Environments with their tables."""
    return lambda **dialects: environments(fresh, monkeypatch, **dialects)


async def test_prod_goes_before_staging_before_dev_and_extraction_before_req_before_rdprm(
    make: Make, noted: list[Job]
) -> None:
    """A1, A2, A7: one worker, all kinds, strictly in this order, however old the rows are."""
    dbs = await make(prod="postgresql", staging="postgresql", dev="sqlite")
    for environment in ("dev", "staging", "prod"):
        for kind in reversed(KINDS):
            INSERT[kind](dbs[environment], 2)
    await mill.worker(concurrency=1, drain=True).run()
    expected = [(environment, kind) for environment in ("prod", "staging", "dev") for kind in KINDS for _ in range(2)]
    assert [(job.environment, job.lane) for job in noted] == expected


async def test_a_job_that_comes_late_to_prod_goes_before_what_waits_in_dev(
    make: Make, noted: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2: a job found in prod always goes before one elsewhere, also in mid-run."""
    dbs = await make(prod="postgresql", dev="sqlite")
    rows.documents(dbs["dev"], 5)

    async def note(job: Job) -> None:
        noted.append(job)
        if len(noted) == 2:
            rows.documents(dbs["prod"])
            await mill.wake("prod")
            await asyncio.sleep(1.0)  # a run of a registry takes its time: long enough for a notification

    monkeypatch.setattr(mill.lanes["extraction"], "handler", note)
    await mill.worker(concurrency=1, drain=True).run()
    assert [job.environment for job in noted] == ["dev", "dev", "prod", "dev", "dev", "dev"]


async def test_the_extraction_only_worker_leaves_the_other_kinds_alone(make: Make, noted: list[Job]) -> None:
    """A1: a worker can be told to serve only some kinds."""
    dbs = await make(prod="sqlite")
    for kind in KINDS:
        INSERT[kind](dbs["prod"])
    await mill.worker(lanes=["extraction"], drain=True).run()
    assert [job.lane for job in noted] == ["extraction"]
    assert dbs["prod"].value("select status from rdprm_searches") == "pending"


async def test_within_a_kind_the_oldest_goes_first_whatever_its_number(make: Make, noted: list[Job]) -> None:
    """A3: first in, first out, by created_at."""
    dbs = await make(prod="sqlite")
    day = datetime(2026, 3, 1, tzinfo=UTC)
    ids = rows.documents(dbs["prod"], 4, created_at=lambda i: day - td(hours=i))
    await mill.worker(concurrency=1, drain=True).run()
    assert [job.id for job in noted] == ids[::-1]


async def test_each_slot_takes_one_row_at_a_time(make: Make, noted: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """A3: while a slot works on a row, no other is taken for it: nothing is hoarded, not even behind a busy slot."""
    dbs = await make(prod="sqlite")
    rows.documents(dbs["prod"], 4)

    async def note(job: Job) -> None:
        await asyncio.sleep(0.3)
        # The outcome of the run before may still be on its way to the table.
        await until(lambda: dbs["prod"].value("select count(*) from extraction_queue where status_id = 2") == 1)
        noted.append(job)

    monkeypatch.setattr(mill.lanes["extraction"], "handler", note)
    await mill.worker(drain=True).run()
    assert len(noted) == 4
    assert {job.slot for job in noted} == {"extraction-1"}


async def test_a_claim_brings_one_row_however_many_slots_are_free(
    make: Make, noted: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: each slot's row is claimed for itself, so that what another worker could do at once is left to it."""
    dbs = await make(prod="sqlite")
    rows.documents(dbs["prod"], 6)
    said: list[Any] = []
    monkeypatch.setattr(mill.events, "_subscribers", list(mill.events._subscribers))
    monkeypatch.setattr(mill.events, "observed", False)
    mill.events.subscribe(said.append)
    monkeypatch.setattr(mill.lanes["extraction"], "concurrency", 3)
    await mill.worker(drain=True).run()
    assert len(noted) == 6
    assert [event.fields["batch_claimed_count"] for event in said if event.name == "batch_claimed"] == [1] * 6


@pytest.mark.no_pooler("a transaction pooler loses LISTEN with the transaction: the next poll is the wake-up there")
async def test_an_idle_worker_is_woken_at_once_and_looks_every_five_seconds(
    make: Make, noted: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3, X4: the poll is the upper bound; a notification does not wait for it."""
    dbs = await make(prod="postgresql")
    assert {lane.poll for lane in mill.lanes.values()} == {td(seconds=5)}
    for lane in mill.lanes.values():
        monkeypatch.setattr(lane, "poll", td(minutes=10))
    async with at_work():
        for done in (1, 2):
            await asyncio.sleep(0.5)  # until nothing of its start, or of the row before, keeps it awake
            rows.documents(dbs["prod"])
            await mill.wake("prod")
            await until(lambda done=done: len(noted) == done)


async def test_only_rows_that_wait_are_taken(make: Make, noted: list[Job]) -> None:
    """A4: status 1; pending_company_selection and not req_completed; pending."""
    dbs = await make(prod="sqlite", dev="postgresql")
    for db in dbs.values():
        for status in (2, 3, 4, 5, 6):
            now = datetime.now(UTC)
            rows.documents(db, status_id=status, worker_id="other", processing_started_at=now, heartbeat_at=now)
        for status in ("pending_name_selection", "failed"):
            rows.sessions(db, status=status)
        rows.sessions(db, req_completed=True)
        for status in ("completed", "failed"):
            rows.searches(db, status=status)
    async with Kit(mill) as kit:
        for environment in dbs:
            for kind in KINDS:
                assert await kit.claim(kind, 10, environment) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_two_workers_that_see_the_same_rows_share_them(make: Make, kind: str, dialect: str) -> None:
    """A5, X1: each row is taken by one; the other goes on to the next, without an error."""
    dbs = await make(prod=dialect)
    ids = INSERT[kind](dbs["prod"], 12)
    async with Kit(mill, worker_id="one") as one, Kit(mill, worker_id="two") as two:
        claims = await asyncio.gather(*(kit.claim(kind) for _ in range(6) for kit in (one, two)))
    taken = [str(claim.id) for got in claims for claim in got]
    assert sorted(taken) == sorted(map(str, ids))


async def test_a_session_that_was_completed_meanwhile_is_not_taken(make: Make) -> None:
    """A5: REQ is taken only if req_completed is still false."""
    dbs = await make(prod="sqlite")
    first, second = rows.sessions(dbs["prod"], 2)
    dbs["prod"].execute("update search_sessions set req_completed = true where id = ?", first)
    async with Kit(mill) as kit:
        claims = await kit.claim("req", 5)
    assert [claim.id for claim in claims] == [second]


CLAIMED = {
    "extraction": ("status_id", 2),
    "req": ("status", "scraping_company_data"),
    "rdprm": ("status", "in_progress"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_a_claim_writes_state_holder_and_time(make: Make, kind: str, dialect: str) -> None:
    """A6: and, for a search session, updated_at."""
    db = (await make(prod=dialect))["prod"]
    (one,) = INSERT[kind](db)
    before = db.one(f"select * from {TABLES[kind]} where id = ?", one)
    async with Kit(mill, worker_id="unified-worker-7") as kit:
        await kit.claim(kind)
    row = db.one(f"select * from {TABLES[kind]} where id = ?", one)
    column, value = CLAIMED[kind]
    assert (row[column], row["worker_id"]) == (value, "unified-worker-7")
    for time in ("processing_started_at", "heartbeat_at"):
        assert abs(datetime.now(UTC) - as_time(row[time])) < td(minutes=1)
    if kind == "req":
        assert as_time(row["updated_at"]) > as_time(before["updated_at"])
    assert row["created_at"] == before["created_at"]


async def test_a_job_carries_its_kind_its_environment_and_its_session(make: Make, noted: list[Job]) -> None:
    """A7: RDPRM jobs know their session, and what a job writes goes to where it came from."""
    dbs = await make(prod="sqlite", dev="sqlite")
    for db in dbs.values():
        rows.searches(db)
    await mill.worker(environments=["dev"], drain=True).run()
    (job,) = noted
    assert (job.lane, job.environment) == ("rdprm", "dev")
    assert job["search_session_id"] == dbs["dev"].value("select search_session_id from rdprm_searches")
    states = {name: db.value("select status from rdprm_searches") for name, db in dbs.items()}
    assert states == {"prod": "pending", "dev": "completed"}


async def test_an_environment_that_is_down_does_not_stop_the_others(
    make: Make, noted: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2, X2: prod does not answer; staging and dev are worked on, and an event says what is down and what to check."""
    dbs = await make(staging="postgresql", dev="sqlite")
    monkeypatch.setenv("PROD_DATABASE_URL", "postgresql://nobody:secret@127.0.0.1:1/prod")
    for db in dbs.values():
        rows.documents(db)
    said: list[Any] = []
    monkeypatch.setattr(mill.events, "_subscribers", list(mill.events._subscribers))
    monkeypatch.setattr(mill.events, "observed", False)
    mill.events.subscribe(said.append)
    async with at_work():
        await until(lambda: len(noted) == 2)
    assert sorted(job.environment for job in noted) == ["dev", "staging"]
    (down, *_) = [event for event in said if event.name == "environment_down"]
    assert down.fields["environment"] == "prod"
    assert "127.0.0.1" in down.fields["error"]
    assert "secret" not in down.fields["error"]
