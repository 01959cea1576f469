"""The enrichment of a link, at most two of a domain at once over all workers."""

from __future__ import annotations

from datetime import timedelta as td
from typing import Any

from rowmill import Concurrency, Dead, Job, Retry, Snooze, fixed

from . import counters
from .fetch import FetchFailed, Moved, Refused
from .logs import failing
from .mill import mill, settings

ENDS = ("done", "dead", "canceled")
_LEASE = td(seconds=settings.lease_seconds)
# Only by the run that holds the row. The row goes back, and is claimed again in its new domain's turn.
_MOVE = """
update enrichment_jobs set moved_to = $2, domain = $3, hops = $4
where id = $1 and status = 'running' and locked_by = $5 and attempts = $6
"""


@mill.lane(
    "enrichment_jobs",
    name="enrich",
    ready={"status": ["queued", "failed"]},
    running={"status": "running"},
    done={"status": "succeeded"},
    retry={"status": "failed"},
    dead={"status": "dead"},
    # Jobs without an address were made by others, who work on them.
    where="url is not null and domain is not null"
    f" and (locked_at is null or locked_at < :now - interval '{settings.lease_seconds} seconds')",
    # `attempts` decides, against the row's own max_attempts, also where a table has counters of these names. The lease
    # counts from locked_at, and the timeout ends before it.
    roles={"failures": None, "reclaims": None, "heartbeat_at": None},
    max_attempts=2,
    backoff=fixed(td(seconds=settings.retry_seconds)),
    lease=_LEASE,
    sweep_every=min(td(seconds=60), _LEASE / 2),
    timeout=min(td(seconds=settings.fetch_seconds + 30), _LEASE * 0.9),
    batch=settings.batch,
    concurrency=settings.concurrency,
    poll=td(seconds=settings.poll_seconds),
    gates=[Concurrency(settings.per_domain, by="domain")],
    priority=1,
)
async def enrich(job: Job, fetcher: Any, db: Any) -> dict[str, Any]:
    """Fetch the page, keep what is worth knowing of it, forget the page."""
    try:
        facts: dict[str, Any] = await fetcher.facts(job["moved_to"] or job["url"], job["domain"], job["hops"])
        return facts
    except Moved as moved:
        mark = (job["locked_by"], job["attempts"])
        await db.execute(_MOVE, job.id, moved.url, moved.domain, moved.hops, *mark)
        raise Snooze(td(0)) from None
    except Refused as refused:
        failing.note(job)
        first = refused.kind == "forbidden" and not job["forbidden"]
        if first and not await db.fetchval("select true from block_candidates where domain = $1", job["domain"]):
            raise Retry(str(refused)) from None
        raise Dead(str(refused)) from None
    except FetchFailed:
        failing.note(job)
        raise


@enrich.on_settled
async def follow(tx: Any, settled: list[Any]) -> None:
    """Count the links that ended in the imports that wait for them, and put down who refuses."""
    ended = [(s["link_canonical_id"], "done" if s.outcome == "done" else "dead") for s in settled if s.outcome in ENDS]
    await counters.count(tx, ended)
    await counters.refused(tx, settled)


@mill.cron("* * * * *")
async def recount(job: Job) -> None:
    """Once a minute: a worker of another program beside ours ends links without counting them."""
    async with job.finish() as tx:
        await counters.count_others(tx)
