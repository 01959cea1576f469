"""``rowmill demo``: from nothing to a checked end, and nothing left behind."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from rowmill.cli import demo

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a demo whose temporary files go to the test's own directory."""
    made: list[subprocess.Popen[str]] = []

    def make(*options: str) -> subprocess.Popen[str]:
        (tmp_path / "tmp").mkdir(exist_ok=True)
        made.append(
            subprocess.Popen(
                [sys.executable, "-m", "rowmill", "demo", *options],
                env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return made[-1]

    yield make
    for process in made:
        if process.poll() is None:
            process.kill()  # its workers notice, and stop by themselves
        process.communicate()


def test_the_demo_ends_well_and_its_claims_hold(start: Start, tmp_path: Path) -> None:
    """X1, X2: two processes, one killed; every row ended once, by the tables it leaves behind."""
    kept = tmp_path / "kept"
    out, err = (process := start("--json", "--keep", str(kept))).communicate(timeout=100)
    assert process.returncode == 0, out + err
    found = json.loads(out)
    assert (found["ok"], found["rows"], found["done"], len(found["dead"])) == (True, 160, 156, 4)
    assert found["taken_back"] >= 4
    assert found["retried"] > 0
    assert (kept / "app.py").exists()
    with closing(sqlite3.connect(kept / "demo.db")) as db:
        ends = "select count(*), count(distinct row) from runs where outcome in ('done', 'dead') and times = 1"
        assert db.execute(ends).fetchone() == (160, 160)
        unfinished = """select count(*) from runs cut where times = 0 and not exists (
            select 1 from runs r where r.row = cut.row and r.attempt > cut.attempt and r.outcome in ('done', 'dead'))"""
        assert db.execute(unfinished).fetchone() == (0,)
        assert db.execute("select count(*) from runs where times = 0").fetchone() >= (3,)


def test_ctrl_c_ends_the_demo_cleanly(start: Start, tmp_path: Path) -> None:
    """Plain lines where there is no terminal; no process and no file stays."""
    process = start()
    lines: list[str] = []
    assert process.stdout is not None
    while "started (pid" not in "".join(lines):
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "Stopped before it finished.\n"
    assert "\x1b" not in "".join(lines) + out
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_directory_in_use_is_not_touched(start: Start, tmp_path: Path) -> None:
    """The demo asks for another."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "app.py").write_text("mine")
    process = start("--keep", str(tmp_path / "mine"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "not empty" in err
    assert "Try: --keep with a new directory" in err
    assert (tmp_path / "mine" / "app.py").read_text() == "mine"


def end_all(db: sqlite3.Connection) -> None:
    """As if every row had been done at the first attempt, those of a killed process 7 at the second."""
    db.execute("update links set status = 'fetched'")
    db.execute("update documents set state = 2")
    db.execute("insert into runs select id, 1, 'w', 8, 'done', null, 1 from links where id > 1")
    db.execute("insert into runs values ('1', 1, 'w', 7, null, null, 0), ('1', 2, 'w', 8, 'done', null, 1)")
    db.execute("insert into runs select name, 1, 'w', 8, 'done', null, 1 from documents")
    for name, count in db.execute("select name, page_count from documents").fetchall():
        db.executemany("insert into pages values (?, ?)", [(name, page) for page in range(1, count + 1)])


@pytest.mark.parametrize(
    ("spoil", "noticed"),
    [
        ("select 1", []),
        (
            "update links set status = 'new' where id = 3",
            ["every row is finished", "every row has exactly one outcome"],
        ),
        ("insert into runs values ('3', 2, 'w', 8, 'dead', null, 1)", ["every row has exactly one outcome"]),
        ("update runs set times = 2 where row = '3'", ["no outcome is recorded twice"]),
        ("update runs set pid = 7", ["the 1 row of the killed worker"]),
        ("insert into pages select * from pages limit 1", ["pages were read"]),
        ("delete from pages where rowid = 1", ["pages were read"]),
    ],
)
def test_the_demo_would_notice(tmp_path: Path, spoil: str, noticed: list[str]) -> None:
    """Its checks are real: each kind of damage is found."""
    demo._write_files(tmp_path)
    with closing(sqlite3.connect(tmp_path / "demo.db")) as db:
        end_all(db)
        db.execute(spoil)
        db.commit()
    findings = demo.examine(tmp_path / "demo.db", time.monotonic(), orphans=["1"], killed=7)
    failed = [check for check, held in findings.checks.items() if not held]
    assert len(failed) == len(noticed)
    assert all(words in check for words, check in zip(noticed, failed, strict=True))
    assert findings.good == (not noticed)


@pytest.mark.parametrize("kept", [None, "mill"])
@pytest.mark.parametrize("found", [True, False])
def test_the_end_fits_a_small_screen_and_names_commands_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str | None, found: bool
) -> None:
    """80 by 24, with room for a prompt; the headline first."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/rowmill").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/rowmill" if found else None)
    checks = {
        "every row is finished": True,
        "every row has exactly one outcome, and its table shows the same one": True,
        "no outcome is recorded twice (177 runs: 160 final, 11 retries, 6 cut off)": True,
        "the 10 rows of the killed worker (6 under way) were finished by others": True,
        "97 pages were read: none missing, none twice": True,
    }
    dead = {f"link {n}": "TimeoutError: the server did not answer (3 attempts)" for n in range(4)}
    findings = demo.Findings(18.2, 160, 156, 11, dead, 10, 177, 97, checks)
    out = io.StringIO()
    demo.tell(Console(file=out, width=80), findings, Path(kept) if kept else None)
    lines = out.getvalue().strip("\n").split("\n")
    assert lines[0].startswith("160 rows in 18 seconds")
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80
    typed = {line.split()[0] for line in lines if "rowmill " in line}
    there = "rowmill" if found else "../.venv/bin/rowmill"
    here = "rowmill" if found else ".venv/bin/rowmill"
    assert typed == ({there} if kept else {here, there})
