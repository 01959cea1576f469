-- claim
update jobs set
    status = 'running',
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where (id) in (
  select id from jobs
  where status = 'ready'
  order by id
  limit :count
)
returning id, status, claimed_at;

-- settle done
update jobs set
    status = 'done'
where id = :_k0 and jobs.status = 'running' and jobs.claimed_at = :_at
returning 1;

-- settle retry
update jobs set
    status = 'ready',
    claimed_at = null
where id = :_k0 and jobs.status = 'running' and jobs.claimed_at = :_at
returning 1;

-- settle dead
update jobs set
    status = 'dead'
where id = :_k0 and jobs.status = 'running' and jobs.claimed_at = :_at
returning 1;

-- settle snooze
update jobs set
    status = 'ready',
    claimed_at = null
where id = :_k0 and jobs.status = 'running' and jobs.claimed_at = :_at
returning 1;

-- settle release
update jobs set
    status = 'ready',
    claimed_at = null
where id = :_k0 and jobs.status = 'running' and jobs.claimed_at = :_at
returning 1;

-- renew
update jobs set claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and jobs.status = 'running' and jobs.claimed_at = :_at
returning claimed_at;

-- read
select coalesce(jobs.status = 'running' and jobs.claimed_at = :_at, 0), id, status, claimed_at
from jobs
where id = :_k0;

-- stale rows
select null, 0, id
from jobs
where status = 'running' and case when julianday(jobs.claimed_at) < julianday('now', '+300.0 seconds') then julianday(jobs.claimed_at) end < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update jobs set
    status = 'ready',
    claimed_at = null
where id = :_k0 and status = 'running';

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready');
