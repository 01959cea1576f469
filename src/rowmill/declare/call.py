"""A call of a task, and the job that it became: what is handed in at the desk, and what the caller holds afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from ..errors import WrongArguments
from .arguments import Unfit, decode
from .options import Options
from .states import UNFINISHED

if TYPE_CHECKING:
    from .task import Task

R_co = TypeVar("R_co", covariant=True)


@dataclass(slots=True)  # frozen takes three times as long to make, and there may be many
class Call:
    """A task with its arguments, not enqueued yet: for ``enqueue_many``, ``job.spawn``, chains and batches."""

    task: Task[Any, Any]
    args: Mapping[str, Any]
    options: Options


class CallBatch(Sequence[Call]):
    """Calls of one task with the same options. Each is made when it is asked for: thousands of them at once would
    keep the garbage collector busier than all the rest keeps the caller.
    """

    __slots__ = ("args", "options", "task")

    def __init__(self, task: Task[Any, Any], args: Sequence[Mapping[str, Any]], options: Options) -> None:
        self.task, self.args, self.options = task, args, options

    def __len__(self) -> int:
        return len(self.args)

    @overload
    def __getitem__(self, at: int) -> Call: ...

    @overload
    def __getitem__(self, at: slice) -> CallBatch: ...

    def __getitem__(self, at: int | slice) -> Call | CallBatch:
        if isinstance(at, slice):
            return CallBatch(self.task, self.args[at], self.options)
        return Call(self.task, self.args[at], self.options)


def different(calls: Sequence[Call]) -> Sequence[Call]:
    """Calls, but of those that differ in nothing but their arguments only the first."""
    return [calls[0]] if isinstance(calls, CallBatch) else calls


class TaskClient(Protocol):
    """Where calls are handed in; the Mill has one."""

    async def enqueue(self, calls: Sequence[Call]) -> list[Handle[Any]]: ...

    def enqueue_sync(self, calls: Sequence[Call]) -> list[Handle[Any]]: ...

    async def result(self, handle: Handle[Any], timeout: float | None) -> Any: ...

    async def status(self, handle: Handle[Any]) -> Status | None: ...

    async def cancel(self, handle: Handle[Any], reason: str) -> bool: ...

    def wait(self, work: Any) -> Any: ...

    def environment(self, name: str | None) -> str: ...


@dataclass(frozen=True, slots=True)
class Status:
    """A job as it is now."""

    id: int
    task: str
    state: str
    attempts: int
    run_after: datetime
    progress: Any
    error: str | None
    result: Any
    #: One entry per failed run, the oldest first: attempt, started_at, seconds, outcome, error, traceback, worker.
    history: list[dict[str, Any]]
    #: Its children by state, where it has some.
    children: dict[str, int]

    @property
    def over(self) -> bool:
        """It will not run again by itself."""
        return self.state not in UNFINISHED


class Handle(Generic[R_co]):
    """A job that was enqueued."""

    __slots__ = ("_desk", "_task", "environment", "id")

    def __init__(self, desk: TaskClient, task: Task[Any, Any], environment: str, id: int) -> None:
        self._desk, self._task = desk, task
        self.environment, self.id = environment, id

    def __repr__(self) -> str:
        return f"<Handle {self.task} {self.id} in {self.environment}>"

    @property
    def task(self) -> str:
        """The task's name."""
        return self._task.name

    async def result(self, timeout: float | timedelta | None = None) -> R_co:
        """What the handler returned, as soon as the job is done. Raises TaskFailed where it is dead, TaskCanceled,
        or TimeoutError after ``timeout`` seconds.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and not isinstance(seconds, (int, float)):
            raise WrongArguments(f"timeout is a number of seconds or a timedelta, not {timeout!r}")
        kept = await self._desk.result(self, seconds)
        value: Any = None
        if kept is not None:
            try:
                value = decode(kept, self._task.signature.returns)
            except (Unfit, ValueError, TypeError, ArithmeticError):
                value = kept  # the handler returned something else than it says: that was kept, as it was
        return value  # type: ignore[no-any-return]

    def result_sync(self, timeout: float | timedelta | None = None) -> R_co:
        """``result`` for code that does not await."""
        value: R_co = self._desk.wait(self.result(timeout))
        return value

    async def status(self) -> Status | None:
        """The job as it is now; None where it is no longer kept."""
        return await self._desk.status(self)

    def status_sync(self) -> Status | None:
        """``status`` for code that does not await."""
        found: Status | None = self._desk.wait(self.status())
        return found

    async def cancel(self, reason: str = "canceled") -> bool:
        """Whether the job was canceled by this. A run that is under way is told within a heartbeat: an async handler
        is cancelled, a sync one sees ``job.lost``; what it returns is dropped.
        """
        return await self._desk.cancel(self, reason)

    def cancel_sync(self, reason: str = "canceled") -> bool:
        """``cancel`` for code that does not await."""
        return bool(self._desk.wait(self.cancel(reason)))
