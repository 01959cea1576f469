"""check asks the database about every statement of a lane; on Citus also whether each stays on one node.

No Citus can be installed here: a schema with look-alikes of its catalogs takes its place, and plans are texts as Citus
13.2 gives them.
"""

from __future__ import annotations

from typing import Any

import pytest

from databases import Db
from rowmill import Concurrency, Mill
from rowmill.ops.check import check_mill
from rowmill.store import Database
from rowmill.store.inspect import distribution, plans
from rowmill.store.own import schema

STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
ONE_TASK = """Custom Scan (Citus Adaptive)  (cost=0.00..0.00 rows=0 width=0)
  Task Count: 1
  Tasks Shown: All
  ->  Task
        Node: host=10.0.0.2 port=5432 dbname=app
        ->  Update on jobs_102008 t"""
SEVERAL_STEPS = """Custom Scan (Citus Adaptive)  (cost=0.00..0.00 rows=0 width=0)
  ->  Distributed Subplan 4_1
        ->  Custom Scan (Citus Adaptive)  (cost=0.00..0.00 rows=100000 width=16)
              Task Count: 32
  Task Count: 1"""
_STAND_IN = """
create schema standin;
create view standin.pg_extension as select 'citus'::name as extname;
create table standin.pg_dist_partition (
  logicalrelid regclass, partmethod "char", partkey text, colocationid int, repmodel "char");
create function standin.column_to_column_name(regclass, text) returns text language sql as 'select $2';
"""


async def handle(job: Any) -> None:
    return None


def make(db: Db, more: str = "") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table jobs (tenant_id integer default 7, id integer primary key, status text, worker text,"
        f" claimed_at {time}, heartbeat_at {time}, run_after {time}, attempts integer, error text, site text{more})"
    )


def stand_in(pg: Db, *tables: tuple[str, str, str | None, int, str]) -> None:
    """Catalogs as Citus has them: name, method, column, colocation, replication."""
    pg.execute(_STAND_IN)
    for row in tables:
        values = '?::text::regclass, ?::text::"char", ?, ?, ?::text::"char"'
        pg.execute(f"insert into standin.pg_dist_partition values ({values})", *row)
    now = pg.one("select current_database() as name, current_setting('search_path') as path")
    pg.execute(f'alter database "{now["name"]}" set search_path = standin, {now["path"]}, pg_catalog')


async def errors(db: Db, **options: Any) -> dict[str, tuple[str, str]]:
    """What check calls errors of a lane, by code."""
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", **STATES | options)(handle)
    checked, _ = await check_mill(mill)
    return {
        finding.code: (finding.text, finding.hint or "")
        for each in checked
        for finding in each.findings
        if finding.level == "error"
    }


async def test_every_statement_is_asked_for_and_nothing_is_written(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    make(db)
    db.execute("insert into jobs (id, status) values (1, 'ready')")
    asked: list[str] = []
    before = plans.generic
    monkeypatch.setattr(
        plans, "generic", lambda run, statements, text: asked.append(text) or before(run, statements, text)
    )
    assert await errors(db, gates=[Concurrency(2, by="site")], shard={"tenant_id": [7, 8]}) == {}
    words = "\n".join(asked)
    assert len(asked) > 15
    for part in ("'done'", "'dead'", "heartbeat_at = ", "limit", "exists (", "count(*)", "rowmill_waits"):
        assert part in words
    assert [(row["status"], row["worker"]) for row in db.query("select * from jobs")] == [("ready", None)]


async def test_a_statement_that_the_database_refuses_is_an_error_with_its_name(db: Db) -> None:
    """A generated column in a state: the claim is accepted, and its end refused."""
    make(db, ", label text generated always as ('x') stored")
    found = await errors(db, done={"status": "done", "label": "x"})
    text, hint = found["statement_refused"]
    assert text.startswith("the database refuses the statement 'settle, done'")
    assert "label" in text
    assert "rowmill sql jobs" in hint


async def test_on_citus_a_distributed_table_needs_its_shard(pg: Db) -> None:
    make(pg)
    stand_in(pg, ("jobs", "h", "tenant_id", 3, "s"))
    text, hint = (await errors(pg))["unpinned"]
    assert "distributed by tenant_id" in text
    assert hint == 'shard={"tenant_id": ...}'


async def test_on_citus_a_reference_table_is_refused(pg: Db) -> None:
    make(pg)
    stand_in(pg, ("jobs", "n", None, 2, "t"))
    text, hint = (await errors(pg))["reference_table"]
    assert "reference table" in text
    assert "distributed schema" in hint


@pytest.mark.parametrize("there", ["elsewhere", "local", "beside"])
async def test_on_citus_gates_are_beside_the_table(pg: Db, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(pg)
    database = Database.open(pg.url)
    await schema.ensure(database)
    await database.close()
    beside = [("rowmill_gates", "n", None, 5, "s")]
    gates = {"elsewhere": [("rowmill_gates", "n", None, 6, "s")], "local": [], "beside": beside}[there]
    stand_in(pg, ("jobs", "n", None, 5, "s"), *gates)
    monkeypatch.setattr(plans, "generic", lambda run, statements, text: ONE_TASK)
    found = await errors(pg, gates=[Concurrency(2, by="site")])
    if there == "beside":
        assert found == {}
        return
    text, hint = found["own_tables_elsewhere"]
    assert "rowmill_gates" in text
    assert hint.startswith("Mill(schema=")


async def test_on_citus_a_statement_in_several_steps_is_refused(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    make(pg)
    stand_in(pg, ("jobs", "h", "tenant_id", 3, "s"))
    monkeypatch.setattr(
        plans, "generic", lambda run, statements, text: SEVERAL_STEPS if "'running'" in text else ONE_TASK
    )
    text, _ = (await errors(pg, shard={"tenant_id": 7}))["many_tasks"]
    assert "does not stay on one node: Citus would run it in several steps" in text


async def test_on_citus_a_local_table_is_as_on_postgresql(pg: Db) -> None:
    make(pg)
    stand_in(pg)
    assert await errors(pg) == {}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (ONE_TASK, None),
        (ONE_TASK.replace("Count: 1", "Count: 32"), "as 32 tasks"),
        (SEVERAL_STEPS, "several steps"),
        ("Update on jobs  (cost=0.00..1.00 rows=0 width=0)", "outside of the table's nodes"),
    ],
)
def test_a_plan_says_whether_it_is_one_task(plan: str, words: str | None) -> None:
    found = distribution.many_tasks(plan)
    assert found is None if words is None else words in (found or "")


async def test_on_citus_waits_that_do_not_work_are_a_warning(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a handler that waits needs them."""
    make(pg)
    stand_in(pg, ("jobs", "h", "tenant_id", 3, "s"))
    waits = "rowmill_waits"
    monkeypatch.setattr(plans, "generic", lambda run, statements, text: SEVERAL_STEPS if waits in text else ONE_TASK)
    assert await errors(pg, shard={"tenant_id": 7}) == {}
