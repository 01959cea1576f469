"""Somebody's hands in the table: rows deleted, and rows ended, while they run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..check import Verdict
from ..records import Run
from ..stage import Stage
from .fault import Fault


class Hand(Fault):
    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        return None if verdict.by_hand else "no row was changed by hand"


class Delete(Hand):
    name = "rows deleted by hand"
    says = "five running or waiting rows are deleted"
    pause = 0.3

    def inject(self, stage: Stage) -> None:
        stage.books.delete(5)


class Edit(Hand):
    name = "rows edited by hand"
    says = "up to five running rows are set to done with another outcome: no worker may overwrite it"
    pause = 0.3
    longest_run = 2.0

    def inject(self, stage: Stage) -> None:
        deadline = time.monotonic() + 60
        while not stage.books.edit(5):
            if time.monotonic() > deadline:
                raise TimeoutError("no row runs")
