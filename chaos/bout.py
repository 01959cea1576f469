"""A bout: one fault, injected again and again under load, then the drain, then the check."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .check import Verdict, check
from .faults.fault import Fault
from .feeder import Feeder
from .records import read
from .stage import Stage

#: Seconds: a machine that has other work may take some of them for itself.
_UP, _RECOVER, _DRAIN = 300.0, 300.0, 120.0


@dataclass
class Result:
    """What a bout came to."""

    fault: str
    says: str = ""
    injected: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    #: Seconds from the end of each fault to the first outcome written after it.
    recoveries: list[float] = field(default_factory=list)
    #: Workers that ended by themselves and were started again.
    restarted: int = 0
    seconds: float = 0.0
    #: The command and the day it was found by.
    origin: str = ""
    not_tried: str | None = None
    #: Why one must think that the fault was not felt: then the bout proves nothing.
    unfelt: str | None = None
    #: The fault ends so soon that no row may be taken from a live worker.
    spares: bool = False
    #: Rows that ran when it was injected, over all injections.
    running: int = 0

    @property
    def clean(self) -> bool:
        return self.verdict.clean and self.unfelt is None and not (self.spares and self.verdict.from_living)

    @property
    def median(self) -> float:
        return statistics.median(self.recoveries) if self.recoveries else 0.0

    @property
    def worst(self) -> float:
        return max(self.recoveries, default=0.0)


def fight(
    fault: Fault,
    times: int,
    rows: int,
    say: Callable[[str], None] = lambda words: print(words, file=sys.stderr, flush=True),
) -> Result:
    """One bout. What cannot be tried here is told, never passed over in silence."""
    began = time.monotonic()
    result = Result(fault.name, fault.says, spares=fault.spares)
    if why := fault.unable():
        result.not_tried = why
        say(f"{fault.name:24} not tried: {why}")
        return result
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(fault.stage())
        fault.prepare(stage)
        expected = times * (fault.hold + fault.pause + fault.takes)
        feeder = Feeder(stage.books, rows, rows / max(expected, 1.0), fault.longest_run)
        feeder.start()
        until(lambda: stage.books.settled_after(0.0) is not None, _UP, "no worker has written an outcome")
        for _ in range(times):
            _one(fault, stage, result)
        feeder.finish()
        drain(stage, result)
        stage.crew.close()
        runs = list(read(stage.crew.records, stage.crew.deaths))
        books = stage.books
        crew = stage.crew
        result.verdict = check(
            feeder.added, books.rows(), books.ledger(), runs, books.effects(), crew.lease, crew.killed
        )
        result.unfelt = fault.unfelt(stage, result.verdict, runs)
    result.seconds = time.monotonic() - began
    say(line(result))
    return result


def _one(fault: Fault, stage: Stage, result: Result) -> None:
    fault.victims = None
    if fault.spares:
        until(lambda: stage.books.running() > 0, _UP, "no row runs")
        result.running += stage.books.running()
    fault.inject(stage)
    result.injected += 1
    time.sleep(fault.hold)
    fault.heal(stage)
    healed = time.time()
    result.restarted += stage.crew.restart_dead()
    found = until(
        lambda: stage.books.settled_after(healed, fault.victims),
        _RECOVER,
        f"{fault.name}: no outcome after it was over",
    )
    result.recoveries.append(max(float(found) - healed, 0.0))
    fault.after(stage)
    time.sleep(fault.pause)


def until(ask: Callable[[], object], seconds: float, words: str) -> float:
    deadline = time.monotonic() + seconds
    pause = 0.02
    while True:
        with contextlib.suppress(Exception):  # the database may still be away
            if found := ask():
                return found  # type: ignore[return-value]
        if time.monotonic() > deadline:
            raise TimeoutError(words)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def drain(stage: Stage, result: Result) -> None:
    """Until every row is final, or for a good while none has become so: those are then found stuck."""
    least, deadline = math.inf, time.monotonic() + _DRAIN
    while time.monotonic() < deadline:
        left = stage.books.patiently(stage.books.unfinished)
        if left == 0:
            return
        if left < least:
            least, deadline = left, time.monotonic() + _DRAIN
        result.restarted += stage.crew.restart_dead()
        time.sleep(0.1)


def line(result: Result) -> str:
    """A bout in one line."""
    verdict = result.verdict
    found = " ".join(f"{kind} {verdict.count(kind)}" for kind in verdict.found)
    return (
        f"{result.fault:24} injected {result.injected:4} rows {verdict.rows:7,} {found} recovery {result.median:.2f}"
        f"/{result.worst:.2f} s, runs {verdict.runs:,}, outlived {verdict.outlived}, {result.seconds:.0f} s"
        + (f" NOT FELT: {result.unfelt}" if result.unfelt else "")
    )
