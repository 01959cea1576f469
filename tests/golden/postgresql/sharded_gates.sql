-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from jobs
    where status = 'ready' and tenant = 3 and (run_after is null or run_after <= now())
    and coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= now(), true)
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
    where status = 'ready' and tenant = 3 and (run_after is null or run_after <= now())
    and (created_at, id) >= ($3::timestamp with time zone, $4::integer)
    and coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= now(), true)
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
and not exists (select 1 from jobs where jobs.id = cast(_w.key ->> 0 as integer) and jobs.tenant = 3 and _w.due = cast(extract(epoch from jobs.run_after) as text) and ((status = 'ready' and tenant = 3) or (status = 'running' and tenant = 3) or ((status = 'done' and tenant = 3) or (status = 'dead' and tenant = 3)) is not true));

-- claim by key
with recursive _rm_known as materialized (
  select * from (
    select array_agg(_c.hash order by _c.hash) as hash, array_agg(_c.n order by _c.hash, _c.n) as n
    from (
      select _a.key, hashtextextended(_a.key::text collate "C", 0) as hash, count(*) as n
      from (
        select site as key from jobs
        where status = 'running' and tenant in (0, 1, 2, 3) and site > (select $2::text::text collate "default")
      ) _a group by 1
    ) _c
  ) _r, (
    select array_agg(_g.key order by _g.key) as first, array_agg(_g.version order by _g.key) as version
    from rowmill_gates _g where lane = 'jobs' and dim = 'range:site'
  ) _s, (
    select count(*) > 0 as told, greatest(max(_o.most), 2) as most
    from rowmill_gates _o where lane = 'jobs' and dim = 'site'
  ) _t
), _rm_walk as (
  select _r.* from (
    select _c._rm_key, row_number() over (partition by _c._rm_key order by _rm_o0, _rm_o1) as _rm_place,
      row_number() over () as _rm_n, (select 32::bigint) as _rm_most
    from (
      select * from (
        select site as _rm_key, created_at as _rm_o0, id as _rm_o1 from jobs where site > (select $2::text::text collate "default") and status = 'ready' and tenant = 3 and (run_after is null or run_after <= now())
        order by site, created_at, id limit (select 32::bigint)
      ) _f order by _rm_key, _rm_o0, _rm_o1 limit 32
    ) _c
  ) _r where coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= now(), true)
  union all
  select _r.* from (
    select _w._rm_key, case when _w._rm_place = _w._rm_n then least(coalesce((select most from _rm_known), 2), (select 32::bigint)) else (select 32::bigint) end as most from _rm_walk _w where _w._rm_n = _w._rm_most
  ) _w
  cross join lateral (
    select _c._rm_key, row_number() over (partition by _c._rm_key order by _rm_o0, _rm_o1) as _rm_place,
      row_number() over () as _rm_n, _w.most as _rm_most
    from (
      select * from (
        select site as _rm_key, created_at as _rm_o0, id as _rm_o1 from jobs where site > _w._rm_key and status = 'ready' and tenant = 3 and (run_after is null or run_after <= now())
        order by site, created_at, id limit _w.most
      ) _f order by _rm_key, _rm_o0, _rm_o1 limit 32
    ) _c
  ) _r
), _rm_turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select _k._rm_key, coalesce(width_bucket(_k._rm_key::text collate "C", _i.first), 0) as _rm_range
  from _rm_known _i cross join _rm_walk _k
  cross join lateral (
    select _k._rm_key::text as key, _o.version, _o.tokens, _o.refilled_at, _o.delay, _o.streak, _o.open_until, _o.closed_until, _o.paused_until, _o.most from (select) _e
    left join rowmill_gates _o on _i.told and lane = 'jobs' and dim = 'site' and _o.key = _k._rm_key::text limit 1) _g
  where _k._rm_place <= coalesce(_g.most, 2) - case when _i.hash is null then 0 when _i.hash[width_bucket(hashtextextended(_k._rm_key::text collate "C", 0), _i.hash)] = hashtextextended(_k._rm_key::text collate "C", 0) then _i.n[width_bucket(hashtextextended(_k._rm_key::text collate "C", 0), _i.hash)] else 0 end
    and octet_length(_g.key) <= 2000 and coalesce(_g.paused_until <= now(), true) and coalesce(_g.closed_until <= now(), true)
  limit (select $1::bigint)
), _rm_held as materialized (
  -- locked only if nothing has changed since the snapshot
  select _s._rm_range, _l.spot from (select distinct _rm_range from _rm_turns) _s cross join _rm_known _i
  left join lateral (
    select _g.ctid as spot from rowmill_gates _g
    where lane = 'jobs' and dim = 'range:site' and _g.key = _i.first[_s._rm_range] and _g.version = _i.version[_s._rm_range]
    for no key update skip locked
  ) _l on true
), _rm_picked as materialized (
  -- as many rows of each key: others, where somebody has the first ones locked
  select _j.*, _h.spot as _spot, _t._rm_key::text as _key from (
    select _rm_key, _rm_range, count(*) as n from _rm_turns group by _rm_key, _rm_range
  ) _t
  join _rm_held _h on _h._rm_range = _t._rm_range and _h.spot is not null
  cross join lateral (
    select ctid, tableoid from jobs
    where site >= _t._rm_key::text collate "default" and site <= _t._rm_key::text collate "default" and status = 'ready' and tenant = 3 and (run_after is null or run_after <= now())
    order by site, created_at, id limit _t.n
    for no key update skip locked
  ) _j
), _rm_loose as materialized (
  select ctid, tableoid from jobs
  where site is null and status = 'ready' and tenant = 3 and (run_after is null or run_after <= now()) and coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= now(), true)
  order by created_at, id
  limit least(greatest($1::bigint - (select count(*) from _rm_picked), 0), 0)
  for no key update skip locked
), _rm_chosen as (
  select ctid, tableoid from _rm_picked
  union all select ctid, tableoid from _rm_loose
), _rm_bump as (
  update rowmill_gates _g set version = _g.version + 1, touched_at = now()
  where _g.ctid = any(array(select _spot from _rm_picked))
), _rm_taken as (
  update jobs set
    status = 'running',
    heartbeat_at = _rm_moment._rm_at,
    claimed_at = _rm_moment._rm_at,
    worker = $3::text,
    attempts = coalesce(attempts, 0) + 1
  from (select clock_timestamp() as _rm_at from _rm_chosen having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from _rm_chosen)) and (tableoid = (select min(tableoid) from _rm_chosen) and tableoid = (select max(tableoid) from _rm_chosen) or (tableoid, ctid) in (select tableoid, ctid from _rm_chosen)) and tenant = 3
  returning id, tenant, status, worker, claimed_at, heartbeat_at, run_after, attempts, error, created_at, approved_at, draft, site
)
select _rm_taken.id, _rm_taken.tenant, _rm_taken.status, _rm_taken.worker, _rm_taken.claimed_at, _rm_taken.heartbeat_at, _rm_taken.run_after, _rm_taken.attempts, _rm_taken.error, _rm_taken.created_at, _rm_taken.approved_at, _rm_taken.draft, _rm_taken.site, site::text, _m.*
from (
  select (select _rm_key::text from _rm_turns order by _rm_key desc limit 1) as _rm_last, coalesce(cardinality(first), 0) as _rm_ranges, (
    select coalesce(first[1 + ((7 * (version[_rm_range] & 1048575) + _rm_range) % cardinality(first))::int], '')
    from _rm_held where spot is null limit 1) as _rm_elsewhere, (select count(*) from _rm_turns) as _rm_found,
    null::text[] as _rm_missing
  from _rm_known limit 1
) _m left join _rm_taken on true
order by _rm_taken.created_at, _rm_taken.id;

-- when
with recursive _rm_known as materialized (
  select * from (
    select array_agg(_c.hash order by _c.hash) as hash, array_agg(_c.n order by _c.hash, _c.n) as n
    from (
      select _a.key, hashtextextended(_a.key::text collate "C", 0) as hash, count(*) as n
      from (
        select site as key from jobs
        where status = 'running' and tenant in (0, 1, 2, 3) and site is not null
      ) _a group by 1
    ) _c
  ) _r, (
    select array_agg(_g.key order by _g.key) as first, array_agg(_g.version order by _g.key) as version
    from rowmill_gates _g where lane = 'jobs' and dim = 'range:site'
  ) _s, (
    select count(*) > 0 as told, greatest(max(_o.most), 2) as most
    from rowmill_gates _o where lane = 'jobs' and dim = 'site'
  ) _t
), _rm_walk as (
  select _r.* from (
    select _c._rm_key, row_number() over (partition by _c._rm_key order by _rm_o0, _rm_o1) as _rm_place,
      row_number() over () as _rm_n, (select 32::bigint) as _rm_most
    from (
      select * from (
        select site as _rm_key, created_at as _rm_o0, id as _rm_o1 from jobs where site is not null and status = 'ready' and tenant = 3 and (run_after is null or run_after <= now())
        order by site, created_at, id limit (select 32::bigint)
      ) _f order by _rm_key, _rm_o0, _rm_o1 limit 32
    ) _c
  ) _r where coalesce((select paused_until from rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from rowmill_gates where lane = 'jobs' and dim = '' and key = '') <= now(), true)
  union all
  select _r.* from (
    select _w._rm_key, case when _w._rm_place = _w._rm_n then least(coalesce((select most from _rm_known), 2), (select 32::bigint)) else (select 32::bigint) end as most from _rm_walk _w where _w._rm_n = _w._rm_most
  ) _w
  cross join lateral (
    select _c._rm_key, row_number() over (partition by _c._rm_key order by _rm_o0, _rm_o1) as _rm_place,
      row_number() over () as _rm_n, _w.most as _rm_most
    from (
      select * from (
        select site as _rm_key, created_at as _rm_o0, id as _rm_o1 from jobs where site > _w._rm_key and status = 'ready' and tenant = 3 and (run_after is null or run_after <= now())
        order by site, created_at, id limit _w.most
      ) _f order by _rm_key, _rm_o0, _rm_o1 limit 32
    ) _c
  ) _r
)
select coalesce((select 0 from _rm_known _i cross join _rm_walk _k
  cross join lateral (
    select _k._rm_key::text as key, _o.version, _o.tokens, _o.refilled_at, _o.delay, _o.streak, _o.open_until, _o.closed_until, _o.paused_until, _o.most from (select) _e
    left join rowmill_gates _o on _i.told and lane = 'jobs' and dim = 'site' and _o.key = _k._rm_key::text limit 1) _g
  where _k._rm_place <= coalesce(_g.most, 2) - case when _i.hash is null then 0 when _i.hash[width_bucket(hashtextextended(_k._rm_key::text collate "C", 0), _i.hash)] = hashtextextended(_k._rm_key::text collate "C", 0) then _i.n[width_bucket(hashtextextended(_k._rm_key::text collate "C", 0), _i.hash)] else 0 end
    and octet_length(_g.key) <= 2000 and coalesce(_g.paused_until <= now(), true) and coalesce(_g.closed_until <= now(), true) limit 1), (
  select _w.wait from (
    select _g.key, greatest(extract(epoch from _g.paused_until - now()), extract(epoch from _g.closed_until - now())) as wait from rowmill_gates _g
    where lane = 'jobs' and dim = 'site' and greatest(extract(epoch from _g.paused_until - now()), extract(epoch from _g.closed_until - now())) > 0 order by 2
  ) _w
  cross join lateral (select 1 from jobs where site >= _w.key::text collate "default" and site <= _w.key::text collate "default" and status = 'ready' and tenant = 3 and (run_after is null or run_after <= now())
    order by site, created_at, id limit 1) _y
  limit 1
))::float8, exists (select 1 from jobs where status = 'ready' and tenant = 3 and (run_after is null or run_after <= now()));

-- is anything ready
select 1 where exists (select 1 from jobs where status = 'ready' and tenant = 3 and (run_after is null or run_after <= now()));

-- shards with ready rows
select s.column1 from (values (0, 0::integer), (1, 1::integer), (2, 2::integer), (3, 3::integer)) s where (select 1 from jobs where tenant = s.column2 and status = 'ready' and (run_after is null or run_after <= now()) limit 1) is not null;

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

-- is anything ready, all shards
select 1 where exists (select 1 from jobs where status = 'ready' and tenant in (0, 1, 2, 3) and (run_after is null or run_after <= now()));
