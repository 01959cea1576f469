-- claim
create or replace function public.scrape_claim_next(worker text)
returns setof public.scrape_jobs
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
    or not exists (select 1 from public.scrape_jobs where status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled))))
  then
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
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select ctid, tableoid from public.scrape_jobs
    where status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
    order by created_at, id
    limit 1
    for no key update skip locked
  ), taken as (
    update public.scrape_jobs set
      status = 'running',
      heartbeat_at = _rm_moment._rm_at,
      locked_at = _rm_moment._rm_at,
      locked_by = $1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
    returning public.scrape_jobs.*
  )
  select * from taken order by created_at, id;
end
$rowmill$;

-- claim_batch
create or replace function public.scrape_claim_batch(worker text, batch integer default 10)
returns setof public.scrape_jobs
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
    or not exists (select 1 from public.scrape_jobs where status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled))))
  then
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
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select ctid, tableoid from public.scrape_jobs
    where status in ('pending', 'retryable') and (next_retry_at is null or next_retry_at <= now()) and ((source_id IN ( SELECT sources.id
           FROM public.sources
          WHERE sources.enabled)))
    order by created_at, id
    limit greatest(coalesce($2, 1), 0)
    for no key update skip locked
  ), taken as (
    update public.scrape_jobs set
      status = 'running',
      heartbeat_at = _rm_moment._rm_at,
      locked_at = _rm_moment._rm_at,
      locked_by = $1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
    returning public.scrape_jobs.*
  )
  select * from taken order by created_at, id;
end
$rowmill$;

-- heartbeat
create or replace function public.scrape_heartbeat(id bigint, worker text, claimed_at timestamp with time zone)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
begin
  update public.scrape_jobs set heartbeat_at = _rm_moment._rm_at
from (select clock_timestamp() as _rm_at) _rm_moment
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond')
    and status = 'running';
  return found;
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
begin
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
create or replace function public.scrape_fail(id bigint, worker text, claimed_at timestamp with time zone, error text default null, delay interval default null, permanent boolean default false)
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
  select coalesce(retry_count, 0) + 1, 6 into _rm_attempt, _rm_limit from public.scrape_jobs
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond')
    and status = 'running'
  for no key update;
  if not found then
    return null;
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

-- release
create or replace function public.scrape_release(id bigint, worker text, claimed_at timestamp with time zone)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
begin
  update public.scrape_jobs set
    status = 'pending',
    locked_by = null,
    locked_at = null,
    heartbeat_at = null
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond')
    and status = 'running';
  return found;
end
$rowmill$;

-- sweep
create or replace function public.scrape_sweep(batch integer default 1000)
returns table (previous_worker text, poison boolean, id bigint)
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_row record;
begin
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t.locked_by as _worker, coalesce(attempts, 0) >= 6 + 3 - coalesce(retry_count, 0) as _poison from public.scrape_jobs t
      where t.status = 'running' and (coalesce(case when t.heartbeat_at < now() + interval '300.0 seconds' then t.heartbeat_at end, case when t.locked_at < now() + interval '300.0 seconds' then t.locked_at end) < now() - interval '300.0 seconds' or coalesce(case when t.heartbeat_at < now() + interval '300.0 seconds' then t.heartbeat_at end, case when t.locked_at < now() + interval '300.0 seconds' then t.locked_at end) is null)
      limit greatest(coalesce($1, 0), 0)
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
        return query select _rm_row._worker, false, _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.scrape_jobs t set
            status = 'failed',
            completed_at = now(),
            error_message = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000),
            attempts = least(coalesce(attempts, 0), 2147483646) + 1
          where t.id = _rm_row._k0;
        return query select _rm_row._worker, true, _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'scrape_jobs', sqlerrm;
        end;
      end;
    end loop;
end
$rowmill$;
