"""migrate: additive, beside the traffic, again after a crash; and detach leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import systems
from command import Command, register
from databases import Db, _loop, _wait
from postgres_programs import dump, installed
from rowmill.store import Database
from rowmill.store.own import schema
from rowmill.store.own.ddl_ledger import Ledger
from waiting import eventually

pytestmark = pytest.mark.no_pooler(
    "migrate builds indexes, and asks for the direct address: a pooler cuts what it does in pieces"
)

LANE = (
    "mill.lane('jobs', name='jobs', ready={'status': 'new'}, running={'status': 'running'}, done={'status': 'done'},"
    " dead={'status': 'failed'}, unfenced=True)(handler)"
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def create_jobs(db: Db, rows: int) -> None:
    db.execute(
        "create table jobs (id bigint generated always as identity primary key, status text not null default 'new',"
        " note text, created_at timestamptz not null default now());"
        f"insert into jobs (status, note) select case when n % 100 = 0 then 'new' else 'done' end, repeat('x', 60)"
        f" from generate_series(1, {rows}) n; analyze jobs"
    )


def test_the_schema_is_byte_for_byte_as_before_after_adopt_migrate_run_and_detach(pg: Db, command: Command) -> None:
    """Issue: equal dumps; what the user had set himself stays."""
    pg.execute(
        "create schema work; create type work.st as enum ('queued', 'running', 'done', 'failed');"
        'create table work."Odd Jobs" (id uuid primary key default gen_random_uuid(), status work.st not null default'
        " 'queued', created_at timestamptz default now(), note text) with (autovacuum_vacuum_scale_factor = 0.5);"
        'alter table work."Odd Jobs" alter column note set statistics 7;'
        'create index by_note on work."Odd Jobs" (note);'
        'insert into work."Odd Jobs" (note) select n::text from generate_series(1, 50) n;'
        "insert into work.\"Odd Jobs\" (note, status) select n::text, 'done' from generate_series(1, 120000) n;"
        'analyze work."Odd Jobs"'
    )
    before = dump(pg)
    assert command("adopt", pg.url, 'work."Odd Jobs"', "--yes", "--write", "odd.py").code == 0
    assert dump(pg) == before, "adopt writes nothing"
    assert command("migrate", "odd:mill").code == 0
    assert dump(pg) == before, "without --apply nothing is written"
    document = command.json("migrate", "odd:mill", "--apply")
    kinds = {each["kind"] for each in document["environments"][0]["statements"]}
    assert kinds == {"own", "columns", "index", "statistics", "storage"}
    assert "autovacuum_vacuum_scale_factor='0.5'" in dump(pg), "what was set is left as it is"
    assert command.json("migrate", "odd:mill", "--apply")["environments"][0]["statements"] == []
    checked = command.json("check", "odd:mill", "--strict")
    assert checked["checked"][0]["plan"]["uses_index"]
    assert command("run", "odd:mill", "--drain").code == 0
    assert pg.value("select count(*) from work.\"Odd Jobs\" where status = 'done' and worker is not null") == 50
    assert command("migrate", "odd:mill", "--detach").code == 0
    assert command("migrate", "odd:mill", "--detach", "--apply").code == 0
    assert dump(pg) == before


@pytest.mark.parametrize(("renewed", "order"), [("heartbeat_at", "(locked_at)"), ("claimed_at", "(id)")])
def test_running_rows_are_indexed_by_what_grows_and_no_renewal_moves(
    pg: Db, command: Command, renewed: str, order: str
) -> None:
    """Speed: entries of a random key go all over the index; one on a time that is renewed makes renewals costly."""
    pg.execute(
        "create table jobs (id uuid primary key default gen_random_uuid(), status text not null default 'new',"
        " worker text, locked_at timestamptz, heartbeat_at timestamptz)"
    )
    command.app(pg.url, LANE.replace("unfenced=True", f"renew='{renewed}', order_by='id'"))
    statements = command.json("migrate")["environments"][0]["statements"]
    made = [each["statement"] for each in statements if "_running_" in each["statement"]]
    assert len(made) == 1
    assert f" {order} where status = 'running'" in made[0]
    assert command("migrate", "--apply").code == 0
    again = command.json("migrate")["environments"][0]["statements"]
    assert not [each for each in again if "_running_" in each["statement"]]


def test_detach_leaves_what_somebody_changed_since(pg: Db, command: Command) -> None:
    """Issue: exactly what was added, and nothing else."""
    create_jobs(pg, 10)
    command.app(pg.url, LANE)
    assert command("migrate", "--apply").code == 0
    pg.execute("alter table jobs set (fillfactor = 55)")
    ended = command("migrate", "--detach", "--apply")
    assert ended.code == 0
    assert "left alone: storage fillfactor" in ended.err
    assert pg.value("select reloptions::text from pg_class where relname = 'jobs'") == "{fillfactor=55}"
    assert pg.value("select count(*) from pg_tables where tablename like 'rowmill%'") == 0


def test_detach_waits_for_workers_to_stop(db: Db, command: Command) -> None:
    systems.create(db, "enrichment")
    command.app(db.url, "enrichment")
    register(db, "w-1")
    ended = command("migrate", "--detach", "--apply")
    assert ended.code == 1
    assert "w-1" in ended.err
    assert "Try: stop them first" in ended.err


def test_detach_does_not_wait_for_a_worker_that_is_dead(db: Db, command: Command) -> None:
    """A killed worker never says that it stopped: silence shows it, as in ``rowmill workers``."""
    systems.create(db, "enrichment")
    command.app(db.url, "enrichment")
    assert command("migrate", "--apply").code == 0
    register(db, "w-killed", silent=480, state="busy")
    register(db, "w-live")
    ended = command("migrate", "--detach", "--apply")
    assert (ended.code, "w-live" in ended.err, "w-killed" in ended.err) == (1, True, False), ended
    db.execute("update rowmill_workers set state = 'stopped' where id = 'w-live'")
    assert command("migrate", "--detach", "--apply").code == 0


def test_detach_drops_no_job_that_is_still_to_be_done(db: Db, command: Command) -> None:
    """Issue: exactly what was added, and nothing is lost."""
    systems.create(db, "enrichment")
    command.app(db.url, "enrichment")
    assert command("migrate", "--apply").code == 0
    db.execute("insert into rowmill_jobs (task) values ('report')")
    ended = command("migrate", "--detach", "--apply")
    assert ended.code == 1
    assert "1 job is still unfinished" in ended.err
    assert db.value("select count(*) from rowmill_jobs") == 1
    db.execute("update rowmill_jobs set state = 'done'")
    assert command("migrate", "--detach", "--apply").code == 0
    assert not set(schema.own_tables()) & set(_names(db))


def _names(db: Db) -> list[str]:
    postgres = "select relname as name from pg_class union all select proname from pg_proc"
    return [row["name"] for row in db.query("select name from sqlite_master" if db.dialect == "sqlite" else postgres)]


def test_migrate_and_detach_on_both_databases_end_where_they_began(db: Db, command: Command) -> None:
    systems.create(db, "enrichment", "analysis")
    systems.insert_enrichment(db, 3)
    command.app(db.url, "enrichment", "website_analysis", "prompt_forming", "model_analysis")
    columns = {table: list(db.one(f'select * from "{table}" limit 1')) for table in ("enrichment_jobs",)}
    first = command.json("migrate", "--apply")["environments"][0]["statements"]
    assert sum(each["kind"] == "index" for each in first) == 8
    assert command.json("migrate")["environments"][0]["statements"] == []
    assert command("check").code == 0
    assert command("migrate", "--detach", "--apply").code == 0
    assert {table: list(db.one(f'select * from "{table}" limit 1')) for table in columns} == columns
    assert command.json("migrate", "--detach")["environments"][0]["statements"] == []


def test_a_leftover_of_a_failed_build_is_replaced(pg: Db, command: Command) -> None:
    """Issue: invalid leftovers are detected and replaced."""
    create_jobs(pg, 1000)
    command.app(pg.url, LANE)
    (name,) = (
        each["statement"].split()[3]
        for each in command.json("migrate")["environments"][0]["statements"]
        if each["kind"] == "index" and "_ready_" in each["statement"]
    )
    # A build that fails leaves an invalid index behind: here because a value is there twice.
    with pytest.raises(asyncpg.UniqueViolationError):
        pg.execute(f"create unique index concurrently {name} on jobs (note)")
    checked = command.json("check")
    assert "invalid_index" in [f["code"] for f in checked["checked"][0]["findings"]]
    ended = command("migrate", "--apply")
    assert ended.code == 0, ended
    assert "rebuilding it" in ended.err
    assert pg.value(f"select indisvalid from pg_index where indexrelid = '{name}'::regclass")
    assert "new" in pg.value(f"select pg_get_indexdef('{name}'::regclass)")


def test_an_index_that_serves_already_is_enough(pg: Db, command: Command) -> None:
    create_jobs(pg, 5000)
    pg.execute("create index mine on jobs (created_at, id) where status = 'new'; create index st on jobs (status)")
    command.app(pg.url, LANE)
    statements = command.json("migrate")["environments"][0]["statements"]
    assert [each for each in statements if each["kind"] == "index"] == []


def test_a_changed_lane_gets_a_new_index(pg: Db, command: Command) -> None:
    create_jobs(pg, 100)
    command.app(pg.url, LANE)
    assert command("migrate", "--apply").code == 0
    command.app(pg.url, LANE.replace("'status': 'new'", "'status': ['new', 'again']"))
    statements = command.json("migrate")["environments"][0]["statements"]
    assert [each["kind"] for each in statements] == ["index"]


def test_a_partitioned_table_gets_its_indexes(pg: Db, command: Command) -> None:
    pg.execute(
        "create table jobs (id int, day date, status text not null default 'new', primary key (id, day))"
        " partition by range (day); create table jobs_1 partition of jobs for values from ('2020-01-01') to"
        " ('2021-01-01'); create table jobs_2 partition of jobs for values from ('2021-01-01') to ('2022-01-01')"
    )
    before = dump(pg)
    command.app(pg.url, LANE)
    assert command("migrate", "--apply").code == 0
    assert command.json("migrate")["environments"][0]["statements"] == []
    assert command("migrate", "--detach", "--apply").code == 0
    assert dump(pg) == before


async def test_the_schema_is_dropped_only_where_rowmill_made_it(pg: Db, command: Command) -> None:
    before = dump(pg)
    for made_by_user in (False, True):
        if made_by_user:
            pg.execute("create schema mill_own")
            before = dump(pg)
        database = Database.open(pg.url, schema="mill_own")
        await schema.ensure(database)
        assert await Ledger(database).records() == []
        await database.close()
        await asyncio.to_thread(_detach_in, pg, command)
        assert dump(pg) == before


def _detach_in(pg: Db, command: Command) -> None:
    command.app(pg.url, "mill.schema = 'mill_own'")
    assert command("migrate", "--detach", "--apply").code == 0


def test_detach_names_the_view_that_reads_a_column_before_anything_is_removed(db: Db, command: Command) -> None:
    """Issue: a column that a view reads cannot be dropped; the message says which view, and what to do."""
    create_bare(db)
    command.app(db.url, LANE)
    assert command("migrate", "--apply").code == 0
    db.execute('create view "Busy jobs" as select id, worker, attempts from jobs')
    db.execute("create view all_of_them as select id, status from jobs")
    before = _names(db)
    ended = command("migrate", "--detach", "--apply")
    assert ended.code == 1
    assert 'view "Busy jobs"' in ended.err
    assert "attempts, worker" in ended.err
    assert "all_of_them" not in ended.err
    assert 'Try: drop view "Busy jobs"' in ended.err
    assert _names(db) == before
    db.execute('drop view "Busy jobs"')
    assert command("migrate", "--detach", "--apply").code == 0
    assert not set(schema.own_tables()) & set(_names(db))


TASKS = ["@mill.task\nasync def report(to: str): ...", "@mill.cron('0 3 * * *')\nasync def nightly(): ..."]


def create_bare(db: Db, more: str = "") -> None:
    db.execute(f"create table jobs (id integer primary key, status text not null default 'new'{more})")


def test_an_application_with_tasks_is_set_up_on_a_fresh_database(db: Db, command: Command) -> None:
    """Issue: the documented deployment begins with it. The table of tasks is rowmill's own: migrate makes it."""
    create_bare(db)
    gated = "from rowmill import Rate\n@mill.task(gates=[Rate(3, by='key')])\nasync def mail(to: str): ..."
    command.app(db.url, LANE, *TASKS, gated)
    assert command("migrate").code == 0
    first = command("migrate", "--apply")
    assert first.code == 0, first
    assert set(schema.own_tables()) <= set(_names(db))
    assert command.json("migrate")["environments"][0]["statements"] == []
    checked = command.json("check", "--strict")
    assert checked["warnings"] == 0, checked


def test_an_application_of_tasks_alone_makes_its_sqlite_file(command: Command, tmp_path: Path) -> None:
    command.app(f"sqlite:///{tmp_path}/jobs.db", *TASKS)
    assert "rowmill migrate APP --apply makes it" in command("migrate").err
    assert not (tmp_path / "jobs.db").exists(), "without --apply nothing is written"
    assert command("migrate", "--apply").code == 0
    assert command("check", "--strict").code == 0


def test_a_dry_run_shows_your_tables_first_and_folds_rowmills_own(db: Db, command: Command) -> None:
    """Issue: what touches your tables is what you came to read."""
    create_bare(db)
    command.app(db.url, LANE, *TASKS)
    lines = command("migrate").out.splitlines()
    folded = [line for line in lines if "rowmill's own tables" in line]
    assert len(folded) == 1
    assert folded[0].startswith("-- ")
    assert "--all" in folded[0]
    assert not [line for line in lines if "create table" in line]
    assert lines.index(folded[0]) > max(n for n, line in enumerate(lines) if "alter table jobs" in line)
    assert lines.index(folded[0]) > max(n for n, line in enumerate(lines) if line.startswith("create index"))
    whole = command("migrate", "--all").out
    assert whole.index("alter table jobs") < whole.index("create table if not exists rowmill_workers")
    assert command("migrate", "--apply").code == 0
    undone = command("migrate", "--detach").out
    assert "drop table" not in undone
    assert "--all" in undone
    assert "drop table rowmill_workers" in command("migrate", "--detach", "--all").out


def test_the_text_of_a_dry_run_may_be_run_by_hand(db: Db, command: Command) -> None:
    """Issue: where only somebody else may run DDL, a script of it must leave nothing to be made by rowmill."""
    create_bare(db)
    command.app(db.url, LANE, *TASKS)
    script = command("migrate", "--all").out
    if db.dialect == "postgresql":
        words = [str(installed("psql")), db.direct, "-q", "-v", "ON_ERROR_STOP=1"]
        subprocess.run(words, input=script, text=True, timeout=60, check=True)
    else:
        db.execute(script)
    assert command.json("migrate")["environments"][0]["statements"] == []


# -- under load


class Writers:
    """A writer that inserts and updates all the time, and keeps how long each statement took."""

    def __init__(self, db: Db) -> None:
        self.longest, self.count, self._stop = 0.0, 0, False
        self._task = asyncio.run_coroutine_threadsafe(self._write(db), _loop())

    async def _write(self, db: Db) -> None:
        connection = await asyncpg.connect(db.direct)
        while not self._stop:
            began = time.monotonic()
            await connection.execute("insert into jobs (note) values ('w')")
            await connection.execute("update jobs set note = 'v' where id = $1", self.count % 1000 + 1)
            self.longest = max(self.longest, time.monotonic() - began)
            self.count += 1
            await asyncio.sleep(0.001)
        await connection.close()

    def stop(self) -> None:
        self._stop = True
        self._task.result(timeout=60)


@contextmanager
def long_transaction(db: Db, sql: str) -> Iterator[Any]:
    """A transaction that stays open, holding what its statement holds; ``close()`` ends it early."""

    class Held:
        def __init__(self) -> None:
            self.connection = _wait(asyncpg.connect(db.direct))
            self.open = True
            _wait(self.connection.execute("begin; " + sql))

        def close(self) -> None:
            if self.open:
                self.open = False
                _wait(self.connection.execute("rollback"))
                _wait(self.connection.close())

    held = Held()
    try:
        yield held
    finally:
        held.close()


#: Of a report that reads the same state throughout: an index build waits for its end.
SNAPSHOT = "set transaction isolation level repeatable read; select 1"


class Migrations:
    """The command in processes of its own; what they say goes to one file."""

    def __init__(self, folder: Path, app: str) -> None:
        self.folder, self.app, self.log = folder, app, folder / "migrate.log"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "rowmill", "migrate", self.app, "--apply", "--lock-timeout", "0.3"]
        with self.log.open("a") as log:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(
                words, cwd=self.folder, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.started.append(process)
        return process

    def said(self) -> str:
        return self.log.read_text()

    def __enter__(self) -> Migrations:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=60)


def test_migrate_gives_way_to_writers_and_to_a_long_transaction_and_goes_on_after_a_kill(
    pg: Db, command: Command, tmp_path: Path
) -> None:
    """Issue: writers never wait longer than the lock timeout; killed in the middle and run again it completes."""
    create_jobs(pg, 60_000)
    app = command.app(pg.url, LANE)
    writers = Writers(pg)
    with Migrations(tmp_path, app) as migrations:
        with long_transaction(pg, "select 1 from jobs limit 1") as first:
            process = migrations.start()
            eventually(lambda: migrations.said().count("is in use (process") >= 2)
            assert process.poll() is None
            # The reader ends, so the columns can come; another one keeps the index build from ending.
            with long_transaction(pg, SNAPSHOT) as second:
                first.close()
                eventually(lambda: "waiting for old snapshots" in migrations.said())
                os.kill(process.pid, signal.SIGKILL)
                process.wait(timeout=60)
                assert pg.value("select count(*) from pg_index where not indisvalid") == 1
                again = migrations.start()
                eventually(lambda: "another migration is running here" in migrations.said())
                second.close()
                assert again.wait(timeout=60) == 0, migrations.said()
        assert "statements, all done" in migrations.said()
        writers.stop()
    assert writers.count > 100
    assert writers.longest < 0.3 + 1.0, "the lock timeout, and some time for a slow machine"
    assert pg.value("select count(*) from pg_index where not indisvalid") == 0
    assert command.json("migrate")["environments"][0]["statements"] == []


def test_a_build_that_was_cut_off_for_good_is_found_and_done_again(pg: Db, command: Command, tmp_path: Path) -> None:
    """Issue: resumable: also where the server's side of the build was ended, too."""
    create_jobs(pg, 1000)
    with Migrations(tmp_path, command.app(pg.url, LANE)) as migrations, long_transaction(pg, SNAPSHOT):
        process = migrations.start()
        eventually(lambda: "waiting for old snapshots" in migrations.said())
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
        pg.execute("select pg_terminate_backend(pid) from pg_stat_progress_create_index")
        eventually(lambda: pg.value("select count(*) from pg_stat_progress_create_index") == 0)
    assert pg.value("select count(*) from pg_index where not indisvalid") == 1
    assert pg.value("select count(*) from rowmill_ddl where state = 'begun'") == 1
    ended = command("migrate", "--apply")
    assert ended.code == 0, ended
    assert "rebuilding it" in ended.err
    assert pg.value("select count(*) from pg_index where not indisvalid") == 0
    assert pg.value("select count(*) from rowmill_ddl where state = 'begun'") == 0


def test_patience_ends_with_a_word_what_to_do(pg: Db, command: Command) -> None:
    create_jobs(pg, 10)
    command.app(pg.url, LANE)
    with long_transaction(pg, "lock table jobs in share mode"):
        ended = command("migrate", "--apply", "--lock-timeout", "0.05", "--patience", "1")
    assert ended.code == 1
    assert "stayed in use" in ended.err
    assert "Try: run this again" in ended.err
