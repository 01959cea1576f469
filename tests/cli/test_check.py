"""check: errors, warnings and what each costs; it reads, and has exit codes for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import systems
from command import NOWHERE, Command
from databases import Db


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def codes(document: Any, lane: str | None = None) -> set[str]:
    return {
        finding["code"]
        for checked in document["checked"]
        if lane is None or checked["lane"] == lane
        for finding in checked["findings"]
    }


def lane(table: str, **options: Any) -> str:
    said = {"ready": {"status": "new"}, "running": {"status": "run"}, "done": {"status": "ok"},
            "dead": {"status": "bad"}, "name": table} | options  # fmt: skip
    return f"mill.lane({table!r}, **{said!r})(handler)"


def create(db: Db, table: str = "jobs", more: str = "worker text, claimed_at timestamptz") -> None:
    more = more if db.dialect == "postgresql" else more.replace("timestamptz", "datetime")
    db.execute(f"create table {table} (id integer primary key, status text not null default 'new', {more})")


@pytest.mark.no_pooler("it counts the connections that a worker needs, one of them to listen")
def test_a_lane_that_lacks_nothing_is_well(pg: Db, command: Command) -> None:
    create(
        pg, more="worker text, claimed_at timestamptz, heartbeat_at timestamptz, attempts int default 0,"
        " run_after timestamptz, error text"
    )  # fmt: skip
    pg.execute("create index on jobs (id) where status = 'new'; alter table jobs set (fillfactor = 80)")
    command.app(pg.url, lane("jobs"))
    ended = command("check", "--strict")
    assert ended.code == 0, ended
    assert "No problems found." in ended.out
    assert "up to 9 connections" in ended.out


def test_warnings_are_for_people_and_with_strict_for_ci(db: Db, command: Command) -> None:
    create(db)
    command.app(db.url, lane("jobs"))
    document = command.json("check")
    assert document["ok"]
    assert codes(document) >= {"no_heartbeat_at", "no_attempts", "no_run_after", "no_error", "no_ready_index"}
    (checked,) = document["checked"]
    assert checked["roles"] == {"worker": "worker", "claimed_at": "claimed_at"}
    assert checked["key"] == ["id"]
    assert checked["plan"]["lines"]
    assert command("check", "--strict").code == 1
    ended = command("check")
    assert "warning: no column has the role heartbeat_at: leases are not renewed" in ended.out
    assert "Try: rowmill migrate" in ended.out


ERRORS = {
    "no table": (lane("nothing"), "declaration", "no table"),
    "no column": (lane("jobs", done={"status": "ok", "stat": "ok"}), "declaration", "there is no column 'stat'"),
    "no fence": (lane("bare"), "declaration", "rowmill migrate APP --apply adds a worker column"),
    "a condition that is none": (lane("jobs", where="nonsense >"), "declaration", "where cannot be used"),
    "a worker that refers to a table": (lane("referring"), "role_refers", "refers to jobs"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_would_not_work_is_an_error(name: str, db: Db, command: Command) -> None:
    create(db)
    create(db, "bare", "note text")
    db.execute("create unique index one on jobs (status)")
    create(db, "referring", "worker text references jobs (status), claimed_at timestamptz")
    line, code, said = ERRORS[name]
    command.app(db.url, line)
    document = command.json("check", code=1)
    assert code in codes(document)
    assert document["errors"] == 1
    assert said in str(document["checked"])


@pytest.mark.parametrize("column", ["boddy", "status", "worker", "id"])
def test_a_column_that_cannot_be_an_input_is_an_error_with_a_hint(db: Db, command: Command, column: str) -> None:
    """Issue 23: one that is not there, one that the lane writes, one with a role, the key."""
    create(db, more="worker text, claimed_at timestamptz, body text")
    command.app(db.url, lane("jobs", inputs=[column]))
    (checked,) = command.json("check", code=1)["checked"]
    (error,) = [finding for finding in checked["findings"] if finding["level"] == "error"]
    assert column in error["text"]
    assert "body" in error["hint"]


def test_a_parameter_that_no_resource_answers_to_is_an_error(db: Db, command: Command) -> None:
    """Issue: a worker refuses to start with it. What else is wrong with the lane is told as well."""
    create(db)
    handlers = "async def fetch(job, htp): ...\nasync def send(to, htp=injected): ...\nmill.task(send)"
    resource = "from rowmill import injected\n@mill.resource\ndef http(): ..."
    command.app(db.url, resource, handlers, lane("jobs").replace("(handler)", "(fetch)"))
    document = command.json("check", code=1)
    assert codes(document, "jobs") >= {"handler", "no_heartbeat_at"}
    assert codes(document, "default") >= {"handler"}
    (finding,) = [
        f for c in document["checked"] for f in c["findings"] if f["code"] == "handler" and c["lane"] == "jobs"
    ]
    assert "the handler needs the resource 'htp'" in finding["text"]
    assert "did you mean 'http'?" in finding["hint"]


@pytest.mark.parametrize("ignored", [["on_hold", "archived"], [{"status": ["on_hold", "archived"]}]])
def test_states_that_are_no_lanes_business_can_be_acknowledged(db: Db, command: Command, ignored: Any) -> None:
    """Issue: --strict can pass on a table with a legitimate state that no lane leads out of."""
    create(db)
    db.execute("insert into jobs (id, status) values (1, 'on_hold'), (2, 'archived')")
    command.app(db.url, lane("jobs"))
    (finding,) = [f for c in command.json("check")["checked"] for f in c["findings"] if f["code"] == "left_alone"]
    assert "'on_hold' (1)" in finding["text"]
    assert "ignore_states=" in finding["hint"]
    command.app(db.url, lane("jobs", ignore_states=ignored))
    assert "left_alone" not in codes(command.json("check"))
    db.execute("insert into jobs (id, status) values (3, 'stranded')")
    (finding,) = [f for c in command.json("check")["checked"] for f in c["findings"] if f["code"] == "left_alone"]
    assert "'stranded'" in finding["text"]
    assert "on_hold" not in finding["text"]


def test_a_role_that_is_switched_off_and_a_failure_that_is_final_are_no_warnings(db: Db, command: Command) -> None:
    """Issue: what the declaration says on purpose is not told again."""
    create(db)
    off = dict.fromkeys(("heartbeat_at", "run_after", "error"))
    command.app(db.url, lane("jobs", roles=off, max_attempts=1))
    assert not {code for code in codes(command.json("check")) if code.startswith("no_")} - {"no_ready_index"}


def test_where_the_table_of_tasks_is_missing_check_says_what_makes_it(db: Db, command: Command) -> None:
    """C1: nobody creates rowmill_jobs by hand, nor means another table by it."""
    create(db)
    command.app(db.url, "@mill.task\nasync def report(to: str): ...")
    document = command.json("check", code=1)
    ((finding,),) = [c["findings"] for c in document["checked"] if c["lane"] == "default"]
    assert "there is no table 'rowmill_jobs'" in finding["text"]
    assert finding["hint"].startswith("rowmill migrate APP --apply makes it")


def test_an_environment_that_is_down_is_an_error_and_the_others_are_checked(db: Db, command: Command) -> None:
    create(db)
    command.app({"here": db.url, "there": NOWHERE}, lane("jobs"))
    document = command.json("check", code=1)
    assert [c["environment"] for c in document["checked"]] == ["here", "there"]
    assert codes({"checked": document["checked"][1:]}) == {"unreachable"}


def test_lanes_are_seen_together(db: Db, command: Command) -> None:
    """Issue: overlapping claims, a done that is ready again, states that no lane leads out of."""
    create(db, more="worker text, claimed_at timestamptz, run_after timestamptz")
    db.execute("insert into jobs (id, status) values (1, 'new'), (2, 'stranded'), (3, 'ok')")
    round_again = lane("jobs", name="round", done={"status": "new"}, running={"status": "r2"})
    command.app(db.url, lane("jobs", name="one"), round_again)
    document = command.json("check")
    assert {"overlap", "left_alone"} <= codes(document, "one")
    assert "done_is_ready" in codes(document, "round")
    (alone,) = [f for c in document["checked"] for f in c["findings"] if f["code"] == "left_alone"]
    assert "'stranded' (1)" in alone["text"]
    assert "'ok'" not in alone["text"]


def test_lanes_that_would_sweep_each_others_rows_are_an_error(db: Db, command: Command) -> None:
    create(db)
    command.app(db.url, lane("jobs", name="a"), lane("jobs", name="b", ready={"status": "other"}))
    assert "sweeps" in codes(command.json("check", code=1))


def test_a_pipeline_is_not_an_overlap(db: Db, command: Command) -> None:
    """A11, B2"""
    systems.create(db, "registre")
    command.app(db.url, "ocr", "extraction", "req")
    document = command.json("check")
    assert not {"overlap", "done_is_ready", "sweeps"} & codes(document)


@pytest.mark.no_pooler("migrate, or what goes with it, needs the database's direct address")
def test_upkeep_of_a_hot_table_is_looked_after(pg: Db, command: Command) -> None:
    create(pg, more="worker text, heartbeat_at timestamptz, updated_at timestamptz")
    pg.execute(
        "insert into jobs (id, status) select n, 'ok' from generate_series(1, 120000) n; insert into jobs (id) select"
        " n from generate_series(200000, 200010) n; create index beats on jobs (heartbeat_at); create index u on jobs"
        " (updated_at); create function t() returns trigger language plpgsql as $$ begin return new; end $$;"
        "create trigger t before update on jobs for each row execute function t(); analyze jobs"
    )
    command.app(pg.url, lane("jobs"))
    found = codes(command.json("check"))
    wanted = {"heartbeat_indexed", "fillfactor", "autovacuum", "no_statistics", "no_ready_index", "no_running_index",
              "touching_trigger"}  # fmt: skip
    assert wanted <= found
    assert command("migrate", "--apply").code == 0
    after = codes(command.json("check"))
    assert after == {"heartbeat_indexed", "touching_trigger"}, "what migrate can do, it did"


def test_a_role_that_may_not_write_and_row_security_are_told(pg: Db, command: Command) -> None:
    create(pg)
    pg.execute(
        "create role lowly_check login; grant select on jobs to lowly_check; alter table jobs enable row level security"
    )
    try:
        command.app(pg.url.replace("postgres:", "lowly_check:", 1), lane("jobs"))
        assert {"rights", "row_security"} <= codes(command.json("check", code=1))
    finally:
        pg.execute("drop owned by lowly_check; drop role lowly_check")


@pytest.mark.no_pooler("it counts the connections that a worker needs, one of them to listen")
def test_check_says_how_many_connections_processes_need(pg: Db, command: Command) -> None:
    create(pg)
    command.app(pg.url, lane("jobs"))
    document = command.json("check", "--processes", "50")
    assert document["connections"]["default"]["at_most"] == 450
    assert "connections" in codes(document)
    assert "50 processes need up to 450 connections" in command("check", "--processes", "50").out


def test_check_writes_nothing(db: Db, command: Command) -> None:
    """Issue: read-only. On PostgreSQL the transaction could not write; here nothing of rowmill's own is made."""
    create(db)
    command.app(db.url, lane("jobs"))
    assert command("check").code == 0
    table = "pg_tables where tablename" if db.dialect == "postgresql" else "sqlite_master where name"
    assert db.value(f"select count(*) from {table} like 'rowmill%'") == 0


def test_a_syntax_error_in_the_application_names_the_file_and_the_line(command: Command, tmp_path: Path) -> None:
    """Issue: the line to correct, and not a place inside the import machinery."""
    (tmp_path / "broken_part.py").write_text("x = 1\nmill = Mill(\n")
    (tmp_path / "whole.py").write_text("import broken_part\n")
    for app in ("broken_part:mill", "whole:mill"):
        ended = command("check", app)
        assert ended.code == 1
        assert "broken_part.py, line 2: '(' was never closed" in ended.err
        assert "Try: correct line 2 of " in ended.err
        assert "importlib" not in ended.err


@pytest.mark.no_pooler("the pooler answers for the server")
def test_a_database_that_does_not_exist_is_named_with_the_command_that_makes_it(pg: Db, command: Command) -> None:
    """Issue: the server is up, so nothing is said about that."""
    name = pg.url.partition("?")[0].rpartition("/")[2]
    command.app(pg.url.replace(f"/{name}?", "/no such shop?"), lane("jobs"))
    for words in (["check"], ["migrate"], ["run", "--drain"]):
        ended = command(*words)
        assert ended.code == 1
        said = ended.out + ended.err
        assert "there is no database 'no such shop' on " in said
        assert 'Try: create database "no such shop", or correct the name in the URL' in said
        assert "server is up" not in said


PHASES = """
from rowmill import NOW
def phase(name, before, after, **more):
    mill.lane("docs", name=name, ready={"state": before, "picked_up_at": None}, running={"picked_up_at": NOW},
              done={"state": after, **more}, dead={"state": 9}, roles={"claimed_at": "picked_up_at"})(handler)
"""


def test_a_done_row_that_is_running_for_the_next_lane_is_an_error(db: Db, command: Command) -> None:
    """Two phases that share the time of a claim: the second would wait for a lease on every row."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(f"create table docs (id integer primary key, state integer, picked_up_at {time}, worker text)")
    command.app(db.url, PHASES, "phase('fetch', 1, 2); phase('parse', 2, 3)")
    document = command.json("check", code=1)
    (finding,) = [f for c in document["checked"] for f in c["findings"] if f["code"] == "done_is_running"]
    assert "fetch has done looks like a running row of parse" in finding["text"]
    assert "{'picked_up_at': None}" in finding["hint"]
    command.app(db.url, PHASES, "phase('fetch', 1, 2, picked_up_at=None); phase('parse', 2, 3)")
    assert "done_is_running" not in codes(command.json("check"))


def test_an_ignored_word_is_of_the_column_that_names_the_state(db: Db, command: Command) -> None:
    """A claim that is a time that is set: the word is not meant for that column, and check's hint can be followed."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(f"create table docs (id integer primary key, state integer, picked_up_at {time}, worker text)")
    db.execute("insert into docs (id, state) values (1, 6)")
    command.app(db.url, PHASES, "phase('fetch', 1, 2)")
    (finding,) = [f for c in command.json("check")["checked"] for f in c["findings"] if f["code"] == "left_alone"]
    assert "ignore_states=[{'state': 6}]" in finding["hint"]
    for ignored in ("[6]", "[{'state': 6}]"):
        command.app(db.url, PHASES.replace("roles=", f"ignore_states={ignored}, roles="), "phase('fetch', 1, 2)")
        assert "left_alone" not in codes(command.json("check"))
