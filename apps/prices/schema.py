"""Setting up: the tables, the views and the claim as a function; and what puts coins and sources in."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowmill import RowmillError

from .coin import Coin
from .worker import mill, opened, settings

#: Under these names the lane's verbs are functions of the database.
FUNCTIONS = {"claim": "claim_next_pending_job"}

#: A coin, and a job for each source that is in use, in one statement.
_INTAKE = """
with coin as (
  insert into coin_intakes (title, year, mintmark, denomination, series, condition)
  select c->>'title', (c->>'year')::integer, c->>'mintmark', c->>'denomination', c->>'series', $2::text
  from (select $1::text::jsonb as c) given returning id
), jobs as (
  insert into scrape_jobs (intake_id, source_id, query_params)
  select coin.id, sources.id, $1::text::jsonb from coin, sources where sources.enabled order by sources.id
)
select id from coin"""
_SOURCE = """
insert into sources (name, kind, base_url, rate_limit_per_minute) values ($1, $2, $3, $4)
on conflict (name) do update set kind = excluded.kind, base_url = excluded.base_url,
  rate_limit_per_minute = excluded.rate_limit_per_minute
returning id"""


async def setup() -> None:
    """Tables, views and functions in the Mill's database; again at any time."""
    script = (Path(__file__).parent / "schema.sql").read_text()
    script = script.replace(":lock_timeout seconds", f"{settings.job_lock_timeout_seconds} seconds")
    async with opened() as database:
        if database.dialect.name != "postgresql":
            raise RowmillError(
                "prices needs PostgreSQL, and ROWMILL_DATABASE_URL is a SQLite file",
                hint="ROWMILL_DATABASE_URL=postgresql://user:password@host:5432/database",
            )
        async with database.begin() as connection:
            raw = await connection.get_raw_connection()
            await raw.driver_connection.execute(script)
    await install_functions()


async def install_functions() -> None:
    """``rowmill sql``'s own work: the verbs of the lane, for workers in other languages."""
    names = [word for verb, name in FUNCTIONS.items() for word in ("--name", f"{verb}={name}")]
    command = [sys.executable, "-m", "rowmill", "sql", "apps.prices:mill", "scrape", "--functions", *names, "--apply"]
    url = next(iter(mill.environments.values()))
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "ROWMILL_DATABASE_URL": url},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    if process.returncode:
        raise RowmillError(f"the functions could not be installed: {said.decode().strip()}", hint=" ".join(command[1:]))


async def add_source(name: str, kind: str, base_url: str, rate_limit_per_minute: int | None = None) -> int:
    """A source, or its new address; its id."""
    return await _one(_SOURCE, name, kind, base_url, rate_limit_per_minute)


async def add_intake(query_params: Mapping[str, Any], condition: str = "unknown") -> int:
    """A coin to be valued, with a job for each source in use; its id."""
    Coin.of(query_params)  # a mistake is told here, not by a job that fails
    return await _one(_INTAKE, json.dumps(query_params), condition)


async def _one(text: str, *values: Any) -> int:
    async with opened() as database:
        ((found,),) = await database.write(lambda run: run(text, values))
    return int(found)
