"""The monitor and its workers as real processes: their ids, their directories, side by side, killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from apps.desk import taken
from apps.ocr.standin import Standin
from apps.ocr.tests.office import Office
from databases import Db

ROOT = Path(__file__).parents[3]
PATIENCE = 300.0
#: Processes that are started on a busy machine take their time.
pytestmark = pytest.mark.timeout(600)


@contextlib.contextmanager
def monitor(office: Office, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """``python -m apps.ocr`` in a process of its own; stopped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "apps.ocr", *words], cwd=ROOT, env=office.variables(**variables),
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def eventually(happened: Callable[[], Any], what: str) -> Any:
    """Wait until it is so."""
    end = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < end, f"not in {PATIENCE:.0f} s: {what}"
        time.sleep(0.05)
    return found


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def worker_pid(office: Office, worker: str) -> int:
    found = office.db.query("select * from rowmill_workers")
    return next(int(row["pid"]) for row in found if row["id"] == worker)


def test_two_workers_of_one_monitor_read_at_the_same_time_and_a_killed_one_leaves_nothing(
    lite: Db, make_office: Callable[..., Office]
) -> None:
    """B1, B9, B7: neither page is answered before both are asked for; one worker is killed over its page."""
    office = make_office(lite)
    keys = office.add(n=2)
    both, once = threading.Barrier(2), threading.Event()
    go = threading.Event()

    def says(page: Image.Image) -> str:
        if not once.is_set():
            both.wait(PATIENCE)
            once.set()
            go.wait(PATIENCE)
        return "Vendeur : Zoé Côté"

    with (
        Standin(says=says) as gemini,
        monitor(
            office, OCR_WORKER_COUNT="2", GEMINI_API_KEY="k", GEMINI_BASE_URL=gemini.url,
            OCR_LEASE_SECONDS="3", OCR_SWEEP_SECONDS="1",
        ) as process,
    ):  # fmt: skip
        eventually(once.is_set, "two pages at once")
        rows = [office.row(key) for key in keys]
        assert {row["ocr_worker_id"] for row in rows} == {"worker-1", "worker-2"}
        assert {row["status_id"] for row in rows} == {6}
        temp = Path(office.settings.temp)
        assert sorted(path.relative_to(temp).parts[0] for path in office.left()) == ["worker-1", "worker-2"]
        victim = worker_pid(office, "worker-1")
        assert victim in children(process)
        os.kill(victim, signal.SIGKILL)
        go.set()
        eventually(lambda: all(office.row(key)["status_id"] == 5 for key in keys), "both documents read")
        eventually(lambda: worker_pid(office, "worker-1") != victim and not office.left(), "an empty directory")
    assert sorted(office.row(key)["ocr_attempts"] for key in keys) == [1, 2]
    assert sorted(office.row(key)["ocr_reclaims"] for key in keys) == [0, 1]
    assert {path.name for path in temp.iterdir()} == {"worker-1", "worker-2"}


def test_a_command_shows_who_reads(lite: Db, make_office: Callable[..., Office]) -> None:
    """B8: the view, as JSON."""
    office = make_office(lite)
    office.add(b"", n=2, status_id=6, ocr_worker_id="worker-2", ocr_started_at="2026-01-02 03:04:05")
    command = [sys.executable, "-m", "apps.ocr", "workers", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=office.variables(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        {
            "environment": "prod", "ocr_worker_id": "worker-2", "active_jobs": 2,
            "oldest_job": "2026-01-02 03:04:05", "newest_job": "2026-01-02 03:04:05",
        }
    ]  # fmt: skip


def test_the_commands_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    """Issue 7: in an empty folder, on a fresh SQLite file."""
    readme = (ROOT / "apps" / "ocr" / "README.md").read_text()
    script = readme.partition("```sh\n")[2].partition("```")[0]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OCR_", "GEMINI_"))}
    env |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OCR_TEMP": str(tmp_path / "temp"),
    }
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "table extraction_queue" in done.stdout
    assert "Nothing was ready." in done.stderr
    assert done.stdout.endswith("No document is being read.\n")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OCR_WORKER_COUNT": "none"}, "OCR_WORKER_COUNT='none' is not a whole number"),
        ({"PROD_DATABASE_URL": ""}, "no environment is set"),
        ({"OCR_TEMP": "/proc/none"}, "OCR_TEMP='/proc/none' cannot be written to"),
    ],
)
def test_a_wrong_setting_is_told_without_a_traceback(
    variables: dict[str, str], words: str, lite: Db, make_office: Callable[..., Office]
) -> None:
    """B1: what is wrong, and what to write."""
    office = make_office(lite)
    done = subprocess.run(
        [sys.executable, "-m", "apps.ocr", "run", "--drain"], cwd=ROOT, env=office.variables(**variables),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert words in done.stderr
    assert "Try:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_is_emptied_for_its_next_worker_but_never_under_a_live_one(tmp_path: Path) -> None:
    """B1: by a lock that ends with the process that has it."""
    code = "import sys, pathlib; from apps.desk import taken; d = taken(pathlib.Path(sys.argv[1]), 'worker-1');"
    code += "(d / 'left').write_text('x'); print(d.name, flush=True); sys.stdin.read()"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "worker-1\n"
    (tmp_path / "worker-1.2").mkdir()
    (tmp_path / "worker-1.2" / "left").write_text("of one that was killed")
    assert taken(tmp_path, "worker-1") == tmp_path / "worker-1.2"
    assert list((tmp_path / "worker-1.2").iterdir()) == []
    assert (tmp_path / "worker-1" / "left").exists()
    first.kill()
    first.communicate()
    assert taken(tmp_path, "worker-1") == tmp_path / "worker-1"
    assert list((tmp_path / "worker-1").iterdir()) == []
    (tmp_path / "worker-1" / "in use").touch()
    assert taken(tmp_path, "worker-1") == tmp_path / "worker-1"
    assert (tmp_path / "worker-1" / "in use").exists()
