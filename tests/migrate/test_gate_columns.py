"""What gates need of a table: migrate adds it, fills it, and takes it away again."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import Command
from databases import Db

pytestmark = pytest.mark.no_pooler(
    "migrate builds indexes, and asks for the direct address: a pooler cuts what it does in pieces"
)

LANE = (
    "from rowmill import Concurrency, domain\n"
    "mill.lane('pages', name='crawl', ready={'status': 'new'}, running={'status': 'running'}, done={'status': 'done'},"
    " dead={'status': 'failed'}, max_attempts=1, gates=[Concurrency(2, by='domain')],"
    " fills={'domain': ('url', domain)})(handler)"
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def make(db: Db, rows: int) -> None:
    db.execute(
        "create table pages (id integer primary key, url text, status text not null default 'new',"
        " worker text, claimed_at timestamp, heartbeat_at timestamp)"
    )
    db.insert("pages", [{"id": n, "url": f"https://www.site{n % 7}.example/{n}"} for n in range(rows)])
    db.execute("insert into pages (id, url) values (-1, null)")


def test_migrate_adds_the_key_fills_it_and_makes_the_indexes(db: Db, command: Command) -> None:
    make(db, 2500)
    command.app(db.url, LANE)
    assert "rowmill migrate APP --apply adds it" in command("run", "--drain").err
    planned = command.json("migrate")["environments"][0]["statements"]
    names = [each["statement"] for each in planned if each["kind"] == "index"]
    assert any("_turns_" in name and "(domain, id" in name for name in names)
    assert any("_held_" in name for name in names)
    assert command("migrate", "--apply").code == 0
    assert db.value("select count(*) from pages where domain = 'site3.example'") == 357
    assert db.value("select count(*) from pages where domain is null") == 1
    assert command.json("migrate")["environments"][0]["statements"] == []
    assert "_turns_" in command("check").out
    db.execute("delete from pages where id > 20")
    assert command("run", "--drain").code == 0
    assert db.value("select count(*) from pages where status = 'done'") == 22
    assert command("migrate", "--detach", "--apply").code == 0
    assert "domain" not in db.query("select * from pages limit 1")[0]


def test_check_looks_at_gates_too(db: Db, command: Command) -> None:
    """What ``run`` would refuse, and the index that a gated claim walks, also while the table is small."""
    make(db, 3)
    command.app(db.url, LANE)
    assert command.json("check", code=1)["checked"][0]["findings"][0]["code"] == "declaration"
    assert command("migrate", "--apply").code == 0
    db.execute(f"drop index {next(name for name in indexes(db) if '_turns_' in name)}")
    assert "no_turns_index" in [each["code"] for each in command.json("check")["checked"][0]["findings"]]
    command.app(db.url, LANE.replace('by="domain"', 'by="domian"').replace("by='domain'", "by='domian'"))
    ended = command("check")
    assert ended.code == 1
    assert "cannot be a gate's key" in " ".join(ended.out.split())


def indexes(db: Db) -> list[str]:
    names = "select indexname from pg_indexes where tablename = 'pages'"
    if db.dialect != "postgresql":
        names = "select name from sqlite_master where type = 'index' and tbl_name = 'pages'"
    return [next(iter(row.values())) for row in db.query(names)]


def test_a_fill_that_was_cut_off_goes_on(db: Db, command: Command) -> None:
    make(db, 1500)
    command.app(db.url, LANE)
    assert command("migrate", "--apply").code == 0
    db.execute("update pages set domain = null where id >= 700")
    db.execute("update pages set domain = 'by hand' where id = 3")
    assert command("migrate", "--apply").code == 0
    assert db.value("select count(*) from pages where domain is null") == 1
    assert db.value("select domain from pages where id = 3") == "by hand"


def test_fills_that_make_no_sense_are_refused(lite: Db, command: Command) -> None:
    make(lite, 1)
    command.app(lite.url, LANE.replace("('url', domain)", "'url'"))
    ended = command("status")
    assert ended.code == 1
    assert "fills={" in ended.err
