"""What every runner answers to, in Python; protocol.mjs is the same for Node.

A runner is started as ``RUNNER ACTION DSN OPTIONS`` with OPTIONS a JSON object, and speaks JSON lines:

    setup     makes the peer's tables in an empty database
    enqueue   adds jobs ``first`` to ``first + n - 1``, one by one or ``chunk`` at a time; says {"seconds"}
    pulse     adds ``per`` jobs every ``every`` seconds until ``n`` are in; says {"sent": [[number, before], ...]}
    work      says {"ready"}, waits for a line on standard input, works, says {"count", "first"} as it goes on;
              at the next line it says {"numbers", "times"}, one entry per handler call, and is gone

Times are of the system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

_TELL_EVERY = 0.02


class Recorder:
    """Every handler call of this process: which job, and when it began."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.times: list[float] = []

    def hit(self, number: int) -> None:
        """A handler was called with this job."""
        self.times.append(time.monotonic())
        self.numbers.append(number)

    def wait_for_go(self) -> None:
        """Ready; from the next line on standard input on, work."""
        say(ready=True)
        if not sys.stdin.readline():
            os._exit(1)
        for target in (self._tell, self._wait_for_stop):
            threading.Thread(target=target, daemon=True).start()

    def _tell(self) -> None:
        told = 0
        while True:
            count = len(self.numbers)
            if count != told:
                told = count
                say(count=count, first=self.times[0])
            time.sleep(_TELL_EVERY)

    def _wait_for_stop(self) -> None:
        sys.stdin.readline()
        count = len(self.numbers)
        say(numbers=self.numbers[:count], times=self.times[:count])
        os._exit(0)


class Runner(Protocol):
    """A peer, as this bench uses it. ``open`` comes first, whatever is done."""

    async def open(self) -> None: ...

    async def setup(self) -> None: ...

    async def add(self, number: int) -> Any:
        """One job, by the peer's call for one."""

    async def add_many(self, numbers: Sequence[int]) -> Any:
        """Jobs by the peer's own call for many."""

    async def work(self, recorder: Recorder) -> None:
        """Connect, ``recorder.wait_for_go()``, and work until the process ends."""


_out = threading.Lock()


def say(**words: Any) -> None:
    """One line to the driver."""
    with _out:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


def order() -> tuple[str, str, dict[str, Any]]:
    """What this process was asked to do: action, database, options."""
    action, dsn, options = sys.argv[1:4]
    return action, dsn, json.loads(options)


async def serve(runner: Runner, action: str, options: dict[str, Any]) -> None:
    """Do what was asked, and end the process: a peer's own goodbye is not measured."""
    await runner.open()
    match action:
        case "setup":
            await runner.setup()
        case "enqueue":
            await _enqueue(runner, options)
        case "pulse":
            await _pulse(runner, options)
        case "work":
            await runner.work(Recorder())
    sys.stdout.flush()
    os._exit(0)


async def _enqueue(runner: Runner, options: dict[str, Any]) -> None:
    first, end = options["first"], options["first"] + options["n"]
    chunk = options["chunk"]
    began = time.monotonic()
    if chunk == 1:
        for number in range(first, end):
            await runner.add(number)
    else:
        for start in range(first, end, chunk):
            await runner.add_many(range(start, min(start + chunk, end)))
    say(seconds=time.monotonic() - began)


async def _pulse(runner: Runner, options: dict[str, Any]) -> None:
    """By the absolute clock, so that a slow call does not slow the pace."""
    n, every, per = options["n"], options["every"], options["per"]
    await runner.add(-1)  # connects, prepares, warms up
    sent: list[tuple[int, float]] = []
    start = time.monotonic()
    for tick, number in enumerate(range(0, n, per)):
        await asyncio.sleep(max(0.0, start + tick * every - time.monotonic()))
        before = time.monotonic()
        if per == 1:
            await runner.add(number)
        else:
            await runner.add_many(range(number, min(number + per, n)))
        sent.extend((k, before) for k in range(number, min(number + per, n)))
    say(sent=sent, seconds=time.monotonic() - start)
