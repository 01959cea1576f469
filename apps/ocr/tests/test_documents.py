"""The documents of the stand-in's land registry, which the recogniser is measured with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pypdfium2 as pdfium
import pytest

from apps.registre.standin.pdfs import KINDS, document_pdf


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_a_scan_of_several_pages_with_no_text_to_copy_out(kind: str):
    """X3: what the stand-in serves is real work for a recogniser."""
    data, text = document_pdf("24681012", kind, 3, seed=5)
    with pdfium.PdfDocument(data) as document:
        assert len(document) == 3
        assert all(page.get_textpage().get_text_bounded() == "" for page in document)
    assert "Numéro d'inscription : 24681012" in text
    assert "|" not in text
    assert "\u00ad" not in text


def test_the_same_document_is_the_same_file_and_another_seed_another():
    """A8: an upload that is tried again has the same checksum."""
    assert document_pdf("1", "actes", 1, seed=1) == document_pdf("1", "actes", 1, seed=1)
    assert document_pdf("1", "actes", 1, seed=1) != document_pdf("1", "actes", 1, seed=2)


def test_documents_are_made_for_several_visitors_at_once():
    """X2: PDFium called from two threads takes its whole process with it, so one of its own is the one at risk."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from random import Random
from apps.registre.standin import pdfs
papers = [pdfs._typeset(pdfs.page_texts(str(n), "actes", 2, Random(n))) for n in range(10)]
with ThreadPoolExecutor(4) as visitors:
    list(visitors.map(pdfs._images, papers * 10))
"""
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    assert subprocess.run([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL).returncode == 0


def test_all_texts_fit_on_their_paper():
    """X3: no line of a document is lost below the edge."""
    for seed in range(3):
        for kind in KINDS:
            document_pdf(f"{seed:08}", kind, 2, seed=seed)


def test_a_kind_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="actes, plans_cadastraux, index"):
        document_pdf("1", "photos", 1, seed=1)
