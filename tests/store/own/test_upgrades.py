"""rowmill's own tables upgraded from every earlier form: the rows are kept, and the result is that of a fresh start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from databases import Db
from rowmill import Mill
from rowmill.store import Database
from rowmill.store.own import schema

pytestmark = pytest.mark.bare
_TABLES = {
    "postgresql": """select table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable || ' '
  || coalesce(column_default, '') as line from information_schema.columns where table_name like 'rowmill%'
union all select indexdef from pg_indexes where tablename like 'rowmill%'
union all select proname || pg_get_functiondef(oid) from pg_proc where proname like 'rowmill%'
union all select relname || coalesce(reloptions::text, '') from pg_class
where relname like 'rowmill%' and relkind = 'r' order by 1""",
    "sqlite": "select name || ' ' || coalesce(sql, '') as line from sqlite_master"
    " where name like 'rowmill%' order by 1",
}
#: Rows that an earlier version has written, by the step that makes their table.
_ROWS = {
    schema.WORKERS.number: "insert into rowmill_workers (id, incarnation, host, pid, lanes, started_at, seen_at, state)"
    " values ('old', 'a', 'h', 1, '[]', current_timestamp, current_timestamp, 'stopped')",
    schema.GATES.number: "insert into rowmill_gates (lane, dim, key) values ('l', 'd', 'k')",
    schema.JOBS.number: "insert into rowmill_jobs (task, args) values ('greet', '{\"name\": \"Ada\"}')",
}


def form(db: Db) -> list[Any]:
    """How the tables are made."""
    return [row["line"] for row in db.query(_TABLES[db.dialect])]


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_every_earlier_form_becomes_the_present_one(dialect: str, fresh: Callable[[str], Db]) -> None:
    """Issue 25, point 6: a database at step N is taken to the end, and nothing in it is lost."""
    made = fresh(dialect)
    database = Database.open(made.url)
    await schema.ensure(database)
    await database.close()
    wanted = form(made)
    for last in range(1, len(schema.STEPS)):
        db = fresh(dialect)
        database = Database.open(db.url)
        assert (await schema.ensure(database, schema.STEPS[:last])).refused is None
        written = [sql for step, sql in _ROWS.items() if step <= last]
        for sql in written:
            db.execute(sql)
        assert db.value("select count(*) from rowmill_schema") == last
        assert (await schema.ensure(database)).complete
        await database.close()
        assert form(db) == wanted, f"from step {last}"
        names = ("rowmill_workers", "rowmill_gates", "rowmill_jobs")
        tables = [name for name, step in zip(names, _ROWS, strict=True) if step <= last]
        assert sum(db.value(f"select count(*) from {name}") for name in tables) == len(written)


async def test_a_job_of_the_version_before_is_run_by_this_one(db: Db) -> None:
    """What was enqueued before the upgrade is done after it."""
    database = Database.open(db.url)
    await schema.ensure(database, schema.STEPS[: schema.CRONS.number])
    await database.close()
    db.execute(_ROWS[schema.JOBS.number])
    mill, greeted = Mill(db.url), []

    @mill.task
    async def greet(name: str) -> None:
        greeted.append(name)

    await mill.worker(drain=True).run()
    await mill.close()
    assert greeted == ["Ada"]
    assert db.value("select count(*) from rowmill_schema") == len(schema.STEPS)


async def test_tables_of_a_newer_version_are_left_alone(db: Db) -> None:
    """To go back one version is no accident: steps that this one does not know are not in its way."""
    database = Database.open(db.url)
    await schema.ensure(database)
    db.execute("insert into rowmill_schema (step, what) values (9000, 'from the future')")
    db.execute("alter table rowmill_jobs add column tomorrow text")
    assert (await schema.ensure(database)).complete
    await database.close()
    mill = Mill(db.url)

    @mill.task
    async def greet(name: str) -> str:
        return name

    handle = await greet.enqueue(name="Ada")
    await mill.worker(drain=True).run()
    assert await handle.result(timeout=60) == "Ada"
    await mill.close()
