-- claim
update jobs set
    status = 'running',
    claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker = :worker,
    attempts = coalesce(attempts, 0) + 1
where (id) in (
  select id from jobs
  where status = 'ready' and (run_after is null or julianday(run_after) <= julianday('now'))
  order by id
  limit :count
)
returning id, status, worker, claimed_at, run_after, attempts, error, approved_at, draft;

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
    run_after = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds'),
    error = :_error
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle dead
update jobs set
    status = 'dead',
    error = :_error
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- settle snooze
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    run_after = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds'),
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

-- settle done with draft
update jobs set
    status = 'done',
    draft = :_v0
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning 1;

-- read
select coalesce(jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n, 0), id, status, worker, claimed_at, run_after, attempts, error, approved_at, draft
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
    status = 'dead',
    error = 'taken back too often: its worker died or stopped renewing in every run'
where id = :_k0 and status = 'running';

-- settle wait
update jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    run_after = case when exists (select 1 from (select id, status, worker, claimed_at, run_after, attempts, error, approved_at, draft from jobs _rm_row where id = :_k0 limit 1 offset 0) jobs where (approved_at is not null)) then strftime('%Y-%m-%d %H:%M:%f', 'now') else strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds') end,
    attempts = max(attempts - 1, 0),
    draft = :_v0
where id = :_k0 and jobs.status = 'running' and jobs.worker = :worker and jobs.claimed_at = :_at and jobs.attempts = :_n
returning cast(run_after as text), julianday(run_after) <= julianday('now');
insert into rowmill_waits (lane, row_id, key, condition, due, since, until_at, on_timeout)
select 'jobs', _id, _key, _condition, _due, strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now', (_seconds) || ' seconds'), _then
from (select :_id as _id, json_array(:_k0) as _key, :_condition as _condition, :_due as _due, :_seconds as _seconds, :_then as _then) where true
on conflict (lane, row_id) do update set key = excluded.key, condition = excluded.condition, due = excluded.due, since = excluded.since, until_at = excluded.until_at, on_timeout = excluded.on_timeout;

-- rows whose condition is true
select id from (
  select jobs.id, jobs.status, jobs.worker, jobs.claimed_at, jobs.run_after, jobs.attempts, jobs.error, jobs.approved_at, jobs.draft from rowmill_waits _w join jobs jobs on jobs.id = json_extract(_w.key, '$[0]') and _w.due = cast(jobs.run_after as text)
  where _w.lane = 'jobs' and _w.condition = 'approved_at is not null'
  limit 1000000 offset 0
) jobs
where status = 'ready' and (approved_at is not null)
limit 1000;

-- wake
select id from jobs where id in (1) and exists (select 1 from rowmill_waits _w where _w.lane = 'jobs' and _w.row_id in ('1') and jobs.id = json_extract(_w.key, '$[0]') and _w.due = cast(jobs.run_after as text)) order by id limit 1000;
update jobs set
    run_after = strftime('%Y-%m-%d %H:%M:%f', 'now')
where (id) in (select id from jobs where id in (1) and exists (select 1 from rowmill_waits _w where _w.lane = 'jobs' and _w.row_id in ('1') and jobs.id = json_extract(_w.key, '$[0]') and _w.due = cast(jobs.run_after as text)) order by id limit 1000);

-- forget
delete from rowmill_waits as _w where lane = 'jobs'
and not exists (select 1 from jobs where jobs.id = json_extract(_w.key, '$[0]') and _w.due = cast(jobs.run_after as text) and ((status = 'ready') or (status = 'running') or ((status = 'done') or (status = 'dead')) is not true));

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready' and (run_after is null or julianday(run_after) <= julianday('now')));
