"""SQLite: somebody who holds the file."""

from __future__ import annotations

import contextlib
import sqlite3

from ..stage import LEASE, Stage
from .fault import OnSqlite


class Reader(OnSqlite):
    name = "SQLite: a reader"
    says = "a reading transaction stays open for 5 s, so no checkpoint of the write-ahead log can finish"
    hold = 5.0

    def inject(self, stage: Stage) -> None:
        self._held = contextlib.ExitStack()
        stage.undo.push(self._held)
        connection = sqlite3.connect(stage.books.url, isolation_level=None)
        self._held.callback(connection.close)
        connection.execute("begin")
        connection.execute("select count(*) from chaos_rows").fetchall()

    def heal(self, stage: Stage) -> None:
        self._held.close()


class Writer(Reader):
    name = "SQLite: a writer"
    says = f"another program keeps the write lock for {LEASE + 3:g} s: longer than the lease and than any timeout"
    hold = LEASE + 3.0
    trace = "database is locked"

    def inject(self, stage: Stage) -> None:
        self._held = contextlib.ExitStack()
        stage.undo.push(self._held)
        connection = sqlite3.connect(stage.books.url, isolation_level=None, timeout=20)
        self._held.callback(connection.close)
        connection.execute("begin immediate")
