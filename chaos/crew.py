"""Worker processes: started, killed, stopped, counted. Each has a name of its own, given to no other."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .forked import Forked

ROOT = Path(__file__).parent.parent


@dataclass(eq=False)
class Worker:
    """One worker process, as it was started."""

    name: str
    process: subprocess.Popen[bytes] | Forked
    #: What was said at its start beside the usual: a replacement is started the same way.
    before: Sequence[str] = ()
    environment: Mapping[str, str] | None = None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Crew:
    """The workers over one database."""

    def __init__(self, url: str, folder: Path, lease: float, app: Sequence[str] | None = None) -> None:
        self.folder, self.lease, self._app = folder, lease, app
        self.records = folder / "records"
        self.records.mkdir()
        self.environment = {
            **os.environ,
            "CHAOS_DATABASE": url,
            "CHAOS_RECORDS": str(self.records),
            "CHAOS_LEASE": str(lease),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self.workers: list[Worker] = []
        #: When processes were killed, by their number.
        self.deaths: dict[int, float] = {}
        #: The same by name and by the time of day; 0: it ended by itself at some time.
        self.killed: dict[str, float] = {}
        self._numbers = itertools.count(1)

    def start(self, before: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Worker:
        """One more; ``before`` stands before its command, as ``nsenter`` does."""
        name = f"w{next(self._numbers)}"
        if before or self._app is not None:
            command = [*before, sys.executable, *(self._app or ("-m", "chaos.app")), name]
            worker = self.launch(command, name, environment)
        else:
            given = {**self.environment, **(environment or {})}
            worker = Worker(name, Forked(name, given, self.folder / f"{name}.log"))
            self.workers.append(worker)
        worker.before, worker.environment = before, environment
        return worker

    def launch(self, command: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> Worker:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(command), env={**self.environment, **(environment or {})}, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True, cwd=ROOT,
            )  # fmt: skip
        worker = Worker(name, process)
        self.workers.append(worker)
        return worker

    def pick(self) -> Worker:
        """One of those that live."""
        return random.choice([worker for worker in self.workers if worker.alive])

    def named(self, name: str) -> Worker | None:
        """The one of that name, if it lives."""
        return next((worker for worker in self.workers if worker.name == name and worker.alive), None)

    def kill(self, worker: Worker) -> None:
        """-9, and nothing else."""
        self.killed[worker.name] = time.time()
        worker.process.kill()
        worker.process.wait()
        self.deaths[worker.process.pid] = time.monotonic()
        self.workers.remove(worker)

    def replace(self, worker: Worker) -> Worker:
        """Another one, started as this one was."""
        return self.start(worker.before, worker.environment)

    def restart_dead(self) -> int:
        """What a service manager does: who ended by himself is started again. How many that were."""
        dead = [worker for worker in self.workers if not worker.alive]
        for worker in dead:
            self.deaths[worker.process.pid] = time.monotonic()
            self.killed[worker.name] = 0.0
            self.workers.remove(worker)
            self.replace(worker)
        return len(dead)

    def close(self) -> None:
        """Stop them in good order, within a time; then kill."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGCONT)
                worker.process.terminate()
        deadline = time.monotonic() + 15
        for worker in self.workers:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)  # its own session: what it started goes with it
                worker.process.wait()
        self.workers.clear()
