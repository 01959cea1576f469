"""A process from the fork server is what an interpreter's would be: its parent, files, signals, end, and children."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quick_processes import real_processes
from waiting import eventually

TELL = """
import json, os, signal, sys, threading
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append("USR1"))
signal.raise_signal(signal.SIGUSR1)
thread = threading.Thread(target=heard.append, args=["thread"])
thread.start()
thread.join()
line = open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")
print(json.dumps([os.getppid(), sys.argv, os.getcwd(), os.environ["MARK"], input(), heard, __name__, line[-2:]]))
sys.exit(7)
"""


@pytest.fixture(params=["quick", "real"])
def _both(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is expected of one is true of the other."""
    if request.param == "quick":
        yield
        return
    with real_processes():
        yield


@pytest.mark.usefixtures("_both")
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
def test_it_is_a_child_with_its_own_words_files_and_signals(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(TELL)
    environment = {**os.environ, "MARK": "here"}
    for words in (["app.py", "one"], ["-c", TELL, "one"], ["-m", "app", "one"]):
        ended = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, input="said\n", capture_output=True, text=True
        )
        assert ended.returncode == 7, ended.stderr
        told = json.loads(ended.stdout)
        first = {"-c": "-c", "-m": str(tmp_path / "app.py")}.get(words[0], "app.py")
        assert told == [
            os.getpid(), [first, "one"], str(tmp_path), "here", "said", ["USR1", "thread"], "__main__", words[-2:],
        ]  # fmt: skip


@pytest.mark.usefixtures("_both")
def test_it_ends_as_it_is_told_and_a_mistake_is_shown(tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        code = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); open('up', 'w')\n"
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}time.sleep(60)"], cwd=tmp_path, stderr=subprocess.PIPE
        )
        eventually((tmp_path / "up").exists, 60)
        (tmp_path / "up").unlink()
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == -number
        assert (b"KeyboardInterrupt" in said) is (number == signal.SIGINT)
    wrong = subprocess.run([sys.executable, "-c", "1/0"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith('Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n')
    assert wrong.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.usefixtures("_both")
def test_what_it_starts_is_its_own_child_and_files_are_passed_on(tmp_path: Path) -> None:
    inner = "import os, sys; os.write(int(sys.argv[1]), str(os.getppid()).encode())"
    outer = (
        "import os, subprocess, sys; reading, writing = os.pipe();"
        f" subprocess.run([sys.executable, '-c', {inner!r}, str(writing)], pass_fds=[writing], check=True);"
        " print(os.read(reading, 99).decode() == str(os.getpid()))"
    )
    ended = subprocess.run([sys.executable, "-c", outer], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "True\n", ended.stderr


@pytest.mark.usefixtures("_both")
def test_multiprocessing_spawns_with_it() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(os.getppid) == os.getpid()
        pool.close()
        pool.join()
