"""What the commands ask a Mill's lanes, with what failed told in the terminal's way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

import typer
from rich.text import Text

from ..errors import DeclarationError, Unreachable, did_you_mean
from ..mill import Mill
from ..ops import environments
from ..store.inspect.lane_view import LaneView
from . import show
from .app import UsageError, errors

T = TypeVar("T")


class PrintedFailure(environments.EnvironmentFailure):
    """What could not be asked, to be told in a line."""

    def line(self) -> Text:
        """For people."""
        where = self.environment if self.lane is None else f"{self.environment}, {self.lane}"
        what = "not reached: " if isinstance(self.error, Unreachable) else ""
        said = Text(f"{where}: ", "red").append_text(show.plain(f"{what}{self.error.message}"))
        return said.append(". Try: ", "bold").append_text(show.plain(self.error.hint)) if self.error.hint else said


class CommandAnswers(environments.Answers[T]):
    """What was found, and what failed: a command ends by it."""

    failures: list[PrintedFailure]  # type: ignore[assignment]

    def end(self) -> None:
        """Say what failed, below what was found, and end the command with 1 if anything did."""
        for failure in self.failures:
            errors.print(failure.line(), soft_wrap=True)
        self.exit()

    def exit(self) -> None:
        """End the command with 1 if anything failed."""
        if self.failures:
            raise typer.Exit(1)


class CommandDirectory(environments.LaneDirectory):
    """The same for a command."""

    async def ask(
        self,
        question: Callable[[LaneView], Awaitable[T]],
        *,
        environments: Collection[str] | None = None,
        lanes: Collection[str] | None = None,
    ) -> CommandAnswers[T]:
        """Put one question to every lane; environments are asked at the same time."""
        found = await super().ask(question, environments=environments, lanes=lanes)
        return CommandAnswers(found.found, [PrintedFailure(f.environment, f.lane, f.error) for f in found.failures])


def worded(words: Sequence[str], *after: str, more: bool = False) -> tuple[str | None, list[str]]:
    """``[APP] LANE ...`` taken apart: the application, if the first word names one, and the rest."""
    reference, rest = (words[0], list(words[1:])) if words and ":" in words[0] else (None, list(words))
    if len(rest) > len(after) and not more:
        raise UsageError(f"too many words: {' '.join(rest[len(after) :])}", hint=f"[APP] {' '.join(after)}")
    return reference, rest


def one_environment(mill: Mill, env: str | None, lane: str | None = None) -> str:
    """The environment a command is about: the same lane or id is another one in each."""
    (chosen,) = mill.select([lane]) if lane is not None else (None,)
    served = [name for name in mill.environments if chosen is None or chosen.serves(name)]
    if env is None and len(served) > 1:
        raise UsageError("which environment?", hint=" or ".join(f"--env {e}" for e in served))
    if env is not None and env not in mill.environments:
        raise DeclarationError(f"there is no environment {env!r}", hint=did_you_mean(env, mill.environments))
    return env or next(iter(served or mill.environments))


def one_lane(mill: Mill, name: str | None) -> str:
    """The lane a command is about."""
    if name is None and len(mill.lanes) > 1:
        raise UsageError("which lane?", hint=" or ".join(f"--lane {lane}" for lane in mill.lanes))
    return mill.select([name] if name is not None else None)[0].name
