"""No heartbeat, no claim: a worker that cannot renew leases claims nothing more, and says so once."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta as td
from itertools import accumulate
from typing import Any

import asyncpg
import pytest

from databases import Db, Server
from rowmill import Busy, Mill, Unreachable
from rowmill.engine.environment import Environment
from rowmill.errors import TooManyConnections
from rowmill.store import Database, PostgresLane
from rowmill.store.driver_errors import translate
from rowmill.store.lane.sqlite import SqliteLane
from workers import STATES, add, events_of, jobs, until, working


def named(seen: list[Any], *names: str) -> list[Any]:
    return [event for event in seen if event.name in names]


@pytest.mark.parametrize("error", [Busy("the file is locked"), Unreachable("no connection")], ids=["busy", "away"])
async def test_a_worker_that_cannot_renew_claims_nothing_more(
    db: Db, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Issue, recovery: its leases would run out under living handlers. One event when it begins, one when it ends."""
    jobs(db)
    mill, runs, may_end, broken = Mill(db.url), list[Any](), asyncio.Event(), True
    seen = events_of(mill)
    lane = PostgresLane if db.dialect == "postgresql" else SqliteLane
    renew = lane.renew

    async def failing(self: Any, claims: Any) -> Any:
        if broken:
            raise error
        return await renew(self, claims)

    monkeypatch.setattr(lane, "renew", failing)

    @mill.lane(
        "jobs",
        name="work",
        lease=td(seconds=60),
        heartbeat=td(seconds=0.1),
        poll=td(seconds=0.1),
        concurrency=9,
        **STATES,
    )
    async def work(job: Any) -> None:
        runs.append(job.id)
        await may_end.wait()

    monkeypatch.setattr("rowmill.engine.lane_state._LATE", (120, 1.5))  # half a second
    async with working(mill):
        await until(lambda: named(seen, "heartbeat_down"), 60)
        add(db, 3)
        await asyncio.sleep(0.5)  # several polls
        assert runs == [1]
        broken = False
        await until(lambda: sorted(runs) == [1, 2, 3, 4], 60)
        await until(lambda: named(seen, "heartbeat_back"), 60)
        may_end.set()
    said = [event.name for event in named(seen, "heartbeat_down", "heartbeat_back")]
    assert said == ["heartbeat_down", "heartbeat_back"]
    assert len([event for event in named(seen, "renew_failed") if event.level > 10]) == 1
    down = named(seen, "heartbeat_down")[0].fields
    assert (down["error"], down["lanes"]) == (str(error), ["work"])
    assert "claimed" in down["hint"]


def test_too_many_connections_are_told_apart_from_a_server_that_is_down() -> None:
    """Issue, recovery: by the server's code, and by the words of poolers."""
    database = Database.open("postgresql://here/db")
    full = [
        asyncpg.TooManyConnectionsError("sorry, too many clients already"),
        asyncpg.TooManyConnectionsError('too many connections for role "worker"'),
        asyncpg.ProtocolViolationError("no more connections allowed (max_client_conn)"),
    ]
    for error in full:
        known = translate(error, database)
        assert isinstance(known, TooManyConnections)
        assert "max_connections" in str(known.hint)
    assert type(translate(asyncpg.ConnectionFailureError("gone"), database)) is Unreachable


async def test_workers_with_too_few_connections_lose_no_claim_and_do_not_flap() -> None:
    """Issue, recovery: twelve workers on a server with twenty connections. Some work, the others wait for room."""
    with Server(max_connections=20) as own:
        db = Db(own.create_database("few"))
        jobs(db, 0)
        seen: list[Any] = []
        workers = []
        for _ in range(12):
            mill = Mill(db.url)
            mill.on_event(seen.append)

            @mill.lane("jobs", name="work", lease=td(seconds=6), poll=td(seconds=0.2), concurrency=2, batch=1, **STATES)
            async def work(job: Any) -> None:
                await asyncio.sleep(0.05)

            workers.append(mill.worker())
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            await until(lambda: any(w.environments[0].opened for w in workers), 60)
            await until(lambda: named(seen, "environment_full"), 60)
            await asyncio.to_thread(fill, db, 100)
            await until(lambda: sum(worker.counters.completed for worker in workers) == 100, 60)
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(5)
            took = asyncio.get_running_loop().time() - began
        finally:
            for worker in workers:
                worker.stop()
            await asyncio.wait(tasks, timeout=60)
        full = named(seen, "environment_full")
        assert full[0].fields["needs"] == 9
        assert "pooler" in full[0].fields["hint"]
        lines = Counter(event.name for event in seen if event.level > 20)
        assert not lines["claim_lost"] + lines["row_swept"], lines
        assert sum(lines.values()) < 12 * 6, (lines, took)


async def nothing(job: Any) -> None: ...


def fill(db: Db, count: int) -> None:
    """Rows by one statement; all connections may be taken for a moment."""
    for _ in range(600):
        try:
            db.execute(f"insert into jobs (note) select null from generate_series(1, {count})")
            return
        except asyncpg.TooManyConnectionsError:
            pass
    raise AssertionError("no connection in time")


async def test_a_server_that_is_back_is_noticed_within_three_seconds_by_few_at_a_time(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue, recovery: however long it was away; and forty workers that lost it together do not come together."""
    jobs(lite)
    mill, pauses = Mill(lite.url), list[list[float]]()
    mill.lane("jobs", name="work", **STATES)(nothing)
    for _ in range(40):
        environment = Environment(mill.worker(), "default", Database.open(lite.url), [])
        pauses.append([])

        async def slept(seconds: float, pauses: list[float] = pauses[-1]) -> None:
            pauses.append(seconds)

        async def away(pauses: list[float] = pauses[-1]) -> None:
            if len(pauses) < 20:
                raise Unreachable("the server is down")

        with monkeypatch.context() as patch:
            patch.setattr(environment.database, "reach", away)
            patch.setattr(asyncio, "sleep", slept)
            await environment._return(full=False)
    assert max(map(max, pauses)) <= 3.0
    # Those that would have asked within the same tenth of a second after half a minute.
    together = Counter(int(10 * next(at for at in accumulate(each) if at > 15)) for each in pauses)
    assert max(together.values()) <= 12
