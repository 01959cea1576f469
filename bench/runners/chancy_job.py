"""The job that Chancy imports by its name: a module apart from the runner, which must not run twice."""

from __future__ import annotations

import asyncio

from chancy import job

from .protocol import Recorder

recorder = Recorder()
sleep = 0.0


@job(queue="bench")
async def noop(*, number: int) -> None:
    recorder.hit(number)
    if sleep:
        await asyncio.sleep(sleep)
