"""The README's commands work as they stand, and its settings are the ones there are."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from apps.registre import settings, sites

from .processes import ROOT

README = (ROOT / "apps/registre/README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(300)
def test_the_commands_of_the_readme_work(tmp_path: Path) -> None:
    """A: from nothing to tables that the lanes fit, and to a document that is stored."""
    assert len(BLOCKS) == 2
    script = "\n".join(BLOCKS)
    own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if not name.endswith("_DATABASE_URL")}
    # As from the root, but with nothing written there.
    env |= {"PATH": own, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "COLUMNS": "200"}
    shell = subprocess.Popen(
        ["bash", "-ec", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        told, _ = shell.communicate(timeout=250)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it left in the background, where it failed
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, told
    assert "dev: table extraction_queue" in told
    assert "rdprm" in told
    assert "documents/dev/actes/1-1-234-567.pdf" in told


def test_every_setting_is_in_the_readme_with_its_default() -> None:
    """A: and there is none that the code does not know."""
    rows = re.findall(r"^\| (`[A-Z].*?) \|\s*(.*?)\s*\|", README.partition("## Settings")[2], re.MULTILINE)
    told = {name: default.strip("`") for names, default in rows for name in re.findall(r"`([A-Z_]+)`", names)}
    known = dict(settings.DEFAULTS) | {"WORKER_KINDS": "all", "CHROMIUM_PATH": "found", "STORAGE_URL": "documents"}
    known |= dict.fromkeys(settings.ENVIRONMENTS.values(), "")
    known |= {f"STORAGE_{name}": "" for name in ("ENDPOINT", "KEY", "SECRET", "REGION")}
    for site in (sites.LAND, sites.COMPANIES, sites.RIGHTS):
        known |= {f"{site.prefix}_{part}": "" for part in ("URL", *(("USER", "PASSWORD") if site.login else ()))}
    assert told == known


def test_secrets_do_not_show() -> None:
    """A: an account in a log line shows no password."""
    assert "hunter2" not in repr(settings.Access("https://site.example", "client", "hunter2"))
