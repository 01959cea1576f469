-- claim
update "AnalysisJob" set
    "inProgress" = 1,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "heartbeatAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "lockedBy" = :worker
where (id) in (
  select id from "AnalysisJob"
  where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = 0 and ("runAfter" is null or julianday("runAfter") <= julianday('now')) and ("updatedAt" is null or julianday("updatedAt") < julianday('now', '-30.0 seconds')) and coalesce("retryCount", 0) < 3
  order by "createdAt", id
  limit :count
)
returning id, status, "currentStep", "inProgress", "retryCount", "extractedInfo", "createdAt", "updatedAt", "lockedBy", "heartbeatAt", "runAfter", error;

-- settle done
update "AnalysisJob" set
    status = 'model-analysis',
    "currentStep" = 'model-analysis',
    "inProgress" = 0,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and "AnalysisJob".status = 'prompt-forming' and "AnalysisJob"."currentStep" = 'prompt-forming' and "AnalysisJob"."inProgress" = 1 and "AnalysisJob"."lockedBy" = :worker
returning 1;

-- settle retry
update "AnalysisJob" set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = 0,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "lockedBy" = null,
    "heartbeatAt" = null,
    "runAfter" = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds'),
    "retryCount" = coalesce("retryCount", 0) + 1,
    error = :_error
where id = :_k0 and "AnalysisJob".status = 'prompt-forming' and "AnalysisJob"."currentStep" = 'prompt-forming' and "AnalysisJob"."inProgress" = 1 and "AnalysisJob"."lockedBy" = :worker
returning 1;

-- settle dead
update "AnalysisJob" set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = 0,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "retryCount" = max(coalesce("retryCount", 0) + 1, 3),
    error = :_error
where id = :_k0 and "AnalysisJob".status = 'prompt-forming' and "AnalysisJob"."currentStep" = 'prompt-forming' and "AnalysisJob"."inProgress" = 1 and "AnalysisJob"."lockedBy" = :worker
returning 1;

-- settle snooze
update "AnalysisJob" set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = 0,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "lockedBy" = null,
    "heartbeatAt" = null,
    "runAfter" = strftime('%Y-%m-%d %H:%M:%f', 'now', :_delay || ' seconds')
where id = :_k0 and "AnalysisJob".status = 'prompt-forming' and "AnalysisJob"."currentStep" = 'prompt-forming' and "AnalysisJob"."inProgress" = 1 and "AnalysisJob"."lockedBy" = :worker
returning 1;

-- settle release
update "AnalysisJob" set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = 0,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "lockedBy" = null,
    "heartbeatAt" = null
where id = :_k0 and "AnalysisJob".status = 'prompt-forming' and "AnalysisJob"."currentStep" = 'prompt-forming' and "AnalysisJob"."inProgress" = 1 and "AnalysisJob"."lockedBy" = :worker
returning 1;

-- settle done with extractedInfo
update "AnalysisJob" set
    status = 'model-analysis',
    "currentStep" = 'model-analysis',
    "inProgress" = 0,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "extractedInfo" = :_v0
where id = :_k0 and "AnalysisJob".status = 'prompt-forming' and "AnalysisJob"."currentStep" = 'prompt-forming' and "AnalysisJob"."inProgress" = 1 and "AnalysisJob"."lockedBy" = :worker
returning 1;

-- renew
update "AnalysisJob" set "heartbeatAt" = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and "AnalysisJob".status = 'prompt-forming' and "AnalysisJob"."currentStep" = 'prompt-forming' and "AnalysisJob"."inProgress" = 1 and "AnalysisJob"."lockedBy" = :worker
returning "heartbeatAt";

-- read
select coalesce("AnalysisJob".status = 'prompt-forming' and "AnalysisJob"."currentStep" = 'prompt-forming' and "AnalysisJob"."inProgress" = 1 and "AnalysisJob"."lockedBy" = :worker, 0), id, status, "currentStep", "inProgress", "retryCount", "extractedInfo", "createdAt", "updatedAt", "lockedBy", "heartbeatAt", "runAfter", error
from "AnalysisJob"
where id = :_k0;

-- stale rows
select "lockedBy", coalesce("retryCount", 0) >= 3 - 1, id
from "AnalysisJob"
where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = 1 and coalesce(case when julianday("AnalysisJob"."heartbeatAt") < julianday('now', '+300.0 seconds') then julianday("AnalysisJob"."heartbeatAt") end, case when julianday("AnalysisJob"."updatedAt") < julianday('now', '+300.0 seconds') then julianday("AnalysisJob"."updatedAt") end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update "AnalysisJob" set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = 0,
    "lockedBy" = null,
    "heartbeatAt" = null,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "retryCount" = coalesce("retryCount", 0) + 1
where id = :_k0 and status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = 1;

-- sweep of a poisoned row
update "AnalysisJob" set
    status = 'prompt-forming',
    "currentStep" = 'prompt-forming',
    "inProgress" = 0,
    "updatedAt" = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    "retryCount" = max(coalesce("retryCount", 0) + 1, 3),
    error = 'taken back too often: its worker died or stopped renewing in every run'
where id = :_k0 and status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = 1;

-- is anything ready
select 1 where exists (select 1 from "AnalysisJob" where status = 'prompt-forming' and "currentStep" = 'prompt-forming' and "inProgress" = 0 and ("runAfter" is null or julianday("runAfter") <= julianday('now')) and ("updatedAt" is null or julianday("updatedAt") < julianday('now', '-30.0 seconds')) and coalesce("retryCount", 0) < 3);
