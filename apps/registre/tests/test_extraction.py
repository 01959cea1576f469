"""Extraction from the land registry, in a real browser: from 1 to 3, or to 4 with a reason."""

from __future__ import annotations

import hashlib
from datetime import timedelta as td
from pathlib import Path

import pytest

from apps.registre.standin import Standin
from apps.registre.standin.documents import document
from apps.registre.tables import Status
from apps.storage import Storage

from .conftest import Start
from .rows import documents


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_a_document_is_downloaded_stored_and_then_complete(start: Start, place: Path, dialect: str) -> None:
    """A8: log in, search, download, upload; then status 3, with where the object is and what it is."""
    kit, dbs = await start(prod=dialect)
    (one,) = documents(dbs["prod"], document_number="1 234 567")
    stepped = await kit.step("extraction")
    assert stepped is not None
    row = dbs["prod"].one("select * from extraction_queue")
    assert (row["status_id"], row["error_message"]) == (Status.COMPLETE, None), stepped
    pdf, _ = document("1 234 567", "actes")
    assert row["file_path"] == f"prod/actes/{one}-1-234-567.pdf"
    assert (place / "documents" / row["file_path"]).read_bytes() == pdf
    assert (row["checksum"], row["file_size"]) == (hashlib.sha256(pdf).hexdigest(), len(pdf))


@pytest.mark.parametrize(
    ("number", "name"),
    [
        ("../../etc/passwd\n", "etc-passwd"),
        ("\u202e<script>'; drop table extraction_queue --", "script-drop-table-extraction-queue"),
        ("7" * 5000, "7" * 80),
        ("無", ""),
    ],
)
async def test_a_strange_document_number_is_asked_for_as_it_is_and_names_no_other_place(
    start: Start, place: Path, standin: Standin, number: str, name: str
) -> None:
    """A8: whatever people write into a row."""
    standin.conduct.broken_pdf = b"%PDF-1.7 %%EOF"
    kit, dbs = await start(prod="sqlite")
    (one,) = documents(dbs["prod"], document_number=number)
    await kit.step("extraction")
    assert standin.conduct.asked == [("actes", number.strip())]
    row = dbs["prod"].one("select * from extraction_queue")
    assert (row["status_id"], row["error_message"]) == (Status.COMPLETE, None)
    assert row["file_path"] == f"prod/actes/{one}-{name}.pdf"
    assert [file.name for file in (place / "documents").rglob("*") if file.is_file()] == [f"{one}-{name}.pdf"]


async def test_a_row_whose_worker_died_after_the_upload_is_not_uploaded_again(start: Start, place: Path) -> None:
    """A8, A12, X2: killed between upload and outcome: the object of then is the object of now."""
    kit, dbs = await start(prod="sqlite")
    (one,) = documents(dbs["prod"], document_number="1 234 567")
    await kit.claim("extraction")
    path = f"prod/actes/{one}-1-234-567.pdf"
    Storage(str(place / "documents")).put(path, document("1 234 567", "actes")[0])
    before = (place / "documents" / path).stat()
    kit.advance(td(minutes=6))
    assert len(await kit.sweep("extraction")) == 1
    await kit.step("extraction")
    row = dbs["prod"].one("select * from extraction_queue")
    assert (row["status_id"], row["file_path"]) == (Status.COMPLETE, path)
    after = (place / "documents" / path).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_the_document_type_decides_the_search_page(start: Start, standin: Standin) -> None:
    """A8: actes, plans_cadastraux, and index for whatever else."""
    kit, dbs = await start(prod="sqlite")
    for number, kind in enumerate(["actes", "plans_cadastraux", "index", None, "servitudes"]):
        documents(dbs["prod"], document_type=kind, document_number=str(number))
    await kit.drain("extraction")
    assert standin.conduct.asked == [
        ("actes", "0"), ("plans_cadastraux", "1"), ("index", "2"), ("index", "3"), ("index", "4"),
    ]  # fmt: skip
    assert {row["status_id"] for row in dbs["prod"].query("select status_id from extraction_queue")} == {3}
