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
    or not exists (select 1 from public.jobs where status = 'ready')
  then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t.worker as _worker, coalesce(attempts, 0) > 3 + 3 as _poison from public.jobs t
      where t.status = 'running' and (case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds' or case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end is null)
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
        where t.id = _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.jobs t set
            status = 'dead',
            error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'jobs', sqlerrm;
        end;
      end;
    end loop;
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select ctid, tableoid from public.jobs
    where status = 'ready'
    order by id
    limit 1
    for no key update skip locked
  ), taken as (
    update public.jobs set
      status = 'running',
      claimed_at = _rm_moment._rm_at,
      worker = $1,
      attempts = coalesce(attempts, 0) + 1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
    returning public.jobs.*
  )
  select * from taken order by id;
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
    or not exists (select 1 from public.jobs where status = 'ready')
  then
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t.worker as _worker, coalesce(attempts, 0) > 3 + 3 as _poison from public.jobs t
      where t.status = 'running' and (case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds' or case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end is null)
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
        where t.id = _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.jobs t set
            status = 'dead',
            error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'jobs', sqlerrm;
        end;
      end;
    end loop;
  end if;
  -- Locked by somebody else means: being claimed. Such rows are passed over, nobody waits, nobody gets a row twice.
  return query
  with picked as materialized (
    select ctid, tableoid from public.jobs
    where status = 'ready'
    order by id
    limit greatest(coalesce($2, 1), 0)
    for no key update skip locked
  ), taken as (
    update public.jobs set
      status = 'running',
      claimed_at = _rm_moment._rm_at,
      worker = $1,
      attempts = coalesce(attempts, 0) + 1
    from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
    where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
    returning public.jobs.*
  )
  select * from taken order by id;
end
$rowmill$;

-- complete
create or replace function public.jobs_complete(id integer, worker text, claimed_at timestamp with time zone, attempts integer, inputs text, result jsonb default '{}'::jsonb)
returns boolean
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_list text;
  _rm_count bigint;
  _rm_stale boolean;
begin
  if $5 is null then
    raise exception using errcode = '22023', message = 'complete needs inputs: what the function for inputs gives for the row as it was claimed';
  end if;
  -- The inputs are compared on the locked row: an edit comes before this, or after the outcome.
  select not (pg_catalog.encode(pg_catalog.sha256(pg_catalog.record_send(row(url, body))), 'hex'::text) = $5) and not exists (select 1 from public.rowmill_stale_runs where lane = 'jobs' and row_id = $1::text and runs >= 10 and since < now() - interval '60.0 seconds' and not last_at < now() - interval '86400.0 seconds') into _rm_stale from public.jobs
  where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running'
  for no key update;
  if not found then
    return false;
  end if;
  if _rm_stale then
    insert into public.rowmill_stale_runs as r (lane, row_id, since, last_at)
    select 'jobs', $1::text, now(), now() where true
    on conflict (lane, row_id) do update set runs = case when extract(epoch from excluded.last_at - r.last_at) > 86400.0 then 1 else r.runs + 1 end, since = case when extract(epoch from excluded.last_at - r.last_at) > 86400.0 then excluded.since else r.since end, last_at = excluded.last_at;
    if $6 is null or $6 = '{}'::jsonb then
      update public.jobs set
        status = 'ready',
        worker = null,
        claimed_at = null,
        attempts = greatest(attempts - 1, 0)
      where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
          and status = 'running';
      return false;
    end if;
  else
    delete from public.rowmill_stale_runs where lane = 'jobs' and row_id = $1::text;
  end if;
  if $6 is null or $6 = '{}'::jsonb then
    update public.jobs set
      status = 'done'
    where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running';
    return found;
  end if;
  select pg_catalog.string_agg(k, ', '::text) into _rm_list
  from pg_catalog.jsonb_object_keys($6) k
  where k <> all (array['worker', 'claimed_at', 'attempts', 'error', 'result']::text[]);
  if _rm_list is not null then
    raise exception using errcode = '22023', message = 'result has columns that it may not set: '::text || _rm_list,
      hint = 'the columns of jobs except its key and its state: worker, claimed_at, attempts, error, result';
  end if;
  -- The columns of result are written with the outcome in one statement, typed by the table.
  select pg_catalog.string_agg(a, ', '::text) into _rm_list from (
    select pg_catalog.quote_ident(v.c) || ' = '::text || v.e from (values
      (false, 'status'::text, '''done'''::text),
      (true, 'status'::text, '''ready'''::text),
      (true, 'worker'::text, 'null'::text),
      (true, 'claimed_at'::text, 'null'::text),
      (true, 'attempts'::text, 'greatest(attempts - 1, 0)'::text)
    ) v(s, c, e) where not $6 ? v.c and v.s = _rm_stale
    union all
    select pg_catalog.quote_ident(k) || ' = (select _rm_given.'::text || pg_catalog.quote_ident(k)
      || ' from pg_catalog.jsonb_populate_record(null::public.jobs, $6) _rm_given)'::text
    from pg_catalog.jsonb_object_keys($6) k
  ) s(a);
  execute 'update public.jobs set '::text || _rm_list || ' where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc(''milliseconds''::text, $3) and claimed_at < (pg_catalog.date_trunc(''milliseconds''::text, $3) + interval ''1 millisecond'') and attempts = $4
    and status = ''running'''::text
    using $1, $2, $3, $4, $5, $6;
  get diagnostics _rm_count = row_count;
  return _rm_count > 0 and not _rm_stale;
end
$rowmill$;

-- fail
create or replace function public.jobs_fail(id integer, worker text, claimed_at timestamp with time zone, attempts integer, inputs text, error text default null, delay interval default null, permanent boolean default false)
returns text
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_attempt bigint;
  _rm_limit bigint;
  _rm_delay double precision;
  _rm_stale boolean;
begin
  if $5 is null then
    raise exception using errcode = '22023', message = 'fail needs inputs: what the function for inputs gives for the row as it was claimed';
  end if;
  select greatest(coalesce(attempts, 1), 1), 3, not (pg_catalog.encode(pg_catalog.sha256(pg_catalog.record_send(row(url, body))), 'hex'::text) = $5) and not exists (select 1 from public.rowmill_stale_runs where lane = 'jobs' and row_id = $1::text and runs >= 10 and since < now() - interval '60.0 seconds' and not last_at < now() - interval '86400.0 seconds') into _rm_attempt, _rm_limit, _rm_stale from public.jobs
  where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running'
  for no key update;
  if not found then
    return null;
  end if;
  if coalesce($8, false) or _rm_attempt >= _rm_limit then
    if _rm_stale then
      insert into public.rowmill_stale_runs as r (lane, row_id, since, last_at)
      select 'jobs', $1::text, now(), now() where true
      on conflict (lane, row_id) do update set runs = case when extract(epoch from excluded.last_at - r.last_at) > 86400.0 then 1 else r.runs + 1 end, since = case when extract(epoch from excluded.last_at - r.last_at) > 86400.0 then excluded.since else r.since end, last_at = excluded.last_at;
      update public.jobs set
        status = 'ready',
        worker = null,
        claimed_at = null,
        attempts = greatest(attempts - 1, 0)
      where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
          and status = 'running';
      return 'stale';
    end if;
    delete from public.rowmill_stale_runs where lane = 'jobs' and row_id = $1::text;
    update public.jobs set
      status = 'dead',
      error = pg_catalog.left(coalesce($6, 'failed'::text), 2000)
    where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running';
    return 'dead';
  end if;
  _rm_delay := least(greatest(coalesce(
    extract(epoch from $7)::double precision,
    0.0::double precision
  ), 0::double precision), 3153600000.0::double precision);
  update public.jobs set
    status = 'ready',
    worker = null,
    claimed_at = null,
    error = pg_catalog.left(coalesce($6, 'failed'::text), 2000)
  where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running';
  return 'retry';
end
$rowmill$;

-- release
create or replace function public.jobs_release(id integer, worker text, claimed_at timestamp with time zone, attempts integer)
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
  where id = $1 and worker = $2 and claimed_at >= pg_catalog.date_trunc('milliseconds'::text, $3) and claimed_at < (pg_catalog.date_trunc('milliseconds'::text, $3) + interval '1 millisecond') and attempts = $4
    and status = 'running';
  return found;
end
$rowmill$;

-- sweep
create or replace function public.jobs_sweep(batch integer default 1000)
returns table (previous_worker text, poison boolean, id integer)
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
declare
  _rm_row record;
begin
    -- Row by row: one that may not go back, or did so too often, ends as dead and holds nobody up.
    for _rm_row in
      select t.id as _k0, t.worker as _worker, coalesce(attempts, 0) > 3 + 3 as _poison from public.jobs t
      where t.status = 'running' and (case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end < now() - interval '300.0 seconds' or case when t.claimed_at < now() + interval '300.0 seconds' then t.claimed_at end is null)
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
        where t.id = _rm_row._k0;
        return query select _rm_row._worker, false, _rm_row._k0;
      exception when integrity_constraint_violation or raise_exception then
        begin
          update public.jobs t set
            status = 'dead',
            error = pg_catalog.left(case when _rm_row._poison then sqlerrm else 'the database would not take it back: '::text || sqlerrm end, 2000)
          where t.id = _rm_row._k0;
        return query select _rm_row._worker, true, _rm_row._k0;
        exception when integrity_constraint_violation or raise_exception then
          raise warning 'a row of % can neither go back nor end: %', 'jobs', sqlerrm;
        end;
      end;
    end loop;
end
$rowmill$;

-- inputs
create or replace function public.jobs_inputs(claimed public.jobs)
returns text
language plpgsql volatile security invoker
set search_path = pg_catalog, pg_temp
as $rowmill$
#variable_conflict use_column
begin
  return pg_catalog.encode(pg_catalog.sha256(pg_catalog.record_send(row(($1).url, ($1).body))), 'hex'::text);
end
$rowmill$;
