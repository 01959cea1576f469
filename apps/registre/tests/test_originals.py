"""registre on the tables as they were, beside a worker that claims with the original's own statements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta as td
from pathlib import Path

import pytest

from apps.registre import tables
from apps.registre.lanes import mill
from apps.registre.settings import ENVIRONMENTS
from databases import Db
from rowmill import Job
from rowmill.testing import Kit

from . import originals
from .at_work import at_work, until
from .conftest import Start
from .originals import KINDS, Foreign

LANES = ("extraction", "req", "rdprm")
any_key = pytest.mark.parametrize(
    "db", ["postgresql", "sqlite", "postgresql, numbers", "sqlite, numbers"], indirect=True
)


@pytest.fixture(params=["postgresql", "sqlite"])
def db(request: pytest.FixtureRequest, place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch) -> Db:
    """An environment with the originals' tables."""
    dialect, _, keys = request.param.partition(", ")
    made = fresh(dialect)
    originals.create(made, numbers=keys == "numbers")
    monkeypatch.setenv(ENVIRONMENTS["prod"], made.url)
    return made


def statuses(db: Db, kind: str) -> set[str]:
    return {str(row["status"]) for row in db.query(f"select {_STATUS[kind]} as status from {KINDS[kind].table}")}


_STATUS = {"extraction": "status_id", "req": "status", "rdprm": "status"}
_DONE = {"extraction": "3", "req": "pending_name_selection", "rdprm": "completed"}


@any_key
async def test_the_set_up_adds_what_is_missing_and_changes_nothing(db: Db) -> None:
    """A6: the originals' columns and rows stay as they are; a second time there is nothing to do."""
    ids = {kind: originals.rows(db, kind, 2) for kind in LANES}
    before = {kind: originals.by_id(db, kind, ids[kind]) for kind in LANES}
    added = (await tables.migrate_all(mill))["prod"]
    assert {"column search_sessions.worker_id", "column rdprm_searches.heartbeat_at"} <= set(added)
    for kind in LANES:
        now = originals.by_id(db, kind, ids[kind])
        assert [{name: row[name] for name in old} for old, row in zip(before[kind], now, strict=True)] == before[kind]
    assert (await tables.migrate_all(mill))["prod"] == []


@pytest.mark.parametrize("kind", LANES)
async def test_two_workers_of_different_make_share_the_rows_and_lose_none(db: Db, noted: list[Job], kind: str) -> None:
    """A4, A5, A6, X1: what the other holds is not touched, also at a worker's start; each row is worked on once."""
    await tables.migrate_all(mill)
    ids = originals.rows(db, kind, 30)
    foreign = Foreign(db, KINDS[kind])
    held = [foreign.claim() for _ in range(5)]
    as_claimed = originals.by_id(db, kind, held)
    async with at_work(lanes=[kind]):
        await asyncio.to_thread(foreign.drain, 0.01)
        await until(lambda: len(noted) + len(foreign.finished) == 25)
        assert originals.by_id(db, kind, held) == as_claimed
        for id in held:
            foreign.finish(id)
        await until(lambda: statuses(db, kind) == {_DONE[kind]})
    assert noted
    ours = [str(job.id) for job in noted]
    assert sorted(ours + foreign.finished) == sorted(map(str, ids))


@pytest.mark.parametrize("kind", LANES)
async def test_a_row_of_a_foreign_worker_that_died_is_worked_on_in_the_end(
    db: Db, noted: list[Job], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12, X2: after five minutes without a sign of life, though its claim may show neither holder nor time."""
    monkeypatch.setattr(mill.clock, "shift", td(0))
    await tables.migrate_all(mill)
    (id,) = originals.rows(db, kind, 1)
    assert Foreign(db, KINDS[kind]).claim() == id
    async with Kit(mill) as kit:
        assert await kit.sweep(kind) == []
        kit.advance(td(minutes=4))
        assert await kit.sweep(kind) == []
        kit.advance(td(minutes=2))
        assert [swept.poison for swept in await kit.sweep(kind)] == [False]
        assert (await kit.step(kind)).outcome == "done"
    assert statuses(db, kind) == {_DONE[kind]}


async def test_a_row_that_the_originals_reset_takes_from_rowmill_has_one_outcome(db: Db, noted: list[Job]) -> None:
    """A12, X1: the original looks at the start alone; its reset leaves young rows, and of an old one the new holder's
    outcome stands.
    """
    await tables.migrate_all(mill)
    young, old = originals.rows(db, "extraction", 2)
    foreign = Foreign(db, KINDS["extraction"])
    async with Kit(mill) as kit:
        claims = {claim.id: claim for claim in await kit.claim("extraction", 2)}
        foreign.reset_stuck(5)
        assert foreign.claim() is None
        past = "now() - interval '6 minutes'" if db.dialect == "postgresql" else "datetime('now', '-6 minutes')"
        db.execute(f"update extraction_queue set processing_started_at = {past} where id = ?", old)
        foreign.reset_stuck(5)
        assert foreign.claim() == old
        assert (await kit.run(claims[young])).outcome == "done"
        assert (await kit.run(claims[old])).outcome == "lost"
        row = db.one("select * from extraction_queue where id = ?", old)
        assert (row["status_id"], row["worker_id"]) == (2, "theirs")
        foreign.finish(old)
    assert statuses(db, "extraction") == {"3"}


async def test_the_originals_own_questions_are_answered_rightly(db: Db, noted: list[Job]) -> None:
    """A11, A14: who works on how many, and how many rows are in each state, with both at work."""
    await tables.migrate_all(mill)
    originals.rows(db, "extraction", 6)
    foreign = Foreign(db, KINDS["extraction"])
    ids = [foreign.claim() for _ in range(2)]
    foreign.finish(ids[0])
    async with Kit(mill, worker_id="ours") as kit:
        claims = await kit.claim("extraction", 3)
        await kit.run(claims[0])
        active = "select worker_id, count(*) as n from extraction_queue where status_id = 2 group by 1 order by 1"
        assert [tuple(row.values()) for row in db.query(active)] == [("ours", 2), ("theirs", 1)]
        counts = "select status_id, count(*) as n from extraction_queue group by 1 order by 1"
        assert [tuple(row.values()) for row in db.query(counts)] == [(1, 1), (2, 3), (3, 2)]


@pytest.mark.parametrize("db", ["postgresql", "sqlite, numbers"], indirect=True)
async def test_rows_are_worked_on_with_a_real_browser(start: Start, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """A8, A9, A10: what the handlers read and write fits the originals' tables, as the set-up leaves them."""
    kit, _ = await start()
    await tables.migrate_all(mill)
    for kind in LANES:
        originals.rows(db, kind, 1)
    assert [(await kit.step(kind)).outcome for kind in LANES] == ["done"] * 3
    assert db.value("select count(*) from companies") > 0
    assert db.value("select count(*) from inscriptions") > 0


async def test_a_table_that_does_not_say_what_to_search_for_refuses_its_rows_one_by_one(db: Db, start: Start) -> None:
    """A8, A9, A10: the set-up adds the column that lacks; it is empty in the rows that were there."""
    for kind, column in (("extraction", "document_number"), ("req", "company_name"), ("rdprm", "search_name")):
        originals.rows(db, kind, 1)
        db.execute(f"alter table {KINDS[kind].table} drop column {column}")
    kit, _ = await start()
    await tables.migrate_all(mill)
    for kind, column in (("extraction", "document_number"), ("req", "company_name"), ("rdprm", "search_name")):
        stepped = await kit.step(kind)
        assert stepped is not None
        assert stepped.outcome == "dead"
        assert f"the row has no {column}, so there is nothing to search for" in (stepped.error or "")
