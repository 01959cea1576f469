"""Runner processes as the driver sees them."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

import psutil

_START, _STOP = 60.0, 60.0


class RunnerFailed(RuntimeError):
    """A runner ended before it had answered."""


class Worker:
    """One process that works; a thread hears what it says."""

    def __init__(self, command: Sequence[str], log: Any) -> None:
        self.count, self.first = 0, float("inf")
        self.numbers: list[int] = []
        self.times: list[float] = []
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            if "count" in said:
                self.count, self.first = said["count"], said["first"]
            if "numbers" in said:
                self.numbers, self.times = said["numbers"], said["times"]
            if "ready" in said:
                self._ready.set()

    def wait_until_ready(self) -> None:
        if not self._ready.wait(_START) or not self.alive:
            raise RunnerFailed("a worker did not come up")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> None:
        """The next line of the protocol: go, then stop."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        self._listener.join(_STOP)


class Workers:
    """Several of them: started and connected when entered, ended when left."""

    def __init__(self, command: Sequence[str], count: int, log: Any) -> None:
        self._all: list[Worker] = []
        self._command, self._size, self._log = command, count, log

    def __enter__(self) -> Self:
        try:
            self._all += [Worker(self._command, self._log) for _ in range(self._size)]
            for worker in self._all:
                worker.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """kill -9, all at once."""
        for worker in self._all:
            worker.kill()

    def go(self) -> None:
        """Work, all at once."""
        for worker in self._all:
            worker.line()

    def stop(self) -> None:
        """Hear every handler call that was made."""
        for worker in self._all:
            worker.line()
        deadline = time.monotonic() + _STOP
        while any(worker.alive for worker in self._all) and time.monotonic() < deadline:
            time.sleep(0.01)
        for worker in self._all:
            worker.kill()

    @property
    def alive(self) -> bool:
        return all(worker.alive for worker in self._all)

    @property
    def count(self) -> int:
        return sum(worker.count for worker in self._all)

    @property
    def first(self) -> float:
        """When the first handler began."""
        return min(worker.first for worker in self._all)

    @property
    def calls(self) -> list[tuple[int, float]]:
        """Every handler call, after ``stop``: number and time; warm-up jobs have negative numbers."""
        return [call for worker in self._all for call in zip(worker.numbers, worker.times, strict=True) if call[0] >= 0]

    def cpu(self) -> float:
        """CPU seconds so far."""
        return sum(times.user + times.system for times in (p.cpu_times() for p in self._processes()))

    def memory(self) -> int:
        """Resident bytes."""
        return sum(process.memory_info().rss for process in self._processes())

    def _processes(self) -> Iterable[psutil.Process]:
        for worker in self._all:
            process = psutil.Process(worker.pid)
            yield from [process, *process.children(recursive=True)]
