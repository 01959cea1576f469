"""Waking up: a hint that rows may be ready. Polling with jitter is the path; a hint only makes it immediate."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import asyncpg

from ..errors import DatabaseError, Unreachable
from ..store import Database
from ..store.file_watch import FileWatch
from ..store.jobs.enqueue import CHANNEL
from ..store.lane.postgres_wake_trigger import AGAIN, ALL_COMMITTED, LOOK_AGAIN
from ..store.sqlite_file import SqliteCommits, SqliteFile

#: Seconds between two looks at a SQLite file: first after a write, longest where nobody tells of writes, and longest
#: where the kernel does.
_SOON, _POLL, _SAFETY_POLL = 0.001, 0.1, 1.0
_DEAF = 0.02  # up to this pause no further write hastens a look: a large transaction writes all the time
_APART = 0.005  # seconds between two rings for a SQLite file, so that a burst of commits is one
_RECONNECT = (0.5, 2.0)  # seconds, less or more by half: a server that is back is listened to within 3 s
_RECONNECT_FULL = 10.0  # a server without a free connection: polls do meanwhile, heartbeats come first
#: The server ends the session of a host that is cut off after some ten seconds; the lock goes with it.
_KEEPALIVES = {"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "2", "tcp_keepalives_count": "3"}

#: The channel on which it is said that jobs are done, where somebody awaits that; and the word by which he says so.
DONE, AWAIT = "rowmill_done", "await"

WakeCallback = Callable[[], None]


class WakeUp:
    """Wakes when something may have happened; the worker waits for it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        #: Wake the worker, now or when it next waits. Every run that ends does it.
        self.wake = self._event.set

    async def wait(self, seconds: float) -> None:
        """Until it wakes, or that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0)):
                await self._event.wait()
        self._event.clear()


@dataclass
class Session:
    """The session on which a worker listens. It holds an advisory lock, by which other workers see that it lives."""

    lock_id: int
    #: Since when (monotonic) the lock is held; None: it is not.
    locked_since: float | None = None
    #: End it, so that another one is opened.
    end: WakeCallback = lambda: None

    @property
    def age(self) -> float | None:
        """For how many seconds the lock has been held."""
        since = self.locked_since
        return None if since is None else time.monotonic() - since


class SecondLook:
    """After a wake trigger notified: look again, until every writer that did not notify is committed.

    The trigger leaves notifications out where many writers write at the same moment.
    """

    #: So many notifications within a second mean many writers: then it looks on for so many seconds, because the last
    #: writer that notified may have been rolled back.
    _MANY, _LOOK_ON, _LONGEST = 10, 0.5, 1.0

    def __init__(self, database: Database, wake: WakeCallback) -> None:
        self._database, self._wake = database, wake
        self._notified: deque[float] = deque(maxlen=self._MANY)
        self._task: asyncio.Task[None] | None = None

    def notified(self) -> None:
        """A wake trigger notified just now."""
        self._notified.append(time.monotonic())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        pause = LOOK_AGAIN
        while True:
            await asyncio.sleep(pause)
            began, last = time.monotonic(), self._notified[-1]
            try:
                committed = await self._database.read(lambda run: bool(run(ALL_COMMITTED, ())[0][0]))
            except DatabaseError:
                return  # the poll finds what there is
            self._wake()
            many = len(self._notified) == self._MANY and last - self._notified[0] < 1.0
            if committed and began - last >= (self._LOOK_ON if many else LOOK_AGAIN):
                return
            # A transaction that stays open is asked for less and less often.
            pause = LOOK_AGAIN if began - last < 2 * self._LOOK_ON else min(pause * 1.25, self._LONGEST)


async def listen(
    database: Database,
    wake: WakeCallback,
    channel: str = CHANNEL,
    awaited: WakeCallback | None = None,
    session: Session | None = None,
) -> None:
    """Wake whenever this database says that rows may be ready; ``awaited`` is called when somebody awaits results.
    Runs until cancelled.
    """
    if database.file is not None:
        await _watch_file(database.file, wake)
    elif not database.pooled:  # a transaction pooler loses LISTEN with the transaction
        await _listen(database, wake, channel, awaited or (lambda: None), session)


class Listeners:
    """The sessions on which a worker listens. Where its connections are bounded, one for each database.

    A notification reaches every schema of a database. All of these that are served are woken, less often the more they
    are: each has to look.
    """

    _PER_SCHEMA = 0.005  # seconds between two rings, for each of them

    def __init__(self, lock_id: int) -> None:
        self._lock_id = lock_id
        self._shared: dict[str, _SharedListener] = {}

    def session(self, database: Database) -> Session:
        """The session that tells others that this worker lives."""
        shared = self._of(database)
        return shared.session if shared is not None else Session(self._lock_id)

    def _of(self, database: Database) -> _SharedListener | None:
        if database.file is not None or database.shares is None:
            return None
        return self._shared.setdefault(database.place, _SharedListener(database, Session(self._lock_id)))

    async def listen(
        self, database: Database, wake: WakeCallback, awaited: WakeCallback | None, session: Session | None
    ) -> None:
        """Wake whenever this database says that rows may be ready. Runs until cancelled."""
        if (shared := self._of(database)) is None:
            await listen(database, wake, awaited=awaited, session=session)
        else:
            await shared.join(wake, awaited or (lambda: None))


class _SharedListener:
    """One session for all schemas of a database. It listens while there is a place for it, and else they are polled."""

    def __init__(self, database: Database, session: Session) -> None:
        self.session = session
        self._database = database
        self._callbacks: dict[object, tuple[WakeCallback, WakeCallback]] = {}
        self._task: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None

    async def join(self, wake: WakeCallback, awaited: WakeCallback) -> None:
        """Wake with the others, until cancelled."""
        me = object()
        self._callbacks[me] = wake, awaited
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen())
        try:
            wake()  # what was said before
            await self._task
        finally:
            del self._callbacks[me]
            if not self._callbacks:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        assert self._database.shares is not None
        limit = self._database.shares.listeners
        while not limit.try_take():  # noqa: ASYNC110 - nobody waits in line for these
            await asyncio.sleep(_RECONNECT_FULL)
        try:
            await listen(self._database, self._wake, awaited=self._awaited, session=self.session)
        finally:
            limit.give_back()

    def _awaited(self) -> None:
        for _, awaited in list(self._callbacks.values()):
            awaited()

    def _wake(self) -> None:
        if self._later is None:
            pause = Listeners._PER_SCHEMA * (len(self._callbacks) - 1)
            self._later = asyncio.get_running_loop().call_later(pause, self._now)

    def _now(self) -> None:
        self._later = None
        for wake, _ in list(self._callbacks.values()):
            wake()


async def _listen(
    database: Database, wake: WakeCallback, channel: str, awaited: WakeCallback, session: Session | None
) -> None:
    second_look = SecondLook(database, wake)

    def heard(_connection: Any, _pid: int, _channel: str, word: str) -> None:
        (awaited if word == AWAIT else wake)()
        if word == AGAIN:
            second_look.notified()

    pause = _RECONNECT[0]
    while True:
        connection: Any = None
        try:
            connection = await asyncpg.connect(database.dsn, timeout=10, server_settings=_KEEPALIVES)
            gone = asyncio.Event()
            if session is not None:
                session.end = gone.set
                with contextlib.suppress(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(database.sql.hold_lock(session.lock_id))
                    session.locked_since = time.monotonic()
            connection.add_termination_listener(lambda _, gone=gone: gone.set())
            await connection.add_listener(channel, heard)
            pause = _RECONNECT[0]
            wake()  # what was said while nobody listened
            await gone.wait()
        except asyncpg.TooManyConnectionsError:
            pause = _RECONNECT_FULL
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            pass  # the worker's own statements report an environment that is down
        finally:
            if session is not None:
                session.locked_since = None
            await second_look.stop()
            if connection is not None:
                connection.terminate()
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 2, _RECONNECT[1]) if pause < _RECONNECT_FULL else _RECONNECT[0]


async def _watch_file(file: SqliteFile, wake: WakeCallback) -> None:
    """Wake after every commit to the file. Also after this worker's own: an outcome, or a hook, can make rows ready.

    The kernel tells of writes, and a write is a reason to look for a commit. A commit becomes visible some time after
    its last write (an fsync comes in between), so more looks follow, at growing intervals. Where the kernel tells
    nothing, they begin after each commit. If the kernel missed a commit once, it is not relied on again.
    """
    watch, commits = FileWatch(file.path), SqliteCommits(file)
    written, pause = True, _SOON
    try:
        while True:
            was_written = watch.told()
            try:
                committed = commits.moved()
            except (sqlite3.Error, Unreachable):
                await asyncio.sleep(1.0)
                continue
            was_written |= watch.told()  # of a write between the two questions
            written |= was_written
            if committed:
                wake()
                if not written:
                    watch.close()
                written, pause = False, _SAFETY_POLL if watch.works else _SOON
                await asyncio.sleep(_APART)
            else:
                first_write = was_written and pause > _DEAF
                pause = _SOON if first_write else min(pause * 1.5, _SAFETY_POLL if watch.works else _POLL)
                await (watch.wait(pause) if pause > _DEAF else asyncio.sleep(pause))
    finally:
        watch.close()
        commits.close()


def jittered(seconds: float) -> float:
    """Around that long, so that not all workers ask at once."""
    return seconds * random.uniform(0.8, 1.2)
