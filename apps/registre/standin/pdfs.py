"""Documents of a small land registry, as a scanner leaves them: turned a little, grey, noisy, with images only.

Everything about a document follows from its number, kind and seed, the bytes too: a download that is tried again brings
the same file, so a checksum may be compared. No font of the system is needed.
"""

from __future__ import annotations

import hashlib
import io
import random
import time

import numpy as np
import pypdfium2 as pdfium
from fpdf import FPDF
from PIL import Image, ImageFilter

from apps.pdfium import PDFIUM
from apps.registre.standin.phrases import BREAK, page_texts

KINDS = ("actes", "plans_cadastraux", "index")
DPI = 150
WIDTH, HEIGHT = 148, 114  # millimetres: small paper, so that a page is quick to recognise
MARGIN = 14


def document_pdf(number: str, kind: str, pages: int, seed: int) -> tuple[bytes, str]:
    """A scanned document and the exact text on it: one paragraph a line, words broken in print put together."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of document. Try: one of {', '.join(KINDS)}.")
    if pages < 1:
        raise ValueError(f"a document of {pages} pages. Try: 1 or more.")
    # hash() differs from process to process; a digest does not.
    chance = random.Random(hashlib.sha256(f"{number}|{kind}|{seed}".encode()).digest())
    texts = page_texts(number, kind, pages, chance)
    scans = [_scan(image, chance) for image in _images(_typeset(texts))]
    text = "\n".join(paragraph for page in texts for paragraph in page)
    return _bound(scans), text.replace(BREAK, "")


def _typeset(texts: list[list[str]]) -> bytes:
    """The pages in print; a line may end in a soft hyphen."""
    paper = FPDF(unit="mm", format=(WIDTH, HEIGHT))
    paper.set_margins(MARGIN, MARGIN)
    paper.set_auto_page_break(False)
    for page in texts:
        paper.add_page()
        for place, paragraph in enumerate(page):
            heading = place == 0
            paper.set_font("Helvetica" if heading else "Times", "B" if heading else "", 13 if heading else 12)
            paper.multi_cell(0, 5.6, paragraph.replace(BREAK, "\u00ad"), align="L", new_x="LMARGIN", new_y="NEXT")
            paper.ln(1.4)
        if paper.get_y() > HEIGHT - MARGIN / 2:
            raise ValueError(f"the text of page {paper.page} is {paper.get_y():.0f} mm high, the paper {HEIGHT} mm")
    return bytes(paper.output())


def _images(print_: bytes) -> list[Image.Image]:
    with PDFIUM, pdfium.PdfDocument(print_) as document:
        return [page.render(scale=DPI / 72, grayscale=True).to_pil() for page in document]


def _scan(page: Image.Image, chance: random.Random) -> Image.Image:
    """The page as it comes off the glass: not quite straight, on greyish paper, a little soft, with grain."""
    grey = page.convert("L").rotate(chance.uniform(-0.7, 0.7), resample=Image.Resampling.BICUBIC, fillcolor=255)
    ink = np.asarray(grey.filter(ImageFilter.GaussianBlur(0.4)), dtype=np.float32)
    grain = np.random.default_rng(chance.getrandbits(32))
    paper = 28 + ink * (chance.uniform(226, 240) - 28) / 255
    return Image.fromarray(np.clip(paper + grain.normal(0, 5, ink.shape), 0, 255).astype(np.uint8))


def _bound(scans: list[Image.Image]) -> bytes:
    """The scans as one PDF. The date in it is fixed: Pillow would write the clock's."""
    file, made = io.BytesIO(), time.gmtime(0)
    scans[0].save(
        file,
        "PDF",
        save_all=True,
        append_images=scans[1:],
        resolution=DPI,
        quality=70,
        creationDate=made,
        modDate=made,
    )
    return file.getvalue()
