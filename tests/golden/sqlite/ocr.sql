-- claim
update extraction_queue set
    status_id = 6,
    ocr_heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    ocr_started_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    ocr_worker_id = :worker,
    ocr_attempts = coalesce(ocr_attempts, 0) + 1
where (id) in (
  select id from extraction_queue
  where status_id = 3
  order by created_at, id nulls last
  limit :count
)
returning id, document_type, status_id, worker_id, processing_started_at, heartbeat_at, error_message, ocr_worker_id, ocr_started_at, ocr_heartbeat_at, ocr_attempts, ocr_max_attempts, ocr_error, created_at;

-- settle done
update extraction_queue set
    status_id = 5
where id = :_k0 and extraction_queue.status_id = 6 and extraction_queue.ocr_worker_id = :worker and extraction_queue.ocr_started_at = :_at and extraction_queue.ocr_attempts = :_n
returning 1;

-- settle retry
update extraction_queue set
    status_id = 3,
    ocr_worker_id = null,
    ocr_started_at = null,
    ocr_heartbeat_at = null,
    ocr_error = :_error
where id = :_k0 and extraction_queue.status_id = 6 and extraction_queue.ocr_worker_id = :worker and extraction_queue.ocr_started_at = :_at and extraction_queue.ocr_attempts = :_n
returning 1;

-- settle dead
update extraction_queue set
    status_id = 4,
    ocr_error = :_error
where id = :_k0 and extraction_queue.status_id = 6 and extraction_queue.ocr_worker_id = :worker and extraction_queue.ocr_started_at = :_at and extraction_queue.ocr_attempts = :_n
returning 1;

-- settle snooze
update extraction_queue set
    status_id = 3,
    ocr_worker_id = null,
    ocr_started_at = null,
    ocr_heartbeat_at = null,
    ocr_attempts = max(ocr_attempts - 1, 0)
where id = :_k0 and extraction_queue.status_id = 6 and extraction_queue.ocr_worker_id = :worker and extraction_queue.ocr_started_at = :_at and extraction_queue.ocr_attempts = :_n
returning 1;

-- settle release
update extraction_queue set
    status_id = 3,
    ocr_worker_id = null,
    ocr_started_at = null,
    ocr_heartbeat_at = null,
    ocr_attempts = max(ocr_attempts - 1, 0)
where id = :_k0 and extraction_queue.status_id = 6 and extraction_queue.ocr_worker_id = :worker and extraction_queue.ocr_started_at = :_at and extraction_queue.ocr_attempts = :_n
returning 1;

-- renew
update extraction_queue set ocr_heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and extraction_queue.status_id = 6 and extraction_queue.ocr_worker_id = :worker and extraction_queue.ocr_started_at = :_at and extraction_queue.ocr_attempts = :_n
returning ocr_heartbeat_at;

-- read
select coalesce(extraction_queue.status_id = 6 and extraction_queue.ocr_worker_id = :worker and extraction_queue.ocr_started_at = :_at and extraction_queue.ocr_attempts = :_n, 0), id, document_type, status_id, worker_id, processing_started_at, heartbeat_at, error_message, ocr_worker_id, ocr_started_at, ocr_heartbeat_at, ocr_attempts, ocr_max_attempts, ocr_error, created_at
from extraction_queue
where id = :_k0;

-- stale rows
select ocr_worker_id, coalesce(ocr_attempts, 0) > coalesce(ocr_max_attempts, 3) + 3, id
from extraction_queue
where status_id = 6 and coalesce(case when julianday(extraction_queue.ocr_heartbeat_at) < julianday('now', '+300.0 seconds') then julianday(extraction_queue.ocr_heartbeat_at) end, case when julianday(extraction_queue.ocr_started_at) < julianday('now', '+300.0 seconds') then julianday(extraction_queue.ocr_started_at) end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update extraction_queue set
    status_id = 3,
    ocr_worker_id = null,
    ocr_started_at = null,
    ocr_heartbeat_at = null
where id = :_k0 and status_id = 6;

-- sweep of a poisoned row
update extraction_queue set
    status_id = 4,
    ocr_error = 'taken back too often: its worker died or stopped renewing in every run'
where id = :_k0 and status_id = 6;

-- is anything ready
select 1 where exists (select 1 from extraction_queue where status_id = 3);
