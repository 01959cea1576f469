"""A task: a handler on rowmill's own table, for work that has no table of its own.

Tasks stand in queues, and a queue is a lane over ``rowmill_jobs`` like any other lane: claimed, fenced, renewed, swept
and settled by the same machinery. Which handler a row is for, and by which policy, its column ``task`` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec, TypeVar, overload

from ..errors import DeclarationError, WrongArguments, did_you_mean
from .arguments import Signature, UnknownArguments
from .call import Call, CallBatch, Handle, TaskClient
from .chunk import Misfits, in_order, takes_jobs, validate_handler
from .cron import Cron
from .lane import PARAMETERS, Lane
from .options import OPTIONS, Keep, Key, Options
from .outcome import Dead, NotForThisVersion, Outcome
from .retry import Backoff, Verdict, exponential
from .states import FINAL, READY, RUNNING
from .trace_context import TRACE, own_arguments

P = ParamSpec("P")
R = TypeVar("R")

TABLE = "rowmill_jobs"
DEFAULT_QUEUE = "default"


class _Injected:
    """Filled by a resource, not by the caller."""

    def __repr__(self) -> str:
        return "injected"


#: The default of a parameter that a resource fills: ``async def send(to: str, http: Client = injected)``.
#: Never needed; it tells an editor that the caller does not give it.
injected: Any = _Injected()


@dataclass(eq=False, kw_only=True)
class Task(Generic[P, R]):
    """A declared task. Made by ``@mill.task``; calling it calls the handler, so handlers stay testable."""

    handler: Callable[..., Any]
    name: str
    client: TaskClient
    #: The Mill's own, live: what is declared later counts too.
    known_resources: Mapping[str, Any]
    queue: str = DEFAULT_QUEUE
    max_attempts: int = 5
    backoff: Backoff = field(default_factory=exponential)
    timeout: timedelta | None = None
    classify: Callable[[BaseException], Verdict | None] | None = None
    priority: int = 0
    keep: Keep = field(default_factory=Keep)
    cron: Cron | None = None
    #: Where its queue is served; None: everywhere.
    environments: Sequence[str] | None = None
    #: One call of the handler is for up to so many jobs: each of its parameters gets a list, with a value for each job.
    chunk: int | None = None

    def __post_init__(self) -> None:
        where = f"task {self.name!r}"
        if not callable(self.handler) or inspect.isclass(self.handler):
            raise DeclarationError(f"{where}: the handler must be a function, not {self.handler!r}")
        for parameter in inspect.signature(self.handler).parameters.values():
            if parameter.name in OPTIONS and parameter.kind is not parameter.POSITIONAL_ONLY:
                raise DeclarationError(
                    f"{where}: its parameter {parameter.name!r} has the name of an option of enqueue, so a call could"
                    " not tell them apart",
                    hint=f"another name, or positional only: def {self.name}({parameter.name}, /, ...)",
                )
        if not isinstance(self.max_attempts, int) or not 1 <= self.max_attempts < 2**31:
            raise DeclarationError(f"{where}: max_attempts must be a whole number of at least 1")
        if self.classify is not None and not callable(self.classify):
            raise DeclarationError(f"{where}: classify must be a function of the error, not {self.classify!r}")
        if self.timeout is not None and (not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0)):
            raise DeclarationError(f"{where}: timeout must be a positive timedelta, not {self.timeout!r}")
        if not callable(self.backoff):
            raise DeclarationError(
                f"{where}: backoff must be fixed(...), exponential(...) or a function of the attempt"
            )
        self.keep = Keep.of(self.keep, where)
        Options(priority=self.priority)
        self._signature: Signature | None = None
        first = next(iter(inspect.signature(self.handler).parameters.values()), None)
        #: Its first parameter is the job.
        self.takes_job = first is not None and (first.name == "job" or _annotation(first) in ("Job", "SyncJob"))
        if self.chunk is not None:
            self._validate_chunk(where)
            self.takes_job = first is not None and takes_jobs(first)

    def _validate_chunk(self, where: str) -> None:
        if self.cron is not None:
            raise DeclarationError(
                f"{where}: a cron enqueues one job at each tick, so there is no chunk", hint="leave out chunk="
            )
        if not inspect.signature(self.handler).parameters:
            raise DeclarationError(
                f"{where}: with chunk={self.chunk!r} the handler needs a parameter for the jobs or their arguments",
                hint=f"async def {self.name}(texts: list[str]): ..., or async def {self.name}(jobs): ...",
            )
        validate_handler(where, self.handler, self.chunk)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)

    def invoke_chunk(self, jobs: Sequence[Any], /, **resources: Any) -> Any:
        """Call the handler for the jobs of a chunk: each parameter gets a list, with a value for each job."""
        signature, wanted = self.signature, self.signature.names
        values: dict[str, list[Any]] = {name: [] for name in wanted}
        misfits: dict[int, Outcome] = {}
        for place, job in enumerate(jobs):
            packed = job["args"]
            try:
                given = packed if signature.takes_as_it_is(packed) else signature.unpack(own_arguments(packed))[1]
                if missing := [name for name in wanted if name not in given]:
                    raise WrongArguments(f"it lacks {', '.join(missing)}: its handler takes {signature}")
            except UnknownArguments as error:
                misfits[place] = NotForThisVersion(error.message)
            except WrongArguments as error:
                misfits[place] = Dead(f"the arguments do not fit the handler: {error.message}")
            else:
                for name, column in values.items():
                    column.append(given[name])
        if misfits:
            raise Misfits(misfits)
        given = [(column, tuple(column)) for column in values.values()]
        result = self.handler(*([jobs] if self.takes_job else []), **values, **resources)
        return _awaited(result, given) if inspect.isawaitable(result) else _in_order(result, given)

    def invoke(self, job: Any, /, **resources: Any) -> Any:
        """Call the handler for a claimed job, its arguments as it declares them."""
        signature, packed = self._signature or self.signature, job["args"]
        if signature.takes_as_it_is(packed):
            return self.handler(job, **packed, **resources) if self.takes_job else self.handler(**packed, **resources)
        try:
            args, kwargs = signature.unpack(own_arguments(packed))
        except UnknownArguments as error:
            raise NotForThisVersion(error.message) from None
        except WrongArguments as error:
            raise Dead(f"the arguments do not fit the handler: {error.message}") from None
        if self.takes_job:
            return self.handler(job, *args, **kwargs, **resources)
        return self.handler(*args, **kwargs, **resources)

    # -- what the handler takes

    def resources(self) -> list[str]:
        """Names of the resources the handler asks for."""
        parameters = list(inspect.signature(self.handler).parameters.values())[1 if self.takes_job else 0 :]
        return [p.name for p in parameters if p.name in self.known_resources or p.default is injected]

    @property
    def signature(self) -> Signature:
        """The parameters of the handler that a call fills."""
        if self._signature is None:
            own, job = self.resources(), self.takes_job
            first = next(iter(inspect.signature(self.handler).parameters), None)
            signature = Signature(self.handler, lambda p: p.name in own or (job and p.name == first))
            if self.chunk is not None:
                signature.take_lists(f"task {self.name!r}")
            self._signature = signature
        return self._signature

    def handle(self, id: int, env: str | None = None) -> Handle[R]:
        """The handle of a job by its id, also if another request or process enqueued it."""
        served = getattr(self, "environments", None)
        return Handle(self.client, self, self.client.environment(env or (served[0] if served else None)), id)

    # -- enqueue

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """The task with these arguments, checked, to be enqueued with others."""
        return self.options().call(*args, **kwargs)

    def options(
        self,
        *,
        tx: Any = None,
        run_after: datetime | timedelta | None = None,
        priority: int | None = None,
        key: str | Key | None = None,
        env: str | None = None,
    ) -> TaskWithOptions[P, R]:
        """The task with options set: ``task.options(priority=-10).enqueue(to="a@b.c")``, typed like the handler."""
        return TaskWithOptions(self, Options(tx, run_after, priority, key, env))

    def _bound(self, kwargs: dict[str, Any]) -> TaskWithOptions[P, R]:
        """Options taken out of a call's keywords; no handler has a parameter of such a name."""
        return TaskWithOptions(self, Options(**{name: kwargs.pop(name) for name in OPTIONS if name in kwargs}))

    @overload
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...
    @overload
    async def enqueue(self, *args: Any, tx: Any, **kwargs: Any) -> Handle[R]: ...
    @overload
    async def enqueue(self, *args: Any, run_after: datetime | timedelta | None, **kwargs: Any) -> Handle[R]: ...
    @overload
    async def enqueue(self, *args: Any, priority: int | None, **kwargs: Any) -> Handle[R]: ...
    @overload
    async def enqueue(self, *args: Any, key: str | Key | None, **kwargs: Any) -> Handle[R]: ...
    @overload
    async def enqueue(self, *args: Any, env: str | None, **kwargs: Any) -> Handle[R]: ...
    async def enqueue(self, *args: Any, **kwargs: Any) -> Handle[R]:
        """Enqueue a job: the handler's arguments, and beside them ``tx, run_after, priority, key, env``."""
        return await self._bound(kwargs).enqueue(*args, **kwargs)

    @overload
    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...
    @overload
    def enqueue_sync(self, *args: Any, tx: Any, **kwargs: Any) -> Handle[R]: ...
    @overload
    def enqueue_sync(self, *args: Any, run_after: datetime | timedelta | None, **kwargs: Any) -> Handle[R]: ...
    @overload
    def enqueue_sync(self, *args: Any, priority: int | None, **kwargs: Any) -> Handle[R]: ...
    @overload
    def enqueue_sync(self, *args: Any, key: str | Key | None, **kwargs: Any) -> Handle[R]: ...
    @overload
    def enqueue_sync(self, *args: Any, env: str | None, **kwargs: Any) -> Handle[R]: ...
    def enqueue_sync(self, *args: Any, **kwargs: Any) -> Handle[R]:
        """``enqueue`` for code that does not await."""
        return self._bound(kwargs).enqueue_sync(*args, **kwargs)

    async def enqueue_at(self, when: datetime, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job that is due at ``when``."""
        bound = self._bound(dict(kwargs))
        given = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        return await TaskWithOptions(self, replace(bound.given, run_after=when)).enqueue(*args, **given)  # type: ignore[arg-type]

    async def enqueue_many(
        self, calls: Iterable[Mapping[str, Any] | tuple[Any, ...] | Call], **options: Any
    ) -> list[Handle[R]]:
        """Enqueue many jobs in one transaction: for each a dict of arguments, a tuple of them, or a ``task.call(...)``
        with options of its own. Options given here are for all of them.
        """
        return await self.client.enqueue(self._calls(calls, options))

    def enqueue_many_sync(
        self, calls: Iterable[Mapping[str, Any] | tuple[Any, ...] | Call], **options: Any
    ) -> list[Handle[R]]:
        """``enqueue_many`` for code that does not await."""
        return self.client.enqueue_sync(self._calls(calls, options))

    def _calls(self, calls: Iterable[Any], options: dict[str, Any]) -> Sequence[Call]:
        for name in options:
            if name not in OPTIONS:
                raise WrongArguments(
                    f"task {self.name!r}: there is no option {name!r}", hint=did_you_mean(name, OPTIONS)
                )
        common = Options(**options)
        where, pack = f"task {self.name!r}", self.signature.pack
        asked = listed_calls(calls)
        if (packed := self.signature.packed_alike(asked)) is not None:
            return CallBatch(self, packed, common)
        listed = []
        for given in asked:
            if isinstance(given, (tuple, list)):
                listed.append(Call(self, pack(where, tuple(given), {}), common))
            elif isinstance(given, (dict, Mapping)):
                listed.append(Call(self, pack(where, (), given), common))
            elif isinstance(given, Call):
                listed.append(replace(given, options=given.options.under(common)) if options else given)
            else:
                raise WrongArguments(
                    f"{where}: expected a dict or tuple of arguments, or task.call(...), got {given!r}",
                    hint='enqueue_many([{"to": "a@example.org"}, ...])',
                )
        return listed


def _in_order(result: Any, given: Iterable[tuple[list[Any], tuple[Any, ...]]]) -> Any:
    for column, values in given:
        result = in_order(result, column, values)
    return result


async def _awaited(result: Any, given: Iterable[tuple[list[Any], tuple[Any, ...]]]) -> Any:
    return _in_order(await result, given)


def listed_calls(calls: Any) -> list[Any]:
    """What ``enqueue_many`` was given, as a list."""
    if isinstance(calls, (Mapping, str, Call)) or not isinstance(calls, Iterable):
        raise WrongArguments(f"enqueue_many takes a list of calls, not {calls!r}")
    return list(calls)


def _annotation(parameter: inspect.Parameter) -> str:
    hint = parameter.annotation
    return (hint if isinstance(hint, str) else getattr(hint, "__name__", "")).rpartition(".")[2]


class TaskWithOptions(Generic[P, R]):
    """A task with options set."""

    __slots__ = ("given", "task")

    def __init__(self, task: Task[P, R], given: Options) -> None:
        self.task, self.given = task, given

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """The task with these options and arguments, checked."""
        task = self.task
        return Call(task, task.signature.pack(f"task {task.name!r}", args, kwargs), self.given)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a job with these options."""
        return (await self.task.client.enqueue([self.call(*args, **kwargs)]))[0]

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """``enqueue`` for code that does not await."""
        return self.task.client.enqueue_sync([self.call(*args, **kwargs)])[0]


#: What a task says of itself; any other parameter of a lane, given to a task, gives it a queue of its own.
TASK_PARAMETERS = ("name", "queue", "max_attempts", "backoff", "timeout", "classify", "priority", "keep")
#: What a queue may be told; the rest of a lane is rowmill's own here.
QUEUE_PARAMETERS = (
    "batch", "chunk", "chunk_wait", "concurrency", "environments", "gates", "heartbeat", "isolation", "keep_logs",
    "lease", "max_reclaims", "pace", "poll", "priority", "slot_name", "startup_lease", "sweep_every",
)  # fmt: skip
assert set(QUEUE_PARAMETERS) <= set(PARAMETERS)


@dataclass(eq=False, kw_only=True)
class Queue(Lane):
    """The lane over ``rowmill_jobs`` that works on the jobs of some tasks. A queue's worker claims only jobs of tasks
    that it knows: those of newer or older code are left for a worker that has it.
    """

    tasks: dict[str, Task[Any, Any]] = field(default_factory=dict)
    _narrowed: dict[str, frozenset[str]] = field(default_factory=dict, init=False)

    own = True

    @property
    def narrowed(self) -> Mapping[str, frozenset[str]]:
        """Tasks of which jobs with unknown arguments were met, and the arguments that this version takes."""
        return self._narrowed

    def narrow(self, name: str) -> bool:
        """Leave jobs of this task with unknown arguments to newer workers; False where that is so already."""
        known = self.tasks[name].signature.known()
        if name in self._narrowed or known is None:
            return False
        self._narrowed[name] = known | {TRACE}
        return True

    def policy(self, read: Callable[[str], Any]) -> Any:
        """The task that a row is of."""
        return self.tasks.get(read("task"), self)

    def resources(self) -> list[str]:
        """All that its tasks ask for."""
        return list(dict.fromkeys(name for task in self.tasks.values() for name in task.resources()))

    @property
    def handlers(self) -> list[Callable[..., Any]]:
        """Its tasks' handlers."""
        return [task.handler for task in self.tasks.values()]


def refuse_inputs(where: str, option: str) -> None:
    """A lane's inputs are columns that others write; rowmill's own table has none."""
    if option in ("inputs", "stale", "settle_after"):
        raise DeclarationError(
            f"{where}: {option} is for lanes over a table of your own; the arguments of a job do not change",
            hint='@mill.lane("jobs", inputs=["url", "body"], ...), or enqueue the task again with the new arguments',
        )


def queue(name: str, options: Mapping[str, Any]) -> Queue:
    """A queue from its options."""
    for option in options:
        refuse_inputs(f"queue {name!r}", option)
        if option not in QUEUE_PARAMETERS:
            raise DeclarationError(
                f"queue {name!r}: there is no parameter {option!r}", hint=did_you_mean(option, QUEUE_PARAMETERS)
            )
    columns: dict[str, Any] = {state: {"state": state, "queue": name} for state in (READY, RUNNING, *FINAL)}

    def dispatch(job: Any, /, **resources: Any) -> Any:
        if isinstance(job, list):
            return made.tasks[job[0]["task"]].invoke_chunk(job, **resources)
        return made.tasks[job["task"]].invoke(job, **resources)

    made = Queue(
        table=TABLE, handler=dispatch, name=name, **columns,
        **{"lease": timedelta(minutes=1), "heartbeat": timedelta(seconds=5)} | dict(options),
    )  # fmt: skip
    made.where = lambda t: t.c.task.in_(list(made.tasks))
    return made
