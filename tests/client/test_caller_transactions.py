"""Enqueue inside the caller's own transaction, whichever library it comes from: with it or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import aiosqlite
import asyncpg
import django
import psycopg
import pytest
import sqlalchemy as sa
from django.conf import settings
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from databases import Db
from rowmill import DeclarationError, Job, Key, Mill, RowmillError, Task


@pytest.fixture
async def mill(db: Db) -> AsyncIterator[Mill]:
    mill = Mill(db.url)

    @mill.task
    async def note(n: int) -> None: ...

    await mill.prepare()
    db.execute("create table business (n integer)")
    yield mill
    await mill.close()


def note_of(mill: Mill) -> Task[..., Any]:
    return mill.tasks["note"]


def found(db: Db) -> tuple[int, int]:
    return db.value("select count(*) from business"), db.value("select count(*) from rowmill_jobs")


def _dsn(db: Db) -> str:
    return db.direct


def _enqueue_sync(mill: Mill, tx: Any) -> None:
    """One, one with a key twice, and many: five rows."""
    note = note_of(mill)
    note.enqueue_sync(1, tx=tx)
    first = note.enqueue_sync(2, tx=tx, key="k")
    assert note.enqueue_sync(2, tx=tx, key="k").id == first.id
    assert note.enqueue_sync(9, tx=tx, key=Key("k", conflict="replace")).id == first.id
    note.enqueue_many_sync([{"n": n} for n in range(3)], tx=tx)


async def _enqueue(mill: Mill, tx: Any) -> None:
    note = note_of(mill)
    await note.enqueue(1, tx=tx)
    first = await note.enqueue(2, tx=tx, key="k")
    assert (await note.enqueue(2, tx=tx, key="k")).id == first.id
    assert (await note.enqueue(9, tx=tx, key=Key("k", conflict="replace"))).id == first.id
    await note.enqueue_many([{"n": n} for n in range(3)], tx=tx)


class _Undo(Exception):
    pass


async def _twice(db: Db, attempt: Callable[[bool], Any]) -> None:
    """Rolled back it leaves nothing; committed it leaves all of it."""
    with pytest.raises(_Undo):
        await attempt(False)
    assert found(db) == (0, 0)
    await attempt(True)
    assert found(db) == (1, 5)


INSERT = "insert into business values (1)"


def _engine_url(db: Db, driver: str) -> Any:
    if db.dialect == "sqlite":
        return sa.make_url(db.url).set(drivername="sqlite+aiosqlite" if driver == "async" else "sqlite")
    return "postgresql+asyncpg://" if driver == "async" else "postgresql+psycopg://"


@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_in_a_sqlalchemy_transaction(db: Db, mill: Mill, kind: str) -> None:
    def work(commit: bool) -> None:
        options = {} if db.dialect == "sqlite" else {"creator": lambda: psycopg.connect(_dsn(db))}
        engine = sa.create_engine(_engine_url(db, "sync"), **options)
        try:
            with engine.begin() if kind == "connection" else Session(engine) as tx:
                tx.execute(sa.text(INSERT))
                _enqueue_sync(mill, tx)
                if not commit:
                    raise _Undo
                tx.commit()
        finally:
            engine.dispose()

    await _twice(db, lambda commit: asyncio.to_thread(work, commit))


@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_in_an_async_sqlalchemy_transaction(db: Db, mill: Mill, kind: str) -> None:
    async def work(commit: bool) -> None:
        options = {} if db.dialect == "sqlite" else {"async_creator": lambda: asyncpg.connect(_dsn(db))}
        engine = create_async_engine(_engine_url(db, "async"), **options)
        try:
            async with engine.begin() if kind == "connection" else AsyncSession(engine) as tx:
                await tx.execute(sa.text(INSERT))
                await _enqueue(mill, tx)
                if not commit:
                    raise _Undo
                await tx.commit()
        finally:
            await engine.dispose()

    await _twice(db, work)


async def test_in_a_psycopg_transaction(pg: Db) -> None:
    mill = await _prepared(pg)

    def work(commit: bool) -> None:
        with psycopg.connect(_dsn(pg)) as tx:
            tx.execute(INSERT)
            _enqueue_sync(mill, tx)
            if not commit:
                raise _Undo

    await _twice(pg, lambda commit: asyncio.to_thread(work, commit))
    await mill.close()


async def test_in_an_async_psycopg_transaction(pg: Db) -> None:
    mill = await _prepared(pg)

    async def work(commit: bool) -> None:
        async with await psycopg.AsyncConnection.connect(_dsn(pg), row_factory=psycopg.rows.dict_row) as tx:
            await tx.execute(INSERT)
            await _enqueue(mill, tx)
            if not commit:
                raise _Undo

    await _twice(pg, work)
    await mill.close()


async def test_in_an_asyncpg_transaction(pg: Db) -> None:
    mill = await _prepared(pg)
    pool = await asyncpg.create_pool(_dsn(pg), min_size=1, max_size=1)

    async def work(commit: bool) -> None:
        async with pool.acquire() as tx, tx.transaction():
            await tx.execute(INSERT)
            await _enqueue(mill, tx)
            if not commit:
                raise _Undo

    await _twice(pg, work)
    with pytest.raises(RowmillError, match="is not a connection"):
        await note_of(mill).enqueue(1, tx=pool)
    await pool.close()
    await mill.close()


async def test_in_a_sqlite3_transaction(lite: Db) -> None:
    mill = await _prepared(lite)

    def work(commit: bool) -> None:
        with closing(sqlite3.connect(lite.url.removeprefix("sqlite:///"))) as tx, tx:
            tx.execute(INSERT)
            _enqueue_sync(mill, tx)
            if not commit:
                raise _Undo

    await _twice(lite, lambda commit: asyncio.to_thread(work, commit))
    await mill.close()


async def test_in_an_aiosqlite_transaction(lite: Db) -> None:
    mill = await _prepared(lite)

    async def work(commit: bool) -> None:
        async with aiosqlite.connect(lite.url.removeprefix("sqlite:///")) as tx:
            await tx.execute(INSERT)
            await _enqueue(mill, tx)
            if not commit:
                raise _Undo
            await tx.commit()

    await _twice(lite, work)
    await mill.close()


@pytest.mark.no_pooler("another driver connects by the same address, with settings of its own")
async def test_in_djangos_transaction(db: Db, mill: Mill) -> None:
    if db.dialect == "postgresql" and db.server_version < 14:
        pytest.skip("Django needs PostgreSQL 14")
    if not settings.configured:
        settings.configure(DATABASES={})
        django.setup()
    from django.db import transaction
    from django.db.utils import ConnectionHandler

    if db.dialect == "sqlite":
        database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": db.url.removeprefix("sqlite:///")}
    else:
        given = psycopg.conninfo.conninfo_to_dict(db.url)
        database = {
            "ENGINE": "django.db.backends.postgresql", "NAME": given["dbname"], "USER": given.get("user"),
            "HOST": given["host"],
        }  # fmt: skip

    def work(commit: bool) -> None:
        connections = ConnectionHandler({"default": database})
        connection = connections["default"]
        from django import db as django_db

        kept = django_db.connections
        transaction.get_connection.__globals__["connections"] = connections
        try:
            with transaction.atomic():
                with connection.cursor() as cursor:
                    cursor.execute(INSERT)
                _enqueue_sync(mill, connection)
                if not commit:
                    raise _Undo
        finally:
            transaction.get_connection.__globals__["connections"] = kept
            connection.close()

    await _twice(db, lambda commit: asyncio.to_thread(work, commit))


async def test_in_a_finish_block(db: Db, mill: Mill) -> None:
    note = note_of(mill)

    @mill.task(max_attempts=1)
    async def first(job: Job, fail: bool) -> None:
        async with job.finish() as tx:
            await tx.execute(INSERT)
            await _enqueue(mill, tx)
            if fail:
                raise ValueError

    @mill.task(max_attempts=1)
    def second(job: Any) -> None:
        with job.finish() as tx:
            note.enqueue_sync(1, tx=tx)

    await first.enqueue(fail=True)
    await mill.worker(drain=True).run()
    assert found(db) == (0, 1)
    await first.enqueue(fail=False)
    await mill.worker(drain=True).run()
    assert found(db) == (1, 7)
    assert db.value("select count(*) from rowmill_jobs where task = 'note' and state = 'done'") == 5


@pytest.mark.bare
async def test_a_wrong_transaction_and_a_missing_table_are_explained(lite: Db) -> None:
    mill = Mill(lite.url)

    @mill.task
    async def note(n: int) -> None: ...

    with pytest.raises(RowmillError, match="not a connection or session"):
        note.enqueue_sync(1, tx=object())
    path = lite.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as tx, pytest.raises(DeclarationError, match=r"mill\.prepare"):
        note.enqueue_sync(1, tx=tx)
    async with aiosqlite.connect(lite.url.removeprefix("sqlite:///")) as awaited:
        with pytest.raises(RowmillError, match="must be awaited"):
            note.enqueue_sync(1, tx=awaited)
    await mill.close()


async def _prepared(db: Db) -> Mill:
    mill = Mill(db.url)

    @mill.task
    async def note(n: int) -> None: ...

    await mill.prepare()
    db.execute("create table business (n integer)")
    return mill
