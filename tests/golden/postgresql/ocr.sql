-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from extraction_queue
    where status_id = 3
    order by created_at, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update extraction_queue set
    status_id = 6,
    ocr_heartbeat_at = _rm_moment._rm_at,
    ocr_started_at = _rm_moment._rm_at,
    ocr_worker_id = $2::text,
    ocr_attempts = coalesce(ocr_attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, document_type, status_id, worker_id, processing_started_at, heartbeat_at, error_message, ocr_worker_id, ocr_started_at, ocr_heartbeat_at, ocr_attempts, ocr_max_attempts, ocr_error, created_at
)
select id, document_type, status_id, worker_id, processing_started_at, heartbeat_at, error_message, ocr_worker_id, ocr_started_at, ocr_heartbeat_at, ocr_attempts, ocr_max_attempts, ocr_error, created_at from taken
order by created_at, id;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select ctid, tableoid from extraction_queue
    where status_id = 3
    and (created_at, id) >= ($3::timestamp with time zone, $4::bigint)
    order by created_at, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update extraction_queue set
    status_id = 6,
    ocr_heartbeat_at = _rm_moment._rm_at,
    ocr_started_at = _rm_moment._rm_at,
    ocr_worker_id = $2::text,
    ocr_attempts = coalesce(ocr_attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, document_type, status_id, worker_id, processing_started_at, heartbeat_at, error_message, ocr_worker_id, ocr_started_at, ocr_heartbeat_at, ocr_attempts, ocr_max_attempts, ocr_error, created_at
)
select id, document_type, status_id, worker_id, processing_started_at, heartbeat_at, error_message, ocr_worker_id, ocr_started_at, ocr_heartbeat_at, ocr_attempts, ocr_max_attempts, ocr_error, created_at from taken
order by created_at, id;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::bigint[], $2::int[]) with ordinality as s(_k0, _g, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from extraction_queue t
    where t.id = s._k0 and coalesce(t.status_id = 6 and t.ocr_worker_id = $5::text and t.ocr_started_at = ($3::timestamp with time zone[])[s._g] and t.ocr_attempts = ($4::integer[])[s._g], false)
    for no key update skip locked
  ) l
), written as (
  update extraction_queue t set
    status_id = 5
  from held
  where t.ctid = held._row and t.tableoid = held._table
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from extraction_queue t
    where t.id = s._k0 and coalesce(t.status_id = 6 and t.ocr_worker_id = $2::text and t.ocr_started_at = s._at and t.ocr_attempts = s._n, false)
    for no key update skip locked
  ) l
)
update extraction_queue t set
    status_id = 5
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from extraction_queue t
    where t.id = s._k0 and coalesce(t.status_id = 6 and t.ocr_worker_id = $2::text and t.ocr_started_at = s._at and t.ocr_attempts = s._n, false)
    for no key update skip locked
  ) l
)
update extraction_queue t set
    status_id = 3,
    ocr_worker_id = null,
    ocr_started_at = null,
    ocr_heartbeat_at = null,
    ocr_error = held._error
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from extraction_queue t
    where t.id = s._k0 and coalesce(t.status_id = 6 and t.ocr_worker_id = $2::text and t.ocr_started_at = s._at and t.ocr_attempts = s._n, false)
    for no key update skip locked
  ) l
)
update extraction_queue t set
    status_id = 4,
    ocr_error = held._error
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from extraction_queue t
    where t.id = s._k0 and coalesce(t.status_id = 6 and t.ocr_worker_id = $2::text and t.ocr_started_at = s._at and t.ocr_attempts = s._n, false)
    for no key update skip locked
  ) l
)
update extraction_queue t set
    status_id = 3,
    ocr_worker_id = null,
    ocr_started_at = null,
    ocr_heartbeat_at = null,
    ocr_attempts = greatest(ocr_attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from extraction_queue t
    where t.id = s._k0 and coalesce(t.status_id = 6 and t.ocr_worker_id = $2::text and t.ocr_started_at = s._at and t.ocr_attempts = s._n, false)
    for no key update skip locked
  ) l
)
update extraction_queue t set
    status_id = 3,
    ocr_worker_id = null,
    ocr_started_at = null,
    ocr_heartbeat_at = null,
    ocr_attempts = greatest(ocr_attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- renew
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _n integer)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from extraction_queue t
    where t.id = s._k0 and coalesce(t.status_id = 6 and t.ocr_worker_id = $2::text and t.ocr_started_at = s._at and t.ocr_attempts = s._n, false)
    for no key update skip locked
  ) l
)
update extraction_queue t set ocr_heartbeat_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord, t.ocr_heartbeat_at;

-- read
select s._ord, coalesce(t.status_id = 6 and t.ocr_worker_id = $2::text and t.ocr_started_at = s._at and t.ocr_attempts = s._n, false),
  t.id, t.document_type, t.status_id, t.worker_id, t.processing_started_at, t.heartbeat_at, t.error_message, t.ocr_worker_id, t.ocr_started_at, t.ocr_heartbeat_at, t.ocr_attempts, t.ocr_max_attempts, t.ocr_error, t.created_at
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 bigint, _at timestamp with time zone, _n integer)
join extraction_queue t on t.id = s._k0;

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t.ocr_worker_id as _worker, coalesce(ocr_attempts, 0) > coalesce(ocr_max_attempts, 3) + 3 as _poison
  from extraction_queue t
  where t.status_id = 6 and coalesce(case when t.ocr_heartbeat_at < now() + interval '300.0 seconds' then t.ocr_heartbeat_at end, case when t.ocr_started_at < now() + interval '300.0 seconds' then t.ocr_started_at end) < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update extraction_queue t set
    status_id = case when held._poison then 4::integer else 3 end,
    ocr_worker_id = case when held._poison then ocr_worker_id::text else null end,
    ocr_started_at = case when held._poison then ocr_started_at::timestamp with time zone else null end,
    ocr_heartbeat_at = case when held._poison then ocr_heartbeat_at::timestamp with time zone else null end,
    ocr_error = case when held._poison then 'taken back too often: its worker died or stopped renewing in every run'::text else ocr_error end
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._worker, held._poison, t.id;

-- is anything ready
select 1 where exists (select 1 from extraction_queue where status_id = 3);
