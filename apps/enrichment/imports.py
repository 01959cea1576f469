"""The import: a bookmarks file becomes placements, links and enrichment jobs, all of them or none.

Its row goes from queued to running, and stays so, in another phase, until its last link is over; ``counters`` ends it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from datetime import timedelta as td
from typing import Any

from sqlalchemy import text

from rowmill import NOW, Dead, Job, domain, fixed

from . import bookmarks, counters
from .bookmarks import Bookmark, NotBookmarks
from .canonical import NotALink, canonical, link_id
from .mill import mill, settings

_CHUNK = 5_000
_STAGED = ("position", "link", "canonical", "domain", "folder", "title", "url", "added_at", "refused")

# Everything below goes in the order of link ids: imports that share links wait for each other, but never in a circle.
_STEPS = """
create temp table staged (position integer, link uuid, canonical text, domain text, folder text[], title text, url text,
    added_at timestamptz, refused text) on commit drop;
--
insert into link_canonicals (id, url, domain)
select distinct on (link) link, canonical, domain from staged where link is not null order by link
on conflict do nothing;
--
insert into enrichment_jobs (link_canonical_id, url, domain)
select distinct on (link) link, canonical, domain from staged where link is not null order by link
on conflict do nothing;
--
-- A link that ends while this goes on would not see that this import waits for it, too.
select count(*) from (
    select from enrichment_jobs where link_canonical_id in (select link from staged)
    order by link_canonical_id for no key update) locked;
--
-- Tried before without success, and not because its site refuses: once more.
update enrichment_jobs e set status = 'queued', attempts = 0, run_after = now(),
    locked_at = null, locked_by = null, forbidden = 0, moved_to = null, hops = 0, domain = l.domain, updated_at = now()
from link_canonicals l
where e.link_canonical_id in (select link from staged) and e.status = 'dead' and l.id = e.link_canonical_id
  and not exists (select from block_candidates b where b.domain in (e.domain, l.domain));
--
insert into placements (import_job_id, link_canonical_id, position, folder, title, url, added_at, refused)
select :import, link, position, folder, title, url, added_at, refused from staged order by position;
--
insert into import_links (import_job_id, link_canonical_id, items, outcome)
select :import, s.link, count(*), case e.status when 'succeeded' then 'done' when 'dead' then 'dead' end
from staged s join enrichment_jobs e on e.link_canonical_id = s.link
group by s.link, e.status order by s.link;
"""
_COUNTS = text("""
select (select count(*) from placements where import_job_id = :import) as total,
    (select count(*) from placements where import_job_id = :import and refused is not null) as refused,
    coalesce(sum(items) filter (where outcome is not null), 0) as over,
    coalesce(sum(items) filter (where outcome = 'dead'), 0) as dead
from import_links where import_job_id = :import
""")
# Nobody else waits for them, and nobody has begun: not enriched at all rather than for nobody.
_WITHDRAW = text("""
delete from enrichment_jobs e using import_links l
where l.import_job_id = :import and e.link_canonical_id = l.link_canonical_id and l.outcome is null
  and e.status in ('queued', 'failed') and not exists (
    select from import_links o join import_jobs i on i.id = o.import_job_id
    where o.link_canonical_id = e.link_canonical_id and o.outcome is null and i.status = 'running')
""")


@mill.lane(
    "import_jobs",
    name="read",
    ready={"status": "queued", "phase": "waiting"},
    where="id in (select import_job_id from import_files)",  # others' imports have their files elsewhere
    running={"status": "running", "phase": "reading", "started_at": NOW},
    done={"status": "running", "phase": "enriching"},
    dead={"status": "failed", "phase": "over", "finished_at": NOW},
    canceled={"status": "canceled", "phase": "over", "finished_at": NOW},
    roles={"finished_at": None},  # an import that was read is not finished yet
    max_attempts=3,
    backoff=fixed(td(seconds=30)),
    lease=td(minutes=2),
    concurrency=1,
    poll=td(seconds=settings.poll_seconds),
    priority=0,
)
async def read(job: Job, db: Any) -> None:
    """Read the file, and put all of it into the database in one transaction, together with the import's own row."""
    content = await db.fetchval("select content from import_files where import_job_id = $1", job.id)
    if content is None:
        raise Dead("the bookmarks file is not there any more")
    try:
        rows = await asyncio.to_thread(lambda: list(staged(bookmarks.read(content))))
    except NotBookmarks as error:
        raise Dead(str(error)) from None
    async with job.finish() as tx:
        await tx.execute(text("select pg_advisory_xact_lock_shared(:lock)"), {"lock": counters.JOINING})
        create, *steps = (step.strip() for step in _STEPS.split("--\n"))
        await tx.execute(text(create))
        driver = (await tx.connection.get_raw_connection()).driver_connection
        for at in range(0, len(rows), _CHUNK):
            await driver.copy_records_to_table("staged", records=rows[at : at + _CHUNK], columns=_STAGED)
        for step in steps:
            await tx.execute(text(step), {"import": job.id} if ":import" in step else {})
        total, refused, over, dead = (await tx.execute(_COUNTS, {"import": job.id})).one()
        tx.set(total_items=total, processed_items=refused + over, failed_items=refused + dead)
    await mill.wake()


@read.on_settled
async def after_reading(tx: Any, settled: list[Any]) -> None:
    """An import that has nothing to wait for is over; a file that will not be read again goes."""
    await counters.close(tx, [s.id for s in settled if s.outcome == "done"])
    if over := [s.id for s in settled if s.outcome in ("done", "dead", "canceled")]:
        await tx.execute(text("delete from import_files where import_job_id = any (:ids)"), {"ids": over})


@mill.lane(
    "import_jobs",
    name="withdraw",
    ready={"status": "canceled", "phase": "enriching"},
    running={"phase": "withdrawing"},
    done={"phase": "over"},
    dead={"phase": "over"},
    roles={"finished_at": None},
    max_attempts=10,  # those of the reading count, too
    backoff=fixed(td(seconds=30)),
    lease=td(minutes=2),
    poll=td(seconds=settings.poll_seconds),
    concurrency=1,
    priority=0,
)
async def withdraw(job: Job) -> None:
    """An import was canceled: what it alone waits for is not enriched any more."""
    async with job.finish() as tx:
        await tx.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": counters.JOINING})
        await tx.execute(_WITHDRAW, {"import": job.id})


def staged(found: Iterator[Bookmark]) -> Iterator[tuple[Any, ...]]:
    """Bookmarks as rows of ``staged``. The same address is made canonical once."""
    known: dict[str, tuple[Any, ...]] = {}
    for position, mark in enumerate(found):
        link = known.get(mark.url)
        if link is None:
            link = known[mark.url] = _link(mark.url)
        *address, refused = link
        yield position, *address, list(mark.folder), mark.title, mark.url[:8_000], mark.added_at, refused


def _link(url: str) -> tuple[Any, ...]:
    """Id, canonical address, domain; or, where it cannot be enriched, why."""
    try:
        address = canonical(url)
    except NotALink as error:
        return None, None, None, error.message
    return link_id(address), address, _domain(address.split("/", 3)[2]), None


@functools.lru_cache(10_000)
def _domain(place: str) -> str | None:
    return domain(f"//{place}")
