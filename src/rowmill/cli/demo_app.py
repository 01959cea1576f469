"""Two tables that were there before rowmill, and what is to be done with a row of each.

links      id, url, title, status: new, fetching, fetched, failed, gone; attempts, worker, heartbeat_at, ...
documents  name, page_count, state: 0 waiting, 1 being read, 2 read, 9 unreadable; tries, taken_by, alive_at, ...
pages      what was read of the documents
runs       only for the demo: every run leaves a line there, so that the end can be checked
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from datetime import timedelta as td
from typing import Any

import aiosqlite
from sqlalchemy import Connection

from rowmill import Dead, Job, Mill, Settled, fixed

mill = Mill("sqlite:///demo.db")  # in production: postgresql://...

# A worker that gives no sign of life for three seconds loses its rows to the others. In production: minutes.
leases: dict[str, Any] = {"lease": td(seconds=3), "sweep_every": td(seconds=1)}


@mill.lane(
    "links",
    ready={"status": ["new", "failed"]},
    running={"status": "fetching"},
    done={"status": "fetched"},
    retry={"status": "failed"},
    dead={"status": "gone"},
    max_attempts=3,
    backoff=fixed(td(seconds=2)),
    concurrency=4,
    **leases,
)
async def fetch(job: Job, runs: aiosqlite.Connection) -> dict[str, str]:
    """Pretend to download a page. Some servers are not at their best today."""
    await began(job, runs)
    await asyncio.sleep(random.uniform(0.5, 1.3))
    if "/removed/" in job["url"]:
        raise Dead("404, the page is gone")  # never tried again
    if "/silent/" in job["url"] or ("/busy/" in job["url"] and job.attempt == 1):
        raise TimeoutError("the server did not answer")  # tried again, as often as max_attempts allows
    return {"title": f"Page {job.id}"}  # columns of the row, written together with its new status


@mill.lane(
    "documents",
    ready={"state": 0},
    running={"state": 1},
    done={"state": 2},
    dead={"state": 9},
    roles={"worker": "taken_by", "claimed_at": "taken_at", "heartbeat_at": "alive_at", "attempts": "tries"},
    concurrency=2,
    **leases,
)
async def read(job: Job, runs: aiosqlite.Connection) -> None:
    """Pretend to read a document, page by page."""
    await began(job, runs)
    await asyncio.sleep(random.uniform(0.8, 1.6))
    if "locked" in job["name"]:
        raise Dead("it asks for a password")
    async with job.finish() as tx:  # the pages and the document's new state: committed together, or not at all
        for page in range(1, job["page_count"] + 1):
            await tx.execute("insert into pages (document, page) values (:d, :p)", {"d": job.id, "p": page})


@mill.resource
async def runs() -> AsyncIterator[aiosqlite.Connection]:
    """Opened once per worker process, on first use; a handler gets it by naming it."""
    async with aiosqlite.connect("demo.db", timeout=30, isolation_level=None) as db:
        yield db


async def began(job: Job, runs: aiosqlite.Connection) -> None:
    """The handlers' own record: this process began this attempt at this row."""
    line = (str(job.id), job.attempt, job.worker, os.getpid())
    await runs.execute("insert into runs (row, attempt, worker, pid) values (?, ?, ?, ?)", line)


@fetch.on_settled
@read.on_settled
def ended(tx: Connection, settled: list[Settled]) -> None:
    """Runs in the transaction that writes the outcomes: one that was ever written twice would count twice here."""
    for run in settled:
        line = (run.outcome, run.error, str(run.id), run.attempt)
        tx.exec_driver_sql(
            "update runs set times = times + 1, outcome = ?, error = ? where row = ? and attempt = ?", line
        )
