"""The Mill: the application object. Environments, lanes, resources; and the way to a running worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

from . import lane as lanes_words
from .budget import Budget
from .clock import Clock
from .engine.resources import Resource
from .engine.tally import Tally
from .engine.wake import CHANNEL
from .engine.worker import Worker
from .errors import DeclarationError, did_you_mean
from .events import Events, Subscriber
from .lane import Lane
from .store import Database

Handler = Callable[..., Any]


class Mill:
    """Environments in order, lanes, and the resources that handlers share.

    ``Mill(url)``, ``Mill({"prod": url, "staging": url})`` in this order, or ``Mill()`` with the URL in
    ``ROWMILL_DATABASE_URL``. Nothing connects before a worker runs.
    """

    def __init__(
        self, environments: str | Mapping[str, str] | None = None, *, schema: str | None = None, connections: int = 3
    ) -> None:
        self._given = environments
        self.schema = schema
        self.connections = connections
        self.lanes: dict[str, Lane] = {}
        self.resources: dict[str, Resource] = {}
        self.budgets: dict[str, Budget] = {}
        self.events = Events()
        self.clock = Clock()

    @property
    def environments(self) -> dict[str, str]:
        """Name to URL, in the order in which they are served."""
        given = self._given if self._given is not None else os.environ.get("ROWMILL_DATABASE_URL")
        if not given:
            raise DeclarationError(
                "no database: the Mill was made without a URL, and ROWMILL_DATABASE_URL is not set",
                hint='Mill("postgresql://user:password@host/database") or Mill("sqlite:///jobs.db")',
            )
        named = {"default": given} if isinstance(given, str) else dict(given)
        for name, url in named.items():
            if not isinstance(url, str) or not url:
                raise DeclarationError(
                    f"environment {name!r} has no URL: {url!r}",
                    hint="is the variable that should hold it set? postgresql://... or sqlite:///file.db",
                )
        return named

    # -- declaration

    def lane(self, table: Any, **options: Any) -> Callable[[Handler], Lane]:
        """Declare a lane over a table you already have; decorates its handler. See docs/reference for parameters."""

        if callable(table) and not hasattr(table, "__table__"):
            raise DeclarationError("@mill.lane needs the table", hint='@mill.lane("jobs", ready={...}, ...)')

        def declare(handler: Handler) -> Lane:
            lane = lanes_words.declare(table, handler, options)
            if lane.name in self.lanes:
                raise DeclarationError(
                    f"there are two lanes named {lane.name!r}", hint='give one another name: name="..."'
                )
            lane.budgets = self.budgets
            self.lanes[lane.name] = lane
            return lane

        return declare

    @overload
    def resource(self, opener: Handler) -> Handler: ...
    @overload
    def resource(
        self, opener: None = None, *, name: str | None = None, healthy: Handler | None = None
    ) -> Callable[[Handler], Handler]: ...
    def resource(
        self, opener: Handler | None = None, *, name: str | None = None, healthy: Handler | None = None
    ) -> Any:
        """Declare what handlers share inside a process; a handler gets it by naming it as a parameter.

        An (async) generator that yields it once, or a function that returns it. ``healthy(value)`` is asked before
        each use; where it says no, the resource is closed and opened again.
        """

        def declare(function: Handler) -> Handler:
            known = name or function.__name__
            if known in self.resources:
                raise DeclarationError(f"there are two resources named {known!r}")
            self.resources[known] = Resource(known, function, healthy)
            return function

        return declare(opener) if opener is not None else declare

    def budget(self, name: str, **units: Any) -> Budget:
        """Declare what all runs together may use up: ``mill.budget("gemini", tokens=(4000, timedelta(minutes=1)))``.

        A list of pairs sets several periods. Handlers take from it with ``await job.spend("gemini", tokens=1200)``.
        Kept in the environment's database, and held over any window of that length, by all workers together.
        """
        if name in self.budgets:
            raise DeclarationError(f"there are two budgets named {name!r}")
        self.budgets[name] = Budget.declare(name, units)
        return self.budgets[name]

    def on_event(self, subscriber: Subscriber) -> Subscriber:
        """Call ``subscriber(event)`` for everything that happens: the seam for metrics and error trackers."""
        return self.events.subscribe(subscriber)

    # -- work

    def select(self, lanes: Iterable[str] | None) -> list[Lane]:
        """The named lanes, or all of them."""
        if lanes is None:
            chosen = list(self.lanes.values())
        else:
            for name in (names := list(lanes)):
                if name not in self.lanes:
                    raise DeclarationError(f"there is no lane {name!r}", hint=did_you_mean(name, self.lanes))
            chosen = [self.lanes[name] for name in names]
        if not chosen:
            raise DeclarationError("this Mill has no lanes", hint="declare one with @mill.lane(...)")
        for lane in chosen:
            for environment in lane.environments or ():
                if environment not in self.environments:
                    raise DeclarationError(
                        f"lane {lane.name!r}: there is no environment {environment!r}",
                        hint=did_you_mean(environment, self.environments),
                    )
        return chosen

    def databases(self, only: Iterable[str] | None = None) -> list[tuple[str, Database]]:
        """Environments, or the named ones, as databases, in order."""
        known = self.environments
        for name in only or ():
            if name not in known:
                raise DeclarationError(f"there is no environment {name!r}", hint=did_you_mean(name, known))
        wanted = known if only is None else {name: url for name, url in known.items() if name in set(only)}
        return [(name, Database.open(url, schema=self.schema, pool=self.connections)) for name, url in wanted.items()]

    def worker(
        self, *, lanes: Iterable[str] | None = None, environments: Iterable[str] | None = None, **options: Any
    ) -> Worker:
        """A worker over this Mill; ``await worker.run()`` works until ``worker.stop()``.

        Options: ``worker_id``, ``concurrency`` (runs at once over all lanes), ``drain``, ``grace`` (seconds).
        """
        return Worker(
            self.databases(environments),
            self.select(lanes),
            resources=self.resources,
            events=self.events,
            clock=self.clock,
            **options,
        )

    def run(self, **options: Any) -> Tally:
        """Work in this process until stopped by SIGTERM or Ctrl-C, or, with ``drain=True``, until nothing is left."""

        async def main() -> Tally:
            worker = self.worker(**options)
            loop = asyncio.get_running_loop()
            for name in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(NotImplementedError, ValueError):  # not in the main thread
                    loop.add_signal_handler(name, worker.stop)
            return await worker.run()

        return asyncio.run(main())

    async def wake(self, environment: str | None = None) -> None:
        """A hint to idle workers that rows are ready. Never needed: they poll; it saves them the wait."""
        for _, database in self.databases([environment] if environment else None):
            try:
                if database.dialect.name == "postgresql":
                    await database.write(lambda run: run("select pg_notify($1, '')", (CHANNEL,)))
            finally:
                await database.close()
