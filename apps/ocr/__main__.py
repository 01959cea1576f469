"""``python -m apps.ocr``: the monitor with its workers, the tables they need, and who works at this moment."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from apps.ocr.settings import Settings
from rowmill import Mill, RowmillError
from rowmill.errors import DeclarationError, Refused

commands = typer.Typer(add_completion=False, no_args_is_help=False, help=__doc__)
_TEMP = "free some space there, or OCR_TEMP=/another/directory"
_COLUMNS = ("ocr_worker_id", "active_jobs", "oldest_job", "newest_job")
_ACTIVE = f"select {', '.join(_COLUMNS)} from ocr_active_workers order by ocr_worker_id"


@commands.callback(invoke_without_command=True)
def monitor(context: typer.Context) -> None:
    """Run OCR_WORKER_COUNT workers until stopped: worker-1, worker-2, ..."""
    if context.invoked_subcommand is None:
        run(drain=False)


@commands.command()
def run(drain: Annotated[bool, typer.Option("--drain", help="exit when nothing is ready or running")] = False) -> None:
    """Run OCR_WORKER_COUNT workers, each a process with one document at a time; this process watches over them."""
    settings = Settings.from_environment()
    try:
        tempfile.TemporaryFile(dir=_made(settings.temp)).close()
    except OSError as error:
        raise RowmillError(f"OCR_TEMP={settings.temp!r} cannot be written to: {error.strerror}", hint=_TEMP) from None
    os.execv(sys.executable, [sys.executable, *command(settings, drain)])


def _made(directory: str) -> str:
    os.makedirs(directory, exist_ok=True)
    return directory


def command(settings: Settings, drain: bool = False) -> list[str]:
    """The monitor's command line: rowmill's supervisor, one process per worker."""
    # With one process the id is taken as it stands; with several each has its number behind it.
    name = settings.worker_name if settings.worker_count > 1 else f"{settings.worker_name}-1"
    many = ["--processes", str(settings.worker_count), "--worker-id", name, "--concurrency", "1"]
    return ["-m", "rowmill", "run", "apps.ocr:mill", *many, *(["--drain"] if drain else [])]


@commands.command()
def migrate() -> None:
    """Make the tables and the view in every environment, or bring them up to date."""
    from apps.ocr import mill
    from apps.registre.tables import migrate_all

    for environment, done in asyncio.run(migrate_all(mill)).items():
        typer.echo(f"{environment}: {', '.join(done) or 'nothing to do'}")


@commands.command()
def workers(as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """Who reads documents at this moment: per worker how many, and since when the oldest and the newest."""
    from apps.ocr import mill

    rows = asyncio.run(active_workers(mill))
    if as_json:
        typer.echo(json.dumps(rows, default=str))
        return
    table = Table("environment", *_COLUMNS, box=None)
    for row in rows:
        table.add_row(row["environment"], row["ocr_worker_id"], str(row["active_jobs"]), *map(_clock, _times(row)))
    Console().print(table if rows else "No document is being read.")


@commands.command("show")
def show_at_work(documents: Annotated[int, typer.Option(min=1, help="how many to read")] = 6) -> None:
    """See it work: scanned documents of the stand-in, in a fresh SQLite file, read and shown."""
    from apps.ocr.show import show

    raise typer.Exit(show(documents))


async def active_workers(mill: Mill) -> list[dict[str, Any]]:
    """The view ``ocr_active_workers`` of every environment, in order."""
    active: list[dict[str, Any]] = []
    for name, database in mill.databases():
        try:
            database.must_exist()
            rows = await database.read(lambda run: run(_ACTIVE, ()))
            active += [{"environment": name, **dict(zip(_COLUMNS, row, strict=True))} for row in rows]
        except (Refused, DeclarationError) as error:
            hint = "python -m apps.ocr migrate makes what is missing"
            raise RowmillError(f"{name}: cannot read ocr_active_workers: {error.message}", hint=hint) from error
        finally:
            await database.close()
    return active


def _times(row: dict[str, Any]) -> tuple[Any, Any]:
    return row["oldest_job"], row["newest_job"]


def _clock(value: Any) -> str:
    time = datetime.fromisoformat(value) if isinstance(value, str) else value
    return "" if time is None else (time if time.tzinfo is None else time.astimezone(UTC)).strftime("%H:%M:%S")


def main() -> None:
    """The command, with a user's mistakes told without a traceback."""
    try:
        commands()
    except RowmillError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
