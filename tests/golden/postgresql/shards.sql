-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from jobs
    where status = 'ready' and tenant = 3 and (run_after is null or run_after <= now()) and (created_at < now() - interval '3600.0 seconds') is not true
    order by created_at, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update jobs set
    status = 'running',
    heartbeat_at = _rm_moment._rm_at,
    claimed_at = _rm_moment._rm_at,
    worker = $2::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked)) and tenant = 3
  returning id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site
)
select id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site from taken
order by created_at, id;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select ctid, tableoid from jobs
    where status = 'ready' and tenant = 3 and (run_after is null or run_after <= now()) and (created_at < now() - interval '3600.0 seconds') is not true
    and (created_at, id) >= ($3::timestamp with time zone, $4::integer)
    order by created_at, id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update jobs set
    status = 'running',
    heartbeat_at = _rm_moment._rm_at,
    claimed_at = _rm_moment._rm_at,
    worker = $2::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked)) and tenant = 3
  returning id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site
)
select id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site from taken
order by created_at, id;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::integer[], $2::int[]) with ordinality as s(_k0, _g, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and t.tenant = 3 and coalesce(t.status = 'running' and t.worker = $5::text and t.claimed_at = ($3::timestamp with time zone[])[s._g] and t.attempts = ($4::integer[])[s._g], false)
    for no key update skip locked
  ) l
), written as (
  update jobs t set
    status = 'done'
  from held
  where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and t.tenant = 3 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'done'
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.*, now() + s._delay * interval '1 second' as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and t.tenant = 3 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    run_after = held._due,
    error = held._error
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and t.tenant = 3 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'dead',
    error = held._error
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.*, now() + s._delay * interval '1 second' as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and t.tenant = 3 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    run_after = held._due,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and t.tenant = 3 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    attempts = greatest(attempts - 1, 0)
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
returning held._ord;

-- renew
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and t.tenant = 3 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set heartbeat_at = now()
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
returning held._ord, t.heartbeat_at;

-- read
select s._ord, coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false),
  t.id, t.tenant, t.status, t.worker, t.claimed_at, t.heartbeat_at, t.run_after, t.attempts, t.error, t.created_at, t.approved_at, t.draft, t.site
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer)
join jobs t on t.id = s._k0 and t.tenant = 3;

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison
  from jobs t
  where t.status = 'running' and t.tenant = 3 and coalesce(case when t.heartbeat_at < now() + interval '300.0 seconds' then t.heartbeat_at end, case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end) < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update jobs t set
    status = case when held._poison then 'dead'::text else 'ready' end,
    worker = case when held._poison then worker::text else null end,
    claimed_at = case when held._poison then claimed_at::timestamp with time zone else null end,
    heartbeat_at = case when held._poison then heartbeat_at::timestamp with time zone else null end,
    error = case when held._poison then 'taken back too often: its worker died or stopped renewing in every run'::text else error end
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
returning held._worker, held._poison, t.id;

-- expire
with picked as materialized (
  select ctid, tableoid from jobs
  where status = 'ready' and tenant = 3 and (created_at < now() - interval '3600.0 seconds')
  limit 1000
  for no key update skip locked
)
update jobs set
    status = 'canceled',
    error = 'expired: it was not started in time'
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked)) and tenant = 3
returning id;

-- settle wait
with held as materialized (
  select l.*, s.*, case when exists (select 1 from (select id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site from jobs _rm_row where id = s._k0 and tenant = 3 limit 1 offset 0) jobs where (approved_at is not null)) then now() else now() + s._delay * interval '1 second' end as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _delay double precision, _v0 text)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.id = s._k0 and t.tenant = 3 and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    heartbeat_at = null,
    run_after = held._due,
    attempts = greatest(attempts - 1, 0),
    draft = held._v0
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant = 3
returning held._ord;
insert into rowmill_waits (lane, row_id, key, condition, due, since, until_at, on_timeout)
select 'jobs', _id, _key, _condition, _due, now(), now() + (_seconds) * interval '1 second', _then
from (
  select s._id, jsonb_build_array(s._k0) as _key, s._condition, cast(extract(epoch from t.run_after) as text) as _due,
    s._seconds, s._then
  from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 integer, _at timestamp with time zone, _n integer, _seconds double precision, _then text, _id text, _condition text)
  join jobs t on t.id = s._k0 and t.tenant = 3
  where not (t.run_after <= now())
) w
on conflict (lane, row_id) do update set key = excluded.key, condition = excluded.condition, due = excluded.due, since = excluded.since, until_at = excluded.until_at, on_timeout = excluded.on_timeout;

-- rows whose condition is true
select id from (
  select jobs.id, jobs.tenant, jobs.status, jobs.worker, jobs.claimed_at, jobs.heartbeat_at, jobs.run_after, jobs.attempts, jobs.error, jobs.created_at, jobs.approved_at, jobs.draft, jobs.site from rowmill_waits _w join jobs jobs on jobs.id = cast(_w.key ->> 0 as integer) and jobs.tenant = 3 and _w.due = cast(extract(epoch from jobs.run_after) as text)
  where _w.lane = 'jobs' and _w.condition = 'approved_at is not null'
  limit 1000000 offset 0
) jobs
where status = 'ready' and tenant = 3 and (approved_at is not null)
limit 1000;

-- wake
with picked as materialized (
  select ctid, tableoid from jobs
  where id in (1) and exists (select 1 from rowmill_waits _w where _w.lane = 'jobs' and _w.row_id in ('1') and jobs.id = cast(_w.key ->> 0 as integer) and jobs.tenant = 3 and _w.due = cast(extract(epoch from jobs.run_after) as text))
  order by id
  limit 1000
  for no key update skip locked
), taken as (
  update jobs set
    run_after = now()
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked)) and tenant = 3
  returning id
)
select id from taken order by id;

-- forget
delete from rowmill_waits as _w where lane = 'jobs'
and not exists (select 1 from jobs where jobs.id = cast(_w.key ->> 0 as integer) and jobs.tenant = 3 and _w.due = cast(extract(epoch from jobs.run_after) as text) and ((status = 'ready' and tenant = 3) or (status = 'running' and tenant = 3) or ((status = 'done' and tenant = 3) or (status = 'dead' and tenant = 3) or (status = 'canceled' and tenant = 3)) is not true));

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready' and tenant = 3 and (run_after is null or run_after <= now()) and (created_at < now() - interval '3600.0 seconds') is not true);

-- shards with ready rows
select s.column1 from (values (0, 0::integer), (1, 1::integer), (2, 2::integer), (3, 3::integer)) s where (select 1 from jobs where tenant = s.column2 and status = 'ready' and (run_after is null or run_after <= now()) and (created_at < now() - interval '3600.0 seconds') is not true limit 1) is not null;

-- sweep, all shards
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison
  from jobs t
  where t.status = 'running' and t.tenant in (0, 1, 2, 3) and coalesce(case when t.heartbeat_at < now() + interval '300.0 seconds' then t.heartbeat_at end, case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end) < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update jobs t set
    status = case when held._poison then 'dead'::text else 'ready' end,
    worker = case when held._poison then worker::text else null end,
    claimed_at = case when held._poison then claimed_at::timestamp with time zone else null end,
    heartbeat_at = case when held._poison then heartbeat_at::timestamp with time zone else null end,
    error = case when held._poison then 'taken back too often: its worker died or stopped renewing in every run'::text else error end
from held
where t.ctid = held._row and t.tableoid = held._table and t.tenant in (0, 1, 2, 3)
returning held._worker, held._poison, t.id;

-- expire, all shards
with picked as materialized (
  select ctid, tableoid from jobs
  where status = 'ready' and tenant in (0, 1, 2, 3) and (created_at < now() - interval '3600.0 seconds')
  limit 1000
  for no key update skip locked
)
update jobs set
    status = 'canceled',
    error = 'expired: it was not started in time'
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked)) and tenant in (0, 1, 2, 3)
returning id;

-- is anything ready, all shards
select 1 where exists (select 1 from jobs where status = 'ready' and tenant in (0, 1, 2, 3) and (run_after is null or run_after <= now()) and (created_at < now() - interval '3600.0 seconds') is not true);
