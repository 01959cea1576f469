"""Which columns take which roles: by their names, unless the rows say otherwise. The second half of a proposal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..declare import roles as roles_words
from ..declare.states import DEAD, DONE, NOW, READY, RUNNING
from ..errors import DeclarationError, did_you_mean
from ..store.dialect import dialect_named
from . import vocabulary
from .proposal import SAID
from .propose_states import StateReading
from .table_facts import Column, TableFacts
from .vocabulary import FAILED

#: What a worker's id may need; a shorter column would refuse the claim.
WORKER_LENGTH = 64
#: Filled in for more rows than this that are only ready: then the column means something else.
_BEFORE = 0.2
#: Rows that are done and have counted something: from this share on, a counter counts every try.
_COUNTED = 0.5
#: Filled in for at least this share of rows in one state, and for no more than the rest of it in another.
_MOSTLY = 0.9
#: Written by the engine while a row is held: they must be empty before.
_HELD = ("worker", "claimed_at", "heartbeat_at", "finished_at")


@dataclass
class Roles:
    """Columns by role, the roles to declare, and the columns that were passed over."""

    facts: TableFacts
    by_role: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    #: Roles that only the rows speak for, not the names of their columns: to be asked.
    by_rows: set[str] = field(default_factory=set)
    #: Roles that a lane would give by name to a column that must not have it.
    refused: set[str] = field(default_factory=set)
    _wanted: dict[str, str] = field(default_factory=dict)
    _times: dict[str, dict[str, Any]] = field(default_factory=dict)

    def declared(self, state_columns: set[str]) -> dict[str, str | None]:
        """The content of ``roles=``: columns with other names, and columns that must not take a role by their name."""
        by_name = roles_words.resolve({}, [c.name for c in self.facts.columns], self._fits_by_name)
        by_declaration: dict[str, str | None] = {}
        for role in roles_words.ROLES:
            mine, taken = self.by_role.get(role), by_name.get(role)
            if mine is not None and mine != taken:
                by_declaration[role] = mine
            elif mine is None and taken is not None and (role in self.refused or taken in state_columns):
                by_declaration[role] = None
        if self.by_role.get("max_attempts") and not {"attempts", "failures"} & self.by_role.keys():
            by_declaration["max_attempts"] = None
            del self.by_role["max_attempts"]
        return by_declaration

    def _fits_by_name(self, column: str, kind: str) -> bool:
        fact = self.facts.column(column)
        return fact is not None and fits(fact, kind, self.facts.dialect)

    def times_of(self, state: str) -> dict[str, Any]:
        """Times beside the state that are set when a row gets there: ``sent_at``, ``failed_at``."""
        return dict(self._times.get(state, {}))

    def want(self, role: str, column: str) -> None:
        self._wanted[role] = column
        self.by_role.pop(role, None)

    def own_name(self, role: str) -> str:
        """What a column for this role would be called in this table."""
        return roles_words.new_column_name(role, [c.name for c in self.facts.columns])


def fits(column: Column, kind: str, dialect: str) -> bool:
    """Whether a column's type can take a role's kind of value."""
    if kind == roles_words.TEXT:
        return column.kind == "text"
    if kind == roles_words.COUNT:
        return column.kind == "int"
    if kind == roles_words.TIME:
        return column.kind == "time" or (
            not dialect_named(dialect).typed_columns and column.kind in ("text", "int", "other")
        )
    return True


def propose_roles(facts: TableFacts, reading: StateReading, given: Mapping[str, str | None]) -> Roles:
    """Columns by role; ``given``: those that a person named."""
    made = Roles(facts)
    idle = _idle_shares(facts, reading)
    failed = _failed_share(facts, reading, idle)
    taken: set[str] = {reading.column.name}
    for role, chosen in given.items():
        _check_given(facts, role, chosen)
        if chosen:
            made.by_role[role], made.why[role] = chosen, SAID
            taken.add(chosen)
        else:
            made.refused.add(role)
    for role, (kind, twins) in roles_words.ROLES.items():
        if role in given or role in roles_words.ONLY_DECLARED:
            continue
        for column, by_name in _named(facts, role, twins):
            if column.name in taken or not fits(column, kind, facts.dialect):
                if by_name and column.name == reading.column.name:
                    made.refused.add(role)
                continue
            if role == "attempts" and "retry" in vocabulary.parts(facts.bare(column.name)):
                counts, why = _counts_claims(reading, column)
                if not counts:
                    continue
                made.why[role] = why
            against = _against(role, column, idle, failed)
            if against is not None:
                if by_name:
                    made.refused.add(role)
                made.notes.append(f"{column.name} does not get the role {role}: {against}")
                continue
            made.by_role[role] = column.name
            made.refused.discard(role)
            taken.add(column.name)
            break
    _perhaps(made, taken, given)
    _by_rows(made, reading, taken, given)
    _times(made, reading, taken, idle)
    return made


def _named(facts: TableFacts, role: str, twins: Sequence[str]) -> list[tuple[Column, bool]]:
    """Columns whose names mean a role, the surest first, and whether a lane takes them by itself."""
    names = {name: at for at, name in enumerate(dict.fromkeys((*twins, *vocabulary.ROLE_NAMES[role])))}
    by_rank = []
    for column in facts.columns:
        bare, whole = facts.bare(column.name), roles_words.snake(column.name)
        if whole in twins or vocabulary.means(role, bare):
            rank = names.get(whole, names.get(roles_words.snake(bare), len(names)))
            by_rank.append((rank, column, whole in twins))
    return [(column, by_name) for _, column, by_name in sorted(by_rank, key=lambda one: one[0])]


def _perhaps(made: Roles, taken: set[str], given: Mapping[str, str | None]) -> None:
    """Mention columns whose names mean a role and something else, such as ``ocr_started_at``; they take no role."""
    for role in ("worker", "claimed_at", "attempts", "run_after", "error"):
        if role in made.by_role or role in given:
            continue
        for column in made.facts.columns:
            free = column.name not in taken and column.name not in made.facts.key and not column.generated
            if (
                free
                and vocabulary.may_mean(role, made.facts.bare(column.name))
                and (fits(column, roles_words.ROLES[role][0], made.facts.dialect))
            ):
                made.notes.append(f"{column.name} may have the role {role}: --role {role}={column.name}")
                break


def _by_rows(made: Roles, reading: StateReading, taken: set[str], given: Mapping[str, str | None]) -> None:
    """Text columns filled in where the engine would write: a worker on running rows, an error on failed ones."""
    if reading.kind != "valued":
        return
    by_value, by_class = made.facts.filled.get(reading.column.name, {}), reading.by_class()

    def shares(column: Column, *classes: str) -> list[float]:
        values = [value for name in classes for value, _ in by_class.get(name, [])]
        return [by_value[value].get(column.name, 0.0) for value in values if value in by_value]

    for role, present, absent, where in (
        ("worker", (RUNNING,), (READY,), "running"),
        ("error", (FAILED, DEAD), (READY, RUNNING, DONE), "failed"),
    ):
        if role in made.by_role or role in given or role in made.refused:
            continue
        columns = [
            column
            for column in made.facts.columns
            if column.kind == "text" and column.nullable and not column.has_default and column.name not in taken
            and column.name not in made.facts.key and _against(role, column, {}, 0.0) is None
            and min(shares(column, *present), default=0.0) >= _MOSTLY
            and max(shares(column, *absent), default=1.0) <= 1.0 - _MOSTLY
        ]  # fmt: skip
        if len(columns) == 1:
            name = columns[0].name
            made.by_role[role] = name
            made.why[role] = f"filled in on rows that are {where}, empty on those that are ready"
            made.by_rows.add(role)
            taken.add(name)


def _counts_claims(reading: StateReading, column: Column) -> tuple[bool, str]:
    """Whether a retry counter counts every attempt, or only failures: done rows show which."""
    by_value = reading.facts.filled.get(reading.column.name, {})
    ended = [by_value[value] for value, _ in reading.by_class().get(DONE, []) if value in by_value]
    if not ended:
        return True, f"its name says so; if the first try does not count: --role failures={column.name}"
    share = max(shares.get(column.name, 0.0) for shares in ended)
    return share >= _COUNTED, f"its name says so, and {share:.0%} of the rows that are done have counted a try"


def _check_given(facts: TableFacts, role: str, column: str | None) -> None:
    roles_words.validate({role: column}, "--role")
    if column is None:
        return
    chosen = facts.column(column)
    if chosen is None:
        known = [c.name for c in facts.columns]
        raise DeclarationError(f"table {facts.fullname!r} has no column {column!r}", hint=did_you_mean(column, known))
    kind = roles_words.ROLES[role][0]
    if not fits(chosen, kind, facts.dialect):
        raise DeclarationError(
            f"{column} is {chosen.sql_type or chosen.kind}: the role {role} needs a column for a {kind}",
            hint=f"--role {role}=ANOTHER, or --role {role}= to do without",
        )


def _against(role: str, column: Column, idle: dict[str, float], failed: float) -> str | None:
    if column.generated:
        return "the database computes it"
    if column.allowed and role not in roles_words.READ_ONLY:
        return f"{column.allowed_by or 'a constraint'} limits its values"
    if column.refers_to and role in ("worker", "error", "attempts", "failures", "priority"):
        return f"it refers to {column.refers_to}"
    if role == "worker" and column.length is not None and column.length < WORKER_LENGTH:
        return f"it holds {column.length} characters, and a worker's id may be longer"
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
    """If one time column means done and another failed: the share of failed rows among those that are not done."""
    if reading.kind == "valued":
        return 0.0
    return max((idle.get(c.name, 0.0) for c in facts.columns if c.kind == "time" and _says(c, FAILED)), default=0.0)


def _says(column: Column, state: str) -> bool:
    event = vocabulary.event_name(column.name)
    return event is not None and event.state == state and event.sure >= 0.7


def _times(made: Roles, reading: StateReading, taken: set[str], idle: dict[str, float]) -> None:
    """Time columns that mean done or failed and have no role. The user's own code sets them, so the lane does, too."""
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


def birth(facts: TableFacts, taken: Collection[str]) -> tuple[Column, bool] | None:
    """The column with a row's creation time, and whether its name says so: otherwise it is the only time that the
    database fills in at insert and that is not ``taken``.
    """
    by_rank = [
        (rank, column)
        for column in facts.columns
        if (rank := vocabulary.birth_rank(facts.bare(column.name))) is not None
        and fits(column, roles_words.TIME, facts.dialect)
        # A single word in a column without a type may be a flag: enqueued.
        and (column.kind == "time" or column.has_default or " " in vocabulary.words(column.name))
    ]
    if by_rank:
        return min(by_rank, key=lambda one: one[0])[1], True
    filled_in = [c for c in facts.columns if c.kind == "time" and c.has_default and c.name not in taken]
    return (filled_in[0], False) if len(filled_in) == 1 and filled_in[0].default is None else None
