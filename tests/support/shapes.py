"""The lanes that the interleaver runs: a table of the user's, with inputs, in chunks, with gates; and tasks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rowmill.declare.gates import Breaker, Concurrency
from rowmill.declare.lane import Lane, declare
from rowmill.declare.task import Queue
from rowmill.declare.task import queue as declare_queue
from rowmill.prove.fake_handler import fake_task, in_chunks, nothing
from rowmill.store.dialect import dialect_named

_COLUMNS = """create table {name} (
  id bigint primary key,
  status text not null,
  domain text,
  worker text,
  claimed_at {time},
  heartbeat_at {time},
  run_after {time},
  attempts integer not null default 0,
  failures integer not null default 0,
  reclaims integer not null default 0,
  error text,
  finished_at {time},
  body text,
  expires_at {time},
  shard integer not null default 0
)"""
_STATES: dict[str, Any] = {
    "ready": {"status": ["queued", "failed"]},
    "running": {"status": "running"},
    "done": {"status": "done"},
    "retry": {"status": "failed"},
    "dead": {"status": "dead"},
    "canceled": {"status": "canceled"},
    "lease": timedelta(minutes=5),
}


def tables(dialect: str) -> list[str]:
    """The tables of all shapes but tasks."""
    time = dialect_named(dialect).ddl("timestamptz")
    names = ("prove_plain", "prove_inputs", "prove_gated", "prove_turned", "prove_walked", "prove_chunked",
             "prove_sharded")  # fmt: skip
    return [_COLUMNS.format(name=name, time=time) for name in names]


def plain() -> Lane:
    """A lane with a lease, a heartbeat and all counters."""
    return declare("prove_plain", nothing, {**_STATES, "name": "plain"})


def inputs() -> Lane:
    """A lane whose rows are edited while they are worked on; its bound is too far away to matter."""
    bound = {"inputs": ["body"], "settle_after": 1_000_000}
    return declare("prove_inputs", nothing, {**_STATES, **bound, "name": "inputs"})


def chunked() -> Lane:
    """The same, with a handler that gets a list of jobs: one row's end is not another's. Every second row expires."""
    expiring = {"roles": {"expires_at": "expires_at"}}
    return declare("prove_chunked", in_chunks(nothing), {**_STATES, **expiring, "name": "chunked", "chunk": 20})


def gated(limit: int = 1) -> Lane:
    """A lane whose rows run one or two at a time by their domain: on PostgreSQL a lock for a range of keys."""
    return declare("prove_gated", nothing, {**_STATES, "name": "gated", "gates": [Concurrency(limit, by="domain")]})


def turned(limit: int = 1) -> Lane:
    """A limit and a breaker by one key: on PostgreSQL a lock for each key."""
    gates = [Concurrency(limit, by="domain"), Breaker(1000, timedelta(minutes=1), by="domain")]
    return declare("prove_turned", nothing, {**_STATES, "name": "turned", "gates": gates})


def sharded() -> Lane:
    """A lane over two shards of its table, with a limit by a key that both have."""
    shards = {"shard": {"shard": [0, 1]}, "gates": [Concurrency(2, by="domain")]}
    return declare("prove_sharded", nothing, {**_STATES, **shards, "name": "sharded"})


def walked() -> Lane:
    """Two gates, one by a key and one for the whole lane: on PostgreSQL a transaction of several statements."""
    gates = [Concurrency(2, by="domain"), Concurrency(3)]
    return declare("prove_walked", nothing, {**_STATES, "name": "walked", "gates": gates})


def tasks() -> Queue:
    """Jobs of rowmill's own table."""
    made = declare_queue("proved", {})
    made.tasks["task"] = fake_task("task", "proved", nothing)
    return made


SHAPES: dict[str, Callable[[], Lane]] = {
    "plain": plain, "inputs": inputs, "chunked": chunked, "gated": gated, "turned": turned, "walked": walked,
    "sharded": sharded,
    "tasks": tasks,
}  # fmt: skip

#: The column that is edited beside the workers of a shape.
EDITED = {"inputs": "body"}
