"""The Mill of this application, its settings, and the connection that its handlers share."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg

from rowmill import Mill, RowmillError, domain

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


#: Keys that this application makes itself, from a link's address or for a caller; it cannot work with other types.
_UUIDS = (("import_jobs", "id"), ("enrichment_jobs", "link_canonical_id"))
_TYPE = """
select format_type(atttypid, atttypmod) from pg_attribute
where attrelid = to_regclass($1::text) and attname = $2::text and not attisdropped"""
_WITHOUT_DOMAIN = "select id, url from enrichment_jobs where domain is null and url is not null limit 10000"
_WITHOUT_URL = "select count(*) from enrichment_jobs where url is null and status in ('queued', 'failed')"


async def create_tables(url: str) -> list[str]:
    """Make the tables where they are missing, and add to those that were there before the columns that they lack.
    Returns what is left to do.
    """
    connection = await connect(url)
    try:
        for table, column in _UUIDS:
            if (kind := await connection.fetchval(_TYPE, table, column)) not in (None, "uuid"):
                raise RowmillError(
                    f"{table}.{column} is {kind}, and this application needs uuid",
                    hint=f"a database of its own, or: alter table {table} alter column {column} type uuid using ...",
                )
        await connection.execute(Path(__file__).with_name("schema.sql").read_text())
        while rows := await connection.fetch(_WITHOUT_DOMAIN):
            named = [(id, domain(address) or "unknown") for id, address in rows]
            await connection.executemany("update enrichment_jobs set domain = $2 where id = $1", named)
        others = await connection.fetchval(_WITHOUT_URL)
    except asyncpg.PostgresError as error:
        raise RowmillError(
            f"the tables could not be set up: {error}", hint="compare your tables with apps/enrichment/schema.sql"
        ) from error
    finally:
        await connection.close()
    if not others:
        return []
    return [
        f"enrichment jobs without a url ({others}) are left to the program that made them. To take them, give them one,"
        " and run this again: update enrichment_jobs e set url = l.url from your_links l"
        " where l.id = e.link_canonical_id"
    ]
