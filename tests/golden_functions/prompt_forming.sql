-- claim
create or replace function public.prompt_forming_claim_next(worker text)
returns setof public."AnalysisJob"
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
    or not exists (select 1 from public."AnalysisJob" where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = false and ("runAfter" is null or "runAfter" <= now()) and ("updatedAt" is null or "updatedAt" < now() - interval '30.0 seconds') and coalesce("retryCount", 0) < 3)
  then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t."lockedBy" as _worker, coalesce("retryCount", 0) >= 3 - 1 as _poison from public."AnalysisJob" t
      where t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and (coalesce(case when t."heartbeatAt" < now() + interval '300.0 seconds' then t."heartbeatAt" end, case when t."updatedAt" < now() + interval '300.0 seconds' then t."updatedAt" end) < now() - interval '300.0 seconds' or coalesce(case when t."heartbeatAt" < now() + interval '300.0 seconds' then t."heartbeatAt" end, case when t."updatedAt" < now() + interval '300.0 seconds' then t."updatedAt" end) is null)
      limit 100
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public."AnalysisJob" t set
          status = 'prompt-forming',
          "currentStep" = 'prompt-forming',
          "inProgress" = false,
          "lockedBy" = null,
          "heartbeatAt" = null,
          "updatedAt" = now(),
          "retryCount" = least(coalesce("retryCount", 0), 2147483646) + 1
        where t.id = _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public."AnalysisJob" t set
            status = 'prompt-forming',
            "currentStep" = 'prompt-forming',
            "inProgress" = false,
            "updatedAt" = now(),
            "retryCount" = greatest(least(coalesce("retryCount", 0), 2147483646) + 1, 3),
            error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'AnalysisJob', sqlerrm;
        end;
      end;
    end loop;
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select ctid, tableoid from public."AnalysisJob"
    where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = false and ("runAfter" is null or "runAfter" <= now()) and ("updatedAt" is null or "updatedAt" < now() - interval '30.0 seconds') and coalesce("retryCount", 0) < 3
    order by "createdAt", id
    limit 1
    for no key update skip locked
  ), taken as (
    update public."AnalysisJob" set
      "inProgress" = true,
      "updatedAt" = _rm_moment._rm_at,
      "heartbeatAt" = _rm_moment._rm_at,
      "lockedBy" = $1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
    returning public."AnalysisJob".*
  )
  select * from taken order by "createdAt", id;
end
$rowmill$;

-- claim_batch
create or replace function public.prompt_forming_claim_batch(worker text, batch integer default 10)
returns setof public."AnalysisJob"
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
    or not exists (select 1 from public."AnalysisJob" where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = false and ("runAfter" is null or "runAfter" <= now()) and ("updatedAt" is null or "updatedAt" < now() - interval '30.0 seconds') and coalesce("retryCount", 0) < 3)
  then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t."lockedBy" as _worker, coalesce("retryCount", 0) >= 3 - 1 as _poison from public."AnalysisJob" t
      where t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and (coalesce(case when t."heartbeatAt" < now() + interval '300.0 seconds' then t."heartbeatAt" end, case when t."updatedAt" < now() + interval '300.0 seconds' then t."updatedAt" end) < now() - interval '300.0 seconds' or coalesce(case when t."heartbeatAt" < now() + interval '300.0 seconds' then t."heartbeatAt" end, case when t."updatedAt" < now() + interval '300.0 seconds' then t."updatedAt" end) is null)
      limit 100
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public."AnalysisJob" t set
          status = 'prompt-forming',
          "currentStep" = 'prompt-forming',
          "inProgress" = false,
          "lockedBy" = null,
          "heartbeatAt" = null,
          "updatedAt" = now(),
          "retryCount" = least(coalesce("retryCount", 0), 2147483646) + 1
        where t.id = _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public."AnalysisJob" t set
            status = 'prompt-forming',
            "currentStep" = 'prompt-forming',
            "inProgress" = false,
            "updatedAt" = now(),
            "retryCount" = greatest(least(coalesce("retryCount", 0), 2147483646) + 1, 3),
            error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'AnalysisJob', sqlerrm;
        end;
      end;
    end loop;
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select ctid, tableoid from public."AnalysisJob"
    where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = false and ("runAfter" is null or "runAfter" <= now()) and ("updatedAt" is null or "updatedAt" < now() - interval '30.0 seconds') and coalesce("retryCount", 0) < 3
    order by "createdAt", id
    limit greatest(coalesce($2, 1), 0)
    for no key update skip locked
  ), taken as (
    update public."AnalysisJob" set
      "inProgress" = true,
      "updatedAt" = _rm_moment._rm_at,
      "heartbeatAt" = _rm_moment._rm_at,
      "lockedBy" = $1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
    returning public."AnalysisJob".*
  )
  select * from taken order by "createdAt", id;
end
$rowmill$;

-- heartbeat
create or replace function public.prompt_forming_heartbeat(id text, worker text)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
begin
  update public."AnalysisJob" set "heartbeatAt" = _rm_moment._rm_at
from (select clock_timestamp() as _rm_at) _rm_moment
  where id = $1 and "lockedBy" = $2
    and status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = true;
  return found;
end
$rowmill$;

-- complete
create or replace function public.prompt_forming_complete(id text, worker text, result jsonb default '{}'::jsonb)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_list text;
  _rm_count bigint;
begin
  if $3 is null or $3 = '{}'::jsonb then
    update public."AnalysisJob" set
      status = 'model-analysis',
      "currentStep" = 'model-analysis',
      "inProgress" = false,
      "updatedAt" = now()
    where id = $1 and "lockedBy" = $2
    and status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = true;
    return found;
  end if;
  select pg_catalog.string_agg(k, ', '::text) into _rm_list
  from pg_catalog.jsonb_object_keys($3) k
  where k <> all (array['retryCount', 'extractedInfo', 'createdAt', 'updatedAt', 'lockedBy', 'heartbeatAt', 'runAfter', 'error']::text[]);
  if _rm_list is not null then
    raise exception using errcode = '22023', message = 'result has columns that it may not set: '::text || _rm_list,
      hint = 'the columns of AnalysisJob except its key and its state: retryCount, extractedInfo, createdAt, updatedAt, lockedBy, heartbeatAt, runAfter, error';
  end if;
  -- The columns of result are written with the outcome in one statement, typed by the table.
  select pg_catalog.string_agg(a, ', '::text) into _rm_list from (
    select pg_catalog.quote_ident(v.c) || ' = '::text || v.e from (values
      ('status'::text, '''model-analysis'''::text),
      ('currentStep'::text, '''model-analysis'''::text),
      ('inProgress'::text, 'false'::text),
      ('updatedAt'::text, 'now()'::text)
    ) v(c, e) where not $3 ? v.c
    union all
    select pg_catalog.quote_ident(k) || ' = (select _rm_given.'::text || pg_catalog.quote_ident(k)
      || ' from pg_catalog.jsonb_populate_record(null::public."AnalysisJob", $3) _rm_given)'::text
    from pg_catalog.jsonb_object_keys($3) k
  ) s(a);
  execute 'update public."AnalysisJob" set '::text || _rm_list || ' where id = $1 and "lockedBy" = $2
    and status = ''prompt-forming'' and "currentStep" = ''prompt-forming'' and "inProgress" = true'::text
    using $1, $2, $3;
  get diagnostics _rm_count = row_count;
  return _rm_count > 0;
end
$rowmill$;

-- fail
create or replace function public.prompt_forming_fail(id text, worker text, error text default null, delay interval default null, permanent boolean default false)
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
  select coalesce("retryCount", 0) + 1, 3 into _rm_attempt, _rm_limit from public."AnalysisJob"
  where id = $1 and "lockedBy" = $2
    and status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = true
  for no key update;
  if not found then
    return null;
  end if;
  if coalesce($5, false) or _rm_attempt >= _rm_limit then
    update public."AnalysisJob" set
      status = 'prompt-forming',
      "currentStep" = 'prompt-forming',
      "inProgress" = false,
      "updatedAt" = now(),
      "retryCount" = greatest(least(coalesce("retryCount", 0), 2147483646) + 1, 3),
      error = pg_catalog.left(coalesce($3, 'failed'::text), 2000)
    where id = $1 and "lockedBy" = $2
    and status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = true;
    return 'dead';
  end if;
  _rm_delay := least(greatest(coalesce(
    extract(epoch from $4)::double precision,
    least(15.0::double precision * pg_catalog.power(2::double precision, least(_rm_attempt - 1::bigint, 62::bigint)::double precision), 86400.0::double precision) * (0.5::double precision + 0.5::double precision * pg_catalog.random())
  ), 0::double precision), 3153600000.0::double precision);
  update public."AnalysisJob" set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = false,
    "updatedAt" = now(),
    "lockedBy" = null,
    "heartbeatAt" = null,
    "runAfter" = now() + _rm_delay * interval '1 second',
    "retryCount" = least(coalesce("retryCount", 0), 2147483646) + 1,
    error = pg_catalog.left(coalesce($3, 'failed'::text), 2000)
  where id = $1 and "lockedBy" = $2
    and status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = true;
  return 'retry';
end
$rowmill$;

-- release
create or replace function public.prompt_forming_release(id text, worker text)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
begin
  update public."AnalysisJob" set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = false,
    "updatedAt" = now(),
    "lockedBy" = null,
    "heartbeatAt" = null
  where id = $1 and "lockedBy" = $2
    and status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = true;
  return found;
end
$rowmill$;

-- sweep
create or replace function public.prompt_forming_sweep(batch integer default 1000)
returns table (previous_worker text, poison boolean, id text)
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_row record;
begin
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t."lockedBy" as _worker, coalesce("retryCount", 0) >= 3 - 1 as _poison from public."AnalysisJob" t
      where t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and (coalesce(case when t."heartbeatAt" < now() + interval '300.0 seconds' then t."heartbeatAt" end, case when t."updatedAt" < now() + interval '300.0 seconds' then t."updatedAt" end) < now() - interval '300.0 seconds' or coalesce(case when t."heartbeatAt" < now() + interval '300.0 seconds' then t."heartbeatAt" end, case when t."updatedAt" < now() + interval '300.0 seconds' then t."updatedAt" end) is null)
      limit greatest(coalesce($1, 0), 0)
      for no key update skip locked
    loop
      begin
        if _rm_row._poison then
          raise exception using message = 'taken back too often: its worker died or stopped renewing in every run';
        end if;
        update public."AnalysisJob" t set
          status = 'prompt-forming',
          "currentStep" = 'prompt-forming',
          "inProgress" = false,
          "lockedBy" = null,
          "heartbeatAt" = null,
          "updatedAt" = now(),
          "retryCount" = least(coalesce("retryCount", 0), 2147483646) + 1
        where t.id = _rm_row._k0;
        return query select _rm_row._worker, false, _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public."AnalysisJob" t set
            status = 'prompt-forming',
            "currentStep" = 'prompt-forming',
            "inProgress" = false,
            "updatedAt" = now(),
            "retryCount" = greatest(least(coalesce("retryCount", 0), 2147483646) + 1, 3),
            error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        return query select _rm_row._worker, true, _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'AnalysisJob', sqlerrm;
        end;
      end;
    end loop;
end
$rowmill$;
