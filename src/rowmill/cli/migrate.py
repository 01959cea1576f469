"""``rowmill migrate``: print the DDL that serves the lanes; --apply runs it, --detach removes it again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from ..ops.migrate import Tell
from ..ops.migrate import migrate as migrate_mill
from ..plural import counted
from .app import app, console, errors, failure_line, plain, print_json, run_async
from .options import App, AsJson, Env, load


@app.command()
def migrate(
    reference: App = None,
    env: Env = None,
    apply: Annotated[bool, typer.Option("--apply", help="run the DDL instead of printing it")] = False,
    wake: Annotated[
        bool, typer.Option("--wake", help="also add a trigger that wakes workers when any client makes rows ready")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="remove exactly what was added; with --wake only the triggers")
    ] = False,
    lock_timeout: Annotated[
        float, typer.Option(min=0.01, help="seconds to wait for a table lock before backing off")
    ] = 1.0,
    patience: Annotated[float, typer.Option(min=0, help="seconds to keep trying while a table is in use")] = 300.0,
    everything: Annotated[bool, typer.Option("--all", help="also print the SQL of rowmill's own tables")] = False,
    as_json: AsJson = False,
) -> None:
    """Print or apply the DDL that the lanes need: columns, indexes, statistics, rowmill's own tables.

    Without --apply it prints the changes to your tables, and one line for rowmill's own tables. It only adds. It builds
    indexes concurrently, and retries a change that does not get its lock in time. If it is interrupted, run it again:
    it continues where it stopped. With --wake, rows that plain SQL writes start within milliseconds, not at the next
    poll (PostgreSQL only). docs/how-to/wake-workers.md says what that costs.

    Example: `rowmill migrate app:mill --wake --apply`
    """
    mill = load(reference)
    times = (timedelta(seconds=lock_timeout), timedelta(seconds=patience))
    document = run_async(migrate_mill(mill, env, _teller(as_json), apply=apply, detach=detach, times=times, wake=wake))
    if as_json:
        print_json(document)
    else:
        for part in document["environments"]:
            if len(mill.environments) > 1:
                typer.echo(f"-- environment {part['environment']}")
            _print(part["statements"], reference or "", apply=apply, detach=detach, wake=wake, everything=everything)
        for failure in document["errors"]:
            errors.print(failure_line(failure), soft_wrap=True)
    if document["errors"]:
        raise typer.Exit(1)


def _teller(quiet: bool) -> Tell:
    """One line for each step; what only stands until the next one is dim, and goes to standard error in a pipe."""

    def tell(text: str, passing: bool) -> None:
        if quiet or not console.is_terminal:
            errors.print(plain(text), soft_wrap=True)
        else:
            console.print(Text("  ").append_text(plain(text)), style="dim" if passing else "", soft_wrap=True)

    return tell


def _print(
    statements: Sequence[dict[str, Any]], reference: str, *, apply: bool, detach: bool, wake: bool, everything: bool
) -> None:
    if not statements:
        typer.echo("-- nothing to remove" if detach else "-- nothing to do: the tables have everything the lanes need")
        return
    if apply:
        typer.echo(f"-- {counted(len(statements), 'statement')}, all done")
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
    words = ["rowmill migrate", reference, "--wake" if wake else "", "--detach" if detach else "", "--apply"]
    typer.echo(f"-- run it with: {' '.join(word for word in words if word)}")
