"""``make registre``: everything at once, to its end."""

from __future__ import annotations

import subprocess

import pytest

from .processes import ROOT, command


@pytest.mark.timeout(600)
def test_the_show_ends_by_itself_with_every_job_where_it_should_be() -> None:
    """A1, A2: three environments, three kinds, workers as processes; and the documents are read, too."""
    told = command("apps.registre", "--documents", "1", "--workers", "1", seconds=500)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "Every job ended as it should" in told.stdout
    assert "3 objects" in told.stdout
    for environment in ("prod", "staging", "dev"):
        assert environment in told.stdout


def test_the_makefile_has_it() -> None:
    """A: the command of the README."""
    told = subprocess.run(["make", "-n", "registre"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m apps.registre" in told
    assert "chromium" in told
