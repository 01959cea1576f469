"""The README's commands, and the tour that ``make enrichment`` gives."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from apps.enrichment import __main__ as tour
from apps.enrichment.tests.conftest import netscape
from apps.enrichment.tests.crowd import ROOT, Workers
from apps.standins import sites
from apps.standins.internet import Internet
from databases import Db
from waiting import eventually

README = Path(__file__).parents[1] / "README.md"


def reached(port: str) -> bool:
    with socket.socket() as there:
        return there.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.mark.timeout(300)  # five processes start one after the other, beside others on a busy machine
@pytest.mark.skipif(shutil.which("curl") is None, reason="the README sends the file with curl")
def test_the_commands_of_the_readme_work_as_they_stand(pg: Db, net: Internet, tmp_path: Path) -> None:
    """C1: user, web side, workers and upload, each in a process of its own, as the README starts them."""
    net.default = sites.page()
    (block,) = re.findall(r"```console\n(.*?)```", README.read_text(), re.DOTALL)
    commands = [line.removeprefix("$ ").partition("  #")[0].strip() for line in block.splitlines()]
    exported, add, serve, work, send = commands
    assert exported == "export ROWMILL_DATABASE_URL=postgresql://..."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (tmp_path / "bookmarks.html").write_text(netscape("https://a.example/"))
    workers = Workers(pg, net)
    environment = workers.environment | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def start(command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(shlex.split(command), env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
        workers.processes.append(process)
        return process

    try:
        environment["TOKEN"] = subprocess.run(
            shlex.split(add), env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        start(f"{serve} --port {port}")
        start(work)
        eventually(lambda: reached(port), seconds=120, every=0.3)
        upload = f"{send.replace('8000', port)} --silent"
        sent = subprocess.run(upload, shell=True, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert '"status":"queued"' in sent.stdout, sent
        eventually(lambda: pg.value("select status from import_jobs") == "succeeded", seconds=120, every=0.3)
    finally:
        workers.close()


@pytest.mark.timeout(300)
def test_the_tour_shows_an_import_and_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C2, C8, C10: make enrichment, from its upload to its summary."""
    monkeypatch.setitem(tour.SETTINGS, "ENRICHMENT_RETRY_SECONDS", "1")
    assert tour.main() == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "461 bookmarks are 380 links; 461 items are over, 28 of them failed" in shown
    assert "never more than 2 at once to one" in shown
    assert (
        "guarded.example (captcha, 6 links), rules.example (robots, 3 links), shut.example (forbidden, 6 links)"
        in shown
    )
