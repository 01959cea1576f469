-- claim
update scrape_jobs set
    status = 'running',
    heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    locked_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    locked_by = :worker
where (id) in (
  select id from scrape_jobs
  where status in ('pending', 'retryable') and (next_retry_at is null or julianday(next_retry_at) <= julianday('now')) and (source_id in (select id from sources where enabled))
  order by created_at, id nulls last
  limit :count
)
returning id, intake_id, source_id, query_params, status, attempts, retry_count, next_retry_at, locked_by, locked_at, heartbeat_at, created_at, completed_at, error_message;

-- settle done
update scrape_jobs set
    status = 'succeeded',
    completed_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and scrape_jobs.status = 'running' and scrape_jobs.locked_by = :worker and scrape_jobs.locked_at = :_at
returning 1;

-- settle retry
update scrape_jobs set
    status = 'retryable',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null,
    next_retry_at = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds'),
    retry_count = coalesce(retry_count, 0) + 1,
    error_message = :_error
where id = :_k0 and scrape_jobs.status = 'running' and scrape_jobs.locked_by = :worker and scrape_jobs.locked_at = :_at
returning 1;

-- settle dead
update scrape_jobs set
    status = 'failed',
    completed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    retry_count = coalesce(retry_count, 0) + 1,
    error_message = :_error
where id = :_k0 and scrape_jobs.status = 'running' and scrape_jobs.locked_by = :worker and scrape_jobs.locked_at = :_at
returning 1;

-- settle snooze
update scrape_jobs set
    status = 'pending',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null,
    next_retry_at = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds')
where id = :_k0 and scrape_jobs.status = 'running' and scrape_jobs.locked_by = :worker and scrape_jobs.locked_at = :_at
returning 1;

-- settle release
update scrape_jobs set
    status = 'pending',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null
where id = :_k0 and scrape_jobs.status = 'running' and scrape_jobs.locked_by = :worker and scrape_jobs.locked_at = :_at
returning 1;

-- settle done with query_params
update scrape_jobs set
    status = 'succeeded',
    completed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    query_params = :_v0
where id = :_k0 and scrape_jobs.status = 'running' and scrape_jobs.locked_by = :worker and scrape_jobs.locked_at = :_at
returning 1;

-- renew
update scrape_jobs set heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and scrape_jobs.status = 'running' and scrape_jobs.locked_by = :worker and scrape_jobs.locked_at = :_at
returning heartbeat_at;

-- read
select coalesce(scrape_jobs.status = 'running' and scrape_jobs.locked_by = :worker and scrape_jobs.locked_at = :_at, 0), id, intake_id, source_id, query_params, status, attempts, retry_count, next_retry_at, locked_by, locked_at, heartbeat_at, created_at, completed_at, error_message
from scrape_jobs
where id = :_k0;

-- stale rows
select locked_by, coalesce(attempts, 0) >= 6 + 3 - coalesce(retry_count, 0), id
from scrape_jobs
where status = 'running' and coalesce(case when julianday(scrape_jobs.heartbeat_at) < julianday('now', '+300.0 seconds') then julianday(scrape_jobs.heartbeat_at) end, case when julianday(scrape_jobs.locked_at) < julianday('now', '+300.0 seconds') then julianday(scrape_jobs.locked_at) end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update scrape_jobs set
    status = 'pending',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null,
    attempts = coalesce(attempts, 0) + 1
where id = :_k0 and status = 'running';

-- sweep of a poisoned row
update scrape_jobs set
    status = 'failed',
    completed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    error_message = 'taken back too often: its worker died or stopped renewing in every run',
    attempts = coalesce(attempts, 0) + 1
where id = :_k0 and status = 'running';

-- is anything ready
select 1 where exists (select 1 from scrape_jobs where status in ('pending', 'retryable') and (next_retry_at is null or julianday(next_retry_at) <= julianday('now')) and (source_id in (select id from sources where enabled)));
