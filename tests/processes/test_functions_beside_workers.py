"""Workers that know only the functions, beside Python workers, on one table: each row is recorded exactly once.

Why processes: workers of both kinds are killed in mid-run.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from databases import Db
from farm import Farm
from quick_processes import QuickProcess
from waiting import eventually

pytestmark = pytest.mark.no_pooler("another driver connects by the same address, with settings of its own")

#: Another language's worker: it has never heard of rowmill. Claims, works, and settles with a record of its own in one
#: transaction; ends when there was nothing to claim for a while.
WORKER = """
import asyncio, os, sys
import asyncpg

released = set()

async def work(name, connection, log):
    idle = 0
    while idle < int(sys.argv[3]):
        rows = await connection.fetch("select * from jobs_claim_batch($1, 5)", name)
        idle = 0 if rows else idle + 1
        if not rows:
            await asyncio.sleep(0.1)
        for row in rows:
            os.write(log, f"{row['id']}\\n".encode())
            await asyncio.sleep(float(os.environ["TAKES"]))
            held = (row["id"], row["worker"], row["claimed_at"], row["attempts"])
            if row["id"] % 97 == 0 and row["attempts"] == 1:
                await connection.fetchval("select jobs_fail($1, $2, $3, $4, 'not yet')", *held)
                continue
            if row["id"] % 89 == 0 and row["id"] not in released:
                released.add(row["id"])
                await connection.fetchval("select jobs_release($1, $2, $3, $4)", *held)
                continue
            await connection.fetchval("select jobs_heartbeat($1, $2, $3, $4)", *held)
            async with connection.transaction():
                if await connection.fetchval("select jobs_complete($1, $2, $3, $4, '{\\"note\\": \\"sql\\"}')", *held):
                    await connection.execute("insert into runs values ($1, $2, $3)", row["id"], name, row["attempts"])

async def main():
    log = os.open(os.environ["STARTS"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    connections = [await asyncpg.connect(os.environ["DATABASE"]) for _ in range(int(sys.argv[2]))]
    await asyncio.gather(*(work(f"{sys.argv[1]}-{n}", c, log) for n, c in enumerate(connections)))

asyncio.run(main())
"""


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Callable[..., Farm]]:
    farms: list[Farm] = []

    def make(db: Db, **options: str) -> Farm:
        farms.append(Farm(tmp_path, db, **options))
        (tmp_path / "worker.py").write_text(WORKER)
        command = [sys.executable, "-m", "rowmill", "sql", "app:mill", "jobs", "--functions", "--apply"]
        result = subprocess.run(command, cwd=tmp_path, env=farms[-1].environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "on_settled is Python" in result.stderr, "what the functions leave out is said"
        return farms[-1]

    yield make
    for each in farms:
        each.close()


def start(farm: Farm, name: str, connections: int = 3, idle: int = 10) -> QuickProcess:
    words = [str(farm.folder / "worker.py"), name, str(connections), str(idle)]
    process = QuickProcess(words, errors=farm.errors, folder=farm.folder, environment=farm.environment)
    farm.processes.append(process)
    return process


def assert_recorded_once(farm: Farm, count: int) -> None:
    """Every row is done; one record for each; and the record is by the worker and the claim that the row names."""
    assert farm.counts() == {"done": count}
    assert farm.db.value("select count(*) from runs") == count
    assert farm.db.value("select count(distinct job_id) from runs") == count
    join = "select count(*) from runs r join jobs j on j.id = r.job_id"
    assert farm.db.value(f"{join} where j.worker <> r.worker or j.attempts <> r.attempt") == 0


def test_functions_and_python_workers_share_a_table_and_record_each_row_once(pg: Db, farm: Callable[..., Farm]) -> None:
    """X1, D11: also with failures and releases; there is work until both kinds have had a part in it."""
    here = farm(pg, TAKES="0")
    rows = 1_500
    here.fill(rows)
    sql = [start(here, "sql-a", idle=20), start(here, "sql-b", idle=20)]
    eventually(lambda: here.counts().get("done", 0) > 100)
    python = [here.start("py", drain=True, TAKES="0.05")]

    def had_its_part() -> bool:
        nonlocal rows
        if here.counts().get("queued", 0) < 500:
            here.fill(500)
            rows += 500
        return bool(pg.value("select count(*) from runs where worker like 'py%'"))

    eventually(had_its_part, 60)
    assert [worker.wait(timeout=90) for worker in python + sql] == [0, 0, 0]
    assert_recorded_once(here, rows)
    again = {id for id, starts in here.started().items() if starts > 1}
    assert again, "some failed or were released"
    assert all(id % 97 == 0 or id % 89 == 0 for id in again), "and none but those was started twice"


def test_rows_survive_workers_of_both_kinds_killed_in_mid_run(pg: Db, farm: Callable[..., Farm]) -> None:
    """X1, X2, D11: kill -9 of one of each kind while it holds rows; every row ends done, recorded once."""
    here = farm(pg, LEASE="2", TAKES="0.01")
    steady = [start(here, "steady", idle=60), here.start("steady-py")]
    rows = 0
    for n in range(2):
        for name, run in ((f"victim-{n}", start), (f"victim-py-{n}", Farm.start)):
            victim = run(here, name)
            in_hand = f"select count(*) from jobs where status = 'running' and worker like '{name}%'"
            deadline = time.monotonic() + 60
            while not pg.value(in_hand):
                assert victim.poll() is None, "the victim ended by itself"
                assert time.monotonic() < deadline, f"{name} took no row"
                if here.counts().get("queued", 0) < 200:
                    here.fill(400)
                    rows += 400
                time.sleep(0.02)
            victim.send_signal(signal.SIGKILL)
            victim.wait(timeout=60)
    eventually(lambda: here.counts() == {"done": rows}, seconds=60)
    assert_recorded_once(here, rows)
    assert [worker.poll() for worker in steady] == [None, None]


def test_the_functions_alone_bring_back_what_a_killed_worker_held(pg: Db, farm: Callable[..., Farm]) -> None:
    """D2, X2: no Python worker sweeps; a claim that finds nothing else takes the stuck rows."""
    here = farm(pg, LEASE="1", TAKES="0.02")
    here.fill(60)
    victim = start(here, "victim", connections=1)
    eventually(lambda: here.counts().get("done", 0) > 3)
    victim.kill()
    victim.wait(timeout=60)
    assert here.counts().get("running")
    assert start(here, "heir", idle=20).wait(timeout=60) == 0
    assert_recorded_once(here, 60)
