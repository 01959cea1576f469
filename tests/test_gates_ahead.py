"""Small claims under a limit by key go by a look ahead: exact whoever comes between, and fair."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from datetime import timedelta as td
from typing import Any

import pytest

import gated
from databases import Db
from rowmill import Concurrency, Mill
from rowmill.store.gates import claim_by_range
from rowmill.store.gates.claim_by_range import ClaimByRange
from rowmill.store.gates.claim_by_range_sql import ClaimByRangeStatements
from rowmill.store.gates.lookahead import Lookahead, as_array
from rowmill.store.lane.claim import Settlement
from rowmill.testing import Kit
from test_gates_plans import buffers

VERSION = " and _g.version = ((select $4::bigint[]))"


@pytest.fixture(autouse=True)
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look is gone by for 250 ms, which a busy machine can take for the two claims of a test."""
    monkeypatch.setattr(claim_by_range, "_AHEAD_FOR", 60.0)


def many_keys(db: Db, rows: int = 1) -> Mill:
    """400 keys with so many rows each, one of a key at a time."""
    gated.make(db)
    text = "insert into pages (domain) select 'd' || lpad(n::text, 3, '0') from generate_series(1, 400) n"
    db.execute(f"{text}, generate_series(1, {rows})")
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(1, by="domain")])
    return mill


async def looked_ahead(kit: Kit) -> ClaimByRange:
    """The claim of a store that goes by a look ahead from now on, and has claimed once by it."""
    store = await kit.store()
    for _ in range(3):
        assert len(await store.claim(2)) == 2
    assert isinstance(store.gated, ClaimByRange)
    assert store.gated._ahead is not None
    assert store.gated._ahead.used
    return store.gated


async def taken_twice(db: Db) -> int:
    """Somebody takes the keys that another has found ahead; how many of one key then run at most."""
    async with Kit(many_keys(db, rows=3), worker_id="a") as a, Kit(a.mill, worker_id="b") as b:
        ahead = (await looked_ahead(a))._ahead
        store, found = await b.store(), ahead.keys[ahead.used :][:2]
        store.gated._last = ahead.keys[ahead.used - 1]  # type: ignore[union-attr]
        for key in found:  # other rows than those that were found
            db.execute("insert into pages (domain, run_after) values (?, now() - interval '1 hour')", key)
        assert [claim.gates["domain"] for claim in await store.claim(2)] == found
        assert len(await (await a.store()).claim(2)) == 2
    return int(db.value("select max(n) from (select count(*) n from pages where status = 'running' group by domain) _"))


async def test_what_was_found_ahead_is_left_where_others_have_claimed_since(pg: Db) -> None:
    """C8: several claims go by one look, and each asks whether what it counted still holds."""
    assert await taken_twice(pg) == 1


async def test_without_its_version_a_look_ahead_breaks_the_limit(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue: a test removes the version re-check and must see the limit broken."""
    whole = ClaimByRangeStatements.claim_those

    def unsafe(self: ClaimByRangeStatements) -> str:
        assert VERSION in whole(self)
        return whole(self).replace(VERSION, VERSION.replace("_g.version =", "0 <>"))

    monkeypatch.setattr(ClaimByRangeStatements, "claim_those", unsafe)
    assert await taken_twice(pg) > 1


@pytest.mark.parametrize("said", ["of the key", "of the lane"])
async def test_what_was_found_ahead_is_left_when_it_is_paused(pg: Db, said: str) -> None:
    """Issue 4: a pause holds for the next claim, whatever was counted before."""
    async with Kit(many_keys(pg)) as kit:
        ahead = (await looked_ahead(kit))._ahead
        key = ahead.keys[ahead.used]
        dim, key = ("domain", key) if said == "of the key" else ("", "")
        text = "insert into rowmill_gates (lane, dim, key, paused_at, paused_until) values ('crawl', ?, ?, now(), ?)"
        pg.execute(text, dim, key, datetime.now(UTC) + td(hours=1))
        keys = [claim.gates["domain"] for claim in await (await kit.store()).claim(2)]
    assert len(keys) == (2 if key else 0)
    assert key not in keys


async def test_a_place_that_has_got_another_row_is_left_alone(pg: Db) -> None:
    """C8: what stands where a row was found may be of another key by now."""
    async with Kit(many_keys(pg)) as kit:
        ahead = (await looked_ahead(kit))._ahead
        at, kept = ahead.used, list(ahead.keys)
        ahead.keys = [*kept[:at], "other", *kept[at + 1 :]]
        store = await kit.store()
        keys = [claim.gates["domain"] for claim in await store.gated._take_those(2, 0.0)]  # type: ignore[union-attr]
    assert keys == [kept[at + 1]]


async def test_a_look_is_gone_by_for_a_while_only(pg: Db) -> None:
    """Fairness: rows that came since have their turn, too."""
    async with Kit(many_keys(pg)) as kit:
        gate, store = await looked_ahead(kit), await kit.store()
        first = gate._ahead
        await store.claim(2)
        assert gate._ahead is first
        assert first is not None
        first.until = time.monotonic()
        await store.claim(2)
    assert gate._ahead is not first


async def test_small_claims_go_by_one_look(pg: Db) -> None:
    """Speed: a look for every few claims; and each row runs once, each key one at a time."""
    looks = 0
    async with Kit(many_keys(pg, rows=2)) as kit:
        store = await kit.store()
        read = store.database.read

        async def counted(work: Any) -> Any:
            nonlocal looks
            looks += 1
            return await read(work)

        store.database.read = counted  # type: ignore[method-assign]
        for _ in range(200):
            got = await store.claim(4)
            assert len({claim.gates["domain"] for claim in got}) == len(got) == 4
            await store.settle([Settlement(claim, "done") for claim in got])
    assert 0 < looks < 60
    assert pg.value("select count(*) from pages where status = 'done' and attempts = 1") == 800


def test_a_claim_by_a_look_ahead_asks_for_every_stretch_that_its_rows_are_in() -> None:
    """C8: keys are in the order of numbers, stretches in that of their digits: 8, 9, then 10, and 5 begins one."""
    keys = ["8", "9", "10", "50", "7"]
    ahead = Lookahead([f"(0,{n})" for n in range(5)], keys, [2, 2, 1, 2, 3], ["", "5", "7"], [7, 9, 5], 0.0)
    part = ahead.next(1)
    assert (part.keys, ahead.versions_of(part)) == (["8"], (["5"], [9]))
    ahead.took(part)
    assert ahead.has(3), "of two stretches, one of them in two parts"
    assert not ahead.has(4), "the last is of a third one"
    part = ahead.next(2)
    assert (part.keys, ahead.versions_of(part)) == (["9", "10"], (["", "5"], [7, 10]))
    ahead.took(part)
    assert ahead.versions_of(ahead.next(1)) == (["5"], [11])


@pytest.mark.parametrize("by", ["source_id", "domain"])
async def test_the_limit_holds_for_many_small_claims_by_looks_ahead(pg: Db, by: str) -> None:
    """C8, four at a time, by numbers and by words: at no time two of one key, and every row once."""
    gated.make(pg)
    pg.execute("create index on pages (source_id, run_after, id) where status = 'queued'")
    pg.execute(
        "insert into pages (domain, source_id)"
        " select 'd' || n, n from generate_series(1, 300) n, generate_series(1, 4) order by random()"
    )
    most = f"select coalesce(max(n), 0) from (select count(*) n from pages where status = 'running' group by {by}) _"
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(1, by=by)])
    by_looks = 0

    async def work(kit: Kit) -> None:
        nonlocal by_looks
        store = await kit.store()
        for _ in range(200):
            claims = await store.claim(3)
            by_looks += store.gated._ahead is not None  # type: ignore[union-attr]
            if not claims and not pg.value("select count(*) from pages where status <> 'done'"):
                return
            assert pg.value(most) <= 1
            await store.settle([Settlement(claim, "done") for claim in claims])

    async with AsyncExitStack() as stack:
        kits = [await stack.enter_async_context(Kit(mill, worker_id=name)) for name in "abcd"]
        await asyncio.gather(*(work(kit) for kit in kits))
    assert by_looks > 20
    assert pg.value("select count(*) from pages where status = 'done' and attempts = 1") == 1200


async def test_what_was_found_ahead_is_read_where_it_stands(pg: Db) -> None:
    """Speed: also in a table that was analysed while nothing was ready, and has a long history."""
    mill = many_keys(pg)
    pg.execute("update pages set status = 'done'")
    pg.execute("insert into pages (domain, status) select 'old', 'done' from generate_series(1, 20000)")
    pg.execute("vacuum analyze pages")
    pg.execute("insert into pages (domain) select 'd' || n from generate_series(1, 5000) n")
    async with Kit(mill) as kit:
        gate = await looked_ahead(kit)
        assert gate._ahead is not None
        part = gate._ahead.next(2)
        lists = [[str(each) for each in many] for many in (*part[:2], *gate._ahead.versions_of(part))]
        values = (*map(as_array, lists), "me")
        assert await buffers(pg, gate.say.claim_those(), values, "force_generic_plan") < 150


async def test_keys_with_quotes_and_backslashes_are_claimed_by_a_look_ahead(pg: Db) -> None:
    """They travel as the text of an array, in which these signs have a meaning."""
    odd = ['"', "\\", "{", "}", ",", "null", " a ", '\\"', "é'", "x\ny"]
    async with Kit(many_keys(pg)) as kit:
        pg.execute("delete from pages")
        for n in range(400):
            pg.execute("insert into pages (domain) values (?)", f"{odd[n % len(odd)]}{n}{odd[n // 7 % len(odd)]}")
        await looked_ahead(kit)
        store, taken = await kit.store(), 6
        for _ in range(97):
            got = await store.claim(4)
            taken += len(got)
            await store.settle([Settlement(claim, "done") for claim in got])
    assert taken == 394
    assert pg.value("select count(*) from pages where status = 'done'") == 388


async def test_rows_without_a_key_have_their_share_of_small_claims(pg: Db) -> None:
    """Fairness: no look ahead finds them, and they do not wait until all keys are through."""
    async with Kit(many_keys(pg, rows=2)) as kit:
        pg.execute("insert into pages (domain) select null from generate_series(1, 100)")
        store, without = await kit.store(), 0
        for _ in range(100):
            got = await store.claim(4)
            without += sum(1 for claim in got if not claim.gates)
            await store.settle([Settlement(claim, "done") for claim in got])
    assert 400 / 16 - 4 <= without < 50
