"""A PDF page by page: opened from a file, one page rendered at a time, never more than one in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pypdfium2 as pdfium
from PIL import Image

from apps.pdfium import PDFIUM

_HEAD, _TAIL = 1024, 2048
_ASK_AGAIN = "Try: set the document back to status 1, so that it is downloaded again."


class Unreadable(Exception):
    """A file that no attempt will ever read: the message says why and what to do."""


class Document:
    """An open PDF."""

    def __init__(self, pdf: pdfium.PdfDocument, dpi: int, max_pixels: int) -> None:
        self._pdf, self._dpi, self._max_pixels = pdf, dpi, max_pixels
        self.pages = len(pdf)

    def image(self, place: int) -> Image.Image:
        """One page in grey at the set resolution, or at less where it would have too many dots; from 0."""
        with PDFIUM:
            try:
                page = self._pdf[place]
                try:
                    width, height = page.get_size()
                    scale = min(self._dpi / 72, math.sqrt(self._max_pixels / max(width * height, 1)))
                    return page.render(scale=scale, grayscale=True).to_pil()
                finally:
                    page.close()
            except pdfium.PdfiumError as error:
                raise Unreadable(
                    f"page {place + 1} of {self.pages} cannot be rendered ({error}). {_ASK_AGAIN}"
                ) from None


@contextmanager
def opened(file: Path, dpi: int, max_pixels: int) -> Iterator[Document]:
    """The document in a file. Refuses what is empty, no PDF, cut off, damaged, encrypted or without pages."""
    _look_at(file)
    with PDFIUM:
        try:
            pdf = pdfium.PdfDocument(file)
        except pdfium.PdfiumError as error:
            raise Unreadable(_why(error)) from None
    try:
        document = Document(pdf, dpi, max_pixels)
        if not document.pages:
            raise Unreadable(f"the PDF has no pages. {_ASK_AGAIN}")
        yield document
    finally:
        with PDFIUM:
            pdf.close()


def _look_at(file: Path) -> None:
    """What the first and last bytes tell. PDFium would patch up a file that was cut off, and lose its last pages."""
    size = file.stat().st_size
    if not size:
        raise Unreadable(f"the file is empty (0 bytes). {_ASK_AGAIN}")
    with file.open("rb") as opened_file:
        head = opened_file.read(_HEAD)
        opened_file.seek(max(0, size - _TAIL))
        tail = opened_file.read()
    if b"%PDF-" not in head:
        raise Unreadable(f"the file is not a PDF: it begins with {head[:16]!r}{_page_of(head)}. {_ASK_AGAIN}")
    if b"%%EOF" not in tail:
        raise Unreadable(f"the PDF is truncated: its end is missing after {size} bytes. {_ASK_AGAIN}")


def _page_of(head: bytes) -> str:
    return ", a web page" if b"<html" in head.lower() or b"<!doctype html" in head.lower() else ""


def _why(error: pdfium.PdfiumError) -> str:
    if "password" in str(error).lower():
        return "the PDF is encrypted with a password. Try: store a copy without one, then set it back to status 3."
    return f"the PDF is damaged ({error}). {_ASK_AGAIN}"
