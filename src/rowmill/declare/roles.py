"""Roles: what a column means to the engine.

A column whose name is a role's own, or its usual twin, takes the role if its type fits. Camel case counts as
snake case. ``roles=`` in a declaration maps the others, or switches a role off with None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import DeclarationError, did_you_mean

TEXT, TIME, COUNT, ANY = "text", "time", "whole number", "any"

#: role -> (kind of column it needs, names that mean it, best first)
ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "worker": (TEXT, ("worker", "locked_by", "worker_id")),
    "claimed_at": (TIME, ("claimed_at", "locked_at")),
    "heartbeat_at": (TIME, ("heartbeat_at",)),
    "attempts": (COUNT, ("attempts",)),
    "failures": (COUNT, ("failures",)),
    "reclaims": (COUNT, ("reclaims",)),
    "max_attempts": (COUNT, ("max_attempts",)),
    "run_after": (TIME, ("run_after", "next_retry_at")),
    "error": (TEXT, ("error", "last_error", "error_message")),
    "finished_at": (TIME, ("finished_at", "completed_at")),
    "updated_at": (TIME, ("updated_at",)),
    "priority": (COUNT, ("priority",)),
    "progress": (ANY, ("progress",)),
    "traceparent": (TEXT, ("traceparent",)),
}
#: Roles whose columns the engine reads and never writes.
READ_ONLY = ("max_attempts", "priority", "traceparent")
#: Roles that a row is shown with.
SHOWN = tuple(role for role in ROLES if role not in READ_ONLY)
#: Roles that count what happened to a row.
COUNTERS = ("attempts", "failures", "reclaims")
#: Times that show that a row's holder is alive, the surest first.
SIGNS_OF_LIFE = ("heartbeat_at", "claimed_at", "updated_at")
#: Columns that say when a row was made, for the default order. That is no role: the engine does not need it.
CREATED = ("created_at", "inserted_at", "created", "created_on")
#: The times of a row in the order in which they are shown.
ROW_TIMES = ("created_at", "run_after", "claimed_at", "heartbeat_at", "finished_at", "updated_at")


def snake(name: str) -> str:
    """``lockedBy`` and ``LockedBy`` are ``locked_by``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def like(role: str, column: str) -> bool:
    """Whether a column's name says that it has this role for some lane: ``ocr_error``, ``error_message``."""
    return any(snake(column) == twin or snake(column).endswith(f"_{twin}") for twin in ROLES[role][1])


def new_column_name(role: str, columns: Sequence[str]) -> str:
    """A name for a column to be added, in the table's own style, that the role is found by; never one that is there."""
    taken = {snake(name) for name in columns}
    name = next((n for n in ROLES[role][1] if n not in taken), f"rowmill_{role}")
    camel = any(re.search(r"[a-z][A-Z]", c) for c in columns) and not any("_" in c.strip("_") for c in columns)
    if not camel:
        return name
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def validate(roles: Mapping[str, str | None], where: str) -> None:
    """Refuse a role that does not exist."""
    for role in roles:
        if role in CREATED:
            column = roles[role] or role
            raise DeclarationError(
                f"{where}: {role!r} is not a role; rows are claimed in the order that order_by gives",
                hint=f"order_by={column!r} instead of roles={{{role!r}: {column!r}}}",
            )
        if role not in ROLES:
            raise DeclarationError(
                f"{where}: there is no role {role!r}; the roles are {', '.join(ROLES)}",
                hint=f"{did_you_mean(role, ROLES)} (roles={{...}})",
            )


def resolve(
    declared: Mapping[str, str | None], columns: Iterable[str], fits: Callable[[str, str], bool]
) -> dict[str, str]:
    """Which column takes which role: the declared ones, then those found by name whose type fits.

    A column that the declaration gives to some role is not taken for another by its name.
    """
    names = list(columns)
    spoken_for = {column for column in declared.values() if column}
    found = {role: column for role, column in declared.items() if column}
    for role, (kind, twins) in ROLES.items():
        if role in declared:
            continue
        for twin in twins:
            match = next((c for c in names if snake(c) == twin and c not in spoken_for and fits(c, kind)), None)
            if match is not None:
                found[role] = match
                break
    # Failures counted in the claims' own column would count each failure twice.
    if found.get("failures") is not None and found.get("failures") == found.get("attempts"):
        del found["failures"]
    return found
