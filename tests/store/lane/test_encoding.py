"""A database that is not in UTF-8: error texts are written as far as it can hold them, values as they are or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from databases import Db, Server
from rowmill import Mill
from rowmill.testing import Kit
from rows import whole

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


def table(db: Db, columns: str) -> None:
    kept = "id integer primary key, status text not null default 'ready', worker text, attempts integer default 0"
    db.execute(f"create table jobs ({kept}, {columns}, claimed_at timestamptz, error text)")
    db.execute("insert into jobs (id) values (1)")


async def _run(db: Db, handler: Any) -> dict[str, Any]:
    mill = Mill(db.url)
    mill.lane("jobs", name="pages", **STATES, max_attempts=3)(handler)
    async with Kit(mill) as kit:
        assert await kit.step() is not None
    return whole(db, "jobs", 1)


@pytest.fixture
def latin(server: Server) -> Iterator[Db]:
    """A PostgreSQL database that holds Western European text only."""
    url = server.create_database("latin")
    server.drop("latin")
    server._admin("create database latin encoding 'LATIN1' locale 'C' template template0")
    yield Db(url)
    server.drop("latin")


async def test_text_that_the_database_cannot_hold_fails_its_run_with_the_columns_name(latin: Db) -> None:
    table(latin, "title text, info jsonb")

    async def pages(job: Any) -> Any:
        return {"title": "café \U0001f600"}

    row = await _run(latin, pages)
    assert (row["status"], row["title"]) == ("dead", None)
    assert "column 'title': the text has the character '\\U0001f600' at position 5" in row["error"]
    assert "iso8859-1" in row["error"]
    latin.execute("update jobs set status = 'ready', attempts = 0")

    async def fits(job: Any) -> Any:
        return {"title": "café", "info": {"a": "é"}}

    assert (await _run(latin, fits))["title"] == "café"


async def test_an_error_is_written_as_far_as_the_database_can_hold_it(latin: Db) -> None:
    """Wherever a failure is told: in the row, among the failures, in a task's history."""
    table(latin, "progress text")
    mill = Mill(latin.url)

    @mill.lane("jobs", **STATES, max_attempts=1)
    async def pages(job: Any) -> None:
        await job.progress(1, "page \U0001f600")
        raise ValueError("é \U0001f600" + "x" * 5000)

    @mill.task(max_attempts=1)
    async def send() -> None:
        raise ValueError("é \U0001f600")

    handle = await send.enqueue()
    await mill.worker(drain=True).run()
    row, status = whole(latin, "jobs", 1), await handle.status()
    await mill.close()
    assert row["progress"] == "100% page ?"
    assert row["error"].startswith("ValueError: é ?xxx")
    assert status is not None
    assert (status.state, status.error) == ("dead", "ValueError: é ?")
    assert "é ?" in status.history[0]["traceback"]
    failures = latin.query("select message, traceback from rowmill_failures order by lane")
    assert [failure["message"][:17] for failure in failures] == ["ValueError: é ?", "ValueError: é ?xx"]
    assert all(failure["traceback"] for failure in failures)
