"""One row by its key: claim it whatever its place in the order, or see what a claim and a settlement would write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from ...errors import Refused, Unserved
from ..database import Database, RolledBack, Run, runner
from ..driver_errors import translated
from ..handler_connections import shielded
from .claim import Claim, Settlement
from .lane_store import LaneStore
from .row_keys import Key, Placeholders

T = TypeVar("T")
#: Seconds that a dry run waits for a row that another transaction has locked.
_LOCKED = 5.0


async def rolled_back(database: Database, verb: Callable[[Run], T]) -> T:
    """Run a verb in a transaction of the engine's own that is rolled back."""
    answer: list[T] = []

    def work(run: Run) -> None:
        for text in database.sql.time_limits(0, _LOCKED):
            run(text, ())
        answer.append(verb(run))
        raise RolledBack

    with contextlib.suppress(RolledBack):
        await database.transact(work, tolerant=True)
    return answer[0]


def _claim(store: LaneStore, key: Key, when: str | None = None) -> Callable[[Run], Sequence[Any]]:
    """Claim the row of this key, where ``when`` holds; without it, in whatever state the row is."""
    say, marks = store.statements, Placeholders(store.binding)
    worker = marks.add(store.worker) if "worker" in store.binding.roles else ""
    which = f"({say.names(store.binding.key)}) = {marks.key(key)}"
    text = say.claim_one(worker, f"{which}{f' and ({when})' if when else ''}")
    return lambda run: run(text, marks.given())


def _read(store: LaneStore, key: Key) -> Callable[[Run], Sequence[Any] | None]:
    say, marks = store.statements, Placeholders(store.binding)
    text = f"select {say.names(store.binding.columns)} from {say.table}"
    text += f" where ({say.names(store.binding.key)}) = {marks.key(key)}{say.shard()}"

    def verb(run: Run) -> Sequence[Any] | None:
        rows = run(text, marks.given())
        return rows[0] if rows else None

    return verb


async def claim_row(store: LaneStore, key: Key, when: str) -> Claim | None:
    """Claim one row for real, where ``when`` holds; None where it does not, or where there is no such row."""
    began, verb = time.monotonic(), _claim(store, key, when)
    rows = await store.database.transact(verb, tolerant=store.tolerant)
    return store.make_claims(rows, began)[0] if rows else None


async def as_claimed(store: LaneStore, key: Key) -> Claim | None:
    """A claim as a worker would get it, of a row that stays as it is; None where there is no such row."""
    rows = await rolled_back(store.database, _claim(store, key))
    return store.find_claims(rows)[0] if rows else None


async def read_row(store: LaneStore, key: Key) -> Sequence[Any] | None:
    return await store.database.read(_read(store, key))


async def as_settled(store: LaneStore, settlement: Settlement) -> tuple[Settlement, Sequence[Any] | None]:
    """What would be written for a run of this row, which stays as it is: the settlement, and the row as that would
    leave it. Values that the database refuses make the run a failure, as they do in a worker.
    """
    settlement = await store.usable(settlement)
    key = settlement.claim.key

    def verb(run: Run) -> Sequence[Any] | None:
        if not (rows := _claim(store, key)(run)):
            return None
        refenced(settlement.claim, store.make_claims(rows)[0])
        store.store_of(settlement.claim).settling([settlement])(run)
        return _read(store, key)(run)

    try:
        return settlement, await rolled_back(store.database, verb)
    except Unserved:
        raise
    except Refused as error:
        if settlement.kind == "dead" and not settlement.columns:
            raise
        return await as_settled(store, store.refused(settlement, error))


def refenced(claim: Claim, latest: Claim) -> None:
    """Give a claim the fence of a later claim of the same row."""
    claim.claimed_at, claim.attempts, claim.inputs = latest.claimed_at, latest.attempts, latest.inputs


async def claim_inside(store: LaneStore, connection: AsyncConnection, claim: Claim) -> bool:
    """Claim the row again inside a transaction that will be rolled back; False where the row is gone."""

    def verb(run: Run) -> Sequence[Any]:
        for text in store.database.sql.time_limits(0, _LOCKED):
            run(text, ())
        return _claim(store, claim.key)(run)

    with translated(store.database):
        rows = await shielded(connection.run_sync(lambda c: verb(runner(c))))
    if rows:
        refenced(claim, store.make_claims(rows)[0])
    return bool(rows)


async def read_inside(store: LaneStore, connection: AsyncConnection, key: Key) -> Sequence[Any] | None:
    """The row as a transaction that is under way sees it."""
    with translated(store.database):
        return await shielded(connection.run_sync(lambda c: _read(store, key)(runner(c))))
