"""``rowmill top``: one look as text and as JSON, and the live screen in a real terminal, by its keys."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import NOWHERE, Command, fill_enrichment, register
from databases import Db
from rowmill.store import Database
from rowmill.store.own import schema
from rowmill.store.own.failures import Failure, Failures


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def filled(db: Db) -> None:
    """Rows in every state, two workers, and a failure on record."""
    fill_enrichment(db)
    register(db, "w-1", state="busy", completed=7, current=[{"lane": "enrichment", "id": "x", "seconds": 3.0}])
    register(db, "w-2", silent=300)

    async def fail() -> None:
        database = Database.open(db.url)
        await schema.ensure(database)
        said = "forbidden for customer 7"
        await Failures(database).add([Failure("enrichment", "1", 1, "w-1", "dead", "permanent", said)])
        await database.close()

    asyncio.run(fail())


def test_one_look_shows_lanes_workers_and_errors(db: Db, command: Command) -> None:
    """E8: queue sizes, who works, what fails; also for scripts."""
    filled(db)
    command.app(db.url, "enrichment")
    document = command.json("top")
    (lane,) = document["lanes"]
    assert lane["counts"] == {
        "ready": 3, "waiting": 2, "excluded": None, "running": 2, "stuck": 1, "done": 1, "dead": 1,
    }  # fmt: skip
    assert lane["at_least"] == []
    assert {w["id"]: w["alive"] for w in document["workers"]} == {"w-1": True, "w-2": False}
    assert [family["shape"] for family in document["errors"]] == ["forbidden for customer <n>"]
    shown = command("top", "--once")
    assert shown.code == 0
    for words in ("enrichment", "w-1", "7 done", "enrichment x for 3 s", "forbidden for customer <n>"):
        assert words in shown.out, shown.out
    assert max(map(len, shown.out.splitlines())) < 200, "no line is as long as a pipe is wide"


def test_an_environment_that_is_away_does_not_hide_the_others(lite: Db, command: Command) -> None:
    """A2: it is named, and the exit code says so."""
    filled(lite)
    command.app({"prod": NOWHERE, "dev": lite.url}, "enrichment")
    document = command.json("top", code=1)
    assert [failure["environment"] for failure in document["failures"]] == ["prod"]
    assert [lane["environment"] for lane in document["lanes"]] == ["dev"]


def test_without_a_terminal_it_says_what_to_do(lite: Db, command: Command) -> None:
    """E8: in a pipe nobody could press a key."""
    filled(lite)
    command.app(lite.url, "enrichment")
    ended = command("top")
    assert ended.code == 2
    assert "--once" in ended.err


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *words: str, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        screen = {"TERM": "xterm", "COLUMNS": "110", "LINES": "30"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rowmill", *words], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder,
            env={**os.environ, **screen, "PYTHONPATH": os.pathsep.join(sys.path)}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self.seen = ""

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, met: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        while not met():
            assert time.monotonic() < deadline, self.seen[-3000:]
            self.read()
            time.sleep(0.05)

    def read(self) -> None:
        try:
            new = os.read(self._ours, 65536).decode(errors="replace")
            self.seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", new)
        except (BlockingIOError, OSError):
            pass

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_keys_pause_and_retry_the_chosen_lane(lite: Db, command: Command, tmp_path: Path) -> None:
    """E8, D10: p pauses and resumes, r asks and then makes dead rows ready, q ends; nothing is left of the screen."""
    filled(lite)
    command.app(lite.url, "enrichment")
    terminal = Terminal("top", folder=tmp_path)
    try:
        terminal.until(lambda: "enrichment" in terminal.seen)
        paused = "select count(*) from rowmill_gates where lane = 'enrichment' and paused_until is not null"
        terminal.press("p")
        terminal.until(lambda: lite.value(paused) == 1)
        terminal.until(lambda: "(paused)" in terminal.seen)
        terminal.press("p")
        terminal.until(lambda: lite.value(paused) == 0)
        dead = "select count(*) from enrichment_jobs where status = 'dead'"
        terminal.press("rn")
        terminal.press("\x1b[Br")
        terminal.until(lambda: terminal.seen.count("y/n") >= 2)
        assert lite.value(dead) == 1, "a no is a no, and an unanswered question too"
        terminal.press("y")
        terminal.until(lambda: lite.value(dead) == 0)
        terminal.until(lambda: "1 row made ready" in terminal.seen)
        terminal.press("q")
        terminal.until(lambda: terminal.process.poll() is not None)
        assert terminal.process.returncode == 0, terminal.seen[-2000:]
    finally:
        terminal.close()


def test_a_shell_completes_commands_and_lanes(lite: Db, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """E8: as typer's completion asks for it; a mistake in the application is no noise on the line."""
    fill_enrichment(lite)
    name = command.app(lite.url, "enrichment")
    path = os.pathsep.join([str(Path.cwd()), *sys.path])

    def complete(line: str) -> list[str]:
        shell = {"_ROWMILL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        ended = subprocess.run(
            [sys.executable, "-c", "from rowmill.cli import main; main(name='rowmill')"],
            env={**os.environ, **shell, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return ended.stdout.split()

    assert "errors" in complete("rowmill err")
    assert complete("rowmill retry --lane enr") == ["enrichment"], "by ROWMILL_APP"
    monkeypatch.delenv("ROWMILL_APP")
    assert complete(f"rowmill retry {name} --lane enr") == ["enrichment"]
    assert complete(f"rowmill pause {name.replace(':', chr(10) + ':' + chr(10))} --lane enr") == ["enrichment"], "bash"
    monkeypatch.setenv("ROWMILL_APP", "no.such:module")
    assert complete("rowmill retry --lane enr") == []
