"""Behind a transaction pooler a connection is another one after every transaction.

Why processes: PgBouncer is one, and the core of the suite runs through it by a pytest of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pooler
import quick_processes
from databases import Db, Server
from farm import Farm
from rowmill import Unreachable
from rowmill.store import Database
from rowmill.store.database import Run, runner
from rowmill.store.own import schema
from rowmill.store.postgres_database import Postgres

NAMED = "select count(*) from pg_prepared_statements"


@pytest.mark.no_pooler("it compares an address without one with an address that has one")
@pytest.mark.parametrize(("suffix", "left"), [("", True), ("&pgbouncer=true", False)])
async def test_no_statement_outlives_its_round_trip_behind_a_pooler(pg: Db, suffix: str, left: bool) -> None:
    """DESIGN, poolers: statement caches off, unnamed statements; without a pooler they are prepared once."""
    database = Database.open(pg.url + suffix, pool=1)

    def verb(run: Run) -> int:
        for n in range(3):
            run("select $1::int + 1", (n,))
        left = int(run(NAMED, ())[0][0])
        assert run("select $1::int + 1", (3,))[0][0] == 4, "and not what was said last"
        return left

    try:
        assert (await database.write(verb) > 0) is left
        async with database.begin() as connection:  # a handler's own, by SQLAlchemy
            assert (await connection.run_sync(lambda c: verb(runner(c))) > 0) is left
    finally:
        await database.close()


@pytest.mark.parametrize(
    ("url", "pooled"),
    [
        ("postgresql://u@h/db", False),
        ("postgresql://u@h:6432/db?pgbouncer=true", True),
        ("postgres://u.ref:p@aws-0-eu-west-1.pooler.supabase.com:6543/postgres", True),
        ("postgres://u.ref:p@aws-0-eu-west-1.pooler.supabase.com:5432/postgres", False),
        ("postgresql://postgres:p@db.ref.supabase.co:5432/postgres?sslmode=require", False),
    ],
)
def test_a_pooler_is_known_by_its_url(url: str, pooled: bool) -> None:
    """DESIGN, URLs as people have them; what only other clients read is not passed on."""
    database = Database.open(url)
    assert isinstance(database, Postgres)
    assert database.pooled is pooled
    assert "pgbouncer" not in database.dsn
    assert ("sslmode=require" in database.dsn) is ("sslmode" in url)


@pytest.mark.no_pooler("it goes through a pooler of its own, by a URL that does not say so")
@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        ("extra_float_digits", "unsupported startup parameter"),  # PgBouncer as Debian ships it
        ("extra_float_digits,default_transaction_isolation", "prepared statement .* does not exist"),
    ],
)
async def test_a_pooler_that_the_url_does_not_name_is_told_how_to_say_so(
    server: Server, pg: Db, ignored: str, said: str
) -> None:
    """A statement prepared on one server connection is executed on another: no row is to blame, and no row ends."""
    with pooler.Pooler(server.url, ignored) as own:
        url = own.before(pg.direct).replace("&pgbouncer=true", "")
        assert "pgbouncer=true" not in url
        one, other = Database.open(url, pool=1), Database.open(url, pool=1)

        async def use() -> None:
            await one.read(lambda run: run("select $1::int", (1,)))
            async with other.begin() as connection:  # takes the server connection with the prepared statement
                await connection.exec_driver_sql("select 1")
                await one.read(lambda run: run("select $1::int", (2,)))

        try:
            with pytest.raises(Unreachable, match=said) as told:
                await use()
            assert told.value.hint is not None
            assert "add &pgbouncer=true to the database URL" in told.value.hint
        finally:
            await one.close()
            await other.close()


ZOMBIE = "tests/store/lane/test_fence.py::test_nothing_a_zombie_does_reaches_the_row_that_another_took_over"
#: What must work behind any pooler, as a part of every run; ``make pooler`` runs all tests on PostgreSQL that way.
CORE = [
    f"{ZOMBIE}[postgresql-another id-worker and time]",
    f"{ZOMBIE}[postgresql-reused id-renewed time alone]",
    "tests/store/lane/test_fence.py::test_eight_claimers_at_once_take_every_row_once",
    "tests/store/lane/test_settle.py::test_a_batch_of_all_kinds_and_different_columns_is_written_row_by_row_as_asked",
    "tests/store/lane/test_settle.py::test_a_locked_row_is_reported_and_the_others_are_written",
    "tests/store/lane/test_any_table.py::test_rows_are_told_apart_by_keys_of_any_type[postgresql-text]",
    "tests/store/lane/test_any_table.py::test_rows_are_told_apart_by_keys_of_any_type[postgresql-two columns]",
    "tests/store/lane/test_any_table.py::test_states_may_be_any_values_of_any_columns[postgresql-null or]",
    "tests/store/lane/test_any_table.py::test_states_may_be_any_values_of_any_columns[postgresql-several]",
    "tests/store/gates/test_gates.py::test_never_more_rows_of_a_key_than_its_limit",
    "tests/store/gates/test_gates.py::test_a_rate_is_shared_and_refills",
    "tests/store/gates/test_gates.py::test_a_breaker_opens_at_its_streak_and_lets_one_probe_through",
    "tests/store/gates/test_gates.py::test_a_worker_drains_a_gated_lane",
    "tests/client/test_tasks.py::test_a_task_is_enqueued_run_and_its_result_given_back",
    "tests/store/jobs/test_bulk_enqueue.py::test_many_are_enqueued_at_once_in_order_with_their_ids",
    "tests/store/jobs/test_bulk_enqueue.py::test_calls_of_all_kinds_in_several_parts_get_what_each_was_given",
    "tests/client/test_tasks.py::test_a_key_keeps_a_second_job_out_while_the_first_is_unfinished",
    "tests/processes/test_pooler.py::test_two_processes_drain_a_lane_row_by_row_once",
    "tests/processes/test_pooler.py::test_several_make_rowmills_tables_at_once",
    "tests/processes/test_pooler.py::test_behind_pgbouncer_it_is_pgbouncer_that_answers",
]


def test_two_processes_drain_a_lane_row_by_row_once(pg: Db, tmp_path: Path) -> None:
    """X1; DESIGN, poolers: real workers, with the pool of connections that each has."""
    farm = Farm(tmp_path, pg)
    try:
        farm.fill(2000)
        workers = [farm.start("w1", drain=True), farm.start("w2", drain=True)]
        assert [worker.wait(timeout=90) for worker in workers] == [0, 0]
        assert farm.counts() == {"done": 2000}
        assert set(farm.started().values()) == {1}
        assert pg.value("select count(distinct job_id) from runs") == pg.value("select count(*) from runs") == 2000
    finally:
        farm.close()


async def test_several_make_rowmills_tables_at_once(pg: Db) -> None:
    """DESIGN, poolers: on a session that others have used, and that has looked for the tables before."""
    databases = [Database.open(pg.url) for _ in range(6)]
    made = await asyncio.gather(*(schema.ensure(database) for database in databases))
    for database in databases:
        await database.close()
    assert [own.refused for own in made if own.refused] == []


@pytest.mark.timeout(400)
@pytest.mark.no_pooler("it starts such a run itself")
def test_the_core_works_through_pgbouncer(server: object) -> None:
    """Issue, poolers; DESIGN: fence, settling, shapes, gates, tasks and a drain, in transaction mode."""
    if pooler.command() is None:
        pytest.fail("there is no pgbouncer, and what works behind one is not tested. Try: make pgbouncer")
    root = Path(__file__).parents[2]
    words = [sys.executable, "-m", "pytest", "--pooler", "-vv", "-p", "no:cacheprovider", "--timeout=300"]
    inner = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [*words, *CORE]
    # A real interpreter: pytest warns of plugins that a fork server has imported before it, and warnings are errors.
    with (
        quick_processes.real_processes(),
        subprocess.Popen(command, cwd=root, env=inner, stdout=subprocess.PIPE, text=True) as started,
    ):
        try:
            said, _ = started.communicate(timeout=360)
        except subprocess.TimeoutExpired:
            started.send_signal(signal.SIGINT)  # so that it stops the server it has started
            said, _ = started.communicate()
    assert started.returncode == 0, said[-5000:]
    # Each by its name: nothing was left out unseen.
    passed = re.findall(r"::(\w+)(?:\[.*)? PASSED", said)
    assert {one.partition("::")[2].partition("[")[0] for one in CORE} == set(passed), said[-5000:]


async def test_behind_pgbouncer_it_is_pgbouncer_that_answers(pg: Db) -> None:
    """The runs above would prove nothing if they did not go through it."""
    if pooler.session is None:
        assert pg.url == pg.direct
        return
    before = pooler.session.transactions()
    database = Database.open(pg.url)
    for _ in range(20):
        await database.read(lambda run: run("select 1", ()))
    await database.close()
    assert pooler.session.transactions() >= before + 20
