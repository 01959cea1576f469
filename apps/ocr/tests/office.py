"""A small office for the tests: the tables, a storage directory, documents in both, and the application's Mill."""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from fpdf import FPDF
from fpdf.enums import AccessPermission

from apps.ocr.lane import declare
from apps.ocr.settings import Settings
from apps.registre.standin.pdfs import document_pdf
from apps.registre.tables import Status, migrate_all
from apps.storage import Storage
from databases import Db
from rowmill import Mill

Row = dict[str, Any]


def small_print(pages: int = 1, password: str = "", owner: str = "", size: tuple[float, float] = (100, 100)) -> bytes:
    """A PDF that is quickly read, with a word or two on each page."""
    paper = FPDF(unit="pt", format=size)
    for page in range(pages):
        paper.add_page()
        paper.set_font("Times", size=10)
        paper.text(5, 20, f"page {page}")
    if owner:
        paper.set_encryption(owner_password=owner, user_password=password, permissions=AccessPermission.none())
    return bytes(paper.output())


class Office:
    """One environment, ``prod``. Rows that ``add`` makes wait for OCR, as registre leaves them."""

    def __init__(self, db: Db, folder: Path, **settings: Any) -> None:
        self.db, self.folder = db, folder
        self._numbers = itertools.count(24_680_001)
        self.settings = Settings(**{"temp": str(folder / "temp"), "retry_seconds": 0.0} | settings)
        self.storage = Storage(str(folder / "storage"))
        os.environ["STORAGE_URL"] = str(folder / "storage")
        in_a_loop(migrate_all(Mill({"prod": db.url})))

    def mill(self, status: type[enum.IntEnum] = Status, **settings: Any) -> Mill:
        """The application over this environment; any setting may differ. Its jobs' files are where ``left`` looks."""
        desk = Path(self.settings.temp) / "worker-1"  # what a process of its own takes when it starts
        desk.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(desk)
        mill = Mill({"prod": self.db.url})
        declare(mill, Settings(**vars(self.settings) | settings), status)
        return mill

    def add(self, data: bytes | None = None, n: int = 1, **columns: Any) -> list[Any]:
        """Rows of documents, in the storage too: of one page, unless ``data`` is the file."""
        rows = []
        for number in map(str, itertools.islice(self._numbers, n)):
            file = document_pdf(number, "actes", 1, 1)[0] if data is None else data
            stored = self.storage.put(f"prod/{number}.pdf", file)
            facts = {"file_path": stored.path, "checksum": stored.checksum, "file_size": stored.size}
            rows.append({"document_number": number, "status_id": 3} | facts | columns)
        return self.db.insert("extraction_queue", rows)

    def row(self, key: Any) -> Row:
        """A row as it stands."""
        return dict(self.db.one("select * from extraction_queue where id = ?", key))

    def left(self) -> list[Path]:
        """The files in the workers' temporary directories."""
        return [path for path in Path(self.settings.temp).rglob("*") if path.is_file()]

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a process that works here."""
        root = Path(__file__).parents[3]
        path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OCR_", "GEMINI_"))},
            **{"PROD_DATABASE_URL": self.db.url, "STORAGE_URL": self.storage.url, "OCR_TEMP": self.settings.temp},
            **{"PYTHONPATH": path, "OCR_RETRY_SECONDS": "0"},
            **more,
        }


def in_a_loop(work: Any) -> Any:
    """Run a coroutine to its end, also where a loop is running already."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
