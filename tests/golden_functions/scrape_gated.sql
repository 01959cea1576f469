-- claim
create or replace function public.scrape_claim_next(worker text)
returns setof public.scrape_jobs
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_row record;
  _rm_last text;
  _rm_keys text[];
  _rm_any boolean := false;
begin
  if $1 is null or $1 = ''::text then
    raise exception using errcode = '22023', message = 'a claim needs the name of its worker';
  end if;
  for _rm_try in 1..3 loop
    -- Rows whose holder is gone: where nothing was to be had, and now and then in any case.
    if _rm_try = 2 or _rm_try = 1 and pg_catalog.mod(pg_catalog.floor(extract(epoch from pg_catalog.clock_timestamp()))::bigint, 60::bigint) = 0::bigint then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t.locked_by as _worker, coalesce(attempts, 0) >= 6 + 3 - coalesce(retry_count, 0) as _poison from public.scrape_jobs t
      where t.status = 'running' and (coalesce(case when t.heartbeat_at < now() + interval '300.0 seconds' then t.heartbeat_at end, case when t.locked_at < now() + interval '300.0 seconds' then t.locked_at end) < now() - interval '300.0 seconds' or coalesce(case when t.heartbeat_at < now() + interval '300.0 seconds' then t.heartbeat_at end, case when t.locked_at < now() + interval '300.0 seconds' then t.locked_at end) is null)
      limit 100
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public.scrape_jobs t set
          status = 'pending',
          locked_by = null,
          locked_at = null,
          heartbeat_at = null,
          attempts = least(coalesce(attempts, 0), 2147483646) + 1
        where t.id = _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.scrape_jobs t set
            status = 'failed',
            completed_at = now(),
            error_message = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000),
            attempts = least(coalesce(attempts, 0), 2147483646) + 1
          where t.id = _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'scrape_jobs', sqlerrm;
        end;
      end;
    end loop;
      exit when not exists (select 1 from public.scrape_jobs where status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled))));
    end if;
    if not exists (select 1 from public.rowmill_gates _g where lane = 'scrape' and dim = 'range:source_id') then
      insert into public.rowmill_gates (lane, dim, key, version, touched_at, refilled_at)
values ('scrape', 'range:source_id', '', txid_current() << 20, now(), now())
on conflict do nothing;
      if found then
        insert into public.rowmill_gates (lane, dim, key, version, touched_at)
select 'scrape', 'range:source_id', _n.key, txid_current() << 20, now() from (select min(_p.key) as key from (
  select _s.key, ntile(32) over (order by _s.key) as part from (
    select source_id::text collate "C" as key from public.scrape_jobs tablesample system (least(100, 2097152 * 100.0 / greatest((select sum(pg_relation_size(relid)) from pg_partition_tree('public.scrape_jobs'::regclass)), 1))) where status in ('pending', 'retryable') and source_id is not null
    union
    select _f.key::text from (
      select source_id as key from public.scrape_jobs where status in ('pending', 'retryable') and source_id is not null order by created_at, id limit 2048
    ) _f
  ) _s where octet_length(_s.key) <= 2000
) _p where _p.part > 1 group by _p.part) _n
on conflict do nothing;
      end if;
    end if;
    if _rm_try = 1 then
      select _g.cells into _rm_last from public.rowmill_gates _g where lane = 'scrape' and dim = 'range:source_id' and _g.cells is not null order by _g.touched_at desc limit 1;
    else
      with _rm_seen as materialized (
  select _g.key, _g.version from public.rowmill_gates _g where lane = 'scrape' and dim = 'range:source_id'
), _rm_mine as materialized (
  select _l.spot, now() as now from _rm_seen _s cross join lateral (
    select _g.ctid as spot from public.rowmill_gates _g
    where lane = 'scrape' and dim = 'range:source_id' and _g.key = _s.key and _g.version = _s.version
    for no key update skip locked
  ) _l
  where (select count(*) < 32 from _rm_seen) and not (select coalesce(max(refilled_at) > now() - case when count(*) < 32 then interval '5.0 seconds' else interval '60.0 seconds' end, false) from public.rowmill_gates where lane = 'scrape' and dim = 'range:source_id')
)
update public.rowmill_gates _g set version = _g.version + 1, refilled_at = case when _g.key = '' then _n.now end
from (select min(now) as now from _rm_mine) _n
where _g.ctid = any(array(select spot from _rm_mine))
  and (select count(*) from _rm_mine) = (select count(*) from _rm_seen);
      if found then
        insert into public.rowmill_gates (lane, dim, key, version, touched_at)
select 'scrape', 'range:source_id', _n.key, txid_current() << 20, now() from (select min(_p.key) as key from (
  select _s.key, ntile(32) over (order by _s.key) as part from (
    select source_id::text collate "C" as key from public.scrape_jobs tablesample system (least(100, 2097152 * 100.0 / greatest((select sum(pg_relation_size(relid)) from pg_partition_tree('public.scrape_jobs'::regclass)), 1))) where status in ('pending', 'retryable') and source_id is not null
    union
    select _f.key::text from (
      select source_id as key from public.scrape_jobs where status in ('pending', 'retryable') and source_id is not null order by created_at, id limit 2048
    ) _f
  ) _s where octet_length(_s.key) <= 2000
) _p where _p.part > 1 group by _p.part) _n
on conflict do nothing;
      end if;
      select nullif(_g.key, '') into _rm_last from public.rowmill_gates _g where lane = 'scrape' and dim = 'range:source_id' order by random() limit 1;
    end if;
    if _rm_last is not null then
      for _rm_row in
      with recursive _rm_known as materialized (
  select * from (
    select array_agg(_c.hash order by _c.hash) as hash, array_agg(_c.n order by _c.hash, _c.n) as n
    from (
      select _a.key, hashtextextended(_a.key::text collate "C", 0) as hash, count(*) as n
      from (
        select source_id as key from public.scrape_jobs
        where status = 'running' and source_id > (select _rm_last::bigint)
      ) _a group by 1
    ) _c
  ) _r, (
    select array_agg(_g.key order by _g.key) as first, array_agg(_g.version order by _g.key) as version
    from public.rowmill_gates _g where lane = 'scrape' and dim = 'range:source_id'
  ) _s, (
    select true as told, null::bigint as most
  ) _t
), _rm_walk as (
  select _r.* from (
    select _c._rm_key, row_number() over (partition by _c._rm_key order by _rm_o0, _rm_o1) as _rm_place,
      row_number() over () as _rm_n, (select greatest(32, least(1000, 1::bigint))::bigint) as _rm_most
    from (
      select * from (
        select source_id as _rm_key, created_at as _rm_o0, id as _rm_o1 from public.scrape_jobs where source_id > (select _rm_last::bigint) and status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
        order by source_id, created_at, id limit (select greatest(32, least(1000, 1::bigint))::bigint)
      ) _f order by _rm_key, _rm_o0, _rm_o1 limit 1000
    ) _c
  ) _r where coalesce((select paused_until from public.rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from public.rowmill_gates where lane = 'scrape' and dim = '' and key = '') <= now(), true)
  union all
  select _r.* from (
    select _w._rm_key, case when _w._rm_place = _w._rm_n then least(coalesce((select most from _rm_known), 1000), (select greatest(32, least(1000, 1::bigint))::bigint)) else (select greatest(32, least(1000, 1::bigint))::bigint) end as most from _rm_walk _w where _w._rm_n = _w._rm_most
  ) _w
  cross join lateral (
    select _c._rm_key, row_number() over (partition by _c._rm_key order by _rm_o0, _rm_o1) as _rm_place,
      row_number() over () as _rm_n, _w.most as _rm_most
    from (
      select * from (
        select source_id as _rm_key, created_at as _rm_o0, id as _rm_o1 from public.scrape_jobs where source_id > _w._rm_key and status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
        order by source_id, created_at, id limit _w.most
      ) _f order by _rm_key, _rm_o0, _rm_o1 limit 1000
    ) _c
  ) _r
), _rm_turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select _k._rm_key, coalesce(width_bucket(_k._rm_key::text collate "C", _i.first), 0) as _rm_range, _t.tokens as _tokens, _s.speed as _speed, _s.size as _size, _g.refilled_at as _refilled, _g.version as _seen
  from _rm_known _i cross join _rm_walk _k
  cross join lateral (
    select _k._rm_key::text as key, _o.version, _o.tokens, _o.refilled_at, _o.delay, _o.streak, _o.open_until, _o.closed_until, _o.paused_until, _o.most from (select) _e
    left join public.rowmill_gates _o on _i.told and lane = 'scrape' and dim = 'source_id' and _o.key = _k._rm_key::text limit 1) _g
  cross join lateral (select (select rate_limit_per_minute from public.sources where id = _g.key::bigint)::float8 as listed) _f
  cross join lateral (select case when _f.listed > 0 then _f.listed / 60.0 when _f.listed <= 0 then 0.0 end as speed, case when _f.listed > 0 then 2.0 else 0.0 end as size) _s
  cross join lateral (select case when _s.speed is null then 'infinity'::float8 else least(_s.size, coalesce(
    _g.tokens + greatest(extract(epoch from now() - _g.refilled_at), 0)::float8 * _s.speed,
    _s.size)) end as tokens) _t
  where _k._rm_place <= least(case when coalesce((select failure_streak from public.sources where id = _g.key::bigint), 0) < 3 then 'infinity'::float8 when coalesce((select extract(epoch from paused_until - now())::float8 from public.sources where id = _g.key::bigint), 0) > 0 then 0 else 1 - case when _i.hash is null then 0 when _i.hash[width_bucket(hashtextextended(_k._rm_key::text collate "C", 0), _i.hash)] = hashtextextended(_k._rm_key::text collate "C", 0) then _i.n[width_bucket(hashtextextended(_k._rm_key::text collate "C", 0), _i.hash)] else 0 end end, floor(_t.tokens + 1e-06))
    and octet_length(_g.key) <= 2000 and coalesce(_g.paused_until <= now(), true) and coalesce(_g.closed_until <= now(), true)
  limit (select 1::bigint)
), _rm_held as materialized (
  -- locked only if nothing has changed since the snapshot
  select _s._rm_range, _l.spot from (select distinct _rm_range from _rm_turns) _s cross join _rm_known _i
  left join lateral (
    select _g.ctid as spot from public.rowmill_gates _g
    where lane = 'scrape' and dim = 'range:source_id' and _g.key = _i.first[_s._rm_range] and _g.version = _i.version[_s._rm_range]
    for no key update skip locked
  ) _l on true
), _rm_picked as materialized (
  -- as many rows of each key: others, where somebody has the first ones locked
  select _j.*, _h.spot as _spot, _t._rm_key::text as _key, _tokens, _speed, _size, _refilled from (
    select _rm_key, _rm_range, _tokens, _speed, _size, _refilled, _seen, count(*) as n from _rm_turns group by _rm_key, _rm_range, _tokens, _speed, _size, _refilled, _seen
  ) _t
  join _rm_held _h on _h._rm_range = _t._rm_range and _h.spot is not null
  join lateral (
    select 1 from public.rowmill_gates _g where lane = 'scrape' and dim = 'source_id' and _g.key = _t._rm_key::text and _g.version = _t._seen
    for no key update skip locked
  ) _u on true
  cross join lateral (
    select ctid, tableoid from public.scrape_jobs
    where source_id >= _t._rm_key::bigint and source_id <= _t._rm_key::bigint and status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
    order by source_id, created_at, id limit _t.n
    for no key update skip locked
  ) _j
), _rm_chosen as (
  select ctid, tableoid from _rm_picked
), _rm_bump as (
  update public.rowmill_gates _g set version = _g.version + 1, touched_at = now(), cells = (select _s._rm_key::text from (
    select _rm_key, bool_or(_seen is null) over (order by _rm_key) as new from _rm_turns
  ) _s where not _s.new order by _s._rm_key desc limit 1)
  where _g.ctid = any(array(select _spot from _rm_picked))
), _rm_tokens as (
  update public.rowmill_gates _g set version = _g.version + 1, touched_at = _p.now, tokens = _p.tokens,
    refilled_at = _p.refilled
  from (
    select _key, now() as now, nullif(min(_tokens) - count(*), 'infinity') as tokens,
      greatest(now(), coalesce(min(_refilled), now())) + case when min(_speed) > 0 then greatest(min((_tokens - _size) / nullif(_speed, 0) + extract(epoch from clock_timestamp() - now())::float8 + case when _size >= 2 then 0.025 else least(0.025, 0.02 / nullif(_speed, 0)) end), 0) * interval '1 second' else '0' end as refilled
    from _rm_picked group by _key
  ) _p
  where lane = 'scrape' and dim = 'source_id' and _g.key = _p._key
), _rm_taken as (
  update public.scrape_jobs set
    status = 'running',
    heartbeat_at = _rm_moment._rm_at,
    locked_at = _rm_moment._rm_at,
    locked_by = $1
  from (select clock_timestamp() as _rm_at from _rm_chosen having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from _rm_chosen)) and (tableoid = (select min(tableoid) from _rm_chosen) and tableoid = (select max(tableoid) from _rm_chosen) or (tableoid, ctid) in (select tableoid, ctid from _rm_chosen))
  returning public.scrape_jobs.*
)
select _rm_taken as _rm_job, _m._rm_missing
from (select (select array_agg(_rm_key::text order by _rm_key) from _rm_turns where _seen is null) as _rm_missing) _m left join _rm_taken on true
order by _rm_taken.created_at, _rm_taken.id
    loop
      _rm_keys := _rm_row._rm_missing;
      if not (_rm_row._rm_job is null) then
        _rm_any := true;
        return next _rm_row._rm_job;
      end if;
    end loop;
    insert into public.rowmill_gates (lane, dim, key, touched_at)
select 'scrape', 'source_id', _n.key, now() from (
  select unnest(_rm_keys) as key
  union
  select _f.key::text from (
    select source_id as key from public.scrape_jobs where source_id > (select (_rm_keys)[cardinality(_rm_keys)]::bigint) and status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
    order by source_id limit 2048
  ) _f where octet_length(_f.key::text) <= 2000
) _n order by _n.key collate "C"
on conflict do nothing;
    exit when _rm_any;
    end if;
    for _rm_row in
      with recursive _rm_known as materialized (
  select * from (
    select array_agg(_c.hash order by _c.hash) as hash, array_agg(_c.n order by _c.hash, _c.n) as n
    from (
      select _a.key, hashtextextended(_a.key::text collate "C", 0) as hash, count(*) as n
      from (
        select source_id as key from public.scrape_jobs
        where status = 'running' and source_id is not null
      ) _a group by 1
    ) _c
  ) _r, (
    select array_agg(_g.key order by _g.key) as first, array_agg(_g.version order by _g.key) as version
    from public.rowmill_gates _g where lane = 'scrape' and dim = 'range:source_id'
  ) _s, (
    select true as told, null::bigint as most
  ) _t
), _rm_walk as (
  select _r.* from (
    select _c._rm_key, row_number() over (partition by _c._rm_key order by _rm_o0, _rm_o1) as _rm_place,
      row_number() over () as _rm_n, (select greatest(32, least(1000, 1::bigint))::bigint) as _rm_most
    from (
      select * from (
        select source_id as _rm_key, created_at as _rm_o0, id as _rm_o1 from public.scrape_jobs where source_id is not null and status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
        order by source_id, created_at, id limit (select greatest(32, least(1000, 1::bigint))::bigint)
      ) _f order by _rm_key, _rm_o0, _rm_o1 limit 1000
    ) _c
  ) _r where coalesce((select paused_until from public.rowmill_gates where lane = '' and dim = '' and key = '') <= now(), true) and coalesce((select paused_until from public.rowmill_gates where lane = 'scrape' and dim = '' and key = '') <= now(), true)
  union all
  select _r.* from (
    select _w._rm_key, case when _w._rm_place = _w._rm_n then least(coalesce((select most from _rm_known), 1000), (select greatest(32, least(1000, 1::bigint))::bigint)) else (select greatest(32, least(1000, 1::bigint))::bigint) end as most from _rm_walk _w where _w._rm_n = _w._rm_most
  ) _w
  cross join lateral (
    select _c._rm_key, row_number() over (partition by _c._rm_key order by _rm_o0, _rm_o1) as _rm_place,
      row_number() over () as _rm_n, _w.most as _rm_most
    from (
      select * from (
        select source_id as _rm_key, created_at as _rm_o0, id as _rm_o1 from public.scrape_jobs where source_id > _w._rm_key and status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
        order by source_id, created_at, id limit _w.most
      ) _f order by _rm_key, _rm_o0, _rm_o1 limit 1000
    ) _c
  ) _r
), _rm_turns as materialized (
  -- read as the snapshot has it, and only as far as needed
  select _k._rm_key, coalesce(width_bucket(_k._rm_key::text collate "C", _i.first), 0) as _rm_range, _t.tokens as _tokens, _s.speed as _speed, _s.size as _size, _g.refilled_at as _refilled, _g.version as _seen
  from _rm_known _i cross join _rm_walk _k
  cross join lateral (
    select _k._rm_key::text as key, _o.version, _o.tokens, _o.refilled_at, _o.delay, _o.streak, _o.open_until, _o.closed_until, _o.paused_until, _o.most from (select) _e
    left join public.rowmill_gates _o on _i.told and lane = 'scrape' and dim = 'source_id' and _o.key = _k._rm_key::text limit 1) _g
  cross join lateral (select (select rate_limit_per_minute from public.sources where id = _g.key::bigint)::float8 as listed) _f
  cross join lateral (select case when _f.listed > 0 then _f.listed / 60.0 when _f.listed <= 0 then 0.0 end as speed, case when _f.listed > 0 then 2.0 else 0.0 end as size) _s
  cross join lateral (select case when _s.speed is null then 'infinity'::float8 else least(_s.size, coalesce(
    _g.tokens + greatest(extract(epoch from now() - _g.refilled_at), 0)::float8 * _s.speed,
    _s.size)) end as tokens) _t
  where _k._rm_place <= least(case when coalesce((select failure_streak from public.sources where id = _g.key::bigint), 0) < 3 then 'infinity'::float8 when coalesce((select extract(epoch from paused_until - now())::float8 from public.sources where id = _g.key::bigint), 0) > 0 then 0 else 1 - case when _i.hash is null then 0 when _i.hash[width_bucket(hashtextextended(_k._rm_key::text collate "C", 0), _i.hash)] = hashtextextended(_k._rm_key::text collate "C", 0) then _i.n[width_bucket(hashtextextended(_k._rm_key::text collate "C", 0), _i.hash)] else 0 end end, floor(_t.tokens + 1e-06))
    and octet_length(_g.key) <= 2000 and coalesce(_g.paused_until <= now(), true) and coalesce(_g.closed_until <= now(), true)
  limit (select 1::bigint)
), _rm_held as materialized (
  -- locked only if nothing has changed since the snapshot
  select _s._rm_range, _l.spot from (select distinct _rm_range from _rm_turns) _s cross join _rm_known _i
  left join lateral (
    select _g.ctid as spot from public.rowmill_gates _g
    where lane = 'scrape' and dim = 'range:source_id' and _g.key = _i.first[_s._rm_range] and _g.version = _i.version[_s._rm_range]
    for no key update skip locked
  ) _l on true
), _rm_picked as materialized (
  -- as many rows of each key: others, where somebody has the first ones locked
  select _j.*, _h.spot as _spot, _t._rm_key::text as _key, _tokens, _speed, _size, _refilled from (
    select _rm_key, _rm_range, _tokens, _speed, _size, _refilled, _seen, count(*) as n from _rm_turns group by _rm_key, _rm_range, _tokens, _speed, _size, _refilled, _seen
  ) _t
  join _rm_held _h on _h._rm_range = _t._rm_range and _h.spot is not null
  join lateral (
    select 1 from public.rowmill_gates _g where lane = 'scrape' and dim = 'source_id' and _g.key = _t._rm_key::text and _g.version = _t._seen
    for no key update skip locked
  ) _u on true
  cross join lateral (
    select ctid, tableoid from public.scrape_jobs
    where source_id >= _t._rm_key::bigint and source_id <= _t._rm_key::bigint and status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
    order by source_id, created_at, id limit _t.n
    for no key update skip locked
  ) _j
), _rm_chosen as (
  select ctid, tableoid from _rm_picked
), _rm_bump as (
  update public.rowmill_gates _g set version = _g.version + 1, touched_at = now(), cells = (select _s._rm_key::text from (
    select _rm_key, bool_or(_seen is null) over (order by _rm_key) as new from _rm_turns
  ) _s where not _s.new order by _s._rm_key desc limit 1)
  where _g.ctid = any(array(select _spot from _rm_picked))
), _rm_tokens as (
  update public.rowmill_gates _g set version = _g.version + 1, touched_at = _p.now, tokens = _p.tokens,
    refilled_at = _p.refilled
  from (
    select _key, now() as now, nullif(min(_tokens) - count(*), 'infinity') as tokens,
      greatest(now(), coalesce(min(_refilled), now())) + case when min(_speed) > 0 then greatest(min((_tokens - _size) / nullif(_speed, 0) + extract(epoch from clock_timestamp() - now())::float8 + case when _size >= 2 then 0.025 else least(0.025, 0.02 / nullif(_speed, 0)) end), 0) * interval '1 second' else '0' end as refilled
    from _rm_picked group by _key
  ) _p
  where lane = 'scrape' and dim = 'source_id' and _g.key = _p._key
), _rm_taken as (
  update public.scrape_jobs set
    status = 'running',
    heartbeat_at = _rm_moment._rm_at,
    locked_at = _rm_moment._rm_at,
    locked_by = $1
  from (select clock_timestamp() as _rm_at from _rm_chosen having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from _rm_chosen)) and (tableoid = (select min(tableoid) from _rm_chosen) and tableoid = (select max(tableoid) from _rm_chosen) or (tableoid, ctid) in (select tableoid, ctid from _rm_chosen))
  returning public.scrape_jobs.*
)
select _rm_taken as _rm_job, _m._rm_missing
from (select (select array_agg(_rm_key::text order by _rm_key) from _rm_turns where _seen is null) as _rm_missing) _m left join _rm_taken on true
order by _rm_taken.created_at, _rm_taken.id
    loop
      _rm_keys := _rm_row._rm_missing;
      if not (_rm_row._rm_job is null) then
        _rm_any := true;
        return next _rm_row._rm_job;
      end if;
    end loop;
    insert into public.rowmill_gates (lane, dim, key, touched_at)
select 'scrape', 'source_id', _n.key, now() from (
  select unnest(_rm_keys) as key
  union
  select _f.key::text from (
    select source_id as key from public.scrape_jobs where source_id > (select (_rm_keys)[cardinality(_rm_keys)]::bigint) and status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
    order by source_id limit 2048
  ) _f where octet_length(_f.key::text) <= 2000
) _n order by _n.key collate "C"
on conflict do nothing;
    exit when _rm_any;
    -- Somebody else may have had the keys locked at that moment.
    perform pg_catalog.pg_sleep(case when _rm_try = 2 then 0.02 * pg_catalog.random() else 0 end);
  end loop;
end
$rowmill$;

-- complete
create or replace function public.scrape_complete(id bigint, worker text, claimed_at timestamp with time zone, result jsonb default '{}'::jsonb)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_list text;
  _rm_count bigint;
  _rm_key text;
begin
  select source_id::text into _rm_key from public.scrape_jobs
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond')
    and status = 'running'
  for no key update;
  if not found then
    return false;
  end if;
  -- Where the key is well, and that was written a moment ago, there is nothing to lock and to write.
  if exists (select 1 from public.sources cross join (select clock_timestamp() + 0 * interval '1 second' as _rm_now, clock_timestamp() + -1.0 * interval '1 second' as _rm_before) _rm_s where id = _rm_key::bigint and (failure_streak <> 0 or paused_until is not null or last_success_at is null or last_success_at < _rm_s._rm_before)) then
    insert into public.rowmill_gates (lane, dim, key, touched_at)
    select 'scrape', 'source_id', _rm_key, now() where not exists (
      select 1 from public.rowmill_gates _g where lane = 'scrape' and dim = 'source_id' and _g.key = _rm_key)
    on conflict do nothing;
    perform 1 from public.rowmill_gates _g where lane = 'scrape' and dim = 'source_id' and _g.key = _rm_key for no key update;
    update public.sources set failure_streak = 0, paused_until = null, last_success_at = _rm_s._rm_now
    from (select clock_timestamp() + 0 * interval '1 second' as _rm_now, clock_timestamp() + -1.0 * interval '1 second' as _rm_before) _rm_s
    where id = _rm_key::bigint and (failure_streak <> 0 or paused_until is not null or last_success_at is null or last_success_at < _rm_s._rm_before);
  end if;
  if $4 is null or $4 = '{}'::jsonb then
    update public.scrape_jobs set
      status = 'succeeded',
      completed_at = now()
    where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond')
    and status = 'running';
    return found;
  end if;
  select pg_catalog.string_agg(k, ', '::text) into _rm_list
  from pg_catalog.jsonb_object_keys($4) k
  where k <> all (array['intake_id', 'source_id', 'query_params', 'attempts', 'retry_count', 'next_retry_at', 'locked_by', 'locked_at', 'heartbeat_at', 'created_at', 'completed_at', 'error_message']::text[]);
  if _rm_list is not null then
    raise exception using errcode = '22023', message = 'result has columns that it may not set: '::text || _rm_list,
      hint = 'the columns of scrape_jobs except its key and its state: intake_id, source_id, query_params, attempts, retry_count, next_retry_at, locked_by, locked_at, heartbeat_at, created_at, completed_at, error_message';
  end if;
  -- The columns of result are written with the outcome in one statement, typed by the table.
  select pg_catalog.string_agg(a, ', '::text) into _rm_list from (
    select pg_catalog.quote_ident(v.c) || ' = '::text || v.e from (values
      ('status'::text, '''succeeded'''::text),
      ('completed_at'::text, 'now()'::text)
    ) v(c, e) where not $4 ? v.c
    union all
    select pg_catalog.quote_ident(k) || ' = (select _rm_given.'::text || pg_catalog.quote_ident(k)
      || ' from pg_catalog.jsonb_populate_record(null::public.scrape_jobs, $4) _rm_given)'::text
    from pg_catalog.jsonb_object_keys($4) k
  ) s(a);
  execute 'update public.scrape_jobs set '::text || _rm_list || ' where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc(''milliseconds''::text, $3) and locked_at < (pg_catalog.date_trunc(''milliseconds''::text, $3) + interval ''1 millisecond'')
    and status = ''running'''::text
    using $1, $2, $3, $4;
  get diagnostics _rm_count = row_count;
  return _rm_count > 0;
end
$rowmill$;

-- fail
create or replace function public.scrape_fail(id bigint, worker text, claimed_at timestamp with time zone, error text default null, delay interval default null, permanent boolean default false, retry_after interval default null, closes text default null)
returns text
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_attempt bigint;
  _rm_limit bigint;
  _rm_delay double precision;
  _rm_key text;
begin
  if $8 <> 'lane' then
    raise exception using errcode = '22023', message = 'closes must be ''lane'' or null';
  end if;
  select coalesce(retry_count, 0) + 1, 6, source_id::text into _rm_attempt, _rm_limit, _rm_key from public.scrape_jobs
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond')
    and status = 'running'
  for no key update;
  if not found then
    return null;
  end if;
  if $8 = 'lane' and $7 > interval '0' then
    insert into public.rowmill_gates (lane, dim, key, touched_at) values ('scrape', '', '', now()) on conflict do nothing;
    update public.rowmill_gates _g set version = _g.version + 1, paused_until = _rm_s._rm_until, paused_at = _rm_s._rm_now,
      reason = 'the other side asked to wait'
    from (select clock_timestamp() as _rm_now, clock_timestamp() + $7 as _rm_until) _rm_s
    where lane = 'scrape' and dim = '' and key = '' and coalesce(_g.paused_until < _rm_s._rm_until, true);
  end if;
  if _rm_key is not null then
    insert into public.rowmill_gates (lane, dim, key, touched_at)
    select 'scrape', 'source_id', _rm_key, now() where not exists (
      select 1 from public.rowmill_gates _g where lane = 'scrape' and dim = 'source_id' and _g.key = _rm_key)
    on conflict do nothing;
    perform 1 from public.rowmill_gates _g where lane = 'scrape' and dim = 'source_id' and _g.key = _rm_key for no key update;
    if (case when coalesce($6, false) then 'permanent' when $7 is not null then 'rate' else 'transient' end) in ('transient', 'permanent', 'rate') then
      update public.sources set failure_streak = coalesce(failure_streak, 0) + 1, paused_until = case when coalesce(failure_streak, 0) + 1 >= 3 and not coalesce(paused_until > _rm_s._rm_now, false) then _rm_s._rm_until else paused_until end, last_failure_at = _rm_s._rm_at
    from (select clock_timestamp() + 0 * interval '1 second' as _rm_now, clock_timestamp() + 300.0 * interval '1 second' as _rm_until, clock_timestamp() + 0 * interval '1 second' as _rm_at) _rm_s
    where id = _rm_key::bigint;
    end if;
    if $7 > interval '0' then
      update public.rowmill_gates _g set version = _g.version + 1,
        closed_until = greatest(_g.closed_until, _rm_s._rm_until)
      from (select clock_timestamp() as _rm_now, clock_timestamp() + $7 as _rm_until) _rm_s
      where lane = 'scrape' and dim = 'source_id' and _g.key = _rm_key;
    end if;
  end if;
  if coalesce($6, false) or _rm_attempt >= _rm_limit then
    update public.scrape_jobs set
      status = 'failed',
      completed_at = now(),
      retry_count = least(coalesce(retry_count, 0), 2147483646) + 1,
      error_message = pg_catalog.left(coalesce($4, 'failed'::text), 2000)
    where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond')
    and status = 'running';
    return 'dead';
  end if;
  _rm_delay := least(greatest(coalesce(
    extract(epoch from $5)::double precision,
    extract(epoch from $7)::double precision,
    least(60.0::double precision * pg_catalog.power(2::double precision, least(_rm_attempt - 1::bigint, 62::bigint)::double precision), 86400.0::double precision)
  ), 0::double precision), 3153600000.0::double precision);
  update public.scrape_jobs set
    status = 'retryable',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null,
    next_retry_at = now() + _rm_delay * interval '1 second',
    retry_count = least(coalesce(retry_count, 0), 2147483646) + 1,
    error_message = pg_catalog.left(coalesce($4, 'failed'::text), 2000)
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond')
    and status = 'running';
  return 'retry';
end
$rowmill$;
