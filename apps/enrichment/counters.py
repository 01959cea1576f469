"""What follows from a link's end: the counters of the imports that wait for it, and word of sites that refuse.

All of it is written in the transaction that ends the link, so a counter is never ahead of its links nor behind them,
no matter which process is killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import text

#: Held by an import while it joins links that others enrich, and alone by one that withdraws its own.
JOINING = 7_304_115
REFUSALS = ("robots", "captcha", "forbidden")

# Imports are locked in order: two batches that end links of the same two imports must not wait for each other.
_LOCK = text("""
select i.id from import_jobs i
where i.status = 'running' and i.phase = 'enriching' and exists (
    select from import_links l
    where l.import_job_id = i.id and l.outcome is null and l.link_canonical_id = any (cast(:links as uuid[])))
order by i.id for no key update of i
""")
_COUNT = text("""
with ended as (
    select * from unnest(cast(:links as uuid[]), cast(:outcomes as text[])) as e (link, outcome)
), counted as (
    update import_links l set outcome = e.outcome
    from ended e, import_jobs i
    where l.link_canonical_id = e.link and l.outcome is null
      and i.id = l.import_job_id and i.status = 'running' and i.phase = 'enriching'
    returning l.import_job_id, l.items, l.outcome
), sums as (
    select import_job_id, sum(items) as items, coalesce(sum(items) filter (where outcome = 'dead'), 0) as dead
    from counted group by import_job_id
)
update import_jobs i set processed_items = i.processed_items + s.items, failed_items = i.failed_items + s.dead
from sums s where i.id = s.import_job_id
returning i.id, i.processed_items = i.total_items as complete
""")
_ENDED = text("""
select distinct l.link_canonical_id, cast(e.status as text) as status
from import_links l join enrichment_jobs e using (link_canonical_id)
where l.outcome is null and e.status in ('succeeded', 'dead')
""")
_CLOSE = text("""
update import_jobs set status = 'succeeded', phase = 'over', finished_at = now()
where id = any (cast(:ids as uuid[])) and status = 'running' and phase = 'enriching' and processed_items = total_items
""")
_FORBIDDEN = text("""
update enrichment_jobs set forbidden = forbidden + 1 where link_canonical_id = any (cast(:links as uuid[]))
""")
_CANDIDATE = text("""
insert into block_candidates (domain, reason, refusals)
select e.domain, min(e.reason), count(*)
from unnest(cast(:domains as text[]), cast(:reasons as text[]), cast(:certain as boolean[]))
    as e (domain, reason, certain)
where e.certain or exists (select from block_candidates b where b.domain = e.domain)
group by 1 order by 1
on conflict (domain) do update set refusals = block_candidates.refusals + excluded.refusals, last_at = now()
""")


async def count(tx: Any, ended: Iterable[tuple[Any, str]]) -> None:
    """Links have ended, ``done`` or ``dead``: count them in every import that waits for them, once."""
    outcomes = dict(ended)
    if not outcomes:
        return
    links = list(outcomes)
    if not (await tx.execute(_LOCK, {"links": links})).all():
        return
    rows = (await tx.execute(_COUNT, {"links": links, "outcomes": list(outcomes.values())})).all()
    await close(tx, [id for id, complete in rows if complete])


async def count_others(tx: Any) -> None:
    """Count links that another program ended, with statements of its own."""
    rows = (await tx.execute(_ENDED)).all()
    await count(tx, [(link, "done" if status == "succeeded" else "dead") for link, status in rows])


async def close(tx: Any, imports: list[Any]) -> None:
    """End those of the imports whose every item is over."""
    if imports:
        await tx.execute(_CLOSE, {"ids": imports})


async def refused(tx: Any, settled: Iterable[Any]) -> None:
    """Count a row's 403s, and put down the domains whose refusal ended a row."""
    known = [(s, (s.error or "").partition(":")[0]) for s in settled if s.outcome in ("retry", "dead")]
    if links := [s["link_canonical_id"] for s, reason in known if reason == "forbidden"]:
        await tx.execute(_FORBIDDEN, {"links": links})
    final = [(s, reason) for s, reason in known if s.outcome == "dead" and reason in REFUSALS]
    if final:
        given = {
            "domains": [s["domain"] for s, _ in final],
            "reasons": [reason for _, reason in final],
            # A row's first 403 says nothing of its domain yet, also where another failure had used up its first try.
            "certain": [reason != "forbidden" or s["forbidden"] > 0 for s, reason in final],
        }
        await tx.execute(_CANDIDATE, given)
