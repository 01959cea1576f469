"""Setting up: the tables, the views and the claim as a function; and what puts coins and sources in."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg

from rowmill import RowmillError

from .coin import Coin
from .worker import KINDS, mill, opened, settings

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


_KEY = """
select format_type(a.atttypid, a.atttypmod) from pg_attribute a
where a.attrelid = to_regclass($1::text) and a.attname = 'id' and not a.attisdropped"""
_NOT_OURS = """
select p.oid::regprocedure::text from pg_proc p
where p.proname = $1::text and p.pronamespace = current_schema()::regnamespace
  and coalesce(obj_description(p.oid, 'pg_proc'), '') not like 'rowmill: %' order by 1"""
_UNKNOWN = f"""
select name from sources where enabled and (coalesce(base_url, '') = '' or coalesce(kind, '') not in ({KINDS}))
order by name"""


async def setup() -> list[str]:
    """Tables, views and functions in the Mill's database; again at any time, also on tables that were there before.
    Returns what is left to do.
    """
    async with opened() as database:
        if database.dialect.name != "postgresql":
            raise RowmillError(
                "prices needs PostgreSQL, and ROWMILL_DATABASE_URL is a SQLite file",
                hint="ROWMILL_DATABASE_URL=postgresql://user:password@host:5432/database",
            )
        async with database.begin() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            keys = {table: await driver.fetchval(_KEY, table) or "bigint" for table in ("coin_intakes", "sources")}
            try:
                await driver.execute(_script(keys["coin_intakes"], keys["sources"]))
            except asyncpg.PostgresError as error:
                raise RowmillError(
                    f"the tables could not be set up: {error}",
                    hint="compare your tables with apps/prices/schema.sql; nothing was changed",
                ) from error
            theirs = await driver.fetchval(_NOT_OURS, FUNCTIONS["claim"])
            unknown = [name for (name,) in await driver.fetch(_UNKNOWN)]
    await install_functions({} if theirs else FUNCTIONS)
    left = []
    if theirs:
        left.append(f"{theirs} was there before and is left as it is; rowmill's claim is scrape_claim")
    left += [
        f"no job of source {name!r} is taken before it has an address:"
        f" update sources set kind = 'api', base_url = 'https://...' where name = '{name}'"
        for name in unknown
    ]
    return left


def _script(intake_key: str, source_key: str) -> str:
    """schema.sql for keys of these types."""
    script = (Path(__file__).parent / "schema.sql").read_text()
    names = {":lock_timeout seconds": f"{settings.job_lock_timeout_seconds} seconds",
             ":intake_key": intake_key, ":source_key": source_key}  # fmt: skip
    for name, value in names.items():
        script = script.replace(name, value)
    return script


async def install_functions(names: Mapping[str, str] = FUNCTIONS) -> None:
    """``rowmill sql``'s own work: the verbs of the lane, for workers in other languages."""
    named = [word for verb, name in names.items() for word in ("--name", f"{verb}={name}")]
    command = [sys.executable, "-m", "rowmill", "sql", "apps.prices:mill", "scrape", "--functions", *named, "--apply"]
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


async def add_source(name: str, kind: str, base_url: str, rate_limit_per_minute: int | None = None) -> Any:
    """A source, or its new address; its id."""
    return await _one(_SOURCE, name, kind, base_url, rate_limit_per_minute)


async def add_intake(query_params: Mapping[str, Any], condition: str = "unknown") -> Any:
    """A coin to be valued, with a job for each source in use; its id."""
    Coin.of(query_params)  # a mistake is told here, not by a job that fails
    return await _one(_INTAKE, json.dumps(query_params), condition)


async def _one(text: str, *values: Any) -> Any:
    async with opened() as database:
        ((id,),) = await database.write(lambda run: run(text, values))
    return id
