"""Resources that handlers share inside a process: a client, a browser, a model.

A resource is opened once, on first use, and closed at shutdown in reverse order. It is opened again after a failed
attempt, or when its own health check reports that it broke. A resource that cannot be opened raises ResourceFailed: the
worker then claims nothing for the lanes that need it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DeclarationError, ResourceFailed, RowmillError, did_you_mean
from ..store import probe

if TYPE_CHECKING:
    from .lane_state import LaneState
    from .worker import Worker

_OPENING = 5.0  # seconds that a lane waits for the resources of one with higher priority, to keep the order
_OPEN_AGAIN = (1.0, 60.0)  # seconds before the next attempt to open a resource: first, and at most


@dataclass(frozen=True)
class Resource:
    """A declared resource: its opener, and its health check."""

    name: str
    opener: Callable[..., Any]
    healthy: Callable[[Any], Any] | None = None

    def needs(self) -> list[str]:
        """The other resources that its opener asks for by name."""
        return list(inspect.signature(self.opener).parameters)


class Resources:
    """The open resources of one process."""

    def __init__(self, declared: Mapping[str, Resource]) -> None:
        self._declared = declared
        self._open: dict[str, tuple[Any, AsyncExitStack]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def check(self, names: list[str], where: str, above: tuple[str, ...] = ()) -> None:
        """Refuse a parameter of a handler or of a resource that matches no resource, and circular dependencies."""
        for name in names:
            if name not in self._declared:
                who = f"the resource {above[-1]!r}" if above else "the handler"
                raise DeclarationError(
                    f"{where}: {who} needs the resource {name!r}, which is not declared",
                    hint=f"declare it with @mill.resource; {did_you_mean(name, self._declared)}",
                )
            if name in above:
                raise DeclarationError(f"{where}: resources need each other: {' -> '.join((*above, name))}")
            self.check(self._declared[name].needs(), where, (*above, name))

    def are_open(self, names: list[str]) -> bool:
        """Whether all of these are open."""
        return all(name in self._open for name in names)

    async def get(self, names: list[str]) -> dict[str, Any]:
        """Return the named resources, and open those that are closed. Raises ResourceFailed if one cannot be opened."""
        return {name: await self._one(name) for name in names}

    async def _one(self, name: str) -> Any:
        resource = self._declared[name]
        # Its dependencies come first: if one of them is reopened, this resource has to be, too.
        needed = await self.get(resource.needs())
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._open:
                value, stack = self._open[name]
                if await _is_healthy(resource, value):
                    return value
                await self._close(name)
            stack = AsyncExitStack()
            try:
                value = await _opened(resource.opener, needed, stack)
            except BaseException as error:
                await _closed(stack)
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise _failed(name, error) from error
            self._open[name] = (value, stack)
            return value

    async def _close(self, name: str) -> None:
        """Close a resource, after those that depend on it."""
        for other in list(self._open):
            if other in self._open and name in self._declared[other].needs():
                await self._close(other)
        if name in self._open:
            _, stack = self._open.pop(name)
            await _closed(stack)

    async def close(self) -> None:
        """Close all open resources, the newest first."""
        for name in reversed(list(self._open)):
            await self._close(name)


class LaneResources:
    """Opens a lane's resources when its first row is ready, before the row is claimed.

    If that fails, the lane waits and its rows stay as they are.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._opening: set[asyncio.Task[None]] = set()

    async def are_open(self, lane_state: LaneState) -> bool:
        """Whether the lane may claim now. Starts to open resources that are closed."""
        worker, needs = self._worker, lane_state.execution.needs
        if worker.resources.are_open(needs):
            return True
        if not await probe(lane_state.environment.database, [lane_state.store]):
            return False
        lane_state.paused_until = math.inf
        opening = asyncio.create_task(self._open(lane_state, needs))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        if lane_state.unopened is None:
            await asyncio.wait([opening], timeout=_OPENING)
        return worker.resources.are_open(needs) and not worker.stopping

    async def _open(self, lane_state: LaneState, names: list[str]) -> None:
        try:
            await self._worker.resources.get(names)
            lane_state.unopened, lane_state.open_pause, lane_state.paused_until = None, 0.0, 0.0
        except ResourceFailed as error:
            lane_state.open_pause = min(max(2 * lane_state.open_pause, _OPEN_AGAIN[0]), _OPEN_AGAIN[1])
            lane_state.unopened, lane_state.paused_until = error, time.monotonic() + lane_state.open_pause
            lane_state.not_opened(error, lane_state.open_pause)
        lane_state.environment.wake()

    async def stop(self) -> None:
        """Cancel the resources that are still being opened, because the worker stops."""
        for opening in self._opening:
            opening.cancel()
        if self._opening:
            await asyncio.wait(self._opening, timeout=_OPENING)


async def _opened(opener: Callable[..., Any], needed: dict[str, Any], stack: AsyncExitStack) -> Any:
    if inspect.isasyncgenfunction(opener):
        opened: Callable[..., AsyncIterator[Any]] = opener
        return await stack.enter_async_context(asynccontextmanager(opened)(**needed))
    if inspect.isgeneratorfunction(opener):
        plain: Callable[..., Iterator[Any]] = opener
        return stack.enter_context(contextmanager(plain)(**needed))
    value = opener(**needed)
    return await value if inspect.isawaitable(value) else value


def _failed(name: str, error: BaseException) -> ResourceFailed:
    words, hint = f"{type(error).__name__}: {error}", None
    if isinstance(error, RowmillError):
        words, hint = error.message, error.hint
    return ResourceFailed(f"the resource {name!r} cannot be opened: {words}", hint=hint)


async def _is_healthy(resource: Resource, value: Any) -> bool:
    if resource.healthy is None:
        return True
    try:
        answer = resource.healthy(value)
        return bool(await answer if inspect.isawaitable(answer) else answer)
    except Exception:
        return False


async def _closed(stack: AsyncExitStack) -> None:
    """Close a resource. An error is ignored: a broken one may fail to close, and must not stop the worker."""
    try:
        await stack.aclose()
    except Exception:
        import logging

        logging.getLogger("rowmill").warning("resource_close_failed", exc_info=True)
