"""Environments that come and go while a worker runs, by a list that is read again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import RowmillError
from ..store import Database
from .wake import jittered

if TYPE_CHECKING:
    from .worker import Worker

_CLOSE_EVERY = 0.2  # seconds between two looks at environments that are to be closed


class Discovery:
    """Adds environments that are new in the list, and closes those that are gone from it."""

    def __init__(
        self,
        listed: Callable[[], Awaitable[Mapping[str, str]]],
        connect: Callable[[str], Database],
        every: float,
    ) -> None:
        self._listed, self._connect, self._every = listed, connect, every
        self._failing = False

    async def run(self, worker: Worker) -> None:
        """Read the list again and again, until cancelled."""
        while True:
            await asyncio.sleep(_CLOSE_EVERY if any(e.leaving for e in worker.environments) else jittered(self._every))
            try:
                listed = await self._listed()
            except Exception as error:  # whatever it is: the environments that are known are served on
                if not self._failing:
                    message = error.message if isinstance(error, RowmillError) else f"{type(error).__name__}: {error}"
                    hint = "the worker keeps serving the environments that it knows, and reads the list again"
                    worker.events.emit("environments_unlisted", logging.ERROR, error=message, hint=hint)
                self._failing = True
                continue
            self._failing = False
            await self._follow(worker, listed)

    async def _follow(self, worker: Worker, listed: Mapping[str, str]) -> None:
        known = {environment.name for environment in worker.environments}
        for environment in list(worker.environments):
            if listed.get(environment.name) != environment.database.url and not environment.leaving:
                environment.leaving = True
                worker.events.emit("environment_removed", environment=environment.name)
            # What runs there may finish, as long as the database takes the outcome.
            if environment.leaving and (environment.down or environment.gone or not environment.holds):
                await worker.remove_environment(environment)
        for name, url in listed.items():
            if name not in known:
                worker.add_environment(name, self._connect(url))
                worker.events.emit("environment_added", environment=name)
