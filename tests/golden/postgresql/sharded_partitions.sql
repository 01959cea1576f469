-- claim
with picked as materialized (
  select * from (
    select tenant, number from jobs
    where status = 'ready' and tenant = 'b'
    order by tenant, number
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
  where (tenant, number) in (select tenant, number from picked) and tenant = 'b'
  returning tenant, number, status, worker, claimed_at, attempts
)
select tenant, number, status, worker, claimed_at, attempts from taken
order by tenant, number;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select tenant, number from jobs
    where status = 'ready' and tenant = 'b'
    and (tenant, number) >= ($3::text, $4::integer)
    order by tenant, number
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
  where (tenant, number) in (select tenant, number from picked) and tenant = 'b'
  returning tenant, number, status, worker, claimed_at, attempts
)
select tenant, number, status, worker, claimed_at, attempts from taken
order by tenant, number;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::text[], $2::integer[], $3::int[]) with ordinality as s(_k0, _k1, _g, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.tenant = s._k0 and t.number = s._k1 and t.tenant = 'b' and coalesce(t.status = 'running' and t.worker = $6::text and t.claimed_at = ($4::timestamp with time zone[])[s._g] and t.attempts = ($5::integer[])[s._g], false)
    for no key update skip locked
  ) l
), written as (
  update jobs t set
    status = 'done'
  from held
  where t.tenant = held._k0 and t.number = held._k1 and t.tenant = 'b'
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _k1 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.tenant = s._k0 and t.number = s._k1 and t.tenant = 'b' and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'done'
from held
where t.tenant = held._k0 and t.number = held._k1 and t.tenant = 'b'
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _k1 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.tenant = s._k0 and t.number = s._k1 and t.tenant = 'b' and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null
from held
where t.tenant = held._k0 and t.number = held._k1 and t.tenant = 'b'
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _k1 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.tenant = s._k0 and t.number = s._k1 and t.tenant = 'b' and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'dead'
from held
where t.tenant = held._k0 and t.number = held._k1 and t.tenant = 'b'
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _k1 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.tenant = s._k0 and t.number = s._k1 and t.tenant = 'b' and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = greatest(attempts - 1, 0)
from held
where t.tenant = held._k0 and t.number = held._k1 and t.tenant = 'b'
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _k1 integer, _at timestamp with time zone, _n integer, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from jobs t
    where t.tenant = s._k0 and t.number = s._k1 and t.tenant = 'b' and coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false)
    for no key update skip locked
  ) l
)
update jobs t set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = greatest(attempts - 1, 0)
from held
where t.tenant = held._k0 and t.number = held._k1 and t.tenant = 'b'
returning held._ord;

-- read
select s._ord, coalesce(t.status = 'running' and t.worker = $2::text and t.claimed_at = s._at and t.attempts = s._n, false),
  t.tenant, t.number, t.status, t.worker, t.claimed_at, t.attempts
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _k1 integer, _at timestamp with time zone, _n integer)
join jobs t on t.tenant = s._k0 and t.number = s._k1 and t.tenant = 'b';

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.tenant as _k0, t.number as _k1, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison
  from jobs t
  where t.status = 'running' and t.tenant = 'b' and case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update jobs t set
    status = case when held._poison then 'dead'::text else 'ready' end,
    worker = case when held._poison then worker::text else null end,
    claimed_at = case when held._poison then claimed_at::timestamp with time zone else null end
from held
where t.tenant = held._k0 and t.number = held._k1 and t.tenant = 'b'
returning held._worker, held._poison, t.tenant, t.number;

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready' and tenant = 'b');

-- shards with ready rows
select s.column1 from (values (0, 'a'::text), (1, 'b'::text)) s where (select 1 from jobs where tenant = s.column2 and status = 'ready' limit 1) is not null;

-- sweep, all shards
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.tenant as _k0, t.number as _k1, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison
  from jobs t
  where t.status = 'running' and t.tenant in ('a', 'b') and case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update jobs t set
    status = case when held._poison then 'dead'::text else 'ready' end,
    worker = case when held._poison then worker::text else null end,
    claimed_at = case when held._poison then claimed_at::timestamp with time zone else null end
from held
where t.tenant = held._k0 and t.number = held._k1 and t.tenant in ('a', 'b')
returning held._worker, held._poison, t.tenant, t.number;

-- is anything ready, all shards
select 1 where exists (select 1 from jobs where status = 'ready' and tenant in ('a', 'b'));
