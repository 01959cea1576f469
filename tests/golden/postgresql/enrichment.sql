-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from enrichment_jobs
    where status in ('queued', 'failed') and run_after <= now()
    order by run_after, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update enrichment_jobs set
    status = 'running',
    updated_at = _rm_moment._rm_at,
    locked_at = _rm_moment._rm_at,
    locked_by = $2::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, link_canonical_id, status, attempts, max_attempts, run_after, locked_at, locked_by, last_error, created_at, updated_at, url, domain
)
select id, link_canonical_id, status, attempts, max_attempts, run_after, locked_at, locked_by, last_error, created_at, updated_at, url, domain from taken
order by run_after, id;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select ctid, tableoid from enrichment_jobs
    where status in ('queued', 'failed') and run_after <= now()
    and (run_after, id) >= ($3::timestamp with time zone, $4::uuid)
    order by run_after, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update enrichment_jobs set
    status = 'running',
    updated_at = _rm_moment._rm_at,
    locked_at = _rm_moment._rm_at,
    locked_by = $2::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, link_canonical_id, status, attempts, max_attempts, run_after, locked_at, locked_by, last_error, created_at, updated_at, url, domain
)
select id, link_canonical_id, status, attempts, max_attempts, run_after, locked_at, locked_by, last_error, created_at, updated_at, url, domain from taken
order by run_after, id;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::uuid[], $2::int[]) with ordinality as s(_k0, _g, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from enrichment_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $5::text and t.locked_at = ($3::timestamp with time zone[])[s._g] and t.attempts = ($4::integer[])[s._g], false)
    for no key update skip locked
  ) l
), written as (
  update enrichment_jobs t set
    status = 'succeeded',
    updated_at = now()
  from held
  where t.ctid = held._row and t.tableoid = held._table
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from enrichment_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update enrichment_jobs t set
    status = 'succeeded',
    updated_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.*, now() + s._delay * interval '1 second' as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from enrichment_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update enrichment_jobs t set
    status = 'failed',
    updated_at = now(),
    locked_by = null,
    locked_at = null,
    run_after = held._due,
    last_error = held._error
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from enrichment_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update enrichment_jobs t set
    status = 'dead',
    updated_at = now(),
    last_error = held._error
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.*, now() + s._delay * interval '1 second' as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from enrichment_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update enrichment_jobs t set
    status = 'queued',
    updated_at = now(),
    locked_by = null,
    locked_at = null,
    run_after = held._due,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from enrichment_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update enrichment_jobs t set
    status = 'queued',
    updated_at = now(),
    locked_by = null,
    locked_at = null,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle done with url, domain
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _n integer, _error text, _delay double precision, _v0 text, _v1 text)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from enrichment_jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update enrichment_jobs t set
    status = 'succeeded',
    updated_at = now(),
    url = held._v0,
    domain = held._v1
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- read
select s._ord, coalesce(t.status = 'running' and t.locked_by = $2::text and t.locked_at = s._at and t.attempts = s._n, false),
  t.id, t.link_canonical_id, t.status, t.attempts, t.max_attempts, t.run_after, t.locked_at, t.locked_by, t.last_error, t.created_at, t.updated_at, t.url, t.domain
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _n integer)
join enrichment_jobs t on t.id = s._k0;

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t.locked_by as _worker, coalesce(attempts, 0) > coalesce(max_attempts, 2) + 3 as _poison
  from enrichment_jobs t
  where t.status = 'running' and coalesce(case when t.locked_at < now() + interval '300.0 seconds' then t.locked_at end, case when t.updated_at < now() + interval '300.0 seconds' then t.updated_at end) < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update enrichment_jobs t set
    status = case when held._poison then 'dead'::enrichment_status else 'queued' end,
    locked_by = case when held._poison then locked_by::text else null end,
    locked_at = case when held._poison then locked_at::timestamp with time zone else null end,
    updated_at = now(),
    last_error = case when held._poison then 'taken back too often: its worker died or stopped renewing in every run'::text else last_error end
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._worker, held._poison, t.id;

-- is anything ready
select 1 where exists (select 1 from enrichment_jobs where status in ('queued', 'failed') and run_after <= now());
