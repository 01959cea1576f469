"""A Mill's lanes in its environments, to be asked something; what one environment lacks, the others still answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ..declare.lane import Lane
from ..errors import DeclarationError, Refused, RowmillError, Unreachable
from ..mill import Mill
from ..store import Database
from ..store.gates.pauses import Pause, standing
from ..store.inspect.lane_view import Counts, LaneView, UncountedRows, view_lane

T = TypeVar("T")


@dataclass(frozen=True)
class EnvironmentFailure:
    """What could not be asked: a whole environment, or one lane in it."""

    environment: str
    lane: str | None
    error: RowmillError

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
    failures: list[EnvironmentFailure]


class LaneDirectory:
    """A Mill's lanes in its environments, bound when first asked and kept, for ``fresh`` seconds where that is given:
    a server outlives changes of its tables. What one environment lacks, the others still answer.
    """

    def __init__(
        self,
        mill: Mill,
        environments: Sequence[str] | None = None,
        lanes: Sequence[str] | None = None,
        *,
        fresh: float | None = None,
    ) -> None:
        self.mill = mill
        self.lanes = sorted(mill.select(lanes), key=lambda lane: lane.priority)
        self.databases = mill.databases(environments)
        self._fresh = fresh
        self._views: dict[tuple[str, str], tuple[float, LaneView]] = {}
        if not any(lane.serves(name) for lane in self.lanes for name, _ in self.databases):
            named, places = self.lanes[0], ", ".join(name for name, _ in self.databases)
            raise DeclarationError(
                f"lane {named.name!r} does not work in environment {places}",
                hint=" or ".join(f"--env {name}" for name in named.environments or ()),
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, database in self.databases:
            await database.close()

    async def ask(
        self,
        question: Callable[[LaneView], Awaitable[T]],
        *,
        environments: Collection[str] | None = None,
        lanes: Collection[str] | None = None,
    ) -> Answers[T]:
        """Put one question to every lane, or to those named; environments are asked at the same time."""
        answers = Answers[T]([], [])
        places = [place for place in self.databases if environments is None or place[0] in environments]
        for part in await asyncio.gather(*(self._ask(*place, question, lanes) for place in places)):
            answers.found += part.found
            answers.failures += part.failures
        # One mistake of the user's is told once, however many environments it was made in.
        if not answers.found and all(isinstance(f.error, DeclarationError) for f in answers.failures):
            for failure in answers.failures:
                raise failure.error
        return answers

    async def _ask(
        self,
        name: str,
        database: Database,
        question: Callable[[LaneView], Awaitable[T]],
        lanes: Collection[str] | None,
    ) -> Answers[T]:
        answers = Answers[T]([], [])
        for lane in self.lanes:
            if not lane.serves(name) or (lanes is not None and lane.name not in lanes):
                continue
            try:
                view = await self.view(name, database, lane)
                answers.found.append((view, await question(view)))
            except Unreachable as error:
                return Answers([], [EnvironmentFailure(name, None, error)])
            except RowmillError as error:
                if isinstance(error, Refused):
                    self._views.pop((name, lane.name), None)
                answers.failures.append(EnvironmentFailure(name, lane.name, error))
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
        asked = {view.environment for _, view in self._views.values()}  # the others were not reached
        parts = await asyncio.gather(*(ask(*place) for place in self.databases if place[0] in asked))
        return [found for part in parts for found in part]

    async def elsewhere(self, answers: Answers[Counts]) -> list[UncountedRows]:
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

    async def _elsewhere(self, lanes: dict[str, tuple[LaneView, Counts]]) -> UncountedRows | None:
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
        place = (environment, lane.name)
        bound_at, view = self._views.get(place, (0.0, None))
        if view is None or (self._fresh is not None and time.monotonic() - bound_at > self._fresh):
            view = await view_lane(lane, environment, database, self.mill.clock)
            self._views[place] = time.monotonic(), view
        return view

    def forget(self, view: LaneView) -> None:
        """Bind a lane anew when it is next asked: its table may have changed."""
        self._views.pop((view.environment, view.lane.name), None)
