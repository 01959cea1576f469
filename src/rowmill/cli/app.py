"""The command line's frame: one Typer app, one way to print, one way to fail."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from ..errors import RowmillError, did_you_mean
from ..mill import Mill
from ..ops.directory import LaneDirectory

T = TypeVar("T")
WRONG_USAGE, NOTHING_MATCHED = 2, 4
#: Output that is not a terminal is never wrapped: the width of its lines.
ENDLESS = 100_000


class UsageError(RowmillError):
    """The command line is incomplete or wrong: exit code 2."""


class NothingMatched(RowmillError):
    """Nothing matched: exit code 4."""


def exit_code(error: RowmillError) -> int:
    return {UsageError: WRONG_USAGE, NothingMatched: NOTHING_MATCHED}.get(type(error), 1)


#: The commands by what they are for, in the order in which people need them.
PANELS = {
    "Start": ["demo", "check"],
    "Run": ["run", "try", "rehearse"],
    "Look": ["status", "top", "jobs", "why", "logs", "errors", "stuck", "workers", "health", "gates"],
    "Act": ["retry", "cancel", "release", "pause", "resume"],
    "Adopt": ["adopt", "migrate", "sql"],
    "Serve": ["serve", "mcp", "token", "audit"],
    "Prove": ["prove"],
}


#: Commands of other tools, or other words for ours.
_ALIASES = {"web": "serve", "dashboard": "serve", "ui": "serve", "worker": "run", "work": "run", "list": "jobs",
            "rows": "jobs", "failures": "errors", "init": "adopt", "explain": "why"}  # fmt: skip


#: What the help calls the value of an option, by the parameter's name. Options with choices list them.
_METAVARS = {
    "lanes": "LANES", "env": "ENV", "lane": "LANE", "key": "KEY", "by": "COLUMN", "ids": "ID", "worker_id": "ID",
    "worker": "ID", "processes": "N", "concurrency": "N", "limit": "N", "rows": "N", "schedules": "N", "seed": "N",
    "port": "PORT", "metrics_port": "PORT", "host": "ADDRESS", "metrics_host": "ADDRESS", "hours": "HOURS",
    "days": "DAYS", "seconds": "SECONDS", "grace": "SECONDS", "timeout": "SECONDS", "lock_timeout": "SECONDS",
    "patience": "SECONDS", "error": "FAMILY", "family": "FAMILY", "reason": "TEXT", "write": "FILE",
    "scope": "SCOPE", "prefix": "PREFIX", "schema": "SCHEMA", "role": "ROLE", "allow_host": "HOST",
    "allow_insert": "LANE", "trust_proxy": "ADDRESS", "name": "VERB=NAME", "grant": "ROLE", "hide": "LANE.COLUMN",
    "writes": "LANE.COLUMN", "run": "N", "span": "DURATION", "until": "TIME",
    "install_completion": "", "show_completion": "",
}  # fmt: skip


class CommandPanels(TyperGroup):
    """Lists the commands by panel, and suggests corrections for wrong words."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for panel, names in PANELS.items():
            for name in names:
                command: Any = self.commands[name]
                command.rich_help_panel = panel
                for parameter in command.params:
                    _show_plainly(parameter)
                command.get_help_option = _plain_help(command.get_help_option)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of this name; for an unknown name, suggest the nearest."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            meant = _ALIASES.get(args[0])
            hint = f"did you mean {meant!r}?" if meant else did_you_mean(args[0], list(self.commands))
            raise UsageError(f"there is no command {args[0]!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; for an extra word, suggest the option that it probably belongs to."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            extra = re.match(r"Got unexpected extra argument\S* \((.*)\)$", getattr(error, "message", ""))
            if extra and (options := _as_options(error.ctx, extra[1].split())):  # type: ignore[attr-defined]
                error.message += f". Try: {options}"  # type: ignore[attr-defined]
            raise

    def get_params(self, ctx: Any) -> Any:
        """The program's own options; those of shell completion are added after it is made."""
        params = super().get_params(ctx)
        for parameter in params:
            _show_plainly(parameter)
        return params

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in PANELS.values() for name in names]


def _show_plainly(parameter: Any) -> None:
    """In the help, a flag has no type, and a value has a word of ours, not the name of a Python type."""
    if parameter.help:
        parameter.help = _as_phrase(parameter.help)
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: ""
        if " " in (parameter.metavar or ""):  # it says itself what may be left out or repeated
            parameter.get_usage_pieces = lambda ctx: [parameter.metavar]
    elif getattr(parameter, "is_flag", False):
        parameter.metavar = ""
    elif parameter.metavar is None and parameter.name in _METAVARS:
        parameter.metavar = _METAVARS[parameter.name]


def _as_phrase(text: str) -> str:
    """The help of an option as ours are written: Typer's own begin with a capital and end with a full stop."""
    return text[0].lower() + text[1:-1] if text.startswith(("Show ", "Install ", "Print ")) else text


def _plain_help(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``--help`` itself, which every command makes when it is asked."""

    def made(context: Any) -> Any:
        option = make(context)
        if option is not None:
            _show_plainly(option)
        return option

    return made


def _as_options(context: Any, words: Sequence[str]) -> str:
    """The words as options of the command, ``--lane crawl --id 14``, as far as it has them."""
    names = {name for param in context.command.params for name in param.opts}
    options, lane = [], "--lane" in names
    for word in words:
        if lane and not word.isdecimal():
            options.append(f"--lane {word}")
            lane = False
        elif "--id" in names:
            options.append(f"--id {word}")
    return " ".join(options)


app = typer.Typer(
    name="rowmill",
    cls=CommandPanels,
    help="Turn any database table into a job queue.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
console = Console()
errors = Console(stderr=True)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"rowmill {importlib.metadata.version('rowmill')}")
        raise typer.Exit


@app.callback()
def rowmill(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Turn any database table into a job queue."""


def plain(value: Any) -> Text:
    """Foreign text in one line, without control characters."""
    return Text("".join(c if c.isprintable() else " " for c in str(value)))


def print_out(what: RenderableType) -> None:
    """Print to standard output: wrapped at a terminal, unwrapped into a pipe or a file."""
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


def for_app(hint: str, reference: str | None) -> str:
    """A hint's commands with the application that was given, so that they can be copied. None: ROWMILL_APP is set."""
    return re.sub(r" APP\b", f" {reference}" if reference else "", hint)


def labelled(label: Text, text: RenderableType) -> Table:
    """A label and its text: where the text takes several lines, they are aligned."""
    made = Table.grid()
    made.add_column(width=len(label), no_wrap=True)
    made.add_column(overflow="fold")
    made.add_row(label, text)
    return made


def failure_line(failure: dict[str, Any]) -> Text:
    """One line for an environment or a lane that did not answer."""
    where = failure["environment"] if failure["lane"] is None else f"{failure['environment']}, {failure['lane']}"
    line = Text(f"{where}: ", "red").append_text(plain(failure["error"]))
    return line.append(". Try: ", "bold").append_text(plain(failure["hint"])) if failure["hint"] else line


def answer(document: dict[str, Any], shown: RenderableType | None, *, as_json: bool, nothing: bool = False) -> None:
    """Print a document as JSON or as ``shown``, then its failures. Exits with 1 if there are any; otherwise with 4 if
    there is ``nothing``.
    """
    failures = document.get("errors", []) + [f for part in document.get("environments", []) for f in part["errors"]]
    if as_json:
        print_json(document)
    else:
        if shown is not None:
            print_out(shown)
        for failure in failures:
            errors.print(failure_line(failure), soft_wrap=True)
    if failures or nothing:
        raise typer.Exit(1 if failures else NOTHING_MATCHED)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's async part."""
    return asyncio.run(work)


def consent(what: str, hint: str) -> None:
    """Ask at a terminal before much is written; in a script, refuse to."""
    if not sys.stdin.isatty():
        raise RowmillError(f"this would {what}", hint=hint)
    if not typer.confirm(f"This will {what}. Continue?", err=True):
        raise typer.Exit(1)


def ask(
    mill: Mill,
    question: Callable[[LaneDirectory], Awaitable[T]],
    environments: Sequence[str] | None = None,
    lanes: Sequence[str] | None = None,
) -> T:
    """Run a question or an action on a Mill's lanes, in all environments or the named ones."""

    async def main() -> T:
        async with LaneDirectory(mill, environments, lanes) as directory:
            return await question(directory)

    return run_async(main())


def main(words: Sequence[str] | None = None, name: str | None = None) -> None:
    """The console script: a user's mistake is reported without a traceback. ``words`` and ``name``: the command
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
