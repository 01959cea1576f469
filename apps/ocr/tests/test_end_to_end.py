"""From the registry's site to the text: both applications as real processes, and what is killed on the way."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apps.ocr.tests.office import Office
from apps.ocr.tests.test_accuracy import accuracy
from apps.registre.standin import Standin
from apps.registre.standin.documents import document
from apps.registre.standin.pdfs import KINDS
from databases import Db

ROOT = Path(__file__).parents[3]
DOCUMENTS = 18
#: How long nothing at all may change; how long it takes in all depends on what else the machine does.
PATIENCE = 120.0
#: Leases short enough for a test, with room for a busy machine: heartbeats come every fifth of them.
FAST = {
    "STUCK_AFTER_SECONDS": "8",
    "STUCK_AT_START_SECONDS": "8",
    "OCR_LEASE_SECONDS": "8",
    "OCR_SWEEP_SECONDS": "2",
    "OCR_WORKER_COUNT": "2",
    "OCR_DETECT_SIDE": "640",
    "SITE_TIMEOUT_SECONDS": "300",
}


@contextlib.contextmanager
def running(log: Path, *words: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m words`` until the end of the block, then told to stop."""
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


class Queue:
    """The table as the test watches it."""

    def __init__(self, db: Db, logs: list[Path]) -> None:
        self.db, self._logs = db, logs

    def eventually(self, happened: Callable[[], Any], what: str) -> Any:
        """Wait for it, as long as rows move."""
        seen, until = self.counts(), time.monotonic() + PATIENCE
        while not (found := happened()):
            if (now := self.counts()) != seen:
                seen, until = now, time.monotonic() + PATIENCE
            if time.monotonic() > until:
                told = "\n".join(log.read_text()[-2000:] for log in self._logs)
                raise AssertionError(f"nothing moved for {PATIENCE:.0f} s before {what}; {now}\n{told}")
            time.sleep(0.1)
        return found

    def counts(self) -> dict[int, int]:
        found = self.db.query("select status_id, count(*) as n from extraction_queue group by status_id")
        return {row["status_id"]: row["n"] for row in found}

    def extractors(self, lost: dict[str, Any] | None = None) -> set[Any]:
        """The workers that are at a document, less a claim that is known to be lost."""
        held = self.db.query("select id, processing_started_at, worker_id from extraction_queue where status_id = 2")
        return {row["worker_id"] for row in held if lost is None or row | lost != row}

    def kill_a_worker(self, status: int, column: str) -> Any:
        """Kill -9 a worker while it has a row in hand: it is stopped first, and let go if it has none. The row's id."""

        def killed() -> Any:
            held = self.db.query(f"select id, {column} as worker from extraction_queue where status_id = {status}")
            for row in held:
                pids = self.db.query("select pid from rowmill_workers where id = ?", row["worker"])
                for pid in (int(found["pid"]) for found in pids):
                    os.kill(pid, signal.SIGSTOP)
                    of = f"id = {row['id']} and status_id = {status} and {column} = ?"
                    still = self.db.query(f"select 1 from extraction_queue where {of}", row["worker"])
                    os.kill(pid, signal.SIGKILL if still else signal.SIGCONT)
                    if still:
                        return row["id"]
            return None

        return self.eventually(killed, f"a worker with a row in {status}")


def below(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *below(child)]
    return found


def browsers(pid: int) -> list[int]:
    """The browsers, each by its first process, below a process."""
    found = []
    for child in below(pid):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
            if "--headless" in line and "--type=" not in line:
                found.append(child)
    return found


@pytest.mark.timeout(1200)
def test_documents_come_through_both_applications_whatever_is_killed(
    pg: Db, tmp_path: Path, make_office: Callable[..., Office]
) -> None:
    """X2, A8, A12, B1, B3, B7: three workers and two, one of each killed, a browser killed; all are read."""
    temp = Path(tempfile.mkdtemp(prefix="both-", dir="/tmp"))  # a browser's socket wants a short path
    office = make_office(pg, temp=str(temp / "ocr"))
    logs = [tmp_path / "registre.log", tmp_path / "ocr.log"]
    numbers = {f"{21_500_000 + n}": KINDS[n % 3] for n in range(DOCUMENTS)}
    pg.populate(
        "extraction_queue",
        DOCUMENTS,
        {
            "document_number": lambda n: list(numbers)[n], "document_type": lambda n: KINDS[n % 3],
            "circonscription": "Montréal", "cadastre": "Cadastre du Québec",
        },
    )  # fmt: skip
    queue, open_for_all = Queue(pg, logs), threading.Event()
    try:
        with Standin() as site:
            site.conduct.watch = lambda path: open_for_all.wait(300) and None
            env = office.variables(
                **FAST, **site.variables(), TMPDIR=str(temp), EVIDENCE_DIR=str(tmp_path / "evidence")
            )
            with (
                running(logs[0], "apps.registre", "run", env=env) as registre,
                running(logs[1], "apps.ocr", env=env),
                contextlib.ExitStack() as stack,
            ):
                stack.callback(open_for_all.set)
                # No document is handed out before each worker has one to ask for, the killed one's successor as well.
                queue.eventually(lambda: len(queue.extractors()) == 3, "three workers with a document")
                taken_back = [queue.kill_a_worker(2, "worker_id")]
                (lost,) = pg.query(f"select id, processing_started_at from extraction_queue where id = {taken_back[0]}")
                queue.eventually(lambda: len(queue.extractors(lost)) == 3, "three workers again")
                os.kill(queue.eventually(lambda: browsers(registre.pid), "a browser")[0], signal.SIGKILL)
                open_for_all.set()
                taken_back.append(queue.kill_a_worker(6, "ocr_worker_id"))
                queue.eventually(lambda: queue.counts() == {5: DOCUMENTS}, "all documents read")
                queue.eventually(lambda: not office.left(), "empty directories")
            downloads = site.conduct.counts["downloads"]
        assert_all_well(office, numbers, taken_back, downloads)
        assert [path for path in temp.rglob("*") if path.is_file()] == []
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def assert_all_well(office: Office, numbers: dict[str, str], taken_back: list[Any], downloads: int) -> None:
    """Every document is stored once, as it was served, and read; errors are none."""
    rows = office.db.query("select * from extraction_queue")
    assert office.storage.paths() == sorted(row["file_path"] for row in rows)
    assert len({row["file_path"] for row in rows}) == DOCUMENTS
    assert downloads >= DOCUMENTS
    worst = 1.0
    for row in rows:
        data, printed = document(row["document_number"], numbers[row["document_number"]])
        assert row["file_size"] == len(data)
        assert (row["error_message"], row["ocr_error"]) == (None, None)
        worst = min(worst, accuracy(row["ocr_text"], printed))
    assert worst >= 0.97
    by_key = {row["id"]: row for row in rows}
    assert by_key[taken_back[1]]["ocr_reclaims"] >= 1
    assert {row["ocr_worker_id"] for row in rows} == {"worker-1", "worker-2"}
    assert len({row["worker_id"] for row in rows}) == 3
