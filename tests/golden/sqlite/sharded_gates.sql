-- claim of rows with a place in the order
update jobs set
    status = 'running',
    heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker = :worker,
    attempts = coalesce(attempts, 0) + 1
where (id) in (
  select id from jobs
  where status = 'ready' and tenant = 3 and (run_after is null or julianday(run_after) <= julianday('now')) and created_at is not null and coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= strftime('%Y-%m-%d %H:%M:%f', 'now'), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= strftime('%Y-%m-%d %H:%M:%f', 'now'), true)
  order by created_at, id nulls last
  limit :count
) and tenant = 3
returning id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site;

-- claim of rows without one
update jobs set
    status = 'running',
    heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker = :worker,
    attempts = coalesce(attempts, 0) + 1
where (id) in (
  select id from jobs
  where status = 'ready' and tenant = 3 and (run_after is null or julianday(run_after) <= julianday('now')) and created_at is null and coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= strftime('%Y-%m-%d %H:%M:%f', 'now'), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= strftime('%Y-%m-%d %H:%M:%f', 'now'), true)
  order by created_at, id nulls last
  limit :count
) and tenant = 3
returning id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site;

-- settle done
update jobs set
    status = 'done'
where id = :_k0 and tenant = 3 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle retry
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    run_after = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds'),
    error = :_error
where id = :_k0 and tenant = 3 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle dead
update jobs set
    status = 'dead',
    error = :_error
where id = :_k0 and tenant = 3 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle snooze
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    run_after = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds'),
    attempts = max(attempts - 1, 0)
where id = :_k0 and tenant = 3 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle release
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    attempts = max(attempts - 1, 0)
where id = :_k0 and tenant = 3 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- renew
update jobs set heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and tenant = 3 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning heartbeat_at;

-- read
select coalesce(jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n, 0), id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site
from jobs
where id = :_k0 and tenant = 3;

-- stale rows
select worker, coalesce(attempts, 0) > 5 + 3, id
from jobs
where status = 'running' and tenant = 3 and coalesce(case when julianday(jobs.heartbeat_at) < julianday('now', '+300.0 seconds') then julianday(jobs.heartbeat_at) end, case when julianday(jobs.claimed_at) < julianday('now', '+300.0 seconds') then julianday(jobs.claimed_at) end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null
where id = :_k0 and tenant = 3 and status = 'running' and tenant = 3;

-- sweep of a poisoned row
update jobs set
    status = 'dead',
    error = 'taken back too often: its worker died or stopped renewing in every run'
where id = :_k0 and tenant = 3 and status = 'running' and tenant = 3;

-- settle wait
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    run_after = case when exists (select 1 from (select id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site from jobs _rm_row where id = :_k0 and tenant = 3 limit 1 offset 0) jobs where (approved_at is not null)) then strftime('%Y-%m-%d %H:%M:%f', 'now') else strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds') end,
    attempts = max(attempts - 1, 0),
    draft = :_v0
where id = :_k0 and tenant = 3 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning cast(run_after as text), julianday(run_after) <= julianday('now');
insert into rowmill_waits (lane, row_id, key, condition, due, since, until_at, on_timeout)
select 'jobs', _id, _key, _condition, _due, strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now', (_seconds) || ' seconds'), _then
from (select :_id as _id, json_array(:_k0) as _key, :_condition as _condition, :_due as _due, :_seconds as _seconds, :_then as _then) where true
on conflict (lane, row_id) do update set key = excluded.key, condition = excluded.condition, due = excluded.due, since = excluded.since, until_at = excluded.until_at, on_timeout = excluded.on_timeout;

-- rows whose condition is true
select id from (
  select jobs.id, jobs.tenant, jobs.status, jobs.worker, jobs.claimed_at, jobs.heartbeat_at, jobs.run_after, jobs.attempts, jobs.error, jobs.created_at, jobs.approved_at, jobs.draft, jobs.site from rowmill_waits _w join jobs jobs on jobs.id = json_extract(_w.key, '$[0]') and jobs.tenant = 3 and _w.due = cast(jobs.run_after as text)
  where _w.lane = 'jobs' and _w.condition = 'approved_at is not null'
  limit 1000000 offset 0
) jobs
where status = 'ready' and tenant = 3 and (approved_at is not null)
limit 1000;

-- wake
select id from jobs where id in (1) and exists (select 1 from rowmill_waits _w where _w.lane = 'jobs' and _w.row_id in ('1') and jobs.id = json_extract(_w.key, '$[0]') and jobs.tenant = 3 and _w.due = cast(jobs.run_after as text)) order by id limit 1000;
update jobs set
    run_after = strftime('%Y-%m-%d %H:%M:%f', 'now')
where (id) in (select id from jobs where id in (1) and exists (select 1 from rowmill_waits _w where _w.lane = 'jobs' and _w.row_id in ('1') and jobs.id = json_extract(_w.key, '$[0]') and jobs.tenant = 3 and _w.due = cast(jobs.run_after as text)) order by id limit 1000) and tenant = 3;

-- forget
delete from rowmill_waits as _w where lane = 'jobs'
and not exists (select 1 from jobs where jobs.id = json_extract(_w.key, '$[0]') and jobs.tenant = 3 and _w.due = cast(jobs.run_after as text) and ((status = 'ready' and tenant = 3) or (status = 'running' and tenant = 3) or ((status = 'done' and tenant = 3) or (status = 'dead' and tenant = 3)) is not true));

-- claim of a key
update jobs set
    status = 'running',
    heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker = :worker,
    attempts = coalesce(attempts, 0) + 1
where (id) in (
  select id from jobs
  where status = 'ready' and tenant = 3 and (run_after is null or julianday(run_after) <= julianday('now')) and site = :k0
  order by created_at, id nulls last
  limit :count
) and tenant = 3
returning id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site;

-- running rows of a key
select count(*) from jobs where status = 'running' and tenant in (0, 1, 2, 3);

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready' and tenant = 3 and (run_after is null or julianday(run_after) <= julianday('now')));

-- shards with ready rows
select s.column1 from (values (0, 0), (1, 1), (2, 2), (3, 3)) s where (select 1 from jobs where tenant = s.column2 and status = 'ready' and (run_after is null or julianday(run_after) <= julianday('now')) limit 1) is not null;

-- stale rows, all shards
select worker, coalesce(attempts, 0) > 5 + 3, id
from jobs
where status = 'running' and tenant in (0, 1, 2, 3) and coalesce(case when julianday(jobs.heartbeat_at) < julianday('now', '+300.0 seconds') then julianday(jobs.heartbeat_at) end, case when julianday(jobs.claimed_at) < julianday('now', '+300.0 seconds') then julianday(jobs.claimed_at) end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep, all shards
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null
where id = :_k0 and tenant in (0, 1, 2, 3) and status = 'running' and tenant in (0, 1, 2, 3);

-- is anything ready, all shards
select 1 where exists (select 1 from jobs where status = 'ready' and tenant in (0, 1, 2, 3) and (run_after is null or julianday(run_after) <= julianday('now')));
