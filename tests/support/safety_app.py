"""Lanes at the top of a module: their handlers run in processes of their own."""

from __future__ import annotations

from typing import Any

from rowmill import Mill

mill = Mill("sqlite:///elsewhere.db")
STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


class Thing:
    """No data."""


async def fetch() -> str:
    return "title"


@mill.lane("jobs", **STATES, max_attempts=3, isolation="process")
async def returns_coroutine(job: Any) -> Any:
    return {"title": fetch()}


@mill.lane("jobs", **STATES, max_attempts=3, isolation="process")
async def returns_object(job: Any) -> Any:
    return {"title": Thing()}


@mill.lane("jobs", **STATES, max_attempts=3, isolation="process")
async def returns_bytes(job: Any) -> Any:
    return {"title": b"b"}


@mill.lane("jobs", **STATES, max_attempts=3, isolation="process")
async def notes_coroutine(job: Any) -> None:
    await job.progress(0.5, fetch())


@mill.lane("jobs", **STATES, name="odd/../" + "é" * 300, isolation="process")
def writes_file(job: Any) -> Any:
    (job.workdir / "page.html").write_text("x")
    return {"title": str(job.workdir)}
