"""A database where every statement and every commit waits for its turn. The engine's own verbs run on it unchanged.

A statement outside a transaction is a transaction of its own, and other actors may come between the statement and its
commit. So it is sent as an explicit transaction here, with a point before the commit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

from ..store.database import Database, Run
from ..store.driver_errors import translated
from .schedules import CUT, DIE, UNHEARD, Actor, Died, Schedule

T = TypeVar("T")
Seen = Callable[[Actor], Awaitable[None]]
Send = Callable[[str, Any], Awaitable[Sequence[Any]]]
#: Prepared statements that a connection keeps: those of every lane, for every time that schedules move to.
CACHED = 2000


class Cut(ConnectionError):
    """The connection was cut."""


class SteppedDatabase:
    """What both databases share: the points."""

    actor: Actor
    schedule: Schedule | None = None
    #: Called after every commit, before any other actor continues.
    seen: Seen | None = None

    async def _point(self, where: str, what: str) -> str:
        if self.schedule is None:
            return ""
        happens = await self.schedule.point(self.actor, where, what)
        if happens in (DIE, CUT) or (happens == UNHEARD and where != "commit"):
            await self._rollback()
            raise Died if happens == DIE else Cut("the connection is gone")
        return happens

    def _freed(self) -> None:
        """The transaction has ended and released its locks."""
        if self.schedule is not None:
            self.schedule.freed = True
            if self.schedule.writer is self.actor:
                self.schedule.writer = None

    async def _committed(self, happens: str) -> None:
        self._freed()
        if self.seen is not None:
            await self.seen(self.actor)
        if happens == UNHEARD:
            raise Cut("the connection is gone")

    async def _rollback(self) -> None:
        raise NotImplementedError

    async def _run(self, sql: str, parameters: Any) -> Sequence[Any]:
        raise NotImplementedError

    def _transaction(self) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def aside(self, sql: str) -> Sequence[Any]:
        """Run a query outside the schedule."""
        return await self._run(sql, ())

    async def read(self, verb: Callable[[Run], T]) -> T:
        return await self._spawn(verb, "reads")

    async def transact(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        with translated(self._database):
            async with self._transaction():
                return await self._spawn(verb, "sends")

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        with translated(self._database):
            async with self._transaction():
                yield Connection(self)

    async def _spawn(self, verb: Callable[[Run], T], how: str, send: Send | None = None) -> T:
        """Run a verb, with a point before each of its statements."""

        async def step(sql: str, parameters: Any) -> Sequence[Any]:
            await self._point("send", f"{how} {named(sql)}")
            return await (send or self._run)(sql, parameters)

        with translated(self._database):
            return await greenlet_spawn(verb, lambda sql, parameters=(): await_only(step(sql, parameters)))

    @property
    def _database(self) -> Database:
        assert isinstance(self, Database)
        return self


class Connection:
    """The part of SQLAlchemy's connection that the engine's own statements use."""

    def __init__(self, database: SteppedDatabase) -> None:
        self._database = database

    async def run_sync(self, work: Callable[[Any], T]) -> T:
        return await greenlet_spawn(work, self)

    def exec_driver_sql(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        return Rows(await_only(self._send(sql, parameters)))

    async def _send(self, sql: str, parameters: Sequence[Any]) -> Sequence[Any]:
        await self._database._point("send", f"sends {named(sql)}")
        return await self._database._run(sql, parameters)


class Rows:
    """What a statement returned."""

    returns_rows = True

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def fetchall(self) -> Sequence[Any]:
        return self._rows


def named(sql: str) -> str:
    """A short name for a statement, for the list of steps."""
    words = sql.split()
    head = words[0].lower() if words else ""
    if head == "with":
        verb = "update" if "update" in words else "select"
        return f"{verb} with {words[2] if words[1] == 'recursive' else words[1]}"
    return f"{head} {words[1]}" if head in ("update", "insert", "delete") and len(words) > 1 else head
