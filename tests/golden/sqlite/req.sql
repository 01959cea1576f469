-- claim
update search_sessions set
    status = 'scraping_company_data',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    processing_started_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker_id = :worker
where (id) in (
  select id from search_sessions
  where status = 'pending_company_selection' and req_completed = 0
  order by created_at, id
  limit :count
)
returning id, status, req_completed, worker_id, processing_started_at, heartbeat_at, created_at, updated_at;

-- settle done
update search_sessions set
    status = 'pending_name_selection',
    req_completed = 1,
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and search_sessions.status = 'scraping_company_data' and search_sessions.req_completed = 0 and search_sessions.worker_id = :worker and search_sessions.processing_started_at = :_at
returning 1;

-- settle retry
update search_sessions set
    status = 'pending_company_selection',
    req_completed = 0,
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
where id = :_k0 and search_sessions.status = 'scraping_company_data' and search_sessions.req_completed = 0 and search_sessions.worker_id = :worker and search_sessions.processing_started_at = :_at
returning 1;

-- settle dead
update search_sessions set
    status = 'failed',
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and search_sessions.status = 'scraping_company_data' and search_sessions.req_completed = 0 and search_sessions.worker_id = :worker and search_sessions.processing_started_at = :_at
returning 1;

-- settle snooze
update search_sessions set
    status = 'pending_company_selection',
    req_completed = 0,
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
where id = :_k0 and search_sessions.status = 'scraping_company_data' and search_sessions.req_completed = 0 and search_sessions.worker_id = :worker and search_sessions.processing_started_at = :_at
returning 1;

-- settle release
update search_sessions set
    status = 'pending_company_selection',
    req_completed = 0,
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
where id = :_k0 and search_sessions.status = 'scraping_company_data' and search_sessions.req_completed = 0 and search_sessions.worker_id = :worker and search_sessions.processing_started_at = :_at
returning 1;

-- renew
update search_sessions set heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and search_sessions.status = 'scraping_company_data' and search_sessions.req_completed = 0 and search_sessions.worker_id = :worker and search_sessions.processing_started_at = :_at
returning heartbeat_at;

-- read
select coalesce(search_sessions.status = 'scraping_company_data' and search_sessions.req_completed = 0 and search_sessions.worker_id = :worker and search_sessions.processing_started_at = :_at, 0), id, status, req_completed, worker_id, processing_started_at, heartbeat_at, created_at, updated_at
from search_sessions
where id = :_k0;

-- stale rows
select worker_id, 0, id
from search_sessions
where status = 'scraping_company_data' and req_completed = 0 and coalesce(case when julianday(search_sessions.heartbeat_at) < julianday('now', '+300.0 seconds') then julianday(search_sessions.heartbeat_at) end, case when julianday(search_sessions.processing_started_at) < julianday('now', '+300.0 seconds') then julianday(search_sessions.processing_started_at) end, case when julianday(search_sessions.updated_at) < julianday('now', '+300.0 seconds') then julianday(search_sessions.updated_at) end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update search_sessions set
    status = 'pending_company_selection',
    req_completed = 0,
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null,
    updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and status = 'scraping_company_data' and req_completed = 0;

-- is anything ready
select 1 where exists (select 1 from search_sessions where status = 'pending_company_selection' and req_completed = 0);
