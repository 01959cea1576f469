"""Functions of a lane with inputs: an end is final only if the row is still what the caller worked from."""

from __future__ import annotations

from datetime import timedelta as td
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databases import Db, Row
from golden import compare
from rowmill import Breaker, Concurrency, Mill, fixed
from rowmill.errors import DeclarationError
from rowmill.testing import Kit
from rows import empty
from sqlworker import Functions, installed

STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


@pytest.fixture
def pg(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty PostgreSQL database."""
    return empty(request, tmp_path, "postgresql")


async def handle(job: Any) -> None:
    return None


def declared(db: Db, key: str = "id integer primary key", more: str = "", **options: Any) -> Mill:
    db.execute(
        f"create table jobs ({key}, status text default 'ready', worker text, claimed_at timestamptz,"
        f" attempts integer not null default 0, error text, url text, body text, result text{more})"
    )
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", backoff=fixed(td(0)),
              **{**STATES, "inputs": ["url", "body"], "max_attempts": 3, **options})(handle)  # fmt: skip
    return mill


def claimed(functions: Functions) -> tuple[Row, str]:
    """A claim, and the inputs as they were claimed: one query, as the notes of the functions say."""
    (row,) = functions.db.query(
        f"select c.*, {functions.full('inputs')}(c) as inputs from {functions.full('claim')}('w') c"
    )
    return row, row["inputs"]


def left(db: Db) -> tuple[Any, ...]:
    row = db.one("select * from jobs")
    return row["status"], row["worker"], row["attempts"], row["result"], row["error"]


async def test_complete_is_final_only_with_the_inputs_that_were_claimed(pg: Db) -> None:
    functions = await installed(pg, declared(pg))
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    row, inputs = claimed(functions)
    pg.execute("update jobs set body = 'new'")
    assert functions.settle("complete", row, inputs=inputs, result={"result": "old"}) is False
    assert left(pg) == ("ready", None, 0, None, None)
    assert pg.one("select lane, row_id, runs from rowmill_stale_runs") == {"lane": "jobs", "row_id": "1", "runs": 1}
    row, inputs = claimed(functions)
    assert row["body"] == "new"
    assert functions.settle("complete", row, inputs=inputs, result={"result": "new"}) is True
    assert left(pg) == ("done", "w", 1, "new", None)
    assert pg.query("select * from rowmill_stale_runs") == []


@pytest.mark.parametrize("result", [{"result": "partial"}, {}, None])
async def test_what_complete_was_given_is_written_if_the_lane_says_so(pg: Db, result: Any) -> None:
    functions = await installed(pg, declared(pg, stale="write"))
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    row, inputs = claimed(functions)
    pg.execute("update jobs set url = null")
    assert functions.settle("complete", row, inputs=inputs, result=result) is False
    assert left(pg) == ("ready", None, 0, (result or {}).get("result"), None)
    row, inputs = claimed(functions)
    assert functions.settle("complete", row, inputs=inputs, result=result) is True
    assert left(pg)[0] == "done"


async def test_a_death_is_not_final_and_a_retry_goes_its_own_way(pg: Db) -> None:
    functions = await installed(pg, declared(pg, max_attempts=2))
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    ends = []
    for edited, permanent in ((True, False), (True, False), (False, True), (True, True)):
        if left(pg)[0] != "ready":
            break
        row, inputs = claimed(functions)
        if edited:
            pg.execute("update jobs set body = body || '+'")
        ends.append(functions.settle("fail", row, inputs=inputs, error="boom", permanent=permanent))
    assert ends == ["retry", "stale", "dead"]
    assert left(pg) == ("dead", "w", 2, None, "boom")
    assert pg.query("select * from rowmill_stale_runs") == []


async def test_the_bound_holds_for_functions_and_workers_together(pg: Db) -> None:
    """Runs of a row whose inputs changed are counted, no matter which worker ran them."""
    mill = declared(pg, settle_after=2)
    functions = await installed(pg, mill)
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        pg.execute("update jobs set body = '1'")
        assert (await kit.settle(claim)).written[0].kind == "stale"
    for n, final in ((2, False), (3, True)):
        row, inputs = claimed(functions)
        pg.execute("update jobs set body = ?", str(n))
        assert functions.settle("complete", row, inputs=inputs, result={"result": "x"}) is final
    assert left(pg) == ("done", "w", 1, "x", None)


async def test_without_a_bound_there_is_no_table(pg: Db) -> None:
    functions = await installed(pg, declared(pg, settle_after=None, stale="write"))
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    for n in range(3):
        row, inputs = claimed(functions)
        pg.execute("update jobs set body = ?", str(n))
        assert functions.settle("complete", row, inputs=inputs, result={"result": str(n)}) is False
    assert left(pg) == ("ready", None, 0, "2", None)
    row, inputs = claimed(functions)
    assert functions.settle("fail", row, inputs=inputs, permanent=True) == "dead"


async def test_composite_keys_and_strange_names(pg: Db) -> None:
    mill = declared(pg, 'inputs text, "Number" integer', ', primary key (inputs, "Number"), "Begin" text',
                    inputs=["Begin", "body"])  # fmt: skip
    functions = await installed(pg, mill)
    pg.execute("insert into jobs (inputs, \"Number\", \"Begin\") values ('a,b', 1, 'x')")
    for edited, answer in ((True, False), (False, True)):
        (row,) = pg.query(f"select c.*, {functions.full('inputs')}(c) as seen from {functions.full('claim')}('w') c")
        if edited:
            pg.execute('update jobs set "Begin" = null')
        held = {"key_inputs": row["inputs"], "Number": row["Number"], "worker": "w", "claimed_at": row["claimed_at"],
                "attempts": row["attempts"]}  # fmt: skip
        (found,) = functions.call("complete", **held, inputs=row["seen"])
        assert next(iter(found.values())) is answer


@pytest.mark.parametrize(
    "gates", [[Concurrency(1, by="url")], [Concurrency(1, by="url"), Breaker(2, td(minutes=1), by="url")]]
)
async def test_gates_learn_that_the_run_went_well(pg: Db, gates: Any) -> None:
    mill = declared(pg, gates=gates, inputs=["body"])
    functions = await installed(pg, mill)
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    row, inputs = claimed(functions)
    pg.execute("update jobs set body = 'new'")
    assert functions.settle("complete", row, inputs=inputs) is False
    row, inputs = claimed(functions)
    assert functions.settle("fail", row, inputs=inputs, permanent=True) == "dead"


async def test_an_end_that_names_no_inputs_is_refused(pg: Db) -> None:
    functions = await installed(pg, declared(pg))
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    row, inputs = claimed(functions)
    for verb in ("complete", "fail"):
        with pytest.raises(asyncpg.PostgresError, match="needs inputs"):
            functions.settle(verb, row, inputs=None)
    with pytest.raises(asyncpg.PostgresError, match="columns that it may not set: url"):
        functions.settle("complete", row, inputs=inputs, result={"url": "mine"})


async def test_a_claim_that_was_lost_writes_nothing(pg: Db) -> None:
    functions = await installed(pg, declared(pg))
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    row, inputs = claimed(functions)
    pg.execute("update jobs set status = 'ready', worker = null, body = 'new'")
    assert functions.settle("complete", row, inputs=inputs) is False
    assert functions.settle("fail", row, inputs=inputs) is None
    assert pg.query("select * from rowmill_stale_runs") == []


async def test_release_and_heartbeat_need_no_inputs(pg: Db) -> None:
    functions = await installed(pg, declared(pg, more=", heartbeat_at timestamptz"))
    pg.execute("insert into jobs (id, url, body) values (1, 'u', 'b')")
    row, _ = claimed(functions)
    pg.execute("update jobs set body = 'new'")
    assert functions.settle("heartbeat", row) is True
    assert functions.settle("release", row) is True


async def test_the_functions_are_those_that_were_reviewed(pg: Db) -> None:
    """Kept as a file to be read; UPDATE_GOLDEN=1 writes it."""
    functions = (await installed(pg, declared(pg, stale="write"))).functions.values()
    text = "\n\n".join(f"-- {function.verb}\n{function.sql};" for function in functions) + "\n"
    compare(Path(__file__).parents[1] / "golden_functions" / "inputs.sql", text)


async def test_a_lane_without_inputs_has_no_such_function(pg: Db) -> None:
    mill = declared(pg, inputs=[])
    assert "inputs" not in (await installed(pg, mill)).functions
    with pytest.raises(DeclarationError, match="has no inputs, so it has no function"):
        await installed(pg, mill, names={"inputs": "seen"})
