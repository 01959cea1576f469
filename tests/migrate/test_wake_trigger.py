"""migrate --wake: a trigger that notifies workers of rows that any client makes ready, and nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from command import Command
from databases import Db
from postgres_programs import dump, installed
from rowmill import Mill
from wake import TABLE, connected, install, listening
from workers import STATES

pytestmark = pytest.mark.no_pooler("migrate asks for the direct address, and nobody listens through a pooler")

LANE = (
    "mill.lane({!r}, name='jobs', ready={{'status': {!r}}}, running={{'status': 'running'}}, done={{'status': 'done'}},"
    " dead={{'status': 'dead'}})(handler)"
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def lane_of(url: str, table: str = "jobs", **options: Any) -> Mill:
    mill = Mill(url)

    @mill.lane(table, **{"name": "jobs", **STATES, **options})
    async def handler(job: Any) -> None: ...

    return mill


def statements(command: Command, *words: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = command.json("migrate", *words)["environments"][0]["statements"]
    return made


# -- the command


def test_a_dry_run_prints_it_a_second_run_has_nothing_to_do_and_detach_leaves_no_trace(
    pg: Db, command: Command
) -> None:
    pg.execute(TABLE.format("jobs"))
    before = dump(pg)
    reference = command.app(pg.url, LANE.format("jobs", "queued"))
    shown = command("migrate", reference, "--wake").out
    assert "create trigger rowmill_wake_insert after insert on jobs" in shown
    assert f"-- run it with: rowmill migrate {reference} --wake --apply" in shown
    assert dump(pg) == before, "without --apply nothing is written"
    assert not [each for each in statements(command) if each["kind"] == "wake"], "only on request"
    assert "wake" in [each["kind"] for each in statements(command, "--wake", "--apply")]
    assert statements(command, "--wake") == []
    assert statements(command) == []
    ended = command("migrate", "--detach", "--apply")
    assert ended.code == 0, ended
    assert dump(pg) == before


def test_the_text_of_a_dry_run_may_be_run_by_hand(pg: Db, command: Command) -> None:
    pg.execute("create table jobs (id bigint primary key, status text not null default 'queued')")
    command.app(pg.url, LANE.format("jobs", "queued"))
    script = command("migrate", "--all", "--wake").out
    words = [str(installed("psql")), pg.direct, "-q", "-v", "ON_ERROR_STOP=1"]
    subprocess.run(words, input=script, text=True, timeout=60, check=True)
    assert statements(command, "--wake") == []


def test_the_trigger_alone_can_be_removed_while_workers_work(pg: Db, command: Command) -> None:
    pg.execute(TABLE.format("jobs"))
    command.app(pg.url, LANE.format("jobs", "queued"))
    assert command("migrate", "--apply").code == 0
    before = dump(pg)
    assert command("migrate", "--wake", "--apply").code == 0
    assert dump(pg) != before
    removed = [each["kind"] for each in statements(command, "--wake", "--detach", "--apply")]
    assert removed == ["trigger", "trigger", "function", "sequence"]
    assert dump(pg) == before


def test_check_says_what_pickup_is_and_finds_a_trigger_of_another_condition(pg: Db, command: Command) -> None:
    pg.execute(TABLE.format("jobs"))
    command.app(pg.url, LANE.format("jobs", "queued"))
    assert command("migrate", "--apply").code == 0
    assert "within 6 s (poll); within milliseconds after rowmill migrate" in " ".join(command("check").out.split())
    assert command.json("check")["checked"][0]["pickup"] == {"poll": 5.0, "wake_trigger": False}
    assert command("migrate", "--wake", "--apply").code == 0
    assert "within milliseconds (wake trigger)" in command("check").out
    document = command.json("check", "--strict")
    assert document["checked"][0]["pickup"] == {"poll": 5.0, "wake_trigger": True}
    command.app(pg.url, LANE.format("jobs", "new"))
    findings = command.json("check")["checked"][0]["findings"]
    assert [f["hint"] for f in findings if f["code"] == "stale_wake_trigger"] == ["rowmill migrate APP --wake --apply"]
    assert [each["kind"] for each in statements(command) if each["kind"] == "wake"], "any migrate brings it up to date"
    assert command("migrate", "--apply").code == 0
    assert not [f for f in command.json("check")["checked"][0]["findings"] if f["code"] == "stale_wake_trigger"]
    pg.execute("alter table jobs disable trigger rowmill_wake_update")
    assert command.json("check")["checked"][0]["pickup"]["wake_trigger"] is False
    assert command("migrate", "--wake", "--apply").code == 0
    assert command.json("check")["checked"][0]["pickup"]["wake_trigger"] is True


def test_on_sqlite_it_says_that_there_is_nothing_to_do(lite: Db, command: Command) -> None:
    lite.execute("create table jobs (id integer primary key, status text not null default 'queued', worker text)")
    command.app(lite.url, LANE.format("jobs", "queued"))
    ended = command("migrate", "--wake", "--apply")
    assert ended.code == 0
    assert "--wake adds nothing there" in ended.err
    assert "pickup" not in command.json("check")["checked"][0]


def test_names_that_are_taken_are_left_alone(pg: Db, command: Command) -> None:
    pg.execute(TABLE.format("jobs"))
    pg.execute(
        "create function mine() returns trigger language plpgsql as 'begin return null; end';"
        "create trigger rowmill_wake_insert after insert on jobs for each statement execute function mine()"
    )
    command.app(pg.url, LANE.format("jobs", "queued"))
    ended = command("migrate", "--wake", "--apply")
    assert ended.code == 1
    assert "it calls public.mine" in ended.err
    assert "Try: rename it" in ended.err
    assert command("migrate", "--apply").code == 0, "without --wake it is nobody's business"
    assert pg.value("select count(*) from pg_trigger where tgname like 'rowmill%'") == 1


def test_a_schema_of_rowmills_own_needs_no_rights_of_writers(pg: Db, command: Command) -> None:
    """Somebody who may insert and nothing else still can, and wakes workers."""
    pg.execute(TABLE.format("jobs"))
    before = dump(pg)
    command.app(pg.url, "mill.schema = 'mill_own'", LANE.format("jobs", "queued"))
    assert command("migrate", "--wake", "--apply").code == 0
    role = f"writer_{time.time_ns()}"
    pg.execute(f"create role {role}; grant insert on jobs to {role}")
    try:

        async def write() -> int:
            async with listening(pg) as listener, connected(pg) as connection:
                await connection.execute(f"set role {role}")
                await connection.execute("insert into jobs (note) values ('x')")
                spent = await connection.fetchval("select current_setting('rowmill.notified', true)")
                assert spent in (None, "")
                await connection.execute("reset role")
                assert await connection.fetchval("select is_called from mill_own.rowmill_wake"), "counted, not refused"
                return await listener.count()

        assert asyncio.run(write()) == 1
        assert command("migrate", "--detach", "--apply").code == 0
    finally:
        pg.execute(f"revoke all on jobs from {role}; drop role {role}")
    assert dump(pg) == before


# -- what notifies


async def test_a_statement_notifies_once_where_rows_became_ready(pg: Db) -> None:
    pg.execute(TABLE.format("jobs"))
    await install(lane_of(pg.url))
    async with listening(pg) as listener, connected(pg) as connection:

        async def heard(text: str) -> int:
            await connection.execute(text)
            return await listener.count()

        assert await heard("insert into jobs (note) select n::text from generate_series(1, 1000) n") == 1
        assert await heard("insert into jobs (status) values ('done')") == 0
        assert await heard("insert into jobs (run_after) values (now() + interval '1 hour')") == 0
        assert await heard("insert into jobs (run_after) values (clock_timestamp())") == 1
        assert await heard("update jobs set status = 'done'") == 0
        assert await heard("update jobs set note = 'y' where false") == 0
        assert await heard("update jobs set status = 'queued' where id = 1") == 1
        assert await heard("delete from jobs where id = 1") == 0
        await connection.copy_records_to_table("jobs", records=[("a",), ("b",)], columns=["note"])
        assert await listener.count() == 1
        upsert = "insert into jobs (id, note) overriding system value values (2, 'x') on conflict (id) do update"
        assert await heard(f"{upsert} set status = 'queued'") == 1
        assert await heard("begin; insert into jobs default values; insert into jobs default values; commit") == 1
        assert await heard("begin; insert into jobs default values; rollback") == 0
        assert await heard("set session_replication_role = replica; insert into jobs default values") == 0


async def test_each_lane_of_a_table_counts(pg: Db) -> None:
    pg.execute(TABLE.format("jobs"))
    mill = lane_of(pg.url, where="note is distinct from 'never'")

    @mill.lane("jobs", name="second", ready={"status": "parsed"}, running={"status": "storing"},
               done={"status": "stored"}, dead={"status": "lost"})  # fmt: skip
    async def second(job: Any) -> None: ...

    made = await install(mill)
    assert len([each for each in made if each["kind"] == "wake"]) == 1
    async with listening(pg) as listener:
        for values, times in (("'queued', 'x'", 1), ("'parsed', 'never'", 1), ("'queued', 'never'", 0),
                              ("'stored', 'x'", 0)):  # fmt: skip
            await listener.connection.execute(f"insert into jobs (status, note) values ({values})")
            assert await listener.count() == times, values


async def test_a_partitioned_table_notifies(pg: Db) -> None:
    pg.execute(
        "create table jobs (id int, day date, status text not null default 'queued', worker text,"
        " primary key (id, day)) partition by range (day);"
        "create table jobs_1 partition of jobs for values from ('2020-01-01') to ('2021-01-01');"
        "create table jobs_2 partition of jobs for values from ('2021-01-01') to ('2022-01-01')"
    )
    await install(lane_of(pg.url))
    async with listening(pg) as listener:
        await listener.connection.execute("insert into jobs values (1, '2020-05-05'), (2, '2021-05-05')")
        assert await listener.count() == 1
        await listener.connection.execute("update jobs set status = 'done'")
        assert await listener.count() == 0
        await listener.connection.execute("update jobs set status = 'queued', day = '2020-06-06' where id = 2")
        assert await listener.count() == 1


async def test_a_type_with_operators_of_its_own_is_compared_by_them(pg: Db) -> None:
    """The trigger does not look names up in the writer's search_path."""
    pg.execute(
        "create schema words; create type words.status as enum ('queued', 'running', 'done', 'dead');"
        "create function words.wanted(text) returns boolean language sql as 'select $1 = ''yes''';"
        'create table words."Odd Jobs" (id bigint generated always as identity primary key, note text, worker text,'
        " status words.status not null default 'queued')"
    )
    await install(lane_of(pg.url, 'words."Odd Jobs"', where="words.wanted(note)"))
    await install(lane_of(pg.url, 'words."Odd Jobs"', where=lambda t: t.c.note == "yes"))
    async with listening(pg) as listener:
        await listener.connection.execute("set search_path = pg_temp")
        await listener.connection.execute("insert into words.\"Odd Jobs\" (note) values ('yes')")
        assert await listener.count() == 1
        await listener.connection.execute("insert into words.\"Odd Jobs\" (note) values ('no')")
        assert await listener.count() == 0


@pytest.mark.parametrize("where", ["(note::int) > 3", "exists (select 1 from pg_sleep(0.001))"])
async def test_no_write_fails_or_waits_because_of_the_lanes_own_condition(pg: Db, where: str) -> None:
    """A condition that the row makes fail, and one that reads elsewhere: the trigger notifies."""
    pg.execute(TABLE.format("jobs"))
    await install(lane_of(pg.url, where=where))
    async with listening(pg) as listener:
        await listener.connection.execute("insert into jobs (note) values ('no number')")
        assert await listener.count() == 1
    body = pg.value("select prosrc from pg_proc where proname like 'rowmill_wake%'")
    assert "pg_sleep" not in body


async def test_a_worker_that_drains_a_table_does_not_notify(pg: Db) -> None:
    pg.execute(TABLE.format("jobs"))
    mill = lane_of(pg.url, concurrency=20, batch=50)
    await install(mill)
    pg.execute("insert into jobs (note) select n::text from generate_series(1, 1000) n")
    async with listening(pg) as listener:
        tally = await mill.worker(drain=True).run()
        assert tally.completed == 1000
        assert await listener.count() <= 2


async def test_many_writers_notify_so_many_times_a_second(pg: Db) -> None:
    """NOTIFY takes a lock over the whole server: at most 200 at once, and 50 a second after that."""
    pg.execute(TABLE.format("jobs"))
    await install(lane_of(pg.url))
    async with listening(pg) as listener:
        began = time.monotonic()
        connections = [await asyncpg.connect(pg.direct) for _ in range(4)]

        async def write(connection: Any) -> None:
            for _ in range(250):
                await connection.execute("insert into jobs default values")

        await asyncio.gather(*map(write, connections))
        elapsed = time.monotonic() - began
        for connection in connections:
            await connection.close()
        # Two that read the sequence at the same moment both notify.
        assert 0 < await listener.count() <= (200 + 50 * elapsed) * 1.5 < 1000 or elapsed > 8


async def test_the_last_tokens_are_for_writers_that_wait_for_nobody(pg: Db) -> None:
    """Where one writer notifies inside an open transaction, the others have to wait for its commit: that costs ten."""
    pg.execute(TABLE.format("jobs"))
    await install(lane_of(pg.url))

    clock = "select (extract(epoch from clock_timestamp()) * 1000)::bigint"
    async with connected(pg) as one, connected(pg) as other:
        await one.execute("insert into jobs default values")
        spent = await one.fetchval("select last_value from rowmill_wake") - await one.fetchval(clock)
        assert spent <= 20
        async with one.transaction():
            await one.execute("insert into jobs default values")
            before = await one.fetchval("select last_value from rowmill_wake")
            task = asyncio.create_task(other.execute("insert into jobs default values"))
            await task
        after = await one.fetchval("select last_value from rowmill_wake")
        assert after - before >= 200
