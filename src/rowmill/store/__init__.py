"""The only place with SQL. ``open_lane`` binds a lane to a database and gives the verbs over it."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from ..clock import Clock
from ..declare.lane import Lane
from ..declare.states import WRITTEN
from ..errors import DeclarationError, Refused, Unserved
from .bounded_text import bounded
from .database import Database
from .gates.claim_by_key import ClaimByKey
from .gates.gate_binding import BoundGates, bind_gates
from .gates.gate_learning import GateLearning
from .gates.gate_rows import GateRows
from .gates.locking_claim import LockingClaim
from .handler_connections import shielded
from .jobs.queue_lane import store_for
from .lane.binding import Binding, bind
from .lane.claim import Settled
from .lane.lane_store import LaneStore
from .lane.postgres import PostgresLane
from .lane.refused_states import check_states
from .lane.row_watch import RowWatch
from .lane.waits import WaitingRows
from .own import schema
from .postgres_database import rows_of
from .transactions import Tx
from .urls import redact

__all__ = [
    "Binding",
    "Database",
    "LaneStore",
    "Settled",
    "Tx",
    "bind",
    "bounded",
    "check_conditions",
    "examine_lane",
    "open_lane",
    "probe",
    "redact",
    "set_gates",
    "shielded",
    "store_for",
]


async def examine_lane(lane: Lane, environment: str, database: Database, written: Sequence[str] = WRITTEN) -> LaneStore:
    """Bind a lane and let the database check its declaration; raises DeclarationError. Writes nothing."""
    binding = await bind(lane, environment, database)
    store = store_for(binding, database, Clock(), "", "")
    await check_conditions(store)
    await check_states(store, written)
    await bind_gates(binding, database, store.statements, GateRows.open(database, store.clock, lane.name))
    return store


async def open_lane(
    lane: Lane, environment: str, database: Database, clock: Clock, worker: str, incarnation: str = ""
) -> LaneStore:
    """Bind a lane to its table in one environment; raises DeclarationError for what cannot work."""
    if lane.own:
        await schema.need(database, schema.JOBS, schema.FLOWS, schema.CRONS)
    binding = await bind(lane, environment, database)
    tables = lane.groups or lane.budgets or lane.bounded
    own = await (schema.ensure(database) if tables else schema.taken(database))
    if lane.bounded and not own.has(schema.INPUTS):
        raise DeclarationError(
            f"lane {lane.name!r} has inputs, but the table rowmill_stale_runs, which notes that they keep changing,"
            f" cannot be created: {own.refused}",
            hint="run rowmill migrate APP --apply with a role that may create tables, or settle_after=None",
        )
    store = store_for(binding, database, clock, worker, incarnation, own.has(schema.GATES))
    store.watched = await RowWatch.open(store) if own.has(schema.RECOVERY) else None
    store.waits = await WaitingRows.open(store) if own.has(schema.WAITS) else None
    await check_conditions(store)
    # A claim that is refused harms nothing, and an end that is refused one row; done is what every row's work leads to.
    await check_states(store, ("done",))
    if lane.groups:
        await open_gates(store, own)
    if column := store.binding.fence_time:
        text = f"select {store.statements.now(column)}"
        store.opened_at = (await database.read(lambda run: run(text, ())))[0][0]
    return store


async def open_gates(store: LaneStore, own: schema.OwnTables) -> None:
    """Bind a lane's gates, and choose the claim that minds them."""
    if not own.has(schema.GATES):
        raise DeclarationError(
            f"lane {store.lane.name!r} has gates, but their table rowmill_gates cannot be created: {own.refused}",
            hint="run rowmill migrate APP --apply with a role that may create tables",
        )
    rows = GateRows.open(store.database, store.clock, store.lane.name)
    set_gates(store, await bind_gates(store.binding, store.database, store.statements, rows))


def set_gates(store: LaneStore, dims: Sequence[BoundGates]) -> None:
    """Let a store's claim mind gates that are bound already."""
    rows = GateRows.open(store.database, store.clock, store.lane.name)
    store.gate_learning = GateLearning(store, dims, rows)
    # One statement where all gates look at one key; what only a transaction of several can tell goes the longer way.
    if isinstance(store, PostgresLane) and len(dims) == 1 and dims[0].phrase is not None:
        store.gated = ClaimByKey(store, dims[0], rows.table)
    else:
        store.gated = LockingClaim(store, dims, rows)


async def check_conditions(store: LaneStore) -> None:
    """Let the database read the user's own SQL, without looking at a row: a mistake is told before the first claim."""
    lane, where = store.lane, f"lane {store.lane.name!r}, table {store.binding.table.fullname!r}"
    if lane.inputs:
        await _check_inputs(store, where)
    if lane.shard:
        text = f"select 1 from {store.statements.whole_table()} limit 0"
        try:
            await store.database.read(lambda run: run(text, ()))
        except Refused as error:
            raise DeclarationError(
                f"{where}: shard={lane.shard!r} does not fit its column: {error.message}",
                hint="values of the column's own type",
            ) from error
    for part in ("ready", "where"):
        if part == "where" and lane.where is None:
            continue
        try:
            condition = store.statements.ready_state() if part == "ready" else store.statements.further()
            text = f"select 1 from {store.statements.table} where {condition} limit 0"
            await store.database.read(lambda run, text=text: run(text, ()))  # type: ignore[misc]
        except (Refused, AttributeError, sa.exc.SQLAlchemyError, TypeError) as error:
            message = error.message if isinstance(error, Refused) else str(error)
            raise DeclarationError(
                f"{where}: {part} cannot be used as a condition: {message}",
                hint="SQL text over the table's own columns, or lambda t: t.c.column == value",
            ) from error


async def _check_inputs(store: LaneStore, where: str) -> None:
    """Let the database compare the inputs of a row, if there is one: a type may have no form in which it can."""
    say = store.statements
    text = f"select 1{say.and_inputs()} from {say.whole_table()} limit 1"
    try:
        await store.database.read(lambda run: run(text, ()))
    except Unserved:
        raise
    except Refused as error:
        raise DeclarationError(
            f"{where}: inputs {', '.join(store.lane.inputs)} cannot be compared: {error.message}",
            hint="leave out the column of that type",
        ) from error


async def probe(database: Database, stores: Sequence[LaneStore]) -> list[LaneStore]:
    """Which of these lanes have a ready row: one statement for all lanes of an environment."""
    text = "\nunion all\n".join(f"select {i} where {store.ready_probe()}" for i, store in enumerate(stores))
    rows = await database.read(rows_of(text))
    return [stores[position] for position in sorted(row[0] for row in rows)]
