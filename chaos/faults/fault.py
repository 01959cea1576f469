"""What every fault has: a name, a way in, a way out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from .. import stage as stages
from ..check import Verdict
from ..records import Run
from ..stage import LEASE, Ground, Stage


class Fault:
    """A fault. ``inject`` brings it about, ``heal`` ends it; between the two ``hold`` seconds pass."""

    name = ""
    #: What is done, in a few words, for the report.
    says = ""
    hold = 0.0
    #: Seconds between one that is over and the next.
    pause = 0.3
    #: Seconds that one is expected to take beside these.
    takes = 0.3
    workers = 4
    #: The longest run among the rows, in seconds.
    longest_run = 1.0
    #: Seconds; the workers' lease.
    lease = LEASE
    #: Every worker comes back in time: no row may be taken from a live one.
    spares = False
    #: What the workers or the server say of it in their logs: without a trace it was not felt, and proves nothing.
    trace = ""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        #: Whose next outcome shows that it is over; None: anybody's.
        self.victims: Sequence[str] | None = None

    def unable(self) -> str | None:
        """Why it cannot be tried here; None where it can."""
        return None

    def stage(self) -> contextlib.AbstractContextManager[Stage]:
        """Where it happens: a database of its own on the server that the bouts share."""
        return stages.postgres(self.ground.server, self.ground.folder)

    def prepare(self, stage: Stage) -> None:
        """Before the load comes: the workers."""
        for _ in range(self.workers):
            stage.crew.start()

    def inject(self, stage: Stage) -> None:
        raise NotImplementedError

    def heal(self, stage: Stage) -> None:
        """Nothing to end, unless it says otherwise."""

    def after(self, stage: Stage) -> None:
        """What has to be set up again when the work goes on, before the next one."""

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        """Why one must think that nobody felt it; None where it was felt."""
        if self.trace and not re.search(self.trace, stage.logs()):
            return f"no log says {self.trace}"
        return None


class OnSqlite(Fault):
    """The same on one SQLite file that several processes share."""

    workers = 3

    def stage(self) -> contextlib.AbstractContextManager[Stage]:
        return stages.sqlite(self.ground.folder)
