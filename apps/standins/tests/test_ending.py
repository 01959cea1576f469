"""Demonstrations that are stopped on the way: nothing of them is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from waiting import eventually

ROOT = Path(__file__).parents[3]
#: A database is made and a few processes are started: seconds on a quiet machine.
pytestmark = pytest.mark.timeout(240)


#: Ctrl-C is heard, which a process in a shell's background does not.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
DEMO = f"""{INTERRUPTIBLE}
import runpy, sys
module = sys.argv.pop()
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def environment(mark: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "DEMO_MARK": mark}


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
    [("prices", signal.SIGINT), ("analysis", signal.SIGTERM), ("enrichment", signal.SIGTERM)],
)
def test_a_demonstration_that_is_stopped_leaves_nothing_and_says_nothing(app: str, number: signal.Signals) -> None:
    """X2: no process, no folder, no traceback."""
    mark = f"stopped-{uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-c", DEMO, f"apps.{app}"],
        env=environment(mark), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
        process.wait(60)


#: Stops itself as soon as somebody fills the database's folder, and says what is left of the folder.
EARLY = f"""{INTERRUPTIBLE}
import glob, os, signal, sys, tempfile, threading, time
from apps.standins.ending import stoppable
from apps.standins.postgres import postgres

tempfile.TemporaryDirectory = type("Here", (tempfile.TemporaryDirectory,), {{
    "__init__": lambda self, **given: super(type(self), self).__init__(prefix=given["prefix"], dir=sys.argv[1])}})

def stop():
    while not glob.glob(sys.argv[1] + "/*/pg/base/1/*"):
        time.sleep(0.001)
    os.kill(os.getpid(), int(sys.argv[2]))

def demo():
    threading.Thread(target=stop).start()
    with postgres():
        print("went on")
    return 0

sys.exit(stoppable(demo))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_stopped_while_its_database_is_made_leaves_nothing_either(number: signal.Signals) -> None:
    """What fills the folder is not left alone with it."""
    mark = f"stopped-{uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="rm-", dir="/tmp") as folder:
        ran = subprocess.run(
            [sys.executable, "-c", EARLY, folder, str(int(number))],
            env=environment(mark), cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, "", "")
        assert os.listdir(folder) == []
        assert not marked(mark)


STOPPED = """
import asyncio, os, signal
from apps.standins.ending import run, stoppable

async def show():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))  # a handler that Python itself calls would be called by now
    except BaseException:
        pass
    await asyncio.sleep(20)
    return 0

raise SystemExit(stoppable(lambda: run(show())))
"""


def test_a_signal_is_heard_also_where_every_error_is_taken_for_an_answer() -> None:
    """What is awaited is cancelled, instead of an error out of the handler."""
    ran = subprocess.run(
        [sys.executable, "-c", STOPPED], env=environment(""), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGTERM, "")
