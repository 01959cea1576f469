"""Gates under attack: keys of every kind, gate rows edited by hand, tables of every shape, mistakes in ``by``."""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections import Counter
from datetime import timedelta as td
from typing import Any

import asyncpg
import pytest

import gated
from databases import Db
from rowmill import Concurrency, DeclarationError, Mill, Rate
from rowmill.testing import Kit

SHAPES: dict[str, list[Any]] = {"turns": [], "walk": [Concurrency(1000)]}
ODD = ["it's", 'quo"te', "", " ", "ünïcødé 🙂", "%s %(x)s", "$1", ":key", "back\\slash", "tab\there", "NULL", "0"]


@pytest.fixture(params=SHAPES)
def beside(request: pytest.FixtureRequest) -> list[Any]:
    """Further gates that let everything through, so that both ways of the claim are taken."""
    return SHAPES[request.param]


async def one_of_each(kit: Kit, keys: int) -> None:
    """With a limit of one: one row of each key is had at once, no more; and after these the next."""
    for _ in range(2):
        claims = await kit.claim(count=1000)
        counts = Counter(next(iter(claim.gates.values())) for claim in claims if claim.gates)
        assert len(claims) == len(counts) == keys
        assert await kit.claim(count=1000) == []
        for claim in claims:
            await kit.settle(claim)
    assert await kit.claim(count=1000) == []


async def test_a_key_may_be_any_text(db: Db, beside: list[Any]) -> None:
    """C8: quotes, spaces, no text at all, what looks like a parameter."""
    gated.make(db)
    gated.fill(db, ODD * 2)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(1, by="domain"), *beside])
    async with Kit(mill) as kit:
        await one_of_each(kit, len(ODD))


KINDS = {
    "integer": ["1", "-2", "30"],
    "numeric(9, 2)": ["1", "2.5", "1.00 + 2"],
    "uuid": ["gen_random_uuid()", "gen_random_uuid()"],
    "boolean": ["true", "false"],
    "char(5)": ["'ab'", "'abc  '", "''"],
    "varchar(20)": ["'ab'", "'ab '", "''"],
    "mood": ["'sad'", "'it''s ok'"],
    "date": ["'2024-01-31'", "'2024-02-01'"],
    "timestamp": ["'2024-01-31 10:00'", "'infinity'"],
    'text collate "C"': ["'b'", "'B'"],
    "integer[]": ["'{1,2}'", "'{1}'"],
    "inet": ["'10.0.0.1'", "'10.0.0.0/8'"],
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_key_may_be_of_any_type_that_has_an_order(pg: Db, kind: str, beside: list[Any]) -> None:
    """C8"""
    pg.execute("create type mood as enum ('sad', 'it''s ok')")
    gated.make(pg)
    pg.execute(f"alter table pages add k {kind}; create index on pages (k, run_after, id) where status = 'queued'")
    for value in KINDS[kind]:
        pg.execute(
            f"with v as materialized (select ({value})::{kind} k)"
            " insert into pages (k) select k from v, (values (1), (2)) n"
        )
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(1, by="k"), *beside])
    async with Kit(mill) as kit:
        await one_of_each(kit, len(KINDS[kind]))


@pytest.mark.parametrize(
    "kind", ["numeric", "double precision", "interval", "timestamptz", "jsonb", "numeric[]", "loose"]
)
async def test_a_key_whose_equal_values_are_written_differently_is_refused(pg: Db, kind: str) -> None:
    """C8: 1.0 and 1.00 would have a limit each."""
    pg.execute("create domain loose as numeric")
    gated.make(pg)
    pg.execute(f"alter table pages add k {kind}")
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(1, by="k")])
    async with Kit(mill) as kit:
        with pytest.raises(DeclarationError, match="by='k' cannot be a gate's key: equal values") as refused:
            await kit.store()
        assert refused.value.hint
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(1, by="k::text")])
    async with Kit(mill) as kit:
        await kit.store()


async def test_on_sqlite_a_column_that_knows_no_case_is_refused_as_a_key(lite: Db) -> None:
    gated.make(lite)
    lite.execute("alter table pages add k text collate nocase")
    for by, works in {"k": False, "lower(k)": True, "domain": True}.items():
        mill = Mill(lite.url)
        gated.lane(mill, gates=[Rate(1, by=by)])
        async with Kit(mill) as kit:
            if works:
                await kit.store()
            else:
                with pytest.raises(DeclarationError, match="written differently"):
                    await kit.store()


MISTAKES = ["nowhere", "domain -- ", "domain; drop table pages", "sum(id)", "domain) = (", "(select", "$1", "1,2"]


@pytest.mark.parametrize("by", MISTAKES)
async def test_a_mistake_in_by_is_told_at_once(db: Db, by: str) -> None:
    """F: an unknown column, half an expression, or more than one: refused before any row is looked at."""
    gated.make(db)
    gated.fill(db, ["a"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(1, by=by)])
    async with Kit(mill) as kit:
        with pytest.raises(DeclarationError, match="cannot be a gate's key") as refused:
            await kit.store()
        assert refused.value.hint
    assert db.value("select count(*) from pages") == 1


async def test_a_key_too_long_for_an_index_holds_nobody_else_up(db: Db, beside: list[Any]) -> None:
    """C8: three thousand characters that do not compress; the table itself has no index on them."""
    gated.make(db)
    if db.dialect == "postgresql":
        db.execute("drop index pages_domain_run_after_id_idx, pages_domain_idx")
    long = "".join(random.Random(1).choices(string.printable.strip(), k=3000))
    gated.fill(db, [long, long, "a", "a", "b", "b"])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(1, by="domain"), *beside])
    async with Kit(mill) as kit:
        await kit.claim(count=9)
        assert {"a", "b"} <= gated.running(db).keys()
        assert max(gated.running(db).values()) == 1


async def test_gate_rows_deleted_and_edited_by_hand_do_no_harm(db: Db, beside: list[Any]) -> None:
    """C8: they are state, not the truth: what runs is counted."""
    gated.make(db)
    gated.fill(db, ["a"] * 30 + ["b"] * 30)
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(2, by="domain"), *beside])
    edits = [
        "delete from rowmill_gates", "update rowmill_gates set version = 0", "update rowmill_gates set most = 1",
        "update rowmill_gates set most = null, tokens = -5", "delete from rowmill_gates where key = 'a'",
    ]  # fmt: skip
    async with Kit(mill) as kit:
        for edit in edits:
            claims = await kit.claim(count=9)
            assert max(gated.running(db).values(), default=0) <= 2
            db.execute(edit)
            claims += await kit.claim(count=9)
            assert max(gated.running(db).values(), default=0) <= 2
            for claim in claims:
                await kit.settle(claim)
        assert await kit.claim(count=9)


async def test_a_lane_may_have_any_name(db: Db, beside: list[Any]) -> None:
    gated.make(db)
    gated.fill(db, ["a"] * 3)
    mill = Mill(db.url)

    async def crawl(job: Any) -> None: ...

    states = {state: {"status": value} for state, value in
              {"ready": "queued", "running": "running", "done": "done", "dead": "dead"}.items()}  # fmt: skip
    for name in ("it's", 'a "b" $3::text'):
        mill.lane("pages", name=name, gates=[Concurrency(1, by="domain"), *beside], **states)(crawl)
        async with Kit(mill) as kit:
            (claim,) = await kit.claim(name, count=9)
            assert await kit.claim(name, count=9) == []
            await kit.settle(claim)


async def test_gates_on_a_partitioned_table_with_a_key_of_two_columns(pg: Db, beside: list[Any]) -> None:
    """C8: with column names that the claim's own steps might use."""
    pg.execute("""
create table parts (spot integer, key integer, turn integer, tokens text, status text not null default 'queued',
  worker text, claimed_at timestamptz, attempts integer not null default 0,
  created_at timestamptz not null default now(),
  primary key (spot, turn)) partition by list (spot);
create table parts_1 partition of parts for values in (1);
create table parts_2 partition of parts for values in (2);
insert into parts (spot, key, turn, tokens) select 1 + n % 2, n, n, 'k' || n % 3 from generate_series(1, 12) n
""")
    mill = Mill(pg.url)

    async def crawl(job: Any) -> None: ...

    states = {state: {"status": value} for state, value in
              {"ready": "queued", "running": "running", "done": "done", "dead": "dead"}.items()}  # fmt: skip
    gates = [Concurrency(2, by="tokens"), Rate(1000, by="tokens"), *beside]
    mill.lane("parts", gates=gates, **states)(crawl)
    async with Kit(mill) as kit:
        for _ in range(2):
            claims = await kit.claim(count=99)
            assert len(claims) == 6
            assert await kit.claim(count=99) == []
            for claim in claims:
                await kit.settle(claim)
    assert pg.value("select count(*) from parts where status = 'done'") == 12


async def test_a_slow_rate_is_not_forgotten(pg: Db) -> None:
    """D7: two hours without a row do not fill a bucket that takes a day."""
    gated.make(pg)
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Rate(1, per=td(days=1), by="domain", burst=1)])
    async with Kit(mill) as kit:
        for hours, had in [(0, 1), (2, 0), (2, 0), (21, 1)]:
            gated.fill(pg, ["a"])
            kit.advance(td(hours=hours))
            store = await kit.store()
            store.gated._forget_at = 0.0  # type: ignore[union-attr]
            claims = await kit.claim(count=5)
            assert len(claims) == had
            for claim in claims:
                await kit.settle(claim)
            pg.execute("delete from pages")
            store.gated._forget_at = 0.0  # type: ignore[union-attr]
            assert await kit.claim(count=5) == []


async def test_a_row_that_somebody_has_locked_is_not_asked_for_without_end(pg: Db, beside: list[Any]) -> None:
    """A worker that finds a key free, and its only row locked by a transaction of the user's, comes back less often."""
    gated.make(pg)
    gated.fill(pg, ["a"])
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(1, by="domain"), *beside], poll=td(seconds=1))
    asked = "select xact_commit from pg_stat_database where datname = current_database()"
    connection = await asyncpg.connect(pg.direct)
    try:
        async with connection.transaction():
            await connection.execute("select * from pages for update")
            worker = mill.worker(worker_id="w")
            task = asyncio.create_task(worker.run())
            await asyncio.sleep(1.0)
            before = pg.value(asked)
            await asyncio.sleep(2.5)
            await asyncio.sleep(0.5)  # the server counts with a delay
            often = pg.value(asked) - before
        assert often < 120
        deadline = time.monotonic() + 60
        while pg.value("select status from pages") != "done":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    finally:
        await connection.close()
    worker.stop()
    await task
