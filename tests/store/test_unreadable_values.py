"""A value that Python cannot hold costs the one run that asks for it, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from databases import Db
from rowmill import Concurrency, Mill, Rate
from rowmill.ops.directory import LaneDirectory
from rowmill.ops.questions import why
from rowmill.store.inspect.lane_view import view_lane
from rowmill.testing import Kit

#: A column's type, and a value of it that no Python type takes.
VALUES = {
    "a year of five digits": ("timestamptz", "'10000-01-01 00:00+00'"),
    "a time without a zone": ("timestamp", "'294275-12-31'"),
    "a date BC": ("date", "'0044-03-15 BC'"),
    "midnight as 24:00": ("time", "'24:00'"),
    "midnight with a zone": ("timetz", "'24:00+02'"),
    "an interval of ages": ("interval", "'170000000 years'"),
    "a list of times": ("timestamptz[]", "array['10000-01-01'::timestamptz]"),
    "5,000 digits": ("jsonb", "('[' || repeat('9', 5000) || ']')::jsonb"),
    "1,500 levels": ("jsonb", "(repeat('[', 1500) || repeat(']', 1500))::jsonb"),
}
STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
GATES: dict[str, list[Any]] = {
    "no gate": [],
    "a limit by key": [Concurrency(40, by="site")],
    "a rate": [Rate(1000, by="site"), Concurrency(50)],
}


def bad_row(db: Db, kind: str, *, worker: bool = True) -> None:
    """30 good rows, and one among them that holds such a value."""
    column, value = VALUES[kind]
    holder = "worker text," if worker else ""
    db.execute(
        f"create table jobs (id int primary key, site text default 'a', status text default 'ready', {holder}"
        " claimed_at timestamptz, heartbeat_at timestamptz, attempts int default 0, reclaims int default 0,"
        f" error text, seen {column});"
        f" insert into jobs (id) select i from generate_series(1, 31) i; update jobs set seen = {value} where id = 7"
    )


async def ask(job: Any) -> None:
    job["seen"]


def drainer(db: Db, **options: Any) -> Mill:
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", max_attempts=3, **STATES, **options)(ask)
    return mill


def states(db: Db) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in db.query("select id, status from jobs order by id"):
        found.setdefault(row["status"], []).append(row["id"])
    return found


@pytest.mark.parametrize("kind", VALUES)
async def test_the_neighbours_are_done_and_the_row_says_which_column_it_was(pg: Db, kind: str) -> None:
    bad_row(pg, kind)
    await drainer(pg).worker(drain=True).run()
    assert states(pg) == {"done": [i for i in range(1, 32) if i != 7], "dead": [7]}
    row = pg.one("select attempts, reclaims, error from jobs where id = 7")
    assert (row["attempts"], row["reclaims"]) == (1, 0)
    assert "column 'seen'" in row["error"]
    assert "Try: " in row["error"]
    assert pg.value("select max(attempts) + max(reclaims) from jobs") == 1  # nobody was taken back


@pytest.mark.parametrize("gates", list(GATES))
@pytest.mark.parametrize("worker", [True, False], ids=["marked", "without a worker column"])
async def test_whatever_the_claim(pg: Db, gates: str, worker: bool) -> None:
    bad_row(pg, "a year of five digits", worker=worker)
    await drainer(pg, gates=GATES[gates]).worker(drain=True).run()
    assert states(pg) == {"done": [i for i in range(1, 32) if i != 7], "dead": [7]}
    assert pg.value("select max(attempts) + max(reclaims) from jobs") == 1


async def test_a_handler_that_does_not_ask_is_not_bothered(pg: Db) -> None:
    bad_row(pg, "a year of five digits")
    mill = Mill(pg.url)

    @mill.lane("jobs", name="jobs", max_attempts=3, **STATES)
    async def ignore(job: Any) -> None: ...

    await mill.worker(drain=True).run()
    assert list(states(pg)) == ["done"]


async def test_the_order_the_key_and_the_next_claims_may_be_unreadable(pg: Db) -> None:
    """The claim remembers where it was in the order; the outcome finds its row by the key."""
    pg.execute(
        "create table jobs (day date primary key, status text default 'ready', worker text, claimed_at timestamptz,"
        " created_at timestamptz, error text, seen text);"
        " insert into jobs"
        " select date '0044-03-15 BC' + i, 'ready', null, null, timestamptz '10000-01-01' + i * interval '1 day'"
        " from generate_series(1, 50) i"
    )
    mill = Mill(pg.url)

    @mill.lane("jobs", name="jobs", batch=10, **STATES)
    async def handle(job: Any) -> dict[str, str]:
        return {"seen": "yes"} if hash(job["status"]) % 2 else {}

    await mill.worker(drain=True).run()
    assert pg.value("select count(*) from jobs where status = 'done'") == 50


async def test_a_job_enqueued_for_the_year_10000_holds_up_no_other(pg: Db) -> None:
    mill = Mill(pg.url)
    done: list[int] = []

    @mill.task
    async def note(n: int) -> None:
        done.append(n)

    await note.enqueue_many([{"n": n} for n in range(20)])
    pg.execute("update rowmill_jobs set created_at = '10000-01-01' where id = (select min(id) + 5 from rowmill_jobs)")
    await mill.worker(drain=True).run()
    assert sorted(done) == list(range(20))
    await mill.close()


@pytest.mark.parametrize("column", ["args", "history"])
async def test_json_of_a_job_that_is_too_deep_ends_that_job_alone(db: Db, column: str) -> None:
    mill = Mill(db.url)
    done: list[Any] = []

    @mill.task(max_attempts=1)
    async def note(n: Any) -> None:
        done.append(n)
        if n == 5:
            raise ValueError

    await note.enqueue_many([{"n": n} for n in range(20)])
    value = "[" * 1500 + "]" * 1500
    deep = f'{{"n": {value}}}' if column == "args" else value
    db.execute(f"update rowmill_jobs set {column} = '{deep}' where id = (select min(id) + 5 from rowmill_jobs)")
    tally = await mill.worker(drain=True).run()
    assert (tally.completed, tally.died) == (19, 1)
    await mill.close()


@pytest.mark.parametrize("kind", VALUES)
async def test_looking_shows_what_the_database_says(pg: Db, kind: str) -> None:
    """`why`, lists and rows: the value is shown as text."""
    bad_row(pg, kind)
    mill = drainer(pg)
    for name, database in mill.databases():
        view = await view_lane(mill.lanes["jobs"], name, database, mill.clock)
        (row,) = await view.find([(7,)])
        shown = str(row.values["seen"])
        assert shown[:5] in ("10000", "29427", "0044-", "24:00", "20400", "[1000", "[9999", "[[[[["), shown
        assert len(await view.rows("ready", 50)) == 31
        await database.close()
    async with LaneDirectory(mill) as directory:
        assert (await why(directory, "default", "jobs", "7"))["state"]


async def test_text_that_is_not_utf_8(lite: Db) -> None:
    """SQLite keeps any bytes as text."""
    lite.execute(
        "create table jobs (id integer primary key, status text default 'ready', worker text, claimed_at datetime,"
        " attempts integer default 0, reclaims integer default 0, error text, seen text)"
    )
    lite.insert("jobs", [{"id": i} for i in range(1, 32)])
    lite.execute("update jobs set seen = cast(x'ff41' as text) where id = 7")
    await drainer(lite).worker(drain=True).run()
    assert states(lite) == {"done": [i for i in range(1, 32) if i != 7], "dead": [7]}
    assert "column 'seen'" in lite.value("select error from jobs where id = 7")


@pytest.mark.parametrize("value", ["[" * 1500 + "]" * 1500, f"[{'9' * 5000}]"], ids=["levels", "digits"])
async def test_json_in_sqlite_that_says_too_much(lite: Db, value: str) -> None:
    lite.execute(
        "create table jobs (id integer primary key, status text default 'ready', worker text, claimed_at datetime,"
        " attempts integer default 0, error text, seen json)"
    )
    lite.insert("jobs", [{"id": i, "seen": value if i == 7 else "not json"} for i in range(1, 32)])
    await drainer(lite).worker(drain=True).run()
    assert states(lite) == {"done": [i for i in range(1, 32) if i != 7], "dead": [7]}
    assert "column 'seen'" in lite.value("select error from jobs where id = 7")


async def test_a_kit_steps_over_it(pg: Db) -> None:
    bad_row(pg, "a year of five digits")
    async with Kit(drainer(pg)) as kit:
        stepped = [await kit.step() for _ in range(31)]
        assert [one.outcome for one in stepped if one].count("done") == 30
        assert await kit.step() is None


async def test_beside_a_row_that_may_not_be_claimed(pg: Db) -> None:
    bad_row(pg, "a year of five digits")
    pg.execute("alter table jobs add check (id <> 3) not valid")
    await drainer(pg).worker(drain=True).run()
    assert states(pg) == {"done": [i for i in range(1, 32) if i not in (3, 7)], "dead": [7], "ready": [3]}


async def test_rows_that_were_found_again_after_a_lost_reply(pg: Db) -> None:
    bad_row(pg, "a year of five digits")
    async with Kit(drainer(pg)) as kit:
        store = await kit.store()
        pg.execute("update jobs set status = 'running', worker = ?, claimed_at = now(), attempts = 1", store.worker)
        outcomes = [(await kit.run(claim)).outcome for claim in await store.mine()]
    assert sorted(outcomes) == ["dead", *["done"] * 30]
