"""The shapes that rowmill proves itself with: a table of one's own, three with gates, and tasks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..declare.gates import Breaker, Concurrency
from ..declare.lane import Lane, declare
from ..declare.task import Queue
from ..declare.task import queue as declare_queue
from ..store.dialect import dialect_named
from .fake_handler import fake_task, nothing

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
  finished_at {time}
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
    names = ("prove_plain", "prove_gated", "prove_turned", "prove_walked")
    return [_COLUMNS.format(name=name, time=time) for name in names]


def plain() -> Lane:
    """A lane with a lease, a heartbeat and all counters."""
    return declare("prove_plain", nothing, {**_STATES, "name": "plain"})


def gated(limit: int = 1) -> Lane:
    """A lane whose rows run one or two at a time by their domain: on PostgreSQL a lock for a stretch of keys."""
    return declare("prove_gated", nothing, {**_STATES, "name": "gated", "gates": [Concurrency(limit, by="domain")]})


def turned(limit: int = 1) -> Lane:
    """A limit and a breaker by one key: on PostgreSQL a lock for each key."""
    gates = [Concurrency(limit, by="domain"), Breaker(1000, timedelta(minutes=1), by="domain")]
    return declare("prove_turned", nothing, {**_STATES, "name": "turned", "gates": gates})


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
    "plain": plain, "gated": gated, "turned": turned, "walked": walked, "tasks": tasks,
}  # fmt: skip
