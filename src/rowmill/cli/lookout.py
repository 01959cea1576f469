"""A Mill's lanes in its environments, to be asked something; what one environment lacks, the others still answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import typer
from rich.text import Text

from ..errors import DeclarationError, RowmillError, Unreachable, did_you_mean
from ..lane import Lane
from ..mill import Mill
from ..store import Database
from ..store.inspect import Counts, Elsewhere, LaneView, view_lane
from ..store.pauses import Pause, standing
from . import show
from .app import UsageError, errors

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What could not be asked: a whole environment, or one lane in it."""

    environment: str
    lane: str | None
    error: RowmillError

    def line(self) -> Text:
        """For people."""
        where = self.environment if self.lane is None else f"{self.environment}, {self.lane}"
        what = "not reached: " if isinstance(self.error, Unreachable) else ""
        said = Text(f"{where}: ", "red").append_text(show.plain(f"{what}{self.error.message}"))
        return said.append(". Try: ", "bold").append_text(show.plain(self.error.hint)) if self.error.hint else said

    def value(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "environment": self.environment,
            "lane": self.lane,
            "error": self.error.message,
            "hint": self.error.hint,
            "unreachable": isinstance(self.error, Unreachable),
        }


@dataclass
class Answers(Generic[T]):
    """What was found, in the order of environments and lanes, and what failed."""

    found: list[tuple[LaneView, T]]
    failures: list[Failure]

    def end(self) -> None:
        """Say what failed, below what was found, and end the command with 1 if anything did."""
        for failure in self.failures:
            errors.print(failure.line(), soft_wrap=True)
        self.exit()

    def exit(self) -> None:
        """End the command with 1 if anything failed."""
        if self.failures:
            raise typer.Exit(1)


class Lookout:
    """A Mill's lanes in its environments, bound when first asked and kept. What one environment lacks, the others
    still answer.
    """

    def __init__(self, mill: Mill, environments: Sequence[str] | None, lanes: Sequence[str] | None) -> None:
        self.mill = mill
        self.lanes = sorted(mill.select(lanes), key=lambda lane: lane.priority)
        self.databases = mill.databases(environments)
        self._views: dict[tuple[str, str], LaneView] = {}
        if not any(lane.serves(name) for lane in self.lanes for name, _ in self.databases):
            named, places = self.lanes[0], ", ".join(name for name, _ in self.databases)
            raise DeclarationError(
                f"lane {named.name!r} does not work in environment {places}",
                hint=" or ".join(f"--env {name}" for name in named.environments or ()),
            )

    async def __aenter__(self) -> Lookout:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, database in self.databases:
            await database.close()

    async def ask(self, question: Callable[[LaneView], Awaitable[T]]) -> Answers[T]:
        """Put one question to every lane; environments are asked at the same time."""
        answers = Answers[T]([], [])
        for part in await asyncio.gather(*(self._ask(*place, question) for place in self.databases)):
            answers.found += part.found
            answers.failures += part.failures
        # One mistake of the user's is told once, however many environments it was made in.
        if not answers.found and all(isinstance(f.error, DeclarationError) for f in answers.failures):
            for failure in answers.failures:
                raise failure.error
        return answers

    async def _ask(self, name: str, database: Database, question: Callable[[LaneView], Awaitable[T]]) -> Answers[T]:
        answers = Answers[T]([], [])
        for lane in self.lanes:
            if not lane.serves(name):
                continue
            try:
                view = await self.view(name, database, lane)
                answers.found.append((view, await question(view)))
            except Unreachable as error:
                return Answers([], [Failure(name, None, error)])
            except RowmillError as error:
                answers.failures.append(Failure(name, lane.name, error))
        return answers

    async def pauses(self) -> list[tuple[str, Pause]]:
        """The pauses that stand, by environment; one that cannot be asked says so elsewhere."""

        async def ask(name: str, database: Database) -> list[tuple[str, Pause]]:
            try:
                found = await standing(database, self.mill.clock, [lane.name for lane in self.lanes])
                # A key of a gate that is no longer declared holds nothing back.
                return [(name, p) for p in found if not p.target.dim or (p.target.lane, p.target.dim) in declared]
            except RowmillError:
                return []

        declared = {(lane.name, group.label) for lane in self.lanes for group in lane.groups}
        asked = {view.environment for view in self._views.values()}  # the others were not reached
        parts = await asyncio.gather(*(ask(*place) for place in self.databases if place[0] in asked))
        return [found for part in parts for found in part]

    async def elsewhere(self, answers: Answers[Counts]) -> list[Elsewhere]:
        """Tables that have rows of which no lane counts any: a state in a declaration may be misspelled."""
        counted: dict[tuple[str, str], dict[str, tuple[LaneView, Counts]]] = {}
        for view, counts in answers.found:
            counted.setdefault((view.environment, view.binding.table.fullname), {})[view.lane.name] = view, counts
        found = []
        for lanes in counted.values():
            try:
                told = await self._elsewhere(lanes)
            except RowmillError:  # then it is not known
                continue
            found += [told] if told else []
        return found

    async def _elsewhere(self, lanes: dict[str, tuple[LaneView, Counts]]) -> Elsewhere | None:
        """The same for one table, and the lanes over it that were asked."""
        if not all(counts.none for _, counts in lanes.values()):
            return None
        views = [view for view, _ in lanes.values()]
        first = views[0]
        for lane in self.mill.lanes.values():
            if lane.name not in lanes and lane.serves(first.environment) and first.same_table(lane):
                other = await self.view(first.environment, first.database, lane)
                if not (await other.count()).none:
                    return None
                views.append(other)
        return await first.sample(sorted({column for view in views for column in view.binding.state_columns()}))

    async def view(self, environment: str, database: Database, lane: Lane) -> LaneView:
        """One lane in one environment."""
        if (environment, lane.name) not in self._views:
            self._views[environment, lane.name] = await view_lane(lane, environment, database, self.mill.clock)
        return self._views[environment, lane.name]


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
