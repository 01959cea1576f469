"""Gates in the claim: what they let through, what they hold back, and that holding back costs nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta as td
from typing import Any

import pytest

import gated
from databases import Db
from rowmill import Breaker, Concurrency, Dead, Mill, Rate, Retry, Snooze
from rowmill.declare.outcome import Release
from rowmill.testing import Kit

SHAPES: dict[str, Any] = {
    # one statement on PostgreSQL; and, with a second group beside it, the long way
    "turns": [],
    "walk": [Concurrency(1000)],
}


@pytest.fixture(params=SHAPES)
def beside(request: pytest.FixtureRequest) -> list[Any]:
    """Further gates that let everything through, so that both ways of the claim are taken."""
    return SHAPES[request.param]


async def test_never_more_rows_of_a_key_than_its_limit(db: Db, beside: list[Any]) -> None:
    """C8"""
    gated.make(db)
    gated.fill(db, ["a"] * 10 + ["b"] * 3 + ["c"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(2, by="domain"), *beside])
    async with Kit(mill) as kit:
        claims = await kit.claim(count=10)
        assert gated.running(db) == {"a": 2, "b": 2, "c": 1}
        assert await kit.claim(count=10) == []
        first = next(claim for claim in claims if claim.gates and claim.gates["domain"] == "a")
        await kit.settle(first)
        (after,) = await kit.claim(count=10)
        assert after.gates is not None
        assert after.gates["domain"] == "a"
        assert after.id == 3  # in order within its key


async def test_keys_share_what_the_whole_lane_lets_start(db: Db) -> None:
    """A key that has fewer rows than it may start leaves the room of the lane to the next key, in the same claim."""
    gated.make(db)
    gated.fill(db, ["a", "b", "c"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(2, by="domain"), Concurrency(2)])
    async with Kit(mill) as kit:
        assert len(await kit.claim(count=3)) == 2


async def test_rows_without_a_key_are_not_held_back(db: Db, beside: list[Any]) -> None:
    gated.make(db)
    gated.fill(db, [None] * 5 + ["a"] * 5)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(1, by="domain"), *beside])
    async with Kit(mill) as kit:
        await kit.claim(count=4)
        await kit.claim(count=10)
        assert gated.running(db) == {None: 5, "a": 1}


async def test_keys_take_turns(db: Db, beside: list[Any]) -> None:
    gated.make(db)
    gated.fill(db, ["a"] * 50 + ["b"] * 50 + ["c"] * 50)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(50, by="domain"), *beside])
    served: Counter[str] = Counter()
    async with Kit(mill) as kit:
        for _ in range(9):
            for claim in await kit.claim(count=2):
                assert claim.gates is not None
                served[claim.gates["domain"]] += 1
                await kit.settle(claim)
    assert served == {"a": 6, "b": 6, "c": 6}


async def test_a_key_may_be_any_expression_and_any_type(db: Db, beside: list[Any]) -> None:
    gated.make(db)
    for number in range(9):
        gated.fill(db, ["x"], source_id=number)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(1, by="source_id % 3"), *beside])
    async with Kit(mill) as kit:
        claims = await kit.claim(count=9)
        assert sorted(claim.gates["source_id % 3"] for claim in claims) == ["0", "1", "2"]  # type: ignore[index]
        assert await kit.claim(count=9) == []


async def test_two_keys_at_once(db: Db) -> None:
    gated.make(db)
    for domain in "abc":
        for source in (1, 2):
            gated.fill(db, [domain] * 3, source_id=source)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(2, by="domain"), Concurrency(3, by="source_id")])
    async with Kit(mill) as kit:
        await kit.claim(count=100)
        await kit.claim(count=100)
        by_source = db.query("select source_id as s, count(*) as n from pages where status = 'running' group by 1")
        assert {row["s"]: row["n"] for row in by_source} == {1: 3, 2: 3}
        assert all(n <= 2 for n in gated.running(db).values())


async def test_the_whole_lane_is_a_key_too(db: Db) -> None:
    gated.make(db)
    gated.fill(db, ["a", "b", "c", "d"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(3)])
    async with Kit(mill) as kit:
        assert len(await kit.claim(count=10)) == 3
        assert await kit.claim(count=10) == []


async def test_a_limit_of_each_process(db: Db, beside: list[Any]) -> None:
    gated.make(db)
    gated.fill(db, ["a"] * 5)
    mills = [Mill(db.url), Mill(db.url)]
    for mill in mills:
        gated.lane(mill, gates=[Concurrency(2, by="domain", scope="process"), *beside])
    async with Kit(mills[0], worker_id="one") as one, Kit(mills[1], worker_id="two") as two:
        assert len(await one.claim(count=9)) == 2
        assert len(await two.claim(count=9)) == 2
        assert await one.claim(count=9) == []


async def test_a_rate_is_shared_and_refills(db: Db, beside: list[Any]) -> None:
    """D7"""
    gated.make(db)
    gated.fill(db, ["a"] * 50)
    mills = [Mill(db.url), Mill(db.url)]
    for mill in mills:
        gated.lane(mill, gates=[Rate(6, per=td(minutes=1), by="domain", burst=4), *beside])
    async with Kit(mills[0]) as one, Kit(mills[1]) as two:
        assert len(await one.claim(count=3)) == 3
        assert len(await two.claim(count=3)) == 1
        assert await one.claim(count=3) == []
        one.advance(td(seconds=21))
        assert len(await one.claim(count=9)) == 2
        one.advance(td(hours=1))
        assert len(await one.claim(count=9)) == 4


async def test_a_rate_from_a_table_follows_it(db: Db, beside: list[Any]) -> None:
    """D7"""
    gated.make(db)
    db.execute("insert into sources (id, rate_limit_per_minute) values (1, 2), (2, null), (3, 0)")
    for source in (1, 2, 3, 4):
        gated.fill(db, ["x"] * 6, source_id=source)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Rate.from_table("sources", "rate_limit_per_minute", by="source_id"), *beside])

    def by_source() -> dict[int, int]:
        rows = db.query("select source_id as s, count(*) as n from pages where status = 'running' group by 1")
        return {row["s"]: row["n"] for row in rows}

    async with Kit(mill) as kit:
        await kit.claim(count=100)
        assert by_source() == {1: 2, 2: 6, 4: 6}
        db.execute("update sources set rate_limit_per_minute = 5 where id in (1, 3)")
        kit.advance(td(minutes=1))
        await kit.claim(count=100)
        assert by_source() == {1: 6, 2: 6, 3: 5, 4: 6}


def failing(job: Any) -> None:
    raise RuntimeError("down")


async def test_a_breaker_opens_at_its_streak_and_lets_one_probe_through(db: Db, beside: list[Any]) -> None:
    """D8"""
    gated.make(db)
    gated.fill(db, ["a"] * 10)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Breaker(3, td(minutes=5), by="domain"), *beside])
    async with Kit(mill) as kit:
        claims = await kit.claim(count=4)
        assert len(claims) == 4
        for claim in claims[:2]:
            await kit.settle(claim, Retry("down"))
        third, extra = (await kit.claim(count=1), claims[2])
        assert len(third) == 1  # two in a row are not three
        await kit.settle(extra, RuntimeError("down"))
        assert await kit.claim(count=5) == []
        row = db.one("select streak, open_until from rowmill_gates where dim = 'domain'")
        assert row["streak"] == 3
        attempts = db.query("select attempts from pages where status = 'queued' order by id")
        assert all(row["attempts"] == 0 for row in attempts[3:])
    # a restart changes nothing
    async with Kit(mill) as kit:
        await kit.settle(claims[3], Dead("gone"))
        await kit.settle(third[0], Dead("gone"))
        assert await kit.claim(count=5) == []
        kit.advance(td(minutes=6))
        (probe,) = await kit.claim(count=5)
        assert await kit.claim(count=5) == []
        await kit.settle(probe, RuntimeError("still down"))
        assert await kit.claim(count=5) == []
        kit.advance(td(minutes=6))
        (probe,) = await kit.claim(count=5)
        await kit.settle(probe)
        assert len(await kit.claim(count=3)) == 3


async def test_a_breaker_in_the_users_own_columns(db: Db, beside: list[Any]) -> None:
    """D8"""
    gated.make(db)
    db.execute("insert into sources (id) values (1), (2)")
    gated.fill(db, ["x"] * 9, source_id=1)
    gated.fill(db, ["x"] * 2, source_id=2)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Breaker(2, td(minutes=5), by="source_id", table="sources"), *beside])
    async with Kit(mill) as kit:
        claims = [c for c in await kit.claim(count=11) if c.gates["source_id"] == "1"]  # type: ignore[index]
        await kit.settle(claims[0], RuntimeError("down"))
        assert db.one("select failure_streak as n from sources where id = 1")["n"] == 1
        await kit.settle(claims[1])
        row = db.one("select * from sources where id = 1")
        assert (row["failure_streak"], row["paused_until"]) == (0, None)
        assert row["last_success_at"] is not None
        assert row["last_failure_at"] is not None
        for claim in claims[2:4]:
            await kit.settle(claim, RuntimeError("down"))
        row = db.one("select * from sources where id = 1")
        assert row["failure_streak"] == 2
        assert row["paused_until"] is not None
        for claim in claims[4:]:
            await kit.settle(claim, Dead("x"))
        kit.advance(td(seconds=30))
        assert await kit.claim(count=9) == []
        db.execute("update sources set paused_until = null, failure_streak = 0")  # by hand
        assert len(await kit.claim(count=9)) == 3


async def test_which_failures_count_is_the_lanes_choice(db: Db) -> None:
    gated.make(db)
    gated.fill(db, ["a"] * 9)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Breaker(1, td(minutes=5), by="domain", counts="transient")])
    async with Kit(mill) as kit:
        one, two = await kit.claim(count=2)
        await kit.settle(one, Dead("not found"))
        assert len(await kit.claim(count=1)) == 1
        await kit.settle(two, RuntimeError("timeout"))
        assert await kit.claim(count=1) == []


class TooMany(Exception):
    status = 429
    headers = {"Retry-After": "90"}  # noqa: RUF012


async def test_retry_after_closes_the_key_for_everybody(db: Db, beside: list[Any]) -> None:
    gated.make(db)
    gated.fill(db, ["a", "a", "b"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Rate(100, by="domain"), *beside])
    async with Kit(mill) as kit, Kit(mill, worker_id="other") as other:
        (first,) = await kit.claim(count=1)
        await kit.settle(first, TooMany())
        claims = await other.claim(count=5)
        if first.gates == {"domain": "a"}:
            assert [claim.gates for claim in claims] == [{"domain": "b"}]
        else:
            assert {claim.gates["domain"] for claim in claims} == {"a"}  # type: ignore[index]
        kit.advance(td(seconds=91))
        assert len(await other.claim(count=5)) == (2 if first.gates == {"domain": "a"} else 1)


#: Gates, and which rows may still be claimed after the row of domain a and source 1 was refused for 90 seconds.
REFUSED: dict[str, tuple[list[Any], set[str]]] = {
    "a limit by key beside a rate of the lane": ([Concurrency(9, by="domain"), Rate(100)], {"b1", "b2"}),
    "a rate by key beside a breaker of the lane": ([Rate(100, by="domain"), Breaker(9, td(hours=1))], {"b1", "b2"}),
    "a limit by one column, a rate by another": (
        [Concurrency(9, by="domain"), Rate(100, by="source_id")], {"a2", "b2"}
    ),
    "rates by two columns: the one declared first": (
        [Rate(100, by="source_id"), Rate(100, by="domain")], {"a2", "b2"}
    ),
    "rates by two columns, the other asked for": (
        [Rate(100, by="source_id"), Rate(100, by="domain", closes=True)], {"b1", "b2"}
    ),
    "the lane asked for": ([Concurrency(9, by="domain"), Rate(100, closes=True)], set()),
    "no key": ([Rate(100)], set()),
    "a pace alone": ([Concurrency(9)], set()),
}  # fmt: skip


@pytest.mark.parametrize("ended", [TooMany, lambda: Snooze(td(seconds=90), closes=True)], ids=["429", "snooze"])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_refusal_closes_the_narrowest_key_and_no_more_unless_asked(db: Db, case: str, ended: Any) -> None:
    """D7; issue: one vendor's 429 does not stop every vendor."""
    gates, left = REFUSED[case]
    gated.make(db)
    for name in ("a1", "a2", "a1", "b1", "b2"):
        gated.fill(db, [name[0]], source_id=int(name[1]))
    mill = Mill(db.url)
    gated.lane(mill, gates=gates)
    async with Kit(mill) as kit, Kit(mill, worker_id="other") as other:
        claims = await kit.claim(count=5)
        first = next(claim for claim in claims if claim.id == 1)
        await kit.settle(first, ended())
        for claim in claims:
            if claim is not first:
                await kit.settle(claim, Release())
        claims = await other.claim(count=9)
        rows = db.query("select domain, source_id from pages where status = 'running'")
        assert {f"{row['domain']}{row['source_id']}" for row in rows} == left
        for claim in claims:
            await other.settle(claim, Release())
        kit.advance(td(seconds=91))
        assert len(await other.claim(count=9)) == 5


async def test_a_refused_row_without_a_key_closes_nothing(db: Db) -> None:
    """Issue: the whole lane is closed on request alone."""
    gated.make(db)
    gated.fill(db, [None, "a", None])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(9, by="domain"), Rate(100)])
    async with Kit(mill) as kit:
        claims = await kit.claim(count=9)
        await kit.settle(next(claim for claim in claims if claim.id == 1), TooMany())
        for claim in claims:
            if claim.id != 1:
                await kit.settle(claim, Release())
        assert {claim.id for claim in await kit.claim(count=9)} == {2, 3}


@pytest.mark.parametrize("lane_wide", [[], [Rate(100)]], ids=["by key alone", "and a rate of the lane"])
async def test_a_snooze_may_close_the_whole_lane(db: Db, lane_wide: list[Any]) -> None:
    """An account's quota is used up: every key waits, also where no gate is for the whole lane."""
    gated.make(db)
    gated.fill(db, ["a", "b", "c"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(9, by="domain"), *lane_wide])
    state = "select paused_until, reason from rowmill_gates where dim = '' and key = ''"
    async with Kit(mill) as kit, Kit(mill, worker_id="other") as other:
        for _ in range(2):
            (first,) = await kit.claim(count=1)
            await kit.settle(first, Snooze(td(seconds=90), closes="lane"))
            assert db.one(state)["reason"] == "the other side asked to wait"
            assert await other.claim(count=5) == []
            kit.advance(td(seconds=91))
        (claim, *_) = await other.claim(count=5)
        db.execute("update rowmill_gates set paused_until = '9999-12-31 00:00:00', reason = 'mine' where key = ''")
        before = db.one(state)
        await other.settle(claim, Snooze(td(seconds=90), closes="lane"))
        assert db.one(state) == before, "an operator's longer pause stays"


def test_what_a_snooze_cannot_close_is_told_where_it_is_made() -> None:
    with pytest.raises(TypeError, match="closes"):
        Snooze(td(seconds=1), closes="vendor")  # type: ignore[arg-type]


async def test_a_snooze_may_close_the_key_for_everybody_and_costs_no_attempt(db: Db, beside: list[Any]) -> None:
    """A quota that is used up is no failure of the row that met it."""
    gated.make(db)
    gated.fill(db, ["a", "a", "a"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Rate(100, by="domain"), *beside])
    async with Kit(mill) as kit, Kit(mill, worker_id="other") as other:
        (first,) = await kit.claim(count=1)
        await kit.settle(first, Snooze(td(seconds=90)))
        (second,) = await kit.claim(count=1)
        await kit.settle(second, Snooze(td(seconds=90), closes=True))
        assert await other.claim(count=5) == []
        kit.advance(td(seconds=91))
        assert [claim.attempt for claim in await other.claim(count=5)] == [1, 1, 1]


async def test_pace_is_starts_within_any_such_time(db: Db) -> None:
    """E5"""
    gated.make(db)
    gated.fill(db, ["a"] * 20)
    mill = Mill(db.url)
    gated.lane(mill, pace=(3, td(seconds=5)))
    async with Kit(mill) as kit:
        assert len(await kit.claim(count=2)) == 2
        kit.advance(td(seconds=3))
        assert len(await kit.claim(count=9)) == 1
        assert await kit.claim(count=9) == []
        kit.advance(td(seconds=2.2))
        assert len(await kit.claim(count=9)) == 2
        kit.advance(td(seconds=2))
        assert await kit.claim(count=9) == []


async def test_an_adaptive_rate_follows_latency_and_errors_only_slow_it_down(db: Db, beside: list[Any]) -> None:
    gated.make(db)
    gated.fill(db, ["a"] * 20)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Rate.auto(by="domain", start=td(seconds=10), most=td(seconds=60)), *beside])

    def delay() -> float:
        return float(db.value("select delay from rowmill_gates where dim = 'domain'"))

    async with Kit(mill) as kit:
        (claim,) = await kit.claim(count=5)
        assert await kit.claim(count=5) == []
        await kit.settle(claim)
        assert delay() == pytest.approx(5, abs=0.01)
        kit.advance(td(seconds=6))
        (claim,) = await kit.claim(count=5)
        await kit.settle(claim, RuntimeError("broken"))
        assert delay() == pytest.approx(5, abs=0.01)
        kit.advance(td(seconds=6))
        (claim,) = await kit.claim(count=5)
        await kit.settle(claim, TooMany())
        assert delay() == pytest.approx(10, abs=0.01)
        assert await kit.claim(count=5) == []


async def test_a_worker_drains_a_gated_lane(db: Db, beside: list[Any]) -> None:
    gated.make(db)
    gated.fill(db, [f"d{i % 7}" for i in range(200)])
    mill, now, most = Mill(db.url), Counter[str](), Counter[str]()

    async def crawl(job: Any) -> None:
        now[job["domain"]] += 1
        most[job["domain"]] = max(most[job["domain"]], now[job["domain"]])
        await asyncio.sleep(0.001)
        now[job["domain"]] -= 1

    gated.lane(mill, crawl, gates=[Concurrency(2, by="domain"), *beside], concurrency=20)
    async with Kit(mill) as kit:
        tally = await asyncio.wait_for(kit.drain(), 60)
    assert tally.completed == 200
    assert max(most.values()) == 2


async def test_a_key_with_fewer_rows_than_its_limit_leaves_the_rest_of_the_lanes_limit_to_others(db: Db) -> None:
    """Two gates: a claim takes as many rows as both let start, whichever key comes first."""
    gated.make(db)
    gated.fill(db, ["a", "b", "b"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(2, by="domain"), Concurrency(2)])
    async with Kit(mill) as kit:
        assert len(await kit.claim(count=50)) == 2
