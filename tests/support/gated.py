"""A small gated table, for the tests of gates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta as td
from typing import Any

from databases import Db
from rowmill import Mill

TABLE = {
    "postgresql": """
create table pages (
  id bigint generated always as identity primary key, domain text, source_id integer,
  status text not null default 'queued', worker text, claimed_at timestamptz, heartbeat_at timestamptz,
  attempts integer not null default 0, error text, run_after timestamptz not null default now(),
  finished_at timestamptz, created_at timestamptz not null default clock_timestamp());
create index on pages (domain, run_after, id) where status = 'queued';
create index on pages (domain) where status = 'running';
create table sources (id integer primary key, enabled boolean not null default true, rate_limit_per_minute integer,
  failure_streak integer not null default 0, paused_until timestamptz, last_success_at timestamptz,
  last_failure_at timestamptz);
""",
    "sqlite": """
create table pages (
  id integer primary key, domain text, source_id integer, status text not null default 'queued', worker text,
  claimed_at datetime, heartbeat_at datetime, attempts integer not null default 0, error text,
  run_after datetime not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), finished_at datetime,
  created_at datetime not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')));
create index pages_ready on pages (domain, run_after, id) where status = 'queued';
create index pages_running on pages (domain) where status = 'running';
create table sources (id integer primary key, enabled boolean not null default 1, rate_limit_per_minute integer,
  failure_streak integer not null default 0, paused_until datetime, last_success_at datetime,
  last_failure_at datetime);
""",
}


def make(db: Db) -> None:
    """The tables."""
    db.execute(TABLE[db.dialect])


def fill(db: Db, domains: Sequence[str | None], **columns: Any) -> list[Any]:
    """One ready page for each of these domains, in this order."""
    return db.insert("pages", [{"domain": domain, **columns} for domain in domains])


def lane(mill: Mill, handler: Any = None, **options: Any) -> Any:
    """A lane over the pages."""

    async def crawl(job: Any) -> None: ...

    chosen = {
        "ready": {"status": "queued"}, "running": {"status": "running"}, "done": {"status": "done"},
        "dead": {"status": "dead"}, "max_attempts": 3, "lease": td(minutes=1), **options,
    }  # fmt: skip
    return mill.lane("pages", name="crawl", **chosen)(handler or crawl)


def running(db: Db) -> dict[str | None, int]:
    """Running pages by domain."""
    rows = db.query("select domain, count(*) as n from pages where status = 'running' group by 1")
    return {row["domain"]: row["n"] for row in rows}
