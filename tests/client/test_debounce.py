"""``Key(value, debounce=, at_most=)``: one run after the last call, and no later than the longest wait."""

from __future__ import annotations

from datetime import timedelta as td

import pytest

from databases import Db
from rowmill import Key, Mill
from rowmill.errors import WrongArguments
from rowmill.testing import Kit

KEY = Key("doc-1", debounce=td(minutes=5), at_most=td(minutes=12))


async def test_a_job_waits_for_the_last_call_and_gets_its_arguments(mill: Mill, db: Db) -> None:
    seen: list[int] = []

    @mill.task
    async def index(n: int) -> None:
        seen.append(n)

    await mill.prepare()
    async with Kit(mill, real=True) as kit:
        first = await index.enqueue(n=1, key=KEY)
        kit.advance(td(minutes=4))
        assert (await index.enqueue(n=2, key=KEY)).id == first.id
        kit.advance(td(minutes=4))  # 8 min: past the first call's wait, not past the second's
        assert await kit.step("default") is None
        kit.advance(td(minutes=2))
        assert (await kit.step("default")) is not None
    assert seen == [2]


async def test_calls_without_an_end_hold_a_job_back_no_longer_than_at_most(mill: Mill, db: Db) -> None:
    seen: list[int] = []

    @mill.task
    async def index(n: int) -> None:
        seen.append(n)

    await mill.prepare()
    async with Kit(mill, real=True) as kit:
        for n in range(3):  # calls at 0, 4 and 8 min: the last would put the job off to 13 min
            await index.enqueue(n=n, key=KEY)
            kit.advance(td(minutes=4))
            assert (await kit.step("default") is None) is (n < 2)
    assert seen == [2]


async def test_a_call_while_the_job_runs_makes_the_next_job(mill: Mill, db: Db) -> None:
    @mill.task
    async def index(n: int) -> None: ...

    await mill.prepare()
    async with Kit(mill, real=True) as kit:
        first = await index.enqueue(n=1, key=KEY)
        kit.advance(td(minutes=6))
        (claim,) = await kit.claim("default")
        second = await index.enqueue(n=2, key=KEY)
        assert second.id != first.id
        assert (await index.enqueue(n=3, key=KEY)).id == second.id
        await kit.settle(claim)
    assert db.value("select count(*) from rowmill_jobs") == 2


@pytest.mark.parametrize(
    "given",
    [
        {"at_most": td(seconds=1)},
        {"debounce": td(0)},
        {"debounce": 5},
        {"debounce": td(seconds=5), "at_most": td(seconds=4)},
        {"debounce": td(seconds=5), "conflict": "raise"},
        {"debounce": td(seconds=5), "within": td(hours=1)},
    ],
)
def test_what_makes_no_sense_is_refused(given: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(WrongArguments):
        Key("k", **given)
