"""Writing a state and recognising it are two things: counters, and tables that two mills share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from command import Command
from databases import Db
from rowmill import IS_NULL, NOT_NULL, NOW, DeclarationError, Mill
from rowmill.clock import Clock
from rowmill.migrate import ddl
from rowmill.store import Database, bind
from rowmill.store.inspect.lane_view import LaneView, view_lane

STATES: dict[str, Any] = {"ready": {"status": "new"}, "running": {"status": "busy"}, "dead": {"status": "dead"}}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def make(db: Db) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table links (id integer primary key, status text not null default 'new', worker text,"
        f" claimed_at {time}, attempts integer not null default 0,"
        " failures integer not null default 0, error text, note text, ocr_error text)"
    )


def declare(mill: Mill, **given: Any) -> Any:
    @mill.lane("links", **({**STATES, "done": {"status": "done"}} | given))
    async def fetch(job: Any) -> None: ...

    return fetch


async def counted(db: Db, **given: Any) -> Mapping[str, int | None]:
    mill, database = Mill(db.url), Database.open(db.url)
    try:
        view = await view_lane(declare(mill, **given), "default", database, Clock())
        return (await view.count()).states
    finally:
        await database.close()


async def test_a_counter_that_done_resets_does_not_identify_done(db: Db) -> None:
    """A row that was done otherwise was in no state."""
    make(db)
    db.execute("insert into links (id, status, attempts, error) values (1, 'done', 0, null), (2, 'done', 3, 'old')")
    assert (await counted(db, done={"status": "done", "attempts": 0, "error": None}))["done"] == 2


async def test_a_counter_is_still_written(db: Db) -> None:
    make(db)
    db.execute("insert into links (id) values (1)")
    mill = Mill(db.url)
    declare(mill, done={"status": "done", "attempts": 0})
    await mill.worker(drain=True).run()
    assert db.one("select status, attempts from links") == {"status": "done", "attempts": 0}


async def test_statistics_and_strange_states_leave_the_counter_out(db: Db) -> None:
    make(db)
    database = Database.open(db.url)
    try:
        binding = await bind(declare(Mill(db.url), done={"status": "done", "failures": 0}), "default", database)
    finally:
        await database.close()
    assert ddl.states_in(binding) == {"status"}


def test_check_does_not_warn_about_the_counter_of_rows_that_were_done_otherwise(db: Db, command: Command) -> None:
    make(db)
    db.execute("insert into links (id, status, failures) values (1, 'done', 0), (2, 'done', 3)")
    values = ", ".join(f"{k}={v!r}" for k, v in {**STATES, "done": {"status": "done", "failures": 0}}.items())
    command.app(db.url, f"mill.lane('links', {values})(handler)")
    assert "no lane leads out of" not in " ".join(command("check").out.split())


@pytest.mark.parametrize(
    ("given", "done"),
    [
        ({"done": {"status": "done", "note": "by rowmill"}}, 1),
        ({"done": {"status": "done", "note": "by rowmill"}, "only_written": ["note"]}, 2),
        # The counter is all that tells the two apart, so it identifies.
        ({"done": {"status": "end", "attempts": 0}, "dead": {"status": "end", "attempts": 99}}, 1),
        ({"ready": {"claimed_at": None, "status": "new"}, "done": {"claimed_at": NOW, "status": "end"}}, 0),
    ],
)
async def test_which_columns_identify(db: Db, given: dict[str, Any], done: int) -> None:
    make(db)
    db.execute("insert into links (id, status, note) values (1, 'done', 'by rowmill'), (2, 'done', null)")
    db.execute("insert into links (id, status, attempts) values (3, 'end', 0), (4, 'end', 99)")
    assert (await counted(db, **given))["done"] == done


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only_written": ["nothing"]}, "no final state writes it"),
        ({"only_written": ["status"]}, "no row can be recognised as done"),
        ({"ready": {"status": "new", "note": NOT_NULL}}, "only recognises rows"),
        ({"running": {"status": "busy", "note": IS_NULL}}, "only recognises rows"),
        ({"dead": {"note": NOT_NULL}}, "dead writes no column"),
    ],
)
def test_what_cannot_be_a_state_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said) as told:
        declare(Mill("sqlite:///nothing.db"), **given)
    assert told.value.hint


# -- two lanes, one dead state


@pytest.mark.parametrize(("marker", "mine"), [(NOT_NULL, [2]), (IS_NULL, [1])])
async def test_a_marker_recognises_and_writes_nothing(db: Db, marker: Any, mine: list[int]) -> None:
    make(db)
    db.execute("insert into links (id, status, ocr_error) values (1, 'dead', null), (2, 'dead', 'torn')")
    db.execute("insert into links (id, ocr_error) values (3, 'older')")
    mill, database = Mill(db.url), Database.open(db.url)

    @mill.lane("links", **STATES | {"done": {"status": "done"}, "dead": {"status": "dead", "ocr_error": marker}})
    async def fetch(job: Any) -> None:
        raise ValueError("no")

    try:
        view: LaneView = await view_lane(fetch, "default", database, Clock())
        assert [row.id for row in await view.rows("dead")] == mine
    finally:
        await database.close()
    db.execute("update links set failures = 4 where id = 3")
    await mill.worker(drain=True).run()
    assert db.one("select status, ocr_error from links where id = 3") == {"status": "dead", "ocr_error": "older"}


FOREIGN = "insert into links (id, status, ocr_error) values (1, 'dead', 'torn'), (2, 'dead', 'torn')"


def app(command: Command, db: Db, dead: str = "{'status': 'dead'}") -> None:
    given = "ready={'status': 'new'}, running={'status': 'busy'}, done={'status': 'done'}"
    line = f"mill.lane('links', name='links', {given}, dead={dead})(handler)"
    command.app(db.url, "from rowmill import NOT_NULL", line)


def test_check_reports_dead_rows_that_another_program_ended(db: Db, command: Command) -> None:
    make(db)
    db.execute(FOREIGN)
    db.execute("insert into links (id, status, error, ocr_error) values (3, 'dead', 'mine', 'older')")
    app(command, db)
    assert "2 dead rows were ended by another program" in " ".join(command("check").out.split())
    app(command, db, "{'status': 'dead', 'error': NOT_NULL}")
    assert "another program" not in " ".join(command("check").out.split())


def test_retry_does_not_take_rows_that_another_program_ended_without_consent(db: Db, command: Command) -> None:
    """A document that was never downloaded was marked as downloaded."""
    make(db)
    db.execute(FOREIGN)
    app(command, db)
    ended = command("retry", "--state", "dead")
    assert ended.code != 0
    assert "2 rows that another program ended" in " ".join(ended.err.split())
    assert "NOT_NULL" in ended.err
    assert db.value("select count(*) from links where status = 'dead'") == 2
    app(command, db, "{'status': 'dead', 'error': NOT_NULL}")
    db.execute("insert into links (id, status, error) values (3, 'dead', 'mine')")
    assert command("retry", "--state", "dead").code == 0
    assert [row["id"] for row in db.query("select id from links where status = 'new'")] == [3]
    app(command, db)
    assert command("retry", "--state", "dead", "--yes").code == 0
