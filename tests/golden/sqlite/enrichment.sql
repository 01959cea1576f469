-- claim
update enrichment_jobs set
    status = 'running',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    locked_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    locked_by = :worker,
    attempts = coalesce(attempts, 0) + 1
where (id) in (
  select id from enrichment_jobs
  where status in ('queued', 'failed') and julianday(run_after) <= julianday('now')
  order by run_after, id
  limit :count
)
returning id, link_canonical_id, status, attempts, max_attempts, run_after, locked_at, locked_by, last_error, created_at, updated_at, url, domain;

-- settle done
update enrichment_jobs set
    status = 'succeeded',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and enrichment_jobs.status = 'running' and enrichment_jobs.locked_by = :worker and enrichment_jobs.locked_at = :_at and enrichment_jobs.attempts = :_n
returning 1;

-- settle retry
update enrichment_jobs set
    status = 'failed',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    locked_by = null,
    locked_at = null,
    run_after = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds'),
    last_error = :_error
where id = :_k0 and enrichment_jobs.status = 'running' and enrichment_jobs.locked_by = :worker and enrichment_jobs.locked_at = :_at and enrichment_jobs.attempts = :_n
returning 1;

-- settle dead
update enrichment_jobs set
    status = 'dead',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    last_error = :_error
where id = :_k0 and enrichment_jobs.status = 'running' and enrichment_jobs.locked_by = :worker and enrichment_jobs.locked_at = :_at and enrichment_jobs.attempts = :_n
returning 1;

-- settle snooze
update enrichment_jobs set
    status = 'queued',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    locked_by = null,
    locked_at = null,
    run_after = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds'),
    attempts = max(attempts - 1, 0)
where id = :_k0 and enrichment_jobs.status = 'running' and enrichment_jobs.locked_by = :worker and enrichment_jobs.locked_at = :_at and enrichment_jobs.attempts = :_n
returning 1;

-- settle release
update enrichment_jobs set
    status = 'queued',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    locked_by = null,
    locked_at = null,
    attempts = max(attempts - 1, 0)
where id = :_k0 and enrichment_jobs.status = 'running' and enrichment_jobs.locked_by = :worker and enrichment_jobs.locked_at = :_at and enrichment_jobs.attempts = :_n
returning 1;

-- settle done with url, domain
update enrichment_jobs set
    status = 'succeeded',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    url = :_v0,
    domain = :_v1
where id = :_k0 and enrichment_jobs.status = 'running' and enrichment_jobs.locked_by = :worker and enrichment_jobs.locked_at = :_at and enrichment_jobs.attempts = :_n
returning 1;

-- read
select coalesce(enrichment_jobs.status = 'running' and enrichment_jobs.locked_by = :worker and enrichment_jobs.locked_at = :_at and enrichment_jobs.attempts = :_n, 0), id, link_canonical_id, status, attempts, max_attempts, run_after, locked_at, locked_by, last_error, created_at, updated_at, url, domain
from enrichment_jobs
where id = :_k0;

-- stale rows
select locked_by, coalesce(attempts, 0) > coalesce(max_attempts, 2) + 3, id
from enrichment_jobs
where status = 'running' and coalesce(case when julianday(enrichment_jobs.locked_at) < julianday('now', '+300.0 seconds') then julianday(enrichment_jobs.locked_at) end, case when julianday(enrichment_jobs.updated_at) < julianday('now', '+300.0 seconds') then julianday(enrichment_jobs.updated_at) end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update enrichment_jobs set
    status = 'queued',
    locked_by = null,
    locked_at = null,
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and status = 'running';

-- sweep of a poisoned row
update enrichment_jobs set
    status = 'dead',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    last_error = 'taken back too often: its worker died or stopped renewing in every run'
where id = :_k0 and status = 'running';

-- is anything ready
select 1 where exists (select 1 from enrichment_jobs where status in ('queued', 'failed') and julianday(run_after) <= julianday('now'));
