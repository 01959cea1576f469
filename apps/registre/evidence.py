"""What an operator needs to see of a failed job: the page as it was, its source, the error."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from playwright.async_api import Error, Page

from rowmill import Job

from . import settings


def folder(job: Job) -> Path:
    """Where a job's evidence is: one place per job, so that its latest failure is what lies there."""
    return Path(settings.text("EVIDENCE_DIR"), job.environment, job.lane, str(job.id)).absolute()


async def keep(job: Job, page: Page | None, error: BaseException) -> str:
    """Save it, as far as it can be had; in words where it is."""
    place = folder(job)
    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "error.txt").write_text(f"{type(error).__name__}: {error}\n")
        if page is not None:
            with contextlib.suppress(Error):
                (place / "page.html").write_text(await page.content())
                await page.screenshot(path=place / "page.png", full_page=True, timeout=5000)
    except OSError as full:
        return f"the page could not be kept in {place}: {full.strerror}"
    return f"the page as it was: {place}"
