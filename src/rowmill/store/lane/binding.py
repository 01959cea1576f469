"""A lane bound to one environment's table: reflected, its roles found, everything checked.

Whatever cannot work is said here, at start-up, before the first row is claimed, with the lane, the table, the
column and the fix.
"""

from __future__ import annotations

import enum
import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from ...declare import roles as roles_words
from ...declare import states
from ...declare.lane import Lane
from ...errors import DeclarationError, did_you_mean
from ..database import Database
from ..dialect import dialect_named
from .missing_columns import MissingColumn, lacking
from .reflect import KnownShapes, Reflected, reflect_table, table_name

_SHARE_OF_LEASE = 0.9
_BITS = {"smallint": 15, "integer": 31, "bigint": 63}
#: Columns of rowmill's own table that hold JSON; and those that no run needs.
_DOCUMENTS = ("args", "result", "progress", "history")
_NOT_CLAIMED = ("queue", "state", "worker", "only_one", "heartbeat_at", "finished_at", "created_at", "result",
                "progress", "error", "branch", "needs")  # fmt: skip
_ORDER = re.compile(r'\s*(-?)("(?:[^"]|"")+"|\S*)\s*(.*?)\s*$', re.DOTALL)


@dataclass(frozen=True)
class Binding:
    """What the statements of one lane in one environment are rendered from."""

    lane: Lane
    environment: str
    table: sa.Table
    dialect: sa.Dialect
    key: tuple[str, ...]
    roles: Mapping[str, str]
    order: tuple[tuple[str, bool], ...]  # column, descending
    sql_types: Mapping[str, str]
    #: Types as the database has them; the table's own may be the user's, which know more (Python enums) or less.
    kinds: Mapping[str, Any]
    #: Columns whose type the user gave, in a Table or a model.
    given: frozenset[str]
    partitioned: bool
    max_attempts: int
    renew: str
    timeout: timedelta | None
    #: The one of several shards that a store is about; None: all of the lane's.
    bucket: Any = None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns; first those that a claim returns."""
        rest = [c.name for c in self.table.c if self.lane.own and c.name in _NOT_CLAIMED]
        return (*self.taken, *rest)

    @property
    def taken(self) -> tuple[str, ...]:
        """What a claim returns: a user's whole row; of rowmill's own what a run may need."""
        return tuple(c.name for c in self.table.c if not self.lane.own or c.name not in _NOT_CLAIMED)

    @property
    def claimed(self) -> set[str]:
        """Columns that a claim writes by their role: what a state says of them holds only until then."""
        roles = ("worker", "claimed_at", "heartbeat_at", "attempts", "updated_at")
        return {self.roles[role] for role in roles if role in self.roles} - self.lane.running.keys()

    @property
    def running(self) -> dict[str, Any]:
        """What a running row looks like."""
        return {c: v for c, v in self.lane.running_condition.items() if c not in self.claimed}

    @property
    def ready_again(self) -> dict[str, Any]:
        """What a row looks like that goes back without a failure; its counters and its holder are not states."""
        return {c: v for c, v in self.lane.ready_again.items() if c not in self.claimed}

    @property
    def swept_back(self) -> dict[str, Any]:
        """What a row looks like that is taken back. A backfill's running rows look like the live ones', so they go
        where those go.
        """
        live = self.lane.backfills
        return (
            self.ready_again if live is None else {c: v for c, v in live.ready_again.items() if c not in self.claimed}
        )

    @property
    def retry_values(self) -> dict[str, Any]:
        """What a row looks like that failed and waits for another try."""
        return dict(self.lane.retry) if self.lane.retry is not None else self.ready_again

    @property
    def shard(self) -> dict[str, Any]:
        """The column that the lane is divided by, with its values; empty where it has no shard."""
        shard = dict(self.lane.shard or {})
        return shard if self.bucket is None else dict.fromkeys(shard, (self.bucket,))

    @property
    def counter(self) -> str | None:
        """The column that the attempt limit is held against."""
        return self.roles.get("failures") or self.roles.get("attempts")

    @functools.cached_property
    def fence_time(self) -> str | None:
        """The claimed_at column if its values can tell two claims apart (whole seconds cannot)."""
        column = self.roles.get("claimed_at")
        return None if column is None or isinstance(self.kinds[column], sa.Integer) else column

    @functools.cached_property
    def incarnated(self) -> bool:
        """Whether the fence has only a worker column, so that each process needs an id of its own."""
        return "worker" in self.roles and not self.fence_time

    @property
    def created(self) -> str | None:
        """The column that says when a row was made, by its name."""
        return next((c.name for c in self.table.c if roles_words.snake(c.name) in roles_words.CREATED), None)

    @property
    def expires(self) -> bool:
        """A row of this lane may expire before it is started."""
        return "expires_at" in self.roles or self.lane.expires_after is not None

    def lacks(self) -> dict[str, str]:
        """Roles that no column takes, and what that costs."""
        present = set(self.roles)
        cost = {
            "run_after": "retries and snoozes come back at once",
            "error": "why a run failed is only in the log",
            "heartbeat_at": "leases are not renewed, so a run must end within its timeout",
            "worker": "nobody can see which worker runs a row",
        }
        if self.renew != "none":
            del cost["heartbeat_at"]
        present |= {role for role, column in self.lane.roles.items() if column is None}  # done without, on purpose
        lacking = {role: words for role, words in cost.items() if role not in present}
        if self.counter is None and self.lane.max_attempts != 1 and "attempts" not in present:
            lacking["attempts"] = "a failure is final"
        if not {"heartbeat_at", "claimed_at", "updated_at", "worker"} & self.roles.keys():
            lacking["claimed_at"] = "a row whose worker dies stays running until it is released by hand"
        return lacking

    def nullable(self, column: str) -> bool:
        if self.lane.own and column in self.key:
            return False  # SQLite says otherwise, and would sort what its index has in order
        return bool(self.table.c[column].nullable)

    def state_columns(self) -> set[str]:
        """Columns the states are written in."""
        lane = self.lane
        written = (lane.running, lane.done, lane.retry, lane.dead, lane.canceled, lane.expired, self.ready_again)
        return {column for values in written if values for column in states.written(values)}

    @property
    def only_written(self) -> set[str]:
        """Columns that a final state writes and is not recognised by: those that the lane names, and those with a role
        (a counter, an error, a time), unless they stand in ready or running or are all that tells two states apart.
        """
        lane = self.lane
        ready = lane.ready if isinstance(lane.ready, Mapping) else {}
        ends = [values for values in (lane.done, lane.dead, lane.canceled, lane.expired) if values]
        roles = set(self.roles.values()) - ready.keys() - lane.running.keys()
        roles -= {column for values in ends for column in values.keys() - states.written(values).keys()}
        known = [self.running, *([ready] if ready else []), *ends]
        bare = [{c: v for c, v in values.items() if c not in roles} for values in known]
        pairs = itertools.combinations(zip(known, bare, strict=True), 2)
        apart = all(states.overlaps(one[0], other[0]) or not states.overlaps(one[1], other[1]) for one, other in pairs)
        return {*lane.only_written, *(roles if apart and all(bare) else ())}

    def recognised(self, values: states.Values) -> dict[str, Any]:
        """What rows in a final state look like, also those that another program brought there."""
        left_out = self.only_written
        return {column: value for column, value in values.items() if column not in left_out}


async def bind(lane: Lane, environment: str, database: Database, *, planned: bool = False) -> Binding:
    """Reflect the lane's table and resolve the declaration against it.

    ``planned``: as the table will be once it has the columns that ``rowmill migrate`` adds.
    """
    table, sql_types, partitioned, kinds = await _table(lane, environment, database)
    where = f"lane {lane.name!r}, table {table.fullname!r}"
    if planned:
        for lack in lacking_columns(lane, table, kinds, database.dialect.name):
            table.append_column(sa.Column(lack.column, lack.kind, nullable=lack.nullable))
            kinds[lack.column] = lack.kind
            sql_types[lack.column] = lack.sql_type
    key = key_of(table, where)
    _check_columns(lane, table, kinds, where, database.dialect.name)
    role_columns = roles_words.resolve(
        lane.roles, table.c.keys(), lambda column, kind: _fits(kinds[column], kind, database.dialect.name)
    )
    _check_roles(table, kinds, role_columns, where, database.dialect.name)
    renew = lane.renew or ("heartbeat_at" if "heartbeat_at" in role_columns else "none")
    if renew != "none" and renew not in role_columns:
        raise DeclarationError(
            f"{where}: renew={renew!r}, but no column has the role {renew}",
            hint=f'roles={{"{renew}": "..."}}, or leave renew out',
        )
    binding = Binding(
        lane=lane,
        environment=environment,
        table=table,
        dialect=database.dialect,
        key=key,
        roles=role_columns,
        order=_order(lane, table, role_columns, key, where),
        sql_types=sql_types,
        kinds=kinds,
        given=frozenset(getattr(getattr(lane.table, "__table__", lane.table), "c", {}).keys()),
        partitioned=partitioned,
        max_attempts=lane.max_attempts or (5 if {"attempts", "failures"} & role_columns.keys() else 1),
        renew=renew,
        timeout=_timeout(lane, renew, where),
    )
    _check_policy(binding, where)
    _check_inputs(binding, where)
    _check_shard(binding, where)
    return binding


_SHAPES = KnownShapes()


async def _table(lane: Lane, environment: str, database: Database) -> Reflected:
    schema, name = table_name(lane.table, database.dialect.name)
    if lane.own:
        schema = database.schema
    where, place = f"lane {lane.name!r}", f" in environment {environment!r}"
    if database.shares is not None:  # one of many databases
        table = await _SHAPES.read(database, lane.table, schema, name, where, place)
    else:
        table = await database.reflect(lambda c: reflect_table(c, lane.table, schema, name, where, place))
    if lane.own:
        # SQLite would take a document that is a number for one, and lose digits, if its column were called anything
        # but text.
        for column in _DOCUMENTS:
            table[0].c[column].type = table[3][column] = sa.JSON()
    return table


def lacking_columns(lane: Lane, table: sa.Table, kinds: Mapping[str, Any], dialect: str) -> list[MissingColumn]:
    """The columns that the lane would use, and that its table does not have."""
    return lacking(lane, table.c.keys(), lambda column, kind: _fits(kinds[column], kind, dialect), dialect)


async def look(lane: Lane, environment: str, database: Database) -> tuple[sa.Table, list[MissingColumn]]:
    """A lane's table as it is, and the columns that it lacks, whether or not the lane can work without them."""
    table, _, _, kinds = await _table(lane, environment, database)
    return table, lacking_columns(lane, table, kinds, database.dialect.name)


def key_of(table: sa.Table, where: str) -> tuple[str, ...]:
    if table.primary_key.columns:
        return tuple(column.name for column in table.primary_key.columns)
    for constraint in table.constraints:
        if isinstance(constraint, sa.UniqueConstraint) and all(not c.nullable for c in constraint.columns):
            return tuple(column.name for column in constraint.columns)
    raise DeclarationError(
        f"{where} has no primary key, so rows cannot be told apart",
        hint=f"alter table {table.fullname} add primary key (...)",
    )


def _column(table: sa.Table, name: str, what: str, where: str) -> sa.Column[Any]:
    if name not in table.c:
        hint = did_you_mean(name, table.c.keys())
        if any(roles_words.snake(name) in twins for _, twins in roles_words.ROLES.values()):
            hint = f"rowmill migrate APP --apply adds it; or {hint}"
        raise DeclarationError(f"{where}: {what}: there is no column {name!r}", hint=hint)
    return table.c[name]


def _check_time(kind: Any, what: str, dialect: str) -> None:
    if not _fits(kind, roles_words.TIME, dialect):
        raise DeclarationError(
            f"{what} is NOW, but the column's type {kind} holds no time", hint="a timestamptz column"
        )


def _check_columns(lane: Lane, table: sa.Table, kinds: Mapping[str, Any], where: str, dialect: str) -> None:
    named = [(state, getattr(lane, state)) for state in (*states.DECLARED, states.EXPIRED)]
    for state, values in (*named, *(("ignore_states", values) for values in lane.ignore_states)):
        if not isinstance(values, Mapping):
            continue
        for name, value in values.items():
            column = _column(table, name, state, where)
            if isinstance(value, type(states.NOT_NULL)):
                continue
            if value is states.NOW:
                _check_time(kinds[name], f"{where}: {state}[{name!r}]", dialect)
                continue
            for option in states.options(value):
                asked = state in ("ready", "ignore_states")
                _check_value(column, option, f"{where}: {state}[{name!r}]", written=not asked)
    if lane.doubt is not None:
        raise lane.doubt


def _check_inputs(binding: Binding, where: str) -> None:
    """An input is a column that others write, and the lane does not: its own writes would make each run stale."""
    lane = binding.lane
    roles = {column: role for role, column in binding.roles.items()}
    for name in lane.inputs:
        _column(binding.table, name, "inputs", where)
        if name in binding.key:
            why = "is the row's key"
        elif name in binding.state_columns() or (isinstance(lane.ready, Mapping) and name in lane.ready):
            why = "is a state column, and the lane itself writes it"
        elif name in lane.fills:
            why = "is filled by rowmill (fills=)"
        elif name in roles:
            why = f"has the role {roles[name]}"
        else:
            continue
        others = [c.name for c in binding.table.c if c.name not in {*binding.key, *binding.state_columns(), *roles}]
        raise DeclarationError(
            f"{where}: inputs: column {name!r} {why}",
            hint=f"inputs are columns that the handler works from: {', '.join(others) or 'this table has none'}",
        )


def _check_shard(binding: Binding, where: str) -> None:
    """A shard is a column that nobody writes, with values of its type."""
    roles = {column: role for role, column in binding.roles.items()}
    for name, values in binding.shard.items():
        column = _column(binding.table, name, "shard", where)
        written = f"has the role {roles[name]}" if name in roles else ""
        written = "is an input, which others may change" if name in binding.lane.inputs else written
        written = "is filled by rowmill (fills=)" if name in binding.lane.fills else written
        if written:
            raise DeclarationError(
                f"{where}: shard: column {name!r} {written}, and a row stays in its shard",
                hint="a column that is set once, when the row is inserted",
            )
        bits = _BITS.get(binding.sql_types.get(name, "").lower())
        for value in values:
            what = f"{where}: shard[{name!r}]"
            _check_value(column, value, what, written=False)
            if isinstance(binding.kinds[name], sa.Integer) and isinstance(value, bool):
                raise DeclarationError(f"{what}: {value!r} does not fit the column's type {column.type}", hint="an int")
            if bits is not None and not -(2**bits) <= value < 2**bits:
                raise DeclarationError(
                    f"{what}: {value!r} does not fit the column's type {binding.sql_types[name]}",
                    hint=f"values from {-(2**bits):,} to {2**bits - 1:,}",
                )


def _check_value(column: sa.Column[Any], value: Any, what: str, *, written: bool) -> None:
    kind = column.type
    if value is None:
        if written and not column.nullable:
            raise DeclarationError(f"{what} is NULL, but the column is NOT NULL")
        return
    if isinstance(kind, sa.Enum):
        plain = value.name if isinstance(value, enum.Enum) else value
        if plain not in kind.enums and not (kind.enum_class and isinstance(value, kind.enum_class)):
            raise DeclarationError(
                f"{what}: the enum {kind.name or column.name} has no value {plain!r}",
                hint=did_you_mean(str(plain), kind.enums),
            )
        return
    wanted: tuple[type, ...] | None = None
    if isinstance(kind, sa.Boolean):
        wanted = (bool,)
    elif isinstance(kind, sa.Integer):
        wanted = (int,)
    elif isinstance(kind, sa.String):
        wanted = (str,)
    # True is an int in Python and 1 in SQLite, which has no boolean of its own.
    if wanted and not isinstance(value, wanted):
        raise DeclarationError(
            f"{what}: {value!r} does not fit the column's type {kind}",
            hint=f"a {wanted[0].__name__} value",
        )


def _fits(of: Any, kind: str, dialect: str) -> bool:
    if kind == roles_words.TEXT:
        return isinstance(of, sa.String) and not isinstance(of, sa.Enum)
    if kind == roles_words.COUNT:
        return isinstance(of, sa.Integer)
    if kind == roles_words.TIME:
        return isinstance(of, dialect_named(dialect).time_kinds)
    return True


def _check_roles(
    table: sa.Table, kinds: Mapping[str, Any], role_columns: Mapping[str, str], where: str, dialect: str
) -> None:
    for role, name in role_columns.items():
        column = _column(table, name, f"role {role}", where)
        kind = roles_words.ROLES[role][0]
        if not _fits(kinds[name], kind, dialect):
            raise DeclarationError(
                f"{where}: column {name!r} is {column.type}, and the role {role} needs a {kind} column",
                hint=f'another column for the role, or roles={{"{role}": None}} to do without',
            )


def _order(
    lane: Lane, table: sa.Table, role_columns: Mapping[str, str], key: tuple[str, ...], where: str
) -> tuple[tuple[str, bool], ...]:
    """Priority column first, then order_by or its default, then the key."""
    order: dict[str, bool] = {}
    if "priority" in role_columns:
        order[role_columns["priority"]] = False
    for part in lane.order_by or _default_order(table, role_columns):
        minus, name, direction = _ORDER.match(part).groups()  # type: ignore[union-attr]
        if direction.lower() not in ("", "asc", "desc"):
            raise DeclarationError(
                f"{where}: order_by {part!r}: cannot read {direction!r}",
                hint=f"{name!r} or '{name} desc'; NULL always goes last",
            )
        descending = bool(minus) or direction.lower() == "desc"
        column = _column(table, name.strip('"').replace('""', '"'), "order_by", where)
        order.setdefault(column.name, descending)
    for name in key:
        order.setdefault(name, False)
    return tuple(order.items())


def _default_order(table: sa.Table, role_columns: Mapping[str, str]) -> list[str]:
    due = role_columns.get("run_after")
    if due is not None and (not table.c[due].nullable or table.c[due].server_default is not None):
        return [due]
    return [c for c in list(table.c.keys()) if roles_words.snake(c) in roles_words.CREATED][:1]


def _timeout(lane: Lane, renew: str, where: str) -> timedelta | None:
    """Without renewal a run must end before its lease does."""
    if renew != "none":
        return lane.timeout
    most = lane.lease * _SHARE_OF_LEASE
    if lane.timeout is not None and lane.timeout > most:
        raise DeclarationError(
            f"{where}: no column is renewed while a run goes on, so a timeout of {lane.timeout} would outlive the"
            f" lease of {lane.lease}",
            hint=f'timeout of at most {most}, a heartbeat_at column, or renew="claimed_at"',
        )
    return lane.timeout or most


def _check_policy(binding: Binding, where: str) -> None:
    lane, role_columns = binding.lane, binding.roles
    if "worker" not in role_columns and binding.fence_time is None and not lane.unfenced:
        raise DeclarationError(
            f"{where} has neither a worker nor a claimed_at column, so a late outcome could overwrite another worker's",
            hint="rowmill migrate APP --apply adds a worker column; or map one that you have:"
            ' roles={"worker": "..."}; or accept the risk with unfenced=True',
        )
    for role in ("worker", "claimed_at", "heartbeat_at", "updated_at", "attempts"):
        column = role_columns.get(role)
        value = lane.running.get(column) if column else None
        if isinstance(value, (str, int, float)):
            raise DeclarationError(
                f"{where}: running sets {column!r} to {value!r}, and its role {role} writes another value there, so"
                " no outcome would find its row",
                hint=f'roles={{"{role}": None}}, or another column in running',
            )
    if binding.counter is None:
        limit = f"max_attempts={binding.max_attempts}" if binding.max_attempts > 1 else role_columns.get("max_attempts")
        if limit is not None:
            raise DeclarationError(
                f"{where}: {limit}, but there is no column to count attempts in",
                hint='add an integer column attempts, or map one: roles={"attempts": "..."}'
                + (', or do without the limit: roles={"max_attempts": None}' if "max_attempts" in role_columns else ""),
            )
        if lane.dead is None:
            raise DeclarationError(
                f"{where}: dead is left out, and no column counts attempts, so a failed row would never end",
                hint='dead={"status": "..."}, or a counter, as rowmill migrate adds one: roles={"failures": "..."}',
            )
    again = (
        lane.backfills is None
        and lane.leads_to_ready(lane.done)
        and not (lane.where or lane.untouched_for or "run_after" in role_columns)
    )
    if again:
        raise DeclarationError(
            f"{where}: a row that is done is ready again, and nothing says when: it would run in an endless loop",
            hint="a run_after column that the handler sets, untouched_for=..., where=..., or another value in done",
        )
    if lane.expires_after is not None and (
        binding.created is None or not _fits(binding.kinds[binding.created], roles_words.TIME, binding.dialect.name)
    ):
        raise DeclarationError(
            f"{where}: expires_after needs a column that says when a row was made",
            hint=f"a time column {' or '.join(roles_words.CREATED[:2])}, or a time in each row:"
            ' roles={"expires_at": "..."}',
        )
    if lane.untouched_for is not None and "updated_at" not in role_columns:
        raise DeclarationError(
            f"{where}: untouched_for needs a column with the role updated_at", hint='roles={"updated_at": "..."}'
        )
    if not {"heartbeat_at", "claimed_at", "updated_at", "worker"} & role_columns.keys() and not lane.unfenced:
        raise DeclarationError(
            f"{where}: no column shows how long a row has been running", hint="add claimed_at: rowmill migrate does"
        )
