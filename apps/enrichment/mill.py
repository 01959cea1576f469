"""The Mill of this application, its settings, and the connection that its handlers share."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg

from rowmill import Mill

from . import fetch
from .connect import connect, pool
from .settings import Settings

#: The database is where ``ROWMILL_DATABASE_URL`` says.
mill = Mill()
settings = Settings.read()
logging.getLogger("httpx").setLevel(logging.WARNING)  # its lines of every request have whole addresses in them
if os.environ.get("SENTRY_DSN"):
    from rowmill import sentry

    sentry.report(mill)


@mill.resource
async def fetcher() -> AsyncIterator[fetch.Fetcher]:
    """One HTTP client per process; its settings are read when it is opened."""
    async with fetch.fetcher(Settings.read()) as opened:
        yield opened


@mill.resource
async def db() -> AsyncIterator[asyncpg.Pool]:
    """For what a handler asks or notes besides its own row."""
    (url,) = mill.environments.values()
    async with pool(url, 2) as opened:
        yield opened


async def create_tables(url: str) -> None:
    """Make the tables where they are missing."""
    connection = await connect(url)
    try:
        await connection.execute(Path(__file__).with_name("schema.sql").read_text())
    finally:
        await connection.close()
