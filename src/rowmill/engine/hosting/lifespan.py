"""The lifespan of a web application that hosts a Mill: ASGI's lifespan for any framework, without importing one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from ...events import ensure_logs
from .hosted_worker import Host

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Lifespan:
    """The value of ``mill.lifespan(...)``: ``FastAPI(lifespan=it)``, ``Starlette(lifespan=it)``, or ``it.around(app)``
    for an ASGI application without a lifespan. ``it.health()`` reports the state of its worker.
    """

    def __init__(
        self,
        opens: Callable[[], Awaitable[None]],
        closes: Callable[[], Awaitable[None]],
        host: Callable[[], Host] | None,
        own: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
    ) -> None:
        self._opens, self._closes, self._make_host, self._own = opens, closes, host, own
        self._host: Host | None = None

    def __call__(self, app: Any = None) -> AbstractAsyncContextManager[Any]:
        return self._live(app)

    def health(self) -> dict[str, Any]:
        """The worker's state for the application's health endpoint, as plain values: ``ok``, ``state``,
        ``environments``, counts, the last ``error``.
        """
        if self._make_host is None:
            return {"ok": True, "state": "off"}
        return self._host.health() if self._host is not None else {"ok": False, "state": "stopped"}

    @asynccontextmanager
    async def _live(self, app: Any) -> AsyncIterator[Any]:
        """The application's own lifespan may enqueue, and outlasts the worker: handlers use what it has opened."""
        await self._opens()
        try:
            if self._own is None:
                async with self._working():
                    yield None
            else:
                async with self._own(app) as state, self._working():
                    yield state
        finally:
            await self._closes()

    @asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        if self._make_host is None:
            yield
            return
        ensure_logs()
        self._host = host = self._make_host()
        try:
            await host.start()
            yield
        finally:
            await host.stop()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wrap an ASGI application that takes no lifespan, such as Django's.

        The worker starts before the application and stops after it. An application with its own lifespan protocol keeps
        it.
        """

        async def asgi(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await self._speak(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return asgi

    async def _speak(self, app: ASGIApp, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        first: Message | None = await receive()
        last_sent = ""
        async with AsyncExitStack() as living:
            try:
                await living.enter_async_context(self(app))
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
                return

            async def hear() -> Message:
                nonlocal first
                message, first = first, None
                return message if message is not None else await receive()

            async def say(message: Message) -> None:
                nonlocal last_sent
                last_sent = message["type"]
                if last_sent != "lifespan.startup.complete":  # it has failed or shut down, so it has ended
                    await living.aclose()
                await send(message)

            try:
                await app(scope, hear, say)
            except Exception:
                if last_sent:
                    raise
                # It does not support the protocol, and has not started anything.
            if not last_sent:
                await send({"type": "lifespan.startup.complete"})
                await receive()
        if not last_sent:
            await send({"type": "lifespan.shutdown.complete"})
