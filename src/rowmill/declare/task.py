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
from .cron import Cron
from .lane import PARAMETERS, Lane
from .options import OPTIONS, Keep, Key, Options
from .outcome import Dead, NotForThisVersion
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
    desk: TaskClient
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)

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
        """What a call gives."""
        if self._signature is None:
            own, job = self.resources(), self.takes_job
            first = next(iter(inspect.signature(self.handler).parameters), None)
            self._signature = Signature(self.handler, lambda p: p.name in own or (job and p.name == first))
        return self._signature

    def handle(self, id: int, env: str | None = None) -> Handle[R]:
        """The handle of a job by its id, also if another request or process enqueued it."""
        served = getattr(self, "environments", None)
        return Handle(self.desk, self, self.desk.environment(env or (served[0] if served else None)), id)

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
        return await self.desk.enqueue(self._calls(calls, options))

    def enqueue_many_sync(
        self, calls: Iterable[Mapping[str, Any] | tuple[Any, ...] | Call], **options: Any
    ) -> list[Handle[R]]:
        """``enqueue_many`` for code that does not await."""
        return self.desk.enqueue_sync(self._calls(calls, options))

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
        found = []
        for given in asked:
            if isinstance(given, (tuple, list)):
                found.append(Call(self, pack(where, tuple(given), {}), common))
            elif isinstance(given, (dict, Mapping)):
                found.append(Call(self, pack(where, (), given), common))
            elif isinstance(given, Call):
                found.append(replace(given, options=given.options.under(common)) if options else given)
            else:
                raise WrongArguments(
                    f"{where}: a call is a dict or a tuple of arguments, or a task.call(...), not {given!r}",
                    hint='enqueue_many([{"to": "a@example.org"}, ...])',
                )
        return found


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
        return (await self.task.desk.enqueue([self.call(*args, **kwargs)]))[0]

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """``enqueue`` for code that does not await."""
        return self.task.desk.enqueue_sync([self.call(*args, **kwargs)])[0]


#: What a task says of itself; any other parameter of a lane, given to a task, gives it a queue of its own.
TASK_PARAMETERS = ("name", "queue", "max_attempts", "backoff", "timeout", "classify", "priority", "keep")
#: What a queue may be told; the rest of a lane is rowmill's own here.
QUEUE_PARAMETERS = (
    "batch", "concurrency", "environments", "gates", "heartbeat", "isolation", "lease", "max_reclaims", "pace", "poll",
    "priority", "slot_name", "startup_lease", "sweep_every",
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


def queue(name: str, options: Mapping[str, Any]) -> Queue:
    """A queue from its options."""
    for option in options:
        if option not in QUEUE_PARAMETERS:
            raise DeclarationError(
                f"queue {name!r}: there is no parameter {option!r}", hint=did_you_mean(option, QUEUE_PARAMETERS)
            )
    columns: dict[str, Any] = {state: {"state": state, "queue": name} for state in (READY, RUNNING, *FINAL)}

    def dispatch(job: Any, /, **resources: Any) -> Any:
        return made.tasks[job["task"]].invoke(job, **resources)

    made = Queue(
        table=TABLE, handler=dispatch, name=name, **columns,
        **{"lease": timedelta(minutes=1), "heartbeat": timedelta(seconds=5)} | dict(options),
    )  # fmt: skip
    made.where = lambda t: t.c.task.in_(list(made.tasks))
    return made
