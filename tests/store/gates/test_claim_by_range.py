"""Limits by key on PostgreSQL are kept by a lock for each range of keys: exact also while the ranges themselves
are rebuilt.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta as td
from itertools import pairwise
from typing import Any

import asyncpg
import pytest
from test_contention import hammer
from test_gate_plans import buffers

import gated
from databases import Db
from rowmill import Breaker, Busy, Concurrency, Mill, Rate
from rowmill.store.gates.claim_by_key import ClaimByKey
from rowmill.store.gates.claim_by_key_sql import ClaimByKeyStatements
from rowmill.store.lane.claim import Settlement
from rowmill.testing import Kit
from sqlworker import installed

LOCKED, CHECK = "_g.key = _i.first[_s._rm_range]", "and _g.version = _i.version[_s._rm_range]"
LIMIT, STILL = 2, 4_711
GATES = [Concurrency(LIMIT, by="domain")]


def hold_up(monkeypatch: pytest.MonkeyPatch, who: str, without: str | None = None) -> None:
    """Let the claims of one worker stand still between their snapshot and their lock; ``without``: unsafely."""
    whole = ClaimByKeyStatements.claim

    def held_up(self: ClaimByKeyStatements, **options: Any) -> str:
        text, mine = whole(self, **options), "$3" if options.get("after_last") else "$2"
        for part in (LOCKED, without or ""):
            assert part in text
        still = f"(select {mine}::text <> '{who}' or pg_advisory_xact_lock_shared({STILL}) is not null)"
        text = text.replace(without, "") if without else text
        return text.replace(LOCKED, f"{LOCKED} and {still}")

    monkeypatch.setattr(ClaimByKeyStatements, "claim", held_up)


@asynccontextmanager
async def standing_still(db: Db, kit: Kit) -> AsyncIterator[None]:
    """The claim of a worker that is held up has its snapshot when this begins, and goes on when it ends."""
    guard = await asyncpg.connect(db.direct)
    try:
        await guard.execute(f"select pg_advisory_lock({STILL})")
        late = asyncio.create_task(kit.claim(count=LIMIT))
        waits = (
            f"select exists (select 1 from pg_locks where locktype = 'advisory' and objid = {STILL} and not granted)"
        )
        for _ in range(1000):
            if await guard.fetchval(waits):
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("the claim did not come to its lock")
        yield
        await guard.execute(f"select pg_advisory_unlock({STILL})")
        await late
    finally:
        await guard.close()


async def two_meet(db: Db) -> int:
    """One claims while another stands still, and a row that comes first has just been added; how many then run."""
    gated.make(db)
    gated.fill(db, ["a"] * LIMIT)
    mill = Mill(db.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill, worker_id="slow") as slow, Kit(mill, worker_id="quick") as quick:
        held = await (await quick.store()).claim(1)
        await quick.settle(held[0], Settlement(held[0], "release"))
        await slow.store()
        async with standing_still(db, slow):
            db.execute("insert into pages (domain, run_after) values ('a', now() - interval '1 hour')")
            assert len(await quick.claim(count=LIMIT)) == LIMIT
    return int(db.value("select count(*) from pages where status = 'running'"))


async def test_who_was_held_up_takes_nothing_beyond_the_limit(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: a count made before another claim is not used."""
    hold_up(monkeypatch, "slow")
    assert await two_meet(pg) == LIMIT


async def test_without_the_version_the_limit_is_broken(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue: a test removes the version re-check and must see the limit broken."""
    hold_up(monkeypatch, "slow", without=CHECK)
    assert await two_meet(pg) > LIMIT


async def rebuild(kit: Kit) -> list[str]:
    """Rebuild the ranges, however new they are. Returns the start of each."""
    store = await kit.store()
    await store.database.transact(store.gated._rebuild_ranges)  # type: ignore[union-attr]
    return await beginnings(kit)


async def beginnings(kit: Kit) -> list[str]:
    """The start of each range."""
    store = await kit.store()
    text = "select key from rowmill_gates where dim = 'range:domain' order by key"
    return [row[0] for row in await store.database.read(lambda run: run(text, ()))]


@pytest.fixture
def ever_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that were made a moment ago may be rebuilt."""
    for name in ("IDLE", "_FEW"):
        monkeypatch.setattr(f"rowmill.store.gates.claim_by_key_sql.{name}", 0.0)


async def split(kit: Kit) -> list[str]:
    """More ranges among those that are there, as functions make them, which may not delete; where each begins."""
    store = await kit.store()
    statements = store.gated.statements  # type: ignore[union-attr]

    def verb(run: Any) -> None:
        if run(f"{statements.renew_ranges()} returning 1", ()):
            run(statements.create_ranges(statements.range_starts()), ())

    await store.database.transact(verb)
    return await beginnings(kit)


async def changed_between(db: Db, change: Callable[[Kit], Awaitable[list[str]]]) -> int:
    """As ``two_meet``, with other ranges made between: the key is in another one then."""
    gated.make(db)
    gated.fill(db, ["x"] * LIMIT)
    mill = Mill(db.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill, worker_id="slow") as slow, Kit(mill, worker_id="quick") as quick:
        assert await rebuild(quick) == [""]
        async with standing_still(db, slow):
            db.execute("insert into pages (domain, run_after) values ('x', now() - interval '1 hour')")
            others = gated.fill(db, ["a", "b", "c"])
            assert await change(quick) == ["", "b", "c", "x"]
            db.execute(f"delete from pages where id in ({', '.join(map(str, others))})")
            assert len(await quick.claim(count=LIMIT)) == LIMIT
    return int(db.value("select count(*) from pages where status = 'running'"))


@pytest.mark.usefixtures("ever_old")
async def test_old_ranges_are_not_used(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: a key that has come into another range since the snapshot is left alone."""
    hold_up(monkeypatch, "slow")
    assert await changed_between(pg, rebuild) == LIMIT


@pytest.mark.local("it breaks a statement on purpose")
@pytest.mark.usefixtures("ever_old")
async def test_ranges_that_are_kept_when_others_are_made_break_the_limit(
    pg: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are all dropped for a reason."""
    hold_up(monkeypatch, "slow")
    monkeypatch.setattr(ClaimByKeyStatements, "drop_all", lambda self: "select 1")
    made, whole = "(lane, dim, key) do update set touched_at = now()", ClaimByKeyStatements.create_first_range
    monkeypatch.setattr(
        ClaimByKeyStatements, "create_first_range", lambda self: whole(self).replace("do nothing", made)
    )
    assert await changed_between(pg, rebuild) > LIMIT


@pytest.mark.usefixtures("ever_old")
async def test_the_limit_holds_while_ranges_are_rebuilt_all_the_time(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8; each claim that meets another makes new ones."""
    monkeypatch.setattr("rowmill.store.gates.claim_by_key._CROWDED", 0.0)
    monkeypatch.setattr("rowmill.store.gates.claim_by_key._MARK_AGAIN", 0.0)
    made = 0
    whole = ClaimByKey._rebuild_ranges

    def counted(self: ClaimByKey, run: Any) -> None:
        nonlocal made
        made += 1
        whole(self, run)

    monkeypatch.setattr(ClaimByKey, "_rebuild_ranges", counted)
    taken, most = await hammer(pg, GATES, rounds=3000, seconds=10)
    assert taken > 500
    assert most == LIMIT
    assert made > 20


async def test_ranges_are_of_like_size_however_many_keys_there_are(pg: Db) -> None:
    """Issue, 20,000 keys: a sample of the table does where keys are too many to look at each."""
    gated.make(pg)
    pg.execute("insert into pages (domain) select 'site' || n || '.example' from generate_series(1, 20000) n")
    pg.execute("insert into pages (domain, status) select 'over.example', 'done' from generate_series(1, 20000) n")
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill) as kit:
        assert len(await kit.claim(count=10)) == 10
        first = await rebuild(kit)
    assert len(first) == 32
    keys = sorted(row["domain"] for row in pg.query("select domain from pages where status <> 'done'"))
    sizes = [bisect_left(keys, high) - bisect_left(keys, low) for low, high in pairwise([*first, "~"])]
    assert sum(sizes) == 20_000
    assert max(sizes) < 3 * 20_000 / 32


async def test_who_meets_others_goes_on_elsewhere(pg: Db) -> None:
    """Two claim at a time: both get what they ask for, of different ranges."""
    gated.make(pg)
    pg.execute("insert into pages (domain) select 'd' || n from generate_series(1, 2000) n, generate_series(1, 3)")
    most = "select max(n) from (select count(*) as n from pages where status = 'running' group by domain) _"
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill, worker_id="a") as a, Kit(mill, worker_id="b") as b:
        stores, served = [await a.store(), await b.store()], [0, 0]
        for _ in range(40):
            got = await asyncio.gather(*(store.claim(20) for store in stores))
            assert pg.value(most) <= LIMIT
            for n, (store, claims) in enumerate(zip(stores, got, strict=True)):
                served[n] += len(claims)
                await store.settle([Settlement(claim, "done") for claim in claims])
    assert min(served) > 400
    assert pg.value("select count(*) from pages where status = 'done' and attempts <> 1") == 0


async def test_rebuilt_ranges_have_versions_that_none_had_before(pg: Db, ever_old: None) -> None:
    """What was found ahead by a worker that then stood still is not good for ranges of the same name."""
    gated.make(pg)
    gated.fill(pg, [f"d{n}" for n in range(100)])
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill) as kit:
        text = "select version from rowmill_gates where dim = 'range:domain'"
        seen: set[int] = set()
        for _ in range(2):
            await rebuild(kit)
            versions = {row["version"] for row in pg.query(text)}
            assert not versions & seen
            seen |= versions


async def test_keys_with_many_rows_do_not_end_a_claim(pg: Db) -> None:
    """Fairness: a quick look that sees nothing but one key's rows is followed by a thorough one."""
    gated.make(pg)
    pg.execute("insert into pages (domain) select 'a' from generate_series(1, 5000)")
    gated.fill(pg, [f"b{n}" for n in range(20)])
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill) as kit:
        keys = [claim.gates["domain"] for claim in await kit.claim(count=30)]
    assert sorted(set(keys)) == sorted(["a", *(f"b{n}" for n in range(20))])
    assert len(keys) == LIMIT + 20


async def test_many_running_rows_are_all_counted(pg: Db) -> None:
    """C8: what a quick look leaves uncounted it leaves alone."""
    gated.make(pg)
    pg.execute("insert into pages (domain, status) select 'a', 'running' from generate_series(1, 200)")
    gated.fill(pg, ["a", "b", "b", "b"])
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill) as kit:
        keys = [claim.gates["domain"] for claim in await kit.claim(count=4)]
    assert keys == ["b", "b"]


async def test_rows_that_somebody_has_locked_do_not_hold_up_their_key(pg: Db) -> None:
    """A user's open transaction has the first rows of a key: the next ones go."""
    gated.make(pg)
    ids = gated.fill(pg, ["a"] * 5)
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    other = await asyncpg.connect(pg.direct)
    try:
        async with Kit(mill) as kit, other.transaction():
            await kit.store()
            await other.execute("update pages set error = 'seen' where id = any($1)", ids[:3])
            assert sorted(claim.key[0] for claim in await kit.claim(count=4)) == ids[3:]
    finally:
        await other.close()


@pytest.mark.parametrize(("locked", "batch"), [("<= 'd060'", 10), ("<= 'd012'", 1), ("between 'd080' and 'd130'", 4)])
async def test_keys_whose_rows_somebody_has_locked_hold_up_no_other(pg: Db, locked: str, batch: int) -> None:
    """A user's open transaction has all rows of many keys, at the head of the order or in the middle: the others go."""
    gated.make(pg)
    pg.execute("insert into pages (domain) select 'd' || lpad(n::text, 3, '0') from generate_series(1, 200) n")
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(1, by="domain")])
    other = await asyncpg.connect(pg.direct)
    try:
        async with Kit(mill) as kit, other.transaction():
            held = await other.fetch(f"select id from pages where domain {locked} for update")
            store, taken = await kit.store(), 0
            for _ in range(400):
                claims = await store.claim(batch)
                taken += len(claims)
                await store.settle([Settlement(claim, "done") for claim in claims])
                if taken == 200 - len(held):
                    break
            assert taken == 200 - len(held)
    finally:
        await other.close()


async def test_an_operators_limit_above_the_declared_one_is_used_at_once(pg: Db) -> None:
    """Issue 8: editable; as many at a time as he says."""
    gated.make(pg)
    gated.fill(pg, ["a"] * 60 + ["b"] * 60)
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill) as kit:
        store = await kit.store()
        for key, most in (("a", 0), ("b", 30)):
            pg.execute("insert into rowmill_gates (lane, dim, key, most) values ('crawl', 'domain', ?, ?)", key, most)
        keys = [claim.gates["domain"] for claim in await store.claim(100)]
    assert keys == ["b"] * 30


async def test_an_empty_key_has_its_turn_like_any_other(pg: Db) -> None:
    gated.make(pg)
    gated.fill(pg, [""] * 20 + ["a", "b"])
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(5, by="domain")])
    seen = []
    async with Kit(mill) as kit:
        store = await kit.store()
        for _ in range(6):
            (claim,) = await store.claim(1)
            seen.append(claim.gates["domain"])
            await store.settle([Settlement(claim, "done")])
    assert seen[:3] == ["", "a", "b"]


#: Words that the claim's own text uses.
WORDS = [
    "keys",
    "known",
    "walk",
    "turns",
    "held",
    "picked",
    "running",
    "taken",
    "key",
    "place",
    "most",
    "range",
    "turn",
]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("gates", [GATES, [*GATES, Breaker(5, td(minutes=1), by="turn")]], ids=["ranges", "turns"])
async def test_tables_and_columns_may_have_any_name(pg: Db, word: str, gates: list[Any]) -> None:
    """The order within a key holds, too, whatever the columns are called."""
    pg.execute(
        f"""create table "{word}" (id bigint, "{word}" bigint, turn text, status text not null default 'queued',
        worker text, claimed_at timestamptz, heartbeat_at timestamptz, attempts integer not null default 0,
        primary key (id)) partition by range (id)""".replace('"turn" bigint,', "other bigint,")
    )
    pg.execute(f'create table part partition of "{word}" for values from (0) to (1000)')
    column = "other" if word == "turn" else word
    pg.execute(f'insert into "{word}" (id, "{column}", turn) select i, 100 - i, \'a\' from generate_series(1, 9) i')
    mill = Mill(pg.url)
    limits = [Concurrency(LIMIT, by="turn"), *gates[1:]]

    async def crawl(job: Any) -> None: ...

    mill.lane(
        word, name="words", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
        dead={"status": "dead"}, lease=td(minutes=1), order_by=column, gates=limits,
    )(crawl)  # fmt: skip
    async with Kit(mill) as kit:
        claims = await kit.claim(count=9)
        assert sorted(claim.key[0] for claim in claims) == [8, 9]
        assert [claim.row[column] for claim in claims] == [91, 92]


async def test_ranges_are_created_in_one_pass_without_an_index_by_the_key(pg: Db) -> None:
    """As tasks have none by an argument: the table is read a few times, however many keys there are."""
    gated.make(pg)
    pg.execute("drop index pages_domain_run_after_id_idx; drop index pages_domain_idx")
    pg.execute("insert into pages (domain) select 'd' || n from generate_series(1, 5000) n")
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill) as kit:
        store = await kit.store()
        pages = pg.value("select pg_relation_size('pages') / current_setting('block_size')::int")
        read = await buffers(pg, store.gated.statements.range_starts(), (), "force_generic_plan")  # type: ignore[union-attr]
        assert pages <= read < 10 * pages
        assert len(await store.claim(10)) == 10


@pytest.mark.usefixtures("ever_old")
async def test_a_range_that_was_split_is_not_used(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: as functions do it, that may not delete."""
    hold_up(monkeypatch, "slow")
    assert await changed_between(pg, split) == LIMIT


@pytest.mark.usefixtures("ever_old")
async def test_a_cut_without_a_bump_breaks_the_limit(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_up(monkeypatch, "slow")
    whole = ClaimByKeyStatements.renew_ranges
    monkeypatch.setattr(
        ClaimByKeyStatements,
        "renew_ranges",
        lambda self: whole(self).replace("version = _g.version + 1,", "version = _g.version,"),
    )
    assert await changed_between(pg, split) > LIMIT


@pytest.mark.usefixtures("ever_old")
async def test_functions_called_by_many_get_rows_although_the_first_had_but_one(pg: Db) -> None:
    """Ranges are split as keys come: a claim does not come back empty because others claim at that moment."""
    gated.make(pg)
    gated.fill(pg, ["a"])
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    functions = await installed(pg, mill)
    claim = f"select * from {functions.full('claim')}($1)"
    callers = [await asyncpg.connect(pg.direct) for _ in range(4)]
    try:
        await callers[0].fetch(claim, "w0")
        pg.execute("insert into pages (domain) select 'd' || n from generate_series(1, 300) n")

        async def call(n: int) -> int:
            return sum([len(await callers[n].fetch(claim, f"w{n}")) for _ in range(40)])

        got = sum(await asyncio.gather(*(call(n) for n in range(len(callers)))))
    finally:
        for caller in callers:
            await caller.close()
    assert pg.value("select count(*) from rowmill_gates where dim = 'range:domain'") > 10
    assert got >= 150


def many_keys(db: Db, rows: int) -> Mill:
    """400 keys with so many rows each, one of a key at a time."""
    gated.make(db)
    text = "insert into pages (domain) select 'd' || lpad(n::text, 3, '0') from generate_series(1, 400) n"
    db.execute(f"{text}, generate_series(1, {rows})")
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(1, by="domain")])
    return mill


async def test_rows_without_a_key_have_their_share_of_small_claims(pg: Db) -> None:
    """Fairness: they do not wait until all keys are through."""
    async with Kit(many_keys(pg, rows=2)) as kit:
        pg.execute("insert into pages (domain) select null from generate_series(1, 100)")
        store, without = await kit.store(), 0
        for _ in range(100):
            got = await store.claim(4)
            without += sum(1 for claim in got if not claim.gates)
            await store.settle([Settlement(claim, "done") for claim in got])
    assert 400 / 16 - 4 <= without < 50


async def test_keys_with_quotes_and_backslashes_are_claimed_like_any_other(pg: Db) -> None:
    """Whatever a key holds: each row of it runs once."""
    odd = ['"', "\\", "{", "}", ",", "null", " a ", '\\"', "é'", "x\ny"]
    async with Kit(many_keys(pg, rows=1)) as kit:
        pg.execute("delete from pages")
        for n in range(200):
            pg.execute("insert into pages (domain) values (?)", f"{odd[n % len(odd)]}{n}{odd[n // 7 % len(odd)]}")
        store, taken = await kit.store(), 0
        for _ in range(50):
            got = await store.claim(4)
            taken += len(got)
            await store.settle([Settlement(claim, "done") for claim in got])
    assert taken == 200
    assert pg.value("select count(*) from pages where status = 'done' and attempts = 1") == 200


@pytest.mark.parametrize("by", ["source_id", "domain"])
async def test_the_limit_holds_for_many_small_claims(pg: Db, by: str) -> None:
    """C8, four at a time, by numbers and by words: at no time two of one key, and every row once."""
    gated.make(pg)
    pg.execute("create index on pages (source_id, run_after, id) where status = 'queued'")
    pg.execute(
        "insert into pages (domain, source_id)"
        " select 'd' || n, n from generate_series(1, 150) n, generate_series(1, 3) order by random()"
    )
    most = f"select coalesce(max(n), 0) from (select count(*) n from pages where status = 'running' group by {by}) _"
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(1, by=by)])

    async def work(kit: Kit) -> None:
        store = await kit.store()
        while pg.value("select count(*) from pages where status <> 'done'"):
            claims = await store.claim(3)
            assert pg.value(most) <= 1
            await store.settle([Settlement(claim, "done") for claim in claims])

    async with AsyncExitStack() as stack:
        kits = [await stack.enter_async_context(Kit(mill, worker_id=name)) for name in "abcd"]
        await asyncio.gather(*(work(kit) for kit in kits))
    assert pg.value("select count(*) from pages where status = 'done' and attempts = 1") == 450


async def test_a_rate_does_not_wait_for_the_gate_row_of_a_key(pg: Db) -> None:
    """Somebody reports a failure in a transaction of his own and holds the key's gate row: other keys go on."""
    gated.make(pg)
    gated.fill(pg, ["a", "a", "b", "b"])
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Rate(600, by="domain")])
    other = await asyncpg.connect(pg.direct)
    try:
        async with Kit(mill) as kit:
            first = await kit.claim(count=2)
            assert [claim.gates for claim in first] == [{"domain": "a"}, {"domain": "a"}]
            gated.fill(pg, ["a"])
            async with other.transaction():
                held = "select 1 from rowmill_gates where dim = 'domain' and key = 'a' for update"
                assert await other.fetchval(held) == 1
                claims = await asyncio.wait_for(kit.claim(count=4), 60)
                assert [claim.gates for claim in claims] == [{"domain": "b"}, {"domain": "b"}]
            assert len(await kit.claim(count=4)) == 1, "once it is free the key goes on"
    finally:
        await other.close()


async def test_a_change_of_a_keys_tokens_is_not_overwritten_by_a_claim_under_way(
    pg: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: tokens that were set by hand after a claim's snapshot stay as they were set."""
    gated.make(pg)
    gated.fill(pg, ["a"] * 6)
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Rate(600, per=td(hours=10), by="domain")])
    async with Kit(mill) as kit:
        assert len(await kit.claim(count=1)) == 1
    hold_up(monkeypatch, "slow")
    async with Kit(mill, worker_id="slow") as kit:
        await kit.store()
        async with standing_still(pg, kit):
            pg.execute("update rowmill_gates set tokens = 0, version = version + 1 where dim = 'domain'")
    assert pg.value("select tokens < 5 from rowmill_gates where dim = 'domain'")


async def test_rows_that_were_taken_run_although_a_later_statement_of_the_claim_fails(
    pg: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is committed is this worker's: left to the lease it would count as taken back from a dead one."""
    gated.make(pg)
    gated.fill(pg, ["a", "b"])
    mill = Mill(pg.url)
    gated.lane(mill, gates=GATES)
    async with Kit(mill) as kit:
        store = await kit.store()

        async def busy(self: ClaimByKey) -> Any:
            raise Busy("canceling statement due to statement timeout")

        monkeypatch.setattr(ClaimByKey, "_when", busy)
        assert len(await store.claim(4)) == 2
        with pytest.raises(Busy):
            await store.claim(4)
