"""The application's own connections: by the same address as rowmill's, which may lead through a transaction pooler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg

from rowmill import RowmillError
from rowmill.store.urls import postgres_url, redact

_HINT = "ROWMILL_DATABASE_URL=postgresql://user:password@host:5432/database"


def database_url(environment: Mapping[str, str]) -> str:
    """The address of the database, as it was set."""
    url = environment.get("ROWMILL_DATABASE_URL", "").strip()
    if not url:
        raise RowmillError("no database: ROWMILL_DATABASE_URL is not set", hint=_HINT)
    _options(url)
    return url


def _options(url: str) -> dict[str, Any]:
    if not url.startswith(("postgres://", "postgresql://")):
        raise RowmillError(f"enrichment needs PostgreSQL, and {redact(url)} is something else", hint=_HINT)
    dsn, pooled = postgres_url(url)
    # Behind a pooler a statement that was prepared in one transaction is not there in the next.
    return {"dsn": dsn, "statement_cache_size": 0} if pooled else {"dsn": dsn}


async def connect(url: str) -> asyncpg.Connection:
    """One connection."""
    try:
        return await asyncpg.connect(**_options(url))
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise RowmillError(
            f"cannot connect to {redact(url)}: {error}", hint="check that the server is up and the URL is right"
        ) from error


def pool(url: str, most: int) -> Any:
    """A pool, opened on entering it."""
    return asyncpg.create_pool(**_options(url), min_size=0, max_size=most)
