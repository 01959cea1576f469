"""The backend for Django's ``TASKS`` setting: a task of Django's becomes a job of ``rowmill_jobs``.

The job's ``task`` is the function's dotted path, so that any worker of the project finds it. A worker that cannot
import it leaves the job to one that can.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import django
from asgiref.sync import sync_to_async
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.module_loading import import_string

from ..declare import retry
from ..declare.call import Call
from ..declare.options import Options
from ..declare.outcome import Cancel, Dead, NotForThisVersion, Outcome
from ..declare.task import Queue, Task
from ..errors import RowmillError, did_you_mean
from .connections import guarded

if TYPE_CHECKING:
    from .mill import Mill
    from .models import QueuedJob

#: Django 6 has tasks of its own; before it the package of the same interface has them.
PACKAGE = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
try:
    _base, _signals = import_module(f"{PACKAGE}.base"), import_module(f"{PACKAGE}.signals")
    _errors = import_module(f"{PACKAGE}.exceptions")
    BaseBackend: Any = import_module(f"{PACKAGE}.backends.base").BaseTaskBackend
except ImportError as error:
    raise ImproperlyConfigured(
        "rowmill's TaskBackend needs Django 6, or the package django-tasks. Try: pip install 'rowmill[django]'"
    ) from error

#: What OPTIONS may hold: the database, and parameters of every task of the backend.
OPTIONS = ("database", "max_attempts", "backoff", "timeout", "classify", "keep")
_READY, _RUNNING = _base.TaskResultStatus.READY, _base.TaskResultStatus.RUNNING
_STATUS = {
    "running": _RUNNING,
    "done": _base.TaskResultStatus.SUCCESSFUL,
    "dead": _base.TaskResultStatus.FAILED,
    "canceled": _base.TaskResultStatus.FAILED,
}
#: The last line of a traceback that names the exception: it follows an indented one.
_EXCEPTION = re.compile(r"^[ ].*\n((?:\w+\.)*\w+)(?::|$)", re.MULTILINE)


class TaskBackend(BaseBackend):
    """Enqueues Django's tasks as jobs of the project's Mill, inside ``atomic()`` with the rest of the transaction.

    A task that raises has FAILED, unless ``OPTIONS["max_attempts"]`` allows further attempts.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        for name in self.options:
            if name not in OPTIONS:
                raise ImproperlyConfigured(
                    f"TASKS[{alias!r}]: there is no option {name!r}. Try: {did_you_mean(name, OPTIONS)}"
                )

    # -- the project's Mill

    @property
    def mill(self) -> Mill:
        """The project's Mill, with a queue for each of this backend's."""
        from .project import mill

        return mill  # type: ignore[return-value]

    @property
    def database(self) -> str:
        """The alias of the database that the jobs are in."""
        return self.options.get("database") or self.mill.aliases[0]

    def serve(self, mill: Mill) -> None:
        """Let workers of a Mill take jobs of this backend: once for each of its queues."""
        for name in sorted(self.queues):
            self._queue(mill, name)

    def _queue(self, mill: Mill, name: str) -> Queue:
        lane = mill.lanes.get(name)
        if lane is None:
            lane = mill.queue(name)
        if not isinstance(lane, Queue):
            raise ImproperlyConfigured(
                f"TASKS[{self.alias!r}]: {name!r} is a lane over your own table, so it cannot be a queue of tasks"
            )
        if not isinstance(lane.tasks, _FoundByPath):
            lane.tasks = _FoundByPath(mill, lane)
            # Dotted paths are Django's tasks: this worker may have to import them yet.
            lane.where = lambda t: t.c.task.in_(list(lane.tasks)) | t.c.task.contains(".")
        return lane

    def task_in(self, mill: Mill, queue: Queue, task: Any) -> Task[..., Any]:
        """A task of Django's as one of rowmill's."""
        own = {name: value for name, value in self.options.items() if name != "database"}
        made: Task[..., Any] = Task(
            handler=_handler(self, task), name=task.module_path, client=mill._client, known_resources={},
            queue=queue.name, **{"max_attempts": 1, **own},
        )  # fmt: skip
        made.environments = (self.database,)
        return made

    # -- Django's interface

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Add a job; in the transaction that Django's connection is in."""
        self.validate_task(task)
        arguments = {"args": normalized(list(args)), "kwargs": normalized(dict(kwargs))}
        mill = self.mill
        queue = self._queue(mill, task.queue_name)
        own = queue.tasks.setdefault(task.module_path, self.task_in(mill, queue, task))
        after = task.run_after
        if after is not None and timezone.is_naive(after):
            after = timezone.make_aware(after)
        options = Options(run_after=after, priority=-task.priority, env=self.database)
        (handle,) = mill._client.enqueue_sync([Call(own, arguments, options)])
        result = self.get_result(str(handle.id), task)
        _signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str, task: Any = None) -> Any:
        """A job as Django sees it."""
        from .models import QueuedJob

        try:
            job = QueuedJob.objects.using(self.database).get(pk=int(result_id))
        except (QueuedJob.DoesNotExist, ValueError, TypeError, OverflowError):
            raise _errors.TaskResultDoesNotExist(result_id) from None
        task = task or self._task_of(job)
        return _seen(task.using(priority=-job.priority, queue_name=job.queue, run_after=None), job, self.alias)

    def _task_of(self, job: QueuedJob) -> Any:
        task = django_task(job.task)
        if task is None or task.backend != self.alias:
            raise _errors.TaskResultDoesNotExist(str(job.pk))
        return task

    def check(self, **_: Any) -> Iterable[checks.CheckMessage]:
        """For ``manage.py check``."""
        from django.apps import apps

        if not apps.is_installed("rowmill.django"):
            yield checks.Error(
                f"TASKS[{self.alias!r}] needs rowmill's tables", hint='INSTALLED_APPS = [..., "rowmill.django"]',
                id="rowmill.E001",
            )  # fmt: skip
            return
        try:
            if self.database not in self.mill.aliases:
                yield checks.Error(
                    f"TASKS[{self.alias!r}]: the project's Mill does not serve the database {self.database!r}",
                    hint=f"rowmill.django.Mill({self.database!r}, ...)", id="rowmill.E002",
                )  # fmt: skip
        except (RowmillError, AttributeError) as error:
            hint = "mill = rowmill.django.Mill() in the module that ROWMILL_APP names"
            yield checks.Error(f"TASKS[{self.alias!r}]: {error}", hint=hint, id="rowmill.E003")
        if not self.queues:
            yield checks.Warning(
                f"TASKS[{self.alias!r}] has no QUEUES: workers serve the queues of the tasks that they have imported",
                hint='QUEUES = ["default", ...]', id="rowmill.W001",
            )  # fmt: skip


class _FoundByPath(dict[str, Task[Any, Any]]):
    """The tasks of a queue, Django's found by their paths when a job first asks for them."""

    def __init__(self, mill: Mill, queue: Queue) -> None:
        super().__init__(queue.tasks)
        self._mill, self._queue = mill, queue

    def __missing__(self, path: str) -> Task[Any, Any]:
        task = django_task(path)
        backend = None if task is None else task.get_backend()
        if not isinstance(backend, TaskBackend):
            # It takes no arguments, so jobs with some are left to a worker that knows the task.
            return self.setdefault(path, Task(
                handler=_unknown, name=path, client=self._mill._client, known_resources={}, queue=self._queue.name
            ))  # fmt: skip
        return self.setdefault(path, backend.task_in(self._mill, self._queue, task))

    def get(self, path: str, default: Any = None) -> Any:
        """Also of a task that was not asked for yet."""
        return self[path] if "." in path or path in self else default


def _unknown(job: Any) -> None:
    raise NotForThisVersion("this worker cannot import the task")


def django_task(path: str) -> Any:
    """The task at a dotted path; None where there is none."""
    try:
        task = import_string(path)
    except ImportError:
        return None
    return task if isinstance(task, _base.Task) else None


def normalized(value: Any) -> Any:
    """As JSON keeps it; raises TypeError for what it cannot keep."""
    for module in (f"{PACKAGE}.utils", "django.utils.json"):
        try:
            return import_module(module).normalize_json(value)
        except ModuleNotFoundError:
            continue
    raise ImproperlyConfigured(f"{PACKAGE} has no normalize_json")


def install(mill: Mill) -> None:
    """Let a Mill serve the queues of every backend of ours in ``settings.TASKS``; import the applications' tasks."""
    from django.utils.module_loading import autodiscover_modules

    ours = backends()
    if ours:
        autodiscover_modules("tasks")
    for backend in ours:
        backend.serve(mill)


def backends() -> list[TaskBackend]:
    """The backends of ours in ``settings.TASKS``."""
    known = import_module(PACKAGE).task_backends
    return [backend for alias in known if isinstance(backend := known[alias], TaskBackend)]


# -- a job as Django sees it


def _seen(task: Any, job: QueuedJob, alias: str) -> Any:
    history = job.history or []
    started = history[0]["started_at"] if history else None
    first = timezone.datetime.fromisoformat(started) if started else job.claimed_at
    last = job.claimed_at or (timezone.datetime.fromisoformat(history[-1]["started_at"]) if history else None)
    result = _base.TaskResult(
        task=task, id=str(job.pk), status=_STATUS.get(job.state, _READY), enqueued_at=_shown(job.created_at),
        started_at=_shown(first), finished_at=_shown(job.finished_at), last_attempted_at=_shown(last),
        args=job.args.get("args", []), kwargs=job.args.get("kwargs", {}), backend=alias,
        errors=_failures(history, job), worker_ids=_workers(history, job),
    )  # fmt: skip
    object.__setattr__(result, "_return_value", job.result)
    return result


def _shown(moment: Any) -> Any:
    """Naive where the project's times are."""
    from django.conf import settings

    if moment is not None and not settings.USE_TZ and timezone.is_aware(moment):
        return timezone.make_naive(moment, timezone.get_default_timezone())
    return moment


def _failures(history: Sequence[Mapping[str, Any]], job: QueuedJob) -> list[Any]:
    """One entry for each failed run. A job that ended otherwise, such as by an operator, has its error alone."""
    told = [(entry.get("traceback") or entry.get("error") or "", entry.get("traceback")) for entry in history]
    if not told and job.state in ("dead", "canceled"):
        told = [(job.error or job.state, None)]
    return [
        _base.TaskError(exception_class_path=_class_in(trace) or "builtins.Exception", traceback=text)
        for text, trace in told
    ]


def _class_in(trace: str | None) -> str | None:
    names = _EXCEPTION.findall(trace or "")
    if not names:
        return None
    return names[-1] if "." in names[-1] else f"builtins.{names[-1]}"


def _workers(history: Sequence[Mapping[str, Any]], job: QueuedJob) -> list[str]:
    """One for each attempt, the present one among them."""
    workers = [entry.get("worker") or "" for entry in history]
    if job.state in ("running", "done") and job.worker:
        workers.append(job.worker)
    return workers


# -- in the worker


def _handler(backend: TaskBackend, task: Any) -> Callable[..., Any]:
    """Runs a task of Django's, with the signals that go with it."""
    if inspect.iscoroutinefunction(task.func):

        async def run_async(job: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
            read = sync_to_async(backend.get_result)
            result = _begun(await read(str(job.id), task), job)
            await _signals.task_started.asend(type(backend), task_result=result)
            try:
                value = normalized(await task.func(*_context(task, result), *args, **kwargs))
            except Exception as error:
                if _ended(result, error, job, backend):
                    await _signals.task_finished.asend(type(backend), task_result=result)
                raise
            _ended(result, value, job, backend)
            await _signals.task_finished.asend(type(backend), task_result=result)
            return value

        return guarded(run_async, {})  # type: ignore[no-any-return]

    def run(job: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        result = _begun(backend.get_result(str(job.id), task), job)
        _signals.task_started.send(type(backend), task_result=result)
        try:
            value = normalized(task.func(*_context(task, result), *args, **kwargs))
        except Exception as error:
            if _ended(result, error, job, backend):
                _signals.task_finished.send(type(backend), task_result=result)
            raise
        _ended(result, value, job, backend)
        _signals.task_finished.send(type(backend), task_result=result)
        return value

    return guarded(run, {})  # type: ignore[no-any-return]


def _context(task: Any, result: Any) -> list[Any]:
    return [_base.TaskContext(task_result=result)] if task.takes_context else []


def _begun(result: Any, job: Any) -> Any:
    object.__setattr__(result, "status", _RUNNING)
    return result


def _ended(result: Any, end: Any, job: Any, backend: TaskBackend) -> bool:
    """Note on the result how the run ended; whether that is the end of the job."""
    if isinstance(end, BaseException):
        kind = type(end)
        path = f"{kind.__module__}.{kind.__qualname__}"
        text = "".join(traceback.format_exception(end))
        result.errors.append(_base.TaskError(exception_class_path=path, traceback=text))
        if not _is_final(end, job, backend):
            object.__setattr__(result, "status", _READY)
            return False
        object.__setattr__(result, "status", _base.TaskResultStatus.FAILED)
    else:
        object.__setattr__(result, "_return_value", end)
        object.__setattr__(result, "status", _base.TaskResultStatus.SUCCESSFUL)
    object.__setattr__(result, "finished_at", _shown(timezone.now()))
    return True


def _is_final(error: BaseException, job: Any, backend: TaskBackend) -> bool:
    if isinstance(error, Outcome):
        return isinstance(error, (Dead, Cancel))
    limit = job["max_attempts"] or backend.options.get("max_attempts", 1)
    return bool(job.attempt >= limit or retry.classify(error) == retry.PERMANENT)
