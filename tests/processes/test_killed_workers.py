"""Workers killed, paused, cut off. Nothing is lost and nothing is recorded twice.

Why processes: kill -9, SIGSTOP and SIGTERM are for processes; and a handler may keep Python's lock to itself.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from databases import Db, Server
from farm import PLAIN, Farm
from waiting import eventually

MakeFarm = Callable[..., Farm]
UNTIL_TOLD = """
async def until_told():
    while not os.path.exists("go"):
        await asyncio.sleep(0.02)
"""


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[MakeFarm]:
    farms: list[Farm] = []

    def make(db: Db, **options: str) -> Farm:
        farms.append(Farm(tmp_path, db, **options))
        return farms[-1]

    yield make
    for each in farms:
        each.close()


def assert_recorded_once(farm: Farm, count: int) -> None:
    """Every row is done; one record for each; and the record is by the worker and the claim that the row names."""
    assert farm.counts() == {"done": count}
    assert farm.db.value("select count(*) from runs") == count
    assert farm.db.value("select count(distinct job_id) from runs") == count
    join = "select count(*) from runs r join jobs j on j.id = r.job_id"
    assert farm.db.value(f"{join} where j.worker <> r.worker or j.attempts <> r.attempt") == 0


def test_two_processes_handle_thousands_of_rows_exactly_once(db: Db, farm: MakeFarm) -> None:
    """X1, D11: each row is started once and recorded once."""
    here = farm(db, lanes=PLAIN.replace("started(job)", "started(job)\n    await until_told()") + UNTIL_TOLD)
    here.fill(5_000)
    workers = [here.start("w1", drain=True), here.start("w2", drain=True)]
    # The rows begin to end when both are at work: neither is done before the other has started.
    held = "select distinct worker from jobs where status = 'running'"
    eventually(lambda: {row["worker"] for row in db.query(held)} == {"w1", "w2"}, 60)
    (here.folder / "go").touch()
    assert [worker.wait(timeout=90) for worker in workers] == [0, 0]
    assert_recorded_once(here, 5_000)
    starts = here.started()
    assert len(starts) == 5_000
    assert set(starts.values()) == {1}


@pytest.mark.timeout(300)
def test_rows_survive_one_process_killed_after_another(db: Db, farm: MakeFarm) -> None:
    """X1, X2: each killed with rows in hand; every row ends done, recorded once, by the claim that held it."""
    here = farm(db, LEASE="2", TAKES="0.1", CONCURRENCY="20")
    rows = 0
    steady = here.start("steady")
    for n in range(6):
        victim = here.start(f"victim-{n}")
        in_hand = f"select count(*) from jobs where status = 'running' and worker = 'victim-{n}'"
        while not db.value(in_hand):
            assert victim.poll() is None, "the victim ended by itself"
            if here.counts().get("queued", 0) < 100:
                here.fill(200)
                rows += 200
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)
        victim.wait(timeout=60)
    last = here.start("last", drain=True)
    assert last.wait(timeout=200) == 0
    assert steady.poll() is None
    assert_recorded_once(here, rows)
    assert sum(here.started().values()) > rows, "runs were cut off, and run again"


def test_a_paused_worker_cannot_overwrite_what_another_wrote(db: Db, farm: MakeFarm) -> None:
    """X1: stopped past its lease, its row finished by another; continued, its late outcome is dropped and counted."""
    here = farm(db, LEASE="1", TAKES="1.2", CONCURRENCY="1")
    here.fill(1)
    paused = here.start("paused")
    eventually(lambda: here.counts().get("running"))
    paused.send_signal(signal.SIGSTOP)
    other = here.start("other", TAKES="0")
    eventually(lambda: here.counts() == {"done": 1})
    row = db.one("select * from jobs")
    assert row["worker"] == "other"
    paused.send_signal(signal.SIGCONT)
    eventually(lambda: "claim_lost" in here.events.read_text())
    assert db.one("select * from jobs") == row
    assert db.value("select count(*) from runs") == 1
    for worker in (paused, other):
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=60) == 0
    lost = {w["id"]: w["lost"] for w in db.query("select id, lost from rowmill_workers")}
    assert lost == {"paused": 1, "other": 0}


BLOCKING = """
@mill.lane("jobs", name="jobs", **OPTIONS)
async def work(job):
    started(job)
    until = time.monotonic() + 3 * LEASE
    while time.monotonic() < until:
        sum(range(1000))
"""


def test_a_handler_that_blocks_the_event_loop_keeps_its_lease(db: Db, farm: MakeFarm) -> None:
    """A12, X1: pure Python CPU for three lease lengths; the other worker never gets the row."""
    here = farm(db, lanes=BLOCKING, LEASE="1.5")
    here.fill(1)
    blocker = here.start("blocker")
    eventually(lambda: here.counts().get("running"))
    rival = here.start("rival")
    eventually(lambda: here.counts() == {"done": 1})
    assert here.started() == {db.value("select id from jobs"): 1}
    assert db.value("select worker from jobs") == "blocker"
    assert blocker.poll() is None
    assert rival.poll() is None


def test_workers_outlive_ten_seconds_without_their_database(farm: MakeFarm) -> None:
    """X2: PostgreSQL stopped in mid-run and started again: workers wait, come back; nothing lost, nothing doubled."""
    with Server() as own:
        db = Db(own.create_database("outage"))
        here = farm(db, TAKES="0.05", LEASE="30", CONCURRENCY="10")
        here.fill(3_000)
        workers = [here.start("w1"), here.start("w2")]
        eventually(lambda: here.counts().get("done", 0) > 300)
        own.stop("fast")
        down = time.monotonic()
        eventually(lambda: time.monotonic() - down > 10, every=0.2)
        assert [worker.poll() for worker in workers] == [None, None]
        own.start()
        eventually(lambda: here.counts() == {"done": 3_000}, seconds=60)
        assert_recorded_once(here, 3_000)
        assert set(here.started().values()) == {1}, "no run was started twice"
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        assert [worker.wait(timeout=60) for worker in workers] == [0, 0]
        events = [json.loads(line)["event"] for line in here.events.read_text().splitlines()]
        assert "environment_down" in events


def test_a_stopped_worker_gives_back_what_it_had_not_finished(db: Db, farm: MakeFarm) -> None:
    """X2: the first SIGTERM lets runs end; buffered rows go back with no attempt lost."""
    here = farm(db, TAKES="0.3", CONCURRENCY="3")
    here.fill(200)
    worker = here.start("w")
    eventually(lambda: here.counts().get("done", 0) >= 3)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
    counts = here.counts()
    assert set(counts) == {"queued", "done"}
    assert db.value("select max(attempts) from jobs where status = 'queued'") == 0
    assert db.value("select count(*) from jobs where status = 'queued' and worker is not null") == 0
    assert sum(here.started().values()) == counts["done"]


def test_a_rolling_restart_under_load_costs_no_attempt_and_leaves_no_row(db: Db, farm: MakeFarm) -> None:
    """Issue, recovery: four processes are stopped and replaced one after the other while rows come in. Real processes,
    because the signal, the exit and the successor are what is tested.
    """
    here = farm(db, TAKES="0.01", CONCURRENCY="4", LEASE="3600")
    workers = [here.start(f"old-{n}") for n in range(4)]
    here.fill(200)
    eventually(lambda: here.counts().get("done", 0) >= 50)
    for n in range(4):
        here.fill(200)
        workers[n].send_signal(signal.SIGTERM)
        here.fill(50)
        assert workers[n].wait(timeout=60) == 0
        workers[n] = here.start(f"new-{n}")
    eventually(lambda: here.counts() == {"done": 1200}, seconds=90)
    assert db.one("select min(attempts) least, max(attempts) most from jobs") == {"least": 1, "most": 1}
    assert set(here.started().values()) == {1}


def test_a_second_live_worker_with_the_same_id_is_refused(db: Db, farm: MakeFarm) -> None:
    """A13: the message names the other's process; the first goes on; the id of a dead one is free again."""
    here = farm(db)
    first = here.start("same")
    eventually(lambda: _workers(db))
    second = here.start("same")
    assert second.wait(timeout=60) != 0
    assert f"pid {first.pid}" in here.errors.read_text()
    assert first.poll() is None
    first.kill()
    first.wait(timeout=60)
    third = here.start("same")
    eventually(lambda: _workers(db) == {third.pid})


def _workers(db: Db) -> set[int]:
    try:
        return {row["pid"] for row in db.query("select pid from rowmill_workers")}
    except Exception:
        return set()
