"""Workers that die, and workers that stand still for longer than their lease."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..check import Verdict
from ..crew import Worker
from ..records import Run
from ..stage import LEASE, Ground, Stage
from .fault import Fault, OnSqlite


class Kill(Fault):
    name = "kill -9 of a worker"
    says = "SIGKILL to a worker process during its work; a new one is started in its place"
    pause = 0.6

    def inject(self, stage: Stage) -> None:
        self._dead = stage.crew.pick()
        stage.crew.kill(self._dead)

    def heal(self, stage: Stage) -> None:
        stage.crew.replace(self._dead)


class KillChild(Fault):
    name = "kill -9 under rowmill run"
    says = "SIGKILL to a process of `rowmill run --processes 3`; its supervisor starts it again, with the same id"
    pause = 1.5
    workers = 1
    trace = '"process_died"'

    def prepare(self, stage: Stage) -> None:
        rowmill = [sys.executable, "-m", "rowmill", "run", "chaos.app:mill", "--processes", "3", "--grace", "5"]
        stage.crew.launch([*rowmill, "--worker-id", "supervised", "--log", "json"], "supervised")

    def inject(self, stage: Stage) -> None:
        supervisor = stage.crew.workers[0].process.pid
        deadline = time.monotonic() + 60
        while not (children := _children(supervisor)):
            if time.monotonic() > deadline:
                raise TimeoutError("the supervisor has no child")
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(children[0], signal.SIGKILL)
            stage.crew.deaths[children[0]] = time.monotonic()


class Stop(Fault):
    name = "SIGSTOP past the lease"
    says = f"SIGSTOP, {LEASE + 1.5:g} s (the lease is {LEASE:g} s), SIGCONT"
    hold = LEASE + 1.5
    pause = 0.1
    takes = 0.5
    longest_run = LEASE

    def inject(self, stage: Stage) -> None:
        self._stopped: Worker = stage.holder()
        self._stopped.process.send_signal(signal.SIGSTOP)

    def heal(self, stage: Stage) -> None:
        self._stopped.process.send_signal(signal.SIGCONT)
        self.victims = [self._stopped.name]

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        return None if verdict.swept else "no row was taken back from those that stood still"


class LiteKill(OnSqlite, Kill):
    name = "SQLite: kill -9 in mid-commit"
    says = "several processes on one file; SIGKILL to one that has begun to write but has not committed"
    _TRIES = 2000

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._midway = 0

    def inject(self, stage: Stage) -> None:
        """One that is seen to have the write lock is stopped, and killed if it has it still: then it never commits."""
        self._dead = self._writing(stage) or stage.crew.pick()
        stage.crew.kill(self._dead)

    def _writing(self, stage: Stage) -> Worker | None:
        file = os.stat(f"{stage.books.url}-shm").st_ino
        for _ in range(self._TRIES):
            for worker in stage.crew.workers:
                if worker.process.pid == _writer(file):
                    worker.process.send_signal(signal.SIGSTOP)
                    if worker.process.pid == _writer(file):
                        self._midway += 1
                        return worker
                    worker.process.send_signal(signal.SIGCONT)
            time.sleep(0.0005)
        return None

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        return None if self._midway else "none was killed while it had the write lock"


class LiteStop(OnSqlite, Stop):
    name = "SQLite: SIGSTOP"
    says = f"several processes on one file; SIGSTOP, {LEASE + 1.5:g} s, SIGCONT"


def _writer(file: int) -> int | None:
    """Who has SQLite's write lock: byte 120 of the file of shared memory beside the log."""
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "POSIX" and words[3] == "WRITE" and words[6] == "120" and words[5].endswith(f":{file}"):
            return int(words[4])
    return None


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
