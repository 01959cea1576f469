"""The Mill: the application object. Environments, lanes, tasks, resources; and the way to a running worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from .client.client import Client
from .clock import Clock
from .declare import django_models
from .declare import lane as lanes_words
from .declare import task as task_words
from .declare.budget import Budget
from .declare.call import Call, Handle
from .declare.cron import Cron
from .declare.lane import Lane, LaneDecorator
from .declare.schedules import Schedules
from .declare.task import Queue, Task
from .engine import worker_id as worker_ids
from .engine.counters import Counters
from .engine.discovery import Discovery
from .engine.hosting.hosted_worker import Host
from .engine.hosting.lifespan import Lifespan
from .engine.job import Job, SyncJob
from .engine.resources import Resource
from .engine.turns import FairOrder
from .engine.worker import SUSPICION, Worker
from .errors import Busy, DeclarationError, Unreachable, WrongArguments, did_you_mean
from .events import Events, Subscriber
from .store import Database
from .store.connection_limit import ConnectionShares
from .store.environment_list import EnvironmentList, EnvironmentsTable, Lister
from .store.jobs.enqueue import CHANNEL

Handler = Callable[..., Any]
#: What a worker inside a web application may be told.
HOSTED = ("lanes", "environments", "concurrency", "grace", "worker_id")
#: In which order environments are served.
ORDERS = ("strict", "fair")
#: How many connections a worker over a list of environments holds at most, unless the Mill says otherwise.
MAX_CONNECTIONS = 40
_LEAST_WEIGHT = 0.001
_CONTROL = 10.0  # seconds for which a control database is waited for
AnyLane = TypeVar("AnyLane", bound=Lane)
P = ParamSpec("P")
R = TypeVar("R")


class TaskDecorator(Protocol):
    """A decorator that makes a task of a handler, with the handler's own parameters but for the job."""

    @overload
    def __call__(self, handler: Callable[Concatenate[Job, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[Concatenate[SyncJob, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, R], /) -> Task[P, R]: ...


class Mill:
    """Environments in order, lanes, and the resources that handlers share.

    ``Mill(url)``, ``Mill({"prod": url, "staging": url})`` in this order, or ``Mill()`` with the URL in
    ``ROWMILL_DATABASE_URL``. Nothing connects before a worker runs.

    ``worker_id`` is the form of the ids of workers that are given none; ``{uuid}`` may stand in it, too.

    ``suspicion`` is for PostgreSQL: a worker whose session is gone, and which gives no sign of life for so long, is
    presumed dead, and its rows are taken back. ``None``: they wait for their lease.

    ``environments`` may also be ``from_table(...)``, or a function (plain or async) that lists them: name to URL. A
    worker reads the list every ``refresh``, and serves those that are in it. Such a Mill is served in fair order.

    ``order="fair"``: environments take turns at the free slots by their ``weights`` (a mapping, or a function of the
    name; 1 where nothing is said). They are opened when they have work, and closed after ``rest_after`` without work.

    ``max_connections``: how many connections a worker process holds at most, over all its environments.

    ``listen=False``: workers do not listen for NOTIFY, for databases that would not sleep while somebody listens.
    """

    def __init__(
        self,
        environments: str | Mapping[str, str] | EnvironmentsTable | Lister | None = None,
        *,
        schema: str | None = None,
        connections: int = 3,
        notify: bool = True,
        worker_id: str = worker_ids.DEFAULT,
        suspicion: timedelta | None = timedelta(seconds=SUSPICION),
        order: str | None = None,
        weights: Mapping[str, float] | Callable[[str], float] | None = None,
        max_connections: int | None = None,
        refresh: timedelta = timedelta(seconds=5),
        rest_after: timedelta = timedelta(seconds=60),
        listen: bool = True,
    ) -> None:
        worker_ids.validate(worker_id)
        if suspicion is not None and not (isinstance(suspicion, timedelta) and suspicion >= timedelta(seconds=1)):
            raise DeclarationError(
                f"suspicion must be a timedelta of at least a second, or None, not {suspicion!r}",
                hint="Mill(url, suspicion=timedelta(seconds=4)); None: wait for the lease",
            )
        self.suspicion = suspicion
        self._worker_id = worker_id
        listed = isinstance(environments, EnvironmentsTable) or callable(environments)
        self._given: Any = EnvironmentList(environments) if listed else environments  # type: ignore[arg-type]
        self._order = order or ("fair" if listed else "strict")
        if self._order not in ORDERS:
            raise DeclarationError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
        self._weights = weights or {}
        self._max_connections = _checked_limit(max_connections, listed)
        for name, duration in (("refresh", refresh), ("rest_after", rest_after)):
            if not isinstance(duration, timedelta) or duration <= timedelta():
                raise DeclarationError(f"{name} must be a timedelta above zero, not {duration!r}")
        self._refresh, self._rest_after = refresh.total_seconds(), rest_after.total_seconds()
        self._listen = listen
        #: Those of this process, for wake calls.
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self.schema = schema
        self.connections = connections
        self.lanes: dict[str, Lane] = {}
        self.resources: dict[str, Resource] = {}
        self.budgets: dict[str, Budget] = {}
        self.tasks: dict[str, Task[..., Any]] = {}
        self.schedule_tables: list[Schedules] = []
        self.events = Events()
        self.clock = Clock()
        self._client = Client(lambda: self.environments, schema, self.clock, notify, self.events)
        if isinstance(self._given, EnvironmentList):
            self._client.relist = self._given.reread

    @property
    def environments(self) -> dict[str, str]:
        """Name to URL, in the order in which they are served. Of a list: as it was when it was last read."""
        if isinstance(self._given, EnvironmentList):
            return self._given.known()
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
                    hint="set the variable that should contain it: postgresql://... or sqlite:///file.db",
                )
        return named

    # -- declaration

    def lane(self, table: Any, **options: Any) -> LaneDecorator:
        """Declare a lane over a table you already have; decorates its handler. Parameters: docs/reference."""

        if django_models.is_model(table):
            table, options = django_models.by_columns(table, options)
        if callable(table) and not hasattr(table, "__table__"):
            raise DeclarationError("@mill.lane needs the table", hint='@mill.lane("jobs", ready={...}, ...)')

        def declare(handler: Handler) -> Lane:
            lane = self._add(lanes_words.declare(table, handler, options))
            if lane.version is not None:
                self._add(lanes_words.backfill(lane))
            return lane

        return cast(LaneDecorator, declare)

    def _add(self, lane: AnyLane) -> AnyLane:
        if lane.name in self.lanes:
            raise DeclarationError(f"there are two lanes named {lane.name!r}", hint='give one another name: name="..."')
        lane.budgets = self.budgets
        self.lanes[lane.name] = lane
        return lane

    def queue(self, name: str, **options: Any) -> Queue:
        """Set up a queue of tasks before they are declared: ``mill.queue("mail", concurrency=2, priority=10)``.

        Parameters are a lane's: batch, concurrency, priority (between lanes and queues), lease, isolation, ...
        """
        return self._add(task_words.queue(name, options))

    @overload
    def task(self, handler: Callable[Concatenate[Job, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, handler: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, handler: Callable[Concatenate[SyncJob, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, handler: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, handler: None = None, /, *, chunk: int, **options: Any) -> Callable[[Handler], Task[..., Any]]: ...
    @overload
    def task(self, handler: None = None, /, **options: Any) -> TaskDecorator: ...
    def task(self, handler: Any = None, /, **options: Any) -> Any:
        """Declare a task: a handler on rowmill's own table. ``@mill.task`` or ``@mill.task(max_attempts=5, ...)``.

        Parameters: name, queue, max_attempts, backoff, timeout, classify, priority, keep. A parameter of a lane
        (concurrency, isolation, ...) gives the task a queue of its own, of its name.
        """
        return self._task(handler, options) if handler is not None else lambda function: self._task(function, options)

    def cron(self, expression: str, *, tz: str = "UTC", missed: str = "skip", **options: Any) -> TaskDecorator:
        """Declare a task that is enqueued by the clock: ``@mill.cron("0 3 * * *", tz="America/Montreal")``.

        ``missed`` ticks, at which no worker was there, are left out (``skip``), made up for ``once``, or ``all``.
        """
        cron = Cron(expression, tz, missed)

        def declare(function: Handler) -> Any:
            task = self._task(function, options, cron)
            needed = [name for name in task.signature.needs() if name not in self.resources]
            if needed:
                raise DeclarationError(
                    f"cron {task.name!r}: a cron runs without arguments, but its handler needs {', '.join(needed)}",
                    hint="give them defaults, or enqueue the task with its arguments from another one",
                )
            return task

        return cast(TaskDecorator, declare)

    def schedules(
        self,
        table: Any,
        *,
        roles: Mapping[str, str | None] | None = None,
        tz: str = "UTC",
        missed: str = "skip",
        environments: Iterable[str] | None = None,
    ) -> Schedules:
        """Take schedules from a table of yours, which may change while workers run: ``mill.schedules("schedules")``.

        Each row is a cron: ``expression``, ``task``, and where there are such columns ``args`` (a JSON object), ``tz``
        and ``enabled``. ``roles`` names columns that are called otherwise. ``tz`` and ``missed`` are for rows that
        say none of their own.
        """
        made = Schedules(
            table=table, roles=dict(roles or {}), tz=tz, missed=missed, tasks=self.tasks,
            environments=None if environments is None else tuple(environments),
        )  # fmt: skip
        if str(made) in map(str, self.schedule_tables):
            raise DeclarationError(f"{made} are declared twice")
        self.schedule_tables.append(made)
        return made

    def _task(self, handler: Handler, given: Mapping[str, Any], cron: Cron | None = None) -> Task[..., Any]:
        for word in ("name", "queue"):
            if word in given and (not isinstance(given[word], str) or not given[word]):
                raise DeclarationError(f"a task's {word} is text, not {given[word]!r}")
        name = str(given.get("name") or getattr(handler, "__name__", "task"))
        known = (*task_words.TASK_PARAMETERS, *task_words.QUEUE_PARAMETERS)
        for option in given:
            task_words.refuse_inputs(f"task {name!r}", option)
            if option not in known:
                raise DeclarationError(
                    f"task {name!r}: there is no parameter {option!r}", hint=did_you_mean(option, known)
                )
        if name in self.tasks:
            raise DeclarationError(f"there are two tasks named {name!r}", hint='give one another name: name="..."')
        of_queue = {k: v for k, v in given.items() if k not in task_words.TASK_PARAMETERS}
        if of_queue and "queue" in given:
            raise DeclarationError(
                f"task {name!r}: {', '.join(of_queue)} applies to a whole queue,"
                f" and queue {given['queue']!r} may have other tasks",
                hint=f"mill.queue({given['queue']!r}, ...) before the task",
            )
        own = {k: v for k, v in given.items() if k in task_words.TASK_PARAMETERS and k != "name"}
        in_queue: str = given.get("queue") or (name if of_queue else task_words.DEFAULT_QUEUE)
        queue = self.lanes.get(in_queue)
        chunk = given.get("chunk", queue.chunk if queue is not None else None)
        task: Task[..., Any] = Task(
            handler=handler, name=name, client=self._client, known_resources=self.resources, cron=cron,
            **{**own, "queue": in_queue, "chunk": chunk},
        )  # fmt: skip
        if queue is None or of_queue:
            queue = self.queue(in_queue, **of_queue)
        if not isinstance(queue, Queue):
            raise DeclarationError(
                f"task {name!r}: {in_queue!r} is already a lane over your own table, so it cannot be a queue",
                hint='give the lane another name, or the task another queue: queue="..."',
            )
        if queue.chunk is not None and queue.tasks:
            raise DeclarationError(
                f"task {name!r}: a queue that works in chunks has one task, and {in_queue!r} has"
                f" {next(iter(queue.tasks))!r}",
                hint=f"a queue of its own: @mill.task(chunk={queue.chunk})",
            )
        task.environments = queue.environments
        self.tasks[name] = queue.tasks[name] = task
        return task

    @overload
    def resource(self, opener: Handler) -> Handler: ...
    @overload
    def resource(
        self, opener: None = None, *, name: str | None = None, healthy: Handler | None = None
    ) -> Callable[[Handler], Handler]: ...
    def resource(
        self, opener: Handler | None = None, *, name: str | None = None, healthy: Handler | None = None
    ) -> Any:
        """Declare a resource that handlers of a process share. A handler gets it by naming it as a parameter.

        An (async) generator that yields it once, or a function that returns it. ``healthy(value)`` is asked before
        each use; where it says no, the resource is closed and opened again. While it cannot be opened, nothing is
        claimed for the lanes that need it.
        """

        def declare(function: Handler) -> Handler:
            known = name or function.__name__
            if known in self.resources:
                raise DeclarationError(f"there are two resources named {known!r}")
            self.resources[known] = Resource(known, function, healthy)
            return function

        return declare(opener) if opener is not None else declare

    def budget(self, name: str, *, shared: str | None = None, **units: Any) -> Budget:
        """Declare how much all runs together may spend: ``mill.budget("gemini", tokens=(4000, timedelta(minutes=1)))``.

        A list of pairs sets several periods. Handlers take from it with ``await job.spend("gemini", tokens=1200)``.
        Kept in the environment's database, and held over any window of that length, by all workers together. With
        ``shared``, one budget for all environments, kept in this one (its name, or the URL of another database).
        """
        if name in self.budgets:
            raise DeclarationError(f"there are two budgets named {name!r}")
        self.budgets[name] = Budget.declare(name, units, shared)
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
            raise DeclarationError(
                "this Mill has no lanes", hint="declare one with @mill.lane(...), or a task with @mill.task"
            )
        for lane in chosen:
            # A listed environment may come later.
            for environment in () if isinstance(self._given, EnvironmentList) else lane.environments or ():
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
        return [(name, self._connect(url)) for name, url in wanted.items()]

    def _connect(self, url: str) -> Database:
        return Database.open(url, schema=self.schema, pool=self.connections)

    def control(self, shared: str) -> Database:
        """The database that a rate or budget with ``shared=`` names: an environment, or a database of its own."""
        known = self.environments
        url = known.get(shared, shared)
        if "://" not in url:
            raise DeclarationError(
                f"shared={shared!r} is neither an environment nor a URL", hint=did_you_mean(shared, known)
            )
        return Database.open(url, schema=self.schema, pool=1, patience=_CONTROL)

    def _weight(self, environment: str) -> float:
        """How much an environment counts in fair order."""
        given = self._weights(environment) if callable(self._weights) else self._weights.get(environment)
        if given is None and isinstance(self._given, EnvironmentList):
            given = self._given.weights.get(environment)
        return max(float(1.0 if given is None else given), _LEAST_WEIGHT)

    def worker(
        self, *, lanes: Iterable[str] | None = None, environments: Iterable[str] | None = None, **options: Any
    ) -> Worker:
        """A worker over this Mill; ``await worker.run()`` works until ``worker.stop()``.

        Options: ``worker_id``, ``concurrency`` (runs at once over all lanes), ``drain``, ``grace`` (seconds).
        """
        options["worker_id"] = options.get("worker_id") or self.new_worker_id()
        if self.suspicion is not None:
            options.setdefault("suspicion", self.suspicion.total_seconds())
        only = None if environments is None else set(environments)
        if isinstance(self._given, EnvironmentList) and not options.get("drain"):
            listed = self._given

            async def named() -> dict[str, str]:
                return {name: url for name, url in (await listed.read()).items() if only is None or name in only}

            options["discovery"] = Discovery(named, self._connect, self._refresh)
        options.setdefault("control", self.control)
        if self._order == "fair":
            options["fair"] = FairOrder(self._weight)
        worker = Worker(
            self.databases(only),
            self.select(lanes),
            max_connections=self._max_connections,
            resources=self.resources,
            schedules=self.schedule_tables,
            events=self.events,
            clock=self.clock,
            rest_after=self._rest_after,
            listens=self._listen,
            **options,
        )
        self._workers.add(worker)
        return worker

    def new_worker_id(self) -> str:
        """Make an id for a worker without one, in this Mill's form."""
        return worker_ids.new(self._worker_id)

    def run(self, **options: Any) -> Counters:
        """Work in this process until stopped by SIGTERM or Ctrl-C, or, with ``drain=True``, until nothing is left."""

        async def main() -> Counters:
            worker = self.worker(**options)
            loop = asyncio.get_running_loop()
            for name in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(NotImplementedError, ValueError):  # not in the main thread
                    loop.add_signal_handler(name, worker.stop)
            try:
                return await worker.run()
            finally:
                await self.close()

        return asyncio.run(main())

    def lifespan(self, worker: bool = False, *, lifespan: Any = None, **options: Any) -> Lifespan:
        """The life of a web application with this Mill: ``FastAPI(lifespan=mill.lifespan(worker=True))``.

        Opens what enqueueing needs; with ``worker=True`` runs a worker in the application's event loop, which starts
        and stops with it. ``lifespan``: the application's own, inside this one. Options: ``lanes``, ``environments``,
        ``concurrency``, ``grace`` (seconds, 30), ``worker_id``.
        """
        for option in options:
            if option not in HOSTED:
                raise DeclarationError(
                    f"mill.lifespan: there is no option {option!r}", hint=did_you_mean(option, ("worker", *HOSTED))
                )
        if options and not worker:
            raise DeclarationError(
                f"mill.lifespan: {', '.join(options)} needs a worker, and this lifespan starts none",
                hint="mill.lifespan(worker=True, ...)",
            )
        worker_id = options.pop("worker_id", None)

        def host() -> Host:
            return Host(lambda **given: self.worker(**options, **given), worker_id or self.new_worker_id())

        return Lifespan(self._open, self.close, host if worker else None, lifespan)

    async def _open(self) -> None:
        """What enqueueing needs; where the database is away, the first enqueue makes up for it."""
        try:
            if self.tasks:
                await self.prepare()
        except (Unreachable, Busy) as error:
            self.events.emit("environment_down", logging.ERROR, error=error.message)

    # -- tasks: enqueue from anywhere

    async def prepare(self) -> None:
        """Make rowmill's own tables in every environment, where they are not there yet. Workers and ``enqueue`` do so
        by themselves; a transaction of your own (``tx=``) needs them to be there.
        """
        for name in self.environments:
            await self._client.connection(name)

    def prepare_sync(self) -> None:
        """``prepare`` for code that does not await."""
        self._client.wait(self.prepare())

    async def close(self) -> None:
        """Close the connections that enqueue and results have opened in this event loop."""
        await self._client.close()

    async def enqueue_many(self, calls: Iterable[Call]) -> list[Handle[Any]]:
        """Enqueue calls of several tasks in one transaction: ``[a.call(...), b.call(...)]``."""
        return await self._client.enqueue(_calls(calls))

    def enqueue_many_sync(self, calls: Iterable[Call]) -> list[Handle[Any]]:
        """``enqueue_many`` for code that does not await."""
        return self._client.enqueue_sync(_calls(calls))

    async def batch(self, calls: Iterable[Call], then: Call) -> Handle[Any]:
        """Enqueue calls, and ``then``, which runs when all of them have ended, well or not: ``job.joined()`` gives the
        counts, and ``job.results()`` the results. Returns the handle of that last job.
        """
        return await self._client.batch(list(calls), then)

    def batch_sync(self, calls: Iterable[Call], then: Call) -> Handle[Any]:
        """``batch`` for code that does not await."""
        handle: Handle[Any] = self._client.wait(self.batch(calls, then))
        return handle

    async def chain(self, *calls: Call) -> Handle[Any]:
        """Enqueue calls that run one after the other. Each starts when the one before it is done, and finds its result
        in ``job.results()``. If one fails, the later ones are canceled. Returns the handle of the last one.
        """
        return await self._client.chain(calls)

    def chain_sync(self, *calls: Call) -> Handle[Any]:
        """``chain`` for code that does not await."""
        handle: Handle[Any] = self._client.wait(self.chain(*calls))
        return handle

    async def wake(self, environment: str | None = None) -> None:
        """Tell idle workers, in this process and in others, that rows are ready. Optional where lanes poll."""
        for worker in list(self._workers):
            worker.wake_up(environment)
        for _, database in self.databases([environment] if environment else None):
            try:
                await database.notify(CHANNEL)
            finally:
                await database.close()


def _checked_limit(most: int | None, listed: bool) -> int | None:
    if most is None:
        return MAX_CONNECTIONS if listed else None
    if not isinstance(most, int) or isinstance(most, bool) or most < ConnectionShares.LEAST:
        raise DeclarationError(
            f"max_connections must be a number of at least {ConnectionShares.LEAST}, not {most!r}",
            hint="claims and outcomes, finish blocks, heartbeats and LISTEN each get a part of them",
        )
    return most


def _calls(given: Any) -> list[Call]:
    calls = task_words.listed_calls(given)
    for call in calls:
        if not isinstance(call, Call):
            raise WrongArguments(f"expected task.call(...), got {call!r}", hint="task.call(...)")
    return calls
