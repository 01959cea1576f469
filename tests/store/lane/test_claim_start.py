"""Where claims begin to look: far on in a backlog the dead entries at the head of the index are passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from rowmill.store import LaneStore
from rowmill.store.lane import postgres
from rowmill.store.lane.postgres import ClaimStart
from rowmill.testing import Kit
from rows import empty


class Claims:
    """Claims as a horizon hears of them, a tenth of a second apart, each with the cost that it says."""

    def __init__(self) -> None:
        self.claim_start, self.now, self.place = ClaimStart(), 100.0, 0

    def begins(self) -> Any:
        return self.claim_start.bound(self.now)

    def claim(self, *, full: bool = True, took: float = 0.001, count: int = 500, last: Any = "next") -> None:
        self.place += count
        bounded = self.begins() is not None
        place = (self.place,) if last == "next" else last
        self.claim_start.claimed(place, full=full, count=count, began=self.now, now=self.now + took, bounded=bounded)
        self.now += 0.1

    def far(self) -> None:
        for _ in range(postgres._FAR // 500):
            self.claim()


def test_claims_begin_at_the_head_until_much_has_been_taken() -> None:
    """DESIGN, speed: a remembered lower bound, where it is worth something."""
    claims = Claims()
    for _ in range(postgres._FAR // 500 - 1):
        assert claims.begins() is None
        claims.claim()
    assert claims.begins() is None
    claims.claim()
    assert claims.begins() == (postgres._FAR,)


def test_far_on_the_head_is_looked_at_four_times_a_second_and_what_stands_there_goes_first() -> None:
    """techniques, 4: late rows wait for a moment; and all of them go before what stands behind."""
    claims = Claims()
    claims.far()
    begun = []
    for _ in range(9):
        begun.append(claims.begins())
        claims.claim()
    heads = [i for i, first in enumerate(begun) if first is None]
    assert heads == [2, 5, 8]
    claims.claim(last=(3,))  # this one began at a bound; the next one at the head finds rows far below
    while claims.begins() is not None:
        claims.claim()
    claims.claim(last=(7,))
    assert claims.begins() == (7,)


def test_a_short_claim_far_on_is_made_again_at_once_from_the_head() -> None:
    """X1: nothing that came in below is forgotten when the rest has been taken."""
    claims = Claims()
    claims.far()
    claims.claim(full=False)
    assert claims.claim_start.look_again is not None
    assert claims.claim_start.look_again <= claims.now
    assert claims.begins() is None
    claims.claim(full=False, last=None)
    assert claims.claim_start.look_again is None


def test_behind_a_long_transaction_a_short_claim_proves_nothing_for_a_while() -> None:
    """techniques, 4: claims from the head take a tenth of the time at most."""
    claims = Claims()
    for _ in range(postgres._SLOW_IN_A_ROW):
        assert claims.begins() is None
        claims.claim(full=False, took=0.5, count=10)
    assert claims.begins() == (10 * postgres._SLOW_IN_A_ROW,)
    claims.claim(full=False, count=10)
    assert claims.claim_start.look_again == pytest.approx(100.2 + 0.5 + 5.0)
    claims.now = claims.claim_start.look_again
    assert claims.begins() is None
    claims.claim(full=False, count=10)  # the transaction has ended, and a vacuum has been there
    assert claims.begins() is None
    assert claims.claim_start.look_again is None


def test_a_place_that_cannot_be_compared_is_no_bound() -> None:
    """A3: NULL in the order."""
    claims = Claims()
    claims.far()
    claims.claim(last=(None,))
    assert claims.begins() == (postgres._FAR,)


async def test_urgent_rows_that_come_into_a_long_backlog_go_first(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3, X1: far on in a backlog, more urgent rows than one claim takes come in below the bound: the next claim from
    the head finds the first of them, and those after it the others, in order.
    """
    monkeypatch.setattr(postgres, "_FAR", 20)
    monkeypatch.setattr(postgres, "_AGAIN_FAR", 3600.0)
    db = empty(request, tmp_path, "postgresql")
    mill = await _prepared(db)
    for number in range(60):
        await mill.tasks["late"].enqueue(number)
    async with Kit(mill) as kit:
        store = await kit.store("default")
        assert await _numbers(store, 10) == list(range(10))
        assert await _numbers(store, 10) == list(range(10, 20))
        for number in range(100, 125):
            await mill.tasks["late"].enqueue(number, priority=-1)
        assert await _numbers(store, 10) == list(range(20, 30))  # from the bound: the urgent ones are not seen
        monkeypatch.setattr(postgres, "_AGAIN_FAR", 0.0)
        monkeypatch.setattr(postgres, "_AGAIN_SHARE", 0.0)
        assert await _numbers(store, 10) == list(range(100, 110))
        monkeypatch.setattr(postgres, "_AGAIN_FAR", 3600.0)
        found = [await _numbers(store, 10) for _ in range(5)]
    await mill.close()
    assert found == [
        list(range(110, 120)),
        [*range(120, 125), *range(30, 35)],
        list(range(35, 45)),
        list(range(45, 55)),
        list(range(55, 60)),
    ]


async def test_a_claim_of_jobs_comes_in_the_queues_order_however_they_lie_in_the_table(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A3: by priority, then by time, also one without a beginning, then by age."""
    db = empty(request, tmp_path, "postgresql")
    mill = await _prepared(db)
    times = ["now() - interval '1 hour'", "now() - interval '2 hours'", "'-infinity'", "now() - interval '1 hour'"]
    for number, (time, priority) in enumerate(zip([*times, "now()"], [0, 0, 0, 0, -5], strict=True)):
        db.execute(
            "insert into rowmill_jobs (task, args, run_after, priority) values"
            f" ('late', '{{\"number\": {number}}}', {time}, {priority})"
        )
    async with Kit(mill) as kit:
        assert await _numbers(await kit.store("default"), 10) == [4, 2, 1, 0, 3]
    await mill.close()


async def _prepared(db: Db) -> Mill:
    mill = Mill(db.url)

    @mill.task
    async def late(number: int) -> None: ...

    await mill.prepare()
    return mill


async def _numbers(store: LaneStore, count: int) -> list[int]:
    return [store.value(claim.row, "args")["number"] for claim in await store.claim(count)]
