"""The command line's frame: one Typer app, one way to print, one way to fail."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import RowmillError

T = TypeVar("T")

app = typer.Typer(
    name="rowmill",
    help="Any table you already have is the queue.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
console = Console()
errors = Console(stderr=True)

App = Annotated[
    str | None,
    typer.Argument(metavar="APP", help="module:mill, as with uvicorn; ROWMILL_APP stands in", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts")]
Env = Annotated[list[str] | None, typer.Option("--env", help="only this environment (may be given again)")]


def print_json(value: Any) -> None:
    """One JSON document on standard output; times as ISO text."""
    json.dump(value, sys.stdout, default=str, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's async part."""
    return asyncio.run(work)


def main() -> None:
    """The console script: a user's mistake ends in two lines, never in a traceback."""
    try:
        app()
    except RowmillError as error:
        errors.print(f"[red]Error:[/red] {escape(error.message)}", highlight=False, soft_wrap=True)
        if error.hint:
            errors.print(f"[bold]Try:[/bold] {escape(error.hint)}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
