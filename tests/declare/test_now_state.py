"""NOW: a state that is a time which is set or not."""

from __future__ import annotations

from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import NOW, Dead, DeclarationError, Mill, fixed
from rowmill.testing import Kit

STATES: dict[str, Any] = {
    "ready": {"paid_at": NOW, "shipped_at": None, "failed_at": None, "locked_at": None},
    "running": {"locked_at": NOW},
    "done": {"shipped_at": NOW},
    "dead": {"failed_at": NOW},
}


def create(db: Db) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table orders (id integer primary key, paid_at {time}, shipped_at {time}, failed_at {time},"
        f" locked_at {time}, attempts integer not null default 0, note text);"
        "insert into orders (id, paid_at) values (1, '2024-01-01 00:00:00'), (2, '2024-01-01 00:00:00'), (3, null)"
    )


async def test_times_are_states_from_the_claim_to_the_end(db: Db) -> None:
    create(db)
    mill = Mill(db.url)

    @mill.lane("orders", **STATES, max_attempts=2, backoff=fixed(td(seconds=1)))
    async def ship(job: Any) -> None:
        if job.id == 2:
            raise Dead("no address")
        if job.attempt == 1:
            raise ValueError("once")

    async with Kit(mill) as kit:
        assert (await kit.step("ship")).outcome == "retry"  # type: ignore[union-attr]
        row = db.one("select * from orders where id = 1")
        assert row["locked_at"] is None
        assert row["shipped_at"] is None
        assert str(row["paid_at"]).startswith("2024-01-01"), "a time that says ready is never written"
        await kit.drain("ship")
    done = db.query("select id, shipped_at is not null as s, failed_at is not null as f from orders order by id")
    assert [(row["id"], bool(row["s"]), bool(row["f"])) for row in done] == [
        (1, True, False), (2, False, True), (3, False, False),
    ]  # fmt: skip


async def test_a_row_whose_holder_is_gone_comes_back(db: Db) -> None:
    create(db)
    mill = Mill(db.url)

    @mill.lane("orders", **STATES, lease=td(minutes=1))
    async def ship(job: Any) -> None: ...

    async with Kit(mill) as kit:
        (claim,) = await kit.claim("ship", 1)
        kit.advance(td(minutes=2))
        assert await kit.sweep("ship")
        assert db.one("select locked_at from orders where id = 1")["locked_at"] is None
        assert not (await kit.settle(claim)).written, "the claim's time is the fence"


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"ready": {"locked_at": [None, NOW]}}, "NOW cannot be in a list"),
        (
            {"ready": {**STATES["ready"], "locked_at": NOW}, "running": {"locked_at": None}},
            "could not get its old time again",
        ),
    ],
)
def test_what_now_cannot_mean_is_refused(states: dict[str, Any], said: str) -> None:
    mill = Mill("sqlite:///x.db")
    with pytest.raises(DeclarationError, match=said):
        mill.lane("orders", **{**STATES, **states})(lambda job: None)


async def test_now_needs_a_column_that_holds_a_time(pg: Db) -> None:
    create(pg)
    mill = Mill(pg.url)
    mill.lane("orders", name="x", **{**STATES, "done": {"shipped_at": NOW, "note": NOW}})(lambda job: None)
    async with Kit(mill) as kit:
        with pytest.raises(DeclarationError, match="holds no time"):
            await kit.step("x")


async def test_an_unfenced_lane_uses_what_fence_there_is(db: Db) -> None:
    """So that a file written for a bare table is safe once migrate has added the columns."""
    create(db)
    mill = Mill(db.url)
    mill.lane("orders", name="x", unfenced=True, lease=td(minutes=1), **STATES)(lambda job: None)
    async with Kit(mill) as kit:
        (late,) = await kit.claim("x", 1)
        kit.advance(td(minutes=2))
        assert await kit.sweep("x")
        assert await kit.claim("x", 1)
        assert not (await kit.settle(late)).written
