"""A worker in a test's own process: rows to work on, a worker for the length of a block, and its events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

from databases import Db
from farm import JOBS
from rowmill import Event, Mill

STATES: dict[str, Any] = {
    "ready": {"status": "queued"},
    "running": {"status": "running"},
    "done": {"status": "done"},
    "dead": {"status": "dead"},
}


@asynccontextmanager
async def working(mill: Mill, **options: Any) -> Any:
    """A worker at work for the length of the block."""
    worker = mill.worker(**options)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(task, 60)


async def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.01)


def jobs(db: Db, count: int = 1) -> None:
    db.execute(JOBS[db.dialect])
    add(db, count)


def add(db: Db, count: int = 1) -> None:
    for _ in range(count):
        db.execute("insert into jobs (note) values (null)")


def events_of(mill: Mill) -> list[Event]:
    seen: list[Event] = []
    mill.on_event(seen.append)
    return seen
