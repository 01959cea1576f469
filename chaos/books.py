"""The suite's own view of the database: the tables, the ledger, and the questions about them. Both dialects."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, TypeVar

import psycopg

from .check import Entry, Row

T = TypeVar("T")

#: Everything but a renewal is written down, in the transaction that does it.
_NOTED = " or ".join(f"o.{column} is distinct from n.{column}" for column in ("status", "outcome", "claimed_at"))

POSTGRES = f"""
create table chaos_rows (
  id bigint primary key, what text not null, takes double precision not null, status text not null default 'queued',
  worker text, claimed_at timestamptz, heartbeat_at timestamptz, attempts integer not null default 0,
  failures integer not null default 0, reclaims integer not null default 0,
  run_after timestamptz not null default now(), error text, finished_at timestamptz, outcome text,
  edited integer not null default 0);
create index on chaos_rows (run_after, id) where status = 'queued';
create index on chaos_rows (id) where status = 'running';
create table chaos_effects (row_id bigint not null, run text not null);
create table chaos_ledger (
  seq bigint generated always as identity primary key, row_id bigint not null, was text not null, is_now text not null,
  held_by text, held_since timestamptz, beat_at timestamptz, worker text, outcome text, swept boolean not null,
  by_hand boolean not null, at timestamptz not null default now(), wall timestamptz not null default clock_timestamp());
create function chaos_note() returns trigger language plpgsql as $$ begin
  insert into chaos_ledger (row_id, was, is_now, held_by, held_since, beat_at, worker, outcome, swept, by_hand)
  select n.id, o.status, n.status, o.worker, o.claimed_at, o.heartbeat_at, n.worker, n.outcome,
    n.reclaims > o.reclaims, n.edited > o.edited
  from new_rows n join old_rows o using (id) where {_NOTED};
  return null;
end $$;
create trigger chaos_noted after update on chaos_rows referencing old table as old_rows new table as new_rows
  for each statement execute function chaos_note();
"""
_SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
SQLITE = f"""
create table chaos_rows (
  id integer primary key, what text not null, takes double precision not null, status text not null default 'queued',
  worker text, claimed_at datetime, heartbeat_at datetime, attempts integer not null default 0,
  failures integer not null default 0, reclaims integer not null default 0,
  run_after datetime not null default ({_SQLITE_NOW}), error text, finished_at datetime, outcome text,
  edited integer not null default 0);
create index chaos_ready on chaos_rows (run_after, id) where status = 'queued';
create index chaos_running on chaos_rows (id) where status = 'running';
create table chaos_effects (row_id integer not null, run text not null);
create table chaos_ledger (
  seq integer primary key, row_id integer not null, was text not null, is_now text not null, held_by text,
  held_since datetime, beat_at datetime, worker text, outcome text, swept boolean not null, by_hand boolean not null,
  at datetime not null default ({_SQLITE_NOW}), wall datetime not null default ({_SQLITE_NOW}));
create trigger chaos_noted after update on chaos_rows
  when {_NOTED.replace("o.", "old.").replace("n.", "new.")}
begin
  insert into chaos_ledger (row_id, was, is_now, held_by, held_since, beat_at, worker, outcome, swept, by_hand)
  values (new.id, old.status, new.status, old.worker, old.claimed_at, old.heartbeat_at, new.worker, new.outcome,
    new.reclaims > old.reclaims, new.edited > old.edited);
end;
"""


class Books:
    """What the suite asks of a database, and what it does to it by hand. Every call has a connection of its own: none
    that a fault could break outlives it.
    """

    ddl = POSTGRES

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement, committed when this returns; its rows, where it has some."""
        with psycopg.connect(self.url, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(sql.replace("?", "%s") if parameters else sql, parameters or None)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def prepare(self) -> None:
        self.query(self.ddl)

    def patiently(self, work: Callable[[], T], seconds: float = 60.0) -> T:
        """Do something, again and again while the database is away."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return work()
            except (psycopg.Error, sqlite3.Error):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def add(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Add rows by their own keys: adding them again, after a reply that was lost, changes nothing."""
        self.query(
            "insert into chaos_rows (id, what, takes) select * from unnest(?::bigint[], ?::text[], ?::float[])"
            " on conflict do nothing",
            [list(column) for column in zip(*rows, strict=True)],
        )

    def unfinished(self) -> int:
        return int(self.query("select count(*) from chaos_rows where status <> 'done'")[0][0])

    def running(self) -> int:
        return int(self.query("select count(*) from chaos_rows where status = 'running'")[0][0])

    def moment(self, wall: float) -> Any:
        return datetime.fromtimestamp(wall, UTC)

    def settled_after(self, wall: float, workers: Sequence[str] | None = None) -> float | None:
        """When the first outcome after a moment was written; by one of these workers, where they are given."""
        whose = "" if workers is None else f" and worker in ({', '.join('?' for _ in workers)})"
        found = self.query(
            f"select min(wall) from chaos_ledger where wall > ? and is_now = 'done' and not by_hand{whose}",
            [self.moment(wall), *(workers or ())],
        )[0][0]
        return seconds(found)

    def ledger(self) -> list[Entry]:
        found = self.query(
            "select row_id, was, is_now, held_by, held_since, beat_at, worker, outcome, swept, by_hand, at"
            " from chaos_ledger order by seq"
        )
        return [
            Entry(*r[:4], seconds(r[4]), seconds(r[5]), r[6], r[7], bool(r[8]), bool(r[9]), seconds(r[10]) or 0.0)
            for r in found
        ]

    def rows(self) -> dict[int, Row]:
        return {r[0]: Row(r[1], r[2], r[3]) for r in self.query("select id, status, outcome, what from chaos_rows")}

    def effects(self) -> Counter[int]:
        return Counter(r[0] for r in self.query("select row_id from chaos_effects"))

    def holder(self) -> str | None:
        """The worker that holds most of the rows that take long."""
        found = self.query(
            "select worker from chaos_rows where status = 'running' and takes > 0.5 group by worker"
            " order by count(*) desc limit 1"
        )
        return found[0][0] if found else None

    # -- by hand

    def edit(self, count: int) -> int:
        """Rows that run are ended by hand, under their workers."""
        return len(
            self.query(
                "update chaos_rows set status = 'done', outcome = 'by hand', edited = edited + 1 where id in"
                " (select id from chaos_rows where status = 'running' limit ?) and status = 'running' returning id",
                [count],
            )
        )

    def delete(self, count: int) -> int:
        """Rows that run or wait are deleted, and that is written down with it."""
        return len(
            self.query(
                "with gone as (delete from chaos_rows where id in (select id from chaos_rows where status <> 'done'"
                " order by id limit ?) and status <> 'done' returning id, status)"
                " insert into chaos_ledger (row_id, was, is_now, swept, by_hand)"
                " select id, status, 'deleted', false, true from gone returning row_id",
                [count],
            )
        )


class LiteBooks(Books):
    """The same over a SQLite file."""

    ddl = SQLITE

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.url, timeout=10, isolation_level=None)) as connection:
            return connection.execute(sql, parameters).fetchall()

    def prepare(self) -> None:
        with closing(sqlite3.connect(self.url)) as connection:
            connection.execute("pragma journal_mode = wal")
            connection.executescript(self.ddl)

    def add(self, rows: Sequence[tuple[int, str, float]]) -> None:
        with closing(sqlite3.connect(self.url, timeout=10, isolation_level=None)) as connection:
            connection.execute("begin immediate")
            connection.executemany("insert or ignore into chaos_rows (id, what, takes) values (?, ?, ?)", rows)
            connection.execute("commit")

    def moment(self, wall: float) -> Any:
        return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:23]

    def delete(self, count: int) -> int:
        with closing(sqlite3.connect(self.url, timeout=10, isolation_level=None)) as connection:
            connection.execute("begin immediate")
            chosen = "select id from chaos_rows where status <> 'done' order by id limit ?"
            connection.execute(
                "insert into chaos_ledger (row_id, was, is_now, swept, by_hand)"
                f" select id, status, 'deleted', false, true from chaos_rows where id in ({chosen})", [count],
            )  # fmt: skip
            gone = connection.execute(f"delete from chaos_rows where id in ({chosen}) returning id", [count]).fetchall()
            connection.execute("commit")
            return len(gone)


def seconds(value: Any) -> float | None:
    """A time as either database gives it, as seconds."""
    if value is None:
        return None
    time_ = datetime.fromisoformat(value) if isinstance(value, str) else value
    return float((time_ if time_.tzinfo else time_.replace(tzinfo=UTC)).timestamp())
