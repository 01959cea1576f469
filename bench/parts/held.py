"""A transaction held open while work goes on: dead rows at the head of the claim's index cannot be removed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import asyncpg

from ..peers import Peer
from ..session import IDLE, Session, session
from .load import peak_of
from .part import Context, Figures, Part

_TICK = 0.01


def measure(context: Context, peer: Peer) -> Figures:
    window, hold = context.arguments.window, context.arguments.hold
    before, after = 2 * window, 3 * window
    rate = context.arguments.feed or peak_of(context, peer) / 2
    per = max(1, round(rate * _TICK))
    with session(peer, context.server) as run, run.workers() as workers:
        run.calm()
        workers.go()
        time.sleep(IDLE)
        seconds = before + hold + after
        feeding = threading.Thread(
            target=run.call, args=("pulse",), kwargs={"n": int(rate * seconds), "every": per / rate, "per": per}
        )
        feeding.start()
        while not workers.count:
            time.sleep(0.01)
        began = time.monotonic()
        time.sleep(before)
        asyncio.run(_hold(run, began + before + hold))
        feeding.join()
        time.sleep(1)
        left = run.left()
        workers.stop()
        per_window = Counter(int((at - began) // window) for _, at in workers.calls)
    figures: Figures = {"came": rate}
    for k in range(round(seconds / window)):
        start = k * window
        name = "before" if start < before else "held" if start < before + hold else "after"
        figures[f"{name}, {start:g} s"] = per_window[k] / window
    return figures | {"left at the end": left}


async def _hold(run: Session, until: float) -> None:
    """A snapshot, kept: what is deleted or updated from now on stays visible to it."""
    connection: Any = await asyncpg.connect(run.dsn)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetchval("select count(*) from pg_class")
            await asyncio.sleep(until - time.monotonic())
    finally:
        await connection.close()


PART = Part(
    "growth-held",
    "Growth: a transaction held open under load",
    "Rows come steadily at half of the peak; one worker. jobs/s per window, by the window's beginning: before, while "
    "another session holds a snapshot, and after it has ended.",
    measure,
    ("rowmill",),
    line=True,
    quick=False,
    on_request=True,
)
