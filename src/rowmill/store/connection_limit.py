"""A bound on the connections of one worker over all its databases."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import Unreachable


class EvictablePool(Protocol):
    """A pool that can close one of the connections that nobody uses."""

    @property
    def has_idle(self) -> bool:
        """Whether it holds a connection that nobody uses."""

    async def close_one(self) -> None:
        """Close one of these."""

    def lend(self, kind: object) -> Any:
        """One of these for another pool, if its connections are of this kind; None: there is none."""


class ConnectionLimit:
    """At most so many open connections in one event loop, over all pools that share this limit.

    Where all are taken, the pool that was used least recently closes an idle one. If none is idle, the next
    connection that comes back to its pool is closed for those who wait.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = self.peak = 0
        self._pools: dict[EvictablePool, None] = {}  # the least recently used first
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closing: set[asyncio.Task[None]] = set()
        # A server that does not answer keeps a connection attempt waiting until its timeout. Attempts at servers that
        # have not answered yet take at most half of the places, so that those that answer always get one.
        self._unproven = asyncio.Semaphore(max(1, most // 2))

    @property
    def contended(self) -> bool:
        """Somebody waits for a connection: one that nobody uses should be closed."""
        return len(self._waiting) > len(self._closing)

    def used(self, pool: EvictablePool) -> None:
        """A pool is in use now: others give up their idle connections first."""
        self._pools.pop(pool, None)
        self._pools[pool] = None

    def forget(self, pool: EvictablePool) -> None:
        self._pools.pop(pool, None)

    def borrow(self, pool: EvictablePool, kind: object) -> Any:
        """An idle connection of another pool that leads to the same database; None: there is none.

        Schemas of one database then need no more connections than work at the same moment.
        """
        for other in self._pools:
            if other is not pool and (connection := other.lend(kind)) is not None:
                return connection
        return None

    def try_take(self) -> bool:
        """Take a place if there is one now."""
        if self.open >= self.most:
            return False
        self.open += 1
        self.peak = max(self.peak, self.open)
        return True

    @asynccontextmanager
    async def place(self, proven: bool, patience: float) -> AsyncIterator[None]:
        """A place for the connection that the block opens. It is given back if the block fails."""
        if not proven:
            await self._unproven.acquire()
        try:
            await self._take(patience)
            try:
                yield
            except BaseException:
                self.give_back()
                raise
        finally:
            if not proven:
                self._unproven.release()

    async def _take(self, patience: float) -> None:
        if self.open < self.most:
            self.open += 1
            self.peak = max(self.peak, self.open)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._evict()
        try:
            async with asyncio.timeout(patience):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self.give_back()  # it came at the last moment
            else:
                self._waiting.remove(waiter)
            if isinstance(error, TimeoutError):
                raise Unreachable(
                    f"all {self.most} connections of this worker are in use", hint="raise Mill(max_connections=...)"
                ) from None
            raise

    def give_back(self) -> None:
        """A connection was closed: its place goes to the next that waits."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.open -= 1

    def _evict(self) -> None:
        """Close an idle connection of the pool that was used least recently."""
        for pool in self._pools:
            if pool.has_idle:
                self.close_soon(pool)
                return

    def close_soon(self, pool: EvictablePool) -> None:
        """Close an idle connection of this pool, beside what runs now."""
        task = asyncio.get_running_loop().create_task(pool.close_one())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


@dataclass(frozen=True)
class ConnectionShares:
    """A worker's connections, divided by what they are for, so that none of these waits for another.

    A finish block holds a connection for as long as the handler likes, and a lease must be renewed meanwhile.
    """

    engine: ConnectionLimit
    handlers: ConnectionLimit
    listeners: ConnectionLimit
    heartbeat: ConnectionLimit

    #: Fewer would leave a part without any.
    LEAST = 5

    @classmethod
    def of(cls, most: int) -> ConnectionShares:
        """So many connections, divided."""
        handlers, listeners, heartbeat = max(1, most // 5), max(1, most // 5), max(1, most // 5)
        engine = most - handlers - listeners - heartbeat
        return cls(*(ConnectionLimit(share) for share in (engine, handlers, listeners, heartbeat)))

    @property
    def for_heartbeat(self) -> ConnectionShares:
        """The heartbeat thread's own part: it has an event loop of its own."""
        return ConnectionShares(self.heartbeat, self.heartbeat, self.heartbeat, self.heartbeat)
