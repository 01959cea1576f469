"""Workers that are away for a short time and come back: no row may be taken from them.

The lease is long here, so that only a worker that was wrongly called dead can lose a row. ``says`` names the time for
which a worker is away; it is below the suspicion time of 4 s, after which a worker whose lock is missing may be
called dead.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence

from .. import stage as stages
from ..check import Verdict
from ..crew import Worker
from ..records import Run
from ..server import Server
from ..stage import Stage
from .fault import Fault
from .network import Cut

#: Seconds. Nothing here lasts that long, so no lease runs out.
LONG_LEASE = 60.0
_AWAY = 3.0


class Short(Fault):
    """A fault that ends within the suspicion time."""

    hold = _AWAY
    pause = 10.0  # longer than a missed heartbeat and the suspicion time: a wrong verdict would come by then
    takes = 3.0
    longest_run = 15.0
    lease = LONG_LEASE
    spares = True

    def __init__(self, ground: stages.Ground) -> None:
        super().__init__(ground)
        self._ended_sessions = 0

    def stage(self) -> contextlib.AbstractContextManager[Stage]:
        return stages.postgres(self.ground.server, self.ground.folder, lease=self.lease)

    def end_sessions(self, stage: Stage, which: str = "true") -> None:
        """The server ends workers' sessions; their locks go with them."""
        found = stage.pg.query(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            f" where datname = '{stage.database}' and usename = '{stage.pg.role}' and {which}"
        )
        self._ended_sessions += int(found[0][0])

    def hit(self, stage: Stage, number: signal.Signals) -> Worker:
        """Send a signal to a worker that holds rows and has told of its lock, and end the session that holds it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            worker = stage.holder()
            lock = f"select lock_id from rowmill_workers where id = '{worker.name}'"
            ((lock_id,),) = stage.pg.query(lock, stage.database)
            if lock_id is not None:
                worker.process.send_signal(number)
                holder = f"select pid from pg_locks where locktype = 'advisory' and objid::bigint = {lock_id}"
                self.end_sessions(stage, f"pid in ({holder})")
                return worker
            time.sleep(0.1)
        raise TimeoutError("no worker that holds rows has told of its lock")

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        return None if self._ended_sessions else "no session was ended"


class ShortStop(Short):
    name = "short: SIGSTOP"
    says = f"SIGSTOP for {_AWAY:g} s to a worker with running rows; meanwhile the server ends the session with its lock"

    def inject(self, stage: Stage) -> None:
        self._stopped = self.hit(stage, signal.SIGSTOP)

    def heal(self, stage: Stage) -> None:
        self._stopped.process.send_signal(signal.SIGCONT)
        self.victims = [self._stopped.name]


class BlockedLoop(Short):
    name = "short: a blocked event loop"
    says = "a worker's event loop is blocked for 12 s, and the server ends its lock's session: only heartbeats go on"
    hold = 12.0

    def inject(self, stage: Stage) -> None:
        self._blocked = self.hit(stage, signal.SIGUSR1)  # chaos/app.py sleeps in its handler

    def heal(self, stage: Stage) -> None:
        self.victims = [self._blocked.name]


class ShortCut(Short, Cut):
    name = "short: network cut"
    says = f"one of two hosts (network namespaces) is cut off for {_AWAY:g} s; neither side is told"

    @contextlib.contextmanager
    def stage(self) -> Iterator[Stage]:
        with Cut.stage(self) as stage:
            yield stage

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        return None  # the holder of running rows was cut off: see inject


class TerminateAll(Short):
    name = "short: every session ended"
    says = "pg_terminate_backend for every session of every worker: all locks are missing at once"
    hold = 0.0

    def inject(self, stage: Stage) -> None:
        stage.holder()
        self.end_sessions(stage)


class RestartForty(Short):
    name = "short: restart, 40 workers"
    says = "the server is restarted under 40 worker processes with running rows"
    workers = 40
    hold = 0.5
    takes = 15.0
    trace = '"environment_down"'

    @contextlib.contextmanager
    def stage(self) -> Iterator[Stage]:
        server = Server(self.ground.folder / "forty", max_connections=str(100 + 14 * self.workers))
        with contextlib.ExitStack() as undo:
            undo.callback(server.close)
            server.make()
            yield undo.enter_context(stages.postgres(server, self.ground.folder, lease=self.lease))

    def prepare(self, stage: Stage) -> None:
        for _ in range(self.workers):
            stage.crew.start(environment={"CHAOS_CONCURRENCY": "10", "CHAOS_BATCH": "10"})

    def inject(self, stage: Stage) -> None:
        stage.holder()
        stage.pg.stop(signal.SIGINT)

    def heal(self, stage: Stage) -> None:
        stage.pg.start()

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        return Fault.unfelt(self, stage, verdict, runs)
