"""Which columns take which roles: by their names, unless the rows say otherwise. The second half of a proposal."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..declare import roles as roles_words
from ..declare.states import NOW
from . import vocabulary
from .propose_states import StateReading
from .table_facts import Column, TableFacts
from .vocabulary import DONE, FAILED, READY

#: What a worker's id may need; a shorter column would refuse the claim.
WORKER_LENGTH = 64
#: Filled in for more rows than this that are only ready: then the column means something else.
_BEFORE = 0.2
#: Written by the engine while a row is held: they must be empty before.
_HELD = ("worker", "claimed_at", "heartbeat_at", "finished_at")


@dataclass
class Roles:
    """Columns by role, those that have to be declared, and what was passed over."""

    facts: TableFacts
    found: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    #: Roles that a lane would give by name to a column that must not have it.
    refused: set[str] = field(default_factory=set)
    _wanted: dict[str, str] = field(default_factory=dict)
    _times: dict[str, dict[str, Any]] = field(default_factory=dict)

    def declared(self, state_columns: set[str]) -> dict[str, str | None]:
        """What ``roles=`` has to say: where names differ, and what must not be taken by name."""
        by_name = roles_words.resolve({}, [c.name for c in self.facts.columns], self._fits_by_name)
        said: dict[str, str | None] = {}
        for role in roles_words.ROLES:
            mine, taken = self.found.get(role), by_name.get(role)
            if mine is not None and mine != taken:
                said[role] = mine
            elif mine is None and taken is not None and (role in self.refused or taken in state_columns):
                said[role] = None
        if self.found.get("max_attempts") and not {"attempts", "failures"} & self.found.keys():
            said["max_attempts"] = None
            del self.found["max_attempts"]
        return said

    def _fits_by_name(self, column: str, kind: str) -> bool:
        found = self.facts.column(column)
        return found is not None and fits(found, kind, self.facts.dialect)

    def times_of(self, state: str) -> dict[str, Any]:
        """Times beside the state that are set when a row gets there: ``sent_at``, ``failed_at``."""
        return dict(self._times.get(state, {}))

    def want(self, role: str, column: str) -> None:
        """A column that is to be added."""
        self._wanted[role] = column
        self.found.pop(role, None)

    def own_name(self, role: str) -> str:
        """What a column for this role would be called in this table."""
        return own_name(role, [c.name for c in self.facts.columns])


def own_name(role: str, columns: list[str]) -> str:
    """A name for a column to be added, in the table's own style, that the role is found by; never one that is there."""
    taken = {roles_words.snake(name) for name in columns}
    name = next((n for n in roles_words.ROLES[role][1] if n not in taken), f"rowmill_{role}")
    camel = any(re.search(r"[a-z][A-Z]", c) for c in columns) and not any("_" in c.strip("_") for c in columns)
    if not camel:
        return name
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def fits(column: Column, kind: str, dialect: str) -> bool:
    """Whether a column's type can take a role's kind of value."""
    if kind == roles_words.TEXT:
        return column.kind == "text"
    if kind == roles_words.COUNT:
        return column.kind == "int"
    if kind == roles_words.TIME:
        return column.kind == "time" or (dialect == "sqlite" and column.kind in ("text", "int", "other"))
    return True


def propose_roles(facts: TableFacts, reading: StateReading) -> Roles:
    """Columns by role."""
    made = Roles(facts)
    idle = _idle_shares(facts, reading)
    failed = _failed_share(facts, reading, idle)
    taken: set[str] = {reading.column.name}
    for role, (kind, twins) in roles_words.ROLES.items():
        for name in dict.fromkeys((*twins, *vocabulary.ROLE_NAMES[role])):
            column = next((c for c in facts.columns if roles_words.snake(c.name) == name), None)
            if column is None:
                continue
            by_name = name in twins
            if column.name in taken or not fits(column, kind, facts.dialect):
                if by_name and column.name == reading.column.name:
                    made.refused.add(role)
                continue
            against = _against(role, column, idle, failed)
            if against is not None:
                if by_name:
                    made.refused.add(role)
                made.notes.append(f"{column.name} is not taken for {role}: {against}")
                continue
            made.found[role] = column.name
            made.refused.discard(role)
            taken.add(column.name)
            break
    _times(made, reading, taken, idle)
    return made


def _against(role: str, column: Column, idle: dict[str, float], failed: float) -> str | None:
    if column.generated:
        return "the database computes it"
    if column.allowed and role not in ("priority", "max_attempts"):
        return f"{column.allowed_by or 'a constraint'} limits its values"
    if column.refers_to and role in ("worker", "error", "attempts", "failures", "priority"):
        return f"it refers to {column.refers_to}"
    if role == "worker" and column.length is not None and column.length < WORKER_LENGTH:
        return f"a worker's id may be longer than its {column.length} characters"
    if role in _HELD and idle.get(column.name, 0.0) - failed > _BEFORE:
        return "it is filled in for rows that nobody has begun"
    return None


def _idle_shares(facts: TableFacts, reading: StateReading) -> dict[str, float]:
    """The share of ready rows in which a column is filled in already."""
    by_value = facts.filled.get(reading.column.name, {})
    if reading.kind == "valued":
        ready = next((value for value, _ in reading.by_class().get(READY, [])), reading.column.default)
    else:
        ready = None if reading.kind == "time" else False
    return dict(by_value.get(ready, {}))


def _failed_share(facts: TableFacts, reading: StateReading, idle: dict[str, float]) -> float:
    """Where one time says done and another failed: the share of rows that failed among those that are not done."""
    if reading.kind == "valued":
        return 0.0
    return max((idle.get(c.name, 0.0) for c in facts.columns if c.kind == "time" and _says(c, FAILED)), default=0.0)


def _says(column: Column, state: str) -> bool:
    event = vocabulary.event_name(column.name)
    return event is not None and event.state == state and event.sure >= 0.7


def _times(made: Roles, reading: StateReading, taken: set[str], idle: dict[str, float]) -> None:
    """Times that say done or failed, where they are not a role's: the user's own code sets them, so the lane does."""
    for column in made.facts.columns:
        if column.kind != "time" or column.name in taken or column.generated or not column.nullable:
            continue
        state = next((state for state in (DONE, FAILED) if _says(column, state)), None)
        if state is None or column.has_default:
            continue
        # Beside a time or a flag that says done, rows that failed are among those that are not done.
        beside = state == FAILED and reading.kind != "valued"
        if not beside and idle.get(column.name, 0.0) > _BEFORE:
            continue
        others = made._times.setdefault(state, {})
        if not others:
            others[column.name] = NOW


def birth(facts: TableFacts) -> Column | None:
    """The column that says when a row was made."""
    for name in vocabulary.BIRTHS:
        for column in facts.columns:
            if roles_words.snake(column.name) == name and fits(column, roles_words.TIME, facts.dialect):
                return column
    return None
