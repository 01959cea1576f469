-- claim
update jobs set
    status = 'running',
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker = :worker
where (tenant, number) in (
  select tenant, number from jobs
  where status = 'ready'
  order by tenant, number nulls last
  limit :count
)
returning tenant, number, status, worker, claimed_at;

-- settle done
update jobs set
    status = 'done'
where tenant = :_k0 and number = :_k1 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- settle retry
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where tenant = :_k0 and number = :_k1 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- settle dead
update jobs set
    status = 'dead'
where tenant = :_k0 and number = :_k1 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- settle snooze
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where tenant = :_k0 and number = :_k1 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- settle release
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where tenant = :_k0 and number = :_k1 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at
returning 1;

-- read
select coalesce(jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at, 0), tenant, number, status, worker, claimed_at
from jobs
where tenant = :_k0 and number = :_k1;

-- stale rows
select worker, 0, tenant, number
from jobs
where status = 'running' and case when julianday(jobs.claimed_at) < julianday('now', '+300.0 seconds') then julianday(jobs.claimed_at) end < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where tenant = :_k0 and number = :_k1 and status = 'running';

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready');
