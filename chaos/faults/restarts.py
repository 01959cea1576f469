"""The server goes, in three ways, and comes back."""

from __future__ import annotations

import signal

from ..stage import Stage
from .fault import Fault


class Restart(Fault):
    name = "restart, fast"
    says = "the server ends its sessions, stops cleanly, and is started again"
    how = signal.SIGINT
    hold = 0.5
    pause = 1.0
    takes = 4.0
    trace = '"environment_down"'

    def inject(self, stage: Stage) -> None:
        stage.pg.stop(self.how)

    def heal(self, stage: Stage) -> None:
        stage.pg.start()


class Immediate(Restart):
    name = "restart, immediate"
    says = "the server is stopped without a shutdown, and recovers from its log"
    how = signal.SIGQUIT


class KillServer(Restart):
    name = "kill -9 of the postmaster"
    says = "SIGKILL to the postmaster; it is started again when its child processes are gone"
    how = signal.SIGKILL
