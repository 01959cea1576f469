"""Dead workers: known by the kernel, presumed by a missing lock, and never presumed where it proves nothing."""

from __future__ import annotations

import asyncio
import copy
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta as td
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import asyncpg
import pytest

from databases import Db
from rowmill import Mill
from rowmill.engine import environment as environment_module
from rowmill.engine import heartbeat as heartbeat_module
from rowmill.engine.processes.child import SupervisorPipe
from rowmill.engine.recovery import liveness
from rowmill.engine.recovery.liveness import DeadWorker, Peers
from rowmill.engine.worker import SUSPICION as DEFAULT
from rowmill.engine.worker import Worker
from rowmill.errors import DeclarationError, Unreachable, WorkerIdTaken
from rowmill.store.own import process_identity as identities
from rowmill.store.own.process_identity import process_identity, process_is_gone
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
    started = identities._started(child.pid)
    identity = f"{boot} {namespace} {child.pid} {started}"
    assert not process_is_gone(identity)
    assert process_is_gone(f"{boot} {namespace} {child.pid} {int(started or 0) - 1}")
    child.communicate()
    assert process_is_gone(identity)


def test_a_zombie_is_gone() -> None:
    """Killed, and its parent has not asked for it yet."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    boot, namespace, _, _ = (process_identity() or "").split()
    identity = f"{boot} {namespace} {child.pid} {identities._started(child.pid)}"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_is_gone(identity)
    child.communicate()


@pytest.mark.parametrize("identity", [None, "another-boot 4026531836 1 1", "%(boot)s 1 999999999 1"])
def test_nothing_is_known_of_another_host_or_namespace(identity: str | None) -> None:
    """A pid means nothing there: not even one that is not here."""
    boot = (process_identity() or "").split()[0]
    assert not process_is_gone(identity and identity % {"boot": boot})


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child


def identity_of(pid: int) -> str:
    """As a worker of this process id, here, would write it."""
    kernel = " ".join((process_identity() or "").split()[:2])
    return f"{kernel} {pid} {identities._started(pid)}"


def test_a_process_that_cannot_be_looked_at_lives(child: subprocess.Popen[bytes]) -> None:
    """No file can be opened any more in this process: that says nothing of others."""
    identity = identity_of(child.pid)
    limits, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        gone = process_is_gone(identity)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not gone
    child.communicate()
    assert process_is_gone(identity)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount of its own")
@pytest.mark.parametrize(
    ("namespace", "before", "source", "said"),
    [
        pytest.param(
            ["--mount"], "mount -t proc -o hidepid=2 proc /proc && ",
            # As nobody; a process that has changed its user may not look at its own namespaces any more.
            "process_identity(); os.setgroups([]); os.setgid(65534); os.setuid(65534); print(process_is_gone(here))",
            "False", id="hidden from other users",
        ),
        pytest.param(
            ["--pid", "--fork"], "", "print(process_identity())", "None", id="in another namespace than /proc"
        ),
    ],
)  # fmt: skip
def test_a_process_that_is_hidden_lives(
    child: subprocess.Popen[bytes], namespace: list[str], before: str, source: str, said: str
) -> None:
    """As under systemd's ProtectProc=invisible; and where /proc shows the processes of another namespace."""
    source = f"import os; from rowmill.store.own.process_identity import *; here = {identity_of(child.pid)!r}; {source}"
    command = shlex.join([sys.executable, "-c", source])
    shell = subprocess.run(
        ["unshare", *namespace, "sh", "-c", f"{before}exec {command}"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    if any(word in shell.stderr for word in ("mount:", "unshare:")):
        pytest.skip(shell.stderr)
    assert shell.stdout.strip() == said, shell.stderr


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
    every = heartbeat_module.BEAT_EVERY
    peers, died, beat_at = Peers(DEFAULT, every), clock[0], clock[0] - looked
    clock[0] -= looked
    while not peers.update([peer(clock[0] - died + beaten, missing=clock[0] >= died)], 100.0):
        clock[0] += max(peers.pause(heartbeat_module._SOON), heartbeat_module._SHORTEST)
        if not peers.suspects:  # the next look comes with the next heartbeat
            clock[0] = beat_at = beat_at + every
    assert clock[0] - died <= 8.5


def test_the_worker_that_found_a_death_has_until_the_second_look() -> None:
    """To give the rows back. Others do so only then."""
    peers, dead = Peers(SUSPICION, BEAT), replace(peer(), dead=True)
    assert peers.find_unfinished([dead]) == []
    assert peers.find_unfinished([dead]) == [DeadWorker("w", "abc", declared=True)]
    assert peers.find_unfinished([]) == []
    assert peers.find_unfinished([dead]) == []


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


def replace_url(db: Db, url: str) -> Db:
    """The same database by another URL."""
    other = copy.copy(db)
    other.url = url
    return other


def holders(db: Db) -> list[Any]:
    return [row["worker"] for row in db.query("select worker from jobs order by id")]


async def cut_off(worker: Worker) -> None:
    """As if its host were gone: no beat, no session, no statement."""
    environment = worker.environments[0]
    assert environment._renewer is not None
    await asyncio.to_thread(environment._renewer.stop)
    assert environment._listening is not None
    tasks = [*environment._tasks, environment._listening]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    worker._round = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    worker.shutdown.watch = lambda now: None  # type: ignore[method-assign]


@asynccontextmanager
async def dead_holder(mill: Mill, db: Db, rows: int, id: str = "lost") -> AsyncIterator[Worker]:
    """A worker that holds these rows, and was cut off."""
    lost = mill.worker(worker_id=id)
    task = asyncio.create_task(lost.run())
    await until(lambda: holders(db) == [id] * rows)
    if db.dialect == "postgresql":
        await until(lambda: db.value(f"select lock_id from rowmill_workers where id = '{id}'"))
    await cut_off(lost)
    yield lost
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def locked(pg: Db, id: int) -> AsyncIterator[Callable[[], None]]:
    """A row that somebody has locked until he is told to let go."""
    over, begun = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        connection = await asyncpg.connect(pg.direct)
        async with connection.transaction():
            await connection.execute(f"select 1 from jobs where id = {id} for update")
            begun.set()
            await over.wait()
        await connection.close()

    task = asyncio.create_task(hold())
    await begun.wait()
    yield over.set
    over.set()
    await task


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that seem to be on other hosts."""
    monkeypatch.setattr(identities, "_identity_of", lambda pid: None)
    monkeypatch.setattr(heartbeat_module, "BEAT_EVERY", 0.3)
    monkeypatch.setattr(environment_module, "BEAT_EVERY", 0.3)


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
    monkeypatch.setattr(heartbeat_module, "BEAT_EVERY", 3600.0)
    jobs(pg, 0)
    mill, _ = holding(pg)
    async with working(mill, worker_id="young"):
        await until(lambda: pg.value("select max(lock_id) from rowmill_workers where id = 'young'"), 60)


async def test_a_heartbeat_that_failed_is_sent_again_soon(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one in its time would come too late for a worker that lost its session as well."""
    monkeypatch.setattr(heartbeat_module, "BEAT_EVERY", 3600.0)
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
        listening = environment._listening
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


class Cable:
    """A way to the server on which one session can be cut, so that the worker's side hears nothing of it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = f"{dict(parse_qsl(parts.query))['host']}/.s.PGSQL.5432"
        self._url = parts
        self._holders: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cable:
        self._server: Any = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = urlunsplit(self._url._replace(netloc=f"postgres:@127.0.0.1:{port}", query=""))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_unix_connection(self._socket)
        this = asyncio.current_task()
        assert this is not None
        self._tasks.add(this)

        async def there() -> None:
            while data := await reader.read(65536):
                if b"advisory_lock" in data:
                    self._holders.append(upstream)
                upstream.write(data)
            upstream.close()
            writer.close()

        async def back() -> None:
            while data := await upstream_reader.read(65536):
                writer.write(data)
            if upstream not in self._holders:
                writer.close()

        await asyncio.gather(there(), back(), return_exceptions=True)

    def cut(self) -> None:
        """The server ends the session that holds the lock."""
        self._holders[-1].transport.abort()


@pytest.mark.no_pooler("nobody listens through a pooler")
async def test_a_session_that_ended_unnoticed_is_opened_again(
    pg: Db, no_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a network cut the server has ended it, and the worker's side waits for words that will never come. The
    heartbeat misses the lock. Without that the worker has no lock, and hears of no row until its next poll.
    """
    jobs(pg, 0)
    async with Cable(pg.url) as cable:
        mill = Mill(cable.url, suspicion=td(seconds=SUSPICION))

        @mill.lane("jobs", name="jobs", **STATES, poll=td(hours=1))
        async def work(job: Any) -> None: ...

        lock = "select count(*) from pg_locks where locktype = 'advisory' and granted and database ="
        lock += " (select oid from pg_database where datname = current_database())"
        lock += " and objid::bigint = (select lock_id from rowmill_workers where id = 'w')"
        async with working(mill, worker_id="w") as worker:
            await until(lambda: worker.environments[0].opened and pg.value(lock) == 1)
            session = worker.environments[0].session
            await until(lambda: session.age is not None)
            before, renewer = session.locked_since, worker.environments[0]._renewer
            assert renewer is not None
            distrusts: list[bool] = []

            def update(_peers: Any, age: float | None) -> list[DeadWorker]:
                distrusts.append(age is None and session.age is not None)
                return []

            def later(*given: Any, again: Any = worker.listen_again_from_thread) -> None:
                if any(distrusts):
                    again(*given)

            monkeypatch.setattr(renewer._peers, "update", update)
            monkeypatch.setattr(worker, "listen_again_from_thread", later)
            cable.cut()
            await until(lambda: pg.value(lock) == 1 and session.locked_since not in (None, before), 60)
            assert any(distrusts), "a worker that has lost its own lock misses nobody's"
            await until(lambda: not worker.environments[0].look)
            pg.execute("insert into jobs (note) values (null); notify rowmill")
            await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 1, 60)


@pytest.mark.no_pooler("a pooler asks for a password of its own")
async def test_a_role_that_may_not_see_locks_finds_no_lock_missing(pg: Db, no_kernel: None) -> None:
    """It works, listens and lists workers. Deaths that the kernel or a supervisor knows are found."""
    role = f"unseeing_{os.getpid()}"
    jobs(pg, 1)
    mill, go = holding(pg)
    go.set()
    async with working(mill, worker_id="seeing"):  # makes the tables
        await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 1)
    pg.execute(f"create role {role} login; grant all on all tables in schema public to {role};"
               f" grant all on schema public to {role}; revoke all on pg_locks from public;"
               " revoke execute on function pg_try_advisory_lock_shared(int, int) from public")  # fmt: skip
    try:
        parts = urlsplit(pg.url)
        url = urlunsplit(parts._replace(netloc=parts.netloc.replace("postgres:", f"{role}:", 1)))
        unseeing, _ = holding(replace_url(pg, url))
        table = WorkersTable(unseeing.databases()[0][1])
        async with working(unseeing, worker_id="unseeing") as worker:
            await until(lambda: worker.environments[0].opened)
            me = worker.shutdown.snapshot()
            dead = replace(me, id="other", incarnation="other", process="boot ns 1 1")
            await table.register(dead)
            await table.beat(dead, locked=True)
            assert [(p.id, p.lock_missing) for p in await table.peers(me)] == [("other", False)]
            assert {w["id"]: w["lock_missing"] for w in await table.all()} == {
                "unseeing": False, "other": False, "seeing": False,
            }  # fmt: skip
            listening = "select count(*) from pg_stat_activity where usename = ? and query ilike 'listen%'"
            await until(lambda: pg.value(listening, role) == 1, 60)
        await table.database.close()
    finally:
        pg.execute(f"drop owned by {role}; drop role {role}")


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
    await table.rows_given_back("w", me.incarnation, me.lanes)
    assert await table.peers(observer) == []
    assert seen_at
    await table.beat(me)  # it lives after all
    assert [p.id for p in await table.peers(observer)] == ["w"]
    await table.database.close()


async def test_a_worker_that_was_presumed_dead_and_lives_can_be_found_dead_again(db: Db) -> None:
    """Its rows were given back; its session and its heartbeats come back."""
    jobs(db, 0)
    mill, _ = holding(db)
    async with working(mill, worker_id="w") as worker:
        await worker.started.wait()
        me = worker.shutdown.snapshot()
    assert me.process is not None
    table = WorkersTable(mill.databases()[0][1])
    observer = replace(me, id="observer", incarnation="another")
    await table.register(me)
    assert await table.declare_dead("w", me.incarnation, None)
    await table.rows_given_back("w", me.incarnation, me.lanes)
    await table.beat(me, locked=True)
    await table.rows_given_back("w", me.incarnation, me.lanes)  # the word of one who found it dead, and is late
    (again,) = await table.peers(observer)
    assert (again.process, again.dead, again.lock_missing) == (me.process, False, db.dialect == "postgresql")
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


async def test_rows_of_a_lane_that_the_finder_does_not_serve_come_back_too(db: Db, no_kernel: None) -> None:
    """The worker that finds another dead gives back its own lanes; one that serves the others gives back the rest."""
    jobs(db, 2)
    time = "timestamptz" if db.dialect == "postgresql" else "text"
    db.execute(f"create table more_jobs (id integer primary key, status text, worker text, claimed_at {time})")
    db.execute("insert into more_jobs (id, status) values (1, 'queued')")
    mill, go = holding(db)

    @mill.lane("more_jobs", name="more", **STATES, lease=td(minutes=5), poll=td(seconds=0.2))
    async def more(job: Any) -> None:
        await go.wait()

    def holders_of_more() -> list[Any]:
        return [row["worker"] for row in db.query("select worker from more_jobs")]

    lost = mill.worker(worker_id="lost")
    task = asyncio.create_task(lost.run())
    await until(lambda: holders(db) == ["lost"] * 2 and holders_of_more() == ["lost"])
    await cut_off(lost)
    db.execute("update rowmill_workers set state = 'dead', process = 'boot namespace 1 1' where id = 'lost'")
    async with working(mill, worker_id="first", lanes=["jobs"]):
        await until(lambda: holders(db) == ["first"] * 2, 60)
        await until(lambda: db.value("select lanes from rowmill_workers where id = 'lost'") == '["more"]', 60)
        assert holders_of_more() == ["lost"]
        async with working(mill, worker_id="second", lanes=["more"]):
            await until(lambda: holders_of_more() == ["second"], 60)
            await until(lambda: db.value("select process from rowmill_workers where id = 'lost'") is None, 60)
            go.set()
            await until(lambda: db.value("select count(*) from more_jobs where status = 'done'") == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_row_that_somebody_had_locked_comes_back_when_it_is_free(pg: Db, no_kernel: None) -> None:
    """A transaction of the user's own, in which the row is locked when its worker is found dead."""
    jobs(pg, 3)
    mill, go = holding(pg)
    async with dead_holder(mill, pg, 3) as lost, locked(pg, 2) as unlock, working(mill, worker_id="other") as other:
        await other.started.wait()
        other.take_over(DeadWorker("lost", lost.incarnation))
        await until(lambda: holders(pg) == ["other", "lost", "other"], 60)
        await until(lambda: not other._beside)
        unlock()
        await until(lambda: holders(pg) == ["other"] * 3, 60)
        await until(lambda: pg.value("select lock_id from rowmill_workers where id = 'lost'") is None, 60)
        go.set()


async def test_a_claim_that_was_under_way_at_the_death_comes_back_too(db: Db, no_kernel: None) -> None:
    """The server commits it although its client is gone, after the other rows were given back."""
    jobs(db, 2)
    mill, go = holding(db)
    async with dead_holder(mill, db, 2) as lost, working(mill, worker_id="other") as other:
        await other.started.wait()
        db.execute("update rowmill_workers set process = 'boot namespace 1 1' where id = 'lost'")
        other.take_over(DeadWorker("lost", lost.incarnation))
        await until(lambda: holders(db) == ["other"] * 2 and not other._beside, 60)
        now = "now()" if db.dialect == "postgresql" else "strftime('%Y-%m-%d %H:%M:%f', 'now')"
        db.execute("insert into jobs (status, worker, claimed_at, heartbeat_at, attempts)"
                   f" values ('running', 'lost', {now}, {now}, 1)")  # fmt: skip
        await until(lambda: holders(db) == ["other"] * 3, 60)
        await until(lambda: db.value("select process from rowmill_workers where id = 'lost'") is None, 60)
        go.set()


async def test_a_worker_that_is_started_again_under_its_id_gives_back_what_it_held(db: Db, no_kernel: None) -> None:
    """With an id of its own and no supervisor that lived: nobody else looks after that name any more."""
    jobs(db, 3)
    mill, _ = holding(db)
    async with dead_holder(mill, db, 3, "w"), working(mill, worker_id="w"):
        runs = "select attempts, status from jobs"
        await until(lambda: db.query(runs) == [{"attempts": 2, "status": "running"}] * 3, 60)


async def test_a_successor_leaves_its_own_rows_and_gives_back_what_was_locked_before(pg: Db, no_kernel: None) -> None:
    jobs(pg, 3)
    mill, go = holding(pg)
    seen = events_of(mill)
    async with dead_holder(mill, pg, 3, "w"), locked(pg, 2) as unlock, working(mill, worker_id="w"):
        runs = "select attempts from jobs order by id"
        await until(lambda: pg.query(runs) == [{"attempts": n} for n in (2, 1, 2)], 60)
        unlock()
        await until(lambda: pg.query(runs) == [{"attempts": 2}] * 3, 60)
        go.set()
        await until(lambda: pg.value("select count(*) from jobs where status = 'done'") == 3)
    assert sorted(event.fields["id"] for event in seen if event.name == "row_swept") == [1, 2, 3]


@pytest.mark.parametrize("declared", [False, True])
async def test_rows_that_a_successor_of_the_same_id_holds_are_not_given_back(db: Db, declared: bool) -> None:
    """The word of a death may come late: by then the id is another process's, no matter who called the first dead."""
    jobs(db, 2)
    mill, go = holding(db)
    async with working(mill, worker_id="w") as worker:
        await until(lambda: holders(db) == ["w"] * 2)
        async with working(mill, worker_id="other") as other:
            await other.started.wait()
            other.take_over(DeadWorker("w", "an-older-one", frozenset(), declared=declared))
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


@pytest.mark.parametrize("lives", [True, False])
async def test_a_container_of_the_same_host_name_takes_no_id_from_a_live_one(
    db: Db, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process cannot be seen from here. One that was restarted takes its own id again, after a silence."""
    monkeypatch.setattr(environment_module, "BEAT_EVERY", 0.5)
    jobs(db, 1)
    mill, go = holding(db)
    go.set()
    table = WorkersTable(mill.databases()[0][1])
    boot = (process_identity() or "").split()[0]
    there = replace(mill.worker(worker_id="w").shutdown.snapshot(), pid=999_999_999, process=f"{boot} 1-1 7 100")
    await table.ensure()
    await table.register(there)

    async def beat() -> None:
        while True:
            assert await table.beat(there), "its id was taken"
            await asyncio.sleep(0.02)

    beats = asyncio.create_task(beat())
    if not lives:
        beats.cancel()
    worker = mill.worker(worker_id="w", drain=True)
    if lives:
        with pytest.raises(WorkerIdTaken, match="a live worker already has the id 'w'"):
            await worker.run()
        assert not beats.done()
    else:
        await worker.run()
        assert db.value("select status from jobs") == "done"
    beats.cancel()
    await asyncio.gather(beats, return_exceptions=True)
    await table.database.close()


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
