"""The documents of the stand-in's land registry: each number has one, always the same."""

from __future__ import annotations

import functools
import zlib

from .pdfs import document_pdf


@functools.lru_cache(maxsize=256)
def document(number: str, kind: str, pages: int = 1) -> tuple[bytes, str]:
    """The PDF, and the text that is on it."""
    return document_pdf(number, kind, pages, zlib.crc32(f"{kind} {number}".encode()))
