"""The tables rowmill is measured on: a user's own, as he would have it, on both databases.

``TABLES`` is open: what has these members can be measured. rowmill's own table belongs here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

_ENUM = "create type enrichment_status as enum ('queued', 'running', 'succeeded', 'failed', 'dead')"
_POSTGRES = {
    "key": "uuid not null default gen_random_uuid()",
    "uuid": "uuid",
    "status": "enrichment_status",
    "time": "timestamptz",
    "now": "timestamptz not null default now()",
}
_HEX = "(lower(hex(randomblob(16))))"
_SQLITE = {
    "key": f"text not null default {_HEX}",
    "uuid": "text",
    "status": "text",
    "time": "datetime",
    "now": "datetime not null default (strftime('%Y-%m-%d %H:%M:%f', 'now'))",
}
_COLUMNS = """
    id {key} primary key,
    link_canonical_id {uuid} not null unique,
    status {status} not null default 'queued',
    attempts integer not null default 0,
    max_attempts integer not null default 2,
    run_after {now},
    locked_at {time},
    locked_by text,
    heartbeat_at {time},
    last_error text,
    created_at {now},
    updated_at {now},
    url text not null,
    domain text not null
"""
#: As ``rowmill migrate`` proposes them: what is claimable, in the lane's order; and what is running, so that a sweep
#: does not read the whole table.
_INDEXES = (
    "create index {name}_ready on {name} (run_after, id) where status in ('queued', 'failed')",
    "create index {name}_running on {name} (locked_at) where status = 'running'",
)
#: The same by domain: what of a key is claimable, and what of it is running.
_BY_KEY = (
    "create index {name}_turns on {name} (domain, run_after, id) where status in ('queued', 'failed')",
    "create index {name}_held on {name} (domain) where status = 'running'",
)


@dataclass(frozen=True)
class Enrichment:
    """enrichment_jobs: two uuids, twelve more columns, four indexes. ``lanes`` tables of this form, each a lane."""

    lanes: int = 1
    partitions: int = 0
    #: How many domains the rows are spread over; more than one: indexed by domain too, as gates need it.
    keys: int = 1
    #: Partitions by a bucket instead, which the lane names as its shard.
    buckets: int = 0

    @property
    def names(self) -> list[str]:
        return ["enrichment_jobs", *(f"enrichment_jobs_{k}" for k in range(2, self.lanes + 1))]

    @property
    def left(self) -> str:
        """How many rows have not ended well."""
        return "select " + " + ".join(f"(select count(*) from {n} where status <> 'succeeded')" for n in self.names)

    @property
    def open(self) -> str:
        """Whether a row waits or runs: two looks into partial indexes, however large the table is."""
        found = [f"exists (select 1 from {n} where status in ('queued', 'failed'))" for n in self.names]
        return "select " + " or ".join(
            [*found, *(f"exists (select 1 from {n} where status = 'running')" for n in self.names)]
        )

    @property
    def wrong(self) -> str:
        """How many rows were not claimed exactly once."""
        return "select " + " + ".join(f"(select count(*) from {n} where attempts <> 1)" for n in self.names)

    def ddl(self, *, sqlite: bool = False) -> list[str]:
        found = [] if sqlite else [_ENUM]
        for name in self.names:
            columns = _COLUMNS.format(**(_SQLITE if sqlite else _POSTGRES))
            if self.buckets:
                columns = columns.replace(" unique", "").replace(" primary key", "")
                columns += ",\n    bucket smallint not null default 0, primary key (bucket, id)"
                found.append(f"create table {name} ({columns}) partition by list (bucket)")
                found.append(f"create index {name}_link on {name} (link_canonical_id)")
                found += [
                    f"create table {name}_p{k} partition of {name} for values in ({k})" for k in range(self.buckets)
                ]
            elif self.partitions:
                # A partitioned table takes no unique constraint without its partition key.
                columns = columns.replace(" unique", "")
                found.append(f"create table {name} ({columns}) partition by hash (id)")
                found.append(f"create index {name}_link on {name} (link_canonical_id)")
                found += [
                    f"create table {name}_p{k} partition of {name} "
                    f"for values with (modulus {self.partitions}, remainder {k})"
                    for k in range(self.partitions)
                ]
            else:
                found.append(f"create table {name} ({columns})")
            first = "(bucket, run_after" if self.buckets else "(run_after"
            indexes = (*_INDEXES, *(_BY_KEY if self.keys > 1 else ()))
            found += [index.format(name=name).replace("(run_after", first) for index in indexes]
        return found

    #: Written when a job is added; the rest is the table's own default.
    @property
    def columns(self) -> tuple[str, ...]:
        return ("link_canonical_id", "url", "domain", "run_after", *(("bucket",) if self.buckets else ()))

    def name_for(self, number: int) -> str:
        """Which of the tables a job goes to."""
        return self.names[number % self.lanes]

    def rows(self, numbers: Iterable[int]) -> list[tuple[Any, ...]]:
        """Rows as if they had come one after another: due since a minute ago, a microsecond apart."""
        due = datetime.now(UTC) - timedelta(minutes=1)
        return [
            (uuid4(), f"https://example.org/{number}", self._domain(number), due + timedelta(microseconds=k))
            + ((number % self.buckets,) if self.buckets else ())
            for k, number in enumerate(numbers)
        ]

    def _domain(self, number: int) -> str:
        return f"host{number % self.keys}.example.org" if self.keys > 1 else "example.org"

    def made(self, first: int, count: int, status: str) -> str:
        """SQL by which the server itself makes rows: such as ended long ago, or such as wait."""
        ended = status == "succeeded"
        past = "now() - interval '1 day'"
        return f"""insert into {self.names[0]} (link_canonical_id, url, domain, status, attempts, locked_by, locked_at,
                heartbeat_at, run_after, created_at)
            select gen_random_uuid(), 'https://example.org/' || i, 'example.org', '{status}', {int(ended)},
                {"'earlier'" if ended else "null"}, {past if ended else "null"}, {past if ended else "null"},
                {past} + i * interval '1 microsecond', {past}
            from generate_series({first}, {first + count - 1}) i"""

    def declare(self, mill: Any, handler: Any, **options: Any) -> None:
        """The lane, as it stands in SPEC.md; what is not about size is left at its default."""
        if self.buckets:
            options["shard"] = {"bucket": range(self.buckets)}
        for name in self.names:
            mill.lane(
                name,
                name=name,
                ready={"status": ["queued", "failed"]},
                running={"status": "running"},
                done={"status": "succeeded"},
                retry={"status": "failed"},
                dead={"status": "dead"},
                max_attempts=2,
                **options,
            )(handler)

    @staticmethod
    def number(job: Any) -> int:
        """The job's number, read from its row."""
        return int(job["url"].rpartition("/")[2])


class Jobs:
    """rowmill_jobs, rowmill's own table for tasks: made by rowmill, filled through its own calls."""

    left = "select count(*) from rowmill_jobs where state <> 'done'"
    open = (
        "select exists (select 1 from rowmill_jobs where state = 'ready')"
        " or exists (select 1 from rowmill_jobs where state = 'running')"
    )
    wrong = "select count(*) from rowmill_jobs where attempts <> 1"

    @staticmethod
    def made(first: int, count: int, status: str) -> str:
        """SQL by which the server itself makes jobs of the runner's task: such as ended long ago, or such as wait."""
        past = "now() - interval '1 day'"
        ended = status == "succeeded"
        return f"""insert into rowmill_jobs (task, args, state, attempts, worker, claimed_at, heartbeat_at, finished_at,
                run_after, created_at)
            select 'noop', jsonb_build_object('number', i), '{"done" if ended else "ready"}', {int(ended)},
                {f"'earlier', {past}, {past}, {past}" if ended else "null, null, null, null"},
                {past} + i * interval '1 microsecond', {past}
            from generate_series({first}, {first + count - 1}) i"""


TABLES = {"enrichment": Enrichment, "jobs": Jobs}


def table(options: dict[str, Any]) -> Any:
    """The table that a runner's options name."""
    kind = TABLES[options.get("table", "enrichment")]
    sizes = {name: options[name] for name in ("lanes", "partitions", "keys", "buckets") if name in options}
    return kind(**sizes)
