"""The lane: a job is a row of scrape_jobs, one source asked for one coin."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import sqlalchemy as sa

from rowmill import Breaker, Cancel, Job, Mill, Rate, exponential
from rowmill.declare import retry
from rowmill.store import Database

from .adapters import ADAPTERS, BadAnswer
from .cache import Answers, answers
from .coin import Coin, NotACoin
from .points import UPSERT
from .settings import Settings

settings = Settings.read()
mill = Mill()  # the database is ROWMILL_DATABASE_URL

LONGEST = timedelta(hours=24)
_PARTS = ("title", "year", "mintmark", "denomination", "series")
KINDS = ", ".join(f"'{kind}'" for kind in ADAPTERS)
#: Answers that will be the same the next time. 429 and 503 ask to slow down, the rest of 5xx is a bad moment.
_FOR_GOOD = {400, 401, 403, 404, 405, 410, 414, 451}


def classify(error: BaseException) -> str | tuple[str, timedelta] | None:
    """What a failed collection means: permanent, or None for rowmill's own judgement, which knows timeouts, lost
    connections, 429 and 503 with Retry-After, and takes all else for a bad moment. Nobody is left alone for longer than
    the longest backoff, whatever he asks for.
    """
    if isinstance(error, (BadAnswer, httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return "permanent"
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _FOR_GOOD:
        return "permanent"
    verdict = retry.classify(error)
    return ("rate", min(verdict[1], LONGEST)) if isinstance(verdict, tuple) else None


@asynccontextmanager
async def opened() -> AsyncIterator[Database]:
    """The Mill's database, whatever form its address has."""
    ((_, database),) = mill.databases()
    try:
        yield database
    finally:
        await database.close()


@dataclass(frozen=True)
class Directory:
    """The sources and the coins, as their tables have them at the moment."""

    database: Database

    async def source(self, source_id: Any) -> tuple[str, str]:
        """Of what kind it is, and where."""
        text = "select kind, base_url from sources where id = $1"
        ((kind, base_url),) = await self.database.read(lambda run: run(text, (source_id,)))
        return kind, base_url

    async def coin(self, intake_id: Any) -> dict[str, Any]:
        """What is known of a coin that was taken in; nothing, where its row is gone."""
        text = f"select {', '.join(_PARTS)} from coin_intakes where id = $1"
        rows = await self.database.read(lambda run: run(text, (intake_id,)))
        return dict(zip(_PARTS, rows[0], strict=True)) if rows else {}


@mill.resource
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """One client per process. It follows no redirects: a second request would not be in the source's rate."""
    headers = {"user-agent": "rowmill-prices/0.1", "accept-encoding": "gzip"}
    async with httpx.AsyncClient(timeout=settings.http_timeout_seconds, headers=headers) as client:
        yield client


@mill.resource
async def directory() -> AsyncIterator[Directory]:
    """Where sources and coins are looked up."""
    async with opened() as database:
        yield Directory(database)


@mill.resource
def cache() -> Iterator[Answers]:
    """What sources have said within the last hour."""
    with answers(settings.cache_dir, settings.cache_ttl_seconds, enabled=settings.cache_enabled) as store:
        yield store


@mill.lane(
    "scrape_jobs",
    ready={"status": ["pending", "retryable"]},
    running={"status": "running"},
    done={"status": "succeeded"},
    retry={"status": "retryable"},
    dead={"status": "failed"},
    # Jobs of a source that no adapter knows are left to other workers; `setup` names such sources.
    where=f"source_id in (select id from sources where enabled and base_url <> '' and kind in ({KINDS}))",
    # `attempts` counts what the sweep takes back, `retry_count` what failed; nothing counts claims.
    roles={"reclaims": "attempts", "failures": "retry_count", "attempts": None},
    order_by="created_at",
    max_attempts=settings.max_retries + 1,
    backoff=exponential(timedelta(minutes=settings.base_delay_minutes), cap=LONGEST, jitter=False),
    lease=settings.lock_timeout,
    heartbeat=timedelta(seconds=settings.heartbeat_seconds),
    sweep_every=timedelta(seconds=settings.sweep_seconds),
    poll=timedelta(seconds=settings.poll_seconds),
    concurrency=settings.worker_concurrency,
    timeout=timedelta(seconds=4 * settings.http_timeout_seconds),  # a site that never stops talking
    classify=classify,
    gates=[
        Rate.from_table(
            "sources", "rate_limit_per_minute", by="source_id", burst=1
        ),  # spread evenly: 6 a minute is 6 in every minute
        Breaker(
            settings.breaker_failures,
            timedelta(seconds=settings.breaker_pause_seconds),
            by="source_id",
            table="sources",
        ),
    ],
)
async def scrape(job: Job, http: httpx.AsyncClient, directory: Directory, cache: Answers) -> Any:
    """Ask the source, keep what matches, and value the coin again: points, valuation and outcome commit together."""
    try:
        coin = Coin.of(job["query_params"], await directory.coin(job["intake_id"]))
    except NotACoin as mistake:
        return Cancel(str(mistake))  # ends as failed, and is not the source's fault
    kind, base_url = await directory.source(job["source_id"])
    found = await cache.get(job["source_id"], coin)
    if found is None:
        found = await ADAPTERS[kind].collect(http, base_url, coin)
        await cache.keep(job["source_id"], coin, found)
    matched = [(item, coin.match_strength(item.title)) for item in found]
    points = [item.point(fit, place) for place, (item, fit) in enumerate(matched) if fit >= settings.min_match]
    where = {"intake_id": job["intake_id"], "source_id": job["source_id"]}
    async with job.finish() as tx:
        await tx.execute(sa.text(UPSERT), where | {"points": json.dumps(points)})
        await tx.execute(sa.text("select refresh_valuation(:intake_id)"), {"intake_id": job["intake_id"]})
    return None
