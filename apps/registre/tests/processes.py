"""Workers as they are really run: processes, started from a shell, and stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def command(*words: str, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """``python -m words``, to its end."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )


@contextmanager
def process(log: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m words`` with these variables, from the repository's root; told to stop at the end of the block."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    with log.open("wb") as out:
        started = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, env=env, stdout=out, stderr=out)
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(90)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
                raise


def wait_for(holds: Callable[[], Any], log: Path, seconds: float = 90.0) -> Any:
    """Wait for something true; the processes' log tells why it did not come."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.1)
    return found


def command_lines(*words: str) -> Sequence[int]:
    """Processes whose command line has all these words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(int(entry.name))
    return found
