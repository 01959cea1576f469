"""adopt: what it says, what it asks, and that it only looks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

import systems
from command import Command
from databases import Db, _wait
from rowmill.adopt import survey as survey_module
from rowmill.adopt.survey import survey
from rowmill.store import Database
from waiting import eventually


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


UNCLEAR = {
    "two columns alike": (
        "create table t (id int primary key, payment_status text default 'pending', shipping_status text default"
        " 'pending')",
        "state",
        "payment_status, shipping_status",
    ),
    "numbers without a word": (
        "create table t (id int primary key, status int not null); insert into t values (1, 0), (2, 1), (3, 2)",
        "ready",
        "0, 1, 2",
    ),
    "words that nobody knows": (
        "create table t (id int primary key, status text not null); insert into t values (1, 'foo'), (2, 'bar')",
        "ready",
        "foo",
    ),
    "two that are ready": (
        "create table t (id int primary key, status text not null); insert into t values (1, 'pending_a'),"
        " (2, 'pending_b'), (3, 'done')",
        "ready",
        "pending_a",
    ),
    "a pipeline": (
        "create table t (id int primary key, status text default 'new' check (status in ('new', 'fetched', 'parsed',"
        " 'indexed')))",
        "done",
        "fetched",
    ),
    "two flags": (
        "create table t (id int primary key, processed boolean default false, sent boolean default false)",
        "state",
        "processed, sent",
    ),
    "a ready that is the end": (
        "create table t (id int primary key, state text default 'uploaded' check (state in ('uploaded', 'transcoding',"
        " 'ready', 'error')))",
        "ready",
        "uploaded",
    ),
    "things that nobody works on": (
        "create table t (id int primary key, status text not null default 'available')",
        "done",
        "may not mean work to do",
    ),
    "no state at all": ("create table t (id int primary key, name text, price int)", "state", "name"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_the_table_does_not_tell_is_asked_and_never_guessed(name: str, db: Db, command: Command) -> None:
    """Issue: where the state is ambiguous it says so instead of guessing."""
    ddl, about, named = UNCLEAR[name]
    db.execute(ddl)
    ended = command("adopt", db.url, "t", "--yes", "--write", "t.py")
    assert ended.code == 5
    assert "Cannot tell: " in ended.err
    assert named in ended.err
    assert "Try: rowmill adopt " in ended.err
    assert f" t --{about} " in ended.err
    assert not Path("t.py").exists()
    document = command.json("adopt", db.url, "t", "--yes", code=5)
    assert [q["about"] for q in document["questions"]] == [about]
    assert document["file"] is None


def test_options_answer_what_the_table_does_not_tell(db: Db, command: Command) -> None:
    db.execute("create table t (id int primary key, status int not null); insert into t values (1, 0), (2, 1), (3, 2)")
    said = ("--ready", "0", "--running", "1", "--done", "2", "--dead", "9")
    document = command.json("adopt", db.url, "t", "--yes", *said)
    states = {key: document["options"][key] for key in ("ready", "running", "done", "dead")}
    assert states == {"ready": {"status": 0}, "running": {"status": 1}, "done": {"status": 2}, "dead": {"status": 9}}
    assert {c["why"] for c in document["choices"] if c["what"] in states} == {"you said so"}


def test_the_json_has_the_file_the_ddl_and_both_plans(db: Db, command: Command) -> None:
    systems.create(db, "enrichment")
    systems.insert_enrichment(db, 3)
    document = command.json("adopt", db.url, "enrichment_jobs", "--yes")
    assert document["needs_migrate"] is None
    compile(document["file"], "file", "exec")
    assert any("create index" in each["statement"] for each in document["ddl"])
    assert document["plan"]["lines"]
    assert document["plan_with_index"]["lines"]
    assert document["rows"] == 3


def test_with_the_proposed_index_the_plan_of_a_larger_table_walks_it(pg: Db, command: Command) -> None:
    pg.execute(
        "create table jobs (id serial primary key, status text not null default 'queued', worker text, created_at"
        " timestamptz default now()); insert into jobs (status) select case when n % 50 = 0 then 'queued' else 'done'"
        " end from generate_series(1, 30000) n; analyze jobs"
    )
    document = command.json("adopt", pg.url, "jobs", "--yes")
    assert not document["plan"]["uses_index"]
    assert document["plan_with_index"]["uses_index"]
    assert document["plan_with_index"]["cost"] < document["plan"]["cost"] / 10


def test_a_password_is_not_written_into_the_file(pg: Db, command: Command) -> None:
    systems.create(pg, "enrichment")
    url = pg.url.replace("postgres:@", "postgres:s3cret@")
    ended = command("adopt", url, "enrichment_jobs", "--yes", "--write", "e.py")
    assert ended.code == 0
    assert "s3cret" not in ended.out + ended.err + Path("e.py").read_text()
    assert "ROWMILL_DATABASE_URL" in Path("e.py").read_text()


def test_a_file_that_is_there_is_not_overwritten(db: Db, command: Command) -> None:
    systems.create(db, "enrichment")
    Path("mine.py").write_text("mine")
    ended = command("adopt", db.url, "enrichment_jobs", "--yes", "--write", "mine.py")
    assert ended.code == 2
    assert Path("mine.py").read_text() == "mine"
    assert command("adopt", db.url, "enrichment_jobs", "--yes", "--write", "mine.py", "--force").code == 0


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["{url}", "enrichment_job"], "there is no table 'enrichment_job'", "did you mean 'enrichment_jobs'?"),
        (["{url}"], "a database and a table", "rowmill adopt postgresql://"),
        (["mysql://x/y", "t"], "cannot use the database URL", "sqlite:///"),
        (["{url}", "keyless"], "no primary key", "add primary key"),
        (["{url}", "enrichment_jobs", "--state", "stat"], "no column 'stat'", "did you mean 'status'?"),
    ],
)
def test_mistakes_are_told_with_a_way_out(db: Db, command: Command, words: list[str], said: str, hint: str) -> None:
    systems.create(db, "enrichment")
    db.execute("create table keyless (status text)")
    ended = command("adopt", *[word.format(url=db.url) for word in words], "--yes")
    assert ended.code in (1, 2)
    assert said in ended.err
    assert hint in ended.err


def test_a_drain_does_not_wait_for_rows_that_may_never_come_back(db: Db, command: Command) -> None:
    """A table as it is found, with rows that somebody left running: nothing in it could tell whether he is alive."""
    db.execute("create table t (id int primary key, status text not null default 'new')")
    db.execute("insert into t values (1, 'new'), (2, 'processing'), (3, 'done')")
    assert command("adopt", db.url, "t", "--yes", "--write", "left.py").code == 0
    ended = command("run", "left:mill", "--drain")
    assert ended.code == 0
    assert "Drained: 1 done, 0 failed attempts, 0 dead; nothing is ready.\n" in ended.err
    assert "1 row of lane 't' still running: no column shows which worker holds them" in ended.err
    assert [row["status"] for row in db.query("select status from t order by id")] == ["done", "processing", "done"]


def test_a_view_is_told_from_a_table_without_a_key(db: Db, command: Command) -> None:
    db.execute("create table t (id int primary key, status text default 'new'); create view v as select * from t")
    ended = command("adopt", db.url, "v", "--yes")
    assert ended.code == 1
    assert "'v' is a view" in ended.err
    assert "Try: adopt the table behind it" in ended.err


def test_a_table_that_is_not_there_makes_no_file(tmp_path: Path, command: Command) -> None:
    ended = command("adopt", "sqlite:///nothing.db", "t", "--yes")
    assert ended.code == 1
    assert not (tmp_path / "nothing.db").exists()


# -- only looking


BIG = (
    "create table big (id bigint generated always as identity primary key, status text not null default 'queued',"
    " attempts int not null default 0, created_at timestamptz not null default now(), note text);"
    "insert into big (status, note) select case when n % 1000 = 0 then 'queued' when n % 30001 = 0 then 'running' else"
    " 'done' end, repeat('x', 300) from generate_series(1, 80000) n; analyze big"
)


def test_a_large_table_is_sampled_never_scanned_and_only_ever_read_locked(
    pg: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: seconds at 5 million rows, and no lock stronger than a reader's."""
    pg.execute(BIG)
    command.app(
        pg.url,
        "mill.lane('big', name='big', ready={'status': 'queued'}, running={'status': 'running'},"
        " done={'status': 'done'}, dead={'status': 'failed'}, unfenced=True)(handler)",
    )
    modes: set[str] = set()
    texts: list[str] = []
    plain = survey_module.runner

    def spy(connection: sa.Connection):  # type: ignore[no-untyped-def]
        run = plain(connection)

        def seen(sql: str, parameters: object = ()):  # type: ignore[no-untyped-def]
            texts.append(sql)
            found = run(sql, parameters)
            held = run("select mode from pg_locks where pid = pg_backend_pid() and relation = to_regclass('big')", ())
            modes.update(row[0] for row in held)
            return found

        return seen

    for module in ("adopt.survey", "ops.check", "migrate.ddl", "store.inspect.plans"):
        monkeypatch.setattr(f"rowmill.{module}.runner", spy)
    before = pg.value("select seq_tup_read from pg_stat_user_tables where relname = 'big'")
    document = command.json("adopt", pg.url, "big", "--yes")
    assert command.json("check")["errors"] == 0
    assert modes == {"AccessShareLock"}
    assert len(texts) > 20
    assert not document["exact"]
    assert 70_000 < document["rows"] < 90_000
    assert document["options"]["running"] == {"status": "running"}, "the statistics know what the sample may miss"
    # What was read: some pages, the newest rows, a copy of some pages for the plan; twice.
    if pg.server_version < 15:
        return  # the server tells its statistics some time later
    pg.execute("select pg_stat_force_next_flush()")
    read = pg.value("select seq_tup_read from pg_stat_user_tables where relname = 'big'") - before
    assert read < 80_000


def test_adopt_and_check_wait_for_no_lock(pg: Db, command: Command) -> None:
    """A table that somebody holds for himself is said to be busy, soon."""
    import asyncpg

    systems.create(pg, "enrichment")
    command.app(pg.url, "enrichment")
    connection = _wait(asyncpg.connect(pg.direct))
    _wait(connection.execute("begin; lock table enrichment_jobs in access exclusive mode"))
    try:
        began = time.monotonic()
        ended = command("adopt", pg.url, "enrichment_jobs", "--yes")
        assert ended.code == 1
        assert "lock timeout" in ended.err
        assert time.monotonic() - began < 10
    finally:
        _wait(connection.close())


async def test_an_index_tells_values_that_no_sample_has(pg: Db) -> None:
    pg.execute(BIG + "; insert into big (status) values ('rare'); create index by_status on big (status)")
    database = Database.open(pg.url)
    facts = await survey(database, "big")
    await database.close()
    column = facts.column("status")
    assert column is not None
    assert "rare" in column.seen


# -- at a terminal


def test_at_a_terminal_it_asks_what_it_does_not_know(lite: Db, tmp_path: Path) -> None:
    """Issue: questions at a terminal where it is unsure."""
    lite.execute("create table t (id integer primary key, status int not null); insert into t values (1, 0), (2, 1)")
    main, child = pty.openpty()
    words = [sys.executable, "-m", "rowmill", "adopt", lite.url, "t", "--write", "t.py"]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    process = subprocess.Popen(
        words, stdin=child, stdout=child, stderr=child, cwd=tmp_path, env=environment, start_new_session=True
    )
    os.close(child)
    shown = ""

    def read() -> str:
        nonlocal shown
        if select.select([main], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):  # the other side is closed
                shown += os.read(main, 65536).decode(errors="replace")
        return shown

    try:
        for asked, answer in (
            ("which value means ready", "0"),
            ("which value means done", "two"),
            ("holds whole numbers, not 'two'", "2"),
            ("the value that means running", "1"),
        ):
            eventually(lambda asked=asked: asked in read())  # type: ignore[misc]
            os.write(main, f"{answer}\n".encode())
        eventually(lambda: process.poll() is not None or not read() or "Next" in read())
        eventually(lambda: process.poll() is not None or (read() and False))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)
        os.close(main)
    assert process.returncode == 0, shown
    text = (tmp_path / "t.py").read_text()
    assert re.search(r'ready=\{"status": 0', text)
    assert re.search(r'running=\{"status": 1', text)
    assert re.search(r'done=\{"status": 2', text)
    assert json.dumps("t") in text


def test_the_trigger_that_wakes_workers_is_shown_where_it_is_wanted(
    pg: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by an option, or at a terminal by an answer; never without."""
    pg.execute("create table links (id bigint primary key, url text, status text default 'queued')")
    without = command("adopt", pg.url, "links", "--yes")
    assert "create trigger" not in without.out
    assert "--wake" not in without.out
    document = command.json("adopt", pg.url, "links", "--yes", "--wake")
    assert document["wake"] is True
    assert [each["kind"] for each in document["ddl"]][-1] == "wake"
    command.terminal(200)
    monkeypatch.setattr(sys, "stdin", Answers(*"y" * 9))
    asked = command("adopt", pg.url, "links", *VALUES)
    assert "Propose the trigger? [y/N]" in asked.out
    assert "create trigger rowmill_wake_insert" in asked.out
    assert "--wake --apply" in asked.out


VALUES = ("--ready=queued", "--running=running", "--done=done", "--dead=dead")


class Answers(io.StringIO):
    """Standard input of a terminal where somebody types these lines."""

    def __init__(self, *lines: str) -> None:
        super().__init__("".join(f"{line}\n" for line in lines))

    def isatty(self) -> bool:
        return True


def test_the_next_steps_say_that_the_handler_is_still_empty(lite: Db, command: Command) -> None:
    """A handler that does nothing, run on a live table, would mark every row as done."""
    lite.execute("create table links (id integer primary key, url text, status text default 'queued')")
    ended = command("adopt", lite.url, "links", "--yes", "--write", "links.py")
    assert ended.out.index("edit links.py") < ended.out.index("rowmill run links:mill")
    assert "fill in the handler: it only logs rows, and they are then done" in ended.out
    assert "Try:" not in ended.err, "what --yes has accepted needs no other command"
