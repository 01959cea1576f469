-- Statements may be run again: what is there stays. One at a time: two that make the same table would fail.
select pg_advisory_xact_lock(7304116);

create table if not exists users (
    id uuid primary key default gen_random_uuid(),
    name text not null,
    token_hash bytea not null unique,  -- SHA-256 of a random token; the token itself is shown once and kept nowhere
    created_at timestamptz not null default now()
);

create table if not exists import_jobs (
    id uuid primary key default gen_random_uuid(),
    user_id uuid not null references users (id),
    source_type text not null default 'chrome_html' check (source_type in ('chrome_html')),
    status text not null default 'queued' check (status in ('queued', 'running', 'succeeded', 'failed', 'canceled')),
    -- where a running import is: its file is read, then its links are enriched; a canceled one's links are withdrawn
    phase text not null default 'waiting'
        check (phase in ('waiting', 'reading', 'enriching', 'withdrawing', 'over')),
    total_items integer not null default 0,
    processed_items integer not null default 0,  -- those that are over, the failed ones among them
    failed_items integer not null default 0,
    created_at timestamptz not null default now(),
    started_at timestamptz,
    finished_at timestamptz,
    last_error text,
    attempts integer not null default 0,
    run_after timestamptz not null default now(),
    locked_by text,
    locked_at timestamptz,
    heartbeat_at timestamptz
) with (fillfactor = 80);  -- room on each page for heartbeats
create index if not exists import_jobs_read on import_jobs (run_after, id)
    where status = 'queued' and phase = 'waiting';
create index if not exists import_jobs_withdraw on import_jobs (run_after, id)
    where status = 'canceled' and phase = 'enriching';
create index if not exists import_jobs_of_user on import_jobs (user_id, created_at);

-- What the web side was given, until it is read.
create table if not exists import_files (
    import_job_id uuid primary key references import_jobs (id) on delete cascade,
    content bytea not null
);

create table if not exists link_canonicals (
    id uuid primary key,  -- made from the url, so it is the same for everybody
    url text not null,
    domain text not null,
    created_at timestamptz not null default now()
);

-- Where a user keeps a link: one row per bookmark.
create table if not exists placements (
    id bigint generated always as identity primary key,
    import_job_id uuid not null references import_jobs (id) on delete cascade,
    link_canonical_id uuid references link_canonicals (id),  -- null: not a link that can be enriched
    position integer not null,
    folder text[] not null,
    title text not null,
    url text not null,  -- as it was bookmarked
    added_at timestamptz,
    refused text  -- why it is not a link that can be enriched
);
create index if not exists placements_of_import on placements (import_job_id, position);

-- Which links an import waits for, how many of its bookmarks are on each, and how they ended for it.
create table if not exists import_links (
    import_job_id uuid not null references import_jobs (id) on delete cascade,
    link_canonical_id uuid not null references link_canonicals (id),
    items integer not null,
    outcome text check (outcome in ('done', 'dead')),
    primary key (import_job_id, link_canonical_id)
);
create index if not exists import_links_waiting on import_links (link_canonical_id) where outcome is null;

create table if not exists enrichment_jobs (
    id uuid primary key default gen_random_uuid(),
    link_canonical_id uuid not null unique references link_canonicals (id),
    status text not null default 'queued' check (status in ('queued', 'running', 'succeeded', 'failed', 'dead')),
    attempts integer not null default 0,
    max_attempts integer not null default 2,
    failures integer not null default 0,  -- a killed worker costs an attempt, but is not the link's failure
    reclaims integer not null default 0,
    run_after timestamptz not null default now(),
    locked_at timestamptz,
    locked_by text,
    last_error text,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    url text not null,
    domain text not null,
    forbidden integer not null default 0,  -- how often the site said 403
    moved_to text,  -- where another domain has it, and over how many redirects that was found
    hops integer not null default 0,
    -- what was found: never the page itself
    title text,
    description text,
    canonical_url text,
    icon_url text,
    open_graph jsonb,
    json_ld jsonb,
    language text,
    final_url text,
    http_status integer,
    content_type text
);
create index if not exists enrichment_jobs_ready on enrichment_jobs (domain, run_after, id)
    where status in ('queued', 'failed');
create index if not exists enrichment_jobs_running on enrichment_jobs (domain) where status = 'running';

-- Domains that do not want us, for somebody to decide about.
create table if not exists block_candidates (
    domain text primary key,
    reason text not null check (reason in ('robots', 'captcha', 'forbidden')),
    refusals integer not null default 1,
    first_at timestamptz not null default now(),
    last_at timestamptz not null default now()
);
