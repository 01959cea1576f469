"""Hostile names: whatever tables and columns are called, the commands work or refuse clearly; nothing is run as SQL."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command import Command
from databases import Db
from rowmill.config import find_app

_numbers = itertools.count(1)

NAMES = [
    "user; drop table",
    "select",
    'say "hello"',
    "it's",
    "with space",
    "Ümläut 状態",
    "x" * 63,
    "percent %s %(a)s",
    "colon :now",
    "dollar $1",
    "back\\slash",
    "new\nline",
    "{braces}",
    "a.b",
    "--comment",
    "/*",
    "🐘",
]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def go_through(db: Db, command: Command, table: str, state: str, value: str) -> None:
    """Adopt, migrate, check, run, detach, on a table with such names."""
    literal = "'" + value.replace("'", "''") + "'"
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table victims (id integer primary key); create table {quoted(table)} ({quoted('key of ' + state[:50])}"
        f" integer primary key, {quoted(state)} text not null default {literal}, locked_at {time});"
        f"insert into {quoted(table)} ({quoted('key of ' + state[:50])}) values (1), (2)"
    )
    app = f"hostile_{next(_numbers)}"
    values = [f"--ready={value}", f"--running={value}2", f"--done={value}3", f"--dead={value}4"]
    adopted = command("adopt", "--yes", f"--write={app}.py", f"--state={state}", *values, "--", db.url, table)
    assert adopted.code == 0, adopted
    for words in (["migrate", "--wake", "--apply"], ["check"], ["migrate", "--wake"]):
        ended = command(words[0], f"{app}:mill", *words[1:])
        assert ended.code == 0, ended
    tally = find_app(f"{app}:mill").run(drain=True)
    assert tally.completed == 2
    done = "'" + f"{value}3".replace("'", "''") + "'"
    assert db.value(f"select count(*) from {quoted(table)} where {quoted(state)} = {done}") == 2
    ended = command("migrate", f"{app}:mill", "--detach", "--apply")
    assert ended.code == 0, ended
    assert len(db.one(f"select * from {quoted(table)} limit 1")) == 3
    assert db.value("select count(*) from victims") == 0
    db.execute(f"drop table victims; drop table {quoted(table)}")


@pytest.mark.parametrize("name", NAMES)
def test_any_name_works(name: str, request: pytest.FixtureRequest, command: Command) -> None:
    """Issue: quotes, spaces, unicode, 63 characters, keywords, "user; drop table"."""
    dialect = "pg" if NAMES.index(name) % 3 == 0 else "lite"
    go_through(request.getfixturevalue(dialect), command, name, name, "new")


@pytest.mark.no_pooler("migrate, or what goes with it, needs the database's direct address")
def test_a_hostile_value_works(db: Db, command: Command) -> None:
    go_through(db, command, "t", "status", 'it\'s "new"; drop table victims; -- %s :now $1')


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(
        st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=14
    ).filter(lambda name: name.strip() and not name.lower().startswith("sqlite_"))
)
def test_no_name_is_ever_run_as_sql(name: str, lite: Db, command: Command) -> None:
    """Issue: nothing is ever interpolated unquoted."""
    go_through(lite, command, f"t {name}", f"s {name}", "new")
