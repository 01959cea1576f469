"""``rowmill prove``: a user's own lane on a copy of his schema; his own tables are only read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from command import Command
from databases import Db
from rowmill.migrate.schema_copy import without_foreign_keys
from rowmill.prove.interleave import Interleaver
from rowmill.store.lane.statements import Statements

pytestmark = pytest.mark.no_pooler("a trial needs sessions of its own, and says so")

LANE = """@mill.lane("jobs", ready={"status": ["queued", "failed"]}, running={"status": "running"},
    done={"status": "done"}, retry={"status": "failed"}, dead={"status": "dead"}%s)
async def crawl(job):
    open("handler-was-run", "w")"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def jobs(db: Db) -> None:
    """A table as people have them, with a row: foreign keys, checks, NOT NULL, a unique column."""
    time = "timestamptz" if db.dialect == "postgresql" else "text"
    key = "bigint generated always as identity primary key" if db.dialect == "postgresql" else "integer primary key"
    db.execute("create table users (id integer primary key)")
    db.execute("insert into users values (7)")
    db.execute(f"""create table jobs (
  id {key},
  user_id integer not null references users (id) on delete cascade,
  url text not null unique,
  kind text not null check (kind in ('page', 'feed')),
  status text not null default 'queued' check (status in ('queued', 'running', 'failed', 'done', 'dead')),
  domain text,
  worker text, claimed_at {time}, heartbeat_at {time}, run_after {time},
  attempts integer not null default 0, error text
)""")
    db.execute("create index jobs_ready on jobs (id) where status in ('queued', 'failed')")
    db.execute("insert into jobs (user_id, url, kind, domain) values (7, 'https://a.example/', 'page', 'a.example')")


def fingerprint(db: Db) -> Any:
    """All that is in the user's database, and all that it is made of."""
    if db.dialect == "sqlite":
        path = Path(db.url.removeprefix("sqlite:///"))
        return hashlib.sha256(path.read_bytes()).hexdigest(), db.query("select * from jobs")
    names = db.query("select relname from pg_class where relnamespace = 'public'::regnamespace order by 1")
    counted = db.query("select last_value, is_called from jobs_id_seq")
    return names, counted, db.query("select *, xmin::text, ctid::text from jobs")


def reader(db: Db) -> str:
    """The URL of one who may read the user's tables, make databases, and write nothing."""
    if db.dialect == "sqlite":
        return db.url
    if not db.query("select 1 from pg_roles where rolname = 'prover'"):
        db.execute("create role prover login createdb")
    db.execute("grant select on all tables in schema public to prover")
    assert "://postgres:" in db.url
    return db.url.replace("://postgres:", "://prover:")


def test_a_lane_is_proved_on_a_copy_and_its_own_tables_are_only_read(command: Command, db: Db) -> None:
    """X1: schedules and killed processes on the copy; the user's database is as it was, and his handler was not run."""
    jobs(db)
    command.app(reader(db), "from rowmill import Concurrency", LANE % ', gates=[Concurrency(1, by="domain")]')
    before = fingerprint(db)
    (lane,) = command.json("prove", "--schedules", "12", "--seconds", "0.5")["lanes"]
    assert lane["held"]
    assert lane["interleaver"]["schedules"] == 12
    assert lane["interleaver"]["claims"] > 12
    chaos = lane["chaos"]
    assert (chaos["lost"], chaos["doubled"], chaos["left"]) == (0, 0, 0)
    assert chaos["killed"] >= 1
    assert chaos["rows"] == chaos["done"] + chaos["dead"]
    assert "at most 1 running by domain" in lane["promises"]
    assert fingerprint(db) == before
    assert not Path("handler-was-run").exists()
    if db.dialect == "postgresql":
        assert not db.query("select 1 from pg_database where datname like 'rowmill_prove%'")


def test_a_lane_with_chunks_is_proved_in_chunks(command: Command, lite: Db) -> None:
    """Issue 23: a mapping, a list, rows left out and rows that fail their call; then killed workers."""
    jobs(lite)
    chunked = LANE.replace("async def crawl(job)", "async def crawl(jobs)")
    options = ", chunk=8, chunk_wait=__import__('datetime').timedelta(seconds=60)"
    command.app(lite.url, chunked % options)
    (lane,) = command.json("prove", "--schedules", "12", "--seconds", "0.5")["lanes"]
    assert lane["held"]
    assert lane["interleaver"]["outcomes"] > 12
    assert lane["chaos"]["done"] > 0
    assert not Path("handler-was-run").exists()


def test_a_task_with_chunks_is_proved(command: Command, lite: Db) -> None:
    command.app(lite.url, "@mill.task(chunk=4)", "async def send(tos: list[str]): ...")
    ended = command("prove", "--schedules", "5", "--seconds", "0")
    assert ended.code == 0, ended.out + ended.err


def test_a_pause_that_the_last_schedule_left_does_not_hold_the_killed_workers_up(
    command: Command, lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of one part of a trial is there in the next."""
    jobs(lite)
    command.app(lite.url, "from rowmill import Concurrency", LANE % ', gates=[Concurrency(1, by="domain")]')
    whole = Interleaver.try_seeds

    async def left_paused(self: Interleaver, seeds: Any) -> Any:
        tried = await whole(self, seeds)
        values = "('crawl', '', '', '9999-12-31 00:00:00')"
        await self._run(f"insert or replace into rowmill_gates (lane, dim, key, paused_until) values {values}")
        return tried

    monkeypatch.setattr(Interleaver, "try_seeds", left_paused)
    (lane,) = command.json("prove", "--schedules", "1", "--seconds", "0.1")["lanes"]
    assert lane["held"]
    assert lane["chaos"]["left"] == 0


def test_a_broken_schedule_is_told_with_its_steps_and_replayed(
    command: Command, lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1: exit code 1, the steps, and the command that gives the same schedule again."""
    jobs(lite)
    app = command.app(lite.url, LANE % "")
    whole = Statements.fence
    monkeypatch.setattr(
        Statements, "fence", lambda self, row, *v: f"{self.running(row + '.')} and ({whole(self, row, *v)} or true)"
    )
    ended = command("prove", app, "crawl", "--schedules", "400", "--seconds", "0")
    assert ended.code == 1
    assert "without its claim" in ended.out
    (again,) = [line.split("Try: rowmill ")[1] for line in ended.out.splitlines() if "Try: rowmill prove" in line]
    replayed = command(*again.split())
    assert replayed.code == 1
    steps = [
        line for line in ended.out.splitlines() if line.startswith("  ") and ": " in line and "interleaved" not in line
    ]
    assert steps == [line for line in replayed.out.splitlines() if line in steps]


def test_a_tasks_queue_is_proved_where_it_was_never_used(command: Command, lite: Db) -> None:
    """X1: rowmill's own tables are made in the copy, and not in the user's database."""
    command.app(lite.url, "@mill.task", "async def send(to: str): ...")
    ended = command("prove", "--schedules", "5", "--seconds", "0")
    assert ended.code == 0, ended.out + ended.err
    assert "All" not in ended.out
    assert "The lane passed." in ended.out
    assert lite.query("select name from sqlite_master") == []


def test_a_state_may_set_a_counter_and_two_ends_may_look_the_same(command: Command, lite: Db) -> None:
    """X1: what the declaration itself writes is not taken for a miscount, nor a cancel for another end."""
    jobs(lite)
    lane = (LANE % ', canceled={"status": "done", "attempts": 0}').replace(
        'done={"status": "done"}', 'done={"status": "done", "attempts": 0}'
    )
    command.app(lite.url, lane)
    ended = command("prove", "--schedules", "15", "--seconds", "0")
    assert ended.code == 0, ended.out
    # A worker that lost the reply to "done" finds a row that was canceled meanwhile, which looks the same.
    ended = command("prove", "--seed", "538413", "--seconds", "0")
    assert ended.code == 0, ended.out


def test_what_cannot_be_made_up_is_asked_for(command: Command, db: Db) -> None:
    """X1: a condition that no made-up row meets is named; --set gives the value."""
    jobs(db)
    command.app(db.url, LANE % ", where=\"url like 'https://b.example/%'\"")
    ended = command("prove", "--schedules", "2", "--seconds", "0")
    assert ended.code == 1
    assert "not ready, because of its where" in ended.out
    assert "Try: --set COLUMN=VALUE" in ended.out
    ended = command("prove", "--schedules", "2", "--seconds", "0", "--set", "nothing=1")
    assert "there is no column 'nothing' to set" in ended.out


@pytest.mark.parametrize(
    ("given", "copied"),
    [
        ("create table t (a int references u (id) on delete cascade, b text)", "create table t (a int, b text)"),
        ("create table t (a int, foreign key (a) references u(id) deferrable)", "create table t (a int)"),
        ("create table t (a int not null references u, constraint x foreign key (a) references u (id) match full)",
         "create table t (a int not null)"),
        ("create table t (a text default 'references u', \"references\" int)",
         "create table t (a text default 'references u', \"references\" int)"),
    ],
)  # fmt: skip
def test_a_table_is_copied_without_its_foreign_keys(given: str, copied: str) -> None:
    """X1: rows are made up for one table alone."""
    assert without_foreign_keys(given) == copied


def test_a_trial_through_a_pooler_is_refused_with_what_to_do(command: Command, pg: Db) -> None:
    """Nothing is copied, and nothing tried."""
    jobs(pg)
    command.app(f"{reader(pg)}&pgbouncer=true", LANE % "")
    ended = command("prove")
    assert ended.code == 1
    assert "sessions of its own" in ended.out + ended.err
    assert "direct address" in ended.out + ended.err
