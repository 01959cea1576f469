"""A worker inside another application's process, such as a web application: it starts and stops with that process.

No supervisor restarts it, so this module does. The process belongs to the application, so the worker never ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from ...errors import RowmillError
from ...events import Event, to_log
from ..worker import Worker

_RESTART = (0.5, 30.0)  # seconds before a crashed worker is restarted: first, and at most
_SETTLED = 60.0  # a worker that lived this long did not crash because of its start
_HURRIED = 5.0  # seconds left to give rows back if the process does not want to wait


class Host:
    """Keeps one worker running in the current event loop."""

    def __init__(self, make: Callable[..., Worker], worker_id: str) -> None:
        self._make = make
        self.worker_id = worker_id
        self._stopping = asyncio.Event()
        self._restarting = False
        self._worker: Worker | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.restarts = 0
        self.error: str | None = None
        self._counted = {"completed": 0, "failed": 0}

    async def start(self) -> None:
        """Wait until the worker has checked every environment once.

        Raises for errors by then: an invalid declaration, an id that is taken. It does not raise for an unreachable
        database, but waits for it.
        """
        worker = self._next()
        self._keeping = asyncio.create_task(self._keep(worker), name="rowmill-host")
        started = asyncio.create_task(worker.started.wait())
        try:
            await asyncio.wait({started, self._keeping}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.stop()
            raise
        finally:
            started.cancel()
        if self._keeping.done():
            self._keeping.result()

    async def stop(self) -> None:
        """Stop claiming, let runs finish within the grace period, and give the rest back. If cancelled: at once."""
        self._stopping.set()
        if self._keeping is None or self._worker is None:
            return
        self._worker.stop()
        try:
            await asyncio.wait([self._keeping])
        except asyncio.CancelledError:
            self._worker.stop()
            await asyncio.wait([self._keeping], timeout=_HURRIED)
            raise

    def _next(self) -> Worker:
        followed = self._worker.incarnation if self._worker is not None else None
        self._worker = self._make(worker_id=self.worker_id, replaces=followed)
        return self._worker

    async def _keep(self, worker: Worker | None) -> None:
        crashes = 0
        while True:
            began = time.monotonic()
            error = await self._live(worker)
            if error is None:
                return
            crashes = 0 if time.monotonic() - began >= _SETTLED else crashes
            pause = min(_RESTART[0] * 2.0 ** min(crashes, 10), _RESTART[1])
            crashes += 1
            self.error, self._restarting = f"{type(error).__name__}: {error}", True
            fields = {"worker": self.worker_id, "error": self.error, "restart_in": pause}
            to_log(Event("worker_crashed", logging.ERROR, fields), error if error.__traceback__ else None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            if self._stopping.is_set():
                return
            self.restarts += 1
            worker = None

    async def _live(self, worker: Worker | None) -> Exception | None:
        """Run a worker, or a new one, to its end. Returns the error that ended it; None if it was asked to stop."""
        try:
            worker = worker or self._next()
            self._restarting = False
            await worker.run()
        except Exception as error:
            if not self.restarts and not (worker and worker.started.is_set()):
                raise  # raise at the caller of ``start``
            return error
        finally:
            if worker is not None:
                self._count(worker)
        if self._stopping.is_set() or not worker.recycling:
            return None  # or another worker has its id, which was reported
        return RowmillError(
            "a handler could not be stopped and keeps running; its row is taken back when the lease expires"
        )

    def _count(self, worker: Worker) -> None:
        self._counted["completed"] += worker.counters.completed
        self._counted["failed"] += worker.counters.failures

    # -- state

    @property
    def state(self) -> str:
        """starting, working, restarting (it crashed), stopping or stopped."""
        if self._keeping is None or self._worker is None:
            return "stopped" if self._stopping.is_set() else "starting"
        if self._keeping.done():
            return "stopped"
        if self._stopping.is_set():
            return "stopping"
        if self._restarting:
            return "restarting"
        return "working" if self._worker.started.is_set() else "starting"

    def health(self) -> dict[str, Any]:
        """The worker's state as JSON values. ``ok``: it works, and every environment answers."""
        worker, now = self._worker, time.monotonic()
        live = worker is not None and self._keeping is not None and not self._keeping.done() and not self._restarting
        environments = worker.environments if worker is not None else []
        up = {
            environment.name: live and environment.opened and (environment.retry_at < math.inf)
            for environment in environments
        }
        counted = dict(self._counted)
        busy = 0
        if live and worker is not None:
            busy = sum(len(slots.facts(now)) for slots in worker.slots.values())
            counted = {"completed": counted["completed"] + worker.counters.completed,
                       "failed": counted["failed"] + worker.counters.failures}  # fmt: skip
        return {
            "ok": self.state == "working" and all(up.values()),
            "state": self.state,
            "worker": self.worker_id,
            "busy": busy,
            **counted,
            "restarts": self.restarts,
            "error": self.error,
            "environments": {name: "up" if is_up else "down" for name, is_up in up.items()},
        }
