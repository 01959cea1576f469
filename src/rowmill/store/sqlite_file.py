"""A SQLite file: its identity, how it is opened, and the thread that owns a connection to it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import Unreachable
from .unreadable_values import parse_text

T = TypeVar("T")
#: Device and inode. While a connection has the file open, no other file can have the same ones.
Identity = tuple[int, int]

LOCK_WAIT = 5.0  # seconds SQLite waits for the write lock before it reports Busy
#: Seconds between two attempts to get the write lock, first and at most. SQLite's own wait soon sleeps for 10 to 100
#: ms, much longer than a claim holds the lock: one of two workers would sleep while the lock is free.
_TRY_AGAIN = (0.0002, 0.02)


class SqliteFile:
    """A SQLite file by its path, and how it is opened. Reads never create it; the first write does.

    Connections to a deleted file still work, but their writes are lost. So a connection remembers the identity of its
    file, and ``check`` compares it with the file that is at the path now.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        #: The file existed before, so it is not created again if it was deleted.
        self.seen = False
        #: A worker holds rows of this file. Once it was deleted or replaced, refuse everything until ``lost`` is reset.
        self.pinned = False
        self.lost: str | None = None

    def identity(self) -> Identity | None:
        """The identity of the file at the path now; None if there is none."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return None
        self.seen = True
        return stat.st_dev, stat.st_ino

    def check(self, opened: Identity | None) -> None:
        """Raise Unreachable if the path no longer points to the file that was opened."""
        lost = self.lost
        if lost is None and opened is not None and (now := self.identity()) != opened:
            lost = f"the file {self.path} was {'deleted' if now is None else 'replaced'} while it was in use"
            if self.pinned:
                self.lost = lost
        if lost is not None:
            raise Unreachable(lost, hint="stop the workers before you move, delete or restore the file")

    def create(self) -> None:
        """Create an empty file if there is none."""
        sqlite3.connect(self.path).close()

    def connect(self, mode: str = "mode=rw", **options: Any) -> sqlite3.Connection:
        """Open a connection without creating the file; read-only if the file cannot be written to."""
        uri = f"{Path(self.path).as_uri()}?{mode}"
        given: dict[str, Any] = {"isolation_level": None, "timeout": LOCK_WAIT, "check_same_thread": False, **options}
        connection: sqlite3.Connection = sqlite3.connect(uri, uri=True, **given)
        return connection

    @property
    def to_write(self) -> str:
        """The mode in which the file is opened for writes: the first time it may have to be created."""
        return "mode=rw" if self.seen else "mode=rwc"

    def open_to_write(self) -> sqlite3.Connection:
        """Open a connection for the engine's own statements. Switches the file to WAL."""
        connection = self.connect(self.to_write)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.execute("pragma foreign_keys = on")
        return connection

    def open_to_read(self, **options: Any) -> sqlite3.Connection:
        """Open a connection for reads. It keeps the file and its journal mode as they are, also on read-only media."""
        connection = self.connect(**options)
        try:
            connection.execute("pragma query_only = on")
            connection.execute("pragma schema_version").fetchall()
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CANTOPEN or os.access(
                os.path.dirname(self.path), os.W_OK
            ):
                raise
            # A file in WAL mode needs a shared-memory file beside it, which a read-only folder does not allow.
            log = f"{self.path}-wal"
            if os.path.exists(log) and os.path.getsize(log):
                raise Unreachable(
                    f"cannot read {self.path}: the newest changes are in {log}, and its folder is read-only",
                    hint="copy both files to a folder that can be written to, and look at the copy",
                ) from error
            connection = self.connect("immutable=1", **options)
        return connection


class SqliteConnection:
    """A connection to a SQLite file, and the only thread that uses it."""

    def __init__(self, file: SqliteFile, name: str, connect: Callable[[], sqlite3.Connection]) -> None:
        self._file, self._connect = file, connect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rowmill-sqlite-{name}")
        self._connection: sqlite3.Connection | None = None
        self._identity: Identity | None = None

    def connection(self) -> sqlite3.Connection:
        """The connection, opened on first use. Call it in the thread."""
        if self._connection is None:
            self._identity = self._file.identity()
            self._connection = self._connect()
        return self._connection

    def _check(self) -> None:
        """Raise Unreachable if the file was deleted or replaced. The next use opens the file that is there then."""
        try:
            self._file.check(self._identity)
        except Unreachable:
            self._drop()
            raise

    def _drop(self) -> None:
        connection, self._connection, self._identity = self._connection, None, None
        if connection is not None:
            connection.close()

    def run(self, sql: str, parameters: Any = ()) -> Sequence[Any]:
        return self.connection().execute(sql, parameters).fetchall()

    @contextmanager
    def tolerant(self, wanted: bool = True) -> Iterator[None]:
        """Return text that is not UTF-8 as Unreadable. Call it in the thread."""
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
        """A transaction that takes the write lock at the start and commits at the end. Call it in the thread."""
        connection = self.connection()
        _lock(connection)
        try:
            yield self.run
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise
        self._check()  # otherwise the writes may have gone to a deleted file

    async def do(self, work: Callable[[], T]) -> T:
        """Run work in the thread, after the work that is already queued."""

        def checked() -> T:
            self._check()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, checked)

    async def drop(self) -> None:
        """Close the connection; the next use opens a new one."""
        if self._connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._drop)

    async def close(self) -> None:
        await self.drop()
        self._thread.shutdown(wait=False)


class SqliteCommits:
    """Detects commits of other connections to a SQLite file. A check costs microseconds and takes no lock."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._connection: sqlite3.Connection | None = None
        self._identity: Identity | None = None
        self._version: Sequence[Any] = ()

    def moved(self) -> bool:
        """Whether another connection has committed since the last call, or the file was deleted or replaced."""
        if (identity := self._file.identity()) != self._identity:
            self.close()
            self._identity = identity
            if identity is None:
                return True
        if identity is None:
            return False
        try:
            if self._connection is None:
                self._connection = self._file.open_to_read(timeout=0)
            # fetchall, not fetchone: an open cursor would keep the value from changing.
            version = self._connection.execute("pragma data_version").fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False  # a commit without a write-ahead log is in progress
        moved, self._version = version != self._version, version
        return moved

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._identity, self._version = None, None, ()


def _lock(connection: sqlite3.Connection) -> None:
    """Begin a transaction with the file's write lock, retrying at short intervals."""
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
