-- claim
create or replace function public.enrichment_claim_next(worker text)
returns setof public.enrichment_jobs
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
    or not exists (select 1 from public.enrichment_jobs where status in ('queued', 'failed') and run_after <= now())
  then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t.locked_by as _worker, coalesce(attempts, 0) > coalesce(max_attempts, 2) + 3 as _poison from public.enrichment_jobs t
      where t.status = 'running' and (coalesce(case when t.locked_at < now() + interval '600.0 seconds' then t.locked_at end, case when t.updated_at < now() + interval '600.0 seconds' then t.updated_at end) < now() - interval '600.0 seconds' or coalesce(case when t.locked_at < now() + interval '600.0 seconds' then t.locked_at end, case when t.updated_at < now() + interval '600.0 seconds' then t.updated_at end) is null)
      limit 100
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public.enrichment_jobs t set
          status = 'queued',
          locked_by = null,
          locked_at = null,
          updated_at = now()
        where t.id = _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.enrichment_jobs t set
            status = 'dead',
            updated_at = now(),
            last_error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'enrichment_jobs', sqlerrm;
        end;
      end;
    end loop;
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select ctid, tableoid from public.enrichment_jobs
    where status in ('queued', 'failed') and run_after <= now()
    order by run_after, id
    limit 1
    for no key update skip locked
  ), taken as (
    update public.enrichment_jobs set
      status = 'running',
      updated_at = _rm_moment._rm_at,
      locked_at = _rm_moment._rm_at,
      locked_by = $1,
      attempts = coalesce(attempts, 0) + 1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
    returning public.enrichment_jobs.*
  )
  select * from taken order by run_after, id;
end
$rowmill$;

-- claim_batch
create or replace function public.enrichment_claim_batch(worker text, batch integer default 10)
returns setof public.enrichment_jobs
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
    or not exists (select 1 from public.enrichment_jobs where status in ('queued', 'failed') and run_after <= now())
  then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t.locked_by as _worker, coalesce(attempts, 0) > coalesce(max_attempts, 2) + 3 as _poison from public.enrichment_jobs t
      where t.status = 'running' and (coalesce(case when t.locked_at < now() + interval '600.0 seconds' then t.locked_at end, case when t.updated_at < now() + interval '600.0 seconds' then t.updated_at end) < now() - interval '600.0 seconds' or coalesce(case when t.locked_at < now() + interval '600.0 seconds' then t.locked_at end, case when t.updated_at < now() + interval '600.0 seconds' then t.updated_at end) is null)
      limit 100
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public.enrichment_jobs t set
          status = 'queued',
          locked_by = null,
          locked_at = null,
          updated_at = now()
        where t.id = _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.enrichment_jobs t set
            status = 'dead',
            updated_at = now(),
            last_error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'enrichment_jobs', sqlerrm;
        end;
      end;
    end loop;
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select ctid, tableoid from public.enrichment_jobs
    where status in ('queued', 'failed') and run_after <= now()
    order by run_after, id
    limit greatest(coalesce($2, 1), 0)
    for no key update skip locked
  ), taken as (
    update public.enrichment_jobs set
      status = 'running',
      updated_at = _rm_moment._rm_at,
      locked_at = _rm_moment._rm_at,
      locked_by = $1,
      attempts = coalesce(attempts, 0) + 1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
    returning public.enrichment_jobs.*
  )
  select * from taken order by run_after, id;
end
$rowmill$;

-- complete
create or replace function public.enrichment_complete(id uuid, worker text, claimed_at timestamp with time zone, attempts integer, result jsonb default '{}'::jsonb)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_list text;
  _rm_count bigint;
begin
  if $5 is null or $5 = '{}'::jsonb then
    update public.enrichment_jobs set
      status = 'succeeded',
      updated_at = now()
    where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running';
    return found;
  end if;
  select pg_catalog.string_agg(k, ', '::text) into _rm_list
  from pg_catalog.jsonb_object_keys($5) k
  where k <> all (array['link_canonical_id', 'attempts', 'max_attempts', 'run_after', 'locked_at', 'locked_by', 'last_error', 'created_at', 'updated_at', 'url', 'domain']::text[]);
  if _rm_list is not null then
    raise exception using errcode = '22023', message = 'result has columns that it may not set: '::text || _rm_list,
      hint = 'the columns of enrichment_jobs except its key and its state: link_canonical_id, attempts, max_attempts, run_after, locked_at, locked_by, last_error, created_at, updated_at, url, domain';
  end if;
  -- The columns of result are written with the outcome in one statement, typed by the table.
  select pg_catalog.string_agg(a, ', '::text) into _rm_list from (
    select pg_catalog.quote_ident(v.c) || ' = '::text || v.e from (values
      ('status'::text, '''succeeded'''::text),
      ('updated_at'::text, 'now()'::text)
    ) v(c, e) where not $5 ? v.c
    union all
    select pg_catalog.quote_ident(k) || ' = (select _rm_given.'::text || pg_catalog.quote_ident(k)
      || ' from pg_catalog.jsonb_populate_record(null::public.enrichment_jobs, $5) _rm_given)'::text
    from pg_catalog.jsonb_object_keys($5) k
  ) s(a);
  execute 'update public.enrichment_jobs set '::text || _rm_list || ' where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc(''milliseconds''::text, $3) and locked_at < (pg_catalog.date_trunc(''milliseconds''::text, $3) + interval ''1 millisecond'') and attempts = $4
    and status = ''running'''::text
    using $1, $2, $3, $4, $5;
  get diagnostics _rm_count = row_count;
  return _rm_count > 0;
end
$rowmill$;

-- fail
create or replace function public.enrichment_fail(id uuid, worker text, claimed_at timestamp with time zone, attempts integer, error text default null, delay interval default null, permanent boolean default false)
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
  select greatest(coalesce(attempts, 1), 1), coalesce(max_attempts, 2) into _rm_attempt, _rm_limit from public.enrichment_jobs
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running'
  for no key update;
  if not found then
    return null;
  end if;
  if coalesce($7, false) or _rm_attempt >= _rm_limit then
    update public.enrichment_jobs set
      status = 'dead',
      updated_at = now(),
      last_error = pg_catalog.left(coalesce($5, 'failed'::text), 2000)
    where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running';
    return 'dead';
  end if;
  _rm_delay := least(greatest(coalesce(
    extract(epoch from $6)::double precision,
    300.0::double precision
  ), 0::double precision), 3153600000.0::double precision);
  update public.enrichment_jobs set
    status = 'failed',
    updated_at = now(),
    locked_by = null,
    locked_at = null,
    run_after = now() + _rm_delay * interval '1 second',
    last_error = pg_catalog.left(coalesce($5, 'failed'::text), 2000)
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running';
  return 'retry';
end
$rowmill$;

-- release
create or replace function public.enrichment_release(id uuid, worker text, claimed_at timestamp with time zone, attempts integer)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
begin
  update public.enrichment_jobs set
    status = 'queued',
    updated_at = now(),
    locked_by = null,
    locked_at = null,
    attempts = greatest(attempts - 1, 0)
  where id = $1 and locked_by = $2 and locked_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and locked_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running';
  return found;
end
$rowmill$;

-- sweep
create or replace function public.enrichment_sweep(batch integer default 1000)
returns table (previous_worker text, poison boolean, id uuid)
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_row record;
begin
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t.locked_by as _worker, coalesce(attempts, 0) > coalesce(max_attempts, 2) + 3 as _poison from public.enrichment_jobs t
      where t.status = 'running' and (coalesce(case when t.locked_at < now() + interval '600.0 seconds' then t.locked_at end, case when t.updated_at < now() + interval '600.0 seconds' then t.updated_at end) < now() - interval '600.0 seconds' or coalesce(case when t.locked_at < now() + interval '600.0 seconds' then t.locked_at end, case when t.updated_at < now() + interval '600.0 seconds' then t.updated_at end) is null)
      limit greatest(coalesce($1, 0), 0)
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public.enrichment_jobs t set
          status = 'queued',
          locked_by = null,
          locked_at = null,
          updated_at = now()
        where t.id = _rm_row._k0;
        return query select _rm_row._worker, false, _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.enrichment_jobs t set
            status = 'dead',
            updated_at = now(),
            last_error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        return query select _rm_row._worker, true, _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'enrichment_jobs', sqlerrm;
        end;
      end;
    end loop;
end
$rowmill$;
