"""``rowmill migrate``: the DDL that serves the lanes; with --apply it runs, with --detach it is taken away again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from ..errors import RowmillError
from ..migrate import ddl
from ..migrate.apply_ddl import Builder, own_drops, readers, unfinished_jobs
from ..migrate.fill_column import fill
from ..mill import Mill
from ..plural import counted
from ..store import Database
from ..store.inspect.lane_view import check_file
from ..store.own import schema
from ..store.own.ddl_ledger import Ledger, Record
from ..store.own.workers import WorkersTable
from . import show
from .app import App, AsJson, Env, app, console, errors, load, print_json, run_async
from .environments import PrintedFailure


@app.command()
def migrate(
    reference: App = None,
    env: Env = None,
    apply: Annotated[bool, typer.Option("--apply", help="run it; without, it is only printed")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="remove exactly what was added, and nothing else")] = False,
    lock_timeout: Annotated[float, typer.Option(min=0.01, help="seconds to wait for a table before giving way")] = 1.0,
    patience: Annotated[float, typer.Option(min=0, help="seconds to go on trying while a table is in use")] = 300.0,
    everything: Annotated[bool, typer.Option("--all", help="print the SQL of rowmill's own tables, too")] = False,
    as_json: AsJson = False,
) -> None:
    """The DDL that serves the lanes of APP: missing columns, partial indexes, statistics, rowmill's own tables.

    Without --apply it is printed: first what touches your tables, then a line for rowmill's own.
    Additive only. Indexes are built concurrently; what needs a table for a moment gives way after the lock timeout
    and tries again. Interrupted, it goes on where it stopped when run again.
    """
    mill = load(reference)
    way = {"apply": apply, "detach": detach}
    times = (timedelta(seconds=lock_timeout), timedelta(seconds=patience))

    async def main() -> tuple[list[dict[str, Any]], list[PrintedFailure]]:
        done: list[dict[str, Any]] = []
        failures: list[PrintedFailure] = []
        for name, database in mill.databases(env):
            try:
                found = await (_detach if detach else _migrate)(mill, name, database, apply, times, quiet=as_json)
                done.append({"environment": name, **found})
            except RowmillError as error:
                failures.append(PrintedFailure(name, None, error))
            finally:
                await database.close()
        return done, failures

    done, failures = run_async(main())
    if as_json:
        print_json({**way, "environments": done, "errors": [failure.value() for failure in failures]})
    else:
        for found in done:
            if len(mill.environments) > 1:
                typer.echo(f"-- environment {found['environment']}")
            _print(found["statements"], reference or "", apply=apply, detach=detach, everything=everything)
        for failure in failures:
            errors.print(failure.line(), soft_wrap=True)
    if failures:
        raise typer.Exit(1)


async def _migrate(
    mill: Mill, name: str, database: Database, apply: bool, times: tuple[timedelta, timedelta], *, quiet: bool
) -> dict[str, Any]:
    lanes = [lane for lane in mill.select(None) if lane.serves(name)]
    only_tasks = all(lane.own for lane in lanes)
    if apply and only_tasks:
        await database.create()
    check_file(database, hint="rowmill migrate APP --apply makes it" if only_tasks else None)
    outlines = await ddl.outlines(lanes, name, database)
    changes = await ddl.changes(database, outlines)
    if apply and changes:
        await Builder(database, _teller(quiet), *times).apply(changes)
        # Plans are asked with what is there now; what one change made possible is done at once.
        further = await ddl.changes(database, await ddl.outlines(lanes, name, database))
        if further:
            await Builder(database, _teller(quiet), *times).apply(further)
            changes += further
    if apply:
        for each in outlines:
            await fill(database, each.binding, _teller(quiet))
    own = {database.own(table) for table in schema.own_tables()}
    return {"statements": [_change(change, own) for change in changes]}


def _change(change: ddl.SchemaChange, own: Collection[str]) -> dict[str, Any]:
    return {"kind": change.kind, "on": change.relation, "statement": change.statement, "why": change.why,
            "own": change.kind == "own" or change.relation in own, "replaces_leftover": change.leftover,
            "undo": [record.undo for record in change.records]}  # fmt: skip


async def _detach(
    mill: Mill, name: str, database: Database, apply: bool, times: tuple[timedelta, timedelta], *, quiet: bool
) -> dict[str, Any]:
    check_file(database)
    records = await Ledger(database).records()
    own = await database.read(lambda run: own_drops(database, run))
    if apply and (records or own):
        await _nobody_works(database)
        await _nothing_is_lost(database)
        await _nobody_reads(database, records)
        await Builder(database, _teller(quiet), *times).detach(records)
    return {"statements": [*_undone(records), *({"kind": "own", "own": True, "statement": text} for text in own)]}


def _undone(records: Sequence[Record]) -> list[dict[str, Any]]:
    kinds = ("index", "statistics", "storage", "column")
    ordered = sorted(records, key=lambda r: (kinds.index(r.kind), -r.position))
    return [{"kind": r.kind, "on": r.relation, "name": r.name, "statement": r.undo} for r in ordered]


async def _nobody_works(database: Database) -> None:
    fleet = WorkersTable(database)
    if not await fleet.exists():
        return
    alive = [w["id"] for w in await fleet.all() if w["state"] not in ("stopped", "dead")]
    if alive:
        raise RowmillError(
            f"{counted(len(alive), 'worker is', 'workers are')} at work: {', '.join(alive[:3])}",
            hint="stop them first; rowmill workers shows them",
        )


async def _nothing_is_lost(database: Database) -> None:
    left = await database.read(lambda run: unfinished_jobs(database, run))
    if left:
        raise RowmillError(
            f"{counted(left, 'job is', 'jobs are')} still to be done in {database.own('rowmill_jobs')}",
            hint="let workers finish them first, or delete them: they would be lost",
        )


async def _nobody_reads(database: Database, records: Sequence[Record]) -> None:
    found = await database.read(lambda run: readers(database, run, records))
    for reader, columns in found.items():
        raise RowmillError(
            f"{reader} reads {', '.join(sorted(columns))}, which migrate added and --detach removes",
            hint=f"drop {reader}, run this again, and create it again without these columns",
        )


def _teller(quiet: bool) -> Any:
    """One line for each step; what only stands until the next one is dim, and goes to standard error in a pipe."""

    def tell(text: str, passing: bool) -> None:
        if quiet or not console.is_terminal:
            errors.print(show.plain(text), soft_wrap=True)
        else:
            console.print(Text("  ").append_text(show.plain(text)), style="dim" if passing else "", soft_wrap=True)

    return tell


def _print(
    statements: Sequence[dict[str, Any]], reference: str, *, apply: bool, detach: bool, everything: bool
) -> None:
    if not statements:
        typer.echo("-- nothing to remove" if detach else "-- nothing to do: the tables have what the lanes need")
        return
    if apply:
        typer.echo(f"-- {counted(len(statements), 'step')}, all done")
        return
    folded = [] if everything else [each for each in statements if each.get("own")]
    for each in (each for each in statements if each not in folded):
        if each.get("why"):
            typer.echo("-- " + each["why"].replace("; ", "\n-- "))
        typer.echo(f"{each['statement']};")
    if folded:
        typer.echo(
            f"-- and {'the removal of ' if detach else ''}rowmill's own tables, rowmill_*: --all prints their SQL"
        )
    words = ["rowmill migrate", reference, "--detach" if detach else "", "--apply"]
    typer.echo(f"-- run it with: {' '.join(word for word in words if word)}")
