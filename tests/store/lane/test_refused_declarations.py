"""What a table would refuse of its lane is said before the first claim: nothing is made, and no work is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command import Command
from databases import Db
from rowmill import NOW, DeclarationError, Mill

ALLOWED = "('todo', 'busy', 'ok', 'broken')"


def make(db: Db, check: str, kind: str = "text") -> None:
    time = "timestamptz" if db.url.startswith("postgresql") else "datetime"
    db.execute(
        f"create table documents (id integer primary key, state {kind} not null default 'todo', worker text,"
        f" claimed_at {time}, heartbeat_at {time}, ended {time}, {check})"
    )
    db.execute("insert into documents (id) values (1), (2)")


def declare(db: Db, ran: list[Any], **given: Any) -> Mill:
    mill = Mill(db.url)
    values = {"ready": {"state": "todo"}, "running": {"state": "busy"}, "done": {"state": "ok"}} | given

    @mill.lane("documents", **values, dead={"state": "broken"})
    async def read(job: Any) -> None:
        ran.append(job.id)

    return mill


@pytest.mark.parametrize(
    ("check", "given", "said"),
    [
        ("check (state in {})", {"done": {"state": "finished"}}, r"done sets state = 'finished'.*check constraint"),
        ("check (length(state) < 5)", {"done": {"state": "finished"}}, r"done sets state = 'finished'"),
    ],
)
async def test_a_value_that_a_check_refuses_is_told_before_any_row_runs(
    db: Db, check: str, given: dict[str, Any], said: str
) -> None:
    """A wrong word in done made every row dead, each after its work."""
    make(db, check.format(ALLOWED))
    ran: list[Any] = []
    mill = declare(db, ran, **given)
    with pytest.raises(DeclarationError, match=said) as told:
        await mill.worker(drain=True).run()
    assert not ran
    assert db.value("select count(*) from documents where state = 'todo'") == 2
    assert told.value.hint == ("a value it allows" if "length" in check else "one of broken, busy, ok, todo")


@pytest.mark.parametrize(
    "check",
    [
        f"check (lower(state) in {ALLOWED})",
        f"check (state in {ALLOWED} or state like 'O%')",
        f"check (state <> 'ok' or ended is not null), check (state in {ALLOWED} or length(state) = 2)",
        "check (documents.state in ('todo', 'busy', 'OK', 'broken'))",
    ],
)
async def test_what_a_check_allows_is_left_to_it(db: Db, check: str) -> None:
    """The database itself is asked: no guess at what a condition means."""
    make(db, check)
    ran: list[Any] = []
    mill = declare(db, ran, done={"state": "OK", "ended": NOW})
    await mill.worker(drain=True).run()
    assert sorted(ran) == [1, 2]
    assert db.value("select count(*) from documents where state = 'OK'") == 2


@pytest.mark.parametrize("state", ["running", "dead", "canceled"])
def test_check_tries_every_state(
    db: Db, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker begins all the same: what is refused there costs no row its work, and other lanes none of theirs."""
    make(db, f"check (state in {ALLOWED})")
    command = Command(tmp_path, monkeypatch, capsys)
    said = {"ready": "todo", "running": "busy", "done": "ok", "dead": "broken"} | {state: "odd"}
    values = ", ".join(f"{name}={{'state': {value!r}}}" for name, value in said.items())
    command.app(db.url, f"mill.lane('documents', name='documents', {values})(handler)")
    ended = command("check")
    assert ended.code == 1
    assert f"{state} sets state = 'odd'" in " ".join(ended.out.split())


async def test_a_collation_of_the_tables_own_is_left_to_it(lite: Db) -> None:
    make(lite, f"check (state in {ALLOWED})", "text collate nocase")
    ran: list[Any] = []
    await declare(lite, ran, done={"state": "OK"}).worker(drain=True).run()
    assert sorted(ran) == [1, 2]


async def test_a_worker_makes_no_file_for_a_lane_over_a_table(tmp_path: Path) -> None:
    """A slip in the path: the file would be there from then on, and hide the mistake."""
    path = tmp_path / "nothere.db"
    mill = Mill(f"sqlite:///{path}")

    @mill.lane("documents", ready={"state": "todo"}, running={"state": "busy"}, done={"state": "ok"}, unfenced=True)
    async def read(job: Any) -> None: ...

    with pytest.raises(DeclarationError, match="there is no file"):
        await mill.worker(drain=True).run()
    assert not path.exists()
