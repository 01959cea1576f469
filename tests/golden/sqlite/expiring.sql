-- claim of rows with a place in the order
update jobs set
    status = 'running',
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker = :worker
where (id) in (
  select id from jobs
  where status = 'ready' and (julianday(valid_until) <= julianday('now') or valid_until is null and julianday(created_at) < julianday('now', '-3600.0 seconds')) is not true and created_at is not null
  order by created_at, id nulls last
  limit :count
)
returning id, status, worker, claimed_at, valid_until, created_at, error;

-- claim of rows without one
update jobs set
    status = 'running',
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker = :worker
where (id) in (
  select id from jobs
  where status = 'ready' and (julianday(valid_until) <= julianday('now') or valid_until is null and julianday(created_at) < julianday('now', '-3600.0 seconds')) is not true and created_at is null
  order by created_at, id nulls last
  limit :count
)
returning id, status, worker, claimed_at, valid_until, created_at, error;

-- settle done
update jobs set
    status = 'done'
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- settle retry
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    error = :_error
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- settle dead
update jobs set
    status = 'dead',
    error = :_error
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- settle snooze
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- settle release
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- read
select coalesce(jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at, 0), id, status, worker, claimed_at, valid_until, created_at, error
from jobs
where id = :_k0;

-- stale rows
select worker, 0, id
from jobs
where status = 'running' and case when julianday(jobs.claimed_at) < julianday('now', '+300.0 seconds') then julianday(jobs.claimed_at) end < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where id = :_k0 and status = 'running';

-- expire
update jobs set
    status = 'late',
    error = 'expired: it was not started in time'
where (id) in (
  select id from jobs
  where status = 'ready' and (julianday(valid_until) <= julianday('now') or valid_until is null and julianday(created_at) < julianday('now', '-3600.0 seconds'))
  limit 1000
)
returning id;

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready' and (julianday(valid_until) <= julianday('now') or valid_until is null and julianday(created_at) < julianday('now', '-3600.0 seconds')) is not true);
