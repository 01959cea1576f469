"""``shard=``: a lane keeps to its value of a column, or to several in turn, in every statement."""

from __future__ import annotations

import asyncio
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from recorded import astray, recording
from rowmill import Breaker, Concurrency, Dead, Mill, Rate, Retry, Snooze, Wait
from rowmill.errors import DeclarationError, Unreachable, WrongResult
from rowmill.ops.row_actions import Operator, Selection
from rowmill.store.inspect import plans, sql_listing
from rowmill.store.inspect.failure_families import errors
from rowmill.store.inspect.gate_view import lane_gates
from rowmill.store.inspect.gauges import gauges
from rowmill.store.inspect.indexes import needed
from rowmill.store.inspect.lane_view import view_lane
from rowmill.store.inspect.pages import Filter, Wanted, page
from rowmill.store.inspect.quick_counts import QuickCounter
from rowmill.store.inspect.why import inquire
from rowmill.store.lane.shards import MOST
from rowmill.testing import Kit

STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead", "canceled")}


async def handle(job: Any) -> None:
    return None


def make(db: Db, rows: int, tenants: int, *, parted: bool = True) -> None:
    """``rows`` rows of each of so many tenants; on PostgreSQL each tenant has a partition."""
    pg = db.dialect == "postgresql"
    time = "timestamptz" if pg else "datetime"
    db.execute(
        f"create table jobs (tenant integer, id integer, status text default 'ready', worker text, claimed_at {time},"
        f" heartbeat_at {time}, run_after {time}, attempts integer default 0, error text, site text, seen text,"
        f" primary key (tenant, id)){' partition by list (tenant)' if pg and parted else ''}"
    )
    for tenant in range(tenants):
        if pg and parted:
            db.execute(f"create table tenant_{tenant} partition of jobs for values in ({tenant})")
        for id in range(rows):
            db.execute("insert into jobs (tenant, id, site) values (?, ?, ?)", tenant, id, f"site-{id % 2}")


def states(db: Db) -> dict[tuple[int, int], str]:
    return {(row["tenant"], row["id"]): row["status"] for row in db.query("select tenant, id, status from jobs")}


async def test_a_lane_takes_and_ends_rows_of_its_own_shard_alone(db: Db, mill: Mill) -> None:
    make(db, 3, 2)
    mill.lane("jobs", name="jobs", shard={"tenant": 1}, **STATES)(handle)
    async with Kit(mill) as kit:
        await kit.drain()
    assert {key for key, state in states(db).items() if state == "done"} == {(1, 0), (1, 1), (1, 2)}
    assert {key for key, state in states(db).items() if state == "ready"} == {(0, 0), (0, 1), (0, 2)}


async def test_where_and_shard_hold_together(db: Db, mill: Mill) -> None:
    make(db, 4, 2)
    mill.lane("jobs", name="jobs", shard={"tenant": [1]}, where="site = 'site-0' or id = 3", **STATES)(handle)
    async with Kit(mill) as kit:
        await kit.drain()
    assert {key for key, state in states(db).items() if state == "done"} == {(1, 0), (1, 2), (1, 3)}


async def test_several_shards_are_served_in_turn(db: Db, mill: Mill) -> None:
    make(db, 4, 5)
    mill.lane("jobs", name="jobs", shard={"tenant": range(4)}, **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        turns = [{claim.id[0] for claim in await store.claim(2)} for _ in range(8)]
        assert turns[:4] == turns[4:]
        (first,) = turns[0]  # of its own, for each worker
        assert turns[:4] == [{(first + n) % 4} for n in range(4)]
        assert await store.claim(2) == []
    assert {key for key, state in states(db).items() if state == "ready"} == {(4, id) for id in range(4)}


async def test_workers_begin_in_different_shards(db: Db, mill: Mill) -> None:
    """In one shard they would pass over each other's locked rows."""
    make(db, 2, 8)
    mill.lane("jobs", name="jobs", shard={"tenant": range(8)}, **STATES)(handle)
    first = set()
    for n in range(6):
        async with Kit(mill, worker_id=f"w{n}") as kit:
            first |= {claim.id[0] for claim in await (await kit.store()).claim(1)}
    assert len(first) > 2


async def test_a_claim_goes_on_to_shards_that_have_rows(db: Db, mill: Mill) -> None:
    make(db, 2, 40, parted=False)
    db.execute("update jobs set status = 'done' where tenant not in (7, 30)")
    mill.lane("jobs", name="jobs", shard={"tenant": range(40)}, **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        assert sorted(claim.id for claim in await store.claim(10)) == [(7, 0), (7, 1), (30, 0), (30, 1)]
        assert store.look_again is None


async def test_a_reply_that_is_lost_in_a_later_shard_is_told_at_once(db: Db, mill: Mill) -> None:
    """Its rows may be claimed all the same: the worker has to look for them now, not at the next claim."""
    make(db, 1, 2)
    mill.lane("jobs", name="jobs", shard={"tenant": range(2)}, **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        assert store.shards is not None
        (first,) = {claim.id[0] for claim in await store.claim(1)}  # each worker begins elsewhere
        db.execute("update jobs set status = 'ready', worker = null where status = 'running'")
        later = store.shards.of(first)  # now the second in turn
        claim = later.claim

        async def lost(count: int) -> Any:
            assert len(await claim(count)) == 1
            raise Unreachable("the reply was lost")

        later.claim = lost  # type: ignore[method-assign]
        with pytest.raises(Unreachable):
            await store.claim(10)
        assert sorted(claim.id for claim in await store.mine()) == [(0, 0), (1, 0)]


async def test_a_look_at_many_empty_shards_is_one_statement(db: Db, mill: Mill) -> None:
    make(db, 1, 2, parted=False)
    db.execute("delete from jobs")
    mill.lane("jobs", name="jobs", shard={"tenant": range(1000)}, **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        assert await store.claim(10) == []  # the first one asks a shard before it looks
        with recording(store.database) as sent:
            assert await store.claim(10) == []
            assert len(sent) == 1
            for tenant in range(100, 100 + MOST + 2):
                db.execute("insert into jobs (tenant, id) values (?, 1)", tenant)
            assert len(await store.claim(100)) == MOST
            assert len([text for text in sent if "update" in text]) == MOST
        assert store.look_again is not None  # there is more
        assert len(await store.claim(100)) == 2


async def test_outcomes_renewals_and_reads_go_to_the_shard_of_each_claim(db: Db, mill: Mill) -> None:
    make(db, 2, 3)
    mill.lane("jobs", name="jobs", shard={"tenant": [0, 1, 2]}, **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        claims = await store.claim(6)
        claims = claims + await store.claim(6)
        assert len(claims) == 6
        assert {claim.holder.bucket for claim in claims} == {0, 1, 2}
        assert await store.renew(claims) == claims
        assert await store.still_held(claims) == [True] * 6
        assert (await kit.settle(claims[0], None)).written
        assert (await kit.settle(claims[2], Retry(after=td(hours=1)))).written
        assert (await kit.settle(claims[4], Snooze(td(hours=1)))).written
        assert (await kit.settle(claims[5], Dead("no"))).written
        assert await store.still_held(claims) == [False, True, False, True, False, False]
    assert list(states(db).values()).count("running") == 2


async def test_rows_of_a_dead_worker_come_back_in_every_shard_and_in_no_other(db: Db, mill: Mill) -> None:
    make(db, 1, 3)
    mill.lane("jobs", name="jobs", shard={"tenant": [0, 1]}, lease=td(minutes=1), **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        assert len(await store.claim(1) + await store.claim(1)) == 2
        db.execute("update jobs set status = 'running', worker = 'other' where tenant = 2")
        mill.clock.shift = td(hours=1)
        assert sorted(swept.id for swept in await store.sweep(td(minutes=1))) == [(0, 0), (1, 0)]
    assert states(db) == {(0, 0): "ready", (1, 0): "ready", (2, 0): "running"}


async def test_a_limit_by_key_counts_rows_of_all_shards(db: Db, mill: Mill) -> None:
    make(db, 4, 3)
    mill.lane("jobs", name="jobs", shard={"tenant": range(3)}, gates=[Concurrency(2, by="site")], **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        claims = [claim for _ in range(8) for claim in await store.claim(5)]
        assert len(claims) == 4
        assert len({claim.id[0] for claim in claims}) >= 1
    assert db.query("select site, count(*) as n from jobs where status = 'running' group by site order by site") == [
        {"site": "site-0", "n": 2}, {"site": "site-1", "n": 2},
    ]  # fmt: skip


async def test_a_worker_drains_all_shards(db: Db, mill: Mill) -> None:
    make(db, 30, 7)
    mill.lane("jobs", name="jobs", shard={"tenant": range(7)}, batch=8, gates=[Concurrency(3)], **STATES)(handle)
    async with Kit(mill) as kit:
        async with asyncio.timeout(60):
            await kit.drain()
    assert set(states(db).values()) == {"done"}


# -- every statement

GATES: dict[str, list[Any]] = {
    "none": [],
    "by_key": [Concurrency(2, by="site"), Rate(1000, per=td(seconds=1), by="site")],
    "locking": [Concurrency(5, by="site"), Concurrency(6), Breaker(9, td(minutes=1), by="site")],
}


async def _work(kit: Kit, db: Db) -> None:
    """Every verb of a worker."""
    store = await kit.store()
    claims = [claim for _ in range(6) for claim in await store.claim(2)]
    assert len(claims) >= 4
    await store.renew(claims)
    await store.still_held(claims)
    ends = (None, Retry(), Dead("no"), Wait("site is null", timeout=td(days=1)), Snooze(td(0)), {"seen": "x"})
    for claim, end in zip(claims, ends, strict=False):
        await kit.settle(claim, end)
    await store.mine()
    await store.unfinished()
    await store.left_running()
    await kit.look()
    if store.waits is not None:
        await store.waits.forget()
    await store.claim(1)
    db.execute("update jobs set claimed_at = null, heartbeat_at = null where id = 0 and status = 'running'")
    kit.advance(td(hours=2))
    await kit.sweep()
    db.execute("update jobs set run_after = null")
    await kit.expire()
    kit.advance(-td(hours=2))


async def _look(kit: Kit, mill: Mill) -> None:
    """Every question, and every action of an operator."""
    store = await kit.store()
    view = await view_lane(mill.lanes["jobs"], store.binding.environment, store.database, mill.clock)
    await view.count()
    for state in ("ready", "waiting", "running", "stuck", "done", "dead", "canceled", None):
        await view.rows(state)
    await view.holders()
    await view.timeless()
    await view.sample(["status"])
    await view.examine((7, 1), [])
    await QuickCounter(view).look()
    await QuickCounter(view).exact("ready")
    await page(view, Wanted(search="x", filters=(Filter("site", "eq", "site-1"),)))
    await page(view, Wanted(state="ready", ranges=True))
    await errors([view])
    await gauges(view)
    await (await inquire(view, (7, 1))).facts([view], [view])
    if view.lane.groups:
        gates = await lane_gates(view)
        for dim in gates.dims:
            await gates.keys(dim, 10)
            if dim.phrase is not None:
                await gates.known(dim, "site-1")
    statements = plans.statements(view.binding)
    await store.database.read(
        lambda run: [plans.serves(run, statements, need) for need in needed(view.binding, statements)]
    )
    await store.database.read(lambda run: plans.explain(run, statements))
    act = Operator(view)
    for steps in (
        act.retry(Selection(("dead",))),
        act.cancel(Selection(("ready",), keys=((7, 1), (7, 2))), "no"),
        act.retry(Selection(("canceled", "done"))),
        act.schedule(Selection(("ready",)), 0.0),
        act.release(Selection(("running",))),
    ):
        async for _ in steps:
            pass
    assert (await act.insert({"id": 100}))[0] == 7


@pytest.mark.parametrize("gates", GATES)
async def test_the_shard_stands_beside_every_mention_of_the_table(db: Db, mill: Mill, gates: str) -> None:
    """Issue: a lane's filter is in every statement: claim, held, settle, renew, sweep, probes, inspection."""
    make(db, 8, 9)
    mill.lane(
        "jobs", name="jobs", shard={"tenant": 7}, gates=GATES[gates], lease=td(minutes=1), inputs=["site"],
        expires_after=td(days=30), **STATES,
    )(handle)  # fmt: skip
    db.execute(f"alter table jobs add column created_at {'timestamptz' if db.dialect == 'postgresql' else 'datetime'}")
    async with Kit(mill) as kit:
        store = await kit.store()
        with recording(store.database) as sent:
            await _work(kit, db)
            await _look(kit, mill)
        view = await view_lane(mill.lanes["jobs"], store.binding.environment, store.database, mill.clock)
        sent += (await sql_listing.texts(view)).values()
    assert len([text for text in sent if "jobs" in text]) > 60
    found = {part: text for text in sent for part in astray(text, "jobs", "tenant")}
    assert not found, "\n\n".join(f"-- {part}\n{text}" for part, text in found.items())
    others = [row for row in db.query("select * from jobs where tenant <> 7") if row["status"] != "ready"]
    assert others == []


async def test_a_claim_looks_into_one_partition_alone(db: Db, mill: Mill) -> None:
    """Issue: on plain PostgreSQL it is a partition-pruning filter."""
    if db.dialect == "sqlite":
        pytest.skip("SQLite has no partitions")
    make(db, 2, 4)
    mill.lane("jobs", name="jobs", shard={"tenant": range(4)}, gates=[], **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        statements = store.statements.of(2)
        texts = [
            statements.claim(),
            statements.claim(bounded=True),
            statements.settle_done(),
            statements.settle("dead", ()),
        ]
        texts += [statements.renew(), statements.read()]
        found = await store.database.transact(lambda run: [plans.generic(run, statements, text) for text in texts])
    for plan in found:
        assert "tenant_2" in plan
        assert not [part for part in ("tenant_0", "tenant_1", "tenant_3") if part in plan], plan


# -- declarations


@pytest.mark.parametrize(
    ("shard", "words", "hint"),
    [
        (7, "shard is a column and its value", 'shard={"tenant_id": 7}'),
        ({"tenant": 7, "id": 1}, "names 2 columns", "where="),
        ({1: 7}, "names a column by its name, not 1", "shard="),
        ({"tenant": None}, "has NULL", "NOT NULL"),
        ({"tenant": [1, None]}, "has NULL", "NOT NULL"),
        ({"tenant": []}, "has 0 values, so no row could be claimed", "range(32)"),
        ({"tenant": range(10_001)}, "10,001 values", "range(32)"),
        ({"tenant": {1, 2}}, "is set, which is neither", "range(32)"),
        ({"tenant": (n for n in range(2))}, "is generator, which is neither", "range(32)"),
        ({"tenant": [[1], [2]]}, "has [1], which is no single value", "range(32)"),
        ({"tenant": [1, 2, 1]}, "has 1 twice", "once"),
        ({"status": "ready"}, "shard names 'status', which ready names too", "leave 'status' out"),
    ],
)
def test_a_shard_that_cannot_be_is_refused_with_what_to_do(shard: Any, words: str, hint: str) -> None:
    with pytest.raises(DeclarationError) as refused:
        Mill("sqlite://").lane("jobs", name="jobs", shard=shard, **STATES)(handle)
    assert words in refused.value.message
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ({"tenent": 1}, "shard: there is no column 'tenent'"),
        ({"tenant": "seven"}, "'seven' does not fit the column's type"),
        ({"tenant": True}, "True does not fit the column's type"),
        ({"site": 7}, "7 does not fit the column's type"),
        ({"worker": "w"}, "column 'worker' has the role worker"),
        ({"attempts": 1}, "column 'attempts' has the role attempts"),
    ],
)
async def test_a_shard_that_does_not_fit_the_table_is_refused(db: Db, mill: Mill, shard: Any, words: str) -> None:
    make(db, 1, 1)
    mill.lane("jobs", name="jobs", shard=shard, **STATES)(handle)
    with pytest.raises(DeclarationError, match=words) as refused:
        async with Kit(mill) as kit:
            await kit.store()
    assert refused.value.hint


async def test_a_value_that_only_the_database_can_judge_is_refused_too(db: Db, mill: Mill) -> None:
    if db.dialect == "sqlite":
        pytest.skip("a column of SQLite takes any value")
    make(db, 1, 1)
    db.execute("alter table jobs add column owner uuid")
    mill.lane("jobs", name="big", shard={"tenant": 2**31}, **STATES)(handle)
    mill.lane("jobs", name="owned", shard={"owner": "nobody"}, **STATES)(handle)
    async with Kit(mill) as kit:
        with pytest.raises(DeclarationError, match="2147483648 does not fit the column's type integer"):
            await kit.store("big")
        with pytest.raises(DeclarationError, match="does not fit its column: invalid input syntax for type uuid"):
            await kit.store("owned")


def test_tasks_have_no_shard() -> None:
    with pytest.raises(DeclarationError, match="there is no parameter 'shard'"):
        Mill("sqlite://").queue("mail", shard={"tenant": 1})


async def test_a_row_stays_in_its_shard(db: Db, mill: Mill) -> None:
    make(db, 1, 2)
    mill.lane("jobs", name="sites", shard={"site": "site-0"}, **STATES)(handle)
    mill.lane("jobs", name="jobs", shard={"tenant": 1}, **STATES)(handle)
    async with Kit(mill) as kit:
        store = await kit.store("jobs")
        with pytest.raises(WrongResult, match="says in which shard"):
            (await kit.store("sites")).checked({"site": "site-1"})
        view = await view_lane(mill.lanes["jobs"], store.binding.environment, store.database, mill.clock)
        with pytest.raises(DeclarationError, match="would not be in it"):
            await Operator(view).insert({"tenant": 0, "id": 5})
        assert await Operator(view).insert({"id": 5}) == (1, 5)


async def test_lanes_of_different_shards_do_not_overlap(db: Db, mill: Mill) -> None:
    make(db, 2, 2)
    for tenant in (0, 1):
        lease = td(minutes=5 + tenant)
        mill.lane("jobs", name=f"jobs{tenant}", shard={"tenant": tenant}, lease=lease, **STATES)(handle)
    async with Kit(mill) as kit:
        await kit.drain()
    assert set(states(db).values()) == {"done"}
