"""Workers as processes: their ids, what they tell of themselves, and one that is killed in mid-job."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apps.registre import commands
from apps.registre.lanes import mill
from apps.registre.standin import Standin
from databases import Db
from rowmill import Job
from rowmill.errors import RowmillError

from .at_work import at_work, until
from .conftest import environments
from .processes import command, command_lines, process, wait_for
from .rows import documents

UNIFIED = r"unified-worker-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


def workers(db: Db) -> list[dict[str, Any]]:
    """What the workers of an environment say of themselves."""
    try:
        return db.query("select * from rowmill_workers order by id")
    except Exception:
        return []  # the first worker is about to make the table


@pytest.mark.timeout(300)
async def test_unified_workers_have_ids_of_their_own_and_tell_how_they_are(
    standin: Standin, place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13, A14: unified-worker-{uuid}; idle or busy, the current job, completed, failed, the last sign of life."""
    db = (await environments(fresh, monkeypatch, prod="postgresql"))["prod"]
    log = place / "log"
    monkeypatch.setenv("WORKER_COUNT", "1")
    monkeypatch.setenv("SITE_TIMEOUT_SECONDS", "90")  # a document is held up while another process is asked
    documents(db, document_number="1")
    documents(db, document_number="9")
    with process(log, "apps.registre", "run"):
        wait_for(lambda: workers(db), log)
        wait_for(lambda: statuses(db) == [3, 4], log)
        told = ("idle", 1, 1)
        wait_for(lambda: told == tuple(workers(db)[0][name] for name in ("state", "completed", "failed")), log)
        (idle,) = workers(db)
        assert json.loads(idle["current"]) == []
        assert re.fullmatch(UNIFIED, idle["id"])
        assert json.loads(idle["lanes"]) == ["extraction", "req", "rdprm"]
        told_of = threading.Event()
        standin.conduct.watch = lambda path: told_of.wait(90) and None if "document" in path else None
        (slow,) = documents(db)
        busy = wait_for(lambda: [worker for worker in workers(db) if worker["state"] == "busy"], log)[0]
        (current,) = json.loads(busy["current"])
        assert (current["lane"], str(current["id"]), current["environment"]) == ("extraction", str(slow), "prod")
        assert busy["seen_at"] > idle["seen_at"]
        told = command("rowmill", "workers", "apps.registre:mill", "--json")
        assert busy["id"] in told.stdout
        told_of.set()
        wait_for(lambda: statuses(db) == [3, 4, 3], log)
    assert db.query("select distinct worker_id from extraction_queue") == [{"worker_id": idle["id"]}]


async def test_a_worker_tells_how_it_is_with_every_sign_of_life(
    place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13, A14: the same, without a browser: its id, idle or busy with what, how many went well, how many did not."""
    db = (await environments(fresh, monkeypatch, prod="sqlite"))["prod"]
    go_on = asyncio.Event()

    async def work(job: Job) -> None:
        if job["document_number"] == "bad":
            raise ValueError("there is no such document")
        if job["document_number"] == "slow":
            await go_on.wait()

    def told() -> tuple[Any, ...]:
        return tuple(workers(db)[0][name] for name in ("state", "completed", "failed"))

    monkeypatch.setattr(mill.lanes["extraction"], "handler", work)
    for number in ("good", "good", "bad"):
        documents(db, document_number=number)
    async with at_work():
        await until(lambda: told() == ("idle", 2, 1))
        (idle,) = workers(db)
        assert re.fullmatch(UNIFIED, idle["id"])
        assert json.loads(idle["current"]) == []
        (slow,) = documents(db, document_number="slow")
        await mill.wake()
        await until(lambda: told() == ("busy", 2, 1))
        (busy,) = workers(db)
        (current,) = json.loads(busy["current"])
        assert (current["lane"], str(current["id"]), current["environment"]) == ("extraction", str(slow), "prod")
        assert busy["seen_at"] > idle["seen_at"]
        go_on.set()
        await until(lambda: told() == ("idle", 3, 1))


def statuses(db: Db) -> list[int]:
    return [row["status_id"] for row in db.query("select status_id from extraction_queue order by id")]


def test_three_workers_by_default_and_numbered_ones_for_extraction_only(
    standin: Standin, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13, A1: what is run; with one process the number is there, too."""
    assert commands.arguments() == ["--processes", "3", "--concurrency", "1"]
    monkeypatch.setenv("WORKER_KINDS", "extraction")
    monkeypatch.setenv("WORKER_INSTANCE", "b")
    only = ["--lanes", "extraction", "--worker-id"]
    assert commands.arguments() == ["--processes", "3", "--concurrency", "1", *only, "worker-b"]
    monkeypatch.setenv("WORKER_COUNT", "1")
    assert commands.arguments() == ["--processes", "1", "--concurrency", "1", *only, "worker-b-1"]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("WORKER_KINDS", "extractoin", "there is no kind 'extractoin'\nTry: did you mean 'extraction'?"),
        ("WORKER_COUNT", "many", "WORKER_COUNT='many' is no number of at least 1"),
        ("WORKER_SLOTS", "1.5", "WORKER_SLOTS=1.5 is no whole number"),
        ("LAND_REGISTRY_URL", "", "LAND_REGISTRY_URL is not set"),
        ("CHROMIUM_PATH", "/nowhere", "CHROMIUM_PATH='/nowhere' is no program"),
        ("STORAGE_URL", "gopher://x", "cannot use the storage 'gopher://x'"),
    ],
)
def test_a_wrong_setting_stops_the_worker_before_it_takes_a_row(
    standin: Standin, place: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    """A8: better no worker than a queue of failures."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(RowmillError, match=re.escape(words)):
        commands.arguments()


def test_without_an_environment_the_variables_are_named(standin: Standin, place: Path) -> None:
    """A2: no traceback for a setting that was forgotten."""
    told = command("apps.registre", "run")
    assert told.returncode == 1
    assert "none of PROD_DATABASE_URL, STAGING_DATABASE_URL, DEV_DATABASE_URL" in told.stderr
    assert "Try: PROD_DATABASE_URL=postgresql://" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.timeout(300)
async def test_a_worker_that_is_killed_loses_nothing_and_leaves_nothing(
    request: pytest.FixtureRequest,
    standin: Standin,
    place: Path,
    fresh: Callable[[str], Db],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A12, A13, X2: SIGKILL between download and upload; every document is stored once, and nothing stays behind."""
    db = (await environments(fresh, monkeypatch, prod="postgresql"))["prod"]
    log = place / "log"
    # Not under pytest's own: a browser's socket has a path of about 100 characters at most.
    temporary = Path(tempfile.mkdtemp(prefix="reg-", dir="/tmp"))
    request.addfinalizer(lambda: shutil.rmtree(temporary, ignore_errors=True))
    for name, value in {
        "TMPDIR": str(temporary), "WORKER_COUNT": "2", "WORKER_KINDS": "extraction", "WORKER_INSTANCE": "7",
        "STUCK_AFTER_SECONDS": "5", "STUCK_AT_START_SECONDS": "5",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    killed: list[int] = []
    ids = documents(db, 4)

    def kill(path: str) -> None:
        if path.startswith("/foncier/document") and len(standin.conduct.asked) >= 2 and not killed:
            (victim,) = [worker["pid"] for worker in workers(db) if worker["id"] == "worker-7-1"]
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    standin.conduct.watch = kill
    with process(log, "apps.registre", "run"):
        wait_for(lambda: statuses(db) == [3] * 4, log, 200)
        assert killed
        assert {worker["id"] for worker in workers(db)} == {"worker-7-1", "worker-7-2"}
    assert {row["worker_id"] for row in db.query("select worker_id from extraction_queue")} <= {
        "worker-7-1",
        "worker-7-2",
    }
    stored = sorted(file.name for file in (place / "documents").rglob("*") if file.is_file())
    assert stored == sorted(f"{id}-1-{n:03d}-001.pdf" for n, id in enumerate(ids))
    wait_for(lambda: not command_lines("--remote-debugging-pipe", str(temporary)), log)
    assert os.listdir(temporary) == []
