"""Roles: what a column means to the engine.

A column takes a role if its name is the role's name or one of its common names, and its type fits. Camel case counts as
snake case. ``roles=`` in a declaration maps other columns, or disables a role with None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import DeclarationError, did_you_mean

TEXT, TIME, COUNT, ANY = "text", "time", "whole number", "any"

#: role -> (the kind of column it needs, the names that match it, best first)
ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "worker": (TEXT, ("worker", "locked_by", "worker_id")),
    "claimed_at": (TIME, ("claimed_at", "locked_at")),
    "heartbeat_at": (TIME, ("heartbeat_at",)),
    "attempts": (COUNT, ("attempts",)),
    "failures": (COUNT, ("failures",)),
    "reclaims": (COUNT, ("reclaims",)),
    "max_attempts": (COUNT, ("max_attempts",)),
    "run_after": (TIME, ("run_after", "next_retry_at")),
    "expires_at": (TIME, ("expires_at",)),
    "error": (TEXT, ("error", "last_error", "error_message")),
    "finished_at": (TIME, ("finished_at", "completed_at")),
    "updated_at": (TIME, ("updated_at",)),
    "priority": (COUNT, ("priority",)),
    "progress": (ANY, ("progress",)),
    "traceparent": (TEXT, ("traceparent",)),
}
#: Roles whose columns the engine only reads.
READ_ONLY = ("max_attempts", "priority", "expires_at", "traceparent")
#: Roles that a column takes only if ``roles=`` maps it: a table may have such a column for another purpose, and the
#: role ends rows.
ONLY_DECLARED = ("expires_at",)
#: Roles that are shown with a row.
SHOWN = tuple(role for role in ROLES if role not in READ_ONLY)
#: Roles that count events of a row.
COUNTERS = ("attempts", "failures", "reclaims")
#: Times that show that a row's worker is alive, the most reliable first.
SIGNS_OF_LIFE = ("heartbeat_at", "claimed_at", "updated_at")
#: Columns with the time at which a row was created, for the default order. It is no role: the engine does not need it.
CREATED = ("created_at", "inserted_at", "created", "created_on")
#: The times of a row in the order in which they are shown.
ROW_TIMES = ("created_at", "run_after", "expires_at", "claimed_at", "heartbeat_at", "finished_at", "updated_at")


def snake(name: str) -> str:
    """Convert ``lockedBy`` and ``LockedBy`` to ``locked_by``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def like(role: str, column: str) -> bool:
    """Whether a column's name suggests this role for some lane: ``ocr_error``, ``error_message``."""
    return any(snake(column) == twin or snake(column).endswith(f"_{twin}") for twin in ROLES[role][1])


def new_column_name(role: str, columns: Sequence[str]) -> str:
    """An unused name for a new column, in the table's own style, that matches the role."""
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
    """Map roles to columns: first the declared ones, then those with a matching name and type.

    A column that is declared for one role is not matched to another by its name.
    """
    names = list(columns)
    spoken_for = {column for column in declared.values() if column}
    resolved = {role: column for role, column in declared.items() if column}
    for role, (kind, twins) in ROLES.items():
        if role in declared or role in ONLY_DECLARED:
            continue
        for twin in twins:
            match = next((c for c in names if snake(c) == twin and c not in spoken_for and fits(c, kind)), None)
            if match is not None:
                resolved[role] = match
                break
    # If failures were counted in the column that counts claims, each failure would count twice.
    if resolved.get("failures") is not None and resolved.get("failures") == resolved.get("attempts"):
        del resolved["failures"]
    return resolved
