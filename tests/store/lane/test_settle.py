"""Settling in batches: one bad, locked or doubtful row does not cost the others anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databases import Db
from rowmill import Busy, Cancel, Claim, Dead, Mill, Retry, Snooze, Unreachable
from rowmill.declare.outcome import Release
from rowmill.engine.execute import decide
from rowmill.store import LaneStore, sqlite_file
from rowmill.store.lane.claim import Report
from rowmill.testing import Kit
from rows import changed, empty, having, whole

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead", "canceled")}


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


@pytest.fixture
def pg(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty PostgreSQL database."""
    return empty(request, tmp_path, "postgresql")


async def never(job: Any) -> None:
    raise AssertionError("no handler runs here: claims are settled by hand")


def mill_of(db: Db, rows: int, columns: str = "note text", **options: Any) -> Mill:
    """A table of ready rows with some columns for handlers to write."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table jobs (id integer primary key, status text not null default 'ready', worker text,"
        f" claimed_at {time}, heartbeat_at {time}, attempts integer not null default 0, run_after {time},"
        f" error text, finished_at {time}, {columns})"
    )
    db.insert("jobs", [{"id": i} for i in range(1, rows + 1)])
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", **STATES | options)(never)
    return mill


async def settle(store: LaneStore, claims: list[Claim], ends: dict[int, Any], otherwise: Any = None) -> Report:
    """Settle claims in one batch, each by its row's own end."""
    return await store.settle([decide(store, claim, ends.get(claim.id, otherwise)) for claim in claims])


def by_status(db: Db) -> dict[str, int]:
    rows = db.query("select status, count(*) as n from jobs group by status")
    return {row["status"]: row["n"] for row in rows}


#: How a column refuses a value: its definition, a value it takes, one it does not, and a word of the refusal.
REFUSALS = {
    "check": ("n integer check (n < 1000)", {"n": 1}, {"n": 1001}, "check|CHECK"),
    "not null": ("n integer not null default 0", {"n": 1}, {"n": None}, "null|NULL"),
    "foreign key": ("n integer references jobs (id)", {"n": 1}, {"n": 99999}, "foreign|FOREIGN"),
}
ONLY_POSTGRESQL = {
    "bad cast": ("n integer", {"n": 1}, {"n": "many"}, "invalid input syntax"),
    "out of range": ("n smallint", {"n": 1}, {"n": 100_000}, "out of range"),
    "enum": ("n mood", {"n": "glad"}, {"n": "angry"}, "invalid input value for enum"),
    "too long": ("n varchar(3)", {"n": "abc"}, {"n": "abcd"}, "too long"),
    "no such day": ("n date", {"n": "2024-02-28"}, {"n": "2024-02-31"}, "out of range"),
    "unsupported": ("n integer[]", {"n": [1]}, {"n": ["one"]}, "invalid input syntax"),
}


async def _one_of_fifty(db: Db, refusal: tuple[str, dict[str, Any], dict[str, Any], str]) -> None:
    columns, good, bad, words = refusal
    mill = mill_of(db, 50, columns)
    async with Kit(mill) as kit:
        store = await kit.store()
        claims = await kit.claim(count=50)
        report = await settle(store, claims, {23: bad}, otherwise=good)
    assert [s.claim.id for s in report.refused] == [23]
    assert len(report.written) == 49
    assert by_status(db) == {"done": 49, "dead": 1}
    row = whole(db, "jobs", 23)
    assert row["status"] == "dead"
    assert "the database refused what the handler returned (n)" in row["error"]
    assert any(word in row["error"] for word in words.split("|")), row["error"]
    assert row["worker"] == "test-worker"
    assert row["finished_at"] is not None


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_one_refused_row_among_fifty_dies_with_the_databases_words(db: Db, refusal: str) -> None:
    """X1; issue, settle: that row's run is settled as failed with the database's reason, the others stand."""
    await _one_of_fifty(db, REFUSALS[refusal])


@pytest.mark.parametrize("refusal", ONLY_POSTGRESQL)
async def test_one_value_of_the_wrong_type_among_fifty_dies_with_the_databases_words(pg: Db, refusal: str) -> None:
    """X1; issue, settle: a value that its column's type refuses."""
    pg.execute("create type mood as enum ('glad', 'sad')")
    await _one_of_fifty(pg, ONLY_POSTGRESQL[refusal])


async def test_of_two_rows_with_one_unique_value_one_is_written_and_one_refused(db: Db) -> None:
    """X1: rows that only refuse each other are told apart too."""
    mill = mill_of(db, 4, "slug text unique")
    async with Kit(mill) as kit:
        store = await kit.store()
        claims = await kit.claim(count=4)
        report = await settle(store, claims, {i: {"slug": "same" if i < 3 else f"own {i}"} for i in range(1, 5)})
    assert (len(report.written), len(report.refused)) == (3, 1)
    assert by_status(db) == {"done": 3, "dead": 1}


async def test_a_state_that_the_table_will_not_take_is_reported_and_nothing_is_written(db: Db) -> None:
    """X1: the outcome is kept to be tried again; the others of the batch are written."""
    mill = mill_of(db, 3, "note text, check (status <> 'dead')")
    async with Kit(mill) as kit:
        store = await kit.store()
        claims = await kit.claim(count=3)
        before = whole(db, "jobs", 2)
        report = await settle(store, claims, {2: Dead("no")})
        assert [(s.claim.id, words.lower()) for s, words in report.stuck] == [(2, having("check"))]
        assert len(report.written) == 2
        assert whole(db, "jobs", 2) == before
        assert await store.still_held([claims[1]]) == [True]


async def test_a_batch_of_all_kinds_and_different_columns_is_written_row_by_row_as_asked(db: Db) -> None:
    """C7: outcomes of one batch do not mix."""
    ends = {
        1: None,
        2: {"note": "two"},
        3: {"note": "three", "error": "half of it"},
        4: Retry("later", after=td(minutes=7)),
        5: Dead("never"),
        6: Cancel("unwanted"),
        7: Snooze(td(minutes=3)),
        8: Release(),
        9: {"note": None},
    }
    mill = mill_of(db, len(ends))
    async with Kit(mill) as kit:
        claims = await kit.claim(count=len(ends))
        report = await settle(await kit.store(), claims, ends)
    assert len(report.written) == len(ends)
    rows = db.query("select * from jobs order by id")
    assert [(r["status"], r["note"], r["error"], r["attempts"]) for r in rows] == [
        ("done", None, None, 1),
        ("done", "two", None, 1),
        ("done", "three", "half of it", 1),
        ("ready", None, "later", 1),
        ("dead", None, "never", 1),
        ("canceled", None, "unwanted", 1),
        ("ready", None, None, 0),
        ("ready", None, None, 0),
        ("done", None, None, 1),
    ]
    assert [r["worker"] for r in rows] == ["test-worker"] * 3 + [None] + ["test-worker"] * 2 + [None] * 2 + [
        "test-worker"
    ]


async def test_an_empty_batch_is_nothing(db: Db) -> None:
    """X4: nothing to write, nothing sent."""
    async with Kit(mill_of(db, 1)) as kit:
        store = await kit.store()
        assert await store.settle([]) == Report()


# -- rows that somebody else has locked


@asynccontextmanager
async def locked(db: Db, key: int, how: str = "for update") -> AsyncIterator[None]:
    """Another connection holds a lock on one row."""
    connection = await asyncpg.connect(db.direct)
    try:
        async with connection.transaction():
            await connection.fetch(f"select 1 from jobs where id = $1 {how}", key)
            yield
    finally:
        await connection.close()


async def test_a_locked_row_is_reported_and_the_others_are_written(pg: Db) -> None:
    """X1; DESIGN, locks: a row that is locked at that moment is tried again, never called lost."""
    async with Kit(mill_of(pg, 5)) as kit:
        store = await kit.store()
        claims = await kit.claim(count=5)
        async with locked(pg, 3):
            report = await settle(store, claims, {}, otherwise={"note": "done"})
            assert [s.claim.id for s in report.locked] == [3]
            assert len(report.written) == 4
            assert not report.lost
        again = await store.settle(report.locked)
    assert [s.claim.id for s in again.written] == [3]
    assert by_status(pg) == {"done": 5}


async def test_one_locked_row_does_not_cost_the_others_their_lease(pg: Db) -> None:
    """X1; issue, leases: a renewal skips locked rows; they still count as held."""
    async with Kit(mill_of(pg, 5)) as kit:
        store = await kit.store()
        claims = await kit.claim(count=5)
        async with locked(pg, 3):
            kit.advance(td(seconds=30))
            before = whole(pg, "jobs", 1)
            renewed = await store.renew(claims)
            assert sorted(claim.id for claim in renewed) == [1, 2, 4, 5]
            assert await store.still_held([claims[2]]) == [True]
        assert changed(before, whole(pg, "jobs", 1)).keys() == {"heartbeat_at"}
        assert [claim.id for claim in await store.renew(claims[2:3])] == [3]


async def test_a_locked_row_is_passed_over_by_the_claim_and_by_the_sweep(pg: Db) -> None:
    """A5, X1: nobody waits for a lock, and one locked row does not keep the others."""
    async with Kit(mill_of(pg, 3)) as kit:
        async with locked(pg, 1):
            assert [c.id for c in await kit.claim(count=3)] == [2, 3]
        kit.advance(td(minutes=6))
        async with locked(pg, 2):
            assert [s.id for s in await kit.sweep()] == [3]
        assert [s.id for s in await kit.sweep()] == [2]


async def test_a_child_row_that_is_being_inserted_does_not_hide_its_parent(pg: Db) -> None:
    """DESIGN, locks: FOR NO KEY UPDATE goes together with a foreign key's own lock."""
    mill = mill_of(pg, 1)
    pg.execute("create table children (job_id integer references jobs (id))")
    async with Kit(mill) as kit:
        connection = await asyncpg.connect(pg.direct)
        try:
            async with connection.transaction():
                await connection.execute("insert into children values (1)")
                (claim,) = await kit.claim()
                assert await (await kit.store()).renew([claim]) == [claim]
                assert (await kit.settle(claim)).written
        finally:
            await connection.close()


async def test_a_database_that_is_busy_has_written_nothing_and_takes_the_batch_later(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: Busy says that nothing was written."""
    monkeypatch.setattr(sqlite_file, "LOCK_WAIT", 0.05)
    async with Kit(mill_of(lite, 2)) as kit:
        store = await kit.store()
        claims = await kit.claim(count=2)
        with lite._sqlite() as other:
            other.execute("begin immediate")
            with pytest.raises(Busy):
                await settle(store, claims, {})
            other.execute("rollback")
        assert by_status(lite) == {"running": 2}
        assert len((await settle(store, claims, {})).written) == 2


# -- outcomes that were sent, and whose reply was lost

ENDS = [None, {"note": "x"}, Retry("later"), Snooze(td(minutes=1)), Dead("no"), Cancel("no"), Release()]


@pytest.mark.parametrize("ended", ENDS, ids=lambda e: type(e).__name__)
async def test_an_outcome_that_stood_already_when_it_was_sent_again_is_not_called_lost(db: Db, ended: Any) -> None:
    """X1, X2: a lost reply to a commit says nothing about the commit; the row is read before it is decided."""
    async with Kit(mill_of(db, 1)) as kit:
        store = await kit.store()
        (claim,) = await kit.claim()
        settlement = decide(store, claim, ended)
        assert (await store.settle([settlement])).written == [settlement]
        before = whole(db, "jobs", 1)
        settlement.reply_lost = True
        report = await store.settle([settlement])
        assert (report.written, report.lost) == ([settlement], [])
        assert whole(db, "jobs", 1) == before


async def test_an_outcome_sent_again_to_a_row_that_others_have_taken_over_is_lost(db: Db) -> None:
    """X1, X2: doubt is no licence to overwrite, nor to take another's outcome for one's own."""
    mill = mill_of(db, 1)
    async with Kit(mill, worker_id="a") as a, Kit(mill, worker_id="b") as b:
        store = await a.store()
        (late,) = await a.claim()
        a.advance(td(minutes=6))
        await b.sweep()
        (claim,) = await b.claim()
        settlement = decide(store, late, None)
        settlement.reply_lost = True
        assert (await store.settle([settlement])).lost
        await b.settle(claim)
        assert (await store.settle([settlement])).lost
        assert whole(db, "jobs", 1)["worker"] == "b"


async def test_a_connection_lost_in_mid_settle_makes_the_whole_batch_doubtful(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: Unreachable is raised, every settlement of the batch is marked, and re-sending settles all exactly once."""
    async with Kit(mill_of(db, 3)) as kit:
        store = await kit.store()
        claims = await kit.claim(count=3)
        batch = [
            decide(store, claims[0], None),
            decide(store, claims[1], {"note": "x"}),
            decide(store, claims[2], None),
        ]
        write, sent = store.database.write, []

        async def breaks(verb: Any) -> Any:
            result = await write(verb)
            sent.append(result)
            raise Unreachable("the reply was lost")

        monkeypatch.setattr(store.database, "write", breaks)
        with pytest.raises(Unreachable):
            await store.settle(batch)
        monkeypatch.undo()
        assert len(sent) == 1
        assert all(settlement.reply_lost for settlement in batch)
        report = await store.settle(batch)
    assert sorted(s.claim.id for s in report.written) == [1, 2, 3]
    assert by_status(db) == {"done": 3}
    assert [r["attempts"] for r in db.query("select attempts from jobs")] == [1, 1, 1]


async def test_claims_and_settlements_of_many_workers_at_once_lose_nothing(db: Db) -> None:
    """X1, X2: four kits claim and settle 200 rows side by side."""
    mill = mill_of(db, 200)

    async def work(name: str) -> int:
        count = 0
        async with Kit(mill, worker_id=name) as kit:
            store = await kit.store()
            while claims := await kit.claim(count=9):
                report = await settle(store, claims, {}, otherwise={"note": name})
                assert not report.lost
                count += len(report.written)
        return count

    counts = await asyncio.gather(*[work(f"w{n}") for n in range(4)])
    counts.append(await work("last"))
    assert sum(counts) == 200
    assert db.query("select 1 from jobs where note <> worker or attempts <> 1 or status <> 'done'") == []
