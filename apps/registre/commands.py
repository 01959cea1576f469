"""``python -m apps.registre``: everything at once on this machine; ``migrate`` and ``run`` for the real thing."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from apps.standins.ending import stoppable
from apps.storage import Storage
from rowmill.errors import DeclarationError, RowmillError, did_you_mean

from . import browser, settings, sites, tables

app = typer.Typer(add_completion=False, no_args_is_help=False, rich_markup_mode=None, pretty_exceptions_enable=False)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
#: Kind -> the site that it needs.
NEEDS = {"extraction": sites.LAND, "req": sites.COMPANIES, "rdprm": sites.RIGHTS}


@app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    documents: Annotated[int, typer.Option(min=1, help="documents in each environment")] = 6,
    workers: Annotated[int, typer.Option(min=1, help="worker processes")] = 2,
) -> None:
    """See it work: stand-in, three environments, workers, a burst of jobs, and the tables filling."""
    if context.invoked_subcommand is None:
        from .show import show as play

        # Told to stop, it takes its workers and its database with it.
        raise typer.Exit(stoppable(lambda: play(documents, workers)))


@app.command()
def migrate() -> None:
    """Make the tables in every environment, and what is missing in those that are there."""
    from .lanes import mill

    for environment, done in asyncio.run(tables.migrate_all(mill)).items():
        print(f"{environment}: {', '.join(done) if done else 'nothing to do'}")


@app.command()
def run() -> None:
    """Work until stopped: WORKER_COUNT processes over all kinds, or over those in WORKER_KINDS."""
    from .lanes import mill

    command = ["rowmill", "run", "apps.registre:mill", *arguments()]
    len(mill.environments)
    print(" ".join(command), file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", *command])


def arguments() -> list[str]:
    """What ``rowmill run`` is told, after a look at whether all is there that the jobs will need."""
    kinds = [kind.strip() for kind in settings.text("WORKER_KINDS").split(",") if kind.strip()]
    for kind in kinds:
        if kind not in NEEDS:
            raise DeclarationError(f"WORKER_KINDS: there is no kind {kind!r}", hint=did_you_mean(kind, NEEDS))
    for kind in kinds or NEEDS:
        settings.access(NEEDS[kind].prefix, login=bool(NEEDS[kind].login))
    browser.find()
    Storage.from_environment()
    count = settings.whole("WORKER_COUNT")
    given = ["--processes", str(count), "--concurrency", str(settings.whole("WORKER_SLOTS"))]
    if kinds:
        given += ["--lanes", ",".join(kinds)]
    if kinds == ["extraction"]:
        # With several processes rowmill adds the number itself.
        id = f"worker-{settings.text('WORKER_INSTANCE')}"
        given += ["--worker-id", id if count > 1 else f"{id}-1"]
    return given


def main() -> None:
    """Errors of ours are told without a traceback."""
    try:
        app()
    except RowmillError as error:
        errors.print(f"Error: {error}")
        sys.exit(1)
