"""100,000 rows with one call for each row beside one call for 100 rows, where a call takes 5 ms whatever its size.

Both drain the same table in one worker process, in turn. Ends with 1 where chunks are not twice as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from databases import Db, Server
from rowmill import Mill

CHUNK, CALL, LEAST = 100, 0.005, 2.0
_TABLE = (
    "create table jobs (id integer primary key, status text not null default 'ready', worker text, claimed_at {time},"
    " heartbeat_at {time}, attempts integer not null default 0, run_after {time}, error text, result integer)"
)
_STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


def prepare(db: Db) -> None:
    """The table, once."""
    db.execute(_TABLE.format(time="timestamptz" if db.dialect == "postgresql" else "datetime"))
    db.execute("create index jobs_ready on jobs (id) where status = 'ready'")


def fill(db: Db, rows: int) -> None:
    """So many ready rows, and no others."""
    db.execute("delete from jobs")
    numbers = (
        f"select n from generate_series(1, {rows}) n"
        if db.dialect == "postgresql"
        else f"with recursive t(n) as (select 1 union all select n + 1 from t where n < {rows}) select n from t"
    )
    db.execute(f"insert into jobs (id) {numbers}")


def drain(db: Db, rows: int, chunk: int | None) -> float:
    """Rows a second of one worker with 10 slots."""
    fill(db, rows)
    mill, options = Mill(db.url), {**_STATES, "name": "work", "order_by": "id", "chunk": chunk}

    async def one(job: Any) -> dict[str, int]:
        await asyncio.sleep(CALL)
        return {"result": job.id}

    async def many(jobs: list[Any]) -> list[dict[str, int]]:
        await asyncio.sleep(CALL)
        return [{"result": job.id} for job in jobs]

    mill.lane("jobs", **options)(one if chunk is None else many)
    began = time.monotonic()
    asyncio.run(mill.worker(drain=True).run())
    took = time.monotonic() - began
    right = db.value("select count(*) from jobs where status = 'done' and attempts = 1 and result = id")
    if right != rows:
        raise SystemExit(f"bench: {rows - right:,} rows are not as their handler returned them")
    return rows / took


def measure(db: Db, rows: int, rounds: int) -> float:
    """How many times as fast chunks are, round by round; the worst one."""
    prepare(db)
    worst = float("inf")
    for round_ in range(1, rounds + 1):
        single, together = drain(db, rows, None), drain(db, rows, CHUNK)
        worst = min(worst, together / single)
        print(
            f"{db.dialect}, round {round_}: one call per row {single:,.0f} rows/s, chunk={CHUNK} {together:,.0f}"
            " rows/s,"
            f" {together / single:.1f} times",
            flush=True,
        )
    return worst


def main() -> int:
    """Both databases, unless one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench.chunks", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dialect", choices=("postgresql", "sqlite"), action="append")
    given = parser.parse_args()
    ratios = []
    for dialect in given.dialect or ("postgresql", "sqlite"):
        if dialect == "postgresql":
            with Server() as server:
                ratios.append(measure(Db(server.create_database("chunks")), given.rows, given.rounds))
        else:
            with tempfile.TemporaryDirectory(prefix="rowmill-chunks-") as folder:
                ratios.append(measure(Db(f"sqlite:///{folder}/chunks.db"), given.rows, given.rounds))
    print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if min(ratios) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
