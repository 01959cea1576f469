"""Somebody else in the same database: long transactions, VACUUM FULL, a lock on the whole table."""

from __future__ import annotations

import contextlib

import psycopg

from ..stage import LEASE, Stage
from .fault import Fault


class LongTransaction(Fault):
    name = "a long transaction"
    says = "a transaction with a snapshot stays open for 8 s, and locks 20 waiting rows"
    hold = 8.0
    pause = 0.2

    def inject(self, stage: Stage) -> None:
        self._held = contextlib.ExitStack()
        stage.undo.push(self._held)
        connection = psycopg.connect(stage.pg.url(stage.database))
        self._held.callback(connection.close)
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("select id from chaos_rows where status = 'queued' limit 20 for update skip locked")

    def heal(self, stage: Stage) -> None:
        self._held.close()


class LockTable(Fault):
    name = "LOCK TABLE"
    says = f"ACCESS EXCLUSIVE on the table, for {LEASE + 1:g} s: longer than the lease"
    hold = LEASE + 1.0
    trace = '"renew_failed"'
    pause = 0.5

    def inject(self, stage: Stage) -> None:
        self._held = contextlib.ExitStack()
        stage.undo.push(self._held)
        connection = psycopg.connect(stage.pg.url(stage.database))
        self._held.callback(connection.close)
        connection.execute("lock table chaos_rows in access exclusive mode")

    def heal(self, stage: Stage) -> None:
        self._held.close()


class VacuumFull(Fault):
    name = "VACUUM FULL"
    says = "the table is rewritten while workers use it"
    pause = 0.5

    def inject(self, stage: Stage) -> None:
        stage.pg.query("vacuum full chaos_rows", stage.database)
