"""What stands in ``rowmill_jobs``, for tests that ask what was enqueued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..caller_transactions import Verb
from .job_rows import moment


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A job that is in the table: which task it is of, and what its handler gets, as JSON has it."""

    id: int
    task: str
    args: Mapping[str, Any]
    state: str
    run_after: datetime
    priority: int
    key: str | None
    queue: str


def enqueued(dialect: str, schema: str | None, task: str | None) -> Verb[list[Enqueued]]:
    """All jobs, or those of one task, in the order in which they were enqueued."""
    table = "rowmill_jobs"
    if schema is not None and dialect == "postgresql":
        quoted = schema.replace('"', '""')
        table = f'"{quoted}".{table}'
    which, values = ("", {}) if task is None else (" where task = :task", {"task": task})
    text = f"select id, task, args, state, run_after, priority, key, queue from {table}{which} order by id"
    return [_job(*row) for row in (yield text, values)]


def _job(id: int, task: str, args: Any, state: str, run_after: Any, *rest: Any) -> Enqueued:
    given = json.loads(args) if isinstance(args, str) else args
    return Enqueued(id, task, given, state, moment(run_after), *rest)
