"""Sessions that the server ends, and sessions that are not to be had."""

from __future__ import annotations

import contextlib
import time

import psycopg

from ..stage import Stage
from .fault import Fault


class Terminate(Fault):
    name = "pg_terminate_backend"
    says = "the server ends a third of the workers' sessions, chosen at random"
    pause = 0.5
    trace = "terminating connection due to administrator command"

    def inject(self, stage: Stage) -> None:
        stage.pg.query(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            f" where datname = '{stage.database}' and usename = '{stage.pg.role}' and random() < 0.33"
        )


class Exhaust(Fault):
    name = "connections exhausted"
    says = "all free connections are taken for 2 s, and the workers' own are ended"
    hold = 2.0
    pause = 0.5
    takes = 1.0
    trace = "connection slots are reserved|too many clients"

    def inject(self, stage: Stage) -> None:
        self._taken = contextlib.ExitStack()
        stage.undo.push(self._taken)
        deadline = time.monotonic() + 30
        end = (
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            f" where datname = '{stage.database}' and application_name <> 'taken'"
        )
        refused = 0
        # A seat that a worker is thrown out of is taken before it comes back: until nothing is left of theirs.
        while time.monotonic() < deadline:
            try:
                taken = psycopg.connect(
                    stage.pg.url(stage.database, stage.pg.role), application_name="taken", connect_timeout=5
                )
                self._taken.callback(taken.close)
                refused = 0
            except psycopg.OperationalError:
                refused += 1
                if not stage.pg.query(end)[0][0] or refused > 20:
                    break

    def heal(self, stage: Stage) -> None:
        self._taken.close()
