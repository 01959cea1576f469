-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from jobs
    where status = 'ready'
    and coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= now(), true)
    order by id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update jobs set
    status = 'running',
    claimed_at = _rm_moment._rm_at,
    worker = $2::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, status, worker, claimed_at, attempts, url, body, result
)
select id, status, worker, claimed_at, attempts, url, body, result, encode(sha256(record_send(row(url, body))), 'hex') as _inputs from taken
order by id;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select ctid, tableoid from jobs
    where status = 'ready'
    and (id) >= ($3::integer)
    and coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= now(), true)
    order by id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update jobs set
    status = 'running',
    claimed_at = _rm_moment._rm_at,
    worker = $2::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, status, worker, claimed_at, attempts, url, body, result
)
select id, status, worker, claimed_at, attempts, url, body, result, encode(sha256(record_send(row(url, body))), 'hex') as _inputs from taken
order by id;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::integer[], $2::int[], $3::text[]) with ordinality as s(_k0, _g, _inputs, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $6::text and t.claimed_at = ($4::timestamp with time zone[])[s._g] and t.attempts = ($5::integer[])[s._g], false) and encode(sha256(record_send(row(t.url, t.body))), 'hex') = s._inputs
    for no key update skip locked
  ) l
), forgotten as (
  delete from rowmill_stale_runs using (select held._k0::text as _id from held) h where lane = 'jobs' and row_id = h._id
), written as (
  update jobs t set
    status = 'done'
  from held
  where t.ctid = held._row and t.tableoid = held._table
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision, _inputs text)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false) and encode(sha256(record_send(row(t.url, t.body))), 'hex') = s._inputs
    for no key update skip locked
  ) l
), forgotten as (
  delete from rowmill_stale_runs using (select held._k0::text as _id from held) h where lane = 'jobs' and row_id = h._id
)
update jobs t set
    status = 'done'
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision, _inputs text)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false) and encode(sha256(record_send(row(t.url, t.body))), 'hex') = s._inputs
    for no key update skip locked
  ) l
), forgotten as (
  delete from rowmill_stale_runs using (select held._k0::text as _id from held) h where lane = 'jobs' and row_id = h._id
)
update jobs t set
    status = 'dead'
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle stale
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle done, whatever the inputs are
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
), forgotten as (
  delete from rowmill_stale_runs using (select held._k0::text as _id from held) h where lane = 'jobs' and row_id = h._id
)
update jobs t set
    status = 'done'
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle done with result
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision, _inputs text, _v0 text)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false) and encode(sha256(record_send(row(t.url, t.body))), 'hex') = s._inputs
    for no key update skip locked
  ) l
), forgotten as (
  delete from rowmill_stale_runs using (select held._k0::text as _id from held) h where lane = 'jobs' and row_id = h._id
)
update jobs t set
    status = 'done',
    result = held._v0
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- read
select s._ord, coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false),
  t.id, t.status, t.worker, t.claimed_at, t.attempts, t.url, t.body, t.result,
  encode(sha256(record_send(row(t.url, t.body))), 'hex') = s._inputs, exists (select 1 from rowmill_stale_runs where lane = 'jobs' and row_id = s._k0::text and runs >= 10 and since < now() - interval '60.0 seconds' and not last_at < now() - interval '86400.0 seconds')
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _inputs text)
join jobs t on t.id = s._k0;

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison
  from jobs t
  where t.status = 'running' and case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update jobs t set
    status = case when held._poison then 'dead'::text else 'ready' end,
    worker = case when held._poison then worker::text else null end,
    claimed_at = case when held._poison then claimed_at::timestamp with time zone else null end
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._worker, held._poison, t.id;

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready');
