"""asyncpg as it is, for the two ways by which jobs come in: a statement each, and COPY.

SQLAlchemy's pool and cursor cost more CPU than the insert itself: measured 500 µs a call against 100.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..errors import Refused
from .database import Postgres
from .translate import translate, translated

_MOST, _PATIENCE = 3, 30.0


class Direct:
    """A few connections of one event loop's own. One that raised anything but a refusal is thrown away."""

    def __init__(self, database: Postgres) -> None:
        self._database = database
        self._idle: list[Any] = []
        self._free = asyncio.Semaphore(_MOST)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A connection that is not in a transaction."""
        with translated(self._database):
            async with self._free:
                connection = await self._open()
                try:
                    yield connection
                except BaseException as error:
                    if isinstance(translate(error, self._database), Refused):
                        self._idle.append(connection)
                    else:
                        connection.terminate()
                    raise
                self._idle.append(connection)

    async def _open(self) -> Any:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self._database.connect(_PATIENCE)

    async def close(self) -> None:
        """Close those that nobody uses."""
        while self._idle:
            await self._idle.pop().close(timeout=5)
