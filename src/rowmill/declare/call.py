"""A call of a task, and the job that it became: what a caller passes in, and what the caller gets back."""

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


@dataclass(slots=True)  # frozen takes three times as long to create, and there may be many
class Call:
    """A task with its arguments, not enqueued yet: for ``enqueue_many``, ``job.spawn``, chains and batches."""

    task: Task[Any, Any]
    args: Mapping[str, Any]
    options: Options


class CallBatch(Sequence[Call]):
    """Calls of one task with the same options, each created on access.

    Creating thousands of them at once would keep the garbage collector busier than everything else in the caller.
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
    """Keep one call of each group that differs only in its arguments: the first."""
    return [calls[0]] if isinstance(calls, CallBatch) else calls


class TaskClient(Protocol):
    """The interface for enqueuing calls; the Mill implements it."""

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
    #: The number of its children by state, if it has children.
    children: dict[str, int]

    @property
    def over(self) -> bool:
        """Whether the job has ended and will not run again by itself."""
        return self.state not in UNFINISHED


class Handle(Generic[R_co]):
    """An enqueued job: wait for its result, ask for its status, or cancel it."""

    __slots__ = ("_client", "_task", "environment", "id")

    def __init__(self, client: TaskClient, task: Task[Any, Any], environment: str, id: int) -> None:
        self._client, self._task = client, task
        self.environment, self.id = environment, id

    def __repr__(self) -> str:
        return f"<Handle {self.task} {self.id} in {self.environment}>"

    @property
    def task(self) -> str:
        """The task's name."""
        return self._task.name

    async def result(self, timeout: float | timedelta | None = None) -> R_co:
        """Wait for the job and return the handler's result.

        Raises TaskFailed if the job is dead, TaskCanceled if it was canceled, and TimeoutError after ``timeout``
        seconds.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and not isinstance(seconds, (int, float)):
            raise WrongArguments(f"timeout must be a number of seconds or a timedelta, not {timeout!r}")
        kept = await self._client.result(self, seconds)
        value: Any = None
        if kept is not None:
            try:
                value = decode(kept, self._task.signature.returns)
            except (Unfit, ValueError, TypeError, ArithmeticError):
                value = kept  # the result does not match the annotation: return it as stored
        return value  # type: ignore[no-any-return]

    def result_sync(self, timeout: float | timedelta | None = None) -> R_co:
        """``result`` for sync code."""
        value: R_co = self._client.wait(self.result(timeout))
        return value

    async def status(self) -> Status | None:
        """Return the current state of the job, or None if it was deleted after its retention time."""
        return await self._client.status(self)

    def status_sync(self) -> Status | None:
        """``status`` for sync code."""
        status: Status | None = self._client.wait(self.status())
        return status

    async def cancel(self, reason: str = "canceled") -> bool:
        """Cancel the job. Returns whether this call canceled it.

        A running handler notices within a heartbeat: an async handler is cancelled, a sync handler sees ``job.lost``.
        Its result is dropped.
        """
        return await self._client.cancel(self, reason)

    def cancel_sync(self, reason: str = "canceled") -> bool:
        """``cancel`` for sync code."""
        return bool(self._client.wait(self.cancel(reason)))
