-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from jobs
    where status = 'ready' and (run_after is null or run_after <= ((now()) at time zone 'utc')) and (updated_at is null or updated_at < ((now() - interval '30.0 seconds') at time zone 'utc'))
    order by id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update jobs set
    status = 'running',
    updated_at = ((_rm_moment._rm_at) at time zone 'utc'),
    claimed_at = ((_rm_moment._rm_at) at time zone 'utc'),
    worker = $2::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, status, worker, claimed_at, run_after, updated_at, attempts
)
select id, status, worker, claimed_at, run_after, updated_at, attempts from taken
order by id;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select ctid, tableoid from jobs
    where status = 'ready' and (run_after is null or run_after <= ((now()) at time zone 'utc')) and (updated_at is null or updated_at < ((now() - interval '30.0 seconds') at time zone 'utc'))
    and (id) >= ($3::uuid)
    order by id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update jobs set
    status = 'running',
    updated_at = ((_rm_moment._rm_at) at time zone 'utc'),
    claimed_at = ((_rm_moment._rm_at) at time zone 'utc'),
    worker = $2::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, status, worker, claimed_at, run_after, updated_at, attempts
)
select id, status, worker, claimed_at, run_after, updated_at, attempts from taken
order by id;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::uuid[], $2::int[]) with ordinality as s(_k0, _g, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $5::text and t.claimed_at = ($3::timestamp without time zone[])[s._g] and t.attempts = ($4::integer[])[s._g], false)
    for no key update skip locked
  ) l
), written as (
  update jobs t set
    status = 'done',
    updated_at = ((now()) at time zone 'utc')
  from held
  where t.ctid = held._row and t.tableoid = held._table
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp without time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'done',
    updated_at = ((now()) at time zone 'utc')
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.*, ((now() + s._delay * interval '1 second') at time zone 'utc') as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp without time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    updated_at = ((now()) at time zone 'utc'),
    worker = null,
    claimed_at = null,
    run_after = held._due
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp without time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'dead',
    updated_at = ((now()) at time zone 'utc')
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.*, ((now() + s._delay * interval '1 second') at time zone 'utc') as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp without time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    updated_at = ((now()) at time zone 'utc'),
    worker = null,
    claimed_at = null,
    run_after = held._due,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp without time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    updated_at = ((now()) at time zone 'utc'),
    worker = null,
    claimed_at = null,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- read
select s._ord, coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false),
  t.id, t.status, t.worker, t.claimed_at, t.run_after, t.updated_at, t.attempts
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 uuid, _at timestamp without time zone, _n integer)
join jobs t on t.id = s._k0;

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison
  from jobs t
  where t.status = 'running' and coalesce(case when (t.claimed_at at time zone 'utc') < now() + interval '300.0 seconds' then (t.claimed_at at time zone 'utc') end, case when (t.updated_at at time zone 'utc') < now() + interval '300.0 seconds' then (t.updated_at at time zone 'utc') end) < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update jobs t set
    status = case when held._poison then 'dead'::text else 'ready' end,
    worker = case when held._poison then worker::text else null end,
    claimed_at = case when held._poison then claimed_at::timestamp without time zone else null end,
    updated_at = ((now()) at time zone 'utc')
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._worker, held._poison, t.id;

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready' and (run_after is null or run_after <= ((now()) at time zone 'utc')) and (updated_at is null or updated_at < ((now() - interval '30.0 seconds') at time zone 'utc')));
