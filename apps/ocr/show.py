"""ocr at work on this machine: documents of the stand-in's registry in a fresh SQLite file, read, and shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa
from rich.console import Console
from rich.table import Table

from apps.ocr.settings import Settings
from apps.registre.standin.pdfs import KINDS, document_pdf
from apps.registre.tables import extraction_queue, migrate
from apps.storage import Storage


def show(documents: int) -> int:
    """Make documents, read them with OCR_WORKER_COUNT workers, and show what was found; the workers' exit code."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="ocr-show-") as folder:
        engine = sa.create_engine(f"sqlite:///{folder}/documents.db")
        with engine.begin() as connection:
            migrate(connection)
            connection.execute(sa.insert(extraction_queue), _stored(Storage(f"{folder}/documents"), documents))
        workers = Settings.from_environment().worker_count
        console.print(f"{documents} scanned documents are stored (status 3); {workers} workers read them ...")
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "apps.ocr", "run", "--drain"], env=_variables(folder)).returncode
        with engine.connect() as connection:
            rows = connection.execute(sa.select(extraction_queue).order_by("id")).mappings().all()
        engine.dispose()
        console.print(_table([dict(row) for row in rows]))
        console.print(f"{time.monotonic() - began:.1f} s, with the start of the workers and of the recogniser.")
    return code


def _stored(storage: Storage, documents: int) -> list[dict[str, object]]:
    """Rows as registre leaves them, and their files."""
    rows = []
    for n in range(documents):
        number, kind = f"{24_680_000 + n}", KINDS[n % len(KINDS)]
        stored = storage.put(f"dev/{number}.pdf", document_pdf(number, kind, 1 + n % 2, n)[0])
        facts = {"file_path": stored.path, "checksum": stored.checksum, "file_size": stored.size}
        rows.append({"document_number": number, "document_type": kind, "status_id": 3} | facts)
    return rows


def _variables(folder: str) -> dict[str, str]:
    """Of the workers: this folder only, whatever is set for the real thing."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_DATABASE_URL")}
    own = {"DEV_DATABASE_URL": f"sqlite:///{folder}/documents.db", "STORAGE_URL": f"{folder}/documents"}
    return kept | own | {"OCR_TEMP": str(Path(folder, "temp"))}


def _table(rows: list[dict[str, object]]) -> Table:
    table = Table("document", "status", "read by", "number", "date", "parties", box=None)
    for row in rows:
        told = row["ocr_fields"] or {}
        fields = json.loads(told) if isinstance(told, str) else told
        parties = ", ".join(f"{party['name']} ({party['role']})" for party in fields.get("parties", []))
        found = [fields.get("number", ""), fields.get("date", ""), parties or str(row["ocr_error"] or "")]
        table.add_row(str(row["document_number"]), str(row["status_id"]), str(row["ocr_worker_id"] or ""), *found)
    return table
