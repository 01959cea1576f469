"""Failures of an extraction: each ends at 4, once, with words that tell the operator what to do; but what no row can
help (no browser, a site or a storage that serves nobody) costs no row anything: see test_outages.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apps.registre.standin import Standin
from apps.registre.tables import Status
from databases import Db
from rowmill.testing import Kit

from . import rows
from .conftest import Start
from .rows import documents


async def failed(kit: Kit, db: Db, **columns: Any) -> dict[str, Any]:
    """A row that has failed for good: it is at 4, and nothing takes it again."""
    documents(db, **columns)
    stepped = await kit.step("extraction")
    assert stepped is not None
    row = db.one("select * from extraction_queue")
    assert (stepped.outcome, row["status_id"]) == ("dead", Status.ERREUR), stepped
    assert row["file_path"] is None
    assert await kit.step("extraction") is None
    return row


def evidence(place: Path, row: dict[str, Any]) -> Path:
    """The job's directory, as the error names it."""
    folder = place / "evidence" / "prod" / "extraction" / str(row["id"])
    assert str(folder) in row["error_message"]
    return folder


async def test_a_changed_page_leaves_a_picture_its_source_and_the_selector(
    start: Start, place: Path, standin: Standin, short: None
) -> None:
    """A8, A9, A10: a selector is gone on all three sites; what an operator needs is kept, and no result."""
    standin.conduct.changed = {"foncier", "req", "rdprm"}
    kit, dbs = await start(prod="sqlite")
    (session,) = rows.sessions(dbs["prod"])
    rows.searches(dbs["prod"])
    row, *_ = await asyncio.gather(failed(kit, dbs["prod"]), kit.step("req"), kit.step("rdprm"))
    assert (
        "/foncier/recherche/actes of the land registry has changed: there is no number (#numero)"
        in (row["error_message"])
    )
    folder = evidence(place, row)
    assert 'id="no-document"' in (folder / "page.html").read_text()
    assert (folder / "page.png").read_bytes().startswith(b"\x89PNG")
    assert "PageChanged" in (folder / "error.txt").read_text()
    search = dbs["prod"].one("select * from search_sessions where id = ?", session)
    assert (search["status"], bool(search["req_completed"])) == ("failed", False)
    rights = dbs["prod"].one("select * from rdprm_searches")
    assert rights["status"] == "failed"
    for error in (search["error_message"], rights["error_message"]):
        assert "has changed: there is no name (#nom) on it" in error
        assert "Try: compare the page with its selectors, and correct them in apps/registre/sites.py" in error
    for table in ("companies", "names", "inscriptions"):
        assert dbs["prod"].query(f"select * from {table}") == []


def _truncated(standin: Standin) -> None:
    standin.conduct.broken_pdf = b"%PDF-1.7 and then the line went dead"


def _a_page(standin: Standin) -> None:
    standin.conduct.broken_pdf = b"<html>Session surcharg\xc3\xa9e</html>"


@pytest.mark.parametrize(
    ("fault", "number", "words"),
    [
        (None, "9 999", "refuses '9 999': Aucun document ne correspond au numéro 9 999."),
        (_truncated, "1", "sent an incomplete PDF (36 bytes)"),
        (_a_page, "1", "sent no PDF, but b'<html>"),
    ],
)
async def test_what_the_registry_refuses_is_told_in_its_own_words(
    start: Start, place: Path, standin: Standin, fault: Callable[[Standin], None] | None, number: str, words: str
) -> None:
    """A8: no such document, a file that is none."""
    if fault is not None:
        fault(standin)
    kit, dbs = await start(prod="sqlite")
    row = await failed(kit, dbs["prod"], document_number=number)
    assert words in row["error_message"]
    assert "\nTry: " in row["error_message"]
    assert (evidence(place, row) / "page.png").exists()
    assert list((place / "documents").rglob("*.pdf")) == []


async def test_a_slow_site_is_waited_for_so_long_and_no_longer(start: Start, standin: Standin, short: None) -> None:
    """A8: no answer in time."""
    standin.conduct.slow = 60.0
    kit, dbs = await start(prod="sqlite")
    row = await failed(kit, dbs["prod"], document_number="8 000")
    assert "within 5 s" in row["error_message"]
    assert "SITE_TIMEOUT_SECONDS" in row["error_message"]


@pytest.mark.parametrize(
    ("half_way", "words"),
    [
        ("stalls", "did not send the whole document within 2 s"),
        ("breaks", "the download from the land registry broke off"),
    ],
)
async def test_a_download_that_stops_half_way_ends_and_is_not_stored(
    start: Start, place: Path, standin: Standin, monkeypatch: pytest.MonkeyPatch, half_way: str, words: str
) -> None:
    """A8: a site that goes silent in the middle of a document does not keep the worker for ever."""
    monkeypatch.setenv("DOWNLOAD_TIMEOUT_SECONDS", "2")
    standin.conduct.half_way = half_way
    kit, dbs = await start(prod="sqlite")
    row = await failed(kit, dbs["prod"])
    assert words in row["error_message"]
    assert "\nTry: " in row["error_message"]
    assert list((place / "documents").rglob("*.pdf")) == []
