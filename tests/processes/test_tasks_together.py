"""Tasks over several processes: children that join though workers are killed, and crons that tick together.

Why processes: workers are killed in the middle, and only processes tick at the very same moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from databases import Db
from quick_processes import QuickProcess
from rowmill import Mill
from waiting import eventually

FLOW = """
import asyncio, os
from datetime import timedelta as td
from rowmill import Mill, configure_logs, fixed

mill = Mill(os.environ["DATABASE"])
mill.queue("default", concurrency=50, lease=td(seconds=2), heartbeat=td(milliseconds=400),
           sweep_every=td(milliseconds=500), max_reclaims=1000)
mill.queue("parents", lease=td(seconds=2), heartbeat=td(milliseconds=400), sweep_every=td(milliseconds=500),
           max_reclaims=1000)
went_on = os.open(os.environ["WENT_ON"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)

@mill.task(max_attempts=3, backoff=fixed(td(0)))
async def part(n: int):
    await asyncio.sleep(0.001)
    if n % 100 == 7:
        raise ValueError(n)

@mill.task(queue="parents")
async def whole(job, count: int) -> list[int]:
    joined = await job.spawn(*[part.call(n) for n in range(count)])
    async with job.finish() as tx:
        os.write(went_on, f"{joined.done} {joined.failed}\\n".encode())
        tx.set(result=[joined.done, joined.failed])

if __name__ == "__main__":
    mill.run(worker_id=os.environ["WORKER"])
"""


def test_ten_thousand_children_join_once_though_workers_are_killed(pg: Db, tmp_path: Path) -> None:
    """X2: kill -9 in the middle loses nothing, and the parent goes on once, with the right counts."""
    (tmp_path / "flow_app.py").write_text(FLOW)
    environment = {**os.environ, "DATABASE": pg.url, "WENT_ON": str(tmp_path / "went_on")}

    def start(name: str) -> QuickProcess:
        given = {**environment, "WORKER": name}
        words = [str(tmp_path / "flow_app.py")]
        return QuickProcess(words, errors=tmp_path / "errors.log", folder=tmp_path, environment=given)

    async def enqueue() -> None:
        mill = Mill(pg.url)

        @mill.task(queue="parents")
        async def whole(count: int) -> None: ...

        await whole.enqueue(10_000)
        await mill.close()

    asyncio.run(enqueue())
    done = "select count(*) from rowmill_jobs where task = 'part' and state in ('done', 'dead')"
    workers = [start(f"w{n}") for n in range(2)]
    try:
        for n, threshold in enumerate((500, 3000, 6000)):
            eventually(lambda threshold=threshold: pg.value(done) > threshold, 60)
            victim = workers.pop(0)
            victim.send_signal(signal.SIGKILL)
            victim.wait(60)
            workers.append(start(f"x{n}"))
        eventually(lambda: pg.value("select state from rowmill_jobs where task = 'whole'") == "done", 90, 0.2)
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            worker.wait(60)
    assert pg.value("select result from rowmill_jobs where task = 'whole'").replace(" ", "") == "[9900,100]"
    assert (tmp_path / "went_on").read_text() == "9900 100\n"
    assert pg.value("select count(*) from rowmill_jobs") == 10_001


CRONS = """
import asyncio, os, sys
from pathlib import Path
from datetime import datetime, timedelta as td, UTC
from rowmill import Mill
from rowmill.engine.cron_scheduler import Scheduler
from rowmill.store.jobs.cron_ticks import Ticks

mill = Mill(os.environ["DATABASE"])
seen = Ticks.now

async def slowly(self, names):
    found = await seen(self, names)
    await asyncio.sleep(0.01)  # what was read is old by now: the others have read it, too
    return found

Ticks.now = slowly

@mill.cron("*/30 * * * *", tz="America/Montreal", missed="all")
async def half_hourly(): ...

@mill.cron("30 2 * * *", tz="America/Montreal", missed="all")
async def in_the_gap(): ...

@mill.cron("30 1 * * *", tz="America/Montreal", missed="all")
async def in_the_fold(): ...

async def main():
    begin, end = (datetime.fromisoformat(text) for text in sys.argv[1:3])
    await mill.prepare()
    ((_, database),) = mill.databases()
    mill.clock.advance(begin - datetime.now(UTC))
    scheduler = Scheduler(database, mill.clock, mill.events, list(mill.tasks.values()))
    await scheduler.start()
    Path(f"ready-{os.getpid()}").touch()
    while not Path("go").exists():
        await asyncio.sleep(0.002)
    while datetime.now(UTC) + mill.clock.shift < end:
        await scheduler.tick()
        mill.clock.advance(td(minutes=int(sys.argv[3])))
    await scheduler.tick()
    await database.close()
    await mill.close()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("begin", "end", "wanted"),
    [
        # From a quarter past midnight to noon: the gap is at 07:00 UTC, the fold from 05:00 to 07:00 UTC.
        ("2026-03-08T05:15+00:00", "2026-03-08T16:15+00:00", {"half_hourly": 22, "in_the_gap": 1, "in_the_fold": 1}),
        ("2026-11-01T04:15+00:00", "2026-11-01T16:15+00:00", {"half_hourly": 24, "in_the_gap": 1, "in_the_fold": 1}),
    ],
)
def test_three_processes_over_a_change_of_the_clock_enqueue_each_tick_once(
    db: Db, tmp_path: Path, begin: str, end: str, wanted: dict[str, int]
) -> None:
    app = tmp_path / "crons.py"
    app.write_text(CRONS)
    words, environment = [str(app), begin, end, "10"], {**os.environ, "DATABASE": db.url}
    processes = [
        QuickProcess(words, errors=tmp_path / "errors.log", folder=tmp_path, environment=environment) for _ in range(3)
    ]
    eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 3, 60)
    (tmp_path / "go").touch()
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0], (tmp_path / "errors.log").read_text()
    rows = db.query("select task, run_after from rowmill_jobs")
    assert Counter(row["task"] for row in rows) == wanted
    assert set(Counter((row["task"], row["run_after"]) for row in rows).values()) == {1}


SCHEDULES = """
import asyncio, os, random, sys
from pathlib import Path
from datetime import datetime, timedelta as td, UTC
from rowmill import Mill
from rowmill.engine.cron_scheduler import Scheduler
from rowmill.store.jobs.schedule_rows import ScheduleTable

mill = Mill(os.environ["DATABASE"])
mill.schedules("schedules", missed="all", tz="America/Montreal")
seen = ScheduleTable.read

async def slowly(self):
    found = await seen(self)
    await asyncio.sleep(0.01 * random.random())  # what was read is old by now: the others have read it, too
    return found

ScheduleTable.read = slowly

@mill.task
async def work(row: int): ...

async def main():
    begin, end = (datetime.fromisoformat(text) for text in sys.argv[1:3])
    await mill.prepare()
    ((_, database),) = mill.databases()
    mill.clock.advance(begin - datetime.now(UTC))
    scheduler = Scheduler(database, mill.clock, mill.events, list(mill.tasks.values()), mill.schedule_tables)
    await scheduler.tick()
    Path(f"ready-{os.getpid()}").touch()
    while not Path("go").exists():
        await asyncio.sleep(0.002)
    while datetime.now(UTC) + mill.clock.shift < end:
        await scheduler.tick()
        mill.clock.advance(td(minutes=10))
    await scheduler.tick()
    await database.close()
    await mill.close()

asyncio.run(main())
"""


def test_three_processes_enqueue_each_tick_of_each_row_once(db: Db, tmp_path: Path) -> None:
    """Issue 23: over a change of the clock, and while other rows are changed, switched off and deleted."""
    args, on = ("jsonb", "true") if db.dialect == "postgresql" else ("text", "1")
    db.execute(
        f"create table schedules (id integer primary key, expression text, task text, args {args},"
        f" enabled boolean default {on})"
    )
    expressions = {1: "*/30 * * * *", 2: "30 2 * * *", 3: "30 1 * * *", 4: "*/30 * * * *", 5: "*/30 * * * *"}
    for id, expression in expressions.items():
        db.execute("insert into schedules values (?, ?, 'work', ?, true)", id, expression, f'{{"row": {id}}}')
    app = tmp_path / "plans.py"
    app.write_text(SCHEDULES)
    words = [str(app), "2026-11-01T04:15+00:00", "2026-11-01T16:15+00:00"]
    environment = {**os.environ, "DATABASE": db.url}
    processes = [
        QuickProcess(words, errors=tmp_path / "errors.log", folder=tmp_path, environment=environment) for _ in range(3)
    ]
    eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 3, 60)
    (tmp_path / "go").touch()
    turn = 0
    while any(process.poll() is None for process in processes):
        db.execute("update schedules set enabled = not enabled where id = 4")
        db.execute("update schedules set expression = ? where id = 5", f"{turn % 10}-59/30 * * * *")
        db.execute("insert into schedules values (?, '*/5 * * * *', 'work', '{\"row\": 6}', true)", 6 + turn)
        db.execute("delete from schedules where id = ?", 5 + turn if turn else -1)
        turn += 1
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0], (tmp_path / "errors.log").read_text()
    rows = db.query("select args, run_after from rowmill_jobs")
    ran = Counter((json.loads(row["args"])["row"], row["run_after"]) for row in rows)
    by_row = Counter(row for row, _ in ran)
    assert {row: by_row[row] for row in (1, 2, 3)} == {1: 24, 2: 1, 3: 1}
    assert {number for (row, _), number in ran.items() if row <= 3} == {1}
    assert turn > 3, "rows were changed meanwhile"
