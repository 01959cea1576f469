"""Dead workers: known by the kernel, presumed by a missing lock, and never presumed where it proves nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from rowmill.engine import heartbeat as heartbeat_module
from rowmill.engine.processes.child import SupervisorPipe
from rowmill.engine.recovery import liveness
from rowmill.engine.recovery.liveness import DeadWorker, Peers, process_identity, process_is_gone
from rowmill.engine.worker import SUSPICION as DEFAULT
from rowmill.engine.worker import Worker
from rowmill.errors import DeclarationError, Unreachable
from rowmill.store.own.workers import Peer, WorkersTable
from workers import STATES, events_of, jobs, until, working

SUSPICION = 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time of the module, moved by hand."""
    now = [1000.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    return now


#: Seconds between heartbeats, and a silence that is longer than that by any suspicion here.
BEAT, SILENT = 5.0, 60.0


def peer(silent_for: float = SILENT, missing: bool = True, process: str | None = None) -> Peer:
    return Peer("w", "abc", "1", silent_for, process, missing)


# -- the kernel


def test_a_process_is_gone_when_it_has_ended_and_not_before() -> None:
    """By pid and start time: another process with the same pid is not it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    boot, namespace, _, _ = (process_identity() or "").split()
    started = liveness._started(child.pid)
    identity = f"{boot} {namespace} {child.pid} {started}"
    assert not process_is_gone(identity)
    assert process_is_gone(f"{boot} {namespace} {child.pid} {int(started or 0) - 1}")
    child.communicate()
    assert process_is_gone(identity)


def test_a_zombie_is_gone() -> None:
    """Killed, and its parent has not asked for it yet."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    boot, namespace, _, _ = (process_identity() or "").split()
    identity = f"{boot} {namespace} {child.pid} {liveness._started(child.pid)}"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_is_gone(identity)
    child.communicate()


@pytest.mark.parametrize("identity", [None, "another-boot 4026531836 1 1", "%(boot)s 1 999999999 1"])
def test_nothing_is_known_of_another_host_or_namespace(identity: str | None) -> None:
    """A pid means nothing there: not even one that is not here."""
    boot = (process_identity() or "").split()[0]
    assert not process_is_gone(identity and identity % {"boot": boot})


def test_a_process_must_be_gone_at_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor has the time to say what it was running."""
    monkeypatch.setattr(liveness, "process_is_gone", lambda process: process == "gone")
    peers = Peers(SUSPICION, BEAT)
    peers.update([peer(missing=False, process="gone"), Peer("v", "def", "1", SILENT, "here", False)], None)
    assert peers.find_gone() == []
    assert peers.find_gone() == [DeadWorker("w", "abc")]
    assert peers.find_gone() == []


# -- the lock


def test_a_missing_lock_is_a_suspicion_and_silence_makes_it_a_death(clock: list[float]) -> None:
    peers = Peers(4.0, BEAT)
    assert peers.update([peer()], 100.0) == []
    assert peers.suspects
    clock[0] += 3.9
    assert peers.update([peer()], 103.9) == []
    clock[0] += 0.2
    assert peers.update([peer()], 104.1) == [DeadWorker("w", "abc", seen_at="1")]


@pytest.mark.parametrize("silent_for", [0.0, 4.9, 8.9])
def test_a_worker_without_its_lock_lives_until_it_has_missed_a_heartbeat(clock: list[float], silent_for: float) -> None:
    """Its loop may be blocked, or the server full, so that it cannot listen: as long as it beats, it lives."""
    peers = Peers(4.0, BEAT)
    for _ in range(20):
        assert peers.update([peer(silent_for)], 100.0) == []
        clock[0] += 1.0
    assert peers.update([peer(9.1)], 100.0) == [DeadWorker("w", "abc", seen_at="1")]


def test_a_lock_that_comes_back_ends_the_suspicion(clock: list[float]) -> None:
    peers = Peers(4.0, BEAT)
    peers.update([peer()], 100.0)
    clock[0] += 3.0
    assert peers.update([peer(missing=False)], 100.0) == []
    assert not peers.suspects
    clock[0] += 3.0
    assert peers.update([peer()], 100.0) == []


def test_the_next_look_is_when_a_suspect_may_be_presumed_dead(clock: list[float]) -> None:
    """Not up to a second later."""
    peers = Peers(4.0, BEAT)
    assert peers.pause(1.0) == 1.0
    peers.update([peer(silent_for=2.0)], 100.0)
    assert peers.pause(60.0) == pytest.approx(BEAT + 4.0 - 2.0)
    clock[0] += 6.5
    peers.update([peer(silent_for=8.5)], 100.0)
    assert peers.pause(1.0) == pytest.approx(0.5)
    peers.update([peer(missing=False)], 100.0)
    assert peers.pause(1.0) == 1.0


@pytest.mark.parametrize("beaten", [0.0, 0.5, 1.3, 2.6, 3.9])
@pytest.mark.parametrize("looked", [0.0, 0.7, 1.9, 3.99])
def test_a_dead_host_is_found_within_ten_seconds_whenever_it_died(
    clock: list[float], beaten: float, looked: float
) -> None:
    """The promise of docs/reference/lanes-and-tasks.md, with more than a second left for the statements.

    ``beaten``, ``looked``: seconds before its death at which it last beat, and another worker last looked.
    """
    every = heartbeat_module._ALIVE_EVERY
    peers, died, beat_at = Peers(DEFAULT, every), clock[0], clock[0] - looked
    clock[0] -= looked
    while not peers.update([peer(clock[0] - died + beaten, missing=clock[0] >= died)], 100.0):
        clock[0] += max(peers.pause(heartbeat_module._SOON), heartbeat_module._SHORTEST)
        if not peers.suspects:  # the next look comes with the next heartbeat
            clock[0] = beat_at = beat_at + every
    assert clock[0] - died <= 8.5


@pytest.mark.parametrize("age", [None, 3.9])
def test_who_has_no_old_session_suspects_nobody(clock: list[float], age: float | None) -> None:
    """After a restart, a failover, or the end of every session, all locks are missing at once."""
    peers = Peers(4.0, BEAT)
    peers.update([peer()], age)
    clock[0] += 60.0
    assert peers.update([peer()], age) == []
    # And the time begins only when its own session is old enough.
    assert peers.update([peer()], 4.1) == []


def test_without_suspicion_a_missing_lock_says_nothing(clock: list[float]) -> None:
    peers = Peers(None, BEAT)
    peers.update([peer()], 100.0)
    clock[0] += 1000.0
    assert peers.update([peer()], 1100.0) == []
    assert not peers.suspects


@pytest.mark.parametrize("suspicion", [td(0), td(seconds=0.5), 4.0])
def test_a_suspicion_that_nobody_can_meet_is_refused(suspicion: Any) -> None:
    with pytest.raises(DeclarationError, match="suspicion"):
        Mill("sqlite:///x.db", suspicion=suspicion)


# -- with workers


def holding(db: Db, suspicion: td | None = td(seconds=SUSPICION)) -> tuple[Mill, asyncio.Event]:
    """A lane whose runs last until the event is set; its lease is long."""
    mill, go = Mill(db.url, suspicion=suspicion), asyncio.Event()

    @mill.lane("jobs", name="jobs", **STATES, concurrency=5, lease=td(minutes=5), poll=td(seconds=0.2))
    async def work(job: Any) -> None:
        await go.wait()

    return mill, go


def holders(db: Db) -> list[Any]:
    return [row["worker"] for row in db.query("select worker from jobs order by id")]


async def cut_off(worker: Worker) -> None:
    """As if its host were gone: no beat, no session, no statement."""
    environment = worker.environments[0]
    assert environment._renewer is not None
    await asyncio.to_thread(environment._renewer.stop)
    for task in environment._tasks:
        task.cancel()
    await asyncio.gather(*environment._tasks, return_exceptions=True)
    worker._round = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    worker.shutdown.watch = lambda now: None  # type: ignore[method-assign]


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that seem to be on other hosts."""
    monkeypatch.setattr(liveness, "_identity_of", lambda pid: None)
    monkeypatch.setattr(heartbeat_module, "_ALIVE_EVERY", 0.3)


async def test_rows_of_a_worker_whose_host_is_gone_are_taken_back_before_their_lease(pg: Db, no_kernel: None) -> None:
    """A missing lock, and silence."""
    jobs(pg, 3)
    mill, go = holding(pg)
    seen = events_of(mill)
    lost = mill.worker(worker_id="lost")
    task = asyncio.create_task(lost.run())
    await until(lambda: holders(pg) == ["lost"] * 3)
    await until(lambda: pg.value("select lock_id from rowmill_workers where id = 'lost'"))
    await cut_off(lost)
    async with working(mill, worker_id="other"):
        await until(lambda: holders(pg) == ["other"] * 3, 60)
        (event,) = [event for event in seen if event.name == "worker_dead"]
        assert event.fields["worker"] == "lost"
        assert event.fields["presumed"] is True
        go.set()
        await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_says_that_it_holds_its_lock_as_soon_as_it_does(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others miss the lock only of a worker that said so. Who dies before its second heartbeat is found, too."""
    monkeypatch.setattr(heartbeat_module, "_ALIVE_EVERY", 3600.0)
    jobs(pg, 0)
    mill, _ = holding(pg)
    async with working(mill, worker_id="young"):
        await until(lambda: pg.value("select max(lock_id) from rowmill_workers where id = 'young'"), 60)


async def test_a_heartbeat_that_failed_is_sent_again_soon(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one in its time would come too late for a worker that lost its session as well."""
    monkeypatch.setattr(heartbeat_module, "_ALIVE_EVERY", 3600.0)
    jobs(db, 0)
    mill, _ = holding(db)
    beats, beat = [], WorkersTable.beat

    async def fails_once(self: WorkersTable, *given: Any, **named: Any) -> bool:
        beats.append(given)
        if len(beats) == 1:
            raise Unreachable("no answer")
        return await beat(self, *given, **named)

    monkeypatch.setattr(WorkersTable, "beat", fails_once)
    async with working(mill):
        await until(lambda: len(beats) >= 2, 60)


async def test_a_worker_that_lost_its_session_and_beats_keeps_its_rows(pg: Db, no_kernel: None) -> None:
    """Its lock is missing for longer than the suspicion; its beats prove that it lives."""
    jobs(pg, 3)
    mill, go = holding(pg)
    seen = events_of(mill)
    async with working(mill, worker_id="beats") as worker:
        await until(lambda: holders(pg) == ["beats"] * 3)
        await until(lambda: pg.value("select lock_id from rowmill_workers where id = 'beats'"))
        # Its session ends and does not come back; the table goes on saying that there is one.
        environment = worker.environments[0]
        listening = environment._tasks[-1] if environment._minutes is None else environment._tasks[-2]
        environment.session.locked_since, real = 0.0, environment.session
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        real.locked_since = 0.0
        async with working(mill, worker_id="other") as other:
            peers = other.environments[0]
            await until(lambda: peers.beating)
            assert peers._renewer is not None
            # However late a busy machine makes its beats: each one counts for ten minutes here.
            peers._renewer._peers._beat_every = 600.0
            await until(lambda: (peers.session.age or 0.0) > SUSPICION)
            await until(lambda: peers._renewer._peers.suspects)
            seen_at: set[Any] = set()

            def beats() -> int:
                seen_at.add(pg.value("select seen_at from rowmill_workers where id = 'beats'"))
                return len(seen_at)

            await until(lambda: beats() > 8, 60)
            assert holders(pg) == ["beats"] * 3
            go.set()
            await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 3)
    assert not [event for event in seen if event.name in ("worker_dead", "row_swept", "claim_lost")]


async def test_every_session_ended_at_once_takes_no_row_from_anybody(pg: Db, no_kernel: None) -> None:
    """Workers come back and take their locks first of all."""
    jobs(pg, 10)
    mill, go = holding(pg)
    seen = events_of(mill)
    async with working(mill, worker_id="one") as one, working(mill, worker_id="two") as two:
        await until(lambda: pg.value("select count(*) from jobs where status = 'running'") == 10)
        sessions = [worker.environments[0].session for worker in (one, two)]
        await until(lambda: all((session.age or 0.0) > SUSPICION for session in sessions))
        before = holders(pg)
        pg.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
                   " and datname = current_database()")  # fmt: skip
        await until(lambda: all((session.age or 0.0) > 3 * SUSPICION for session in sessions), 60)
        assert holders(pg) == before
        go.set()
        await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 10)
    assert not [event for event in seen if event.name in ("worker_dead", "row_swept", "claim_lost")]


async def test_only_one_of_those_who_find_a_worker_dead_is_told_so(db: Db) -> None:
    """And one that was heard of meanwhile is not called dead."""
    jobs(db, 0)
    mill, _ = holding(db)
    async with working(mill, worker_id="w") as worker:
        await worker.started.wait()
        me = worker.shutdown.snapshot()
    table = WorkersTable(mill.databases()[0][1])
    observer = replace(me, id="observer", incarnation="another")
    await table.register(me)
    (seen_at,) = [p.seen_at for p in await table.peers(observer)]
    await table.beat(me)
    assert not await table.declare_dead("w", me.incarnation, "2000-01-01")
    assert await table.declare_dead("w", me.incarnation, None)
    assert not await table.declare_dead("w", me.incarnation, None)
    assert [p.dead for p in await table.peers(observer)] == [True]
    await table.rows_given_back("w", me.incarnation)
    assert await table.peers(observer) == []
    assert seen_at
    await table.beat(me)  # it lives after all
    assert [p.id for p in await table.peers(observer)] == ["w"]
    await table.database.close()


async def test_rows_of_a_dead_worker_come_back_when_the_worker_that_found_it_dead_fails(
    db: Db, no_kernel: None
) -> None:
    """It wrote that the worker is dead, and lost the database before it gave the rows back."""
    jobs(db, 3)
    mill, go = holding(db)
    lost = mill.worker(worker_id="lost")
    task = asyncio.create_task(lost.run())
    await until(lambda: holders(db) == ["lost"] * 3)
    await cut_off(lost)
    db.execute("update rowmill_workers set state = 'dead', process = 'boot namespace 1 1' where id = 'lost'")
    async with working(mill, worker_id="other"):
        await until(lambda: holders(db) == ["other"] * 3, 60)
        await until(lambda: db.value("select process from rowmill_workers where id = 'lost'") is None, 60)
        go.set()
        await until(lambda: db.value("select count(*) from jobs where status = 'done'") == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_rows_that_a_successor_of_the_same_id_holds_are_not_given_back(db: Db) -> None:
    """The word of a death may come late: by then the id is another process's."""
    jobs(db, 2)
    mill, go = holding(db)
    async with working(mill, worker_id="w") as worker:
        await until(lambda: holders(db) == ["w"] * 2)
        async with working(mill, worker_id="other") as other:
            other.take_over(DeadWorker("w", "an-older-one", frozenset()))
            await until(lambda: not other._beside)
            assert holders(db) == ["w"] * 2
            go.set()
            await until(lambda: db.value("select count(*) from jobs where status = 'done'") == 2)
        assert worker.counters.losses == 0


async def test_a_worker_whose_loop_is_blocked_when_its_session_ends_keeps_its_rows(pg: Db) -> None:
    """With the real rhythm of heartbeats, which is slower than the suspicion: it cannot listen, and it beats."""
    jobs(pg, 1)
    mill, go = Mill(pg.url, suspicion=td(seconds=SUSPICION)), threading.Event()
    other = holding(pg)[0]
    seen = events_of(other)

    @mill.lane("jobs", name="jobs", **STATES, concurrency=1, lease=td(minutes=5), poll=td(seconds=0.2))
    async def work(job: Any) -> None:
        await until(lambda: worker.environments[0].session.age is not None)
        go.wait(120)  # blocks the event loop of its own worker

    worker = mill.worker(worker_id="blocked", drain=True)
    thread = threading.Thread(target=lambda: asyncio.run(worker.run()))  # type: ignore[arg-type]
    thread.start()
    try:
        await until(lambda: worker.environments[0].opened)
        await until(lambda: pg.value("select lock_id from rowmill_workers where id = 'blocked'"))
        async with working(other, worker_id="other") as observer:
            await until(lambda: (observer.environments[0].session.age or 0.0) > SUSPICION, 60)
            pg.execute("select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and objid::bigint ="
                       " (select lock_id from rowmill_workers where id = 'blocked')")  # fmt: skip
            renewer = observer.environments[0]._renewer
            assert renewer is not None
            await until(lambda: renewer._peers.suspects, 60)
            since = time.monotonic()
            await until(lambda: time.monotonic() - since > 4 * SUSPICION and renewer._peers.suspects, 60)
            assert holders(pg) == ["blocked"]
    finally:
        go.set()
        await asyncio.to_thread(thread.join, 60)
    assert pg.value("select status from jobs") == "done"
    assert not [event for event in seen if event.name in ("worker_dead", "row_swept")]


async def test_an_environment_that_serves_no_lane_has_a_heartbeat_too(lite: Db, tmp_path: Path) -> None:
    jobs(lite, 1)
    mill = Mill({"here": lite.url, "there": f"sqlite:///{tmp_path / 'there.db'}"})

    @mill.lane("jobs", name="jobs", **STATES, environments=["here"])
    async def work(job: Any) -> None: ...

    async with working(mill) as worker:
        await until(lambda: lite.value("select count(*) from jobs where status = 'done'") == 1, 60)
        await until(lambda: all(environment.opened for environment in worker.environments), 60)
        assert all(environment.beating for environment in worker.environments)


def test_a_report_that_was_cut_off_does_not_end_the_line() -> None:
    """A child that no longer reads would not notice that its supervisor is gone."""
    ours, theirs = socket.socketpair()
    heard: list[DeadWorker] = []
    orphaned = threading.Event()
    SupervisorPipe(theirs.detach()).watch(heard.append, orphaned.set, patience=3600)
    ours.sendall(b'{"id": "w", "incarn\n{"id": "w", "incarnation": "abc", "running": [7]}\n')
    ours.close()
    assert orphaned.wait(60)
    assert heard == [DeadWorker("w", "abc", frozenset({7}))]
