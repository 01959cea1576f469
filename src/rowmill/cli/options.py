"""Options and words that several commands take, and what they name: the application, its environments and lanes."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import typer

from ..config import find_app
from ..errors import DeclarationError, did_you_mean
from ..mill import Mill
from .app import UsageError


def one_of(choices: Any) -> str:
    """The choices of an option in words, for its help: a list of more than three does not fit the column of types."""
    *most, last = get_args(choices)
    return f"{', '.join(most)} or {last}"


def not_empty(param: typer.CallbackParam, value: Any) -> Any:
    """Refuse an empty option: it comes from a variable that is not set, and never means all."""
    if any(not word.strip() for word in ([value] if isinstance(value, str) else value or ())):
        name = param.opts[0]
        raise UsageError(f"{name} is empty", hint=f"leave {name} out, or set the variable that should fill it")
    return value


def lane_names(context: typer.Context, incomplete: str) -> list[str]:
    """Complete lane names in the shell, from the application that the line names. Ignores mistakes."""
    # A line that ends in an option without its value is not parsed; bash, besides, makes three words of module:mill.
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    named = re.search(r"(?<!\S)([\w.]+)\s?:\s?([\w.]+)", line)
    given = ":".join(named.groups()) if named else context.params.get("reference") or os.environ.get("ROWMILL_APP")
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        return [name for name in find_app(given).lanes if name.startswith(incomplete)]
    return []


App = Annotated[
    str | None,
    typer.Argument(metavar="APP", help="MODULE:NAME of your Mill (default: ROWMILL_APP)", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]
Env = Annotated[list[str] | None, typer.Option("--env", help="only this environment (repeatable)", callback=not_empty)]
OneEnvironment = Annotated[
    str | None, typer.Option("--env", help="the environment; required if there are several", callback=not_empty)
]
OneLane = Annotated[
    str | None,
    typer.Option("--lane", help="the lane; optional if there is only one", autocompletion=lane_names),
]
SomeLanes = Annotated[
    list[str] | None, typer.Option("--lane", help="only this lane (repeatable)", autocompletion=lane_names)
]


def load(reference: str | None) -> Mill:
    """The application that a command uses."""
    if not (reference or os.environ.get("ROWMILL_APP")):
        raise UsageError("no application given", hint="rowmill COMMAND module:mill, or set ROWMILL_APP")
    return find_app(reference)


def worded(words: Sequence[str], *after: str, more: bool = False) -> tuple[str | None, list[str]]:
    """``[APP] LANE ...`` taken apart: the application, if the first word names one, and the rest."""
    reference, rest = (words[0], list(words[1:])) if words and ":" in words[0] else (None, list(words))
    if len(rest) > len(after) and not more:
        raise UsageError(f"too many arguments: {' '.join(rest[len(after) :])}", hint=f"[APP] {' '.join(after)}")
    return reference, rest


def one_row(words: Sequence[str], env: str | None, command: str) -> tuple[Mill, str, str, str, str | None]:
    """``[APP] LANE ID``: the application, the lane, the environment, the row's id, and the application as given."""
    reference, rest = worded(words, "LANE", "ID")
    if not rest:
        raise UsageError("no row given", hint=f"rowmill {command} [APP] LANE ID")
    mill = load(reference)
    lane = one_lane(mill, rest[0] if len(rest) > 1 else None)
    return mill, lane, one_environment(mill, env, lane), rest[-1], reference


def pairs(words: Sequence[str], option: str, form: str, hint: str) -> dict[str, str]:
    """``NAME=VALUE`` taken apart; the value may be empty."""
    for word in words:
        if not word.partition("=")[0] or "=" not in word:
            raise UsageError(f"{option} {word!r}: expected {form}", hint=hint)
    return {name.strip(): value.strip() for name, _, value in (word.partition("=") for word in words)}


def one_environment(mill: Mill, env: str | None, lane: str | None = None) -> str:
    """The environment that a command uses; required if there are several, because ids differ in each."""
    (chosen,) = mill.select([lane]) if lane is not None else (None,)
    served = [name for name in mill.environments if chosen is None or chosen.serves(name)]
    if env is None and len(served) > 1:
        raise UsageError("there are several environments: name one", hint=" or ".join(f"--env {e}" for e in served))
    if env is not None and env not in mill.environments:
        raise DeclarationError(f"there is no environment {env!r}", hint=did_you_mean(env, mill.environments))
    return env or next(iter(served or mill.environments))


def one_lane(mill: Mill, name: str | None) -> str:
    """The lane that a command uses."""
    if name is None and len(mill.lanes) > 1:
        raise UsageError("there are several lanes: name one", hint=" or ".join(f"--lane {lane}" for lane in mill.lanes))
    return mill.select([name] if name is not None else None)[0].name


def asked(mill: Mill, environments: Sequence[str] | None) -> int:
    """How many environments a command is about."""
    return len(set(environments)) if environments else len(mill.environments)
