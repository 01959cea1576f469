-- claim
update jobs set
    status = 'running',
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker = :worker,
    attempts = coalesce(attempts, 0) + 1
where (id) in (
  select id from jobs
  where status = 'ready' and coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= strftime('%Y-%m-%d %H:%M:%f', 'now'), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= strftime('%Y-%m-%d %H:%M:%f', 'now'), true)
  order by id
  limit :count
)
returning id, status, worker, claimed_at, attempts, url, body, result;

-- settle done
update jobs set
    status = 'done'
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n and case typeof(url) when 'text' then cast(url as blob) is cast(:_i0 as blob) else url is :_i0 end and case typeof(body) when 'text' then cast(body as blob) is cast(:_i1 as blob) else body is :_i1 end
returning 1;

-- settle retry
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle dead
update jobs set
    status = 'dead'
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n and case typeof(url) when 'text' then cast(url as blob) is cast(:_i0 as blob) else url is :_i0 end and case typeof(body) when 'text' then cast(body as blob) is cast(:_i1 as blob) else body is :_i1 end
returning 1;

-- settle snooze
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = max(attempts - 1, 0)
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle release
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = max(attempts - 1, 0)
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle stale
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = max(attempts - 1, 0)
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle done, whatever the inputs are
update jobs set
    status = 'done'
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- note a stale run
insert into rowmill_stale_runs as r (lane, row_id, since, last_at)
select 'jobs', cast(:_k0 as text), strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now') where true
on conflict (lane, row_id) do update set runs = case when (julianday(excluded.last_at) - julianday(r.last_at)) * 86400.0 > 86400.0 then 1 else r.runs + 1 end, since = case when (julianday(excluded.last_at) - julianday(r.last_at)) * 86400.0 > 86400.0 then excluded.since else r.since end, last_at = excluded.last_at;

-- forget stale runs
delete from rowmill_stale_runs where lane = 'jobs' and row_id = cast(:_k0 as text);

-- settle done with result
update jobs set
    status = 'done',
    result = :_v0
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n and case typeof(url) when 'text' then cast(url as blob) is cast(:_i0 as blob) else url is :_i0 end and case typeof(body) when 'text' then cast(body as blob) is cast(:_i1 as blob) else body is :_i1 end
returning 1;

-- read
select coalesce(jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n, 0), id, status, worker, claimed_at, attempts, url, body, result, case typeof(url) when 'text' then cast(url as blob) is cast(:_i0 as blob) else url is :_i0 end and case typeof(body) when 'text' then cast(body as blob) is cast(:_i1 as blob) else body is :_i1 end, exists (select 1 from rowmill_stale_runs where lane = 'jobs' and row_id = cast(:_k0 as text) and runs >= 10 and julianday(since) < julianday('now', '-60.0 seconds') and not julianday(last_at) < julianday('now', '-86400.0 seconds'))
from jobs
where id = :_k0;

-- stale rows
select worker, coalesce(attempts, 0) > 5 + 3, id
from jobs
where status = 'running' and case when julianday(jobs.claimed_at) < julianday('now', '+300.0 seconds') then julianday(jobs.claimed_at) end < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
where id = :_k0 and status = 'running';

-- sweep of a poisoned row
update jobs set
    status = 'dead'
where id = :_k0 and status = 'running';

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready');
