"""The lane and the task that ``bench --parts recovery`` runs; its database is in ROWMILL_DATABASE_URL.

Every start of a run is a line in the file that BENCH_STARTS names: number, process id and time. Runs do not end.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from rowmill import Mill

from .tables import table

_AT_ONCE = 60  # more than all rows: one process can run what another one left
_starts = os.open(os.environ["BENCH_STARTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

mill = Mill()


async def _run(number: int) -> None:
    os.write(_starts, b"%d %d %.6f\n" % (number, os.getpid(), time.monotonic()))
    await asyncio.sleep(float(os.environ["BENCH_SLEEP"]))


if os.environ["BENCH_TABLE"] == "jobs":
    mill.queue("default", concurrency=_AT_ONCE)

    @mill.task
    async def noop(number: int) -> None:
        await _run(number)

else:
    _table = table({})

    async def noop_row(job: Any) -> None:
        await _run(_table.number(job))

    _table.declare(mill, noop_row, concurrency=_AT_ONCE)
