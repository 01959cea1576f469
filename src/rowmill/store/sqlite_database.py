"""A SQLite file: one thread owns the engine's connection, inside ``BEGIN IMMEDIATE``; another one reads."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects.sqlite import dialect as sqlalchemy_sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from ..errors import Unreachable, UnreadableReply
from .database import Database, Run
from .dialect import SQLITE
from .driver_errors import translated
from .handler_connections import POOL, HandlerConnections, SqliteHandlerConnection
from .sqlite_file import Identity, SqliteConnection, SqliteFile
from .urls import sqlite_path

T = TypeVar("T")

_STEPS = 10_000


class Sqlite(Database):
    """One SQLite file: one thread owns the engine's connection, handlers' transactions have their own.

    What only reads has its own connection. Behind a write that waits for the file's only lock, it could wait for the
    holder of that lock: a finish block that holds it, and asks whether its claim still holds, would wait for itself.
    """

    sql = SQLITE
    file: SqliteFile

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.dialect = sqlalchemy_sqlite()
        self.file = SqliteFile(sqlite_path(url))
        self.path = self.file.path
        self._writer = SqliteConnection(self.file, "write", self.file.open_to_write)
        self._reader = SqliteConnection(self.file, "read", self.file.open_to_read)
        self._handlers: HandlerConnections | None = None
        self._handlers_file: Identity | None = None

    async def read(self, verb: Callable[[Run], T]) -> T:
        return await self._read(lambda: verb(self._reader.run))

    async def _read(self, work: Callable[[], T]) -> T:
        def tolerant() -> T:
            with self._reader.tolerant():
                return work()

        try:
            with translated(self):
                return await self._reader.do(work)
        except UnreadableReply:
            return await self._reader.do(tolerant)

    async def read_within(self, verb: Callable[[Run], T], seconds: float) -> T:
        def work() -> T:
            connection, ends = self._reader.connection(), time.monotonic() + seconds
            # Asked every so many steps of SQLite's machine: "interrupted" is what a statement over time ends with.
            connection.set_progress_handler(lambda: int(time.monotonic() > ends), _STEPS)
            try:
                return verb(self._reader.run)
            finally:
                connection.set_progress_handler(None, _STEPS)

        return await self._read(work)

    async def write(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        def work() -> T:
            with self._writer.tolerant(tolerant), self._writer.transaction() as run:
                return verb(run)

        with translated(self):
            return await self._writer.do(work)

    async def transact(self, verb: Callable[[Run], T], *, tolerant: bool = False) -> T:
        return await self.write(verb, tolerant=tolerant)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        if self._handlers is None:
            self._handlers, self._handlers_file = HandlerConnections(self, self._make()), self.file.identity()
        handlers = self._handlers
        await self._check(handlers)
        async with handlers.begin() as connection:
            yield connection
        await self._check(handlers)  # else it may have been written to a file that nobody will ever read

    async def _check(self, handlers: HandlerConnections) -> None:
        """Raise Unreachable if the file of these connections was deleted or replaced."""
        if handlers is not self._handlers:
            raise Unreachable(f"the file {self.path} was replaced while it was in use")
        try:
            self.file.check(self._handlers_file)
        except Unreachable:
            await self._drop_handlers()
            raise

    async def _drop_handlers(self) -> None:
        handlers, self._handlers, self._handlers_file = self._handlers, None, None
        if handlers is not None:
            await handlers.close()

    async def _drop(self) -> None:
        """Close all connections; the next use opens others."""
        await self._drop_handlers()
        for line in (self._writer, self._reader):
            await line.drop()

    def _make(self) -> AsyncEngine:
        def connect(_path: str, **options: Any) -> SqliteHandlerConnection:
            return SqliteHandlerConnection(lambda: self.file.connect(self.file.to_write, **options))

        url = sa.URL.create("sqlite+aiosqlite", database=self.path)
        engine = create_async_engine(url, connect_args={"async_creator_fn": connect}, **POOL)
        event.listen(engine.sync_engine, "connect", _no_implicit_begin)
        # A transaction that reads first and then writes fails at once when another wrote in between.
        event.listen(engine.sync_engine, "begin", lambda c: c.exec_driver_sql("BEGIN IMMEDIATE") and None)
        return engine

    @property
    def missing_file(self) -> str | None:
        return None if os.path.exists(self.path) else self.path

    async def create(self) -> None:
        if self.file.identity() is None:
            with translated(self):
                await self._writer.do(self.file.create)

    async def pin(self) -> None:
        if self.replaced:
            await self._drop()
        self.file.pinned, self.file.lost = True, None

    @property
    def replaced(self) -> bool:
        return self.file.lost is not None

    async def reach(self) -> None:
        if not self.replaced:
            await super().reach()
        else:
            with translated(self):
                self.file.open_to_read().close()

    async def reflect(self, verb: Callable[[sa.Connection], T]) -> T:
        def work() -> T:
            self.must_exist()
            engine = sa.create_engine("sqlite://", creator=self.file.open_to_read, poolclass=NullPool)
            with engine.connect() as connection:
                return verb(connection)

        with translated(self):
            return await self._reader.do(work)

    async def rest(self) -> None:
        await self._drop()

    async def close(self) -> None:
        await self._drop_handlers()
        for line in (self._writer, self._reader):
            await line.close()


def _no_implicit_begin(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("pragma foreign_keys = on")
    cursor.close()
