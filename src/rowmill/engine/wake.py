"""Waking up: a hint that rows may be ready. Polling with jitter is the path; a hint only makes it immediate."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Callable
from typing import Any

import asyncpg

from ..errors import Unreachable
from ..store import Database
from ..store.database import Postgres, Sqlite
from ..store.jobs.enqueue import CHANNEL

_WATCH_EVERY = 0.03
_RECONNECT = (0.5, 30.0)

#: The channel on which it is said that jobs are done, where somebody awaits that; and the word by which he says so.
DONE, AWAIT = "rowmill_done", "await"

Ring = Callable[[], None]


class WakeUp:
    """Rings when something may have happened; the worker waits for it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        #: Wake the worker, now or when it next waits. Every run that ends does it.
        self.ring = self._event.set

    async def wait(self, seconds: float) -> None:
        """Until it rings, or that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0)):
                await self._event.wait()
        self._event.clear()


async def listen(database: Database, ring: Ring, channel: str = CHANNEL, awaited: Ring | None = None) -> None:
    """Ring whenever this database says that rows may be ready; ``awaited`` is called when somebody awaits results.
    Runs until cancelled.
    """
    if isinstance(database, Postgres):
        if not database.pooled:  # a transaction pooler loses LISTEN with the transaction
            await _listen_postgres(database, ring, channel, awaited or (lambda: None))
    elif isinstance(database, Sqlite):
        await _watch_sqlite(database, ring)


async def _listen_postgres(database: Postgres, ring: Ring, channel: str, awaited: Ring) -> None:
    def heard(_connection: Any, _pid: int, _channel: str, word: str) -> None:
        (awaited if word == AWAIT else ring)()

    pause = _RECONNECT[0]
    while True:
        connection: Any = None
        try:
            connection = await asyncpg.connect(database.dsn, timeout=10)
            gone = asyncio.Event()
            connection.add_termination_listener(lambda _, gone=gone: gone.set())
            await connection.add_listener(channel, heard)
            pause = _RECONNECT[0]
            ring()  # what was said while nobody listened
            await gone.wait()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            pass  # the worker's own statements report an environment that is down
        finally:
            if connection is not None:
                connection.terminate()
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 2, _RECONNECT[1])


async def _watch_sqlite(database: Sqlite, ring: Ring) -> None:
    """``data_version`` moves with every commit of another connection. Reading it costs microseconds and no lock.
    The file's identity tells that it was deleted or replaced: the worker's next statement then finds that out.
    """
    connection: sqlite3.Connection | None = None
    last: Any = None
    try:
        while True:
            try:
                if connection is None:
                    connection = database.file.open_to_read(timeout=0)
                # fetchall, not fetchone: with a cursor left open the value stands still.
                now = connection.execute("pragma data_version").fetchall(), database.file.identity()
                if now != last:
                    last = now
                    ring()
            except (sqlite3.Error, Unreachable):
                await asyncio.sleep(1.0)
            await asyncio.sleep(_WATCH_EVERY)
    finally:
        if connection is not None:
            connection.close()


def jittered(seconds: float) -> float:
    """Around that long, so that a fleet does not ask all at once."""
    return seconds * random.uniform(0.8, 1.2)
