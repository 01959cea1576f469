"""The sweep re-checks: between finding a stale row and writing it, its holder may have given a sign of life."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import Claim, Mill
from rowmill.testing import Kit
from rows import whole

ROLE = "rowmill_sweeper"
WAKES = ["renews", "is done"]


def mill_over(db: Db, url: str) -> Mill:
    mill = Mill(url)
    states = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
    mill.lane("jobs", name="jobs", lease=td(minutes=1), heartbeat=td(seconds=10), **states)(lambda job: None)
    return mill


def create(db: Db) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text not null default 'ready', worker text,"
        f" claimed_at {time}, heartbeat_at {time}); insert into jobs (id) values (1)"
    )


async def wake(kit: Kit, claim: Claim, how: str) -> None:
    """The holder, late and alive."""
    if how == "renews":
        assert await (await kit.store()).renew([claim]) == [claim]
    else:
        assert (await kit.settle(claim)).written


@pytest.mark.parametrize("how", WAKES)
async def test_on_sqlite_a_row_found_stale_and_then_alive_is_not_taken_back(
    lite: Db, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN, sweep: state and lease are checked again in the transaction that writes. A12: never from one alive."""
    create(lite)
    mill = mill_over(lite, lite.url)
    async with Kit(mill, worker_id="slow") as a, Kit(mill, worker_id="sweeper") as b:
        (claim,) = await a.claim()
        a.advance(td(minutes=2))
        database = (await b.store()).database
        write = database.write

        async def late(verb: Any, **options: Any) -> Any:
            await wake(a, claim, how)
            return await write(verb, **options)

        monkeypatch.setattr(database, "write", late)
        before = await b.sweep()
    assert before == []
    assert whole(lite, "jobs", 1)["status"] == ("running" if how == "renews" else "done")


@pytest.fixture
def watched(pg: Db) -> Iterator[str]:
    """The address of a role for which reading the table waits for an advisory lock: after its snapshot was taken."""
    create(pg)
    pg.execute(
        "create function turnstile() returns boolean language plpgsql as $$ begin"
        " perform pg_advisory_xact_lock_shared(1); return true; end $$;"
        "alter table jobs enable row level security; create policy waits on jobs using (turnstile());"
        f"create role {ROLE} login; grant select, update on jobs to {ROLE};"
        f"alter default privileges grant select on tables to {ROLE}"  # rowmill's own, which the other one may create
    )
    yield pg.url.replace("postgres:", f"{ROLE}:", 1)
    pg.execute(f"drop owned by {ROLE}; drop role {ROLE}")


@pytest.mark.bare
@pytest.mark.parametrize("how", WAKES)
async def test_on_postgresql_a_row_found_stale_and_then_alive_is_not_taken_back(pg: Db, watched: str, how: str) -> None:
    """DESIGN, sweep: the sweep has seen the stale row, its holder commits, and only then does the sweep go on."""
    alive, sweeper = mill_over(pg, pg.url), mill_over(pg, watched)
    sweeper.clock = alive.clock
    async with Kit(alive, worker_id="slow") as a, Kit(sweeper, worker_id="sweeper") as b:
        (claim,) = await a.claim()
        await b.store()
        a.advance(td(minutes=2))
        async with (await a.store()).database.begin() as gate:
            await gate.exec_driver_sql("select pg_advisory_xact_lock(1)")
            sweeping = asyncio.create_task(b.sweep())
            waits = (
                "select count(*) from pg_stat_activity where wait_event = 'advisory' and datname = current_database()"
            )
            for _ in range(600):
                if pg.value(waits):
                    break
                await asyncio.sleep(0.05)
            assert pg.value(waits) == 1
            await wake(a, claim, how)
        assert await sweeping == []
    assert whole(pg, "jobs", 1)["status"] == ("running" if how == "renews" else "done")
