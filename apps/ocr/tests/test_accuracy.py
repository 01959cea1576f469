"""How well the local engine reads: the stand-in's scans, letter by letter against what was printed on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apps.ocr.cleaner import clean, found_in
from apps.ocr.local import LocalReader, Piece, in_reading_order
from apps.ocr.pages import opened
from apps.ocr.settings import Settings
from apps.registre.standin.pdfs import KINDS, document_pdf

pytestmark = pytest.mark.timeout(600)  # a busy machine reads slowly


def distance(one: str, other: str) -> int:
    """How many letters to insert, leave out or change to come from one text to the other (Levenshtein)."""
    letters, places = np.array([ord(letter) for letter in other]), np.arange(len(other) + 1)
    row = places.copy()
    for count, letter in enumerate(one, 1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (letters != ord(letter)))
        # What is inserted adds one a place: the least from the left, by a running minimum.
        row = np.minimum.accumulate(np.concatenate(([count], changed)) - places) + places
    return int(row[-1])


def accuracy(read: str, printed: str) -> float:
    """The share of letters that are right; white space counts as one space."""
    read, printed = " ".join(read.split()), " ".join(printed.split())
    return 1 - distance(read, printed) / len(printed)


MEASURED = [("acte", "acte", 0), ("acte", "actes", 1), ("", "lot", 3), ("général", "general", 2), ("chat", "chien", 3)]


@pytest.mark.parametrize(("one", "other", "many"), MEASURED)
def test_the_measure_counts_letters(one: str, other: str, many: int) -> None:
    assert distance(one, other) == many
    assert distance(other, one) == many


@pytest.fixture(scope="module")
def reader() -> LocalReader:
    settings = Settings()
    return LocalReader(settings.threads, settings.detect_side)


def read(reader: LocalReader, data: bytes, folder: Path, **settings: int) -> list[str]:
    file = folder / "document.pdf"
    file.write_bytes(data)
    with opened(file, Settings(**settings).dpi, Settings().max_pixels) as document:
        return [reader.text(document.image(place)) for place in range(document.pages)]


def test_at_least_97_letters_of_a_hundred_are_right(reader: LocalReader, tmp_path: Path) -> None:
    """B3, B4: as read, and as boosted; over all kinds, and in each document; accents included."""
    found: dict[str, list[float]] = {"read": [], "boosted": []}
    for seed, kind in enumerate(KINDS):
        data, printed = document_pdf(f"{21_000_000 + seed}", kind, 2, seed)
        pages = read(reader, data, tmp_path)
        found["read"].append(accuracy("\n".join(pages), printed))
        found["boosted"].append(accuracy(clean(pages), printed))
        fields = found_in(clean(pages))
        assert fields["number"] == f"{21_000_000 + seed}"
        assert fields["date"][4] == "-"
        assert fields["parties"]
    assert min(found["read"]) >= 0.97
    assert min(found["boosted"]) >= 0.97
    assert sum(found["boosted"]) >= sum(found["read"])


def test_a_blank_page_has_no_text(reader: LocalReader) -> None:
    """B3: and is no error."""
    assert reader.text(Image.new("L", (600, 800), 235)) == ""


def test_pieces_are_put_in_reading_order() -> None:
    """B3: by lines from the top, each from the left; an empty line where a paragraph ends."""
    pieces = [
        Piece(300, 560, 42, 60, "du lot voisin et de la forêt"),
        Piece(10, 290, 40, 60, "Le long chemin qui part"),
        Piece(10, 120, 70, 90, "finit ici."),
        Piece(10, 400, 100, 120, "Un autre commence ici."),
    ]
    assert in_reading_order(pieces, 570) == (
        "Le long chemin qui part du lot voisin et de la forêt\nfinit ici.\n\nUn autre commence ici."
    )
    assert in_reading_order([], 570) == ""
    short = [Piece(20, 200, top, top + 20, f"ligne {top}") for top in (10, 40, 70)]
    assert in_reading_order(short, 570) == "ligne 10\n\nligne 40\n\nligne 70"


def test_the_engine_reports_to_nobody_and_leaves_no_file(tmp_path: Path) -> None:
    """B1, B4: ONNX Runtime's telemetry is off; it would leave an identifier and a session in these directories."""
    code = "from PIL import Image; from apps.ocr.local import LocalReader; LocalReader().text(Image.new('L', (64, 64)))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "CI", "XDG_"))}
    root = Path(__file__).parents[3]
    env = {**kept, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, env=env, check=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
