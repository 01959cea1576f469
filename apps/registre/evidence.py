"""What an operator needs to see of a failed job: the page as it was, its source, the error."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

from playwright.async_api import Error, Page

from rowmill import Job

from . import settings

_PATIENCE = 10.0


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
            with contextlib.suppress(Error, TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await _stop(page)
                    (place / "page.html").write_text(await page.content())
                    await page.screenshot(path=place / "page.png", full_page=True)
    except OSError as full:
        return f"the page could not be kept in {place}: {full.strerror}"
    return f"the page as it was: {place}"


async def _stop(page: Page) -> None:
    """A page that still waits for its site gives neither source nor picture, and does not close."""
    devtools = await page.context.new_cdp_session(page)
    await devtools.send("Page.stopLoading")
    await devtools.detach()
