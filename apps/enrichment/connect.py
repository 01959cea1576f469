"""The application's own connections: by the same address as rowmill's, which may lead through a transaction pooler."""

from __future__ import annotations

from typing import Any

import asyncpg

from rowmill.store.urls import postgres_url


def _options(url: str) -> dict[str, Any]:
    dsn, pooled = postgres_url(url)
    # Behind a pooler a statement that was prepared in one transaction is not there in the next.
    return {"dsn": dsn, "statement_cache_size": 0} if pooled else {"dsn": dsn}


async def connect(url: str) -> asyncpg.Connection:
    """One connection."""
    return await asyncpg.connect(**_options(url))


def pool(url: str, most: int) -> Any:
    """A pool, opened on entering it."""
    return asyncpg.create_pool(**_options(url), min_size=0, max_size=most)
