"""The command line's frame: one Typer app, one way to print, one way to fail."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

from ..config import find_app
from ..errors import RowmillError
from ..mill import Mill

T = TypeVar("T")
WRONG_USAGE, NOTHING_MATCHED = 2, 4
#: Where nobody looks on, a line is as long as what stands in it.
ENDLESS = 100_000


class UsageError(RowmillError):
    """The command itself lacks something, or says something that makes no sense: exit code 2."""


class NothingMatched(RowmillError):
    """There is nothing that the command could be about: exit code 4."""


def exit_code(error: RowmillError) -> int:
    """What the command ends with."""
    return {UsageError: WRONG_USAGE, NothingMatched: NOTHING_MATCHED}.get(type(error), 1)


app = typer.Typer(
    name="rowmill",
    help="Any table you already have is the queue.",
    no_args_is_help=True,
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


def said(param: typer.CallbackParam, value: Any) -> Any:
    """Refuse an option that was given an empty word: it is a variable that is not set, and never means all."""
    if any(not word.strip() for word in ([value] if isinstance(value, str) else value or ())):
        name = param.opts[0]
        raise UsageError(f"{name} is empty", hint=f"leave {name} out, or set the variable that should fill it")
    return value


Env = Annotated[
    list[str] | None, typer.Option("--env", help="only this environment (may be given again)", callback=said)
]


def lane_names(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell: the lanes of the application that the line names so far. A mistake in it is not said here."""
    # A line that ends in an option without its value is not parsed; bash, besides, makes three words of module:mill.
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    named = re.search(r"(?<!\S)([\w.]+)\s?:\s?([\w.]+)", line)
    given = ":".join(named.groups()) if named else context.params.get("reference") or os.environ.get("ROWMILL_APP")
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        return [name for name in find_app(given).lanes if name.startswith(incomplete)]
    return []


def load(reference: str | None) -> Mill:
    """The application that a command is about."""
    if not (reference or os.environ.get("ROWMILL_APP")):
        raise UsageError("no application given", hint="name it, as module:mill, or set ROWMILL_APP")
    return find_app(reference)


def print_out(what: RenderableType) -> None:
    """On standard output: within the width of a terminal; whole, a line for a line, into a pipe or a file."""
    if console.is_terminal:
        console.print(what)
        return
    whole = Console(width=ENDLESS, color_system=None, highlight=False)
    with whole.capture() as text:
        whole.print(what)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.get().removesuffix("\n").split("\n"))


def print_json(value: Any) -> None:
    """One JSON document on standard output; times as ISO text."""
    json.dump(value, sys.stdout, default=str, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's async part."""
    return asyncio.run(work)


def main(words: Sequence[str] | None = None, name: str | None = None) -> None:
    """The console script: a user's mistake ends in two lines, never in a traceback. ``words`` and ``name``: the command
    line and what it is called, where it is not the process's own.
    """
    try:
        app(args=words, prog_name=name)
    except RowmillError as error:
        errors.print(f"[red]Error:[/red] {escape(error.message)}", highlight=False, soft_wrap=True)
        if error.hint:
            errors.print(f"[bold]Try:[/bold] {escape(error.hint)}", highlight=False, soft_wrap=True)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
