"""A queue is a lane: its plans, its processes, its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from databases import Db
from rowmill import Mill
from rowmill.testing import Kit

APP = """
import os
from rowmill import Mill

mill = Mill(os.environ["DATABASE"])

@mill.resource
def prefix():
    return "pid"

@mill.task(isolation="process", concurrency=1)
def crunch(n: int, prefix: str) -> dict:
    return {prefix: os.getpid(), "n": n}

@mill.task(max_attempts=1)
async def fail(n: int) -> None:
    raise ValueError(n)

if __name__ == "__main__":
    crunch.enqueue_sync(5)
    fail.enqueue_sync(1)
    mill.run(drain=True)
    print(os.getpid())
"""


def test_an_isolated_task_runs_in_a_process_of_its_own_and_commands_show_queues(db: Db, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    environment = {**os.environ, "DATABASE": db.url, "COLUMNS": "160"}

    def run(*command: str) -> str:
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        return result.stdout

    parent = int(run(sys.executable, "app.py").splitlines()[-1])
    result = json.loads(db.value("select result from rowmill_jobs where task = 'crunch'"))
    assert result["n"] == 5
    assert result["pid"] != parent
    rowmill = str(Path(sys.executable).parent / "rowmill")
    status = json.loads(run(rowmill, "status", "app:mill", "--json"))
    text = json.dumps(status)
    assert '"crunch"' in text
    assert '"default"' in text
    assert "ValueError: 1" in run(rowmill, "jobs", "app:mill", "--lane", "default")
    run(rowmill, "retry", "app:mill", "--lane", "default", "--state", "dead", "--yes")
    assert db.value("select state from rowmill_jobs where task = 'fail'") == "ready"


async def test_the_claim_walks_the_index_of_claimable_rows_alone(db: Db) -> None:
    """However many jobs have ended, and however many are parked for later at another priority."""
    mill = Mill(db.url)

    @mill.task
    async def note() -> None: ...

    await mill.prepare()
    if db.dialect == "postgresql":
        db.execute(
            "insert into rowmill_jobs (task, state, finished_at)"
            " select 'note', 'done', now() from generate_series(1, 20000)"
        )
        db.execute("insert into rowmill_jobs (task) select 'note' from generate_series(1, 500)")
        db.execute("analyze rowmill_jobs")
    else:
        db.execute("insert into rowmill_jobs (task) values ('note')")
    async with Kit(mill) as kit:
        store = await kit.store("default")
        if db.dialect == "postgresql":
            text = store.statements.claim().replace("$1::bigint", "10").replace("$2::text", "'w'")  # type: ignore[attr-defined]
            plan = "\n".join(next(iter(row.values())) for row in db.query(f"explain {text}"))
            assert "Index Scan using rowmill_jobs_ready" in plan
            assert "Seq Scan" not in plan
            done = store.statements.settle_done().replace("$1::bigint[]", "array[1, 2]")  # type: ignore[attr-defined]
            for mark, value in (("$2::text", "'w'"), ("$3::timestamptz", "now()"), ("$4::int", "1")):
                done = done.replace(mark, value)
            plan = "\n".join(next(iter(row.values())) for row in db.query(f"explain {done}"))
            assert "Seq Scan" not in plan
        else:
            text = store.statements.claim().replace(":count", "10").replace(":worker", "'w'")  # type: ignore[attr-defined]
            plan = str(db.query(f"explain query plan {text}"))
            assert "rowmill_jobs_ready" in plan
            assert "TEMP B-TREE" not in plan
    await mill.close()


async def test_sqlite_refuses_a_due_time_in_another_form(lite: Db) -> None:
    mill = Mill(lite.url)
    await mill.prepare()
    with pytest.raises(Exception, match="CHECK constraint failed"):
        lite.execute("insert into rowmill_jobs (task, run_after) values ('x', '2026-01-01T00:00:00Z')")
    await mill.close()
