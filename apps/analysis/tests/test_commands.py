"""The commands of the README, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx

from apps.analysis.settings import Settings
from apps.analysis.tests import world
from databases import Db
from waiting import eventually

REPORT = re.compile(r"^\d\d:\d\d:\d\d info +health_checked +worker=\S+ idle=30 busy=0", re.MULTILINE)
README = Path(__file__).parents[1] / "README.md"


def commands() -> list[list[str]]:
    """What the console blocks say, without the remarks."""
    blocks = re.findall(r"```console\n(.*?)```", README.read_text(), re.DOTALL)
    return [line[2:].partition("#")[0].split() for block in blocks for line in block.splitlines() if line[:2] == "$ "]


def test_the_commands_of_the_readme_run(lite: Db, settings: Settings, tmp_path: Path) -> None:
    """E7: on its own and inside the web application; both start, work, and stop when told."""
    environ = {**os.environ, **settings.environ(), "ROWMILL_DATABASE_URL": lite.url, "PYTHONWARNINGS": ""}
    environ["PYTHONPATH"] = os.pathsep.join([str(world.ROOT / "src"), str(world.ROOT)])
    tables, run, serve, status = commands()

    def python(command: list[str], *more: str) -> list[str]:
        module = command[1:] if command[0] == "python" else ["-m", *command]
        return [sys.executable, *module, *more]

    def ended(key: str) -> bool:
        return bool(world.row(lite, key)["status"] == "completed")

    made = subprocess.run(python(tables), env=environ, cwd=world.ROOT, timeout=60, capture_output=True)
    assert made.stdout.decode().strip() == "default: AnalysisJob, AnalysisWorker, ModelAnswer", made.stderr
    assert made.stderr == b""
    address = tmp_path / "web.sock"
    for command in (python(run), python(serve, "--uds", str(address))):
        (key,) = world.insert(lite)
        log = tmp_path / f"{command[2]}.log"
        with log.open("ab") as lines:
            process = subprocess.Popen(command, env=environ, cwd=world.ROOT, stdout=lines, stderr=lines)
        try:
            eventually(lambda key=key: ended(key), 60, every=0.1)
            # E8: both report the health of their processors, line for line in the same form.
            eventually(lambda log=log: REPORT.search(log.read_text()), 60, every=0.1)
            if "uvicorn" in command:
                with httpx.Client(transport=httpx.HTTPTransport(uds=str(address))) as client:
                    assert client.get("http://analysis/statistics").json()["completed"] == 2
        finally:
            process.terminate()
            assert process.wait(timeout=60) in (0, -15)  # uvicorn ends itself by the signal it was sent
    told = subprocess.run(python(status), env=environ, cwd=world.ROOT, check=True, timeout=60, capture_output=True)
    assert b"website-analysis" in told.stdout


def test_a_setting_that_is_wrong_is_told_without_a_traceback() -> None:
    """E7: what is wrong, and what to do."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(world.ROOT / "src"), str(world.ROOT)])}
    environ |= {"ANALYSIS_PACE_START": "3", "ROWMILL_DATABASE_URL": "sqlite:///none.db"}
    command = [sys.executable, "-m", "rowmill", "run", "apps.analysis:mill"]
    ended = subprocess.run(command, env=environ, cwd=world.ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "there is no setting ANALYSIS_PACE_START" in ended.stderr
    assert "ANALYSIS_PACE_STARTS" in ended.stderr.partition("Try:")[2]
    assert "Traceback" not in ended.stderr
