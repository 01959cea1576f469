"""Every snippet of the README is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)

HTTPX = """
class Page:
    status_code, text = 200, "Checked"

class AsyncClient:
    async def __aenter__(self): return self
    async def __aexit__(self, *exc): ...
    async def get(self, url): return Page()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the README, each under the name in its first line; the later blocks go on with ``links.py``."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "httpx.py").write_text(HTTPX)
    later = []
    for kind, text in BLOCKS:
        named = re.match(r"# (\w+\.py)\n", text)
        if kind == "python" and named:
            (folder / named.group(1)).write_text(text)
        elif kind == "python":
            later.append(text)
    (folder / "later.py").write_text("from links import mill, td\n" + "\n".join(later))
    return folder


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120"}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def first_minute(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """What a newcomer types, in this order."""
    lines = [line for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]
    return [shell(folder, line[2:]) for line in lines if line[:2] == "$ "]


def test_the_commands_of_the_first_minute_work(first_minute: list[subprocess.CompletedProcess[str]]) -> None:
    """Every one succeeds."""
    assert len(first_minute) >= 4
    for ran in first_minute:
        assert ran.returncode == 0, f"{ran.args}\n{ran.stdout}\n{ran.stderr}"
    assert "forbidden" in "".join(ran.stdout for ran in first_minute), "the dead row shows why"


@pytest.mark.usefixtures("first_minute")
def test_the_later_snippets_work(folder: Path) -> None:
    """The handler's abilities and the test kit, over the table that is there after the first minute."""
    prove = """
import asyncio, sqlite3
import later
sqlite3.connect("links.db").execute("create table checks (link_id integer)").connection.close()
before = list(sqlite3.connect("links.db").iterdump())
asyncio.run(later.test_a_link_is_given_up_after_three_failures())
assert list(sqlite3.connect("links.db").iterdump()) == before, "the test has touched the application's own rows"
asyncio.run(later.mill.worker(lanes=["check"], drain=True).run())
db = sqlite3.connect("links.db")
print(db.execute("select count(*), count(distinct link_id) from checks").fetchone())
print(db.execute("select count(*) from links where status = 'checked' and title = 'Checked'").fetchone())
db.close()
"""
    (folder / "prove.py").write_text(prove)
    result = shell(folder, f"{sys.executable} prove.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(19, 19)", "(19,)"]


def test_the_two_commands_stand_first() -> None:
    """``make demo`` and ``make test`` are the first thing a reader sees."""
    assert [line.split()[:2] for line in BLOCKS[0][1].splitlines()] == [["make", "demo"], ["make", "test"]]
