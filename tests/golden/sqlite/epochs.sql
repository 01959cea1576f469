-- claim
update jobs set
    status = 'running',
    heartbeat_at = cast(strftime('%s', 'now') as integer),
    claimed_at = (julianday('now') - 2440587.5) * 86400.0,
    worker = :worker,
    attempts = coalesce(attempts, 0) + 1
where (id) in (
  select id from jobs
  where status = 'ready' and (run_after is null or run_after <= cast(strftime('%s', 'now') as integer))
  order by id
  limit :count
)
returning id, status, worker, claimed_at, heartbeat_at, run_after, attempts;

-- settle done
update jobs set
    status = 'done'
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle retry
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    run_after = cast(strftime('%s', 'now', :_delay || ' seconds') as integer)
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle dead
update jobs set
    status = 'dead'
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle snooze
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    run_after = cast(strftime('%s', 'now', :_delay || ' seconds') as integer),
    attempts = max(attempts - 1, 0)
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle release
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    attempts = max(attempts - 1, 0)
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- renew
update jobs set heartbeat_at = cast(strftime('%s', 'now') as integer)
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning heartbeat_at;

-- read
select coalesce(jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n, 0), id, status, worker, claimed_at, heartbeat_at, run_after, attempts
from jobs
where id = :_k0;

-- stale rows
select worker, coalesce(attempts, 0) > 5 + 3, id
from jobs
where status = 'running' and coalesce(case when ((jobs.heartbeat_at + 1) / 86400.0 + 2440587.5) < julianday('now', '+300.0 seconds') then ((jobs.heartbeat_at + 1) / 86400.0 + 2440587.5) end, case when (jobs.claimed_at / 86400.0 + 2440587.5) < julianday('now', '+300.0 seconds') then (jobs.claimed_at / 86400.0 + 2440587.5) end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null
where id = :_k0 and status = 'running';

-- sweep of a poisoned row
update jobs set
    status = 'dead'
where id = :_k0 and status = 'running';

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready' and (run_after is null or run_after <= cast(strftime('%s', 'now') as integer)));
