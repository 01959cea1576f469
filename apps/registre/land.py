"""The land registry: a document by its number, as a PDF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import SiteRefused
from .sites import SEARCHES, Search
from .visit import Visit

DEFAULT = "index"


def search_for(document_type: str | None) -> Search:
    """The search page of a document type: actes, plans_cadastraux, or index for all else."""
    return SEARCHES.get((document_type or "").strip().lower(), SEARCHES[DEFAULT])


async def download(visit: Visit, row: Mapping[str, Any]) -> Path:
    """Find the document and download it."""
    search = search_for(row["document_type"])
    await visit.open(search.path)
    for field, column in search.fields.items():
        await visit.fill(field, row[column])
    await visit.click("search")
    if await visit.wait_for("download", "refusal") == "refusal":
        raise SiteRefused(
            f"{visit.site.name} refuses {row['document_number']!r}: {await visit.text('refusal')}",
            hint="check document_number, document_type, circonscription and cadastre of the row, then retry it",
        )
    file = await visit.download("download")
    check_pdf(file.read_bytes(), visit)
    return file


def check_pdf(data: bytes, visit: Visit) -> None:
    """A download that was cut off, or is an error page, is not stored."""
    if not data.startswith(b"%PDF-") or b"%%EOF" not in data[-1024:]:
        what = "an incomplete PDF" if data.startswith(b"%PDF-") else f"no PDF, but {data[:40]!r}"
        raise SiteRefused(
            f"{visit.site.name} sent {what} ({len(data)} bytes)", hint="download the document by hand; retry the row"
        )
