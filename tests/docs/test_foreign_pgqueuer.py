"""A lane over PgQueuer's own table, filled and looked at by PgQueuer's own client."""

from __future__ import annotations

from pathlib import Path

import pytest

from databases import Db
from foreign import Place

pytestmark = pytest.mark.no_pooler("the other library connects to the database by itself, with settings of its own")

HEAD = """
import asyncio, json, os
from datetime import timedelta
import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

async def main():
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    driver = AsyncpgDriver(connection)
    print(json.dumps(await work(Queries(driver), driver)))
    await connection.close()
"""
TAIL = "\nasyncio.run(main())"
LOOK = """
async def work(queries, driver):
    status = dict(await queries.job_status({ids}))
    size = [[s.entrypoint, s.status, s.count] for s in await queries.queue_size()]
    failed = [[job.id, job.attempts, job.payload.decode()] for job in await queries.list_failed_jobs()]
    log = [[entry.job_id, entry.status] for entry in await queries.queue_log()]
    return [[status.get(id) for id in {ids}], size, failed, sorted(e for e in log if e[1] not in ("queued", "picked"))]
"""


@pytest.fixture
def place(pg: Db, tmp_path: Path) -> Place:
    here = Place(tmp_path, pg, "pgqueuer_lane.py")
    here.script(HEAD + "\nasync def work(queries, driver): await queries.install()" + TAIL)
    return here


def test_jobs_that_pgqueuer_enqueued_are_worked_off_and_it_sees_them_finished(pg: Db, place: Place) -> None:
    """Issue 3, foreign tables: enqueued, retried, logged, held and requeued, each told by PgQueuer's own client."""
    ids = place.script(
        HEAD
        + """
async def work(queries, driver):
    ids = await queries.enqueue(["fetch"] * 3, [b"one", b"two", b"broken"], [0, 9, 0])
    ids += await queries.enqueue("fetch", b"late", execute_after=timedelta(hours=1))
    return ids + await queries.enqueue("other", b"not for rowmill")
"""
        + TAIL
    )
    one, two, broken, late, other = ids
    theirs = "update pgqueuer set status = ?::text::pgqueuer_status, heartbeat = now() - interval '1 day' where id = ?"
    pg.execute(theirs, "picked", other)
    place.drain("pgqueuer_lane")
    assert pg.value("select status from pgqueuer where id = ?", other) == "picked", "not ours to sweep"
    pg.execute(theirs, "queued", other)
    assert pg.value("select status from pgqueuer where id = ?", late) == "queued", "not before its time"
    pg.execute("update pgqueuer set execute_after = now() where id = ?", late)
    place.drain("pgqueuer_lane")
    status, size, failed, log = place.script(HEAD + LOOK.format(ids=ids) + TAIL)
    assert status == ["successful", "successful", "failed", "successful", "queued"]
    assert sorted(size) == [["fetch", "failed", 1], ["other", "queued", 1]]
    assert failed == [[broken, 2, "broken"]]
    assert log == sorted([[one, "successful"], [two, "successful"], [late, "successful"], [broken, "failed"]])
    # Its own way back for a job that was held; and its own worker, for the entrypoint it serves.
    place.script(HEAD + f"\nasync def work(queries, driver): await queries.requeue_jobs([{broken}])" + TAIL)
    pg.execute("update pgqueuer set payload = 'mended' where id = ?", broken)
    place.drain("pgqueuer_lane")
    place.script(
        HEAD
        + """
async def work(queries, driver):
    manager = PgQueuer(driver)

    @manager.entrypoint("other")
    async def other(job: Job) -> None: ...

    from pgqueuer.types import QueueExecutionMode
    await asyncio.wait_for(manager.run(mode=QueueExecutionMode.drain), 60)
"""
        + TAIL
    )
    status, size, failed, _ = place.script(HEAD + LOOK.format(ids=ids) + TAIL)
    assert status == ["successful"] * 5
    assert (size, failed) == ([], [])


def test_a_job_that_rowmill_runs_is_not_taken_by_a_worker_of_pgqueuer(pg: Db, place: Place) -> None:
    """X1: a fresh heartbeat is respected by PgQueuer's own dequeue; the higher priority went first."""
    place.script(
        HEAD
        + """
async def work(queries, driver):
    await queries.enqueue(["fetch", "fetch"], [b"low", b"high"], [0, 9])
"""
        + TAIL
    )
    taken = place.script("""
import asyncio, json
from pgqueuer_lane import mill
from rowmill.testing import Kit

async def main():
    async with Kit(mill) as kit:
        store = await kit.store()
        print(json.dumps([store.value(claim.row, "payload").decode() for claim in await kit.claim("fetch", 1)]))

asyncio.run(main())
""")
    assert taken == ["high"]
    got = place.script(
        HEAD
        + """
import uuid
from pgqueuer.queries import EntrypointExecutionParameter

async def work(queries, driver):
    jobs = await queries.dequeue(
        batch_size=10, entrypoints={"fetch": EntrypointExecutionParameter(0)}, queue_manager_id=uuid.uuid4(),
        global_concurrency_limit=None, heartbeat_timeout=timedelta(seconds=30))
    return [job.payload.decode() for job in jobs]
"""
        + TAIL
    )
    assert got == ["low"]
