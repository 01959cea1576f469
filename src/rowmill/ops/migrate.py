"""``rowmill migrate``: apply the DDL that serves the lanes, or remove it, in every environment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

from ..errors import RowmillError
from ..migrate import ddl
from ..migrate.apply_ddl import WAKE, Builder, own_drops, readers, undo_order, unfinished_jobs
from ..migrate.fill_column import fill
from ..mill import Mill
from ..plural import counted
from ..store import Database
from ..store.inspect.lane_view import check_file
from ..store.own import schema
from ..store.own.ddl_ledger import Ledger, Record
from ..store.own.workers import WorkersTable
from .directory import EnvironmentFailure

#: Told for each step: what is done, and whether that only stands until the next one.
Tell = Callable[[str, bool], None]


async def migrate(
    mill: Mill,
    environments: Sequence[str] | None,
    tell: Tell,
    *,
    apply: bool,
    detach: bool,
    times: tuple[timedelta, timedelta],
    wake: bool = False,
) -> dict[str, Any]:
    """The statements of every environment; with ``apply`` they are run. ``detach``: those that remove what was added.

    ``times``: how long to wait for a table before giving way, and for how long to try again. ``wake``: the triggers
    that wake workers, too; with ``detach`` these alone.
    """
    done: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for name, database in mill.databases(environments):
        try:
            statements = await (_detach if detach else _migrate)(mill, name, database, apply, times, tell, wake)
            done.append({"environment": name, "statements": statements})
        except RowmillError as error:
            failures.append(EnvironmentFailure(name, None, error).value())
        finally:
            await database.close()
    return {"apply": apply, "detach": detach, "environments": done, "errors": failures}


async def _migrate(
    mill: Mill, name: str, database: Database, apply: bool, times: tuple[timedelta, timedelta], tell: Tell, wake: bool
) -> list[dict[str, Any]]:
    lanes = [lane for lane in mill.select(None) if lane.serves(name)]
    only_tasks = all(lane.own for lane in lanes)
    if apply and only_tasks:
        await database.create()
    check_file(database, hint="rowmill migrate APP --apply makes it" if only_tasks else None)
    outlines = await ddl.outlines(lanes, name, database)
    if wake and database.sql.notify is None:
        tell(f"environment {name}: workers notice every commit to a SQLite file; --wake adds nothing there", False)
    triggers = True if wake else None
    # Triggers are made once the columns are there that they ask for.
    lacking = apply and any(each.lacking for each in outlines)
    changes = await ddl.changes(database, outlines, wake=False if lacking else triggers)
    if apply and changes:
        await Builder(database, tell, *times).apply(changes)
        # Plans are asked with what is there now; what one change made possible is done at once.
        further = await ddl.changes(database, await ddl.outlines(lanes, name, database), wake=triggers)
        if further:
            await Builder(database, tell, *times).apply(further)
            changes += further
    if apply:
        for each in outlines:
            await fill(database, each.binding, tell)
    own = {database.own(table) for table in schema.own_tables()}
    return [_change(change, own) for change in changes]


def _change(change: ddl.SchemaChange, own: Collection[str]) -> dict[str, Any]:
    return {"kind": change.kind, "on": change.relation, "statement": change.statement, "why": change.why,
            "own": change.kind == "own" or change.relation in own, "replaces_leftover": change.leftover,
            "undo": [record.undo for record in change.records]}  # fmt: skip


async def _detach(
    mill: Mill, name: str, database: Database, apply: bool, times: tuple[timedelta, timedelta], tell: Tell, wake: bool
) -> list[dict[str, Any]]:
    check_file(database)
    records = await Ledger(database).records()
    if wake:
        records = [record for record in records if record.kind in WAKE]
        if apply and records:
            await Builder(database, tell, *times).detach(records, own=False)
        return _undone(records)
    own = await database.read(lambda run: own_drops(database, run, records))
    if apply and (records or own):
        await _nobody_works(database)
        await _nothing_is_lost(database)
        await _nobody_reads(database, records)
        await Builder(database, tell, *times).detach(records)
    return [*_undone(records), *({"kind": "own", "own": True, "statement": text} for text in own)]


def _undone(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [{"kind": r.kind, "on": r.relation, "name": r.name, "statement": r.undo} for r in undo_order(records)]


async def _nobody_works(database: Database) -> None:
    workers = WorkersTable(database)
    if not await workers.exists():
        return
    alive = [worker["id"] for worker in await workers.all() if worker["alive"]]
    if alive:
        raise RowmillError(
            f"{counted(len(alive), 'worker is', 'workers are')} running: {', '.join(alive[:3])}",
            hint="stop them first; rowmill workers shows them",
        )


async def _nothing_is_lost(database: Database) -> None:
    left = await database.read(lambda run: unfinished_jobs(database, run))
    if left:
        raise RowmillError(
            f"{counted(left, 'job is', 'jobs are')} still unfinished in {database.own('rowmill_jobs')}",
            hint="let workers finish them first, or delete them. Otherwise they would be lost",
        )


async def _nobody_reads(database: Database, records: Sequence[Record]) -> None:
    reading = await database.read(lambda run: readers(database, run, records))
    for reader, columns in reading.items():
        raise RowmillError(
            f"{reader} reads {', '.join(sorted(columns))}, which migrate added and --detach removes",
            hint=f"drop {reader}, run this again, and create it again without these columns",
        )
