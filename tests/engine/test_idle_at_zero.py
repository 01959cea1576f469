"""Lanes that do not poll (poll=None): an idle worker sends nothing at all, and still starts what it is woken for."""

from __future__ import annotations

import asyncio
import asyncio.selector_events
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import DeclarationError, Event, Mill, Snooze
from rowmill.testing import Kit
from wake import install
from workers import STATES, events_of, jobs, until, working

unpooled = pytest.mark.no_pooler("nobody listens through a pooler")
REST = td(seconds=0.2)


def lane(mill: Mill, ran: Counter[str], **options: Any) -> None:
    async def work(job: Any) -> Any:
        ran[job.environment] += 1
        return Snooze(td(seconds=1)) if job["note"] == "snooze" and job.attempt == 1 and ran["one"] == 1 else None

    mill.lane("jobs", **STATES, **{"poll": None, **options})(work)


@contextmanager
def writes() -> Iterator[list[bytes]]:
    """What this process writes to its connections in event loops: every statement is a write."""
    transport = asyncio.selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    written: list[bytes] = []
    write = transport.write

    def recorded(self: Any, data: bytes) -> None:
        written.append(bytes(data))
        write(self, data)

    transport.write = recorded
    try:
        yield written
    finally:
        transport.write = write


async def ticks(worker: Any, count: int) -> None:
    """Wait until the worker's loop has given so many signs of life."""
    for _ in range(count):
        before = worker.ticked
        await until(lambda before=before: worker.ticked > before)


async def asleep(worker: Any, seen: list[Event]) -> None:
    """Wait until its environment was closed for lack of work."""

    def closed() -> bool:
        told = [event.name for event in seen if event.name in ("worker_started", "environment_idle")]
        return bool(told) and told[-1] == "environment_idle" and not worker.environments[0].look

    await until(lambda: closed() and not (worker.turns is not None and worker.turns.busy))


@unpooled
@pytest.mark.parametrize("order", ["strict", "fair"])
async def test_an_idle_worker_sends_nothing_and_a_notification_wakes_it(order: str, pg: Db) -> None:
    """No poll, no heartbeat, no sweep; a row that a client inserts starts by the wake trigger."""
    jobs(pg, 1)
    ran: Counter[str] = Counter()
    mill = Mill({"one": pg.url}, order=order, rest_after=REST)
    seen = events_of(mill)
    lane(mill, ran)
    await install(mill)
    async with working(mill) as worker:
        for count in (1, 2, 3):
            await until(lambda count=count: ran["one"] == count)
            await asleep(worker, seen)
            await until(lambda: worker.environments[0].session.locked_since)
            with writes() as written:
                await ticks(worker, 4)
            assert written == []
            assert pg.value("select state from rowmill_workers") == "stopped"
            pg.execute("insert into jobs (note) values (null)")
        await until(lambda: ran["one"] == 4)
    assert pg.value("select count(*) from jobs where status = 'done'") == 4


@unpooled
async def test_a_row_that_comes_while_it_goes_to_rest_is_not_missed(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs(pg, 1)
    ran: Counter[str] = Counter()
    mill = Mill({"one": pg.url}, rest_after=REST)
    lane(mill, ran)
    await install(mill)
    async with working(mill) as worker:
        await until(lambda: worker.environments and worker.environments[0].session.locked_since)
        (environment,) = worker.environments
        rest, came = environment.rest, []

        async def late() -> None:
            if not came:
                came.append(True)
                pg.execute("insert into jobs (note) values (null)")
                await until(lambda: environment.look)  # it was heard
            await rest()

        monkeypatch.setattr(environment, "rest", late)
        await until(lambda: ran["one"] == 2)


@unpooled
async def test_it_wakes_for_what_it_put_off_itself(pg: Db) -> None:
    """A snoozed row is due by time, and nobody notifies."""
    jobs(pg, 0)
    pg.execute("insert into jobs (note) values ('snooze')")
    ran: Counter[str] = Counter()
    mill = Mill({"one": pg.url}, rest_after=REST)
    lane(mill, ran)
    async with working(mill) as worker:
        await until(lambda: ran["one"] == 1)
        await until(lambda: not worker.environments[0].opened or ran["one"] == 2)
        await until(lambda: ran["one"] == 2)


@pytest.mark.parametrize("order", ["strict", "fair"])
async def test_a_wake_call_is_enough_where_nobody_listens(order: str, pg: Db) -> None:
    """``listen=False``: for a database that would not sleep while somebody listens."""
    jobs(pg, 1)
    ran: Counter[str] = Counter()
    mill = Mill({"one": pg.url}, order=order, rest_after=REST, listen=False)
    seen = events_of(mill)
    lane(mill, ran)
    async with working(mill) as worker:
        for count in (1, 2):
            await until(lambda count=count: ran["one"] == count)
            await asleep(worker, seen)
            here = (
                "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
            )
            await until(lambda here=here: pg.value(f"{here} and query ilike '%listen %'") == 0)
            pg.execute("insert into jobs (note) values (null)")
            await mill.wake()
        await until(lambda: ran["one"] == 3)
    await mill.close()


async def test_rows_of_a_dead_worker_come_back_after_the_next_wake(pg: Db) -> None:
    """It stays awake until the lease of the row is over."""
    jobs(pg, 1)
    ran: Counter[str] = Counter()
    mill = Mill({"one": pg.url}, rest_after=REST, listen=False)
    seen = events_of(mill)
    lane(mill, ran, lease=td(seconds=2), sweep_every=td(seconds=0.2))
    async with working(mill) as worker:
        await until(lambda: ran["one"] == 1)
        await asleep(worker, seen)
        pg.execute(
            "insert into jobs (status, worker, claimed_at, heartbeat_at, attempts)"
            " values ('running', 'gone', now(), now(), 1)"
        )
        await mill.wake()
        await until(lambda: ran["one"] == 2)
    await mill.close()


@unpooled
async def test_it_is_awake_before_the_tick_of_a_cron(pg: Db) -> None:
    """It sleeps until shortly before."""
    mill = Mill({"one": pg.url}, rest_after=REST)
    seen = events_of(mill)

    @mill.cron("0 0 1 1 *", poll=None)
    async def yearly() -> None: ...

    async with working(mill) as worker:
        (environment,) = worker.environments
        await asleep(worker, seen)
        assert len(environment._due) == 1
        environment._due[0] = 0.0  # that time has come
        worker.wake()
        await until(lambda: environment.opened)


@pytest.mark.parametrize("order", ["strict", "fair"])
async def test_on_sqlite_the_file_wakes_it(order: str, lite: Db) -> None:
    jobs(lite, 1)
    ran: Counter[str] = Counter()
    mill = Mill({"one": lite.url}, order=order, rest_after=REST)
    lane(mill, ran)
    async with working(mill) as worker:
        await until(lambda: ran["one"] == 1)
        await until(lambda: worker.environments[0].opened is (order == "strict"))
        lite.execute("insert into jobs (note) values (null)")
        await until(lambda: ran["one"] == 2)


async def test_what_nothing_could_wake_is_refused(pg: Db, lite: Db) -> None:
    """A transaction pooler has no LISTEN; and a table of schedules is read by polls."""
    jobs(pg, 0)
    ran: Counter[str] = Counter()
    pooled = f"{pg.direct}{'&' if '?' in pg.direct else '?'}pgbouncer=true"
    mill = Mill(pooled)
    lane(mill, ran)
    with pytest.raises(DeclarationError, match="has no LISTEN") as caught:
        await mill.worker().run()
    assert "listen=False" in (caught.value.hint or "")
    mill = Mill(pooled, listen=False)
    lane(mill, ran)
    async with Kit(mill) as kit:
        await kit.drain()
    mill = Mill(lite.url)
    lite.execute("create table plans (id integer primary key, expression text, task text)")

    @mill.task(poll=None)
    async def report() -> None: ...

    mill.schedules("plans")
    with pytest.raises(DeclarationError, match="schedules in a table"):
        await mill.worker().run()
