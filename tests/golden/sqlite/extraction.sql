-- claim
update extraction_queue set
    status_id = 2,
    heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    processing_started_at = strftime('%Y-%m-%d %H:%M:%f', 'now'),
    worker_id = :worker
where (id) in (
  select id from extraction_queue
  where status_id = 1
  order by created_at, id nulls last
  limit :count
)
returning id, document_type, status_id, worker_id, processing_started_at, heartbeat_at, error_message, ocr_worker_id, ocr_started_at, ocr_heartbeat_at, ocr_attempts, ocr_max_attempts, ocr_error, created_at;

-- settle done
update extraction_queue set
    status_id = 3
where id = :_k0 and extraction_queue.status_id = 2 and extraction_queue.worker_id = :worker and extraction_queue.processing_started_at = :_at
returning 1;

-- settle retry
update extraction_queue set
    status_id = 1,
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null,
    error_message = :_error
where id = :_k0 and extraction_queue.status_id = 2 and extraction_queue.worker_id = :worker and extraction_queue.processing_started_at = :_at
returning 1;

-- settle dead
update extraction_queue set
    status_id = 4,
    error_message = :_error
where id = :_k0 and extraction_queue.status_id = 2 and extraction_queue.worker_id = :worker and extraction_queue.processing_started_at = :_at
returning 1;

-- settle snooze
update extraction_queue set
    status_id = 1,
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
where id = :_k0 and extraction_queue.status_id = 2 and extraction_queue.worker_id = :worker and extraction_queue.processing_started_at = :_at
returning 1;

-- settle release
update extraction_queue set
    status_id = 1,
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
where id = :_k0 and extraction_queue.status_id = 2 and extraction_queue.worker_id = :worker and extraction_queue.processing_started_at = :_at
returning 1;

-- settle done with document_type
update extraction_queue set
    status_id = 3,
    document_type = :_v0
where id = :_k0 and extraction_queue.status_id = 2 and extraction_queue.worker_id = :worker and extraction_queue.processing_started_at = :_at
returning 1;

-- renew
update extraction_queue set heartbeat_at = strftime('%Y-%m-%d %H:%M:%f', 'now')
where id = :_k0 and extraction_queue.status_id = 2 and extraction_queue.worker_id = :worker and extraction_queue.processing_started_at = :_at
returning heartbeat_at;

-- read
select coalesce(extraction_queue.status_id = 2 and extraction_queue.worker_id = :worker and extraction_queue.processing_started_at = :_at, 0), id, document_type, status_id, worker_id, processing_started_at, heartbeat_at, error_message, ocr_worker_id, ocr_started_at, ocr_heartbeat_at, ocr_attempts, ocr_max_attempts, ocr_error, created_at
from extraction_queue
where id = :_k0;

-- stale rows
select worker_id, 0, id
from extraction_queue
where status_id = 2 and coalesce(case when julianday(extraction_queue.heartbeat_at) < julianday('now', '+300.0 seconds') then julianday(extraction_queue.heartbeat_at) end, case when julianday(extraction_queue.processing_started_at) < julianday('now', '+300.0 seconds') then julianday(extraction_queue.processing_started_at) end) < julianday('now', '-300.0 seconds')
limit :most;

-- sweep
update extraction_queue set
    status_id = 1,
    worker_id = null,
    processing_started_at = null,
    heartbeat_at = null
where id = :_k0 and status_id = 2;

-- is anything ready
select 1 where exists (select 1 from extraction_queue where status_id = 1);
