"""Workers in orders that a seed decides: nothing is broken; and what is broken is found, and found again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import shapes
from databases import Db
from interleaving import prepared
from rowmill.declare.lane import declare
from rowmill.prove import worker_script
from rowmill.prove.fake_handler import nothing
from rowmill.prove.interleave import Interleaver
from rowmill.prove.sample_rows import SampleRows
from rowmill.prove.schedules import Actor
from rowmill.prove.stepped_sqlite import SteppedSqlite
from rowmill.store import LaneStore
from rowmill.store.gates import locking_claim
from rowmill.store.gates.claim_by_key_sql import ClaimByKeyStatements
from rowmill.store.lane.claim import Swept
from rowmill.store.lane.postgres import PostgresLane
from rowmill.store.lane.postgres_statements import PostgresStatements
from rowmill.store.lane.sqlite import SqliteLane
from rowmill.store.lane.statements import Statements

pytestmark = pytest.mark.no_pooler("schedules stop each statement on a session of their own")
#: Seconds for one shape on one database; the long form is ``make interleave``.
SECONDS = 1.0


@pytest.mark.parametrize("shape", list(shapes.SHAPES))
async def test_no_order_of_statements_loses_or_doubles_a_row(db: Db, shape: str) -> None:
    """X1: a fixed seed's schedules, and others from a seed that is printed."""
    start = random.randrange(10**9)
    print(f"seeds from 1 and from {start}: make interleave ARGS='--dialect {db.dialect} --shape {shape} --seed ...'")
    lane, edited = shapes.SHAPES[shape](), shapes.EDITED.get(shape)
    async with Interleaver(lane, prepared(db), edited=edited) as interleaver:
        for first in (1, start):
            tried = await interleaver.try_seeds(range(first, first + 300), seconds=SECONDS / 2)
            assert tried.broken is None, tried.broken
    assert tried.schedules >= 2
    assert tried.claims
    assert tried.outcomes


@pytest.mark.parametrize("shape", ["gated", "turned", "tasks"])
async def test_a_seed_gives_the_same_schedule_again(db: Db, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: a failing schedule can be replayed: the same steps in the same order, with locks waited for or not; also on
    a machine that is slower.
    """
    async with Interleaver(shapes.SHAPES[shape](), prepared(db)) as interleaver:
        chances = random.getstate()
        first = [(await interleaver.run(seed)).steps for seed in range(40, 42)]
        assert random.getstate() == chances, "what others leave to chance is left to it"
    begin = SteppedSqlite._begin

    async def slowly(self: SteppedSqlite) -> None:
        await begin(self)
        time.sleep(0.003)  # noqa: ASYNC251

    monkeypatch.setattr(SteppedSqlite, "_begin", slowly)
    async with Interleaver(shapes.SHAPES[shape](), db.url) as interleaver:
        again = [(await interleaver.run(seed)).steps for seed in range(40, 42)]
    assert first == again


async def test_no_two_statements_read_the_same_time_on_sqlite(lite: Db) -> None:
    """Not even where the machine was slow between the wait for a new millisecond and the look at the clock."""
    database = SteppedSqlite(lite.url, Actor("w1"))
    await database.connect()
    database._open.create_function("late", 0, lambda: time.sleep(0.0011))
    texts = ["select late(), strftime('%s %f', 'now')", "select 0, strftime('%s %f', 'now')"] * 20
    read = [(await database._run(text, ()))[0][1] for text in texts]
    await database.close()
    assert len(set(read)) == len(read)


async def caught(db: Db, shape: str, said: str, most: int = 400, repeat: bool = True, **options: Any) -> None:
    """Some schedule is broken in these words; by its seed it is broken again, step by step."""
    lane: Callable[[], Any] = shapes.SHAPES[shape]
    async with Interleaver(lane(), prepared(db), **options) as interleaver:
        broken = (await interleaver.try_seeds(range(1, most))).broken
    assert broken is not None, f"no schedule of {most} is broken"
    assert said in str(broken.broken)
    if not repeat:
        return
    async with Interleaver(lane(), db.url, **options) as interleaver:
        again = await interleaver.run(broken.seed)
    assert (again.broken, again.steps) == (broken.broken, broken.steps)


@pytest.mark.parametrize("shape", ["plain", "tasks"])
async def test_an_engine_without_its_fence_is_caught(db: Db, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: where worker, time and count are not asked for, a late outcome is written over somebody else's claim."""
    whole = Statements.fence

    def careless(self: Statements, row: str, *values: str) -> str:
        return f"{self.running(f'{row}.')} and ({whole(self, row, *values)} or true)"

    monkeypatch.setattr(Statements, "fence", careless)
    await caught(db, shape, "without its claim")


async def test_a_sweep_that_does_not_look_again_is_caught_on_postgresql(
    pg: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1, A12: a row that was settled while the sweep waited for it would be taken back."""
    whole = PostgresStatements.sweep

    def careless(self: PostgresStatements, lease: timedelta) -> str:
        text = whole(self, lease).replace("\n  for no key update skip locked", "")
        return text.replace("t.ctid = held._row", "t.id = held._k0")

    monkeypatch.setattr(PostgresStatements, "sweep", careless)
    await caught(pg, "plain", "sweep: ")


async def test_a_sweep_that_does_not_look_again_is_caught_on_sqlite(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1, A12: the rows of an earlier look, written without a second one."""

    async def careless(self: SqliteLane, lease: timedelta, most: int = 1000) -> list[Swept]:
        rows = await self.database.read(lambda run: run(self.statements.find_stale(lease), {"most": most}))
        text = self.statements.sweep(poison=False).replace(f" and {self.statements.running()}", "")
        for _, _, key in rows:
            await self.database.write(lambda run, key=key: run(text, {"_k0": key}))
        return []

    monkeypatch.setattr(SqliteLane, "sweep", careless)
    await caught(lite, "plain", "sweep: ")


@pytest.mark.parametrize("careless", ["claim", "expire"])
async def test_an_expired_row_that_is_claimed_and_one_that_ends_too_early_are_caught(
    db: Db, monkeypatch: pytest.MonkeyPatch, careless: str
) -> None:
    """Issue 23: a row past its time is never started, and one before it does not end."""
    if careless == "claim":
        whole = Statements.ready_parts
        monkeypatch.setattr(
            Statements, "ready_parts", lambda self: {k: v for k, v in whole(self).items() if k != "expires_at"}
        )
        await caught(db, "chunked", "claimed after it expired")
    else:
        monkeypatch.setattr(Statements, "expired", lambda self: f"{self.ready_state()} and expires_at is not null")
        await caught(db, "chunked", "before it expired")


async def test_a_lane_whose_rows_grow_too_old_is_proved(db: Db) -> None:
    """``expires_after``: rows that are made now, and end when they are old."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table aged (id integer primary key, status text, worker text, claimed_at {time}, created_at {time})"
    )
    options = {**shapes._STATES, "ready": {"status": "new"}, "retry": None, "max_attempts": 1, "name": "aged"}
    lane = declare("aged", nothing, {**options, "expires_after": timedelta(days=2)})
    async with Interleaver(lane, db.url) as interleaver:
        tried = await interleaver.try_seeds(range(1, 60), seconds=SECONDS)
        assert tried.broken is None, tried.broken
        assert interleaver.watch.expired


async def test_an_outcome_that_is_not_compared_with_the_inputs_is_caught(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 23: an edit between claim and settlement, and the row would be done with what it held before."""
    store = PostgresLane if db.dialect == "postgresql" else SqliteLane
    whole: Any = store.settling

    def careless(self: Any, group: Any, *, compare: bool = True) -> Any:
        return whole(self, group, compare=False)

    monkeypatch.setattr(store, "settling", careless)
    await caught(db, "inputs", "for inputs", edited="body")


VERSION = " and _g.version = _i.version[_s._rm_range]"


@pytest.mark.parametrize(
    "removed",
    [VERSION, f"{VERSION}\n    for no key update skip locked"],
    ids=["version", "lock"],
)
async def test_a_gate_without_its_version_or_its_lock_is_caught_on_postgresql(
    pg: Db, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    """C8: a claim that counted before another one took, or while it did, would take, too."""
    whole = ClaimByKeyStatements.claim

    def careless(self: ClaimByKeyStatements, **options: Any) -> str:
        text = whole(self, **options)
        assert removed in text
        return text.replace(removed, "")

    monkeypatch.setattr(ClaimByKeyStatements, "claim", careless)
    # Without "skip locked" several claims wait for one row, and the server chooses which of them goes on first.
    repeat = "skip locked" not in removed
    await caught(pg, "turned", "its limit is 1", made=SampleRows(keys=1), faults=False, repeat=repeat)


async def test_a_gate_that_does_not_count_is_caught_on_sqlite(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: there one writer at a time is the lock; what it counts is the gate."""
    monkeypatch.setattr(locking_claim._Claim, "_running", lambda *_: {})
    await caught(lite, "gated", "its limit is 1")


async def test_a_worker_that_is_presumed_dead_and_lives_breaks_nothing(pg: Db) -> None:
    """X1: its rows are taken over while it works on them; it settles, renews, and is heard of again."""
    async with Interleaver(shapes.SHAPES["plain"](), prepared(pg)) as interleaver:
        tried = await interleaver.try_seeds(range(1, 60))
        assert tried.broken is None
        assert interleaver.watch.taken_from_presumed > 0


async def test_a_take_over_from_a_living_worker_is_caught(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: the word of a death comes late, and the id is a successor's: its rows are not to be given back."""
    whole = worker_script.take_over

    async def careless(store: LaneStore, id: str, incarnation: str, started: Any) -> Any:
        return await whole(store, id, incarnation, started, succeeds=True)

    monkeypatch.setattr(worker_script, "take_over", careless)
    await caught(pg, "plain", "taken from a live worker")


async def test_waiting_rows_are_ended_at_their_time_and_not_before(db: Db) -> None:
    """Issue 23: whatever the order of looks, claims, deaths and lost replies."""
    async with Interleaver(shapes.SHAPES["plain"](), prepared(db)) as interleaver:
        tried = await interleaver.try_seeds(range(1, 80))
        assert tried.broken is None, tried.broken
        assert interleaver.watch.timed_out > 0


async def test_a_wait_that_holds_nothing_back_is_caught(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 23: a waiting row whose due time does not lie ahead would be claimed at once."""
    whole = Statements.settle_wait_set

    def careless(self: Statements, until: str, delay: str, same_key: str) -> dict[str, str]:
        column = self.roles["run_after"]
        return {**whole(self, until, delay, same_key), column: self.now(column)}

    monkeypatch.setattr(Statements, "settle_wait_set", careless)
    await caught(db, "plain", "claimed while the condition it waits for")
