"""A worker's role: what ``rowmill sql APP --role`` grants is enough to work, and no more than that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from command import Command
from databases import Db
from farm import JOBS
from rowmill import Breaker, Cancel, Concurrency, Dead, DeclarationError, Job, Mill, Rate, Retry, Snooze, Wait, fixed
from rowmill.declare.outcome import Release
from rowmill.testing import Kit

ROLE = "lowly worker"
LANE = (
    "mill.lane('jobs', name='fetch', ready={'status': 'queued'}, running={'status': 'running'},"
    " done={'status': 'done'}, dead={'status': 'dead'}, max_attempts=2)(handler)"
)
TASK = "mill.task(name='send')(handler)"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


@pytest.fixture
def shop(pg: Db) -> Iterator[Db]:
    """A database with a lane's table, with a column that is nobody's business, and another table."""
    pg.execute(JOBS["postgresql"])
    pg.execute("alter table jobs add column card text default '4111'; create table customers (id int, name text)")
    pg.execute("alter table jobs enable row level security; revoke create on schema public from public")
    yield pg
    if pg.value(f"select count(*) from pg_roles where rolname = '{ROLE}'"):
        pg.execute(f'drop owned by "{ROLE}"; drop role "{ROLE}"')


def mill_over(url: str) -> Mill:
    mill = Mill(url)

    @mill.lane(
        "jobs", name="fetch", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
        dead={"status": "dead"}, max_attempts=2, backoff=fixed(td(0)), gates=[Concurrency(1, by="note")],
    )  # fmt: skip
    async def fetch(job: Any) -> dict[str, str]:
        assert "card" not in job
        if job["note"] == "bad":
            raise Dead("no")
        return {"note": "read"}

    @mill.task
    async def send(to: str) -> str:
        return to

    return mill


async def test_the_role_is_enough_for_a_worker_and_reads_nothing_else(shop: Db, command: Command) -> None:
    """C1, A7: also where the table has row level security; a column it must not see is not in its jobs."""
    await prepared(shop)
    for note in ("a", "a", "bad"):
        shop.execute("insert into jobs (note) values (?)", note)
    command.app(shop.url, LANE, TASK)
    with ThreadPoolExecutor(1) as pool:
        words = ("sql", "--role", ROLE, "--hide", "fetch.card", "--writes", "fetch.note")
        made = pool.submit(lambda: [command.json(*words), command.json(*words)]).result()
    for _ in range(2):  # again, and nothing is wrong
        shop.execute(";\n".join(made[0]["statements"]))
    lowly = shop.url.replace("postgres:", ROLE.replace(" ", "%20") + ":", 1)
    mill = mill_over(lowly)
    said: list[Any] = []
    mill.on_event(said.append)
    handles = [await mill.tasks["send"].enqueue(to="a")]
    handles += await mill.enqueue_many([mill.tasks["send"].call(to=str(n)) for n in range(120)])  # by COPY
    await mill.worker(drain=True, worker_id="w-1").run()
    assert await handles[0].result(timeout=60) == "a"
    await mill.close()
    assert [r["status"] for r in shop.query("select status from jobs order by id")] == ["done", "done", "dead"]
    assert shop.value("select count(*) from jobs where note = 'read'") == 2
    assert shop.value("select count(*) from rowmill_jobs where state = 'done'") == 121
    assert shop.value("select count(*) from rowmill_failures") == 1
    assert shop.value("select state from rowmill_workers where id = 'w-1'") == "stopped"
    assert not [e.name for e in said if e.name in ("failures_off", "workers_table_off", "statement_refused")]
    for statement in (
        "select card from jobs",
        "select * from jobs",
        "select * from customers",
        "select * from rowmill_ddl",
        "update jobs set card = null",
        "insert into jobs (note) values ('x')",
        "delete from jobs",
        "create table mine (id int)",
        "insert into rowmill_schema values (99, 'x')",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await _run(shop.direct.replace("postgres:", ROLE.replace(" ", "%20") + ":", 1), statement)


async def test_a_column_that_was_not_granted_is_told_with_the_command_that_grants_it(
    shop: Db, command: Command
) -> None:
    """Issue 19.9: permission denied alone does not say what to run."""
    await prepared(shop)
    shop.execute("insert into jobs (note) values ('a')")
    command.app(shop.url, LANE, TASK)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: command.json("sql", "--role", ROLE, "--hide", "fetch.card")).result()
    shop.execute(";\n".join(made["statements"]))
    mill = mill_over(shop.url.replace("postgres:", ROLE.replace(" ", "%20") + ":", 1))
    refused = asyncio.Event()
    hints: list[str] = []

    def listen(event: Any) -> None:
        if event.name == "statement_refused":
            hints.append(event.fields["hint"])
            refused.set()

    mill.on_event(listen)
    worker = mill.worker(lanes=["fetch"], grace=1)
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(refused.wait(), 60)
    shop.execute(f'grant update (note) on jobs to "{ROLE}"')
    worker.stop()
    await asyncio.wait_for(running, 60)
    assert "rowmill sql APP --role NAME --writes fetch.note" in hints[0]
    await mill.close()


async def prepared(db: Db) -> None:
    """With rowmill's own tables, made by their owner."""
    owner = mill_over(db.url)
    await owner.prepare()
    await owner.close()


async def _run(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


#: What a worker's role must not: other tables, columns that are hidden, rows of its own making, anything of the schema.
FORBIDDEN = [
    "select card from jobs", "select * from jobs", "select * from customers", "insert into customers values (1, 'x')",
    "update jobs set card = null", "insert into jobs (note) values ('x')", "delete from jobs", "truncate jobs",
    "drop table jobs", "drop table rowmill_jobs", "alter table jobs add column mine int", "create index on jobs (note)",
    "create table mine (id int)", "create schema mine", "create function f() returns int language sql as 'select 1'",
    "create trigger t before update on jobs execute function suppress_redundant_updates_trigger()",
    "alter table jobs disable row level security", "grant select on customers to public", "create role other",
    "select * from rowmill_ddl", "insert into rowmill_schema values (99, 'x')", "select * from rowmill_tokens",
    "copy customers to program 'cat'", "select pg_read_file('postgresql.conf')", "select pg_reload_conf()",
    "select rolpassword from pg_authid", "set role postgres", "begin; lock table jobs in access exclusive mode",
]  # fmt: skip


async def test_every_verb_of_a_worker_runs_under_its_role_and_nothing_else_does(shop: Db, command: Command) -> None:
    """Issue, security: claim, renew, settle, finish, progress, sweep, gates, tasks, steps and cron; no DDL, no more."""
    shop.execute("alter table jobs add column progress jsonb, add column site text default 'a'")
    shop.execute("alter table jobs add column if not exists run_after timestamptz")
    ran: list[str] = []

    def declared(url: str) -> Mill:
        mill = Mill(url)

        @mill.lane(
            "jobs", name="fetch", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
            dead={"status": "dead"}, max_attempts=2, backoff=fixed(td(0)), lease=td(minutes=1), max_reclaims=0,
            gates=[Concurrency(9, by="site"), Breaker(9, td(minutes=1), by="site"), Rate(99, by="site")],
        )  # fmt: skip
        async def fetch(job: Any) -> None:
            await job.progress(0.5, "half")
            async with job.finish() as tx:
                tx.set(note="finished")

        @mill.task
        async def send(job: Job, to: str) -> str:
            ran.append(await job.step("once", lambda: to))
            return to

        @mill.cron("* * * * *")
        async def tick() -> None:
            ran.append("tick")

        @mill.task
        async def planned() -> None:
            ran.append("planned")

        mill.schedules("plans")
        return mill

    shop.execute("create table plans (id uuid primary key default gen_random_uuid(), cron text, task text)")
    shop.execute("insert into plans (cron, task) values ('* * * * *', 'planned')")
    owner = declared(shop.url)
    await owner.prepare()
    await owner.close()
    words = ("sql", "--role", ROLE, "--hide", "fetch.card", "--writes", "fetch.note")
    command.app(shop.url, LANE, TASK, "mill.schedules('plans')")
    with ThreadPoolExecutor(1) as pool:
        shop.execute(";\n".join(pool.submit(lambda: command.json(*words)).result()["statements"]))
    lowly = shop.url.replace("postgres:", ROLE.replace(" ", "%20") + ":", 1)
    for _ in range(10):
        shop.execute("insert into jobs (note) values ('x')")
    mill = declared(lowly)
    async with Kit(mill) as kit:
        store = await kit.store("fetch")
        (waiting,) = await kit.claim("fetch", 1)
        assert (await kit.settle(waiting, Wait("note = 'go'", timeout=td(days=1)))).written
        shop.execute("update jobs set note = 'go' where id = $1", waiting.id)
        assert await kit.look("fetch") == [waiting.id]
        claims = await kit.claim("fetch", 7)
        assert await store.renew(claims) == claims
        ends = [{"note": "set"}, Retry("again"), Dead("no"), Cancel("off"), Snooze(td(hours=1)), Release()]
        for claim, ended in zip(claims, ends, strict=False):
            assert (await kit.settle(claim, ended)).written, ended
        kit.advance(td(minutes=2))
        assert [s.id for s in await kit.sweep("fetch")] == [claims[6].id]
        stepped = await kit.step("fetch")
        assert stepped is not None
        assert stepped.outcome == "done"
        await kit.tick()
        kit.advance(td(minutes=2))
        await kit.tick()
        await mill.tasks["send"].enqueue(to="by key", key="k")
        await kit.drain("default")
    await mill.close()
    assert sorted(set(ran)) == ["by key", "planned", "tick"]
    assert shop.value("select count(*) from jobs where note = 'finished' and progress is not null") == 1
    for statement in FORBIDDEN:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await _run(shop.direct.replace("postgres:", ROLE.replace(" ", "%20") + ":", 1), statement)
    assert shop.value("select count(*) from customers") == 0


def test_the_script_is_sql_that_can_be_read_and_says_what_it_does(shop: Db, command: Command) -> None:
    """C1: for the person who runs it; a misspelled name is reported."""
    asyncio.run(prepared(shop))
    command.app(shop.url, LANE)
    shown = command("sql", "--role", ROLE)
    assert shown.code == 0
    assert shown.out.startswith("-- A role for workers")
    assert "grant select (id, status, worker" in shown.out
    assert "rowmill_jobs" not in shown.out, "there is no task"
    shop.execute(shown.out)
    wrong = command("sql", "--role", "x", "--hide", "fetch.crad")
    assert wrong.code == 1
    assert "card" in wrong.err
    assert command("sql", "--role", "x", "--hide", "card").code == 2
    assert command("sql", "fetch", "--hide", "fetch.card").code == 2


def test_sqlite_has_no_roles(lite: Db, command: Command) -> None:
    """C1: and it is said so."""
    lite.execute(JOBS["sqlite"])
    command.app(lite.url, LANE)
    ended = command("sql", "--role", "x")
    assert ended.code == 1
    assert "SQLite" in ended.err


async def test_a_role_that_reads_but_a_part_of_the_key_is_refused(pg: Db) -> None:
    """X1: by the part that it may read, an outcome would be written to rows that are not its own."""
    pg.execute(
        f"create role \"{ROLE}\" login; create table pages (site int, page int, status text default 'queued',"
        f' worker text, primary key (site, page)); grant select (site, status, worker), update on pages to "{ROLE}"'
    )
    mill = Mill(pg.url.replace("postgres:", ROLE.replace(" ", "%20") + ":", 1))
    mill.lane(
        "pages", name="pages", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
        dead={"status": "dead"},
    )(_nothing)  # fmt: skip
    try:
        with pytest.raises(DeclarationError, match=r"may not read page, .*\n?.*grant select \(page\) on pages"):
            await mill.worker(drain=True).run()
    finally:
        pg.execute(f'drop owned by "{ROLE}"; drop role "{ROLE}"')


async def _nothing(job: Job) -> None:
    pass
