"""``make analysis``: it runs, shows the phases, and ends by itself with a summary."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from apps.analysis.tests.world import ROOT


@pytest.mark.timeout(240)  # beside others on a busy machine
def test_the_demonstration_ends_by_itself_with_a_summary() -> None:
    """E1 to E8: all three phases with real processes, one of them killed, on stand-ins and an embedded PostgreSQL."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "COLUMNS": "200"}
    command = [sys.executable, "-m", "apps.analysis", "--sites", "12"]
    ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "12 sites in" in ended.stdout
    assert "9 completed, 3 failed by rule." in ended.stdout
    assert "https://gone.example/  stays in not-started with retryCount 3: the site answers 404" in ended.stdout
    assert "For an answer that was stored: 0." in ended.stdout
    assert "model-analysis: " in ended.stdout
    assert ended.stderr == ""


def test_a_wrong_number_of_sites_is_told() -> None:
    """E1: bad input is named."""
    command = [sys.executable, "-m", "apps.analysis", "--sites", "2"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--sites 2: at least 4" in ended.stderr
