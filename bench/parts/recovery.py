"""How soon rows run again whose worker was killed, and how soon work goes on after a database restart."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from .. import install
from ..peers import Peer
from ..session import Session, session
from ..workers import Worker
from .part import ONCE_EACH, Column, Context, Figures, Part

_ROWS = 20  # that the killed process holds, or more
_BOUND = (45.0, 5.0)  # seconds after which a row counts as not run again; in a quick run
_START = 60.0  # seconds in which processes must be up, and rows must run
_LONG = 600.0  # seconds that a run takes which is not to end
_DOWN, _RUN = 3.0, 2.5  # seconds that the server is down; that runs take which end meanwhile
_RESTART = 1.0  # seconds after which a process that ended by itself is started again, as a service manager does
#: The pickup of a killed process's rows needs free slots: each process can run all of them.
_OPTIONS: dict[str, dict[str, Any]] = {
    "graphile": {"worker": {"concurrentJobs": 2 * _ROWS}},
    "pg-boss": {"work": {"batchSize": 2 * _ROWS}},
    "pgqueuer": {"batch_size": 2 * _ROWS, "max_concurrent_tasks": 4 * _ROWS},
    "chancy": {"concurrency": 2 * _ROWS},
    "procrastinate": {"concurrency": 2 * _ROWS},
    "huey-sqlite": {"workers": 2 * _ROWS},
}


@dataclass(frozen=True)
class Start:
    """The start of one run: which row, in which process, and when."""

    number: int
    pid: int
    at: float


class Host:
    """One ``rowmill run``: the supervisor and its processes."""

    def __init__(self, run: Session, folder: Path, name: str, *, processes: int, apart: bool = False) -> None:
        self.starts_file = folder / f"{name}.starts"
        self.starts_file.touch()
        env = os.environ | {
            "ROWMILL_DATABASE_URL": run.dsn if "://" in run.dsn else f"sqlite:///{run.dsn}",
            "BENCH_STARTS": str(self.starts_file),
            "BENCH_SLEEP": str(_LONG),
            "BENCH_TABLE": "jobs" if run.peer.runner == "rowmill_tasks" else "enrichment",
        }
        command = [sys.executable, "-m", "rowmill", "run", "bench.recovery_app:mill", "--processes", str(processes)]
        # A process namespace of its own: its processes cannot be seen by others, as on another machine.
        prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if apart else []
        self._process = subprocess.Popen(
            [*prefix, *command],
            cwd=install.ROOT,
            env=env,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if install.VERBOSE else subprocess.DEVNULL,
        )

    def starts(self) -> list[Start]:
        """All starts so far."""
        lines = self.starts_file.read_text().split("\n")[:-1]
        return [Start(int(number), int(pid), float(at)) for number, pid, at in map(str.split, lines)]

    def kill(self) -> float:
        """kill -9 of the supervisor and its children; when."""
        at = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self._process.pid)
            # Each child has a process group of its own.
            for process in [supervisor, *supervisor.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()
        return at


@contextlib.contextmanager
def _host(run: Session, folder: Path, name: str, *, processes: int, apart: bool = False) -> Iterator[Host]:
    """Workers that are up: the workers table has all of them."""
    known = _workers(run)
    host = Host(run, folder, name, processes=processes, apart=apart)
    try:
        _until(lambda: _workers(run) >= known + processes, _START)
        yield host
    finally:
        host.kill()


def _workers(run: Session) -> int:
    """How many workers have ever registered."""
    with contextlib.suppress(asyncpg.UndefinedTableError, sqlite3.OperationalError):
        return int(run.value("select count(*) from rowmill_workers"))
    return 0


def _until(condition: Callable[[], Any], seconds: float) -> bool:
    """Wait for it, no longer than that."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# -- a killed process, and a killed host


def measure_process(context: Context, peer: Peer) -> Figures:
    """kill -9 of one of two processes."""
    if peer.own:
        return _repeated(context, peer, _one_of_two)
    return _told(context, _one_of_two_runners(context, peer))


def measure_host(context: Context, peer: Peer) -> Figures:
    """kill -9 of a supervisor with its children; another host's worker lives."""
    return _repeated(context, peer, _whole_host)


def _repeated(context: Context, peer: Peer, kill: Callable[[Session, Path, float], list[float]]) -> Figures:
    seconds: list[float] = []
    for _ in range(context.arguments.kills):
        with session(peer, context.server) as run, tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
            seconds += kill(run, Path(folder), _BOUND[context.quick])
    return _told(context, seconds)


def _one_of_two(run: Session, folder: Path, bound: float) -> list[float]:
    with _host(run, folder, "host", processes=2) as host:
        held = 2 * _ROWS
        run.enqueue(held)
        if not _until(lambda: len(host.starts()) >= held, _START):
            raise TimeoutError(f"{len(host.starts())} of {held} rows started")
        before = host.starts()
        pids = [start.pid for start in before]
        victim = max(set(pids), key=pids.count)
        rows = {start.number for start in before if start.pid == victim}
        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return _again(host, rows, at, len(before), bound)


def _whole_host(run: Session, folder: Path, bound: float) -> list[float]:
    apart = not run.peer.sqlite and bool(shutil.which("unshare")) and os.geteuid() == 0
    with _host(run, folder, "victim", processes=2, apart=apart) as victim:
        run.enqueue(_ROWS)
        if not _until(lambda: len(victim.starts()) >= _ROWS, _START):
            raise TimeoutError(f"{len(victim.starts())} of {_ROWS} rows started")
        with _host(run, folder, "other", processes=1) as other:
            time.sleep(6)  # the other host has been there for a while: longer than a heartbeat
            at = victim.kill()
            return _again(other, set(range(_ROWS)), at, 0, bound)


def _again(host: Host, rows: set[int], at: float, earlier: int, bound: float) -> list[float]:
    """Seconds from the kill until each of the rows ran again; the bound for those that did not."""

    def began() -> dict[int, float]:
        return {start.number: start.at for start in reversed(host.starts()[earlier:]) if start.number in rows}

    _until(lambda: len(began()) == len(rows), bound)
    found = began()
    return [found.get(number, math.inf) - at for number in rows]


def _one_of_two_runners(context: Context, peer: Peer) -> list[float]:
    """The same for a peer: one process takes all rows, a second one joins it, and the first is killed."""
    options, bound = _OPTIONS[peer.name], _BOUND[context.quick]
    with session(peer, context.server) as run:
        run.enqueue(_ROWS)
        with run.workers(1, sleep=_LONG, **options) as victim:
            victim.go()
            if not _until(lambda: victim.count >= _ROWS, _START):
                raise TimeoutError(f"{victim.count} of {_ROWS} jobs started")
            with run.workers(1, sleep=_LONG, **options) as other:
                other.go()
                time.sleep(6)
                at = time.monotonic()
                victim.kill()
                _until(lambda: other.count >= _ROWS, bound)
                other.stop()
            began = dict(reversed(other.calls))
            return [began.get(number, math.inf) - at for number in range(_ROWS)]


# -- a restarted database


def measure_database(context: Context, peer: Peer) -> Figures:
    """The server is down while runs end. From when it is started again until each of them is finished."""
    bound = _BOUND[context.quick]
    with session(peer, context.server) as run:
        run.enqueue(_ROWS)
        options = {"sleep": _RUN, **(_OPTIONS.get(peer.name) or {"concurrency": 2 * _ROWS})}
        worker = Worker(run.command("work", **options), None if install.VERBOSE else subprocess.DEVNULL)
        workers = [worker]
        try:
            worker.wait_until_ready()
            worker.line()
            if not _until(lambda: worker.count >= _ROWS, _START):
                raise TimeoutError(f"{worker.count} of {_ROWS} jobs started")
            down, back = context.server.restart(_DOWN)
            if not worker.first + _RUN > down:
                raise TimeoutError("the runs ended before the server was down")
            finished: list[float] = []
            while len(finished) < _ROWS and time.monotonic() - back < bound:
                ended = [one for one in workers if not one.alive]
                if len(ended) == len(workers):
                    time.sleep(_RESTART)
                    workers.append(Worker(run.command("work", **options), subprocess.DEVNULL))
                    workers[-1].wait_until_ready()
                    workers[-1].line()
                done = _ROWS - run.left()
                finished += [time.monotonic() - back] * (done - len(finished))
                time.sleep(0.02)
        finally:
            for one in workers:
                one.kill()
    again = sum(one.count for one in workers) - _ROWS
    told = _told(context, finished + [math.inf] * (_ROWS - len(finished)))
    return {**told, "again": again, "ended": len(workers) - 1}


def _told(context: Context, seconds: list[float]) -> Figures:
    bound = _BOUND[context.quick]
    capped = sorted(min(one, bound) for one in seconds)
    count = len(capped)
    return {
        "p50": capped[(count - 1) // 2],
        "p99": capped[math.ceil(count * 0.99) - 1],
        "max": capped[-1],
        "rows": count,
        "not": sum(one > bound for one in seconds),
        "bound": bound,
        "load": os.getloadavg()[0],
    }


_COLUMNS = (
    Column("p50", "median, s", 2),
    Column("p99", "99th percentile, s", 2),
    Column("max", "longest, s", 2),
    Column("rows", "rows"),
    Column("not", "not within the bound"),
)
_LOAD = Column("load", "load", 1)
_OURS = ("rowmill", "rowmill-tasks", "rowmill-sqlite", "rowmill-tasks-sqlite")
_THEIRS = tuple(name for name in ONCE_EACH if name not in _OURS)

PROCESS = Part(
    "recovery-process",
    "kill -9 of one worker process",
    f"Two processes; the one that is killed holds {_ROWS} rows or more, the other one has free slots for all of them. "
    "From the kill until each of these rows runs again. rowmill: `rowmill run --processes 2` with default settings, "
    "all kills together. Peers: two processes of their own runner, one kill. A row that does not run again within 45 s "
    "is shown as `> 45`. What the peers' defaults say, read from their source and not measured: PgQueuer 30 s; Chancy "
    "90 to 150 s; pg-boss 15 min; Graphile Worker 4 h; Procrastinate not by itself. Huey deletes a job when "
    "it takes it.",
    measure_process,
    (*_OURS, *_THEIRS, "huey-sqlite"),
    (*_COLUMNS, _LOAD),
    unit="s",
    quick=False,
    once=True,
)
HOST = Part(
    "recovery-host",
    "kill -9 of a whole host's processes",
    f"`rowmill run --processes 2` that holds {_ROWS} rows is killed, supervisor and children at once; another "
    "`rowmill run` is idle. On PostgreSQL the killed processes run in a process namespace of their own, so the other "
    "one cannot see that they are gone, as on another machine. From the kill until each row runs again. The peers have "
    "no supervisor here: for them it is the same as above.",
    measure_host,
    _OURS,
    (*_COLUMNS, _LOAD),
    unit="s",
    quick=False,
    once=True,
)
DATABASE = Part(
    "recovery-database",
    "A database restart",
    f"One process runs {_ROWS} rows for {_RUN:g} s each; meanwhile the server stops, and comes back {_DOWN:g} s later. "
    "From when it is started until each row is finished in the database. A process that ends by itself is "
    "started again after a second. `run again`: handler calls beyond one per row.",
    measure_database,
    ("rowmill", "rowmill-tasks", *_THEIRS),
    (*_COLUMNS, Column("again", "run again"), Column("ended", "process ended"), _LOAD),
    unit="s",
    quick=False,
    once=True,
)
PARTS = (PROCESS, HOST, DATABASE)
