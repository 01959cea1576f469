"""A worker's wall clock is wrong by hours, and jumps while it works.

By libfaketime, loaded before the C library: everything in the process that asks for the time is told the wrong one,
Python and its libraries alike. The monotonic clock stays: that is how a machine with a wrong date behaves.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..check import Verdict
from ..crew import Worker
from ..records import Run
from ..stage import Stage
from .fault import Fault


class Skew(Fault):
    name = "clock skewed by hours"
    says = "the wall clock of one worker jumps by up to 12 h either way, while it works"
    hold = 1.5
    pause = 0.5

    def unable(self) -> str | None:
        return None if _library() else "libfaketime is missing: pip install libfaketime"

    def prepare(self, stage: Stage) -> None:
        self._clocks: dict[Worker, Path] = {}
        for number in range(self.workers):
            clock = stage.folder / f"clock{number}"
            clock.write_text(f"{random.choice((-1, 1)) * random.uniform(1, 12):+.2f}h\n")
            worker = stage.crew.start(
                environment={
                    "LD_PRELOAD": str(_library()),
                    "FAKETIME_TIMESTAMP_FILE": str(clock),
                    "FAKETIME_CACHE_DURATION": "1",
                    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                    "DONT_FAKE_MONOTONIC": "1",
                }
            )
            self._clocks[worker] = clock

    def inject(self, stage: Stage) -> None:
        worker = stage.crew.pick()
        clock = self._clocks[worker]
        new = clock.with_suffix(".new")
        new.write_text(f"{random.choice((-1, 1)) * random.uniform(1, 12):+.2f}h\n")
        new.replace(clock)
        self._moved = worker

    def heal(self, stage: Stage) -> None:
        """It is not mended: the clock stays wrong, and the work has to go on all the same."""
        self.victims = [self._moved.name]

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        clocks = [run.wall - run.start for run in runs]  # by the handlers' own word
        hours = (max(clocks) - min(clocks)) / 3600
        return None if hours > 1 else f"the handlers' clocks were only {hours:.1f} h apart"


def _library() -> Path | None:
    with contextlib.suppress(ImportError):
        if (found := find_spec("libfaketime")) and found.submodule_search_locations:
            for folder in found.submodule_search_locations:
                for path in Path(folder).rglob("libfaketime.so.1"):
                    return path
    path = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/faketime/libfaketime.so.1")
    return path if path.exists() else None
