"""Expiry: a row past its time is never started; it ends as canceled, or in the lane's own state for it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from rowmill.errors import DeclarationError
from rowmill.testing import Kit

STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
ENDS = {**STATES, "canceled": {"status": "canceled"}}
REASON = "expired: it was not started in time"


async def handle(job: Any) -> None:
    return None


def make(db: Db, *rows: tuple[int, float | None, float], more: str = "") -> None:
    """Rows that expire so many seconds from now (None: never by themselves), made so many seconds ago."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table jobs (id integer primary key, status text not null default 'ready', worker text,"
        f" claimed_at {time}, run_after {time}, attempts integer default 0, last_error text, finished_at {time},"
        f" valid_until {time}, created_at {time}{more})"
    )
    now = datetime.now(UTC)
    for id, left, age in rows:
        valid = None if left is None else now + td(seconds=left)
        db.execute("insert into jobs (id, valid_until, created_at) values (?, ?, ?)", id, valid, now - td(seconds=age))


def states(db: Db) -> dict[int, str]:
    return {row["id"]: row["status"] for row in db.query("select id, status from jobs order by id")}


async def test_a_row_past_its_time_is_not_claimed_and_is_canceled_with_the_reason(db: Db, mill: Mill) -> None:
    make(db, (1, -5, 0), (2, 3600, 0), (3, None, 0))
    mill.lane("jobs", name="jobs", roles={"expires_at": "valid_until"}, **ENDS)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        claims = await store.claim(10)
        assert [claim.id for claim in claims] == [2, 3]
        assert await kit.expire() == [1]
        assert await kit.expire() == []
    assert states(db) == {1: "canceled", 2: "running", 3: "running"}
    row = db.one("select * from jobs where id = 1")
    assert (row["last_error"], row["attempts"], row["finished_at"] is not None) == (REASON, 0, True)


async def test_a_running_row_is_not_affected(db: Db, mill: Mill) -> None:
    make(db, (1, 60, 0))
    mill.lane("jobs", name="jobs", roles={"expires_at": "valid_until"}, **ENDS)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        (claim,) = await store.claim(1)
        mill.clock.shift = td(seconds=120)
        assert await kit.expire() == []
        assert await store.still_held([claim]) == [True]


async def test_a_row_that_waits_for_its_time_or_its_retry_expires_too(db: Db, mill: Mill) -> None:
    make(db, (1, -5, 0))
    db.execute("update jobs set run_after = ?", datetime.now(UTC) + td(hours=1))
    mill.lane("jobs", name="jobs", roles={"expires_at": "valid_until"}, **ENDS)(handle)
    async with Kit(mill) as kit:
        assert await kit.expire() == [1]


async def test_expires_after_goes_by_the_age_and_the_rows_own_time_goes_before_it(db: Db, mill: Mill) -> None:
    make(db, (1, None, 7200), (2, None, 10), (3, 600, 7200), (4, -1, 10))
    mill.lane(
        "jobs", name="jobs", roles={"expires_at": "valid_until"}, expires_after=td(hours=1), **ENDS,
        expired={"status": "late"},
    )(handle)  # fmt: skip
    async with Kit(mill) as kit:
        assert sorted(await kit.expire()) == [1, 4]
        claims = await (await kit.store()).claim(10)
    assert sorted(claim.id for claim in claims) == [2, 3]
    assert {id: state for id, state in states(db).items() if state == "late"} == {1: "late", 4: "late"}


async def test_rows_that_where_excludes_are_left_alone(db: Db, mill: Mill) -> None:
    make(db, (1, None, 7200), (2, None, 7200))
    mill.lane("jobs", name="jobs", where="id > 1", expires_after=td(hours=1), **ENDS)(handle)
    async with Kit(mill) as kit:
        assert await kit.expire() == [2]


async def test_it_ends_at_most_so_many_rows_at_a_time(db: Db, mill: Mill) -> None:
    make(db, *((n, -1, 0) for n in range(1, 8)))
    mill.lane("jobs", name="jobs", roles={"expires_at": "valid_until"}, **ENDS)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        assert [len(await store.expire(3)) for _ in range(4)] == [3, 3, 1, 0]


async def test_a_column_called_expires_at_has_no_role_unless_the_lane_says_so(db: Db, mill: Mill) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    make(db, (1, None, 0), more=f", expires_at {time}")
    db.execute("update jobs set expires_at = created_at")
    mill.lane("jobs", name="jobs", **ENDS)(handle)
    async with Kit(mill) as kit:
        assert await kit.expire() == []
        assert [claim.id for claim in await (await kit.store()).claim(5)] == [1]


async def test_the_hook_hears_of_expired_rows_in_the_same_transaction(db: Db, mill: Mill) -> None:
    make(db, (1, -5, 0), (2, -5, 0))
    lane = mill.lane("jobs", name="jobs", roles={"expires_at": "valid_until"}, **ENDS)(handle)
    heard: list[Any] = []

    @lane.on_settled
    async def hook(tx: Any, settled: Any) -> None:
        heard.extend((row.id, row.outcome, row.error) for row in settled)

    async with Kit(mill) as kit:
        await kit.expire()
    assert sorted(heard) == [(1, "canceled", REASON), (2, "canceled", REASON)]


async def test_a_row_that_may_not_end_holds_no_other_up(db: Db, mill: Mill) -> None:
    make(db, (1, -5, 0), (2, -5, 0), more=", check (id <> 1 or status <> 'canceled')")
    mill.lane("jobs", name="jobs", roles={"expires_at": "valid_until"}, **ENDS)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        rows = {row.id: row.refused for row in await store.expire()}
    assert rows[2] is None
    assert rows[1] is not None
    assert states(db) == {1: "ready", 2: "canceled"}


async def test_a_worker_expires_rows_counts_them_and_tells(db: Db, mill: Mill) -> None:
    make(db, (1, -5, 0), (2, -5, 0), (3, 3600, 0))
    mill.lane("jobs", name="jobs", roles={"expires_at": "valid_until"}, **ENDS)(handle)
    told: list[dict[str, Any]] = []
    mill.on_event(lambda event: told.append(event.fields) if event.name == "rows_expired" else None)
    async with Kit(mill) as kit:
        counters = await kit.drain()
    assert states(db) == {1: "canceled", 2: "canceled", 3: "done"}
    assert (counters.completed, counters.canceled) == (1, 2)
    assert [(event["expired_count"], sorted(event["ids"])) for event in told] == [(2, [1, 2])]


async def test_claims_and_expiry_at_the_same_time_never_touch_one_row(db: Db, mill: Mill) -> None:
    """Rows expire under workers that claim: each row is run or canceled, never both."""
    make(db, *((n, 0.3 if n % 2 else 3600, 0) for n in range(1, 201)))
    mill.lane("jobs", name="jobs", roles={"expires_at": "valid_until"}, **ENDS)(handle)
    taken: list[int] = []
    async with Kit(mill) as kit:
        store = await kit.store()

        async def claims() -> None:
            for _ in range(60):
                taken.extend(claim.id for claim in await store.claim(1))

        async def expires() -> list[Any]:
            return [row.id for _ in range(60) for row in await store.expire(2)]

        _, expired = await asyncio.gather(claims(), expires())
    assert len(set(taken)) == len(taken)
    assert not set(taken) & set(expired)
    assert {id for id, state in states(db).items() if state == "canceled"} == set(expired)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expires_after": td(hours=1)}, "no state says what an expired row looks like"),
        ({"roles": {"expires_at": "valid_until"}}, "no state says what an expired row looks like"),
        ({"expired": {"status": "late"}}, "nothing says when a row expires"),
        ({"expires_after": td(hours=1), "expired": {"status": "ready"}}, "would be ready again"),
        ({"expires_after": td(0), "canceled": {"status": "canceled"}}, "positive timedelta"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(mill: Mill, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        mill.lane("jobs", name="jobs", **{**STATES, **options})(handle)


async def test_expires_after_needs_the_time_at_which_a_row_was_made(db: Db, mill: Mill) -> None:
    db.execute("create table jobs (id integer primary key, status text, worker text)")
    mill.lane("jobs", name="jobs", expires_after=td(hours=1), **ENDS)(handle)
    async with Kit(mill) as kit:
        with pytest.raises(DeclarationError, match="a column that says when a row was made"):
            await kit.store()
