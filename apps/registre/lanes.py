"""The three kinds of job: one Mill over the environments, one lane per kind, in the order of their priority."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import sqlalchemy as sa

from apps.storage import Storage, StorageError
from rowmill import IS_NULL, Breaker, Dead, Job, Mill

from . import land, searches, settings, sites, tables
from .browser import Chromium
from .errors import SiteError, SiteRefused
from .session import Session
from .tables import Status

mill = Mill(settings.Environments(), worker_id="unified-worker-{uuid}")


def _is_trouble(error: BaseException) -> bool:
    """A failure that the next row may well meet, too: a changed page, a silent site, a browser that dies."""
    return isinstance(error, SiteError) and not isinstance(error, SiteRefused)


#: A failure is final, a row whose worker died is not: it is worked on again, however often.
_POLICY: dict[str, Any] = {
    "roles": {"claimed_at": "processing_started_at", "run_after": None},  # nothing is tried later
    "max_attempts": 1,
    "lease": settings.seconds("STUCK_AFTER_SECONDS"),
    "startup_lease": settings.seconds("STUCK_AT_START_SECONDS"),
    "sweep_every": settings.seconds("STUCK_AFTER_SECONDS") / 5,
    # Each slot takes one row at a time: none is claimed ahead of the slot that will work on it.
    "concurrency": settings.whole("WORKER_SLOTS"),
    "batch": 1,
    "order_by": "created_at",
    "gates": [Breaker(settings.whole("BREAKER_FAILURES"), settings.outage(), counts=_is_trouble)],
}


# What a resource needs is looked for when it is opened, before a row is claimed: without it none is.


@mill.resource(healthy=lambda chromium: chromium.works)
async def chromium() -> AsyncIterator[Chromium]:
    """One browser per process; it starts with the first row that is ready."""
    browser = Chromium()
    await browser.running()
    yield browser
    await browser.close()


@mill.resource
def registry(chromium: Chromium) -> Session:
    """The session with the land registry."""
    return Session(chromium, sites.LAND)


@mill.resource
def companies(chromium: Chromium) -> Session:
    """The session with the company register."""
    return Session(chromium, sites.COMPANIES)


@mill.resource
def rights(chromium: Chromium) -> Session:
    """The session with the movable-rights register."""
    return Session(chromium, sites.RIGHTS)


@mill.resource
async def storage() -> Storage:
    """Where the PDFs go."""
    storage = Storage.from_environment()
    await asyncio.to_thread(storage.check)
    return storage


@mill.lane(
    "extraction_queue",
    priority=0,
    ready={"status_id": Status.EN_ATTENTE},
    running={"status_id": Status.EN_TRAITEMENT},
    done={"status_id": Status.COMPLETE},
    dead={"status_id": Status.ERREUR, "ocr_error": IS_NULL},  # ocr ends its rows in the same status
    ignore_states=[Status.OCR_PROCESSING, Status.EXTRACTION_COMPLETE],  # ocr's
    **_POLICY,
)
async def extraction(job: Job, registry: Session, storage: Storage) -> dict[str, Any]:
    """A document of the land registry: downloaded, then stored, then the row says where."""
    required(job, "document_number")

    async def fetch(visit: Any) -> dict[str, Any]:
        # The download is gone with the visit, so it is stored inside it.
        file = await land.download(visit, job)
        try:
            stored = await asyncio.to_thread(storage.put, object_path(job), file)
        except StorageError:
            await asyncio.to_thread(storage.check)  # where it takes nothing at all, that is no fault of this document
            raise
        return {"file_path": stored.path, "checksum": stored.checksum, "file_size": stored.size}

    return await registry.run(job, fetch)


@mill.lane(
    "search_sessions",
    priority=1,
    ready={"status": "pending_company_selection", "req_completed": False},
    running={"status": "scraping_company_data"},
    done={"status": "pending_name_selection", "req_completed": True},
    dead={"status": "failed"},
    **_POLICY,
)
async def req(job: Job, companies: Session) -> None:
    """A search in the company register. What it finds is stored with the row's new state, or not at all."""
    name = required(job, "company_name")
    found, names = await companies.run(job, lambda visit: searches.companies(visit, name))
    session = tables.key(job.id)
    async with job.finish() as tx:
        for table, rows in ((tables.names, names), (tables.companies, found)):
            await tx.execute(sa.delete(table).where(table.c.search_session_id == session))
            for row in rows:
                await tx.execute(sa.insert(table).values({"search_session_id": session} | row))


@mill.lane(
    "rdprm_searches",
    priority=2,
    ready={"status": "pending"},
    running={"status": "in_progress"},
    done={"status": "completed"},
    dead={"status": "failed"},
    **_POLICY,
)
async def rdprm(job: Job, rights: Session) -> None:
    """A search in the movable-rights register, for a session; its inscriptions are stored with the row's new state."""
    name = required(job, "search_name")
    found = await rights.run(job, lambda visit: searches.inscriptions(visit, name))
    of = {"rdprm_search_id": tables.key(job.id), "search_session_id": tables.key(job["search_session_id"])}
    table = tables.inscriptions
    async with job.finish() as tx:
        await tx.execute(sa.delete(table).where(table.c.rdprm_search_id == of["rdprm_search_id"]))
        for row in found:
            await tx.execute(sa.insert(table).values(of | row))


def required(job: Job, column: str) -> str:
    """What is searched for. A row that does not say is refused, and nothing is asked of the site."""
    if not (value := str(job[column] or "").strip()):
        again = f"rowmill retry apps.registre:mill --env {job.environment} --lane {job.lane} --id {job.id}"
        raise Dead(f"the row has no {column}, so there is nothing to search for\nTry: fill it in, then {again}")
    return value


def object_path(job: Job) -> str:
    """A row's one object: the next run of the row uploads to the same name."""
    number = re.sub(r"[^0-9A-Za-z]+", "-", job["document_number"]).strip("-")[:80]  # file names have an end
    kind = land.search_for(job["document_type"]).path
    return f"{job.environment}/{kind}/{job.id}-{number}.pdf"
