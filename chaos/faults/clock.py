"""A worker's wall clock is wrong by hours, and jumps while it works."""

from __future__ import annotations

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
    says = "all workers have wrong clocks, and one clock jumps by up to 24 h during the work"
    hold = 1.0
    pause = 0.3

    def unable(self) -> str | None:
        return None if find_spec("time_machine") else "time-machine is missing: pip install time-machine"

    def prepare(self, stage: Stage) -> None:
        self._clocks: dict[Worker, Path] = {}
        for number in range(self.workers):
            clock = stage.folder / f"clock{number}"
            clock.write_text(_hours())
            self._clocks[stage.crew.start(environment={"CHAOS_CLOCK": str(clock)})] = clock

    def inject(self, stage: Stage) -> None:
        self._moved = stage.crew.pick()
        clock = self._clocks[self._moved]
        new = clock.with_suffix(".new")
        new.write_text(_hours())
        new.replace(clock)

    def heal(self, stage: Stage) -> None:
        """It is not mended: the clock stays wrong, and the work has to go on all the same."""
        self.victims = [self._moved.name]

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        clocks = [run.wall - run.start for run in runs]  # by the handlers' own word
        hours = (max(clocks) - min(clocks)) / 3600
        return None if hours > 1 else f"the handlers' clocks were only {hours:.1f} h apart"


def _hours() -> str:
    return str(random.choice((-1, 1)) * random.uniform(1, 12) * 3600)
