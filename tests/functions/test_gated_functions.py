"""The functions of a lane with gates: callers in other languages keep to them, and teach them the same as Python."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from test_functions import handle

import systems
from databases import Db
from golden import as_newest, compare
from rowmill import Breaker, Concurrency, Dead, Mill, Rate, exponential
from rowmill.errors import DeclarationError
from rowmill.testing import Kit
from sqlworker import Functions, install_now, installed

SOURCES = Breaker(3, td(minutes=5), by="source_id", table="sources")
LISTED = Rate.from_table("sources", "rate_limit_per_minute", by="source_id", burst=2)


def declared(db: Db, *gates: Any, **options: Any) -> Mill:
    systems.create(db, "prices")
    mill = Mill(db.url)
    systems.scrape(mill, handle, gates=list(gates), **options)
    return mill


def held(functions: Functions, most: int = 20) -> list[Any]:
    """Claims until there is none to be had."""
    found = []
    while len(found) < most and (row := functions.claim()) is not None:
        found.append(row)
    return found


def test_the_gated_functions_are_those_that_were_reviewed(pg: Db) -> None:
    """D2, D7, D8: kept as a file to be read; UPDATE_GOLDEN=1 rewrites it."""
    functions = install_now(pg, declared(pg, LISTED, SOURCES)).functions
    chosen = [functions[verb] for verb in ("claim", "complete", "fail")]
    text = "\n\n".join(f"-- {function.verb}\n{function.sql};" for function in chosen) + "\n"
    compare(Path(__file__).parents[1] / "golden_functions" / "scrape_gated.sql", as_newest(text))


def test_a_rate_in_the_users_table_holds_back_callers_too(pg: Db) -> None:
    """D2, D7: two at once, and then no more than the rate lets through; a source without a limit has none."""
    functions = install_now(pg, declared(pg, LISTED))
    slow, free = systems.insert_source(pg, rate_limit_per_minute=6), systems.insert_source(pg)
    systems.insert_scrape(pg, 6, source_id=slow[0])
    systems.insert_scrape(pg, 4, source_id=free[0])
    assert Counter(row["source_id"] for row in held(functions)) == {slow[0]: 2, free[0]: 4}
    pg.execute("update rowmill_gates set refilled_at = refilled_at - interval '10 seconds' where key = ?", str(slow[0]))
    assert [row["source_id"] for row in held(functions)] == [slow[0]], "one in ten seconds"


async def test_a_limit_by_key_is_exact_however_many_call_at_once(pg: Db) -> None:
    """X1, C8: eight sessions and a Python worker claim all they can get: two of each key, never more."""
    mill = declared(pg, Concurrency(2, by="source_id"))
    functions = await installed(pg, mill)
    ids = systems.insert_source(pg, 3)
    for each in ids:
        systems.insert_scrape(pg, 20, source_id=each)

    async def caller(number: int) -> int:
        connection, claimed = await asyncpg.connect(pg.direct), 0
        try:
            for _ in range(6):
                claimed += len(await connection.fetch(f"select * from {functions.full('claim')}($1)", f"w-{number}"))
        finally:
            await connection.close()
        return claimed

    async with Kit(mill) as kit:
        counts = await asyncio.gather(*(caller(n) for n in range(8)), *(kit.claim(count=2) for _ in range(3)))
    running = "select source_id, count(*) as n from scrape_jobs where status = 'running' group by 1"
    assert {row["source_id"]: row["n"] for row in pg.query(running)} == dict.fromkeys(ids, 2)
    assert sum(count if isinstance(count, int) else len(count) for count in counts) == 6


@pytest.mark.parametrize("table", ["sources", None])
async def test_a_breaker_learns_from_callers_what_it_learns_from_python_workers(pg: Db, table: str | None) -> None:
    """D8: the same ends, by functions on one source and by Python on another, leave the same state after each."""
    mill = declared(pg, Breaker(2, td(minutes=5), by="source_id", table=table), max_attempts=50,
                    backoff=exponential(td(microseconds=1), jitter=False))  # fmt: skip
    functions = await installed(pg, mill)
    python, other = (systems.insert_source(pg)[0] for _ in range(2))
    names = ("failure_streak", "paused_until") if table else ("streak", "open_until")
    where = "sources where id = ?" if table else "rowmill_gates where key = ?"
    columns = ", ".join((*names, "last_success_at", "last_failure_at"))

    def state(source: int) -> list[Any]:
        rows = pg.query(f"select {columns} from {where}", source if table else str(source))
        return list(rows[0].values()) if rows else [0, None, None, None]

    def alike(one: Any, two: Any) -> bool:
        return (
            abs(one - two) < td(seconds=10) if isinstance(one, datetime) and isinstance(two, datetime) else one == two
        )

    async with Kit(mill, worker_id="w") as kit:
        for step, end in enumerate(["fail", "done", "fail", "fail", "wait", "fail", "wait", "done", "permanent"]):
            if end == "wait":  # the pause is over
                column, table_name = names[1], table or "rowmill_gates"
                pg.execute(f"update {table_name} set {column} = now() - interval '1 second' where {column} > now()")
                continue
            systems.insert_scrape(pg, source_id=python)
            (claim,) = await kit.claim()
            ended = {"fail": ConnectionError("no"), "done": None, "permanent": Dead("no")}[end]
            await kit.settle(claim, ended)
            pg.execute("delete from scrape_jobs")
            systems.insert_scrape(pg, source_id=other)
            row = functions.claim()
            assert row is not None, (step, end)
            if end == "done":
                assert functions.settle("complete", row) is True
            else:
                functions.settle("fail", row, error="no", permanent=end == "permanent")
            pg.execute("delete from scrape_jobs")
            assert all(map(alike, state(python), state(other))), (step, end, state(python), state(other))
    assert state(other)[0] == 1


def test_an_open_breaker_holds_callers_back_and_lets_one_probe_through(pg: Db) -> None:
    """D8, D2: after the pause one at a time, until one succeeds."""
    functions = install_now(pg, declared(pg, SOURCES))
    (source,) = systems.insert_source(pg)
    systems.insert_scrape(pg, 9, source_id=source)
    for _ in range(3):
        functions.settle("fail", functions.claim(), error="HTTP 500")
    opened = pg.value("select paused_until from sources")
    assert td(minutes=4) < opened - datetime.now(UTC) < td(minutes=6)
    assert functions.claim() is None
    pg.execute("update sources set paused_until = now()")
    probe = functions.claim()
    assert probe is not None
    assert functions.claim() is None, "one at a time"
    assert functions.settle("complete", probe) is True
    state = pg.one("select failure_streak, paused_until, last_success_at is not null as well from sources")
    assert state == {"failure_streak": 0, "paused_until": None, "well": True}
    assert len(held(functions)) == 5


async def test_a_callers_retry_after_closes_the_key_for_everybody(pg: Db) -> None:
    """D1, D7: Retry-After, told to fail, keeps callers and Python workers away for that long, and puts the row off."""
    mill = declared(pg, SOURCES)
    functions = await installed(pg, mill)
    systems.insert_scrape(pg, 3)
    row = functions.claim()
    assert row is not None
    assert functions.settle("fail", row, error="HTTP 429", retry_after=td(seconds=40)) == "retry"
    due = pg.value("select next_retry_at from scrape_jobs where id = ?", row["id"])
    assert td(seconds=30) < due - datetime.now(UTC) < td(seconds=50)
    assert functions.claim() is None
    async with Kit(mill) as kit:
        assert await kit.claim() == []
        kit.advance(td(seconds=41))
        assert len(await kit.claim(count=3)) == 3
    assert pg.value("select failure_streak from sources") == 1


async def test_a_callers_retry_after_closes_the_whole_lane_only_on_request(pg: Db) -> None:
    """D7; issue: one source's 429 leaves the others alone, unless the caller says that it is about all of them."""
    mill = declared(pg, Concurrency(9, by="source_id"))
    functions = await installed(pg, mill)
    for source in systems.insert_source(pg, 3):
        systems.insert_scrape(pg, 2, source_id=source)
    functions.settle("fail", functions.claim(), error="HTTP 429", retry_after=td(seconds=40))
    row = functions.claim()
    assert row is not None
    with pytest.raises(Exception, match="closes must be 'lane' or null"):
        functions.settle("fail", row, error="HTTP 429", retry_after=td(seconds=40), closes="vendor")
    assert functions.settle("fail", row, error="HTTP 429", retry_after=td(seconds=40), closes="lane") == "retry"
    assert functions.claim() is None
    lane = pg.one("select paused_until - now() as left, reason from rowmill_gates where dim = ''")
    assert td(seconds=30) < lane["left"] <= td(seconds=40)
    assert lane["reason"] == "the other side asked to wait"
    async with Kit(mill) as kit:
        assert await kit.claim(count=9) == []
        kit.advance(td(seconds=41))
        assert len(await kit.claim(count=9)) == 6


def test_keys_take_turns_and_a_pause_holds_callers_back(pg: Db) -> None:
    """C8: a source with many rows keeps nobody waiting; a paused key, and a paused lane, are left alone."""
    functions = install_now(pg, declared(pg, Concurrency(50, by="source_id")))
    many, few = (systems.insert_source(pg)[0] for _ in range(2))
    systems.insert_scrape(pg, 30, source_id=many)
    systems.insert_scrape(pg, 3, source_id=few)
    assert Counter(row["source_id"] for row in held(functions, 6)) == {many: 3, few: 3}
    gate = "insert into rowmill_gates (lane, dim, key, paused_until) values ('scrape', ?, ?, now() + interval '1 hour')"
    paused = f"{gate} on conflict (lane, dim, key) do update set paused_until = excluded.paused_until"
    pg.execute(paused, "source_id", str(many))
    assert functions.claim() is None
    systems.insert_scrape(pg, 1, source_id=few)
    pg.execute(paused, "", "")
    assert functions.claim() is None
    pg.execute("delete from rowmill_gates where dim = ''")
    assert [row["source_id"] for row in held(functions)] == [few]


def test_a_new_key_is_found_while_a_known_one_always_has_something_ready(pg: Db) -> None:
    """C8: also where no Python worker is there to look for new keys."""
    functions = install_now(pg, declared(pg, Concurrency(1000, by="source_id")))
    known, new = (systems.insert_source(pg)[0] for _ in range(2))
    systems.insert_scrape(pg, 400, source_id=known)
    assert functions.claim() is not None
    systems.insert_scrape(pg, 1, source_id=new)
    # Each claim in a transaction of its own: the chance that none of 300 looks around is one in a hundred million.
    claim = f"perform * from {functions.full('claim')}('w'); commit;"
    pg.execute(f"do $$ begin for _ in 1..300 loop {claim} end loop; end $$")
    assert pg.value("select status from scrape_jobs where source_id = ?", new) == "running"


def test_stuck_rows_are_taken_back_while_others_are_held_back(pg: Db) -> None:
    """D2, D3: a dead worker's row is claimed, although rows of another source are ready and may not go."""
    functions = install_now(pg, declared(pg, LISTED))
    shut, well = systems.insert_source(pg, rate_limit_per_minute=0), systems.insert_source(pg)
    systems.insert_scrape(pg, 2, source_id=shut[0])
    (stuck,) = systems.insert_scrape(pg, source_id=well[0], status="running", locked_by="gone")
    row = functions.claim()
    assert row is not None
    assert (row["id"], row["attempts"], row["locked_by"]) == (stuck, 1, "w")


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ([Rate(5, by="source_id"), Concurrency(2, by="intake_id")], "several keys"),
        ([Concurrency(2)], "the whole lane"),
        ([Concurrency(2, by="source_id % 2")], "an expression"),
        ([Concurrency(2, by="source_id", scope="process")], "a process of rowmill's"),
        ([Rate.auto(by="source_id")], "how long runs take"),
        ([Breaker(2, td(minutes=1), by="source_id", counts=lambda error: True)], "a Python function"),
    ],
)
def test_gates_that_functions_could_not_keep_to_are_refused(pg: Db, gates: list[Any], words: str) -> None:
    """D2: said before anything is installed."""
    with pytest.raises(DeclarationError, match=f"has gates that functions cannot apply: .*{words}"):
        install_now(pg, declared(pg, *gates))
