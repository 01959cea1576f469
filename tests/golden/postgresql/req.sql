-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from search_sessions
    where status = 'pending_company_selection' and req_completed = false
    order by created_at, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update search_sessions set
    status = 'scraping_company_data',
    updated_at = _rm_moment._rm_at,
    heartbeat_at = _rm_moment._rm_at,
    processing_started_at = _rm_moment._rm_at,
    worker_id = $2::text
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, status, req_completed, worker_id, processing_started_at, heartbeat_at, created_at, updated_at
)
select id, status, req_completed, worker_id, processing_started_at, heartbeat_at, created_at, updated_at from taken
order by created_at, id;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select ctid, tableoid from search_sessions
    where status = 'pending_company_selection' and req_completed = false
    and (created_at, id) >= ($3::timestamp with time zone, $4::uuid)
    order by created_at, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update search_sessions set
    status = 'scraping_company_data',
    updated_at = _rm_moment._rm_at,
    heartbeat_at = _rm_moment._rm_at,
    processing_started_at = _rm_moment._rm_at,
    worker_id = $2::text
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, status, req_completed, worker_id, processing_started_at, heartbeat_at, created_at, updated_at
)
select id, status, req_completed, worker_id, processing_started_at, heartbeat_at, created_at, updated_at from taken
order by created_at, id;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::uuid[], $2::int[]) with ordinality as s(_k0, _g, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from search_sessions t
    where t.id = s._k0 and coalesce(t.status = 'scraping_company_data' and t.req_completed = false and t.worker_id = $4::text and t.processing_started_at = ($3::timestamp with time zone[])[s._g], false)
    for no key update skip locked
  ) l
), written as (
  update search_sessions t set
    status = 'pending_name_selection',
    req_completed = true,
    updated_at = now()
  from held
  where t.ctid = held._row and t.tableoid = held._table
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from search_sessions t
    where t.id = s._k0 and coalesce(t.status = 'scraping_company_data' and t.req_completed = false and t.worker_id = $2::text and t.processing_started_at = s._at, false)
    for no key update skip locked
  ) l
)
update search_sessions t set
    status = 'pending_name_selection',
    req_completed = true,
    updated_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from search_sessions t
    where t.id = s._k0 and coalesce(t.status = 'scraping_company_data' and t.req_completed = false and t.worker_id = $2::text and t.processing_started_at = s._at, false)
    for no key update skip locked
  ) l
)
update search_sessions t set
    status = 'pending_company_selection',
    req_completed = false,
    updated_at = now(),
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from search_sessions t
    where t.id = s._k0 and coalesce(t.status = 'scraping_company_data' and t.req_completed = false and t.worker_id = $2::text and t.processing_started_at = s._at, false)
    for no key update skip locked
  ) l
)
update search_sessions t set
    status = 'failed',
    updated_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from search_sessions t
    where t.id = s._k0 and coalesce(t.status = 'scraping_company_data' and t.req_completed = false and t.worker_id = $2::text and t.processing_started_at = s._at, false)
    for no key update skip locked
  ) l
)
update search_sessions t set
    status = 'pending_company_selection',
    req_completed = false,
    updated_at = now(),
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from search_sessions t
    where t.id = s._k0 and coalesce(t.status = 'scraping_company_data' and t.req_completed = false and t.worker_id = $2::text and t.processing_started_at = s._at, false)
    for no key update skip locked
  ) l
)
update search_sessions t set
    status = 'pending_company_selection',
    req_completed = false,
    updated_at = now(),
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- renew
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from search_sessions t
    where t.id = s._k0 and coalesce(t.status = 'scraping_company_data' and t.req_completed = false and t.worker_id = $2::text and t.processing_started_at = s._at, false)
    for no key update skip locked
  ) l
)
update search_sessions t set heartbeat_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord, t.heartbeat_at;

-- read
select s._ord, coalesce(t.status = 'scraping_company_data' and t.req_completed = false and t.worker_id = $2::text and t.processing_started_at = s._at, false),
  t.id, t.status, t.req_completed, t.worker_id, t.processing_started_at, t.heartbeat_at, t.created_at, t.updated_at
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp with time zone)
join search_sessions t on t.id = s._k0;

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t.worker_id as _worker, false as _poison
  from search_sessions t
  where t.status = 'scraping_company_data' and t.req_completed = false and coalesce(case when t.heartbeat_at < now() + interval '300.0 seconds' then t.heartbeat_at end, case when t.processing_started_at < now() + interval '300.0 seconds' then t.processing_started_at end, case when t.updated_at < now() + interval '300.0 seconds' then t.updated_at end) < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update search_sessions t set
    status = 'pending_company_selection',
    req_completed = false,
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null,
    updated_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._worker, held._poison, t.id;

-- is anything ready
select 1 where exists (select 1 from search_sessions where status = 'pending_company_selection' and req_completed = false);
