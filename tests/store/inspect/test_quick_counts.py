"""Looking at large tables: counts, pages of rows and checks that cost next to nothing, and say what they are."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import farm
from databases import Db
from rowmill import Mill
from rowmill.errors import Busy, DeclarationError
from rowmill.ops.row_actions import Operator, Selection
from rowmill.store import Database
from rowmill.store.inspect import pages, quick_counts
from rowmill.store.inspect.health import examine
from rowmill.store.inspect.lane_view import LaneView, view_lane
from rowmill.store.inspect.pages import Filter, Wanted, page
from rowmill.store.inspect.quick_counts import Count, QuickCounter


@pytest.fixture
async def view(db: Db) -> AsyncIterator[LaneView]:
    db.execute(farm.JOBS[db.dialect])
    mill = Mill(db.url)

    @mill.lane(
        "jobs", name="jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
        dead={"status": "dead"},
    )  # fmt: skip
    async def work(job: Any) -> None: ...

    database = Database.open(db.url)
    yield await view_lane(mill.lanes["jobs"], "default", database, mill.clock)
    await database.close()


def fill(db: Db, *states: tuple[str, int]) -> None:
    for status, count in states:
        series = (
            f"generate_series(1, {count}) i"
            if db.dialect == "postgresql"
            else f"(with recursive s(i) as (select 1 union all select i + 1 from s where i < {count}) select i from s)"
        )
        db.execute(f"insert into jobs (status, note) select '{status}', 'note ' || i from {series}")
    if db.dialect == "postgresql":
        db.execute("analyze jobs")


async def test_small_counts_are_exact_and_a_state_the_lane_lacks_is_none(db: Db, view: LaneView) -> None:
    fill(db, ("queued", 3), ("done", 5), ("dead", 1))
    found = await QuickCounter(view).look()
    exact = {state: count.number for state, count in found.counts.items() if count.how == "exact"}
    assert exact == {"ready": 3, "waiting": 0, "running": 0, "done": 5, "dead": 1, "stuck": 0}
    assert found["canceled"] == Count(None, "none")
    assert found.oldest_ready is not None


async def test_large_counts_are_marked_as_what_they_are(
    db: Db, view: LaneView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimates are marked as such; counting stops at a bound; exact on request."""
    monkeypatch.setattr(quick_counts, "BOUND", 100)
    fill(db, ("queued", 5), ("done", 900))
    glancer = QuickCounter(view)
    found = await glancer.look()
    assert found["ready"] == Count(5, "exact")
    expected = Count(900, "estimate") if db.dialect == "postgresql" else Count(100, "at_least")
    assert found["done"] == expected
    assert await glancer.exact("done") == Count(900, "exact")


async def test_statistics_that_are_older_than_the_rows_are_not_believed(
    pg: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute(farm.JOBS["postgresql"])
    pg.execute("alter table jobs set (autovacuum_enabled = off)")
    fill(pg, ("done", 50))
    pg.execute("insert into jobs (status) select 'queued' from generate_series(1, 500)")
    monkeypatch.setattr(quick_counts, "BOUND", 100)
    mill = Mill(pg.url)
    mill.lane("jobs", name="jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"})(
        lambda job: None
    )
    database = Database.open(pg.url)
    found = await QuickCounter(await view_lane(mill.lanes["jobs"], "default", database, mill.clock)).look()
    assert found["ready"] == Count(100, "at_least")
    await database.close()


async def test_a_count_over_its_time_is_given_up_and_not_tried_again_at_once(
    db: Db, view: LaneView, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(db, ("queued", 2))
    asked: list[str] = []
    ask = LaneView.ask

    async def slow(self: LaneView, text: str, *rest: Any, **more: Any) -> Any:
        asked.append(text)
        if "'done'" in text and "explain" not in text:
            raise Busy("canceling statement due to statement timeout")
        return await ask(self, text, *rest, **more)

    monkeypatch.setattr(LaneView, "ask", slow)
    glancer = QuickCounter(view)
    found = await glancer.look()
    assert found["ready"] == Count(2, "exact")
    assert found["done"].how in ("estimate", "unknown")
    asked.clear()
    await glancer.look()
    assert [text for text in asked if "'done'" in text and "explain" not in text] == []


async def test_a_statement_over_its_time_is_interrupted_on_both_databases(db: Db, view: LaneView) -> None:
    began = time.monotonic()
    endless = (
        "with recursive s(i) as (select 1 union all select i + 1 from s where i < 2000000000) select count(*) from s"
    )
    with pytest.raises(Busy):
        await view.ask(endless, seconds=0.2)
    assert time.monotonic() - began < 20
    assert await view.ask("select 1")


async def test_pages_follow_the_key_and_miss_or_repeat_no_row(db: Db, view: LaneView) -> None:
    fill(db, ("queued", 30), ("done", 30), ("dead", 5))
    for oldest_first in (False, True):
        seen: list[int] = []
        wanted = Wanted(size=7, oldest_first=oldest_first)
        for _ in range(20):
            found = await page(view, wanted)
            seen += [row.id for row in found.rows]
            if found.after is None:
                break
            wanted = Wanted(size=7, oldest_first=oldest_first, after=found.after)
        assert seen == (list(range(1, 66)) if oldest_first else list(range(65, 0, -1)))


async def test_a_search_that_few_rows_pass_goes_in_ranges_and_comes_to_the_end(
    db: Db, view: LaneView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paging stays fast at any size: a page that would take too long stops, and says where to go on."""
    fill(db, ("done", 400), ("dead", 1), ("done", 400))
    monkeypatch.setattr(pages, "_RANGE", 50)
    monkeypatch.setattr(pages, "_BUDGET", -1.0)
    wanted, found, looks = Wanted("dead", ranges=True), list[int](), 0
    for _ in range(40):
        part = await page(view, wanted)
        found += [row.id for row in part.rows]
        looks += part.looked_at or 0
        assert part.looked_at == 50
        if part.after is None:
            break
        wanted = Wanted("dead", ranges=True, after=part.after)
    assert found == [401]
    assert looks == 850


async def test_every_filter_means_what_it_says(db: Db, view: LaneView) -> None:
    fill(db, ("queued", 12))
    db.execute("update jobs set note = null where id = 3; update jobs set note = '50% _off' where id = 4")

    async def ids(*filters: Filter, search: str = "") -> set[int]:
        return {row.id for row in (await page(view, Wanted(filters=filters, search=search))).rows}

    assert await ids(Filter("id", "eq", "7")) == {7}
    assert await ids(Filter("id", "gt", "10")) == {11, 12}
    assert await ids(Filter("id", "lt", "3")) == {1, 2}
    assert await ids(Filter("note", "null")) == {3}
    assert await ids(Filter("note", "set"), Filter("id", "lt", "5")) == {1, 2, 4}
    assert await ids(Filter("note", "has", "% _")) == {4}
    assert await ids(Filter("note", "ne", "note 1"), Filter("id", "lt", "4")) == {2, 3}
    assert await ids(search="NOTE 12") == {12}
    assert await ids(search="7") == {7}
    with pytest.raises(DeclarationError, match="no column 'nota'"):
        await ids(Filter("nota", "eq", "1"))


async def test_a_row_is_put_off_only_while_nobody_holds_it(db: Db, view: LaneView) -> None:
    fill(db, ("queued", 1), ("running", 1))
    chosen = Selection(("ready", "waiting"), ((1,), (2,)))
    written = [key async for step in Operator(view).schedule(chosen, 3600) for key in step]
    assert written == [(1,)]
    assert (await view.find([(1,)]))[0].state == "waiting"


async def test_health_finds_the_oldest_transaction_and_says_how_to_end_it(pg: Db) -> None:
    """The horizon guard."""
    import asyncpg

    mill = Mill(pg.url)
    pg.execute(farm.JOBS["postgresql"])
    mill.lane("jobs", name="jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"})(
        lambda job: None
    )
    database = Database.open(pg.url)
    view = await view_lane(mill.lanes["jobs"], "default", database, mill.clock)
    holder = await asyncpg.connect(pg.direct, server_settings={"application_name": "report"})
    held = holder.transaction()
    await held.start()
    await holder.execute("select 1 from jobs")
    found = {finding.check: finding for finding in await examine(database, [view])}
    assert "report, idle in transaction" in found["oldest_transaction"].told
    assert set(found) >= {"dead_rows", "bloat", "indexes", "claim_head", "clock", "polls", "connections", "own_tables"}
    assert "create index concurrently" in found["indexes"].command
    await held.rollback()
    await holder.close()
    await database.close()


async def test_an_old_transaction_is_worse_than_a_young_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from rowmill.store.inspect import health

    def run(text: str, _: Any) -> list[Any]:
        return [] if "prepared" in text else [(7, "report", "idle in transaction", 3600.0)]

    (finding,) = health._oldest(run)
    assert finding.level == "bad"
    assert finding.command == "select pg_terminate_backend(7)"
