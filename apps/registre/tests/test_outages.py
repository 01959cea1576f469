"""What no row can help: no browser, a site that serves nobody, a login that is refused, a storage that takes nothing.

Rows keep their state; the log says why nothing is done; when the trouble is over, they are worked on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

from apps.registre.browser import Chromium
from apps.registre.errors import PageChanged, SiteRefused
from apps.registre.lanes import mill
from apps.registre.standin import Standin
from apps.registre.tables import Status
from apps.storage import Storage, StorageError
from databases import Db
from rowmill import Job
from rowmill.engine import resources
from rowmill.testing import Kit

from .at_work import at_work, until
from .conftest import Start, environments, share
from .processes import command
from .refusing import refusing_s3
from .rows import documents, sessions
from .small_disk import small_disk

UNTOUCHED = {"status_id": Status.EN_ATTENTE, "worker_id": None, "processing_started_at": None, "error_message": None}


def untouched(db: Db) -> bool:
    """Every document waits as on its first day."""
    rows = db.query("select * from extraction_queue")
    return bool(rows) and all({name: row[name] for name in UNTOUCHED} == UNTOUCHED for row in rows)


async def put_off(kit: Kit, db: Db, caplog: pytest.LogCaptureFixture) -> str:
    """The next document is put off and loses nothing; what the log says."""
    caplog.clear()
    stepped = await kit.step("extraction")
    assert stepped is not None
    assert (stepped.outcome, stepped.error) == ("snooze", None)
    assert untouched(db)
    return caplog.text


# -- before a row is claimed


def _no_browser(monkeypatch: pytest.MonkeyPatch, place: Path) -> Callable[[], None]:
    monkeypatch.setenv("CHROMIUM_PATH", str(place / "chromium"))
    return lambda: monkeypatch.delenv("CHROMIUM_PATH")


def _no_setting(monkeypatch: pytest.MonkeyPatch, place: Path) -> Callable[[], None]:
    monkeypatch.delenv("LAND_REGISTRY_PASSWORD")
    return lambda: monkeypatch.setenv("LAND_REGISTRY_PASSWORD", "secret")


def _no_storage(monkeypatch: pytest.MonkeyPatch, place: Path) -> Callable[[], None]:
    (place / "documents").write_text("a file where the directory should be")
    return (place / "documents").unlink


@pytest.mark.parametrize(
    ("fault", "resource", "words"),
    [
        (_no_browser, "chromium", "is no program"),
        (_no_setting, "registry", "LAND_REGISTRY_PASSWORD is not set"),
        (_no_storage, "storage", "could not store anything"),
    ],
)
async def test_nothing_is_claimed_while_what_a_job_needs_is_not_there(
    standin: Standin,
    place: Path,
    fresh: Callable[[str], Db],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch, Path], Callable[[], None]],
    resource: str,
    words: str,
) -> None:
    """A8: under ``rowmill run`` as well: the worker waits, says why, and begins when it is there."""
    monkeypatch.setattr(resources, "_OPEN_AGAIN", (0.05, 0.1))
    mend = fault(monkeypatch, place)
    dialect = "postgresql" if resource == "chromium" else "sqlite"
    db = (await environments(fresh, monkeypatch, prod=dialect))["prod"]
    documents(db, 2)
    events: list[Any] = []
    monkeypatch.setattr(mill.events, "_subscribers", [*mill.events._subscribers, events.append])
    monkeypatch.setattr(mill.events, "observed", True)
    async with at_work(lanes=["extraction"]):
        await until(lambda: [event.name for event in events].count("resource_failed") > 2)
        assert untouched(db)
        assert "batch_claimed" not in [event.name for event in events]
        (told, *_) = [event.fields for event in events if event.name == "resource_failed"]
        assert told["error"].startswith(f"the resource {resource!r} cannot be opened: ")
        assert words in told["error"]
        assert told["hint"]
        mend()
        await until(lambda: {row["status_id"] for row in db.query("select status_id from extraction_queue")} == {3})


async def test_a_kind_that_needs_nothing_missing_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1, A8: a company search needs neither the land registry's account nor the storage."""
    monkeypatch.setattr(resources, "_OPEN_AGAIN", (0.05, 0.1))
    _, dbs = await start(prod="sqlite")
    monkeypatch.delenv("LAND_REGISTRY_PASSWORD")
    documents(dbs["prod"])
    sessions(dbs["prod"])
    async with at_work():
        await until(lambda: dbs["prod"].value("select status from search_sessions") == "pending_name_selection")
    assert untouched(dbs["prod"])


def test_a_drain_without_a_browser_ends_with_what_to_do(
    place: Path, standin: Standin, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A8: ``rowmill run`` itself: no traceback, no row lost, and an exit code."""
    monkeypatch.setenv("CHROMIUM_PATH", str(place / "chromium"))
    db = fresh("sqlite")
    monkeypatch.setenv("DEV_DATABASE_URL", db.url)
    assert command("apps.registre", "migrate").returncode == 0
    documents(db)
    ended = command("rowmill", "run", "apps.registre:mill", "--drain")
    assert ended.returncode == 1, ended.stderr
    assert "the resource 'chromium' cannot be opened: CHROMIUM_PATH=" in ended.stderr
    assert "Try: leave it unset, or give the whole path" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert untouched(db)


# -- in the middle of a run


async def test_a_browser_that_no_longer_starts_is_no_failure_of_the_document(
    start: Start, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A8: the disk with its profile is full; other machines go on, so the lane is not closed for them."""
    chromium = Chromium()
    share(chromium, monkeypatch)
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"])
    with small_disk(place / "temporary", 4096) as disk:
        (disk / "filling").write_bytes(b"0" * 4096)
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        said = await put_off(kit, dbs["prod"], caplog)
    assert f"no space is left in {disk}" in said
    assert "Try: free some space there, or TMPDIR=" in said
    assert not chromium.works
    assert dbs["prod"].query("select * from rowmill_gates where closed_until is not null") == []
    assert mill.resources["chromium"].healthy is None, "the tests' own has none"


async def test_a_refused_login_closes_the_lane_and_costs_no_document(
    start: Start, place: Path, standin: Standin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A8: the account is tried once, not with every row until it is locked."""
    monkeypatch.setenv("LAND_REGISTRY_PASSWORD", "hunter2")
    kit, dbs = await start(prod="postgresql")
    documents(dbs["prod"], 3)
    said = await put_off(kit, dbs["prod"], caplog)
    assert "the land registry refuses the login of 'client': Code d'utilisateur ou mot de passe invalide." in said
    assert "Try: correct LAND_REGISTRY_USER and _PASSWORD" in said
    assert standin.conduct.counts["refused_logins"] == 1
    folder = place / "evidence" / "prod" / "extraction"
    assert "hunter2" not in said + "".join(file.read_text() for file in folder.rglob("*.[ht]*"))
    assert await kit.step("extraction") is None, "all workers leave the site alone"
    kit.advance(td(minutes=5, seconds=1))
    assert "refuses the login of 'client'" in await put_off(kit, dbs["prod"], caplog)
    assert standin.conduct.counts["refused_logins"] == 1


def _closed(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> str:
    standin.conduct.closed = {"foncier"}
    return "answered 503 to"


def _unreachable(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LAND_REGISTRY_URL", "http://127.0.0.1:9")
    return "check LAND_REGISTRY_URL"


def _silent(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SITE_TIMEOUT_SECONDS", "1")
    standin.conduct.delay = 60.0
    return "did not open http"


@pytest.mark.parametrize("fault", [_closed, _unreachable, _silent])
async def test_a_site_that_serves_nobody_closes_the_lane_and_costs_no_document(
    start: Start,
    standin: Standin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[Standin, pytest.MonkeyPatch], str],
) -> None:
    """A8: closed, unreachable, silent. Five minutes later one document is tried, and the others follow."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"], 2)
    words = fault(standin, monkeypatch)
    assert words in await put_off(kit, dbs["prod"], caplog)
    assert await kit.step("extraction") is None
    if fault is _closed:
        standin.conduct.closed = set()
        kit.advance(td(minutes=5, seconds=1))
        assert [(await kit.step("extraction")).outcome for _ in range(2)] == ["done", "done"]


async def test_a_full_disk_closes_the_lane_and_costs_no_document(
    start: Start, place: Path, standin: Standin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A8: nothing half-written stays."""
    standin.conduct.broken_pdf = b"%PDF-1.7" + b"0" * 200_000 + b"%%EOF"
    kit, dbs = await start(prod="postgresql")
    documents(dbs["prod"], 2)
    with small_disk(place / "full") as disk:
        monkeypatch.setenv("STORAGE_URL", str(disk))
        said = await put_off(kit, dbs["prod"], caplog)
        assert [file for file in disk.rglob("*") if file.is_file()] == []
    assert "no space is left" in said
    assert "Try: free some space there" in said
    assert await kit.step("extraction") is None


async def test_a_storage_whose_key_is_revoked_closes_the_lane_and_costs_no_document(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A8: it took documents when the worker started, and answers 403 now."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"], 2)
    with refusing_s3() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as before:
            before.setattr(Storage, "check", lambda self: None)
            await kit._resources.get(["storage"])
        said = await put_off(kit, dbs["prod"], caplog)
    assert "the storage refuses" in said
    assert "STORAGE_KEY and STORAGE_SECRET" in said
    assert await kit.step("extraction") is None


async def test_a_document_that_a_working_storage_does_not_take_fails_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A8: else it would close the lane again and again, for all that wait behind it."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"], 2)

    def put(self: Storage, path: str, source: Any) -> None:
        raise StorageError(f"{path!r} is too large", hint="a smaller one")

    with monkeypatch.context() as first:
        first.setattr(Storage, "put", put)
        assert (await kit.step("extraction")).outcome == "dead"
    assert (await kit.step("extraction")).outcome == "done"


async def test_pages_that_have_changed_open_the_breaker(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A8: a failure is final, and a changed page is one; but it does not go through the whole queue. A document that
    does not exist counts for nothing.
    """
    kit, dbs = await start(prod="sqlite")
    keys = documents(dbs["prod"], 8)

    async def handler(job: Job) -> None:
        raise SiteRefused("no such document") if job.id == keys[0] else PageChanged("there is no number on it")

    with monkeypatch.context() as changed:
        changed.setattr(mill.lanes["extraction"], "handler", handler)
        assert [(await kit.step("extraction")).outcome for _ in range(6)] == ["dead"] * 6
        assert await kit.step("extraction") is None
    kit.advance(td(minutes=5, seconds=1))
    assert [(await kit.step("extraction")).outcome for _ in range(2)] == ["done", "done"]


# -- a row that does not say what it wants


@pytest.mark.parametrize("value", [None, "  "])
async def test_a_row_without_a_name_is_refused_and_nothing_is_searched(
    start: Start, standin: Standin, value: str | None
) -> None:
    """A8, A9, A10: the originals' columns may be null."""
    kit, dbs = await start(prod="sqlite")
    db = dbs["prod"]
    for table, column in (("search_sessions", "company_name"), ("rdprm_searches", "search_name")):
        db.execute(f"alter table {table} rename column {column} to old; alter table {table} add column {column} text")
    db.execute("pragma foreign_keys = off")
    documents(db, document_number="")
    session = db.insert("search_sessions", [{"old": "", "company_name": value}])[0]
    db.insert("rdprm_searches", [{"old": "", "search_name": value, "search_session_id": session}])
    for lane, column in (("extraction", "document_number"), ("req", "company_name"), ("rdprm", "search_name")):
        stepped = await kit.step(lane)
        assert stepped is not None
        assert stepped.outcome == "dead"
        assert f"the row has no {column}, so there is nothing to search for" in (stepped.error or "")
        assert f"Try: fill it in, then rowmill retry apps.registre:mill --env prod --lane {lane} --id" in (
            stepped.error or ""
        )
    assert standin.conduct.asked == []
