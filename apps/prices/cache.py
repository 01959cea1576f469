"""Answers of sources, kept in SQLite: they survive a restart, and all processes of a machine share them."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diskcache import Cache, Timeout

from .coin import Coin
from .points import Found

log = logging.getLogger(__name__)
#: A full disk here is no failure of the source, which would be paused for it.
_BROKEN = (sqlite3.Error, OSError, Timeout)


class Answers:
    """What a source said of a coin, for as long as it is fresh. Without a store it knows nothing and keeps nothing."""

    def __init__(self, store: Cache | None, ttl: float) -> None:
        self._store, self._ttl = store, ttl

    async def get(self, source_id: Any, coin: Coin) -> list[Found] | None:
        """What is kept; None: nothing, or it is too old."""
        kept = await self._ask(lambda store: store.get(coin.cache_key(source_id)))
        return None if kept is None else [Found.again(item) for item in json.loads(kept)]

    async def keep(self, source_id: Any, coin: Coin, found: list[Found]) -> None:
        """Remember an answer, also one that has nothing in it."""
        text = json.dumps([item.kept() for item in found])
        await self._ask(lambda store: store.set(coin.cache_key(source_id), text, expire=self._ttl))

    async def _ask(self, question: Callable[[Cache], Any]) -> Any:
        if self._store is None:
            return None
        try:
            return await asyncio.to_thread(question, self._store)
        except _BROKEN as error:
            log.warning("the cache does not answer, and the source is asked instead: %s", error)
            return None


@contextmanager
def answers(directory: str, ttl: float, *, enabled: bool) -> Iterator[Answers]:
    """The cache in a directory, made where it is not there."""
    try:
        store = Cache(directory) if enabled else None
    except _BROKEN as error:
        log.warning("the cache in %s cannot be opened, and is left alone: %s", directory, error)
        store = None
    try:
        yield Answers(store, ttl)
    finally:
        if store is not None:
            store.close()
