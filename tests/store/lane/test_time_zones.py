"""Columns without a time zone, on a server that is not in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from command import Command
from databases import Db
from rowmill import DeclarationError, Mill
from rowmill.clock import Clock
from rowmill.store import Database, open_lane

STATES: dict[str, Any] = {
    "ready": {"state": "todo"}, "running": {"state": "busy"}, "done": {"state": "ok"}, "dead": {"state": "broken"},
}  # fmt: skip


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def make(pg: Db, zone: str, default: str = "default now()") -> None:
    pg.execute(f"alter database \"{pg.value('select current_database()')}\" set timezone to '{zone}'")
    pg.execute(
        f"create table documents (id integer primary key, state text not null default 'todo', worker text,"
        f" claimed_at timestamp, heartbeat_at timestamp, run_after timestamp {default}, seen timestamp)"
    )


def declare(pg: Db, zone: str | None, handler: Any = None) -> tuple[Mill, Any]:
    async def read(job: Any) -> None: ...

    mill = Mill(pg.url)
    return mill, mill.lane("documents", name="documents", timezone=zone, **STATES)(handler or read)


async def test_a_row_with_a_local_default_is_ready_at_once(pg: Db) -> None:
    """In Tokyo it waited nine hours."""
    make(pg, "Asia/Tokyo")
    pg.execute("insert into documents (id) values (1)")
    mill, _ = declare(pg, "Asia/Tokyo")
    await mill.worker(drain=True).run()
    assert pg.value("select state from documents") == "ok"
    assert pg.value("select abs(extract(epoch from now()::timestamp - claimed_at)) < 600 from documents")


@pytest.mark.parametrize(("zone", "swept"), [("America/St_Johns", 0), (None, 1)])
async def test_another_programs_live_row_is_not_swept(pg: Db, zone: str | None, swept: int) -> None:
    """In St John's it was taken at once."""
    make(pg, "America/St_Johns")
    pg.execute(
        "insert into documents (id, state, worker, claimed_at, heartbeat_at) values (1, 'busy', 'w', now(), now())"
    )
    _, lane = declare(pg, zone)
    database = Database.open(pg.url)
    try:
        store = await open_lane(lane, "default", database, Clock(), "w2")
        assert len(await store.sweep(timedelta(minutes=5))) == swept
    finally:
        await database.close()


async def test_what_a_handler_returns_is_written_in_the_zone_of_the_columns(pg: Db) -> None:
    make(pg, "Asia/Tokyo")
    pg.execute("insert into documents (id) values (1)")

    async def read(job: Any) -> dict[str, datetime]:
        return {"seen": datetime(2024, 5, 1, 12, tzinfo=UTC)}

    mill, _ = declare(pg, "Asia/Tokyo", read)
    await mill.worker(drain=True).run()
    assert pg.value("select seen from documents") == datetime(2024, 5, 1, 21)


def app(command: Command, pg: Db, further: str = "") -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in STATES.items())
    command.app(pg.url, f"mill.lane('documents', name='documents', {given}{further})(handler)")
    return " ".join(command("check").out.split())


def test_check_compares_a_fresh_default_with_the_lanes_zone(pg: Db, command: Command) -> None:
    make(pg, "Asia/Tokyo")
    said = app(command, pg)
    assert "error: the default of run_after is the server's local time (Asia/Tokyo)" in said
    assert 'timezone="Asia/Tokyo"' in said
    assert "local time" not in app(command, pg, ", timezone='Asia/Tokyo'")
    assert "error: the default of" in app(command, pg, ", timezone='UTC'")


@pytest.mark.parametrize("default", ["", "default timezone('utc', now())", "default timezone('utc', now()) + '1 hour'"])
def test_check_warns_of_columns_without_a_zone_where_nothing_tells(pg: Db, default: str, command: Command) -> None:
    make(pg, "Asia/Tokyo", default)
    said = app(command, pg)
    assert "no time zone, and the server's is Asia/Tokyo" in said
    assert ("run_after have" in said) is (default == "")
    assert "error" not in said.replace("0 errors", "").replace("role error", "").replace("no_error", "")
    assert "no time zone, and" not in app(command, pg, ", timezone='UTC'")


def test_a_server_in_utc_gets_no_word_about_zones(pg: Db, command: Command) -> None:
    make(pg, "Etc/UTC")
    assert "time zone" not in app(command, pg)


def test_adopt_notes_the_zone(pg: Db, command: Command) -> None:
    make(pg, "Asia/Tokyo")
    values = ["--state", "state", "--ready", "todo", "--running", "busy", "--done", "ok", "--dead", "broken"]
    ended = command("adopt", pg.url, "documents", *values, "--yes")
    assert ended.code == 0
    assert "the default of run_after is the server's local time (Asia/Tokyo)" in " ".join(ended.out.split())


def test_a_zone_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DeclarationError, match="there is no time zone 'Asia/Tokio'") as told:
        Mill("sqlite:///nothing.db").lane("documents", timezone="Asia/Tokio", **STATES)(lambda job: None)
    assert told.value.hint == "did you mean 'Asia/Tokyo'?"
