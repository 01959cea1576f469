"""Demonstrations that are stopped on the way: nothing of them is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from farm import eventually

ROOT = Path(__file__).parents[3]
#: A database is made and a few processes are started: seconds on a quiet machine.
pytestmark = pytest.mark.timeout(240)


def marked(mark: str) -> dict[int, str]:
    """Processes that inherited the mark in their environment, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            pass  # gone meanwhile
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("app", "number"),
    [
        ("prices", signal.SIGINT),
        ("analysis", signal.SIGTERM),
        ("enrichment", signal.SIGINT),
        ("enrichment", signal.SIGTERM),
    ],
)
def test_a_demonstration_that_is_stopped_leaves_nothing_and_says_nothing(app: str, number: signal.Signals) -> None:
    """X2: no process, no folder, no traceback."""
    mark = f"stopped-{uuid4().hex}"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "DEMO_MARK": mark}
    process = subprocess.Popen(
        [sys.executable, "-m", f"apps.{app}"],
        env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores Ctrl-C
    )  # fmt: skip
    try:
        eventually(lambda: sum("apps." in line for line in marked(mark).values()) > 2, 120, every=0.2)
        (folder,) = {m[1] for line in marked(mark).values() if (m := re.search(r" -D (/tmp/[^/ ]+)", line))}
        assert Path(folder).exists()
        process.send_signal(number)
        said, wrong = process.communicate(timeout=90)
        assert process.returncode == 128 + number, wrong
        assert said.startswith("Starting PostgreSQL")
        assert wrong == ""
        assert not Path(folder).exists()
        assert not marked(mark)
    finally:
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)
        process.wait(10)
