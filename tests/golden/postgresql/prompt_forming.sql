-- claim
with picked as materialized (
  select * from (
    select ctid, tableoid from "AnalysisJob"
    where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = false and ("runAfter" is null or "runAfter" <= now()) and ("updatedAt" is null or "updatedAt" < now() - interval '30.0 seconds') and coalesce("retryCount", 0) < 3
    order by "createdAt", id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update "AnalysisJob" set
    "inProgress" = true,
    "updatedAt" = _rm_moment._rm_at,
    "heartbeatAt" = _rm_moment._rm_at,
    "lockedBy" = $2::text
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, status, "currentStep", "inProgress", "retryCount", "extractedInfo", "createdAt", "updatedAt", "lockedBy", "heartbeatAt", "runAfter", error
)
select id, status, "currentStep", "inProgress", "retryCount", "extractedInfo", "createdAt", "updatedAt", "lockedBy", "heartbeatAt", "runAfter", error from taken
order by "createdAt", id;

-- claim from the remembered lower bound
with picked as materialized (
  select * from (
    select ctid, tableoid from "AnalysisJob"
    where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = false and ("runAfter" is null or "runAfter" <= now()) and ("updatedAt" is null or "updatedAt" < now() - interval '30.0 seconds') and coalesce("retryCount", 0) < 3
    and ("createdAt", id) >= ($3::timestamp with time zone, $4::text)
    order by "createdAt", id
    limit 1000
    for no key update skip locked
  ) first
  limit (select $1::bigint)
), taken as (
  update "AnalysisJob" set
    "inProgress" = true,
    "updatedAt" = _rm_moment._rm_at,
    "heartbeatAt" = _rm_moment._rm_at,
    "lockedBy" = $2::text
  from (select clock_timestamp() as _rm_at from picked having count(*) > 0) _rm_moment
  where ctid = any(array(select ctid from picked)) and (tableoid = (select min(tableoid) from picked) and tableoid = (select max(tableoid) from picked) or (tableoid, ctid) in (select tableoid, ctid from picked))
  returning id, status, "currentStep", "inProgress", "retryCount", "extractedInfo", "createdAt", "updatedAt", "lockedBy", "heartbeatAt", "runAfter", error
)
select id, status, "currentStep", "inProgress", "retryCount", "extractedInfo", "createdAt", "updatedAt", "lockedBy", "heartbeatAt", "runAfter", error from taken
order by "createdAt", id;

-- settle done with nothing beside it
with held as materialized (
  select l.*, s.* from unnest($1::text[], $2::int[]) with ordinality as s(_k0, _g, _ord)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from "AnalysisJob" t
    where t.id = s._k0 and coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $3::text, false)
    for no key update skip locked
  ) l
), written as (
  update "AnalysisJob" t set
    status = 'model-analysis',
    "currentStep" = 'model-analysis',
    "inProgress" = false,
    "updatedAt" = now()
  from held
  where t.ctid = held._row and t.tableoid = held._table
  returning held._ord
)
select array_agg(_ord - 1) from written;

-- settle done
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from "AnalysisJob" t
    where t.id = s._k0 and coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $2::text, false)
    for no key update skip locked
  ) l
)
update "AnalysisJob" t set
    status = 'model-analysis',
    "currentStep" = 'model-analysis',
    "inProgress" = false,
    "updatedAt" = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle retry
with held as materialized (
  select l.*, s.*, now() + s._delay * interval '1 second' as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from "AnalysisJob" t
    where t.id = s._k0 and coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $2::text, false)
    for no key update skip locked
  ) l
)
update "AnalysisJob" t set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = false,
    "updatedAt" = now(),
    "lockedBy" = null,
    "heartbeatAt" = null,
    "runAfter" = held._due,
    "retryCount" = least(coalesce("retryCount", 0), 2147483646) + 1,
    error = held._error
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle dead
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from "AnalysisJob" t
    where t.id = s._k0 and coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $2::text, false)
    for no key update skip locked
  ) l
)
update "AnalysisJob" t set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = false,
    "updatedAt" = now(),
    "retryCount" = greatest(least(coalesce("retryCount", 0), 2147483646) + 1, 3),
    error = held._error
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle snooze
with held as materialized (
  select l.*, s.*, now() + s._delay * interval '1 second' as _due from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from "AnalysisJob" t
    where t.id = s._k0 and coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $2::text, false)
    for no key update skip locked
  ) l
)
update "AnalysisJob" t set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = false,
    "updatedAt" = now(),
    "lockedBy" = null,
    "heartbeatAt" = null,
    "runAfter" = held._due
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle release
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _error text, _delay double precision)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from "AnalysisJob" t
    where t.id = s._k0 and coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $2::text, false)
    for no key update skip locked
  ) l
)
update "AnalysisJob" t set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = false,
    "updatedAt" = now(),
    "lockedBy" = null,
    "heartbeatAt" = null
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- settle done with extractedInfo
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text, _error text, _delay double precision, _v0 jsonb)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from "AnalysisJob" t
    where t.id = s._k0 and coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $2::text, false)
    for no key update skip locked
  ) l
)
update "AnalysisJob" t set
    status = 'model-analysis',
    "currentStep" = 'model-analysis',
    "inProgress" = false,
    "updatedAt" = now(),
    "extractedInfo" = held._v0
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord;

-- renew
with held as materialized (
  select l.*, s.* from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text)
  cross join lateral (
    select t.ctid as _row, t.tableoid as _table from "AnalysisJob" t
    where t.id = s._k0 and coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $2::text, false)
    for no key update skip locked
  ) l
)
update "AnalysisJob" t set "heartbeatAt" = now()
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._ord, t."heartbeatAt";

-- read
select s._ord, coalesce(t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and t."lockedBy" = $2::text, false),
  t.id, t.status, t."currentStep", t."inProgress", t."retryCount", t."extractedInfo", t."createdAt", t."updatedAt", t."lockedBy", t."heartbeatAt", t."runAfter", t.error
from jsonb_to_recordset($1::text::jsonb) as s(_ord int, _k0 text)
join "AnalysisJob" t on t.id = s._k0;

-- sweep
with held as materialized (
  select t.ctid as _row, t.tableoid as _table, t.id as _k0, t."lockedBy" as _worker, coalesce("retryCount", 0) >= 3 - 1 as _poison
  from "AnalysisJob" t
  where t.status = 'prompt-forming' and t."currentStep" = 'prompt-forming' and t."inProgress" = true and coalesce(case when t."heartbeatAt" < now() + interval '300.0 seconds' then t."heartbeatAt" end, case when t."updatedAt" < now() + interval '300.0 seconds' then t."updatedAt" end) < now() - interval '300.0 seconds'
  limit $1::bigint
  for no key update skip locked
)
update "AnalysisJob" t set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = false,
    "lockedBy" = case when held._poison then "lockedBy"::text else null end,
    "heartbeatAt" = case when held._poison then "heartbeatAt"::timestamp with time zone else null end,
    "updatedAt" = now(),
    "retryCount" = case when held._poison then greatest(least(coalesce("retryCount", 0), 2147483646) + 1, 3)::integer else least(coalesce("retryCount", 0), 2147483646) + 1 end,
    error = case when held._poison then 'taken back too often: its worker died or stopped renewing in every run'::text else error end
from held
where t.ctid = held._row and t.tableoid = held._table
returning held._worker, held._poison, t.id;

-- is anything ready
select 1 where exists (select 1 from "AnalysisJob" where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = false and ("runAfter" is null or "runAfter" <= now()) and ("updatedAt" is null or "updatedAt" < now() - interval '30.0 seconds') and coalesce("retryCount", 0) < 3);
