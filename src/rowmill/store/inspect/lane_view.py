"""Read-only questions about a lane: how many rows are in which state, which rows, what hangs, what will run.

No question scans a big table without a bound: counts stop beyond ``MOST``, and on PostgreSQL every question has a
time limit of its own, so that a look at a live system never weighs on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import DOMAIN

from ...clock import Clock
from ...declare.lane import Lane
from ...declare.roles import CREATED, ROW_TIMES, SHOWN, snake
from ...declare.states import FINAL, OPEN, READY, RUNNING, SEEN, STUCK, overlaps
from ...errors import Busy, DatabaseError, DeclarationError, Unreachable, UnreadableValue
from ..bounded_text import ERROR_LENGTH
from ..database import Database
from ..jobs.queue_lane import store_for
from ..json_documents import readable, too_deep
from ..lane.binding import bind
from ..lane.postgres import PostgresLane
from ..lane.postgres_statements import PostgresStatements
from ..lane.reflect import table_name
from ..lane.row_keys import Key, Placeholders, among
from ..lane.sqlite import SqliteLane, SqliteStatements
from ..lane.statements import INCARNATION
from ..own import schema
from ..own.workers import WorkersTable

#: A count beyond this is "at least".
MOST = 100_000
#: How many rows of a table are looked at to tell what they are, and how many kinds of them are told.
SAMPLE, KINDS = 10_000, 5
#: Characters of a cell in a list of rows, and on the page of one row: longer ones are cut in the database.
CELL, PAGE_CELL = ERROR_LENGTH, 100_000
#: Seconds PostgreSQL may take: for all counts of a lane at once, for each alone after that, for rows.
_ALL, _EACH, _ROWS = 3.0, 1.5, 5.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows by state. None: the lane has no such state, or it took too long to count (then in ``unknown``).

    ``stuck`` rows are among the ``running``. A count above ``MOST`` stands for that many or more.
    """

    states: dict[str, int | None]
    oldest_ready: float | None
    unknown: tuple[str, ...]

    @property
    def none(self) -> bool:
        """No row is in any of the lane's states, for sure."""
        return not self.unknown and not any(self.states.values())


@dataclass(frozen=True, slots=True)
class UncountedRows:
    """Rows of a table that no lane counts: ``SAMPLE`` stands for that many or more."""

    environment: str
    table: str
    rows: int
    #: The values of the state columns that most of them have, each with how many have them, the most first.
    kinds: list[tuple[dict[str, Any], int]]


@dataclass(frozen=True, slots=True)
class Row:
    """One row as an operator sees it. ``ages`` are seconds, by the database's time, negative for what is to come."""

    id: Any
    #: None: the row is in none of this lane's states.
    state: str | None
    values: dict[str, Any]
    ages: dict[str, float | None]
    #: Since the holder's last sign of life; None: there was none.
    silent_for: float | None


@dataclass(frozen=True, slots=True)
class RunningRows:
    """Rows that one worker holds."""

    worker: str
    rows: int
    #: Since the last sign of life among them.
    silent_for: float


class LaneView:
    """One lane in one environment, to be looked at. Made by ``view_lane``."""

    def __init__(self, store: PostgresLane | SqliteLane, *, has_workers_table: bool) -> None:
        self.store, self.binding, self.lane = store, store.binding, store.lane
        self.environment, self.database = store.binding.environment, store.database
        self.statements: PostgresStatements | SqliteStatements = store.statements
        self.sql = store.database.sql
        #: Where only the workers table can tell that a holder is gone, and it is not there, nothing is called stuck.
        self._has_workers_table = has_workers_table
        #: The column that says when a row was made.
        self.created = self._created()
        #: Which times a row tells, looked up once and not for every row.
        self._timed = list(self._ages())

    def _created(self) -> str | None:
        """By its name; otherwise a time that order_by names and that the database fills in at insert."""
        table, roles = self.binding.table, self.binding.roles.values()
        by_name = [column for column in self.binding.columns if snake(column) in CREATED]
        ordered = [column for column, descending in self.binding.order if not descending and column not in roles]
        filled_in = [column for column in ordered if table.c[column].server_default is not None]
        return next((column for column in (*by_name, *filled_in) if self._age(column)), None)

    # -- states as conditions

    def condition(self, state: str) -> str | None:
        """What rows in a state look like, as SQL; None where the lane has no such state. Also for ``stuck``."""
        statements, lane = self.statements, self.lane
        match state:
            case "ready":
                return statements.ready()
            case "waiting":
                eligible = f" and ({statements.further()})" if lane.where is not None else ""
                return f"{self.idle()}{eligible} and ({statements.ready()}) is not true{self._alive()}"
            case "excluded":
                return (
                    f"{self.idle()} and ({statements.further()}) is not true{self._alive()}"
                    if lane.where is not None
                    else None
                )
            case "running":
                return statements.running()
            case "stuck":
                silent = (test(lane.lease, f"{statements.table}.") for test in (statements.stale, statements.timeless))
                return f"{statements.running()} and ({' or '.join(silent)})" if self._has_workers_table else None
            case "done":
                return statements.final(lane.done)
            case "dead":
                return statements.final(lane.dead) if lane.dead else f"{self.idle()} and {self._spent()}"
            case _:
                ends = [statements.final(values) for values in (lane.canceled, lane.expired) if values]
                together = f"({' or '.join(ends)}){statements.shard()}"
                return together if len(ends) > 1 else next(iter(ends), None)

    def idle(self) -> str:
        """Ready or waiting to be, by the state alone; a retried row counts even where ``ready`` does not name it."""
        lane, statements = self.lane, self.statements
        if lane.retry is None or isinstance(lane.ready, str) or overlaps(lane.ready, lane.retry):
            return statements.ready_state()
        return f"({statements.ready_state()} or {statements.condition(lane.retry)}){statements.shard()}"

    def _spent(self) -> str:
        """Where no state says dead: the counter is at its limit."""
        assert self.binding.counter is not None  # a lane with neither is refused when it is bound
        return f"coalesce({self.statements.name(self.binding.counter)}, 0) >= {self.statements.limit()}"

    def _alive(self) -> str:
        return "" if self.lane.dead else f" and not ({self._spent()})"

    def need(self, state: str) -> str:
        """Like ``condition``, with an error for a state that the lane does not have."""
        condition = self.condition(state)
        if condition is None:
            why, hint = {
                "canceled": ("it has no such state", 'canceled={"status": "..."} in its declaration'),
                "excluded": ("it has no where=", "--state waiting"),
            }.get(state, ("no column holds a heartbeat", "add a heartbeat_at column"))
            raise DeclarationError(f"lane {self.lane.name!r}: no row can be {state}: {why}", hint=hint)
        return condition

    def same_table(self, other: Lane) -> bool:
        """Whether another lane works on the same table."""
        schema, name = table_name(other.table, self.binding.dialect.name)
        mine = self.binding.table
        return name == mine.name and (schema == mine.schema or None in (schema, mine.schema))

    # -- time

    def _age(self, column: str) -> str | None:
        """Seconds since the column's time, as SQL; None where the column does not tell time."""
        kind, statements = self.binding.table.c[column].type, self.statements
        return self.sql.column_age(kind, statements.name(column), statements.now(column), statements.plain_now())

    def _ages(self) -> dict[str, str]:
        """Every time a row tells, as SQL for its age."""
        columns = {**self.binding.roles, **({"created_at": self.created} if self.created else {})}
        ages = {role: self._age(columns[role]) for role in ROW_TIMES if role in columns}
        return {role: age for role, age in ages.items() if age is not None}

    def _silence(self) -> str:
        evidence = self.statements.evidence()
        if evidence is not None:
            return self._age(evidence) or "null"
        if not self._has_workers_table or "worker" not in self.binding.roles:
            return "null"
        statements = self.statements
        age = self.sql.seconds(statements.plain_now(), "w.seen_at")
        worker = f"{statements.table}.{statements.name(self.binding.roles['worker'])}"
        return (
            f"(select min({age}) from {statements.workers} w where {worker} = w.id || '{INCARNATION}' || w.incarnation)"
        )

    async def ask(self, text: str, marks: Placeholders | None = None, seconds: float = _ROWS) -> Sequence[Any]:
        """Read within a time limit; Busy when it ran out."""
        values = marks.given() if marks else ()
        return await self.database.read_within(lambda run: run(text, values), seconds)

    # -- questions

    async def count(self) -> Counts:
        """Rows by state, and how long the oldest ready row has been ready."""
        counts, unknown = await self.counted((*SEEN, STUCK), MOST + 1, _ALL, _EACH)
        numbers = {state: counts.get(state, (None, None))[0] for state in (*SEEN, STUCK)}
        return Counts(numbers, counts.get(READY, (0, None))[1], tuple(unknown))

    async def counted(
        self, states: Iterable[str], most: int, together: float, each: float, all_of_them: float = math.inf
    ) -> tuple[dict[str, tuple[int, float | None]], list[str]]:
        """Rows of each state up to ``most``, with how long the oldest ready one has been ready; and the states that
        took too long. All within ``together`` seconds, or one after the other within ``each``.
        """
        steps = {}
        for state in states:
            if (condition := self.condition(state)) is not None:
                age = self.waited() if state == READY else "null"
                inner = f"select {age} as age from {self.statements.table} where {condition} limit {most}"
                steps[state] = f"(select count(*) as n, max(age) as age from ({inner}) x)"
        if not steps:
            return {}, []
        fields = ", ".join(f"{state}.n, {state}.age" for state in steps)
        sources = ",\n".join(f"{step} {state}" for state, step in steps.items())
        try:
            row = (await self.ask(f"select {fields} from\n{sources}", seconds=together))[0]
            return {state: (row[2 * i], age_seconds(row[2 * i + 1])) for i, state in enumerate(steps)}, []
        except Busy:  # some state has no index: the others are still worth knowing
            counts, slow, ends = {}, [], time.monotonic() + all_of_them
        for state, step in steps.items():
            if time.monotonic() > ends:
                break
            try:
                number, age = (await self.ask(f"select n, age from {step} x", seconds=each))[0]
                counts[state] = number, age_seconds(age)
            except Busy:
                slow.append(state)
        return counts, slow

    async def rows(self, state: str | None = None, limit: int = 20) -> list[Row]:
        """Rows of a state, or of all the lane's states: ready ones as they will be claimed, others newest first."""
        condition = self.need(state) if state is not None else self.any_state()
        text = f"{self._select(self._brief(), cut=CELL)} where {condition}"
        try:
            answered = await self.ask(f"{text} order by {self.order(state)} limit {limit}")
        except Busy:  # too many to sort: some of them, then
            answered = await self.ask(f"{text} limit {limit}")
        return [self._row(row, self._brief(), CELL) for row in answered]

    async def holders(self, seconds: float = _ROWS) -> list[RunningRows]:
        """Who holds running rows that are not stuck; nobody where no column says who."""
        stuck, column = self.condition("stuck"), self.binding.roles.get("worker")
        if stuck is None or column is None:
            return []
        worker = f"{self.statements.table}.{self.statements.name(column)}"
        rows = f"select {worker} as worker, {self._silence()} as age from {self.statements.table}"
        rows += f" where {self.statements.running()} and ({stuck}) is not true limit {MOST}"
        text = f"select worker, count(*), min(age) from ({rows}) x where worker is not null group by worker"
        return [
            RunningRows(str(name).partition(INCARNATION)[0] if self.binding.incarnated else str(name), number, age)
            for name, number, silent in await self.ask(text, seconds=seconds)
            if (age := age_seconds(silent)) is not None
        ]

    async def timeless(self, seconds: float = _ROWS) -> int:
        """How many running rows show no time: neither of a claim nor of a heartbeat."""
        statements = self.statements
        rows = (
            f"select 1 as one from {statements.table} where {statements.running()} and {self._timeless()} limit {MOST}"
        )
        return int((await self.ask(f"select count(*) from ({rows}) x", seconds=seconds))[0][0])

    async def first_seen(self) -> dict[str, float]:
        """Seconds since a worker first saw each of these rows running, by the row's key as text."""
        database = self.database
        text = f"select row_id, {database.sql.age('seen_at')} from {database.own('rowmill_sightings')}"
        text += f" where lane = {database.sql.marks(1)[0]}"
        try:
            return {row: float(age) for row, age in await database.read(lambda run: run(text, (self.lane.name,)))}
        except DatabaseError:
            return {}  # the table does not exist, or this role may not read it

    async def stale_runs(self, key: Key) -> tuple[int, float]:
        """How many runs of this row, one after the other, were not final because its inputs changed; and how many
        seconds ago the first of them ended.
        """
        statements, marks = self.statements, Placeholders(self.binding)
        if not statements.bounded:
            return 0, 0.0
        row_id = statements.row_id(
            [marks.add(part, column) for part, column in zip(key, self.binding.key, strict=True)]
        )
        text = f"select runs, {self.sql.age('since')} from {statements.stale_runs} where {statements.noted(row_id)}"
        try:
            rows = await self.database.read(lambda run: run(text, marks.given()))
        except DatabaseError:
            return 0, 0.0  # the table does not exist yet, or this role may not read it
        return (int(rows[0][0]), float(rows[0][1])) if rows else (0, 0.0)

    def _timeless(self) -> str:
        return self.statements.timeless(self.lane.lease, f"{self.statements.table}.")

    async def sample(self, columns: Sequence[str]) -> UncountedRows | None:
        """What the table's first rows have in these columns, whatever their state; None where it has no rows."""
        names = self.statements.names(columns)
        some = f"select {names} from {self.statements.whole_table()} limit {SAMPLE}"
        text = f"select {names}, count(*) as n, sum(count(*)) over () from ({some}) x group by {names}"
        rows = await self.ask(f"{text} order by n desc, {names} limit {KINDS}")
        if not rows:
            return None
        kinds = [(self._values(row, columns, None), int(row[-2])) for row in rows]
        return UncountedRows(self.environment, self.binding.table.fullname, int(rows[0][-1]), kinds)

    async def find(self, keys: Sequence[Key], *, whole: bool = True, cut: int | None = None) -> list[Row]:
        """The rows with these keys, in whatever state: with all their columns, those cut to ``cut`` characters where
        that is given; or only with the columns that a list shows.
        """
        marks, columns = Placeholders(self.binding), list(self.binding.columns) if whole else self._brief()
        cut = cut if whole else CELL
        text = f"{self._select(columns, cut=cut)} where {among(self.statements, keys, marks)}"
        return [self._row(row, columns, cut) for row in await self.ask(text, marks)]

    async def examine(self, key: Key, further: Sequence[str]) -> tuple[Row, Sequence[Any]] | None:
        """One row with all its columns, cut as in a list, and what further SQL expressions say of it, all at one
        moment.
        """
        marks, columns = Placeholders(self.binding), list(self.binding.columns)
        which = among(self.statements, [key], marks)
        text = f"{self._select(columns, further, CELL)} where {which}"
        for raw in await self.ask(text, marks):
            split = len(raw) - len(further)
            return self._row(raw[:split], columns, CELL), raw[split:]
        return None

    def owns(self, row: Row) -> bool:
        """Whether a row belongs to this lane: it is in one of its states, or in its queue of ``rowmill_jobs``."""
        return row.state is not None or (self.lane.own and row.values.get("queue") == self.lane.name)

    def age_of(self, role: str) -> str | None:
        """Seconds since a role's time, as SQL."""
        return self._ages().get(role)

    def waited(self) -> str:
        """Seconds since a ready row became so, as SQL: since its run_after or its creation, whichever is later."""
        since = [age for role in ("run_after", "created_at") if (age := self._ages().get(role))]
        if len(since) < 2:
            return (since or ["null"])[0]
        due, born = since
        return f"case when {born} is null or {due} < {born} then {due} else {born} end"

    def any_state(self) -> str:
        """True for rows that are in one of the lane's states, as SQL."""
        known = [self.idle(), *(self.condition(s) for s in (RUNNING, *FINAL))]
        states, shard = " or ".join(f"({part})" for part in known if part), self.statements.shard()
        return f"({states}){shard}" if shard else states

    async def select(self, rest: str, marks: Placeholders, seconds: float, further: Sequence[str] = ()) -> list[Row]:
        """Rows with what they are shown with, and further columns; ``rest``: WHERE and all that follows."""
        columns = list(dict.fromkeys([*self._brief(), *further]))
        rows = await self.ask(f"{self._select(columns, cut=CELL)} {rest}", marks, seconds)
        return [self._row(row, columns, CELL) for row in rows]

    def _brief(self) -> list[str]:
        roles = (self.binding.roles.get(role) for role in SHOWN)
        return list(dict.fromkeys(c for c in (*self.binding.key, *roles, self.created) if c))

    def _kind(self, column: str) -> Any:
        """A column's type without what a domain or a decorator adds to it."""
        kind: Any = self.binding.table.c[column].type
        while isinstance(kind, (sa.TypeDecorator, DOMAIN)):
            kind = kind.data_type if isinstance(kind, DOMAIN) else kind.impl_instance
        return kind

    def cell(self, column: str, cut: int | None) -> str:
        """A column as SQL, cut to one character more than ``cut``: the last one tells that there was more."""
        name = self.statements.name(column)
        return name if column in self.binding.key else self.sql.cell(self._kind(column), name, cut)

    def _select(self, columns: list[str], further: Sequence[str] = (), cut: int | None = None) -> str:
        tests = [(s, self.condition(s)) for s in (RUNNING, *OPEN, *reversed(FINAL))]
        state = " ".join(f"when {test} then '{s}'" for s, test in tests if test)
        extra = ", ".join([f"case {state} end", self._silence(), *self._ages().values(), *further])
        # With a name of their own: ORDER BY must mean the table's column, also where that is called "left".
        cells = ", ".join(f"{self.cell(column, cut)} as _cell{n}" for n, column in enumerate(columns))
        return f"select {cells}, {extra} from {self.statements.table}"

    def order(self, state: str | None) -> str:
        """In what order rows of a state are shown: ready ones as they will be claimed."""
        statements, roles = self.statements, self.binding.roles
        keys = [f"{statements.name(c)} desc" for c in self.binding.key]
        if state == "ready":
            # The claim takes rows without a place in the order in a statement of their own, after the others.
            loose = statements.loose()
            return f"{statements.name(loose)} is null, {statements.order()}" if loose else statements.order()
        if state == "stuck":
            evidence = statements.evidence()
            return f"{statements.name(evidence)} nulls first" if evidence else ", ".join(keys)
        if state == "waiting" and "run_after" in roles:
            return f"{statements.name(roles['run_after'])} nulls last"
        times = {"running": ("claimed_at",), None: ()}.get(state, ("finished_at", "updated_at"))
        first = next((roles[role] for role in times if role in roles), self.created)
        return ", ".join([f"{statements.name(first)} desc nulls last", *keys] if first else keys)

    def _row(self, raw: Sequence[Any], columns: list[str], cut: int | None) -> Row:
        state, silent, *ages = raw[len(columns) :]
        key = tuple(raw[columns.index(c)] for c in self.binding.key)
        return Row(
            id=key[0] if len(key) == 1 else key,
            state=state,
            values=self._values(raw, columns, cut),
            ages={role: age_seconds(age) for role, age in zip(self._timed, ages, strict=True)},
            silent_for=age_seconds(silent) if state == "running" else None,
        )

    def _values(self, raw: Sequence[Any], columns: Sequence[str], cut: int | None) -> dict[str, Any]:
        """The values of these columns, the first of a row, as Python values; text if Python cannot read them."""
        sparse: list[Any] = [None] * len(self.binding.columns)
        for value, column in zip(raw, columns, strict=False):
            sparse[self.binding.columns.index(column)] = value
        return {column: self._value(sparse, column, cut) for column in columns}

    def _value(self, sparse: list[Any], column: str, cut: int | None) -> Any:
        """One of them. On PostgreSQL JSON comes as text, and in a list also arrays and types that we do not know."""
        raw, kind = sparse[self.binding.columns.index(column)], self._kind(column)
        if column not in self.binding.key and isinstance(raw, (str, bytes)):
            if cut is not None and len(raw) > cut:
                return (raw[:cut] if isinstance(raw, str) else "\\x" + raw[: cut // 2].hex()) + "…"
            if self.sql.shown_as_text(kind):
                return readable(raw) if isinstance(kind, (sa.JSON, sa.ARRAY)) else raw
        try:
            value = self.store.value(sparse, column)
        except UnreadableValue:
            return str(raw)  # what the database says
        return raw if isinstance(raw, str) and too_deep(value) else value


async def view_lane(lane: Lane, environment: str, database: Database, clock: Clock) -> LaneView:
    """Bind a lane to its table in one environment, to look at it; raises what ``open_lane`` raises."""
    check_file(database)
    binding = await bind(lane, environment, database)
    own = await schema.taken(database)
    store = store_for(binding, database, clock, "", "", own.has(schema.GATES))
    if not own.has(schema.INPUTS):
        store.statements.stale_runs = None
    return LaneView(store, has_workers_table=not store.needs_workers_table or await WorkersTable(database).exists())


def check_file(database: Database, hint: str | None = None) -> None:
    """Refuse a SQLite file that is not there: a look would make an empty one of a mistyped name."""
    if (path := database.missing_file) is not None:
        raise Unreachable(f"there is no file {path!r}", hint=hint or "check the database URL")


def age_seconds(age: Any) -> float | None:
    """An age as the database tells it, to the millisecond."""
    return None if age is None else round(float(age), 3)
