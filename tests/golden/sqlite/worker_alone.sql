-- claim
update jobs set
    status = 'running',
    worker = :worker
where (id) in (
  select id from jobs
  where status = 'ready'
  order by id
  limit :count
)
returning id, status, worker;

-- settle done
update jobs set
    status = 'done'
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker
returning 1;

-- settle retry
update jobs set
    status = 'ready',
    worker = null
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker
returning 1;

-- settle dead
update jobs set
    status = 'dead'
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker
returning 1;

-- settle snooze
update jobs set
    status = 'ready',
    worker = null
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker
returning 1;

-- settle release
update jobs set
    status = 'ready',
    worker = null
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker
returning 1;

-- read
select coalesce(jobs.status = 'running' and jobs.worker = :worker, 0), id, status, worker
from jobs
where id = :_k0;

-- stale rows
select worker, 0, id
from jobs
where status = 'running' and (select max(case when jobs.worker = w.id || '~' || w.incarnation then julianday(w.seen_at) else 0.0 end) from rowmill_workers w where substr(jobs.worker, 1, length(w.id) + 1) = w.id || '~') < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update jobs set
    status = 'ready',
    worker = null
where id = :_k0 and status = 'running';

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready');
