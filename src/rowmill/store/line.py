"""A connection to a SQLite file, and the thread it belongs to."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from .unreadable import parse_text

T = TypeVar("T")

LOCK_WAIT = 5.0  # seconds SQLite waits for the write lock before it says Busy
#: Seconds between two tries for the write lock, first and at most. SQLite's own wait soon sleeps for 10 to 100 ms, much
#: longer than a claim holds the lock: of two workers one would sleep while the lock is free.
_TRY_AGAIN = (0.0002, 0.02)


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

    @contextmanager
    def tolerant(self, wanted: bool = True) -> Iterator[None]:
        """For work in the thread: text that is not UTF-8 comes as Unreadable."""
        if not wanted:
            yield
            return
        connection = self.connection()
        connection.text_factory = parse_text
        try:
            yield
        finally:
            connection.text_factory = str

    @contextmanager
    def transaction(self) -> Iterator[Callable[..., Sequence[Any]]]:
        """For work in the thread: with the write lock from the beginning, and committed at the end."""
        connection = self.connection()
        _lock(connection)
        try:
            yield self.run
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise

    async def do(self, work: Callable[[], T]) -> T:
        """Work in the thread, after what waits there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self.do(connection.close)
        self._thread.shutdown(wait=False)


def _lock(connection: sqlite3.Connection) -> None:
    """Begin a transaction with the file's write lock, which is waited for in short steps."""
    began, (pause, longest) = time.monotonic(), _TRY_AGAIN
    connection.execute("pragma busy_timeout = 0")
    try:
        while True:
            try:
                connection.execute("begin immediate")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() - began > LOCK_WAIT:
                    raise
            time.sleep(pause)
            pause = min(pause * 1.1, longest)
    finally:
        connection.execute(f"pragma busy_timeout = {LOCK_WAIT * 1000:.0f}")
