"""``on_settled`` where a row ends by other hands than a run's: taken back too often, or canceled by an operator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from databases import Db
from rowmill import Mill, RowmillError
from rowmill.ops.directory import LaneDirectory
from rowmill.ops.row_actions import Operator, Selection
from rowmill.testing import Kit

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


def gone(db: Db, taken_back: Sequence[int], **declared: Any) -> tuple[Mill, list[Any]]:
    """Rows whose holders are gone, each taken back so often before; a hook that counts their ends by name."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table jobs (id integer primary key, name text, status text, worker text, claimed_at {time},"
        " failures integer not null default 0, reclaims integer not null default 0, error text)"
    )
    db.execute("create table ends (job integer primary key, name text not null, outcome text not null)")
    held = {"status": "running", "worker": "gone", "claimed_at": datetime.now(UTC) - timedelta(hours=1)}
    db.insert("jobs", [{"id": n, "name": f"n{n}", "reclaims": so, **held} for n, so in enumerate(taken_back, 1)])
    mill, seen = Mill(db.url), list[Any]()

    async def handle(job: Any) -> None:
        return None

    lane = mill.lane("jobs", name="jobs", max_attempts=1, max_reclaims=3, **(STATES | declared))(handle)

    @lane.on_settled
    async def count(tx: Any, settled: Any) -> None:
        for one in settled:
            seen.append((one.id, one.outcome, one["name"], one.error))
            await tx.execute(
                "insert into ends values (:job, :name, :outcome)",
                {"job": one.id, "name": one["name"], "outcome": one.outcome},
            )

    return mill, seen


def ends(db: Db) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in db.query("select * from ends order by job")]


def states(db: Db) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in db.query("select id, status from jobs order by id")]


async def test_a_row_that_a_sweep_ends_is_told_to_the_hook_in_the_same_transaction(db: Db) -> None:
    """C2, X1: a counter that on_settled keeps is right also when a row's last worker has died."""
    mill, seen = gone(db, [4, 0, 4])
    async with Kit(mill) as kit:
        swept = {row.id: row.poison for row in await kit.sweep()}
    assert swept == {1: True, 2: False, 3: True}
    assert states(db) == [(1, "dead"), (2, "ready"), (3, "dead")]
    assert ends(db) == [(1, "n1", "dead"), (3, "n3", "dead")]
    assert all("taken back too often" in error for *_, error in seen)


async def test_a_sweep_that_takes_nothing_back_for_good_calls_no_hook(db: Db) -> None:
    """A row that goes back has not ended."""
    mill, seen = gone(db, [0, 0])
    async with Kit(mill) as kit:
        assert len(await kit.sweep()) == 2
        assert await kit.sweep() == []
    assert (seen, ends(db)) == ([], [])


async def test_a_hook_that_fails_at_a_sweep_holds_up_neither_its_row_nor_the_others(db: Db) -> None:
    """X1: every row reaches an end; the one that the hook would not have says so, as a run's would."""
    mill, _ = gone(db, [4, 0, 4])
    db.execute("insert into ends values (1, 'in the way', 'done')")
    async with Kit(mill) as kit:
        swept = {row.id: row for row in await kit.sweep()}
        assert await kit.sweep() == []
    assert {id: row.poison for id, row in swept.items()} == {1: True, 2: False, 3: True}
    assert states(db) == [(1, "dead"), (2, "ready"), (3, "dead")]
    assert ends(db) == [(1, "in the way", "done"), (3, "n3", "dead")]
    error = db.value("select error from jobs where id = 1")
    assert "taken back too often" in error
    assert "on_settled failed" in error
    assert "on_settled" not in db.value("select error from jobs where id = 3")


async def test_a_row_that_may_not_go_back_and_so_ends_is_told_to_the_hook(db: Db) -> None:
    """X2: the sweep row by row, where the database refused the whole."""
    mill, seen = gone(db, [0, 0])
    db.execute("create unique index one_waiting on jobs (status) where status = 'ready'")
    db.insert("jobs", [{"id": 9, "name": "n9", "status": "ready"}])
    async with Kit(mill) as kit:
        await kit.sweep()
    assert ends(db) == [(1, "n1", "dead"), (2, "n2", "dead")]
    assert all("would not take it back" in error for *_, error in seen)


async def canceled(mill: Mill, states: tuple[str, ...]) -> list[Any]:
    async with LaneDirectory(mill) as directory:
        view = await directory.view("default", directory.lanes[0].name)
        return [key async for step in Operator(view).cancel(Selection(states), "by hand") for key in step]


@pytest.mark.parametrize("declared", [{}, {"canceled": {"status": "canceled"}}])
async def test_rows_that_an_operator_cancels_are_told_to_the_hook(db: Db, declared: dict[str, Any]) -> None:
    """C2: counters stay right, also where no state says canceled; the holder's own outcome is dropped."""
    mill, seen = gone(db, [0, 0], **declared)
    db.insert("jobs", [{"id": 3, "name": "n3", "status": "ready"}])
    assert await canceled(mill, ("ready", "running")) == [(1,), (2,), (3,)]
    assert ends(db) == [(n, f"n{n}", "canceled") for n in (1, 2, 3)]
    assert {error for *_, error in seen} == {"by hand"}


async def test_rows_whose_hook_fails_are_not_canceled_and_the_operator_is_told_why(db: Db) -> None:
    """Rows and what follows from them are written together, or not at all."""
    mill, _ = gone(db, [0, 0])
    db.execute("insert into ends values (1, 'in the way', 'done')")
    with pytest.raises(RowmillError, match=r"(?s)on_settled of lane 'jobs' failed.*None of these rows was written"):
        await canceled(mill, ("running",))
    assert states(db) == [(1, "running"), (2, "running")]
