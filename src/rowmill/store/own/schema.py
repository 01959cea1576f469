"""rowmill's own tables: made, and later changed, by numbered steps that only go forward.

A fresh install is the sum of all steps. ``rowmill_schema`` holds the numbers of those that were taken, so that any
version of rowmill finds its way from any older one, and never takes a step twice.

In a step's text ``own.`` stands for the schema the tables live in, and types are PostgreSQL's; on SQLite times and
documents are text.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ...declare.states import UNFINISHED
from ...errors import DeclarationError, Refused
from ..database import Database, Run
from ..dialect import IDENTITY, POSTGRES, SQLITE
from ..urls import redact

_LOCK = 7_077_201_455  # of the advisory lock: any number that is nobody else's


@dataclass(frozen=True)
class Step:
    """One change of rowmill's own tables, made in one transaction."""

    number: int
    what: str
    statements: tuple[str, ...]
    #: By dialect, what only it has a word for: storage parameters, functions.
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


WORKERS = Step(
    1,
    "rowmill_workers: who works, on what, and when each was last heard of",
    (
        """create table if not exists own.rowmill_workers (
  id text primary key,
  incarnation text not null,
  host text not null,
  pid integer not null,
  lanes text not null,
  started_at timestamptz not null,
  seen_at timestamptz not null,
  state text not null,
  current text not null default '[]',
  completed bigint not null default 0,
  failed bigint not null default 0,
  lost bigint not null default 0,
  version text not null default ''
)""",
    ),
)

GATES = Step(
    2,
    "rowmill_gates: the state of every gate by key, pauses and budgets",
    (
        # An empty lane is the whole environment, an empty dim the whole lane.
        """create table if not exists own.rowmill_gates (
  lane text not null,
  dim text not null,
  key text not null,
  version bigint not null default 0,
  touched_at timestamptz,
  tokens double precision,
  refilled_at timestamptz,
  delay double precision,
  cells text,
  streak integer not null default 0,
  open_until timestamptz,
  last_success_at timestamptz,
  last_failure_at timestamptz,
  closed_until timestamptz,
  paused_at timestamptz,
  paused_until timestamptz,
  reason text,
  most integer,
  primary key (lane, dim, key)
)""",
    ),
    {
        POSTGRES.name: (
            # Keys are walked in turn, in the order of their bytes; a row is written by every claim that takes from its
            # key.
            """alter table own.rowmill_gates alter column key type text collate "C\"""",
            """alter table own.rowmill_gates set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05,
  autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0)""",
        )
    },
)

_JOBS = """create table own.rowmill_jobs (
  id {key},
  task text not null,
  queue text not null default 'default',
  state text not null default 'ready',
  priority smallint not null default 0,
  only_one boolean not null default {true},
  attempts integer not null default 0,
  max_attempts integer,
  run_after {time} not null default {now}{check},
  claimed_at {time},
  heartbeat_at {time},
  finished_at {time},
  created_at {time} not null default {now},
  parent_id bigint,
  worker text,
  args {json} not null default '{{}}',
  key text,
  branch text,
  needs text,
  error text,
  result {json},
  progress {json},
  history {json}
)"""
_UNFINISHED = "state in (" + ", ".join(f"'{state}'" for state in UNFINISHED) + ")"
#: Claimable rows alone stand in the index that a claim walks; a row that has ended is in none that a claim touches.
_JOBS_INDEXES = (
    "create index rowmill_jobs_ready on own.rowmill_jobs (queue, priority, run_after, id) where state = 'ready'",
    "create index rowmill_jobs_running on own.rowmill_jobs (queue, id) where state = 'running'",
    "create index rowmill_jobs_joining on own.rowmill_jobs (id) where state = 'joining'",
    "create unique index rowmill_jobs_only_one on own.rowmill_jobs (task, key)"
    f" where key is not null and only_one and {_UNFINISHED}",
    "create index rowmill_jobs_key on own.rowmill_jobs (task, key) where key is not null",
    f"create index rowmill_jobs_open on own.rowmill_jobs (parent_id) where parent_id is not null and {_UNFINISHED}",
    "create index rowmill_jobs_children on own.rowmill_jobs (parent_id, branch) where parent_id is not null",
    "create index rowmill_jobs_ended on own.rowmill_jobs (task, finished_at) where finished_at is not null",
)
#: For callers in any language. A job with a key that is taken is not added: the answer is the one that has it.
_ENQUEUE = f"""create function own.rowmill_enqueue(
  task text, args jsonb default '{{}}', run_after timestamptz default now(), priority int default 0,
  key text default null, queue text default 'default', max_attempts int default null
) returns bigint language plpgsql set search_path from current as $$
declare found bigint;
begin
  for attempt in 1..10 loop
    insert into own.rowmill_jobs as j (task, args, run_after, priority, key, queue, max_attempts)
    values (rowmill_enqueue.task, coalesce(rowmill_enqueue.args, '{{}}'), coalesce(rowmill_enqueue.run_after, now()),
            rowmill_enqueue.priority, rowmill_enqueue.key, rowmill_enqueue.queue, rowmill_enqueue.max_attempts)
    on conflict do nothing
    returning j.id into found;
    if found is null then
      select j.id into found from own.rowmill_jobs j
      where j.task = rowmill_enqueue.task and j.key = rowmill_enqueue.key and j.only_one and j.{_UNFINISHED};
    end if;
    exit when found is not null;
  end loop;
  perform pg_notify('rowmill', '');
  return found;
end $$"""
#: PostgreSQL keeps times that no driver reads: a claim that met one would take no job behind it either.
_READABLE = " check (run_after between '0001-01-02Z' and '9999-12-30Z' or not isfinite(run_after))"
JOBS = Step(
    3,
    "rowmill_jobs: work that has no table of its own",
    (),
    {POSTGRES.name: (
        _JOBS.format(
            key=f"{IDENTITY} with (fillfactor = 33)",
            true="true", time="timestamptz", now="now()", json="jsonb", check=_READABLE,
        ),
        *_JOBS_INDEXES,
        # Every row is written three times and then rests. Of each page two thirds are left for that, and as much of the
        # key's index: a row that must move to another page costs a lock's record and two pages more, an entry that
        # finds its page full the search for one that may go. And a vacuum that comes by the thousand, not by the
        # share of a table that is mostly ended rows.
        "alter table own.rowmill_jobs set (fillfactor = 33, autovacuum_vacuum_scale_factor = 0.01,"
        " autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_limit = 2000,"
        " autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 5000)",
        # A distributed table has no such setting.
        "do $$ begin alter table own.rowmill_jobs alter column state set statistics 1000;"
        " exception when feature_not_supported then null; end $$",
        _ENQUEUE,
    ), SQLITE.name: (
        _JOBS.format(
            key="integer primary key autoincrement", true="1", time="datetime", json="text",
            now="(strftime('%Y-%m-%d %H:%M:%f', 'now'))",
            check=" check (run_after glob '????-??-?? ??:??:??*')",
        ),
        *_JOBS_INDEXES,
    )},
)  # fmt: skip

FLOWS = Step(
    4,
    "rowmill_steps: what the steps of a job returned",
    (
        """create table own.rowmill_steps (
  job_id bigint not null references own.rowmill_jobs (id) on delete cascade,
  name text not null,
  result jsonb,
  primary key (job_id, name)
)""",
    ),
)

CRONS = Step(
    5,
    "rowmill_crons: up to which tick each cron was enqueued",
    (
        """create table own.rowmill_crons (
  name text primary key,
  expression text not null,
  tz text not null,
  last_tick timestamptz not null
)""",
    ),
)

DDL = Step(
    6,
    "rowmill_ddl: what migrate added to your tables, and what undoes it",
    (
        """create table if not exists own.rowmill_ddl (
  id text primary key,
  position integer not null,
  kind text not null,
  relation text not null,
  name text not null,
  value text not null default '',
  made text not null,
  undo text not null,
  state text not null
)""",
    ),
)

FAILURES = Step(
    7,
    "rowmill_failures: every run that did not end well, for a while",
    (
        f"""create table if not exists own.rowmill_failures (
  id {IDENTITY},
  at timestamptz not null,
  lane text not null,
  row_id text not null,
  attempt integer,
  worker text,
  outcome text not null,
  class text,
  fingerprint text not null,
  message text not null,
  traceback text
)""",
        "create index if not exists rowmill_failures_family on own.rowmill_failures (lane, fingerprint, id)",
        "create index if not exists rowmill_failures_row on own.rowmill_failures (lane, row_id, id)",
        "create index if not exists rowmill_failures_at on own.rowmill_failures (at)",
    ),
    {
        POSTGRES.name: (
            # Written once, read by the operator, deleted from its old end.
            "alter table own.rowmill_failures"
            " set (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000)",
        )
    },
)

# The columns of this step, and no later ones: what is added to COUNTS is a column that a later step adds.
_NUMBERS = ",\n".join(
    f"  {name} bigint not null default 0"
    for name in (
        "started",
        "done",
        "retried",
        "dead",
        "snoozed",
        "canceled",
        "lost",
        "swept",
        "run_us",
        *(f"t{n}" for n in range(17)),
    )
)
# Minutes are counted since 1970: both databases order them alike, and a chart steps through them by one.
MINUTES = Step(
    8,
    "rowmill_minutes: what each lane did in each minute, and how much memory each worker has",
    (
        f"create table own.rowmill_minutes (\n  lane text not null,\n  minute bigint not null,\n{_NUMBERS},\n"
        "  primary key (lane, minute)\n)",
        "alter table own.rowmill_workers add column memory bigint not null default 0",
    ),
    {
        POSTGRES.name: (
            # The row of the present minute is written every few seconds by every worker: room for that on its page.
            "alter table own.rowmill_minutes set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05)",
        )
    },
)

ACCESS = Step(
    9,
    "rowmill_tokens, rowmill_audit: who may use the dashboard and the API, and what was done there",
    (
        """create table own.rowmill_tokens (
  id text primary key,
  name text not null,
  digest text not null unique,
  scopes text not null,
  lanes text,
  session_of text,
  created_at timestamptz not null,
  created_by text not null,
  expires_at timestamptz,
  used_at timestamptz,
  revoked_at timestamptz
)""",
        f"""create table own.rowmill_audit (
  id {IDENTITY},
  at timestamptz not null,
  who text not null,
  token text,
  address text,
  action text not null,
  environment text,
  lane text,
  target text,
  outcome text not null,
  detail text
)""",
    ),
)

RECOVERY = Step(
    10,
    "rowmill_sightings, rowmill_suspects: running rows that tell no time, and rows taken back from a dead worker",
    (
        """create table own.rowmill_sightings (
  lane text not null,
  row_id text not null,
  seen_at timestamptz not null,
  primary key (lane, row_id)
)""",
        """create table own.rowmill_suspects (
  lane text not null,
  row_id text not null,
  swept_at timestamptz not null,
  reclaims integer not null default 1,
  primary key (lane, row_id)
)""",
        "alter table own.rowmill_workers add column leases text not null default '{}'",
    ),
)

LIVENESS = Step(
    11,
    "rowmill_workers: the process of each worker, and the advisory lock that it holds while it is connected",
    (
        "alter table own.rowmill_workers add column process text",
        "alter table own.rowmill_workers add column lock_id bigint",
    ),
)

WAITS = Step(
    12,
    "rowmill_waits: rows that wait for a condition, and until when",
    (
        # key: the parts of the row's key as JSON. due: what run_after was set to when the row began to wait; a row that
        # has another value there waits no more.
        """create table own.rowmill_waits (
  lane text not null,
  row_id text not null,
  key jsonb not null,
  condition text not null,
  due text not null,
  since timestamptz not null,
  until_at timestamptz not null,
  on_timeout text not null,
  primary key (lane, row_id)
)""",
    ),
)

INPUTS = Step(
    13,
    "rowmill_stale_runs: rows whose inputs changed while they were worked on, until an outcome is final",
    (
        """create table own.rowmill_stale_runs (
  lane text not null,
  row_id text not null,
  runs integer not null default 1,
  since timestamptz not null,
  last_at timestamptz not null,
  primary key (lane, row_id)
)""",
        "alter table own.rowmill_minutes add column stale bigint not null default 0",
    ),
)

RUN_LOGS = Step(
    14,
    "rowmill_run_logs: what the last runs of each row logged",
    (
        # lines: a JSON list, each with the seconds before the end of the run, the level, the text and a chunk's row.
        f"""create table own.rowmill_run_logs (
  id {IDENTITY},
  at timestamptz not null,
  kept_until timestamptz not null,
  lane text not null,
  row_id text not null,
  attempt integer not null,
  worker text not null,
  outcome text not null,
  dropped integer not null default 0,
  lines text not null
)""",
        "create index rowmill_run_logs_row on own.rowmill_run_logs (lane, row_id, id)",
        "create index rowmill_run_logs_kept on own.rowmill_run_logs (kept_until)",
    ),
    {
        POSTGRES.name: (
            "alter table own.rowmill_run_logs"
            " set (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000)",
        )
    },
)

STEPS: tuple[Step, ...] = (
    WORKERS, GATES, JOBS, FLOWS, CRONS, DDL, FAILURES, MINUTES, ACCESS, RECOVERY, LIVENESS, WAITS, INPUTS, RUN_LOGS,
)  # fmt: skip
#: In the list of steps: the schema itself was made by rowmill.
SCHEMA_MADE = 0
_LEDGER = "create table if not exists own.rowmill_schema (step integer primary key, what text not null)"


@dataclass(frozen=True)
class OwnTables:
    """Which of rowmill's own tables are there, and, where some are not, why they could not be made."""

    steps: frozenset[int]
    refused: str | None = None

    def has(self, step: Step) -> bool:
        """Whether a step was taken."""
        return step.number in self.steps

    @property
    def complete(self) -> bool:
        """Whether all steps were taken."""
        return all(self.has(step) for step in STEPS)


#: Of many databases: those that had all of rowmill's own tables, and when that was.
_COMPLETE: weakref.WeakKeyDictionary[Database, tuple[OwnTables, float]] = weakref.WeakKeyDictionary()
_MOMENT = 5.0


async def need(database: Database, *steps: Step) -> None:
    """Make sure of the tables that some steps make; raises DeclarationError where the role may not."""
    own = await ensure(database)
    for step in steps:
        if not own.has(step):
            raise DeclarationError(
                f"there is no {step.what.partition(':')[0]} in {redact(database.url)}, and it could not be created:"
                f" {own.refused}",
                hint="run rowmill migrate APP --apply, or await mill.prepare(), with a role that may create tables",
            )


async def taken(database: Database) -> OwnTables:
    """Which steps were taken in this database. Of one of many it is not asked again within a moment."""
    if database.shares is None:
        return OwnTables(await database.read(lambda run: _taken(database, run)))
    known, at = _COMPLETE.get(database, (None, 0.0))
    if known is None or time.monotonic() - at > _MOMENT:
        known = OwnTables(await database.read(lambda run: _taken(database, run)))
        if known.complete:
            _COMPLETE[database] = known, time.monotonic()
    return known


async def ensure(database: Database, steps: tuple[Step, ...] = STEPS) -> OwnTables:
    """Take the steps that are missing, where the role may. Several processes may do so at the same moment."""
    own = OwnTables(frozenset())
    try:
        await database.create()
        own = await taken(database)
        if all(own.has(step) for step in steps):
            return own
        await database.long_transaction(lambda run: _take(database, run, steps))
        return await taken(database)
    except Refused as error:
        return OwnTables(own.steps, error.message)


def take(database: Database, run: Run) -> None:
    """Take the steps that are missing in a transaction of the caller's."""
    _take(database, run, STEPS)


def ddl(database: Database, step: Step) -> list[str]:
    """The statements of a step, as this database takes them."""
    texts = (*map(database.sql.ddl, step.statements), *step.only.get(database.sql.name, ()))
    return [_placed(database, text) for text in texts]


def own_tables() -> list[str]:
    """Every table that the steps make, those that refer to others first, the list of steps last."""
    made = re.findall(r"\bcreate table (?:if not exists )?own\.(\w+)", _every_statement())
    return [*reversed(dict.fromkeys(made)), "rowmill_schema"]


def own_functions() -> list[str]:
    """Every function that the steps make; PostgreSQL only."""
    return list(dict.fromkeys(re.findall(r"\bcreate (?:or replace )?function own\.(\w+)", _every_statement())))


def _every_statement() -> str:
    return "\n".join(text for step in STEPS for text in (*step.statements, *chain.from_iterable(step.only.values())))


def script(database: Database, run: Run, missing: Sequence[Step]) -> list[str]:
    """The statements that take the missing steps and note them: those that rowmill runs, or somebody else by hand."""
    notes = [(step.number, step.what.replace("'", "''"), ddl(database, step)) for step in missing]
    made = [_placed(database, _LEDGER)]
    if database.schema is not None and not _schema_exists(database, run):
        made.insert(0, f"create schema {database.dialect.identifier_preparer.quote(database.schema)}")
        notes.insert(0, (SCHEMA_MADE, "the schema", []))
    for number, what, statements in notes:
        noted = f"insert into {database.own('rowmill_schema')} (step, what) values ({number}, '{what}')"
        made += [*statements, noted]
    return made


def _placed(database: Database, text: str) -> str:
    return re.sub(r"\bown\.(\w+)", lambda match: database.own(match.group(1)), text)


def _taken(database: Database, run: Run) -> frozenset[int]:
    if not exists(database, run, "rowmill_schema"):
        return frozenset()
    return frozenset(row[0] for row in run(f"select step from {database.own('rowmill_schema')}", ()))


def _take(database: Database, run: Run, steps: tuple[Step, ...]) -> None:
    if lock := database.sql.lock_number:
        database.sql.named(run)(lock, {"number": _LOCK})
    missing = [step for step in steps if step.number not in _taken(database, run)]
    for text in script(database, run, missing) if missing else ():
        run(text, ())


def _schema_exists(database: Database, run: Run) -> bool:
    """Asked first: a role that may not create schemas may still use one that is there."""
    return bool(run("select 1 from pg_namespace where nspname = $1::text", (database.schema,)))


def exists(database: Database, run: Run, table: str) -> bool:
    """Whether one of rowmill's own tables is there."""
    return bool(run(*database.sql.has_table(database.own(table))))
