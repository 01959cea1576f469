"""The test kit does not work on a database that may be production's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta as td
from pathlib import Path

import pytest

import systems
from databases import Db
from farm import JOBS
from rowmill import Concurrency, Job, Mill, RowmillError, fixed
from rowmill.testing import Kit, is_test_database
from workers import STATES, jobs


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////srv/app/jobs_test.db",
        "sqlite:////srv/app/test.db",
        "sqlite:////srv/test_of_mine0/jobs.db",
        "sqlite:///tests/jobs.db",
        "sqlite:////tmp/jobs.db",
        "sqlite:///MyTests.sqlite",
        "postgresql://u:p@db.example/app_test",
        "postgresql://u:p@db.example/test12?sslmode=require",
        "postgres://u:p@db.example/scratch",
        "postgresql://db.example/testdb",
        "postgresql:///jobs?host=/tmp/server-1",
        "postgresql://u@%2Ftmp%2Fserver-1/jobs",
    ],
)
def test_a_tests_database_is_recognised(url: str) -> None:
    assert is_test_database(url)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////srv/app/links.db",
        "sqlite:////srv/app/latest.db",
        "sqlite:////srv/test/data/links.db",
        "sqlite:////srv/app/contest.db",
        "sqlite:////srv/app/testimonials.db",
        "postgresql://u:p@db.example/app",
        "postgresql://u:p@localhost/app",
        "postgresql://test:test@test.example/app",
        "postgresql://db.example",
        "postgresql:///jobs?host=/tmp",
        "postgresql:///jobs?host=/var/run/postgresql",
    ],
)
def test_any_other_is_not(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's name in the server or the role says nothing, nor does localhost: that may be a tunnel. Nor does the
    folder that one happens to work in.
    """
    monkeypatch.chdir(tmp_path)
    assert not is_test_database(url)


async def _nothing(_job: Job) -> None: ...


@pytest.fixture
def production(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing here were temporary, or named as a test's."""
    monkeypatch.setattr("rowmill.testing.is_test_database", lambda url: False)


@pytest.mark.usefixtures("production")
async def test_a_kit_refuses_the_mills_own_database_and_says_how_to_go_on(db: Db) -> None:
    jobs(db, 3)
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", gates=[Concurrency(1)], **STATES)(_nothing)
    before = db.query("select * from jobs order by id")
    async with Kit(mill) as kit:
        calls = [kit.drain, kit.step, kit.claim, kit.sweep, kit.tick, lambda: kit.execute("delete from jobs")]
        for call in calls:
            with pytest.raises(RowmillError, match="does not look like a test database") as refused:
                await call()
            assert all(words in str(refused.value) for words in ("copy=True", "environments=url", "real=True"))
    assert db.query("select * from jobs order by id") == before
    names = "sqlite_master where name" if db.dialect == "sqlite" else "pg_tables where tablename"
    assert db.query(f"select * from {names} like 'rowmill_%'") == [], "not even a table of rowmill's own"
    async with Kit(mill, real=True) as kit:
        assert (await kit.drain()).completed == 3
    await mill.close()


@pytest.mark.no_pooler("a copy of the tables needs sessions of its own")
@pytest.mark.usefixtures("production")
async def test_a_kit_on_a_copy_leaves_the_mills_own_database_alone(db: Db) -> None:
    """The same tables, without their rows; afterwards the mill is where it was, and its time is right again."""
    jobs(db, 3)
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", **STATES, max_attempts=2, backoff=fixed(td(minutes=1)))(_nothing)

    @mill.task
    async def send(to: str) -> None: ...

    async with Kit(mill, copy=True) as kit:
        assert await kit.step("jobs") is None, "no rows are copied"
        await kit.execute("insert into jobs (id, note) values (7, :note)", note="mine")
        (claim,) = await kit.claim("jobs")
        await kit.settle(claim, TimeoutError("no answer"))
        kit.advance(td(minutes=2))
        await send.enqueue(to="a")
        assert (await kit.drain()).completed == 2
        assert [tuple(row) for row in await kit.execute("select id, status, note from jobs")] == [(7, "done", "mine")]
        copy = mill.environments["default"]
    assert mill.environments == {"default": db.url}
    assert copy != db.url
    assert not mill.clock.shift
    assert db.query("select distinct status, worker from jobs") == [{"status": "queued", "worker": None}]
    if db.dialect == "sqlite":
        assert db.query("select name from sqlite_master where name like 'rowmill%'") == []
    else:
        names = db.query("select datname from pg_database where datname like 'rowmill_%'")
        assert names == [], "the copy is removed"
    await mill.close()


async def test_a_copy_is_made_of_every_environment(fresh: Callable[[str], Db]) -> None:
    first, second = fresh("sqlite"), fresh("sqlite")
    for db in (first, second):
        systems.create(db, "enrichment")
        systems.insert_enrichment(db, 1)
    mill = Mill({"prod": first.url, "staging": second.url})
    systems.enrichment(mill, _nothing)
    async with Kit(mill, copy=True) as kit:
        assert await kit.step(environment="prod") is None
        assert await kit.step(environment="staging") is None


async def test_one_word_says_where_a_kit_works(lite: Db) -> None:
    with pytest.raises(RowmillError, match="one of"):
        Kit(Mill(lite.url), copy=True, real=True)
    lite.execute(JOBS["sqlite"])
    mill = Mill("sqlite:////srv/production.db")
    mill.lane("jobs", name="jobs", **STATES)(_nothing)
    async with Kit(mill, environments=lite.url) as kit:
        assert await kit.step() is None


async def test_a_copy_of_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    mill = Mill(f"sqlite:///{tmp_path}/nothing.db")
    mill.lane("jobs", name="jobs", **STATES)(_nothing)
    with pytest.raises(RowmillError, match="there is no file"):
        async with Kit(mill, copy=True):
            pass
