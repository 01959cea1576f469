"""Tables as people have them: adopted without a question, and worked off with the file as it was written."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from command import Command
from databases import Db
from rowmill import RowmillError
from rowmill.config import find_app

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Shape:
    """A table, its rows, and what must be true of the rows that were ready once they are worked off."""

    table: str
    ddl: str
    #: True of a row that the lane has finished.
    done: str
    ready: int = 5
    #: Rows that were not ready, and stay as they were: a condition, and how many.
    others: tuple[str, int] | None = None
    dialect: str = "postgresql"
    #: It cannot run before ``rowmill migrate --apply``: nothing in the table could say "running".
    migrate: bool = False


SHAPES = {
    "text status and nothing else": Shape(
        "links",
        "create table links (id bigint generated always as identity primary key, url text, status text default 'new');"
        "insert into links (url) select 'u' || n from generate_series(1, 5) n",
        "status = 'done'",
    ),
    "an enum, with leases and attempts (C)": Shape(
        "enrichment_jobs",
        "create type est as enum ('queued', 'running', 'succeeded', 'failed', 'dead');"
        "create table enrichment_jobs (id uuid primary key default gen_random_uuid(), status est not null default"
        " 'queued', attempts int not null default 0, max_attempts int not null default 2, run_after timestamptz not"
        " null default now(), locked_at timestamptz, locked_by text, last_error text, updated_at timestamptz);"
        "insert into enrichment_jobs (status) select 'queued' from generate_series(1, 5);"
        "insert into enrichment_jobs (status) values ('succeeded'), ('dead')",
        "status = 'succeeded' and locked_by is not null",
        others=("status = 'dead'", 1),
    ),
    "integer ids that refer to a table of states (A)": Shape(
        "extraction_queue",
        "create table statuts (id int primary key, libelle text not null);"
        "insert into statuts values (1, 'EN_ATTENTE'), (2, 'EN_TRAITEMENT'), (3, 'COMPLETE'), (4, 'ERREUR'),"
        " (5, 'EXTRACTION_COMPLETE'), (6, 'OCR_PROCESSING');"
        "create table extraction_queue (id serial primary key, status_id int not null default 1 references statuts,"
        " worker_id text, processing_started_at timestamptz, error_message text, created_at timestamptz default now());"
        "insert into extraction_queue (status_id) select 1 from generate_series(1, 5);"
        "insert into extraction_queue (status_id) values (3), (5)",
        "status_id = 3 and worker_id is not null",
        others=("status_id = 5", 1),
    ),
    "integers told only by a comment": Shape(
        "imports",
        "create table imports (id serial primary key, state smallint not null default 0, started_at timestamptz);"
        "comment on column imports.state is '0 = pending, 1 = running, 2 = done, 9 = error';"
        "insert into imports (state) values (0), (0), (9)",
        "state = 2",
        ready=2,
        others=("state = 9", 1),
    ),
    "integers told only by what is filled in beside them": Shape(
        "scans",
        "create table scans (id serial primary key, status int not null default 0, started_at timestamptz,"
        " finished_at timestamptz, error text);"
        "insert into scans (status) select 0 from generate_series(1, 5);"
        "insert into scans (status, started_at) values (10, now() - interval '1 day');"
        "insert into scans (status, started_at, finished_at) values (20, now(), now()), (20, now(), now());"
        "insert into scans (status, started_at, error) values (30, now(), 'boom')",
        "status = 20 and finished_at is not null",
        ready=6,  # the one whose holder gave no sign of life for a day comes back, and is done too
        others=("status = 30", 1),
    ),
    "camel case, a phase and a flag": Shape(
        "AnalysisJob",
        'create table "AnalysisJob" (id text primary key default gen_random_uuid()::text, status text not null default'
        " 'not-started', \"inProgress\" boolean not null default false, \"retryCount\" integer not null default 0,"
        ' "createdAt" timestamptz not null default now(), "updatedAt" timestamptz not null default now());'
        'insert into "AnalysisJob" (status) select \'not-started\' from generate_series(1, 5)',
        "status = 'completed' and not \"inProgress\"",
    ),
    "a time that is set when a row is done": Shape(
        "outbox",
        "create table outbox (id bigserial primary key, payload jsonb not null default '{}', processed_at timestamptz,"
        " created_at timestamptz not null default now());"
        "insert into outbox (payload) select '{}' from generate_series(1, 5);"
        "insert into outbox (processed_at) values ('2020-01-01')",
        "processed_at > '2021-01-01'",
        others=("processed_at = '2020-01-01'", 1),
        migrate=True,
    ),
    "times for everything": Shape(
        "deliveries",
        "create table deliveries (id bigserial primary key, started_at timestamptz, sent_at timestamptz,"
        " failed_at timestamptz, queued_at timestamptz default now());"
        "insert into deliveries (queued_at) select now() from generate_series(1, 5);"
        "insert into deliveries (failed_at) values (now())",
        "sent_at is not null and started_at is not null",
        others=("failed_at is not null", 1),
    ),
    "a flag": Shape(
        "emails",
        "create table emails (id serial primary key, recipient text, is_sent boolean, sent_at timestamptz);"
        "insert into emails (recipient, is_sent) values ('a', null), ('b', false), ('c', true)",
        "is_sent and sent_at is not null",
        ready=2,
        others=("is_sent and sent_at is null", 1),
        migrate=True,
    ),
    "flags for everything": Shape(
        "uploads",
        "create table uploads (id serial primary key, processing boolean not null default false, processed boolean not"
        " null default false, failed boolean not null default false, updated_at timestamptz);"
        "insert into uploads (processed) select false from generate_series(1, 5);"
        "insert into uploads (failed) values (true)",
        "processed and not processing",
        others=("failed and not processed", 1),
    ),
    "a composite key and a check constraint, in German": Shape(
        "auftraege",
        "create table auftraege (mandant int, nr int, zustand varchar(20) not null default 'offen' check (zustand in"
        " ('offen', 'in Bearbeitung', 'erledigt', 'Fehler', 'storniert')), bearbeiter text, primary key (mandant, nr));"
        "insert into auftraege (mandant, nr) select n % 2, n from generate_series(1, 5) n;"
        "insert into auftraege values (9, 9, 'storniert')",
        "zustand = 'erledigt'",
        others=("zustand = 'storniert'", 1),
    ),
    "Django": Shape(
        "core_task",
        "create table core_task (id bigint generated by default as identity primary key, status varchar(12) not null,"
        " payload jsonb not null, created timestamp with time zone not null, modified timestamp with time zone not"
        " null, check (status in ('NEW', 'IN_PROGRESS', 'SUCCESS', 'FAILURE')));"
        "insert into core_task (status, payload, created, modified) select 'NEW', '{}', now(), now()"
        " from generate_series(1, 5)",
        "status = 'SUCCESS'",
    ),
    "Rails, delayed-job style": Shape(
        "delayed_jobs",
        "create table delayed_jobs (id bigserial primary key, priority int not null default 0, attempts int not null"
        " default 0, handler text not null default '', last_error text, run_at timestamp, locked_at timestamp,"
        " failed_at timestamp, processed_at timestamp, locked_by varchar(255), queue varchar, created_at timestamp,"
        " updated_at timestamp);"
        "insert into delayed_jobs (run_at) select now() at time zone 'utc' - interval '1 hour'"
        " from generate_series(1, 5)",
        "processed_at is not null and locked_by is not null",
    ),
    "Supabase: uuids, a trigger on updated_at, soft deletes": Shape(
        "documents",
        "create function touch() returns trigger language plpgsql as"
        " $$ begin new.updated_at := clock_timestamp(); return new; end $$;"
        "create table documents (id uuid primary key default gen_random_uuid(), user_id uuid, title text, status text"
        " not null default 'pending' check (status = any (array['pending', 'processing', 'completed', 'failed'])),"
        " error_message text, created_at timestamptz not null default timezone('utc', now()),"
        " updated_at timestamptz not null default now(), deleted_at timestamptz);"
        "create trigger touch before update on documents for each row execute function touch();"
        "insert into documents (title) select 't' || n from generate_series(1, 5) n;"
        "insert into documents (deleted_at) values (now())",
        "status = 'completed'",
        others=("deleted_at is not null and status = 'pending'", 1),
    ),
    "an enum that has no word for running": Shape(
        "invoices",
        "create type inv as enum ('draft', 'pending', 'paid', 'sent', 'error');"
        "create table invoices (id serial primary key, state inv not null default 'pending', locked_at timestamptz,"
        " locked_by text);"
        "insert into invoices (state) select 'pending' from generate_series(1, 5); insert into invoices (state)"
        " values ('draft')",
        "state = 'sent'",
        others=("state = 'draft'", 1),
    ),
    "a domain that lists its values": Shape(
        "runs",
        "create domain run_state as text default 'queued' check (value in ('queued', 'working', 'finished', 'failed'));"
        "create table runs (id serial primary key, st run_state not null, locked_by text);"
        "insert into runs (id) values (1), (2), (3), (4), (5)",
        "st = 'finished' and locked_by is not null",
    ),
    "times without a word for success, and an error": Shape(
        "steps",
        "create table steps (id serial primary key, started_at timestamptz, finished_at timestamptz, error text);"
        "insert into steps (id) values (1), (2), (3), (4), (5)",
        "finished_at is not null and error is null",
    ),
    "NULL until something happens": Shape(
        "contacts",
        "create table contacts (id serial primary key, email text, sync_status text, synced_on date);"
        "insert into contacts (email) select 'e' || n from generate_series(1, 5) n;"
        "insert into contacts (sync_status) values ('done'), ('failed')",
        "sync_status = 'done'",
        others=("sync_status = 'failed'", 1),
    ),
    "single letters": Shape(
        "legacy",
        "create table legacy (lg_id int primary key, lg_stat char(1) not null default 'P' check (lg_stat in"
        " ('P', 'R', 'D', 'E')), lg_lock_owner varchar(80));"
        "insert into legacy select n from generate_series(1, 5) n",
        "lg_stat = 'D'",
    ),
    "a worker column that refers to a table, a short one, and a partitioned table": Shape(
        "parts",
        "create table machines (id text primary key);"
        "create table parts (id int, day date, status text not null default 'todo', worker_id text references machines,"
        " started_at timestamptz, primary key (id, day)) partition by range (day);"
        "create table parts_1 partition of parts for values from ('2020-01-01') to ('2021-01-01');"
        "create table parts_2 partition of parts for values from ('2021-01-01') to ('2022-01-01');"
        "insert into parts (id, day) select n, date '2020-06-01' + n * 90 from generate_series(1, 5) n",
        "status = 'done' and worker_id is null",
    ),
    "SQLite, the smallest": Shape(
        "todo",
        "create table todo (id integer primary key, what text, status text default 'todo');"
        "insert into todo (what) values ('a'), ('b'), ('c'), ('d'), ('e')",
        "status = 'done'",
        dialect="sqlite",
    ),
    "SQLite, numbers for flags and times as text": Shape(
        "pages",
        "create table pages (url text primary key, processed integer not null default 0, locked_at text,"
        " locked_by text, attempts integer default 0, last_error text);"
        "insert into pages (url) values ('a'), ('b'), ('c'), ('d'), ('e'); insert into pages (url, processed)"
        " values ('z', 1)",
        "processed = 1 and locked_by is not null",
        others=("url = 'z' and processed = 1 and locked_by is null", 1),
        dialect="sqlite",
    ),
    "SQLite, a check constraint and capitals": Shape(
        "Orders",
        'create table "Orders" ("OrderId" integer primary key, "State" text not null default \'Pending\''
        " check (\"State\" in ('Pending', 'Processing', 'Shipped', 'Cancelled')), \"LockedBy\" text);"
        'insert into "Orders" ("OrderId") values (1), (2), (3), (4), (5);'
        "insert into \"Orders\" (\"State\") values ('Cancelled')",
        "\"State\" = 'Shipped'",
        others=("\"State\" = 'Cancelled'", 1),
        dialect="sqlite",
    ),
}  # fmt: skip


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", SHAPES)
def test_an_adopted_table_is_worked_off_by_the_file_as_it_was_written(
    name: str, request: pytest.FixtureRequest, command: Command
) -> None:
    """Issue: adopt --yes --write gives a file with which run --drain works the rows off."""
    shape = SHAPES[name]
    db: Db = request.getfixturevalue("lite" if shape.dialect == "sqlite" else "pg")
    db.execute(shape.ddl)
    count = f'select count(*) from "{shape.table}" where '
    before = db.value(count + shape.done)
    app = f"adopted_{next(_numbers)}"
    adopted = command("adopt", db.url, shape.table, "--yes", "--write", f"{app}.py")
    assert adopted.code == 0, adopted
    assert ("required first" in adopted.out) == shape.migrate, adopted.out
    if shape.migrate:
        with pytest.raises(RowmillError) as refused:
            find_app(f"{app}:mill").run(drain=True)
        assert "rowmill migrate" in f"{refused.value} {refused.value.hint}"
        migrated = command("migrate", f"{app}:mill", "--apply")
        assert migrated.code == 0, migrated
    if name == "SQLite, the smallest":
        ended = command("run", f"{app}:mill", "--drain")
        assert ended.code == 0, ended
    else:  # the same worker, without a process of its own
        tally = find_app(f"{app}:mill").run(drain=True)
        assert tally.completed == shape.ready
    assert db.value(count + shape.done) - before == shape.ready, adopted.out
    if shape.others:
        assert db.value(count + shape.others[0]) == shape.others[1]
