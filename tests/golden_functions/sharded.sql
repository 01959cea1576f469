-- claim
create or replace function public.jobs_claim_next(worker text)
returns setof public.jobs
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_row record;
begin
  if $1 is null or $1 = ''::text then
    raise exception using errcode = '22023', message = 'a claim needs the name of its worker';
  end if;
  -- Rows whose holder is gone go back first: where nothing else is ready, and once in 60 s in any case,
  -- so that a lane that is never empty is swept too.
  if pg_catalog.mod(pg_catalog.floor(extract(epoch from pg_catalog.clock_timestamp()))::bigint, 60::bigint) = 0::bigint
    or not exists (select 1 from public.jobs where status = 'ready' and tenant = 'a')
  then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.tenant as _k0, t.id as _k1, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison from public.jobs t
      where t.status = 'running' and t.tenant = 'a' and (case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds' or case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end is null)
      limit 100
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public.jobs t set
          status = 'ready',
          worker = null,
          claimed_at = null
        where t.tenant = _rm_row._k0 and t.id = _rm_row._k1 and t.tenant = 'a';
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.jobs t set
            status = 'dead'
          where t.tenant = _rm_row._k0 and t.id = _rm_row._k1 and t.tenant = 'a';
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'jobs', sqlerrm;
        end;
      end;
    end loop;
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select tenant, id from public.jobs
    where status = 'ready' and tenant = 'a'
    order by tenant, id
    limit 1
    for no key update skip locked
  ), taken as (
    update public.jobs set
      status = 'running',
      claimed_at = _rm_moment._rm_at,
      worker = $1,
      attempts = coalesce(attempts, 0) + 1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where (tenant, id) in (select tenant, id from picked) and tenant = 'a'
    returning public.jobs.*
  )
  select * from taken order by tenant, id;
end
$rowmill$;

-- claim_batch
create or replace function public.jobs_claim_batch(worker text, batch integer default 10)
returns setof public.jobs
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_row record;
begin
  if $1 is null or $1 = ''::text then
    raise exception using errcode = '22023', message = 'a claim needs the name of its worker';
  end if;
  -- Rows whose holder is gone go back first: where nothing else is ready, and once in 60 s in any case,
  -- so that a lane that is never empty is swept too.
  if pg_catalog.mod(pg_catalog.floor(extract(epoch from pg_catalog.clock_timestamp()))::bigint, 60::bigint) = 0::bigint
    or not exists (select 1 from public.jobs where status = 'ready' and tenant = 'a')
  then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.tenant as _k0, t.id as _k1, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison from public.jobs t
      where t.status = 'running' and t.tenant = 'a' and (case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds' or case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end is null)
      limit 100
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public.jobs t set
          status = 'ready',
          worker = null,
          claimed_at = null
        where t.tenant = _rm_row._k0 and t.id = _rm_row._k1 and t.tenant = 'a';
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.jobs t set
            status = 'dead'
          where t.tenant = _rm_row._k0 and t.id = _rm_row._k1 and t.tenant = 'a';
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'jobs', sqlerrm;
        end;
      end;
    end loop;
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select tenant, id from public.jobs
    where status = 'ready' and tenant = 'a'
    order by tenant, id
    limit greatest(coalesce($2, 1), 0)
    for no key update skip locked
  ), taken as (
    update public.jobs set
      status = 'running',
      claimed_at = _rm_moment._rm_at,
      worker = $1,
      attempts = coalesce(attempts, 0) + 1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where (tenant, id) in (select tenant, id from picked) and tenant = 'a'
    returning public.jobs.*
  )
  select * from taken order by tenant, id;
end
$rowmill$;

-- complete
create or replace function public.jobs_complete(tenant text, id integer, worker text, claimed_at timestamp with time zone, attempts smallint, result jsonb default '{}'::jsonb)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_list text;
  _rm_count bigint;
begin
  if $6 is null or $6 = '{}'::jsonb then
    update public.jobs set
      status = 'done'
    where tenant = $1 and id = $2 and worker = $3 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $4) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $4) + interval '1 millisecond') and attempts = $5
    and status = 'running' and tenant = 'a';
    return found;
  end if;
  select pg_catalog.string_agg(k, ', '::text) into _rm_list
  from pg_catalog.jsonb_object_keys($6) k
  where k <> all (array['worker', 'claimed_at', 'attempts', 'expires_at']::text[]);
  if _rm_list is not null then
    raise exception using errcode = '22023', message = 'result has columns that it may not set: '::text || _rm_list,
      hint = 'the columns of jobs except its key and its state: worker, claimed_at, attempts, expires_at';
  end if;
  -- The columns of result are written with the outcome in one statement, typed by the table.
  select pg_catalog.string_agg(a, ', '::text) into _rm_list from (
    select pg_catalog.quote_ident(v.c) || ' = '::text || v.e from (values
      ('status'::text, '''done'''::text)
    ) v(c, e) where not $6 ? v.c
    union all
    select pg_catalog.quote_ident(k) || ' = (select _rm_given.'::text || pg_catalog.quote_ident(k)
      || ' from pg_catalog.jsonb_populate_record(null::public.jobs, $6) _rm_given)'::text
    from pg_catalog.jsonb_object_keys($6) k
  ) s(a);
  execute 'update public.jobs set '::text || _rm_list || ' where tenant = $1 and id = $2 and worker = $3 and claimed_at >= pg_catalog.date_trunc(''milliseconds''::text, $4) and claimed_at < (pg_catalog.date_trunc(''milliseconds''::text, $4) + interval ''1 millisecond'') and attempts = $5
    and status = ''running'' and tenant = ''a'''::text
    using $1, $2, $3, $4, $5, $6;
  get diagnostics _rm_count = row_count;
  return _rm_count > 0;
end
$rowmill$;

-- fail
create or replace function public.jobs_fail(tenant text, id integer, worker text, claimed_at timestamp with time zone, attempts smallint, error text default null, delay interval default null, permanent boolean default false)
returns text
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_attempt bigint;
  _rm_limit bigint;
  _rm_delay double precision;
begin
  select greatest(coalesce(attempts, 1), 1), 5 into _rm_attempt, _rm_limit from public.jobs
  where tenant = $1 and id = $2 and worker = $3 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $4) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $4) + interval '1 millisecond') and attempts = $5
    and status = 'running' and tenant = 'a'
  for no key update;
  if not found then
    return null;
  end if;
  if coalesce($8, false) or _rm_attempt >= _rm_limit then
    update public.jobs set
      status = 'dead'
    where tenant = $1 and id = $2 and worker = $3 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $4) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $4) + interval '1 millisecond') and attempts = $5
    and status = 'running' and tenant = 'a';
    return 'dead';
  end if;
  _rm_delay := least(greatest(coalesce(
    extract(epoch from $7)::double precision,
    least(15.0::double precision * pg_catalog.power(2::double precision, least(_rm_attempt - 1::bigint, 62::bigint)::double precision), 86400.0::double precision) * (0.5::double precision + 0.5::double precision * pg_catalog.random())
  ), 0::double precision), 3153600000.0::double precision);
  update public.jobs set
    status = 'ready',
    worker = null,
    claimed_at = null
  where tenant = $1 and id = $2 and worker = $3 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $4) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $4) + interval '1 millisecond') and attempts = $5
    and status = 'running' and tenant = 'a';
  return 'retry';
end
$rowmill$;

-- release
create or replace function public.jobs_release(tenant text, id integer, worker text, claimed_at timestamp with time zone, attempts smallint)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
begin
  update public.jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    attempts = greatest(attempts - 1, 0)
  where tenant = $1 and id = $2 and worker = $3 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $4) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $4) + interval '1 millisecond') and attempts = $5
    and status = 'running' and tenant = 'a';
  return found;
end
$rowmill$;

-- sweep
create or replace function public.jobs_sweep(batch integer default 1000)
returns table (previous_worker character varying(20), poison boolean, tenant text, id integer)
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_row record;
begin
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.tenant as _k0, t.id as _k1, t.worker as _worker, coalesce(attempts, 0) > 5 + 3 as _poison from public.jobs t
      where t.status = 'running' and t.tenant = 'a' and (case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds' or case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end is null)
      limit greatest(coalesce($1, 0), 0)
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public.jobs t set
          status = 'ready',
          worker = null,
          claimed_at = null
        where t.tenant = _rm_row._k0 and t.id = _rm_row._k1 and t.tenant = 'a';
        return query select _rm_row._worker, false, _rm_row._k0, _rm_row._k1;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.jobs t set
            status = 'dead'
          where t.tenant = _rm_row._k0 and t.id = _rm_row._k1 and t.tenant = 'a';
        return query select _rm_row._worker, true, _rm_row._k0, _rm_row._k1;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'jobs', sqlerrm;
        end;
      end;
    end loop;
end
$rowmill$;
