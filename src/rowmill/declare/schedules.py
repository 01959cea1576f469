"""Schedules in the user's own table: the role of each column, and what one row means.

A row is a cron whose expression, time zone, task and arguments can be changed while workers run. An invalid row is
reported, and does not stop other rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DeclarationError, WrongArguments, did_you_mean
from . import django_models
from .cron import Cron
from .task import Task

#: Role -> names of columns that match it, best first. ``missed`` is never matched; ``roles=`` has to name it.
COLUMNS: dict[str, tuple[str, ...]] = {
    "expression": ("expression", "cron", "cron_expression", "crontab", "schedule"),
    "task": ("task", "task_name"),
    "args": ("args", "arguments", "kwargs"),
    "tz": ("tz", "timezone", "time_zone"),
    "enabled": ("enabled", "is_enabled", "active", "is_active"),
    "missed": (),
}
NEEDED = ("expression", "task")
#: The values of an ``enabled`` column, as text, that mean enabled. NULL means disabled.
ON = ("true", "t", "1", "yes", "y", "on")


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedules:
    """A table of schedules, created by ``mill.schedules``."""

    table: Any
    roles: Mapping[str, str | None] = field(default_factory=dict)
    #: Defaults for rows that do not set their own.
    tz: str = "UTC"
    missed: str = "skip"
    environments: Sequence[str] | None = None
    #: The Mill's own collections, not copies, so that later declarations count, too.
    tasks: Mapping[str, Task[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if django_models.is_model(self.table):
            table, options = django_models.by_columns(self.table, {"roles": self.roles})
            object.__setattr__(self, "table", table)
            object.__setattr__(self, "roles", options["roles"])
        for role, column in self.roles.items():
            if role not in COLUMNS:
                raise DeclarationError(
                    f"{self}: there is no role {role!r}", hint=f"{did_you_mean(role, COLUMNS)} (roles={{...}})"
                )
            if column is None and role in NEEDED:
                raise DeclarationError(f"{self}: no schedule works without the role {role}", hint="name its column")
        try:
            Cron("* * * * *", self.tz, self.missed)
        except DeclarationError as error:
            raise DeclarationError(f"{self}: {error.message.partition(': ')[2]}", hint=error.hint) from None

    def __str__(self) -> str:
        table = getattr(self.table, "__table__", self.table)
        return f"schedules in {str(getattr(table, 'fullname', table))!r}"

    def serves(self, environment: str) -> bool:
        """Whether its rows apply in an environment."""
        return self.environments is None or environment in self.environments


@dataclass(frozen=True)
class ScheduleRow:
    """One row: its texts by role, and what they mean."""

    #: Unique among all schedules and crons of a database.
    name: str
    key: tuple[str, ...]
    texts: Mapping[str, str | None]
    enabled: bool
    cron: Cron | None = None
    task: Task[Any, Any] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    #: Why the row is not enqueued, and how to fix it.
    problem: str | None = None
    hint: str | None = None

    @property
    def id(self) -> str:
        """The row's key, as text."""
        return ",".join(self.key)


def schedule(
    source: Schedules, environment: str, name: str, key: tuple[str, ...], texts: Mapping[str, str | None]
) -> ScheduleRow:
    """Parse a row."""
    switch = texts.get("enabled")
    on = "enabled" not in texts or (switch is not None and switch.strip().lower() in ON)
    cron, task, problem, hint = None, None, None, None
    args: Mapping[str, Any] = {}
    try:
        task = _task(source, environment, texts.get("task"))
        cron = Cron(
            (texts.get("expression") or "").strip(), texts.get("tz") or source.tz, texts.get("missed") or source.missed
        )
        args = _arguments(task, texts.get("args"))
    except DeclarationError as error:
        problem, hint = error.message, error.hint
    except WrongArguments as error:
        problem, hint = error.message, error.hint or f"the args of task {texts.get('task')!r}, as a JSON object"
    return ScheduleRow(name, key, texts, on, cron, task, args, problem, hint)


def _task(source: Schedules, environment: str, name: str | None) -> Task[Any, Any]:
    if not name:
        raise DeclarationError("it names no task", hint=f"one of {', '.join(source.tasks)}")
    task = source.tasks.get(name)
    if task is None:
        raise DeclarationError(f"there is no task {name!r}", hint=did_you_mean(name, source.tasks))
    if task.environments is not None and environment not in task.environments:
        raise DeclarationError(
            f"task {name!r} is not served in environment {environment!r}", hint=f"in {', '.join(task.environments)}"
        )
    return task


def _arguments(task: Task[Any, Any], text: str | None) -> Mapping[str, Any]:
    try:
        args = json.loads(text) if text and text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise WrongArguments(f"its args are not JSON: {error}") from None
    if not isinstance(args, dict):
        raise WrongArguments(f"its args must be a JSON object: task {task.name!r} takes {task.signature}")
    task.signature.unpack(args)
    if missing := [name for name in task.signature.needs() if name not in args]:
        raise WrongArguments(f"its args lack {', '.join(missing)}: task {task.name!r} takes {task.signature}")
    return args
