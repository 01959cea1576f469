"""The documents of the stand-in's land registry: each number has one, always the same."""

from __future__ import annotations

import functools
import zlib

try:
    from .pdfs import document_pdf
except ImportError:

    def document_pdf(number: str, kind: str, pages: int, seed: int) -> tuple[bytes, str]:
        """A document without a scanned look."""
        from datetime import UTC, datetime

        from fpdf import FPDF

        pdf = FPDF()
        pdf.set_creation_date(datetime(2026, 1, 1, tzinfo=UTC))
        pdf.set_font("helvetica", size=14)
        text = "\n".join(f"{kind} {number}, page {page} de {pages}" for page in range(1, pages + 1))
        for line in text.splitlines():
            pdf.add_page()
            pdf.multi_cell(0, text=line)
        return bytes(pdf.output()), text


@functools.lru_cache(maxsize=256)
def document(number: str, kind: str, pages: int = 1) -> tuple[bytes, str]:
    """The PDF, and the text that is on it."""
    return document_pdf(number, kind, pages, zlib.crc32(f"{kind} {number}".encode()))
