"""Documents read by one worker of apps/ocr, and by two: what a second worker brings on two cores."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..install import ROOT, VERBOSE
from ..peers import Peer
from ..server import execute, value
from .part import Column, Context, Figures, Part

_DOCUMENTS, _PAGES = (30, 10), 2
#: A worker's first document has the loading of the models in it. From the end of the last such, to the end of all.
_BEGAN = """(select max(began) from (select min(ocr_finished_at) as began from extraction_queue
    where ocr_finished_at is not null group by ocr_worker_id) firsts)"""
_RATE = f"""select coalesce(count(*) / nullif(extract(epoch from max(ocr_finished_at) - {_BEGAN}), 0), 0)::float8
    from extraction_queue where ocr_finished_at > {_BEGAN}"""
_LEFT = "select count(*) from extraction_queue where status_id <> 5"
_TWICE = "select count(*) from extraction_queue where ocr_attempts > 1"


def measure(context: Context, peer: Peer) -> Figures:
    """The same documents, with one worker and then with two; the recogniser has one thread in each."""
    found: Figures = {"left": 0, "twice": 0}
    documents = _DOCUMENTS[context.quick]
    with tempfile.TemporaryDirectory(prefix="bench-ocr-") as folder:
        for key, workers in (("one", 1), ("two", 2)):
            with context.server.database("bench_ocr") as dsn:
                asyncio.run(_fill(dsn, folder, documents))
                _drain(dsn, folder, workers)
                found[key] = value(dsn, _RATE)
                found["left"] += value(dsn, _LEFT)
                found["twice"] += value(dsn, _TWICE)
    found["ratio"] = found["two"] / found["one"] if found["one"] else 0.0
    return found


async def _fill(dsn: str, folder: str, documents: int) -> None:
    """The tables, and documents as registre leaves them: stored, and waiting for OCR."""
    # What only the applications need is not asked of those who measure something else.
    from apps.registre.standin.pdfs import KINDS, document_pdf
    from apps.registre.tables import migrate_all
    from apps.storage import Storage
    from rowmill import Mill

    await migrate_all(Mill({"prod": dsn}))
    storage = Storage(f"{folder}/documents")
    rows = []
    for n in range(documents):
        stored = storage.put(f"{n}.pdf", document_pdf(f"{20_000_000 + n}", KINDS[n % 3], _PAGES, n)[0])
        rows.append(f"('{n}', 3, '{stored.path}', '{stored.checksum}')")
    columns = "document_number, status_id, file_path, checksum"
    await asyncio.to_thread(execute, dsn, f"insert into extraction_queue ({columns}) values {', '.join(rows)}")


def _drain(dsn: str, folder: str, workers: int) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OCR_", "GEMINI_"))}
    env |= {"PROD_DATABASE_URL": dsn, "STORAGE_URL": f"{folder}/documents", "OCR_TEMP": f"{folder}/temp"}
    env |= {"OCR_WORKER_COUNT": str(workers), "OCR_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH", "")])
    told = None if VERBOSE else subprocess.DEVNULL
    command = [sys.executable, "-m", "apps.ocr", "run", "--drain"]
    subprocess.run(command, cwd=Path(ROOT), env=env, stdout=told, stderr=told, timeout=900, check=True)


PART = Part(
    "ocr",
    "Documents read by one worker and by two",
    f"The stand-in's scans of {_PAGES} pages through apps/ocr with its local recogniser, one thread in each worker; "
    "from when every worker has read its first document.",
    measure,
    ("rowmill",),
    (
        Column("one", "1 worker, documents/s", 2, plot="1 worker"),
        Column("two", "2 workers, documents/s", 2, plot="2 workers"),
        Column("ratio", "ratio", 2),
        Column("left", "left"),
        Column("twice", "twice"),
    ),
    unit="documents/s",
    on_request=True,
)
