"""One peer on one empty database: what the measurements do with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import asyncpg

from . import install
from .peers import Peer
from .server import Server
from .workers import RunnerFailed, Workers

_CAP = 90.0  # seconds after which a drain is ended, whatever is left
_LEFT_CAP = 20.0  # seconds from the last handler call until the last outcome must stand
IDLE = 2.5  # seconds in which a worker that finds nothing comes to rest


@dataclass
class Drained:
    """What a drain came to. ``twice`` and ``left`` must be 0."""

    rate: float
    left: int
    twice: int
    #: CPU microseconds per job, of the workers and of the server.
    worker_us: float
    server_us: float


class Session:
    """Made by ``session``; the peer's tables are there."""

    def __init__(self, peer: Peer, dsn: str, server: Server, log: Any) -> None:
        self.peer, self.dsn, self.server, self._log = peer, dsn, server, log
        self._next = 0
        self._loop = asyncio.new_event_loop()
        self._connection: asyncpg.Connection | None = None

    def __enter__(self) -> Self:
        self.call("setup")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._connection is not None:
            self._connection.terminate()
        self._loop.close()

    # -- runners

    def command(self, action: str, **options: Any) -> list[str]:
        given = json.dumps({**self.peer.options, **options})
        return [*install.command(self.peer), action, self.dsn, given]

    def call(self, action: str, **options: Any) -> dict[str, Any]:
        """A runner that does one thing, and what it said at the end."""
        process = subprocess.Popen(
            self.command(action, **options),
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        try:
            out, _ = process.communicate(timeout=1800)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise RunnerFailed(f"{self.peer.name}: {action} ended with {process.returncode}")
        lines = [line for line in out.splitlines() if line.startswith("{")]
        said: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return said

    def workers(self, count: int = 1, **options: Any) -> Workers:
        return Workers(self.command("work", **options), count, self._log)

    # -- the database

    def value(self, statement: str) -> Any:
        if self.peer.sqlite:
            with contextlib.closing(sqlite3.connect(self.dsn, timeout=30)) as connection:
                return connection.execute(statement).fetchone()[0]
        return self._loop.run_until_complete(self._value(statement))

    async def _value(self, statement: str) -> Any:
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self.dsn)
        return await self._connection.fetchval(statement, timeout=3600)

    def left(self) -> int:
        return int(self.value(self.peer.left))

    def calm(self) -> None:
        """Fresh statistics and nothing left to write back: every measurement begins so."""
        if not self.peer.sqlite:
            for statement in ("vacuum analyze", "checkpoint"):
                self.value(statement)

    # -- what is measured

    def enqueue(self, n: int, chunk: int | None = None) -> float:
        """Jobs added per second."""
        said = self.call("enqueue", n=n, first=self._next, chunk=self.peer.chunk if chunk is None else chunk)
        self._next += n
        return float(n / said["seconds"])

    def drain(self, n: int, processes: int = 1, *, for_seconds: float | None = None, **options: Any) -> Drained:
        """Jobs per second, from the first handler call until the database shows none unfinished.

        ``n`` jobs are there when the workers, connected, are told to go; or, where the peer is to be woken, they
        come to idle workers in one transaction. ``for_seconds``: only the beginning of a long backlog.
        """
        if not self.peer.woken and (missing := n - self.left()) > 0:
            self.enqueue(missing)
        self.calm()
        with self.workers(processes, **options) as workers:
            cpu, server_cpu = workers.cpu(), self.server.cpu()
            workers.go()
            if self.peer.woken:
                time.sleep(IDLE)
                self.enqueue(n, chunk=n)
            end = self._until_drained(workers, n, for_seconds)
            seconds = end - workers.first
            cpu, server_cpu = workers.cpu() - cpu, self.server.cpu() - server_cpu
            beginning = for_seconds is not None and workers.count < n
            left = 0 if beginning else self.left()
            workers.stop()
        called = [number for number, _ in workers.calls]
        twice = len(called) - len(set(called))
        if beginning:
            done = sum(1 for _, at in workers.calls if at <= end)
        else:
            left = max(left, n - len(set(called)))  # the database's word, and the handlers'
            done = n - left
            twice += self.value(self.peer.wrong) if self.peer.wrong is not None else 0
        each = 1e6 / max(done, 1)
        return Drained(done / seconds, left, twice, cpu * each, server_cpu * each)

    def _until_drained(self, workers: Workers, n: int, for_seconds: float | None) -> float:
        """When the last outcome stood, or time was up."""
        began = time.monotonic()
        while workers.count < n and time.monotonic() - began < _CAP:
            if not workers.alive:
                raise RunnerFailed(f"{self.peer.name}: a worker died")
            if for_seconds is not None and time.monotonic() - workers.first > for_seconds:
                return time.monotonic()
            time.sleep(0.005)
        deadline = time.monotonic() + _LEFT_CAP
        while True:
            asked = time.monotonic()
            if not self.value(self.peer.open or self.peer.left) or asked > deadline:
                return asked
            time.sleep(0.005)

    def latencies(self, n: int, every: float, per: int = 1, **options: Any) -> tuple[list[float], float]:
        """Milliseconds from before the enqueue call to the start of the handler, sorted; and jobs that came per second.

        One worker, idle at first.
        """
        with self.workers(1, **options) as workers:
            workers.go()
            time.sleep(IDLE)
            said = self.call("pulse", n=n, every=every, per=per)
            deadline = time.monotonic() + _LEFT_CAP
            while workers.count < n + 1 and time.monotonic() < deadline:
                time.sleep(0.02)
            workers.stop()
            began = dict(workers.calls)
        missing = [number for number, _ in said["sent"] if number not in began]
        if missing:
            raise RunnerFailed(f"{self.peer.name}: {len(missing)} of {n} jobs were not picked up")
        return sorted((began[number] - before) * 1000 for number, before in said["sent"]), n / said["seconds"]


@contextlib.contextmanager
def session(peer: Peer, server: Server) -> Iterator[Session]:
    """The peer on a database of its own, empty but for its tables."""
    with contextlib.ExitStack() as stack:
        if peer.sqlite:
            directory = stack.enter_context(tempfile.TemporaryDirectory(dir=server.directory.parent))
            dsn = str(Path(directory, "jobs.db"))
        else:
            dsn = stack.enter_context(server.database())
        yield stack.enter_context(Session(peer, dsn, server, sys.stderr if install.VERBOSE else subprocess.DEVNULL))
