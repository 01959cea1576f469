"""rowmill's own tables: made by steps, once, by the first process that comes."""

from __future__ import annotations

import asyncio

import pytest

from databases import Db
from rowmill.store import Database
from rowmill.store.own import schema
from rowmill.store.own.workers import WorkersTable


async def own_tables(database: Database) -> set[str]:
    text = (
        "select table_name from information_schema.tables where table_name like 'rowmill%'"
        if database.dialect.name == "postgresql"
        else "select name from sqlite_master where type = 'table' and name like 'rowmill%'"
    )
    return {row[0] for row in await database.read(lambda run: run(text, ()))}


async def test_steps_are_taken_once_however_many_processes_begin_together(db: Db) -> None:
    databases = [Database.open(db.url) for _ in range(6)]
    found = await asyncio.gather(*(schema.ensure(database) for database in databases))
    assert all(own.refused is None and own.has(step) for own in found for step in schema.STEPS)
    assert db.value("select count(*) from rowmill_schema") == len(schema.STEPS)
    assert await own_tables(databases[0]) >= {"rowmill_workers", "rowmill_schema"}
    for database in databases:
        await database.close()


async def test_a_workers_table_from_before_the_steps_is_kept(db: Db) -> None:
    database = Database.open(db.url)
    for text in schema.ddl(database, schema.WORKERS):
        db.execute(text)
    db.execute(
        "insert into rowmill_workers (id, incarnation, host, pid, lanes, started_at, seen_at, state)"
        " values ('old', 'a', 'h', 1, '[]', current_timestamp, current_timestamp, 'stopped')"
    )
    await WorkersTable(database).ensure()
    assert db.value("select id from rowmill_workers") == "old"
    assert db.value("select count(*) from rowmill_schema") == len(schema.STEPS)
    await database.close()


async def test_the_tables_live_in_the_schema_that_is_set_whatever_it_is_called(pg: Db) -> None:
    database = Database.open(pg.url, schema='mill "own"')
    own = await schema.ensure(database)
    assert own.refused is None
    assert pg.value("select count(*) from pg_tables where schemaname = 'mill \"own\"'") == len(
        await own_tables(database)
    )
    await database.close()


async def test_a_role_that_may_not_create_is_told_so_and_can_use_what_is_there(pg: Db) -> None:
    pg.execute("revoke create on schema public from public; create role lowly_steps login")
    try:
        low = Database.open(pg.url.replace("postgres:", "lowly_steps:", 1))
        own = await schema.ensure(low)
        assert own.refused is not None
        assert "permission denied" in own.refused
        assert not own.has(schema.WORKERS)
        high = Database.open(pg.url)
        await schema.ensure(high)
        pg.execute("grant select, insert, update, delete on rowmill_workers, rowmill_schema to lowly_steps")
        assert (await schema.ensure(low)).has(schema.WORKERS)
        await low.close()
        await high.close()
    finally:
        pg.execute("drop owned by lowly_steps; drop role lowly_steps")


def test_steps_are_numbered_without_gaps() -> None:
    assert [step.number for step in schema.STEPS] == list(range(1, len(schema.STEPS) + 1))
    with pytest.raises(AttributeError):
        schema.STEPS[0].number = 2  # type: ignore[misc]
