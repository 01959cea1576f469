"""Every snippet of the README, of the first tutorial and of the page about tests is run as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[tuple[str, str]]:
    """The code blocks of a page, each with its language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


README, BLOCKS = blocks("README.md"), blocks("docs/tutorials/first-lane.md")
TESTING = blocks("docs/how-to/test-lanes.md")

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
    """The files of the tutorial, each under the name in its first line; the later blocks go on with ``tutorial.py``."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "httpx.py").write_text(HTTPX)
    later = []
    for kind, text in BLOCKS + TESTING:
        named = re.match(r"# (\w+\.py)\n", text)
        if kind == "python" and named:
            (folder / named.group(1)).write_text(text)
        elif kind == "python":
            later.append(text)
    (folder / "later.py").write_text("from tutorial import mill, td\n" + "\n".join(later))
    return folder


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120"}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


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
sqlite3.connect("tutorial.db").execute("create table checks (link_id integer)").connection.close()
before = list(sqlite3.connect("tutorial.db").iterdump())
asyncio.run(later.test_a_link_is_given_up_after_three_failures())
assert list(sqlite3.connect("tutorial.db").iterdump()) == before, "the test has touched the application's own rows"
asyncio.run(later.mill.worker(lanes=["check"], drain=True).run())
db = sqlite3.connect("tutorial.db")
print(db.execute("select count(*), count(distinct link_id) from checks").fetchone())
print(db.execute("select count(*) from links where status = 'checked' and title = 'Checked'").fetchone())
db.close()
"""
    (folder / "prove.py").write_text(prove)
    result = shell(folder, f"{sys.executable} prove.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(19, 19)", "(19,)"]


@pytest.mark.no_pooler("the page starts a server of its own")
def test_the_tutorial_works_on_postgresql(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is started with the program of the page; table, lane and commands are those of the page."""
    files = {text.split()[1]: text for kind, text in BLOCKS if kind == "python" and re.match(r"# \w+\.py\n", text)}
    files["links.sql"] = next(text for kind, text in BLOCKS if kind == "sql")
    files["tutorial.py"] = files["tutorial.py"].replace('Mill("sqlite:///tutorial.db")', "Mill()")
    assert "Mill()" in files["tutorial.py"]
    # Not under pytest's folder: others may not enter it, and a server started by root runs as somebody else.
    folder = Path(tempfile.mkdtemp(prefix="rm-"))
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "start_postgres.py"]
    server = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        monkeypatch.setenv("ROWMILL_DATABASE_URL", server.stdout.readline().strip())
        run_commands(folder, "$ python run_sql.py links.sql")
        run_commands(folder, next(text for kind, text in BLOCKS if "rowmill run" in text).partition("\n")[2])
    finally:
        server.communicate("\n", timeout=180)
        shutil.rmtree(folder)


def test_the_smallest_example_works(tmp_path: Path) -> None:
    """Issue: the first screen of the README declares a lane, runs it and shows what became of it."""
    for kind, text in README:
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
    (console,) = [text for kind, text in README if kind == "console"]
    run_commands(tmp_path, console)


def run_commands(folder: Path, console: str) -> None:
    """Run the commands of a block; the lines below each must be in its output, whatever the spaces."""
    for step in console.removeprefix("$ ").split("\n$ "):
        command, *lines = step.strip().splitlines()
        ended = shell(folder, command)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
        shown = " ".join(ended.stdout.split())
        for line in lines:
            assert " ".join(line.split()) in shown, f"{command}: {line}\n{ended.stdout}"


def test_the_two_commands_stand_below_the_smallest_example() -> None:
    """``make demo`` and ``make test`` are what a reader sees next."""
    kinds = [kind for kind, _ in README]
    assert kinds == ["", "python", "python", "console", ""]
    assert [line.split()[:2] for line in README[-1][1].splitlines()] == [["make", "demo"], ["make", "test"]]
