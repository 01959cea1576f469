"""Workers without the seconds that an interpreter takes to start: forked from a process that has imported everything.

That process has opened nothing and runs no thread, so what is forked from it is as good as new: own sockets, own loop,
own random numbers. By the standard library's fork server.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "rowmill",
        "rowmill.mill",
        "asyncpg",
        "aiosqlite",
        "sqlalchemy.dialects.postgresql.asyncpg",
        "sqlalchemy.dialects.sqlite.aiosqlite",
        "time_machine",
    ]
)


class Forked:
    """A worker process, with the members of ``Popen`` that a crew needs."""

    def __init__(self, name: str, environment: Mapping[str, str], log: Path) -> None:
        self._process = _context.Process(target=_work, args=(name, dict(environment), str(log)), name=name)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _work(name: str, environment: dict[str, str], log: str) -> None:
    os.setsid()
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 (as long as the process lives)
    importlib.import_module("chaos.app").serve(name)
