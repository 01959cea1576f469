"""Lanes and tasks with chunks at the top of a module: their handlers run in processes of their own."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from rowmill import Mill, fixed

mill = Mill("sqlite:///elsewhere.db")
mill.budget("model", tokens=(100, timedelta(hours=1)))
OPTIONS: dict[str, Any] = {
    **{state: {"status": state} for state in ("ready", "running", "done", "dead")},
    "chunk": 8, "max_attempts": 1, "isolation": "process", "backoff": fixed(timedelta(0)), "concurrency": 1,
}  # fmt: skip


@mill.lane("jobs", **OPTIONS)
async def lists(jobs: list[Any]) -> Any:
    for job in jobs:
        (job.workdir / "page").write_text("x")
        await job.progress(0.5, f"job {job.id}")
        await job.spend("model", tokens=1)
    return [{"result": f"{job.id} in {os.getpid()}"} for job in jobs]


@mill.lane("jobs", **OPTIONS)
def sorts(jobs: list[Any]) -> Any:
    jobs.sort(key=lambda job: -job.id)
    return [{"result": f"{job.id}"} for job in jobs]


@mill.lane("jobs", **OPTIONS)
def dies(jobs: list[Any]) -> None:
    if any(job.id == 5 for job in jobs):
        os._exit(9)


@mill.lane("jobs", **OPTIONS, timeout=timedelta(seconds=1))
def hangs(jobs: list[Any]) -> None:
    if any(job.id == 5 for job in jobs):
        time.sleep(600)


@mill.task(chunk=4, isolation="process", concurrency=1)
def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]
