"""A connection to a SQLite file, and the thread it belongs to."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

LOCK_WAIT = 5.0  # seconds SQLite waits for the write lock before it says Busy


class Line:
    """A connection to a SQLite file, and the one thread that uses it."""

    def __init__(self, path: str, name: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rowmill-sqlite-{name}")
        self._connection: sqlite3.Connection | None = None

    def connection(self) -> sqlite3.Connection:
        """For work in the thread; opened on first use."""
        if self._connection is None:
            connection = sqlite3.connect(
                self._path, isolation_level=None, timeout=LOCK_WAIT, check_same_thread=False, uri=False
            )
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = normal")
            connection.execute("pragma foreign_keys = on")
            self._connection = connection
        return self._connection

    def run(self, sql: str, parameters: Any = ()) -> Sequence[Any]:
        return self.connection().execute(sql, parameters).fetchall()

    async def do(self, work: Callable[[], T]) -> T:
        """Work in the thread, after what waits there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self.do(connection.close)
        self._thread.shutdown(wait=False)
