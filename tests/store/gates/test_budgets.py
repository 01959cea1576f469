"""Budgets: what runs may use up together, and never more."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta as td
from typing import Any

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gated
from databases import Db
from rowmill import DeclarationError, Event, Mill, domain
from rowmill.clock import Clock
from rowmill.declare.budget import Limit
from rowmill.store import Database
from rowmill.store.gates.budgets import take
from rowmill.store.gates.rules import Window
from rowmill.store.own import schema
from rowmill.testing import Kit
from waiting import eventually


async def test_what_does_not_fit_in_the_period_waits_without_costing_an_attempt(db: Db) -> None:
    gated.make(db)
    gated.fill(db, ["a", "b", "c"])
    mill = Mill(db.url)
    mill.budget("model", tokens=[(1000, td(minutes=1)), (2500, td(days=1))])

    async def ask(job: Any) -> None:
        await job.spend("model", tokens=1000, wait=td(0))

    gated.lane(mill, ask)
    async with Kit(mill) as kit:
        assert (await kit.step()).outcome == "done"  # type: ignore[union-attr]
        stepped = await kit.step()
        assert stepped is not None
        assert stepped.outcome == "snooze"
        row = db.one("select * from pages where id = 2")
        assert (row["status"], row["attempts"]) == ("queued", 0)
        kit.advance(td(seconds=62))
        assert [s.outcome for _ in range(2) if (s := await kit.step())] == ["done", "snooze"]
        kit.advance(td(seconds=62))
        assert await kit.step() is None  # the minute would allow it, the day does not
        kit.advance(td(hours=25))
        assert (await kit.step()).outcome == "done"  # type: ignore[union-attr]


async def test_many_that_spend_at_once_never_spend_more_than_there_is(db: Db) -> None:
    gated.make(db)
    gated.fill(db, ["a"] * 40)
    mill = Mill(db.url)
    mill.budget("model", tokens=(100, td(hours=1)), money=(5.0, td(hours=1)))
    spent: list[int] = []

    async def ask(job: Any) -> None:
        amount = random.randint(1, 30)
        await job.spend("model", tokens=amount, money=0.01, wait=td(0))
        spent.append(amount)

    gated.lane(mill, ask, concurrency=20)
    worker = mill.worker()
    ended: list[str] = []

    @mill.on_event
    def count(event: Event) -> None:
        if event.name == "job_settled":
            ended.append(event.fields["outcome"])
            if len(ended) == 40:
                worker.stop()

    await asyncio.wait_for(worker.run(), 60)
    assert set(ended) == {"done", "snooze"}
    assert 70 < sum(spent) <= 100
    assert db.value("select count(*) from pages where attempts > 1") == 0


async def test_what_is_given_back_makes_room_once_and_not_again_when_the_period_is_over(db: Db) -> None:
    """A run takes an estimate and gives back what it did not use: room now, and no more than the limit later."""
    gated.make(db)
    gated.fill(db, ["a"] * 4)
    mill = Mill(db.url)
    mill.budget("model", tokens=(1000, td(minutes=1)))

    async def ask(job: Any) -> None:
        if job.id == 1:
            await job.spend("model", tokens=1000, wait=td(0))
            kit.advance(td(seconds=30))
            await job.spend("model", tokens=-900)
            await job.spend("model", tokens=-900)  # more than was taken: only what is left of it
            await job.spend("model", tokens=100, wait=td(0))
        else:
            await job.spend("model", tokens=900 if job.id == 2 else 1, wait=td(0))

    gated.lane(mill, ask)
    async with Kit(mill) as kit:
        assert (await kit.step()).outcome == "done"  # type: ignore[union-attr]
        assert (await kit.step()).outcome == "done"  # type: ignore[union-attr]
        kit.advance(td(seconds=32))  # the first taking is out of the window; 100 and 900 are in it
        stepped = await kit.step()
        assert stepped is not None
        assert stepped.outcome == "snooze"


async def test_what_was_used_in_the_end_counts_from_the_end(db: Db) -> None:
    """A call's price is known, and the other side may count it, only when it is over: in place of what was taken."""
    gated.make(db)
    gated.fill(db, ["a", "b", "c", "d"])
    mill = Mill(db.url)
    mill.budget("model", tokens=(1000, td(minutes=1)))
    used = iter([300, 900, 5000, 10])

    async def ask(job: Any) -> None:
        await job.spend("model", tokens=600, wait=td(0))
        kit.advance(td(seconds=40))  # so long the call takes
        await job.spend("model", tokens=next(used), instead=True)

    gated.lane(mill, ask)
    async with Kit(mill) as kit:

        async def outcome() -> str:
            stepped = await kit.step()
            assert stepped is not None, "nothing was ready"
            return stepped.outcome

        assert await outcome() == "done"  # 300, since 40 s
        kit.advance(td(seconds=22))  # 62 s after 600 were taken, 22 after 300 were used
        assert await outcome() == "done"  # 300 + 600 fit; then 300 + 900 is more than there is, and counts
        kit.advance(td(seconds=1))
        assert await outcome() == "snooze"
        kit.advance(td(seconds=62))
        assert await outcome() == "done"  # more than the whole budget was used: nothing is to be had for a while
        assert await outcome() == "snooze"
        kit.advance(td(seconds=62))
        assert await outcome() == "done"


async def test_the_first_to_spend_may_come_together(db: Db) -> None:
    """The rows of a budget are made by the first run; the others find them."""
    databases = [Database.open(db.url) for _ in range(8)]
    await schema.ensure(databases[0])
    for n in range(10):
        asked = [(Limit("tokens", 5, 60.0), 1.0), (Limit("money", 100, 60.0), 1.0)]
        waits = await asyncio.gather(*(take(database, Clock(), f"budget {n}", asked) for database in databases))
        assert sorted(taken.wait > 0 for taken in waits) == [False] * 5 + [True] * 3
    for database in databases:
        await database.close()


def test_a_handler_in_a_thread_spends_too(lite: Db) -> None:
    gated.make(lite)
    gated.fill(lite, ["a"])
    mill = Mill(lite.url)
    mill.budget("model", tokens=(100, td(hours=1)))
    gated.lane(mill, lambda job: job.spend("model", tokens=7))
    mill.run(drain=True)
    assert lite.value("select cells from rowmill_gates where dim = 'budget:model'").endswith(": 7.0}")


async def test_what_can_never_be_had_is_told_at_once(lite: Db) -> None:
    gated.make(lite)
    gated.fill(lite, ["a", "b", "c"])
    mill = Mill(lite.url)
    mill.budget("model", tokens=(100, td(hours=1)))
    asked = iter([("model", {"tokens": 101}), ("modle", {"tokens": 1}), ("model", {"token": 1})])

    async def ask(job: Any) -> None:
        name, amounts = next(asked)
        await job.spend(name, **amounts)

    gated.lane(mill, ask, max_attempts=1)
    async with Kit(mill) as kit:
        errors = [(await kit.step()).error for _ in range(3)]  # type: ignore[union-attr]
    assert "can never be spent" in str(errors[0])
    assert "there is no budget 'modle'" in str(errors[1])
    assert "no unit 'token'" in str(errors[2])


@pytest.mark.parametrize("units", [{}, {"tokens": 5}, {"tokens": (0, td(1))}, {"tokens": [(5, 60)]}])
def test_a_budget_that_makes_no_sense_is_refused(units: Any) -> None:
    with pytest.raises(DeclarationError):
        Mill("sqlite:///x.db").budget("model", **units)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5)), max_size=60))
def test_no_window_ever_holds_more_than_its_limit(steps: list[tuple[float, int]]) -> None:
    now, text, taken = 1_000_000.0, None, []
    for pause, amount in steps:
        now += pause
        window = Window.read(10.0, text, now)
        if window.wait(amount, 7, now) == 0:
            window.add(amount, now)
            taken.append((now, amount))
            text = window.text()
    for start, _ in taken:
        assert sum(amount for at, amount in taken if start <= at < start + 10) <= 7


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5)), min_size=1, max_size=30), st.integers(1, 5))
def test_after_the_wait_it_can_be_had(steps: list[tuple[float, int]], amount: int) -> None:
    now, window = 1_000_000.0, Window(10.0)
    for pause, used in steps:
        now += pause
        window = Window.read(10.0, window.text(), now)
        if window.wait(used, 7, now) == 0:
            window.add(used, now)
    later = now + window.wait(amount, 7, now)
    assert later - now <= 10.2
    assert Window.read(10.0, window.text(), later + 1e-6).wait(amount, 7, later + 1e-6) == 0


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://shop.example.co.uk/a?b=c#d", "example.co.uk"),
        ("HTTP://WWW.Example.COM:8080/", "example.com"),
        ("example.com/path", "example.com"),
        ("https://me.github.io/", "me.github.io"),
        ("https://bücher.example/", "xn--bcher-kva.example"),
        ("http://127.0.0.1:5000/", "127.0.0.1"),
        ("http://[::1]:5000/", "::1"),
        ("http://localhost/", "localhost"),
        ("https://example.com./", "example.com"),
        ("mailto:", None),
        ("", None),
        ("http://[broken", None),
    ],
)
def test_the_registrable_domain_of_a_url(url: str, found: str | None) -> None:
    """C3"""
    assert domain(url) == found


async def test_two_that_spend_for_the_first_time_at_once_both_get_their_answer(pg: Db) -> None:
    """Who came second found no row, though the first had made it meanwhile, and its run failed."""
    mill = Mill(pg.url)
    budget = mill.budget("pages", count=(10, td(minutes=1)))
    (_, database), other = mill.databases()[0], await asyncpg.connect(pg.direct)
    try:
        await schema.ensure(database)
        first = other.transaction()
        await first.start()
        await other.execute("insert into rowmill_gates (lane, dim, key) values ('', 'budget:pages', 'count/60')")
        second = asyncio.create_task(take(database, mill.clock, "pages", budget.asked({"count": 4})))
        waits = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        await asyncio.to_thread(eventually, lambda: pg.value(waits) == 1, 10)
        await first.commit()
        assert (await second).wait == 0
    finally:
        await other.close()
        await database.close()
