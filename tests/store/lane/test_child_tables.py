"""Tables that get children while workers run: a row's place repeats in each child, and only the row itself is taken."""

from __future__ import annotations

from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import Concurrency, Mill, Rate
from rowmill.testing import Kit

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
GATES: dict[str, list[Any]] = {
    "no gate": [],
    "a limit by key": [Concurrency(100, by="site")],
    "a rate by key": [Rate(1000, by="site")],
    "in all": [Concurrency(100)],
}


def made(pg: Db, gates: str) -> tuple[Mill, list[int]]:
    pg.execute(
        "create table jobs (id int primary key, site text default 'a', status text default 'ready', worker text,"
        " claimed_at timestamptz, attempts int default 0, error text)"
    )
    mill, ran = Mill(pg.url), list[int]()

    @mill.lane("jobs", name="jobs", max_attempts=3, lease=td(minutes=5), gates=GATES[gates], **STATES)
    async def handle(job: Any) -> None:
        ran.append(job.id)

    return mill, ran


@pytest.mark.parametrize("gates", list(GATES))
async def test_finished_rows_of_a_child_are_not_run_again(pg: Db, gates: str) -> None:
    mill, ran = made(pg, gates)
    async with Kit(mill) as kit:
        await kit.store()  # bound while the table has no children
        pg.execute("insert into jobs (id) select generate_series(1, 20)")
        pg.execute("create table later (primary key (id)) inherits (jobs)")
        pg.execute("insert into later (id, status) select i, case when i > 1030 then 'ready' else 'done' end"
                   " from generate_series(1001, 1040) i")  # fmt: skip
        claims = await kit.claim(count=100)
        while more := await kit.claim(count=100):
            claims += more
        assert sorted(claim.id for claim in claims) == [*range(1, 21), *range(1031, 1041)]
        assert pg.value("select count(*) from jobs where status = 'done' and attempts = 0") == 30
        pg.execute("update jobs set claimed_at = claimed_at - interval '1 hour' where id % 2 = 0")
        assert sorted(row.id for row in await kit.sweep()) == [
            id for id in range(1, 1041) if id % 2 == 0 and (id < 21 or id > 1030)
        ]
        for claim in claims:
            await kit.run(claim)
    odd = [*range(1, 21, 2), *range(1031, 1041, 2)]
    assert [
        row["id"] for row in pg.query("select id from jobs where status = 'done' and attempts > 0 order by id")
    ] == odd
    assert len(ran) == 30
