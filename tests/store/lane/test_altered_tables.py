"""ALTER TABLE under running workers, missing rights, a server that became a standby: no row ends by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from rowmill.engine.worker import Worker
from rowmill.store import Database
from rowmill.store.lane import reflect

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


def make(db: Db, more: str = "") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id int primary key, status text default 'ready', spare text, worker text,"
        f" claimed_at {time}, heartbeat_at {time}, attempts int default 0, error text, title text{more})"
    )


def insert(db: Db, first: int, count: int = 10) -> None:
    db.insert("jobs", [{"id": i} for i in range(first, first + count)])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the other side is a database
            await asyncio.sleep(0.02)


class Running:
    """A worker at work, stopped at the end of the block."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def __aenter__(self) -> Worker:
        self._task = asyncio.create_task(self.worker.run())
        return self.worker

    async def __aexit__(self, *exc: object) -> None:
        self.worker.stop()
        await self._task


def done(db: Db) -> int:
    return int(db.value("select count(*) from jobs where status = 'done'"))


async def test_a_dropped_column_that_nobody_uses_stops_nothing(db: Db) -> None:
    make(db)
    insert(db, 1)
    mill, seen = Mill(db.url), dict[int, Any]()
    held = asyncio.Event()

    @mill.lane("jobs", name="jobs", max_attempts=2, concurrency=4, poll=td(seconds=0.1), **STATES)
    async def handle(job: Any) -> dict[str, Any]:
        if job.id == 10:
            await held.wait()
        seen[job.id] = (job["attempts"], job["error"])
        return {"title": f"t{job.id}"}

    async with Running(mill.worker()):
        await until(lambda: done(db) == 9)
        db.execute("alter table jobs drop column spare")
        insert(db, 11)
        await until(lambda: done(db) == 19)
        held.set()  # claimed by the columns that the table had before
        await until(lambda: done(db) == 20)
    assert seen == dict.fromkeys(range(1, 21), (1, None))
    assert db.value("select count(*) from jobs where attempts = 1 and title = 't' || id") == 20


async def test_outcomes_wait_while_a_returned_column_has_another_name(db: Db) -> None:
    make(db)
    insert(db, 1, 4)
    mill, told = Mill(db.url), list[Any]()
    mill.on_event(lambda event: told.append(event) if event.name in ("statement_refused", "table_altered") else None)
    running = asyncio.Event()

    @mill.lane("jobs", name="jobs", max_attempts=1, poll=td(seconds=0.1), **STATES)
    async def handle(job: Any) -> dict[str, Any]:
        await running.wait()
        return {"title": "x"}

    async with Running(mill.worker()):
        await until(lambda: db.value("select count(*) from jobs where status = 'running'") == 4)
        db.execute("alter table jobs rename column title to headline")
        running.set()
        await until(lambda: told)
        insert(db, 5, 2)
        db.execute("alter table jobs rename column headline to title")
        await until(lambda: done(db) == 6)
    assert db.value("select count(*) from jobs where attempts = 1 and error is null and title = 'x'") == 6
    assert told[0].fields["lane"] == "jobs"


async def test_a_table_altered_while_it_is_read_is_read_again(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns and their types come from two reads: of a column of the second the first must know the type."""
    make(pg)
    plain, reads = reflect._described, list[Any]()

    def described(*given: Any) -> Any:
        reads.append(plain(*given))
        if len(reads) == 1:
            pg.execute("alter table jobs rename column title to headline")
        return reads[-1]

    monkeypatch.setattr(reflect, "_described", described)
    database = Database.open(pg.url)
    table, types, *_ = await database.reflect(lambda c: reflect.reflect_table(c, "jobs", None, "jobs", "lane 'jobs'"))
    await database.close()
    assert len(reads) == 2
    assert "headline" in table.c
    assert types["headline"] == "text"


@pytest.mark.bare
async def test_a_missing_right_ends_no_row(pg: Db) -> None:
    make(pg)
    insert(pg, 1, 4)
    pg.execute("create role clerk login; grant usage on schema public to clerk; grant all on jobs to clerk")
    running = asyncio.Event()
    mill = Mill(pg.url.replace("postgres:", "clerk:", 1).replace("//postgres", "//clerk", 1))

    @mill.lane("jobs", name="jobs", max_attempts=1, poll=td(seconds=0.1), **STATES)
    async def handle(job: Any) -> None:
        await running.wait()

    try:
        async with Running(mill.worker()) as worker:
            told: list[Any] = []
            worker.events.subscribe(lambda e: told.append(e) if e.name == "statement_refused" else None)
            await until(lambda: pg.value("select count(*) from jobs where status = 'running'") == 4)
            pg.execute("revoke update on jobs from clerk")
            running.set()
            await until(lambda: told)
            pg.execute("grant update on jobs to clerk")
            await until(lambda: done(pg) == 4)
    finally:
        pg.execute("drop owned by clerk; drop role clerk")


@pytest.mark.parametrize("hooked", [False, True], ids=["finish", "on_settled"])
async def test_a_connection_to_a_server_that_became_a_standby_is_not_used_again(pg: Db, hooked: bool) -> None:
    """The server would answer 25006 on it for ever; another connection leads to the new primary."""
    make(pg)
    insert(pg, 1, 3)
    pg.execute("create table log (id int)")
    mill, demoted = Mill(pg.url), list[int]()
    standby = "set session characteristics as transaction read only"

    @mill.lane("jobs", name="jobs", max_attempts=1, concurrency=1, **STATES)
    async def handle(job: Any) -> None:
        if not hooked:
            async with job.finish() as tx:
                if not demoted:
                    demoted.append(job.id)
                    await tx.execute(standby)
                    await tx.execute("commit and chain")
                await tx.execute("insert into log values (:id)", {"id": job.id})

    if hooked:

        @handle.on_settled
        async def note(tx: Any, settled: Any) -> None:
            if not demoted:
                demoted.append(1)
                await tx.execute(standby)
                await tx.execute("commit and chain")
            for row in settled:
                await tx.execute("insert into log values (:id)", {"id": row.id})

    await mill.worker(drain=True).run()
    assert done(pg) == 3
    assert pg.value("select count(distinct id) from log") == 3
