"""The commands that act on rows, where there are many of them, several lanes or environments, or others at work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import systems
from command import COMPOSITE, Command, create_parts
from databases import Db
from rowmill.ops import row_actions


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def columns(db: Db, table: str, key: Any, *names: str) -> list[Any]:
    row = db.one(f'select * from "{table}" where id = ?', key)
    return [row[name] for name in names]


# -- many rows, several lanes, several environments


def test_more_than_a_hundred_rows_are_not_changed_without_consent(
    db: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_actions, "STEP", 50)
    systems.create(db, "registre")
    systems.insert_extraction(db, 120, status_id=4)
    command.app(db.url, "extraction")
    ended = command("retry", "--state", "dead")
    assert ended.code == 1
    assert "Error: this would retry more than 100 rows of lane 'extraction'" in ended.err
    assert "Try: --yes" in ended.err
    assert db.value("select count(*) from extraction_queue where status_id = 4") == 120
    ended = command("retry", "--state", "dead", "--yes")
    assert (ended.code, ended.out) == (0, "120 rows made ready\n")
    assert db.value("select count(*) from extraction_queue where status_id = 1") == 120


def test_on_a_terminal_the_question_is_asked(lite: Db, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    systems.create(lite, "registre")
    systems.insert_extraction(lite, 101, status_id=4)
    command.app(lite.url, "extraction")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked: list[str] = []

    def confirm(answer: bool) -> Callable[..., bool]:
        return lambda text, **_: asked.append(text) or answer  # type: ignore[func-returns-value]

    monkeypatch.setattr("typer.confirm", confirm(False))
    assert command("retry", "--state", "dead").code == 1
    monkeypatch.setattr("typer.confirm", confirm(True))
    assert command("retry", "--state", "dead").out == "101 rows made ready\n"
    assert asked[0].startswith("This will retry more than 100 rows of lane 'extraction'")


def test_rows_that_died_in_another_lane_of_the_table_are_not_taken_for_this_ones(lite: Db, command: Command) -> None:
    """A11: 4 is ERREUR for extraction and OCR alike; a failed extraction has nothing for OCR to read."""
    systems.create(lite, "registre")
    (key,) = systems.insert_extraction(lite, 1, status_id=4)
    command.app(lite.url, "extraction", "ocr", "req")
    ended = command("retry", "--lane", "ocr", "--state", "dead")
    assert ended.code == 1
    assert "including those of 'extraction', which has the same state" in ended.err
    assert columns(lite, "extraction_queue", key, "status_id") == [4]
    assert command("retry", "--lane", "ocr", "--id", str(key)).code == 0


def test_with_several_environments_one_must_be_named(fresh: Callable[[str], Db], command: Command) -> None:
    one, two = fresh("sqlite"), fresh("sqlite")
    for db in (one, two):
        systems.create(db, "registre")
        systems.insert_extraction(db, 1, status_id=4)
    command.app({"prod": one.url, "dev": two.url}, "extraction")
    ended = command("retry", "--id", "1")
    assert ended.code == 2
    assert "--env prod or --env dev" in ended.err
    assert command.json("retry", "--id", "1", "--env", "dev")["environment"] == "dev"
    assert [columns(db, "extraction_queue", 1, "status_id") for db in (one, two)] == [[4], [1]]
    assert "did you mean 'prod'?" in command("retry", "--id", "1", "--env", "prd").err


@pytest.mark.parametrize(
    "words",
    [
        ["retry"],
        ["retry", "--id", "1", "--state", "dead"],
        ["retry", "--state", "done"],
        ["retry", "--state", "running"],
        ["cancel", "--running"],
        ["cancel", "--state", "dead"],
        ["release"],
        ["release", "--stuck", "--worker", "w"],
    ],
)
def test_a_command_that_does_not_say_which_rows_ends_with_2(words: list[str], lite: Db, command: Command) -> None:
    systems.create(lite, "registre")
    command.app(lite.url, "extraction")
    assert command(*words).code == 2


def test_a_wrong_lane_and_a_wrong_id_are_told(lite: Db, command: Command) -> None:
    systems.create(lite, "registre")
    command.app(lite.url, "extraction")
    assert "did you mean 'extraction'?" in command("retry", "--lane", "extractoin", "--id", "1").err
    for verb in ("retry", "cancel", "release"):
        ended = command(verb, "--id", "one")
        assert ended.code == 1
        assert "'one' is not an id in table 'extraction_queue'" in ended.err


# -- others at work


@contextmanager
def locked(db: Db, table: str, key: Any) -> Iterator[threading.Event]:
    """Somebody's transaction that holds a row until told to let go."""
    held, let_go = threading.Event(), threading.Event()

    async def hold() -> None:
        connection = await asyncpg.connect(db.direct)
        async with connection.transaction():
            await connection.execute(f"select 1 from {table} where id = $1 for update", key)
            held.set()
            await asyncio.to_thread(let_go.wait, 20)
        await connection.close()

    thread = threading.Thread(target=lambda: asyncio.run(hold()))
    thread.start()
    assert held.wait(60)
    try:
        yield let_go
    finally:
        let_go.set()
        thread.join()


def test_a_row_that_is_locked_is_tried_again_and_then_told(
    pg: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    systems.create(pg, "registre")
    free, busy = systems.insert_extraction(pg, 2, status_id=4)
    command.app(pg.url, "extraction")
    with locked(pg, "extraction_queue", busy), monkeypatch.context() as patched:
        patched.setattr(row_actions, "_TRIES", 2)
        document = command.json("retry", "--id", str(busy), "--id", str(free))
        assert document["ids"] == [str(free)]
        assert document["passed_over"] == [{"id": str(busy), "reason": "another transaction has locked it"}]
    with locked(pg, "extraction_queue", busy) as let_go:
        threading.Timer(0.3, let_go.set).start()
        assert command.json("retry", "--id", str(busy))["ids"] == [str(busy)]


async def test_workers_are_told_that_rows_are_ready(pg: Db, command: Command) -> None:
    systems.create(pg, "registre")
    (key,) = systems.insert_extraction(pg, 1, status_id=4)
    command.app(pg.url, "extraction")
    connection = await asyncpg.connect(pg.direct)
    rung = asyncio.Event()
    await connection.add_listener("rowmill", lambda *_: rung.set())
    assert (await asyncio.to_thread(command, "retry", "--id", str(key))).code == 0
    async with asyncio.timeout(60):
        await rung.wait()
    await connection.close()


def test_an_error_in_mid_way_says_how_many_rows_were_written(
    db: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_actions, "STEP", 2)
    create_parts(db)
    db.execute("create unique index one_new on parts (book) where state = 'new'")
    db.insert("parts", [{"book": b, "page": 1, "state": "bad"} for b in "abc"], key="page")
    db.insert("parts", [{"book": "c", "page": 2, "state": "new"}], key="page")
    command.app(db.url, COMPOSITE)
    ended = command("retry", "--state", "dead")
    assert ended.code == 1
    assert "(2 rows had been made ready before that)" in " ".join(ended.err.split())


def test_a_partitioned_table_is_acted_on_by_key(pg: Db, command: Command) -> None:
    pg.execute(
        "create table split (id bigint, day date, state text, worker text, primary key (id, day))"
        " partition by range (day);"
        "create table split_1 partition of split for values from ('2026-01-01') to ('2026-02-01');"
        "create table split_2 partition of split for values from ('2026-02-01') to ('2026-03-01');"
        "insert into split values (1, '2026-01-05', 'bad'), (1, '2026-02-05', 'bad'), (2, '2026-02-05', 'bad')"
    )
    states = "ready={'state': 'new'}, running={'state': 'run'}, done={'state': 'ok'}, dead={'state': 'bad'}"
    command.app(pg.url, f"mill.lane('split', name='split', {states})(handler)")
    assert command.json("retry", "--id", "1,2026-02-05")["count"] == 1
    assert pg.value("select count(*) from split where state = 'bad'") == 2
    assert command.json("retry", "--state", "dead")["count"] == 2
