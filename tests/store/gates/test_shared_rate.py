"""A rate over several databases: slices that one of them leases, and workers that start runs only within a slice."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import Concurrency, DeclarationError, Mill, Rate
from rowmill.clock import Clock
from rowmill.errors import Unreachable
from rowmill.ops.directory import LaneDirectory
from rowmill.ops.questions import gates, why
from rowmill.store import Database
from rowmill.store.gates.shared_rate import Leased, SharedWindow, Used
from rowmill.testing import Kit
from workers import STATES, add, events_of, jobs, until, working


def window(db: Db, clock: Clock, n: int, per: td = td(seconds=40)) -> SharedWindow:
    rate = Rate(n, per, shared="control")
    return SharedWindow(Database.open(db.url, pool=1), clock, "work", rate)


def lane(mill: Mill, ran: Counter[str], rate: Rate, **options: Any) -> None:
    async def work(job: Any) -> None:
        ran[job.environment] += 1

    mill.lane("jobs", **STATES, **{"poll": td(seconds=0.1), "gates": [rate], **options})(work)


async def test_a_slice_is_leased_once(db: Db) -> None:
    """What is not told counts until the slice is over and the period after it: a dead worker's is never leased twice
    within one window.
    """
    clock = Clock()
    held = window(db, clock, 10)
    first = await held.lease(6, [])
    second = await held.lease(6, [])
    assert (first.count, second.count) == (6, 4)
    empty = await held.lease(1, [])
    assert empty.count == 0
    assert empty.wait > 40
    clock.advance(td(seconds=40 + held.valid_for - 1))
    assert (await held.lease(1, [])).count == 0
    clock.advance(td(seconds=2))
    assert (await held.lease(20, [])).count == 10
    await held.database.close()


async def test_what_is_told_counts_from_its_start_or_not_at_all(db: Db) -> None:
    clock = Clock()
    held = window(db, clock, 10)
    leased = await held.lease(10, [])
    until = leased.at + held.valid_for
    told = [Used(until, 3, leased.at + 1), Used(until, 2, None)]
    assert (await held.lease(5, told)).count == 2  # those that were not made; the others count still
    clock.advance(td(seconds=42))
    assert (await held.lease(9, [])).count == 3  # those made a second after the lease
    await held.database.close()


async def test_what_many_lease_at_once_is_no_more_than_there_is(db: Db) -> None:
    clock = Clock()
    many = [window(db, clock, 25) for _ in range(8)]
    slices = await asyncio.gather(*(one.lease(5, []) for one in many))
    assert sum(one.count for one in slices) == 25
    for one in many:
        await one.database.close()


async def test_one_rate_holds_over_all_environments(db: Db, fresh: Callable[[str], Db]) -> None:
    """An hour's rate: so many rows of both databases together start, whichever way they are served."""
    other, control = fresh(db.dialect), fresh(db.dialect)
    for one in (db, other):
        jobs(one, 30)
    for order, limit in (("fair", 20), ("strict", 35)):
        ran: Counter[str] = Counter()
        mill = Mill({"one": db.url, "two": other.url}, order=order)
        lane(mill, ran, Rate(limit, td(hours=1), shared=control.url), name=f"by_{order}")
        async with working(mill) as worker:
            await until(lambda ran=ran, limit=limit: sum(ran.values()) == limit)
            rate = worker.shared_rates[f"by_{order}"]
            await until(
                lambda rate=rate: rate._task is None and rate._again_at > 0
            )  # it was told that there is no more
        assert sum(ran.values()) == limit


async def test_a_mill_without_waiting_rows_leases_nothing(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was leased and has no use goes back."""
    jobs(db, 1)
    ran: Counter[str] = Counter()
    asked: list[tuple[int, int]] = []
    lease = SharedWindow.lease

    async def counted(self: SharedWindow, wanted: int, used: Any) -> Leased:
        leased = await lease(self, wanted, used)
        asked.append((wanted, leased.count - sum(one.count for one in used if one.started is None)))
        return leased

    monkeypatch.setattr(SharedWindow, "lease", counted)
    mill = Mill({"one": db.url})
    lane(mill, ran, Rate(100, td(seconds=10), shared="one"))
    async with working(mill) as worker:
        await until(lambda: ran["one"] == 1)
        await until(lambda: sum(kept for _, kept in asked) == 1)
        before, polls = len(asked), worker.environments[0].next_poll
        await until(lambda: worker.environments[0].next_poll > polls + 0.2)
        assert len(asked) == before
    held = window(db, mill.clock, 100, td(seconds=10))
    assert (await held.state()).used == 1
    await held.database.close()


async def test_while_the_control_database_is_away_its_lane_waits_and_others_go_on(db: Db, lite: Db) -> None:
    """It is said once; and the lane goes on when it is back."""
    jobs(db, 3)
    db.execute("create table others (id integer primary key, status text default 'queued', worker text)")
    db.execute("insert into others (id) values (1), (2)")
    path = lite.url.removeprefix("sqlite:///")
    ran: Counter[str] = Counter()
    mill = Mill({"one": db.url})
    seen = events_of(mill)
    lane(mill, ran, Rate(100, td(seconds=1), shared=f"sqlite:///{path}.away/control.db"))

    async def other(job: Any) -> None:
        ran["other"] += 1

    mill.lane("others", **STATES, poll=td(seconds=0.1))(other)
    async with working(mill):
        await until(lambda: ran["other"] == 2)
        await until(lambda: any(event.name == "shared_rate_down" for event in seen))
        db.execute("insert into others (id) values (3)")
        await until(lambda: ran["other"] == 3)
        assert ran["one"] == 0
        assert db.value("select count(*) from jobs where status = 'queued'") == 3
        os.mkdir(f"{path}.away")
        await until(lambda: ran["one"] == 3)
        await until(lambda: any(event.name == "shared_rate_back" for event in seen))
    assert len([event for event in seen if event.name == "shared_rate_down"]) == 1


async def test_a_lease_without_a_reply_is_used_up(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was committed, or it was not: the worker starts nothing by it."""
    jobs(db, 12)
    ran: Counter[str] = Counter()
    lease, lost = SharedWindow.lease, []

    async def cut_off(self: SharedWindow, wanted: int, used: Any) -> Leased:
        leased = await lease(self, wanted, used)
        if leased.count and not lost:
            lost.append(leased.count)
            raise Unreachable("the connection was closed")
        return leased

    monkeypatch.setattr(SharedWindow, "lease", cut_off)
    mill = Mill({"one": db.url})
    lane(mill, ran, Rate(10, td(minutes=20), shared="one"))
    async with working(mill) as worker:
        await until(lambda: lost and ran["one"] == 10 - lost[0])
        rate = worker.shared_rates["work"]
        await until(lambda: rate._task is None and rate._again_at > 0 and not rate._failures)
    assert ran["one"] == 10 - lost[0]


async def test_a_row_whose_slice_is_over_starts_with_the_next_one(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run starts outside of a slice, however long its claim took."""
    jobs(db, 4)
    ran: Counter[str] = Counter()
    mill = Mill({"one": db.url})
    lane(mill, ran, Rate(100, td(seconds=1), shared="one"))
    late: list[bool] = []
    async with working(mill) as worker:
        rate = worker.shared_rates["work"]
        await until(lambda: worker.environments[0].lane_states)
        store = worker.environments[0].lane_states[0].store
        claim = store.claim

        async def slowly(count: int) -> Any:
            claims = await claim(count)
            if claims and not late:
                for one in rate._slices:
                    one.ends = 0.0  # its time goes by
                late.append(rate.at_hand == 0)
            return claims

        monkeypatch.setattr(store, "claim", slowly)
        add(db, 4)
        await until(lambda: ran["one"] == 8)
    assert db.value("select count(*) from jobs where status = 'done'") == 8


async def test_why_and_gates_tell_of_the_shared_rate(db: Db, fresh: Callable[[str], Db]) -> None:
    control = fresh(db.dialect)
    jobs(db, 3)
    ran: Counter[str] = Counter()
    mill = Mill({"one": db.url, "control": control.url})
    lane(mill, ran, Rate(2, td(hours=1), shared="control"), environments=["one"])
    async with working(mill):
        await until(lambda: ran["one"] == 2)
    async with LaneDirectory(mill) as directory:
        (left,) = db.query("select id from jobs where status = 'queued'")
        answer = await why(directory, "one", "work", str(left["id"]))
        (reason,) = [reason for reason in answer["reasons"] if reason["code"] == "shared_rate"]
        assert reason["text"] == "the lane's shared rate is used up: 2 starts in 60 min in all environments"
        (shared,) = (await gates(directory))["shared"]
        assert (shared["lane"], shared["limit"], shared["used"], shared["shared"]) == ("work", 2, 2.0, "control")
        assert shared["wait_seconds"] > 3000


async def test_a_shared_budget_is_one_for_all_environments(db: Db, fresh: Callable[[str], Db]) -> None:
    other, control = fresh(db.dialect), fresh(db.dialect)
    for one in (db, other):
        jobs(one, 5)
    mill = Mill({"one": db.url, "two": other.url})
    mill.budget("api", shared=control.url, calls=(6, td(hours=1)))
    ended: Counter[str] = Counter()

    @mill.lane("jobs", **STATES, poll=td(seconds=0.1))
    async def work(job: Any) -> None:
        await job.spend("api", calls=1, wait=td(0))

    mill.on_event(lambda event: ended.update([event.fields["outcome"]] if event.name == "job_settled" else []))
    async with working(mill):
        await until(lambda: sum(ended.values()) >= 10)
    assert ended["done"] == 6
    async with LaneDirectory(mill) as directory:
        (budget,) = (await gates(directory))["budgets"]
        assert (budget["budget"], budget["cells"]) == ("api", "6 of 6 calls in h")


async def test_a_kit_leaves_the_control_database_alone(lite: Db) -> None:
    """In a test, what is shared is held by the test's own database."""
    jobs(lite, 2)
    ran: Counter[str] = Counter()
    mill = Mill({"one": lite.url})
    lane(mill, ran, Rate(100, td(seconds=1), shared="postgresql://nobody@127.0.0.1:1/nothing"))
    async with Kit(mill) as kit:
        await kit.drain()
    assert ran["one"] == 2


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (lambda: Rate(10, shared=""), "must name the database"),
        (lambda: Rate(10, by="domain", shared="one"), "without by"),
        (lambda: Rate(0.5, shared="one"), "a whole number"),
        (lambda: Rate(10, burst=2, shared="one"), "without by, burst"),
    ],
)
def test_what_a_shared_rate_cannot_be_is_refused(declared: Callable[[], Rate], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        declared()


def test_a_lane_has_one_shared_rate_and_no_chunks(lite: Db) -> None:
    one, ran = Rate(10, shared="one"), Counter[str]()
    with pytest.raises(DeclarationError, match="two rates with shared"):
        lane(Mill(lite.url), ran, one, gates=[one, Rate(5, td(hours=1), shared="one")])
    with pytest.raises(DeclarationError, match="not chunks"):
        Mill(lite.url).lane("jobs", **STATES, gates=[one], chunk=10)(lambda jobs: None)
    mill = Mill({"default": lite.url})
    lane(mill, ran, Rate(10, shared="defalt"), gates=[Concurrency(2), Rate(10, shared="defalt")])
    with pytest.raises(DeclarationError, match="neither an environment nor a URL") as caught:
        mill.worker()
    assert "default" in (caught.value.hint or "")
    mill = Mill({"default": lite.url}, max_connections=5)
    lane(mill, ran, Rate(10, shared="default"))
    with pytest.raises(DeclarationError, match="too few"):
        mill.worker()
