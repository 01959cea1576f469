"""What the workers run: one lane, whose handler writes down its own start and end.

The records go to a file of each process's own, one write per record: they are there whatever becomes of the process or
of the database, and no statement of rowmill's can change them. Times in them are CLOCK_MONOTONIC, which all processes
of a machine share and which no skew of the wall clock moves.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import signal
import sys
import time
from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path

import sqlalchemy as sa

from chaos import wrong_clock
from rowmill import Job, Mill, Retry, configure_logs, fixed

mill = Mill(os.environ["CHAOS_DATABASE"])
#: Short times, so that a fault's end is seen soon; without them, a lane's own defaults.
TIMES: dict[str, td] = {}
if lease := float(os.environ.get("CHAOS_LEASE", "0")):
    TIMES = {"lease": td(seconds=lease), "sweep_every": td(seconds=lease / 3), "poll": td(seconds=1)}

#: No other process has this name, also where the number of a dead one is given away again.
ME = f"{os.getpid()}-{os.urandom(4).hex()}"
_numbers = itertools.count(1)
_BLOCKED = 12.0  # seconds for which SIGUSR1 blocks the event loop
_file = os.open(
    os.path.join(os.environ["CHAOS_RECORDS"], ME), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
)  # made even where nothing is run: who is there can be counted

if clock := os.environ.get("CHAOS_CLOCK"):
    wrong_clock.follow(Path(clock))

# Nothing is left behind by a suite that was itself killed.
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def since(job: Job) -> float:
    """When the row was claimed, by the database's clock: with the worker's name, that is which claim this is."""
    at: datetime = job["claimed_at"]
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def note(*words: object) -> None:
    os.write(_file, (" ".join(map(str, (*words, time.monotonic()))) + "\n").encode())


@mill.lane(
    "chaos_rows",
    name="chaos",
    ready={"status": "queued"},
    running={"status": "running"},
    done={"status": "done"},
    dead={"status": "dead"},
    concurrency=int(os.environ.get("CHAOS_CONCURRENCY", "50")),
    batch=int(os.environ.get("CHAOS_BATCH", "100")),
    max_attempts=10_000,
    max_reclaims=10_000,
    backoff=fixed(td(seconds=0.1)),
    **TIMES,
)
async def work(job: Job) -> dict[str, str] | None:
    number = next(_numbers)
    run = f"{ME}.{number}"
    note("start", number, job.id, since(job), job.worker, time.time())
    try:
        if job["takes"]:
            await asyncio.sleep(job["takes"])
        if job["what"] == "retry" and not job["failures"]:
            note("end", number, "retry")
            raise Retry("the first time it fails", after=td(seconds=0.05))
        if job["what"] != "finish":
            note("end", number, "done")
            return {"outcome": run}
        async with job.finish() as tx:
            await tx.execute(
                sa.text("insert into chaos_effects (row_id, run) values (:r, :n)"), {"r": job.id, "n": run}
            )
            tx.set(outcome=run)
            note("end", number, "done")  # before the commit: whose reply may never come
        return None
    except Retry:
        raise
    except BaseException:
        note("end", number, "failed")
        raise


def serve(name: str) -> None:
    """Work under this name until stopped. SIGUSR1 blocks the event loop for a while."""
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(_BLOCKED))
    configure_logs("json", stream=sys.stderr)
    mill.run(worker_id=name, grace=5.0)


if __name__ == "__main__":
    serve(sys.argv[1])
