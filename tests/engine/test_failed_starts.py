"""A start that fails leaves nothing behind: rowmill's own tables are made only where the declarations hold."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from farm import JOBS
from rowmill import Concurrency, DeclarationError, Mill

GOOD = {state: {"status": state} for state in ("queued", "running", "done", "dead")}
GOOD["ready"] = GOOD.pop("queued")
#: What is wrong with a second lane, and words of the answer.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such table": ({"table": "nowhere"}, "no table 'nowhere'"),
    "no such column": ({"done": {"stat": "done", "status": "done"}}, "no column 'stat'"),
    "a condition that is none": ({"where": "nonsense >"}, "where cannot be used"),
    "a gate on no column": ({"gates": [Concurrency(1, by="nothing")]}, "nothing"),
    "running rows that the first lane sweeps": ({"running": {"status": "running"}}, "running rows look the same"),
}


async def nothing(job: Any) -> None: ...


def mill_with(mistake: dict[str, Any], **environments: str) -> Mill:
    """A lane with a gate and a task, which need tables, and in the last environment a lane with a mistake."""
    mill = Mill(environments)
    mill.lane("jobs", name="good", **GOOD, gates=[Concurrency(1, by="note")])(nothing)
    mill.task(name="send")(nothing)
    options = GOOD | {"table": "jobs", "ready": {"status": "new"}, "running": {"status": "busy"}} | mistake
    last = list(environments)[-1]
    mill.lane(options.pop("table"), name="bad", **options, lease=td(minutes=7), environments=[last])(nothing)
    return mill


def own_tables(db: Db) -> int:
    table = "pg_tables where tablename" if db.dialect == "postgresql" else "sqlite_master where name"
    count: int = db.value(f"select count(*) from {table} like 'rowmill%'")
    return count


@pytest.mark.bare
@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_is_told_before_any_table_is_made(db: Db, mistake: str) -> None:
    """Issue 19.14"""
    db.execute(JOBS[db.dialect])
    options, words = MISTAKES[mistake]
    with pytest.raises(DeclarationError, match=words):
        await mill_with(options, default=db.url).worker(drain=True).run()
    assert own_tables(db) == 0


@pytest.mark.bare
@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_a_mistake_in_one_environment_makes_no_table_in_another(fresh: Callable[[str], Db], dialect: str) -> None:
    """Issue 19.14"""
    first, second = fresh(dialect), fresh(dialect)
    for db in (first, second):
        db.execute(JOBS[dialect])
    with pytest.raises(DeclarationError):
        await mill_with({"table": "nowhere"}, first=first.url, second=second.url).worker(drain=True).run()
    assert own_tables(first) == own_tables(second) == 0


async def test_a_good_start_makes_them(db: Db) -> None:
    db.execute(JOBS[db.dialect])
    await mill_with({}, default=db.url).worker(drain=True).run()
    assert own_tables(db) > 0
