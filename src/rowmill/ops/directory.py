"""A Mill's lanes in its environments. If one environment does not answer, the others still do."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ..declare.lane import Lane
from ..errors import DatabaseError, DeclarationError, Refused, RowmillError, Unreachable, did_you_mean
from ..mill import Mill
from ..store import Database
from ..store.gates.pauses import Pause, standing
from ..store.gates.shared_rate import SharedState, SharedWindow
from ..store.inspect.lane_view import Counts, LaneView, UncountedRows, check_file, view_lane
from ..store.jobs.enqueue import CHANNEL

T = TypeVar("T")
#: Whether the asker may see a lane; the empty name stands for all of them.
Sees = Callable[[str], bool]


class NotFound(DeclarationError):
    """There is no environment, lane, row or task of this name."""


@dataclass(frozen=True)
class EnvironmentFailure:
    """An environment, or a lane in it, that did not answer."""

    environment: str
    lane: str | None
    error: RowmillError

    def value(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "lane": self.lane,
            "error": self.error.message,
            "hint": self.error.hint,
            "unreachable": isinstance(self.error, Unreachable),
        }


@dataclass
class Answers(Generic[T]):
    """The answers in the order of environments and lanes, and what failed."""

    lanes: list[tuple[LaneView, T]]
    failures: list[EnvironmentFailure]

    def errors(self) -> list[dict[str, Any]]:
        """What failed, as a document."""
        return [failure.value() for failure in self.failures]


class LaneDirectory:
    """A Mill's lanes in its environments: each is bound to its table when it is first asked.

    ``fresh``: seconds after which a table is looked at again, for servers that outlive changes of their tables.
    ``narrowed`` gives the part of a directory that a question is about, or that an asker may see.
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
        self.databases = dict(mill.databases(environments))
        self.sees: Sees = lambda lane: True
        self._controls: dict[str, Database] = {}
        self._fresh = fresh
        self._views: dict[tuple[str, str], tuple[float, LaneView]] = {}
        if not any(lane.serves(name) for lane in self.lanes for name in self.databases):
            named, places = self.lanes[0], ", ".join(self.databases)
            raise DeclarationError(
                f"lane {named.name!r} is not declared for environment {places}",
                hint=" or ".join(f"--env {name}" for name in named.environments or ()),
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for database in (*self.databases.values(), *self._controls.values()):
            await database.close()

    def narrowed(
        self,
        environments: Sequence[str] | None = None,
        lanes: Sequence[str] | None = None,
        sees: Sees | None = None,
    ) -> Self:
        """The named environments and lanes, and of these the ones that the asker sees; bound lanes are shared."""
        part = copy.copy(self)
        part.sees = sees or self.sees
        for name in environments or ():
            self.database(name)
        for name in lanes or ():
            if name not in self.mill.lanes:
                raise NotFound(f"there is no lane {name!r}", hint=did_you_mean(name, self.mill.lanes))
        if environments:
            part.databases = {name: self.databases[name] for name in self.databases if name in environments}
        part.lanes = [lane for lane in self.lanes if part.sees(lane.name) and (not lanes or lane.name in lanes)]
        return part

    def database(self, environment: str) -> Database:
        """An environment's database."""
        if environment not in self.databases:
            raise NotFound(
                f"there is no environment {environment!r}", hint=did_you_mean(environment, list(self.databases))
            )
        return self.databases[environment]

    def control(self, shared: str) -> Database:
        """The database that a shared rate or budget names."""
        if shared not in self._controls:
            self._controls[shared] = self.mill.control(shared)
        return self._controls[shared]

    async def shared_state(self, lane: Lane) -> SharedState | RowmillError | None:
        """The state of a lane's shared rate, if it has one; or why that is not known."""
        if (rate := lane.shared_rate) is None or rate.shared is None:
            return None
        try:
            database = self.control(rate.shared)
            check_file(database)
            return await SharedWindow(database, self.mill.clock, lane.shared_name, rate).state()
        except RowmillError as error:
            return error

    @property
    def first(self) -> Database:
        """The first environment's database, where tokens and the audit log are."""
        return next(iter(self.databases.values()))

    async def view(self, environment: str, lane: str, *, serving: bool = True) -> LaneView:
        """One lane in one environment; ``serving``: only where the lane works."""
        database, known = self.database(environment), self.mill.lanes.get(lane)
        if known is None:
            raise NotFound(f"there is no lane {lane!r}", hint=did_you_mean(lane, self.mill.lanes))
        if serving and not known.serves(environment):
            raise NotFound(f"lane {lane!r} is not declared for environment {environment!r}")
        bound_at, view = self._views.get((environment, lane), (0.0, None))
        if view is None or (self._fresh is not None and time.monotonic() - bound_at > self._fresh):
            view = await view_lane(known, environment, database, self.mill.clock)
            self._views[environment, lane] = time.monotonic(), view
        return view

    async def each(
        self, question: Callable[[str, Database], Awaitable[T]]
    ) -> tuple[dict[str, T], list[EnvironmentFailure]]:
        """Ask every environment at the same time."""

        async def ask(name: str, database: Database) -> T | EnvironmentFailure:
            try:
                check_file(database)
                return await question(name, database)
            except RowmillError as error:
                return EnvironmentFailure(name, None, error)

        parts = await asyncio.gather(*(ask(*place) for place in self.databases.items()))
        named = dict(zip(self.databases, parts, strict=True))
        answers = {name: part for name, part in named.items() if not isinstance(part, EnvironmentFailure)}
        return answers, [part for part in parts if isinstance(part, EnvironmentFailure)]

    async def ask(self, question: Callable[[LaneView], Awaitable[T]]) -> Answers[T]:
        """Ask every lane one question; environments are asked at the same time."""
        answers = Answers[T]([], [])
        for part in await asyncio.gather(*(self._ask(name, question) for name in self.databases)):
            answers.lanes += part.lanes
            answers.failures += part.failures
        # A mistake in a declaration is reported once, not once per environment.
        if not answers.lanes and all(isinstance(f.error, DeclarationError) for f in answers.failures):
            for failure in answers.failures:
                raise failure.error
        return answers

    async def _ask(self, environment: str, question: Callable[[LaneView], Awaitable[T]]) -> Answers[T]:
        answers = Answers[T]([], [])
        for lane in self.lanes:
            if not lane.serves(environment):
                continue
            try:
                view = await self.view(environment, lane.name)
                answers.lanes.append((view, await question(view)))
            except Unreachable as error:
                return Answers([], [EnvironmentFailure(environment, None, error)])
            except RowmillError as error:
                if isinstance(error, Refused):  # the table may have changed
                    self._views.pop((environment, lane.name), None)
                answers.failures.append(EnvironmentFailure(environment, lane.name, error))
        return answers

    async def views(self) -> Answers[None]:
        """Every lane, bound to its table. Lanes that cannot be bound are among the failures."""

        async def nothing(view: LaneView) -> None: ...

        parts = await asyncio.gather(*(self._ask(name, nothing) for name in self.databases))
        return Answers([f for part in parts for f in part.lanes], [f for part in parts for f in part.failures])

    async def pauses(self) -> list[tuple[str, Pause]]:
        """The pauses in force, by environment. An environment that was not reached before is left out."""

        async def ask(name: str, database: Database) -> list[Pause]:
            pauses = await standing(database, self.mill.clock, [lane.name for lane in self.lanes])
            # A key of a gate that is no longer declared holds nothing back.
            return [p for p in pauses if not p.target.dim or (p.target.lane, p.target.dim) in declared]

        declared = {(lane.name, group.label) for lane in self.lanes for group in lane.groups}
        reached = {view.environment for _, view in self._views.values()}
        part = copy.copy(self)
        part.databases = {name: database for name, database in self.databases.items() if name in reached}
        answers, _ = await part.each(ask)
        return [(name, pause) for name, pauses in answers.items() for pause in pauses]

    async def uncounted(self, answers: Answers[Counts]) -> list[UncountedRows]:
        """Tables with rows that no lane counts: a state in a declaration may be misspelled."""
        tables: dict[tuple[str, str], dict[str, tuple[LaneView, Counts]]] = {}
        for view, counts in answers.lanes:
            tables.setdefault((view.environment, view.binding.table.fullname), {})[view.lane.name] = view, counts
        uncounted = []
        for lanes in tables.values():
            with contextlib.suppress(RowmillError):  # then it is not known
                uncounted += [rows] if (rows := await self._uncounted(lanes)) else []
        return uncounted

    async def _uncounted(self, lanes: dict[str, tuple[LaneView, Counts]]) -> UncountedRows | None:
        """The same for one table, and the lanes over it that were asked."""
        if not all(counts.none for _, counts in lanes.values()):
            return None
        views = [view for view, _ in lanes.values()]
        first = views[0]
        for lane in self.mill.lanes.values():
            if lane.name not in lanes and lane.serves(first.environment) and first.same_table(lane):
                other = await self.view(first.environment, lane.name)
                if not (await other.count()).none:
                    return None
                views.append(other)
        return await first.sample(sorted({column for view in views for column in view.binding.state_columns()}))

    async def wake(self, environment: str) -> None:
        """Notify idle workers, which otherwise wait for their next poll."""
        database = self.database(environment)
        with contextlib.suppress(DatabaseError):
            await database.notify(CHANNEL)

    def beside(self, view: LaneView) -> list[Lane]:
        """Other lanes over the same table in the same environment."""
        return [
            other
            for other in self.mill.lanes.values()
            if other is not view.lane and other.serves(view.environment) and view.same_table(other)
        ]
