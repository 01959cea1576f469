-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from scrape_jobs
    where status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and (source_id in (select id from sources where enabled))
    order by created_at, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update scrape_jobs set
    status = 'running',
    heartbeat_at = _rm_moment._rm_at,
    locked_at = _rm_moment._rm_at,
    locked_by = $2::text
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, intake_id, source_id, query_params, status, attempts, retry_count, next_retry_at, locked_by, locked_at, heartbeat_at, created_at, completed_at, error_message
)
select id, intake_id, source_id, query_params, status, attempts, retry_count, next_retry_at, locked_by, locked_at, heartbeat_at, created_at, completed_at, error_message from taken
order by created_at, id;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select ctid, tableoid from scrape_jobs
    where status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and (source_id in (select id from sources where enabled))
    and (created_at, id) >= ($3::timestamp with time zone, $4::bigint)
    order by created_at, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update scrape_jobs set
    status = 'running',
    heartbeat_at = _rm_moment._rm_at,
    locked_at = _rm_moment._rm_at,
    locked_by = $2::text
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, intake_id, source_id, query_params, status, attempts, retry_count, next_retry_at, locked_by, locked_at, heartbeat_at, created_at, completed_at, error_message
)
select id, intake_id, source_id, query_params, status, attempts, retry_count, next_retry_at, locked_by, locked_at, heartbeat_at, created_at, completed_at, error_message from taken
order by created_at, id;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::bigint[], $2::int[]) with ordinality as s(_k0, _g, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from scrape_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $4::text and t.locked_at = ($3::timestamp with time zone[])[s._g], false)
    for no key update skip locked
  ) l
), written as (
  update scrape_jobs t set
    status = 'succeeded',
    completed_at = now()
  from held
  where t.ctid = held._row and t.tableoid = held._table
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from scrape_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at, false)
    for no key update skip locked
  ) l
)
update scrape_jobs t set
    status = 'succeeded',
    completed_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.*, now() + s._delay * interval '1 second' as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from scrape_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at, false)
    for no key update skip locked
  ) l
)
update scrape_jobs t set
    status = 'retryable',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null,
    next_retry_at = held._due,
    retry_count = least(coalesce(retry_count, 0), 2147483646) + 1,
    error_message = held._error
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from scrape_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at, false)
    for no key update skip locked
  ) l
)
update scrape_jobs t set
    status = 'failed',
    completed_at = now(),
    retry_count = least(coalesce(retry_count, 0), 2147483646) + 1,
    error_message = held._error
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.*, now() + s._delay * interval '1 second' as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from scrape_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at, false)
    for no key update skip locked
  ) l
)
update scrape_jobs t set
    status = 'pending',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null,
    next_retry_at = held._due
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from scrape_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at, false)
    for no key update skip locked
  ) l
)
update scrape_jobs t set
    status = 'pending',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle done with query_params
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _error text, _delay double precision, _v0 jsonb)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from scrape_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at, false)
    for no key update skip locked
  ) l
)
update scrape_jobs t set
    status = 'succeeded',
    completed_at = now(),
    query_params = held._v0
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- renew
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from scrape_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at, false)
    for no key update skip locked
  ) l
)
update scrape_jobs t set heartbeat_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord, t.heartbeat_at;

-- read
select s._ord, coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at, false),
  t.id, t.intake_id, t.source_id, t.query_params, t.status, t.attempts, t.retry_count, t.next_retry_at, t.locked_by, t.locked_at, t.heartbeat_at, t.created_at, t.completed_at, t.error_message
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone)
join scrape_jobs t on t.id = s._k0;

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t.locked_by as _worker, coalesce(attempts, 0) >= 6 + 3 - coalesce(retry_count, 0) as _poison, now() as _now
  from scrape_jobs t
  where t.status = 'running' and coalesce(case when t.heartbeat_at < now() + interval '300.0 seconds' then t.heartbeat_at end, case when t.locked_at < now() + interval '300.0 seconds' then t.locked_at end) < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update scrape_jobs t set
    status = case when held._poison then 'failed'::text else 'pending' end,
    locked_by = case when held._poison then locked_by::text else null end,
    locked_at = case when held._poison then locked_at::timestamp with time zone else null end,
    heartbeat_at = case when held._poison then heartbeat_at::timestamp with time zone else null end,
    attempts = least(coalesce(attempts, 0), 2147483646) + 1,
    completed_at = case when held._poison then held._now::timestamp with time zone else completed_at end,
    error_message = case when held._poison then 'taken back too often: its worker died or stopped renewing in every run'::text else error_message end
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._worker, held._poison, t.id;

-- is anything ready
select 1 where exists (select 1 from scrape_jobs where status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and (source_id in (select id from sources where enabled)));
