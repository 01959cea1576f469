"""The README: its commands and code are run as they stand, its settings are those that there are; and the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from apps.prices.settings import Settings

from .conftest import ROOT, App

#: Each of them starts half a dozen processes: seconds on a quiet machine, minutes on a busy one.
pytestmark = pytest.mark.timeout(240)
README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run(app: App, command: list[str] | str, **settings: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**app.environment(**settings), "PATH": path, "COLUMNS": "120"}
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_commands_and_the_code_of_the_readme_work(app: App) -> None:
    """D11, D2: setup a second time, a named worker under rowmill's own command, and what shows the gates."""
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    run(app, [sys.executable, "-c", code])
    assert app.db.one("select name, rate_limit_per_minute as rate from sources") == {"name": "guide", "rate": 30}
    app.db.execute("update sources set base_url = ?", app.sites.address("api"))
    (text,) = [text for kind, text in BLOCKS if kind == "console"]
    commands = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    said = run(app, "set -e\n" + "\n".join(commands))
    assert "Tables, views and functions are in place." in said
    assert app.db.one("select status, locked_by from scrape_jobs") == {"status": "succeeded", "locked_by": "worker-1"}


def test_every_setting_is_in_the_readme_with_its_default() -> None:
    """D3, D4, D8, D9, D11: the table of settings is the settings."""
    listed = dict(re.findall(r"^\| `([A-Z_]+)` \| .* \| (.*) \|$", README, re.MULTILINE))
    del listed["ROWMILL_DATABASE_URL"]
    assert list(listed) == [field.name.upper() for field in fields(Settings)]
    plain = {field.name.upper(): field.default for field in fields(Settings)}
    for name, text in listed.items():
        if name not in ("WORKER_ID", "CACHE_DIR"):
            assert text == (str(plain[name]).lower().removesuffix(".0")), name


def test_a_wrong_setting_is_told_without_a_traceback(app: App) -> None:
    """D3: for a user's mistake there is a word and what to try."""
    command = [sys.executable, "-m", "apps.prices", "work", "--drain"]
    environment = app.environment(JOB_LOCK_TIMEOUT_SECONDS="soon")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: setting JOB_LOCK_TIMEOUT_SECONDS: 'soon' is not a number\nTry: ")


def test_the_demonstration_ends_by_itself_with_every_coin_valued(app: App) -> None:
    """D6, D8: sites, database and workers of its own; a source that fails for a while; a summary."""
    said = run(app, [sys.executable, "-W", "ignore", "-m", "apps.prices", "--coins", "3", "--processes", "2"])
    assert "3 valuations, 0 jobs failed." in said
    assert re.search(r"auction: \d+ requests \(3 times 200, \d+ times 500\)", said), said
    assert re.search(r"9 succeeded by|\d succeeded by worker-1", said)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--coins", "0"], 2, "--coins 0: at least 1"),
        (["demo", "--processes", "0"], 2, "--processes 0: at least 1"),
        (["setup"], 1, "prices needs PostgreSQL, and ROWMILL_DATABASE_URL is a SQLite file"),
    ],
)
def test_what_cannot_work_is_told_without_a_traceback(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    """D11: bad input is named."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment["ROWMILL_DATABASE_URL"] = f"sqlite:///{tmp_path}/coins.db"
    command = [sys.executable, "-m", "apps.prices", *words]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == code
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
