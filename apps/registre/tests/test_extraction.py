"""Extraction from the land registry, in a real browser: from 1 to 3, or to 4 with a reason."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from apps.registre.standin import Standin
from apps.registre.standin.documents import document
from apps.registre.tables import Status

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
