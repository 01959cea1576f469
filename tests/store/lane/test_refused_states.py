"""A state that the table cannot hold is reported before a handler has run: foreign keys and triggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command import Command
from databases import Db
from rowmill import DeclarationError, Mill

CODES = {"ready": 1, "running": 2, "done": 3, "dead": 4, "canceled": 5}


def make(db: Db, further: str = "references codes (code)") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute("create table codes (code integer primary key, name text)")
    db.execute("insert into codes values (1, 'queued'), (2, 'running'), (3, 'done'), (4, 'dead'), (5, 'canceled')")
    db.execute(
        f"create table documents (id integer primary key, st integer not null default 1 {further}, worker text,"
        f" claimed_at {time}, heartbeat_at {time}, note text, attempts integer not null default 0)"
    )
    db.execute("insert into documents (id) values (1), (2)")


def trigger(db: Db, when: str) -> None:
    """Refuse an update where this is true."""
    if db.dialect == "sqlite":
        db.execute(
            f"create trigger guard before update on documents when {when} begin"
            " select raise(abort, 'the guard says no'); end"
        )
        return
    db.execute(
        f"create function guard() returns trigger language plpgsql as $$ begin if {when} then"
        " raise exception 'the guard says no'; end if; return new; end $$"
    )
    db.execute("create trigger guard before update on documents for each row execute function guard()")


def declare(db: Db, ran: list[Any], **given: int) -> Mill:
    mill = Mill(db.url)
    values = {state: {"st": code} for state, code in {**CODES, **given}.items()}

    @mill.lane("documents", **values)
    async def read(job: Any) -> None:
        ran.append(job.id)

    return mill


def checked(command: Command, db: Db, **given: int) -> Any:
    values = ", ".join(f"{name}={{'st': {code}}}" for name, code in {**CODES, **given}.items())
    command.app(db.url, f"mill.lane('documents', name='documents', {values})(handler)")
    return command("check")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


async def refused_at_start(db: Db, **given: int) -> DeclarationError:
    ran: list[Any] = []
    mill = declare(db, ran, **given)
    with pytest.raises(DeclarationError) as told:
        await mill.worker(drain=True).run()
    assert not ran
    assert db.value("select count(*) from documents where st = 1 and attempts = 0") == 2
    return told.value


async def test_a_done_state_that_a_foreign_key_forbids_is_refused_at_start(db: Db) -> None:
    """Every row died after its handler had run."""
    make(db)
    told = await refused_at_start(db, done=22)
    assert "done sets st = 22" in told.message
    assert "table 'codes' has no such row" in told.message
    assert told.hint == "one of 1, 2, 3, 4, 5; or insert it into codes"


@pytest.mark.parametrize("state", ["running", "dead", "canceled"])
def test_check_reports_every_state_that_a_foreign_key_forbids(db: Db, state: str, command: Command) -> None:
    make(db)
    ended = checked(command, db, **{state: 22})
    assert ended.code == 1
    assert f"{state} sets st = 22" in " ".join(ended.out.split())


def test_adopt_refuses_a_state_that_a_foreign_key_forbids(db: Db, command: Command) -> None:
    make(db)
    answers = ["--ready", "1", "--running", "2", "--done", "22", "--dead", "4"]
    ended = command("adopt", db.url, "documents", "--state", "st", *answers, "--yes")
    assert ended.code != 0
    assert "done sets st = 22" in " ".join(ended.err.split())


@pytest.mark.parametrize("further", ["references codes (code)", "references codes"])
async def test_states_that_a_foreign_key_allows_are_left_alone(db: Db, further: str) -> None:
    make(db, further)
    ran: list[Any] = []
    await declare(db, ran).worker(drain=True).run()
    assert sorted(ran) == [1, 2]


async def test_a_lookup_table_in_partitions_is_asked_as_a_whole(pg: Db) -> None:
    """The server keeps a constraint for each partition, too: no one of them holds every value."""
    pg.execute("create table codes (code integer primary key) partition by range (code)")
    pg.execute("create table low partition of codes for values from (0) to (3)")
    pg.execute("create table high partition of codes for values from (3) to (9)")
    pg.execute("insert into codes select generate_series(1, 5)")
    pg.execute(
        "create table documents (id integer primary key, st integer not null default 1 references codes, worker text,"
        " claimed_at timestamptz)"
    )
    pg.execute("insert into documents (id) values (1), (2)")
    ran: list[Any] = []
    await declare(pg, ran).worker(drain=True).run()
    assert sorted(ran) == [1, 2]


async def test_a_done_state_that_a_trigger_refuses_is_refused_at_start(db: Db) -> None:
    make(db)
    trigger(db, "new.st = 3")
    told = await refused_at_start(db)
    assert "a trigger of the table refuses done (st = 3): the guard says no" in told.message
    assert told.hint


@pytest.mark.parametrize("state", ["running", "dead", "canceled"])
def test_check_tries_every_state_on_the_triggers_and_writes_nothing(db: Db, state: str, command: Command) -> None:
    make(db)
    trigger(db, f"new.st = {CODES[state]}")
    before = db.query("select * from documents order by id")
    ended = checked(command, db)
    assert ended.code == 1
    assert f"a trigger of the table refuses {state} (st = {CODES[state]})" in " ".join(ended.out.split())
    assert db.query("select * from documents order by id") == before


async def test_a_trigger_that_looks_at_other_columns_does_not_keep_the_lane_from_starting(db: Db) -> None:
    """The handler may write what it asks for: a trial cannot tell, so the lane starts."""
    make(db)
    trigger(db, "new.st = 3 and new.note is null")
    mill = Mill(db.url)

    @mill.lane("documents", **{state: {"st": code} for state, code in CODES.items()})
    async def read(job: Any) -> dict[str, str]:
        return {"note": "read"}

    await mill.worker(drain=True).run()
    assert db.value("select count(*) from documents where st = 3") == 2


def test_check_warns_of_a_trigger_that_may_refuse(db: Db, command: Command) -> None:
    make(db)
    trigger(db, "new.st = 3 and new.note is null")
    ended = checked(command, db)
    assert ended.code == 0
    assert "warning: a trigger of the table refused a test update to done (st = 3): the guard says no" in " ".join(
        ended.out.split()
    )


def test_without_a_ready_row_there_is_no_trial(db: Db, command: Command) -> None:
    make(db)
    trigger(db, "new.st = 3")
    db.execute("delete from documents")
    assert checked(command, db).code == 0
