"""A worker in the test's own process, and waiting for what it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from apps.registre.lanes import mill


@asynccontextmanager
async def at_work(**options: Any) -> AsyncIterator[Any]:
    """A worker that has looked everywhere once, until the block ends."""
    worker = mill.worker(**options)
    work = asyncio.create_task(worker.run())
    try:
        await asyncio.wait_for(worker.started.wait(), 60)
        yield worker
    finally:
        worker.stop()
        await asyncio.wait_for(work, 60)


async def until(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.05)
