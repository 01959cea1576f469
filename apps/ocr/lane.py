"""The lane of ocr over ``extraction_queue``: documents that registre has stored are read.

3 COMPLETE ──claim──▶ 6 OCR_PROCESSING ──text stored──▶ 5 EXTRACTION_COMPLETE
    ▲                        │   │
    └──failed, taken back────┘   └──unreadable, attempts used up──▶ 4 ERREUR
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from datetime import timedelta as td
from pathlib import Path
from typing import Any, cast

import httpx

from apps.desk import own_directory
from apps.ocr.cleaner import LocalBooster
from apps.ocr.pages import Unreadable, opened
from apps.ocr.provider import BUDGET, Booster, Reader
from apps.ocr.settings import Settings
from apps.registre.tables import Status
from apps.storage import Damaged, NotThere, Storage, StorageError
from rowmill import NOT_NULL, Breaker, Dead, Job, Lane, Mill, exponential

#: Columns of ocr's own: what registre wrote about the extraction stays as it was.
ROLES = {
    "worker": "ocr_worker_id",
    "claimed_at": "ocr_started_at",
    "heartbeat_at": "ocr_heartbeat_at",
    "finished_at": "ocr_finished_at",
    "attempts": "ocr_attempts",
    "max_attempts": "ocr_max_attempts",
    "reclaims": "ocr_reclaims",
    "run_after": "ocr_run_after",
    "error": "ocr_error",
    "progress": "ocr_progress",
}


def declare(mill: Mill, settings: Settings, status: type[enum.IntEnum] = Status) -> Lane:
    """Declare the lane on a Mill, with what its handler needs. ``status``: the values of ``status_id``."""
    mill.on_event(own_directory(Path(settings.temp)))
    day, minute = (settings.gemini_per_day, td(days=1)), (settings.gemini_per_minute, td(minutes=1))
    mill.budget(BUDGET, requests=[minute, day])

    @mill.resource
    def storage() -> Storage:
        return Storage.from_environment()

    # Each provider is imported where it is used: their libraries take seconds to load.
    @mill.resource
    async def reader() -> AsyncIterator[Reader]:
        if settings.gemini_key:
            from apps.ocr.gemini import Gemini

            service = await asyncio.to_thread(Gemini, settings)
            yield service
            await service.close()
        else:
            from apps.ocr.local import LocalReader

            yield await asyncio.to_thread(LocalReader, settings.threads, settings.detect_side)

    @mill.resource
    def booster(reader: Reader) -> Booster:
        return LocalBooster() if not settings.gemini_key else cast("Booster", reader)

    @mill.lane(
        "extraction_queue",
        ready={"status_id": status["COMPLETE"].value},
        running={"status_id": status["OCR_PROCESSING"].value},
        done={"status_id": status["EXTRACTION_COMPLETE"].value},
        retry={"status_id": status["COMPLETE"].value},
        dead={"status_id": status["ERREUR"].value, "ocr_error": NOT_NULL},  # registre's own have none
        ignore_states=[each.value for each in status],  # the others are registre's
        roles=ROLES,
        order_by="created_at",
        max_attempts=3,
        max_reclaims=settings.max_reclaims,
        backoff=exponential(td(seconds=settings.retry_seconds), cap=td(hours=1)),
        lease=settings.lease,
        sweep_every=settings.sweep_every,
        timeout=td(minutes=settings.timeout_minutes),
        batch=1,
        concurrency=1,
        gates=[Breaker(settings.breaker_failures, td(minutes=settings.breaker_minutes), counts=_is_outage)],
    )
    async def ocr(job: Job, storage: Storage, reader: Reader, booster: Booster) -> dict[str, Any]:
        """Download, render, read, boost; what is returned is stored with the outcome."""
        file = await _download(job, storage)
        try:
            pages = await _read(job, file, reader, settings)
        except Unreadable as error:
            raise Dead(str(error)) from None
        boosted = await booster.boost(pages, job)
        made = {"pages": len(pages), "reader": reader.name, "booster": booster.name}
        # A document that was read shows neither the error of an earlier try nor how far this one was last.
        ended = {"ocr_error": None, "ocr_progress": "100%"}
        return {"ocr_text": boosted.text, "ocr_fields": boosted.fields | made, **ended}

    return ocr


async def _download(job: Job, storage: Storage) -> Path:
    if not job["file_path"]:
        raise Dead("the row has no file_path, so nothing was stored. Try: set it back to status 1.")
    return await asyncio.to_thread(storage.get, job["file_path"], job.workdir / "document.pdf", job["checksum"])


async def _read(job: Job, file: Path, reader: Reader, settings: Settings) -> list[str]:
    """The text of each page, one page in memory at a time."""
    texts: list[str] = []
    with opened(file, settings.dpi, settings.max_pixels) as document:
        for place in range(document.pages):
            image = await asyncio.to_thread(document.image, place)
            try:
                texts.append(await reader.read(image, job))
            finally:
                image.close()  # its memory goes now, even if something still holds the object
            # The last step is not the last page: the text is still to be boosted.
            await job.progress((place + 1) / (document.pages + 1), f"page {place + 1} of {document.pages}")
    return texts


def _is_outage(error: BaseException) -> bool:
    """Something that all documents need is in trouble, and no document's own fault."""
    if isinstance(error, StorageError):
        return not isinstance(error, NotThere | Damaged)
    code = getattr(error, "code", None)
    return (isinstance(code, int) and code >= 500) or isinstance(error, OSError | httpx.TransportError)
