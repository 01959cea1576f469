"""Handlers in processes of their own: for CPU-bound work, and for work that must be killable.

A child is spawned, never forked; it has its own resources and no connection of the engine's. It gets one job at a
time over a pipe and answers with how the run ended; the parent settles. Past its timeout it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..declare.chunk import in_order
from ..declare.lane import Lane
from ..declare.outcome import Done, Outcome
from ..errors import AppError, DeclarationError, RowmillError
from ..store.lane.result_values import no_data, note_text
from .records.run_log import JobLog
from .resources import Resources

if TYPE_CHECKING:
    from .job import ChunkJobs, Job

_ALIVE = 0.5  # seconds between two looks whether a process is still there that says nothing
_START = 60.0  # seconds a process may take to import its handler
_SPAWN = multiprocessing.get_context("spawn")


class HandlerDied(RowmillError):
    """The handler's process ended without an answer."""


class HandlerProcess:
    """One spawned process, for one slot. Started on first use, and again after it was killed or died."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._process: Any = None
        self._pipe: Connection | None = None

    async def run(
        self,
        job: Job | ChunkJobs,
        timeout: float | None,
        lease_began: float | None,
        threads: Executor,
        trace: Any = None,
    ) -> Any:
        """Run one job there, or a chunk; raises what the handler raised. A run past its timeout is killed.

        The process's start is not the handler's time; but where the lease is not renewed, it is the lease's.
        """
        from .execute import TimedOut
        from .job import workdir_prefix

        def left() -> float | None:
            if timeout is None or lease_began is None:
                return timeout
            return timeout - (time.monotonic() - lease_began)

        loop = asyncio.get_running_loop()
        within = _START if timeout is None or lease_began is None else min(_START, max(left() or 0, 0))
        await loop.run_in_executor(threads, self._start, within)
        jobs = job if isinstance(job, list) else [job]
        given = [
            {
                "row": {column: one[column] for column in one},
                "workdir": os.path.join(tempfile.gettempdir(), workdir_prefix(one.lane) + uuid.uuid4().hex[:12]),
                **{name: getattr(one, name) for name in ("id", "attempt", "lane", "environment", "worker", "slot")},
            }
            for one in jobs
        ]
        logs = jobs[0]._lane_state.run_logs is not None
        facts = {"trace": trace, "chunk": jobs is job, "jobs": given, "logs": logs}
        talk = loop.run_in_executor(threads, self._talk, facts, jobs, loop)
        try:
            async with asyncio.timeout(left()):
                kind, value = await asyncio.shield(talk)
        except (TimeoutError, asyncio.CancelledError) as error:
            # Past its time, its claim lost, or a hard stop: nothing of this run may go on.
            self._end()
            await asyncio.wait([talk], timeout=10)
            if isinstance(error, TimeoutError) and timeout is not None:
                raise TimedOut(timeout) from None
            raise
        finally:
            for one in given:
                shutil.rmtree(one["workdir"], ignore_errors=True)  # here: a killed process cannot
        if kind == "raised":
            raise value
        return value

    def _start(self, within: float) -> None:
        """A process that has imported its handler and waits for work; or, past that time, that is not there yet."""
        if self._process is not None and self._process.is_alive():
            return
        self._forget()
        pipe, theirs = _SPAWN.Pipe()
        modules = list(dict.fromkeys(handler.__module__ for handler in self.lane.handlers))
        process = _SPAWN.Process(target=_serve, args=(theirs, modules, self.lane.name, list(sys.path)), daemon=True)
        process.start()
        theirs.close()
        self._process, self._pipe = process, pipe
        with contextlib.suppress(EOFError, OSError):
            if pipe.poll(within):
                pipe.recv()

    def _talk(self, facts: dict[str, Any], jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> tuple[str, Any]:
        """In a thread, and the only one that closes the pipe while a run is under way."""
        pipe, process = self._pipe, self._process
        try:
            assert pipe is not None
            pipe.send(facts)
            while True:
                kind, value = self._hear(pipe)
                if kind == "ready":  # later than the start was waited for
                    continue
                if kind == "spend":
                    place, budget, wait, amounts = value
                    pipe.send(_portable(self._spend(jobs[place].spend(budget, wait=wait, **amounts), loop)))
                elif kind == "progress":
                    place, fraction, note = value
                    asyncio.run_coroutine_threadsafe(jobs[place].progress(fraction, note), loop)
                elif kind == "log":
                    place, *line = value
                    jobs[place].keep_line(*line)
                else:
                    return kind, value
        except (EOFError, OSError):
            process.join(timeout=5)
            code = process.exitcode
            self._forget()
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return "raised", HandlerDied(f"the handler's process died ({how})")
        except Exception as error:  # what the handler answered cannot be read here
            self._end()
            self._forget()
            return "raised", error

    def _hear(self, pipe: Connection) -> tuple[str, Any]:
        """What the process says next. Its death alone does not end the pipe: what it has forked may hold it open."""
        while not pipe.poll(_ALIVE):
            if not self._process.is_alive() and not pipe.poll():
                raise EOFError
        said: tuple[str, Any] = pipe.recv()
        return said

    def _spend(self, spending: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> tuple[str, Any]:
        """Wait for a budget on the handler's behalf, as long as there is a handler."""
        future = asyncio.run_coroutine_threadsafe(spending, loop)
        while True:
            try:
                return "spent", future.result(timeout=0.5)
            except TimeoutError:
                if not self._process.is_alive():
                    future.cancel()
                    raise EOFError from None
            except Exception as error:
                return "raised", error

    def _end(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    def kill(self) -> None:
        """End the process at once; not while a run is under way."""
        self._end()
        if self._process is not None:
            self._process.join(timeout=5)
        self._forget()

    def _forget(self) -> None:
        pipe, self._pipe, self._process = self._pipe, None, None
        if pipe is not None:
            pipe.close()


class Pipe:
    """The child's end of the pipe. Any thread of a handler may say something."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock, self.recv = connection, threading.Lock(), connection.recv

    def send(self, said: Any) -> None:
        """Say it to the parent, whole."""
        with self._lock:
            self._connection.send(said)


class IsolatedJob(dict[str, Any]):
    """A job as a handler in its own process sees it: the row as a dict, and the same names around it."""

    def __init__(self, facts: dict[str, Any], pipe: Pipe, place: int, logs: bool) -> None:
        super().__init__(facts.pop("row"))
        #: Where it stands in its chunk; 0 where it runs alone.
        self._pipe, self._place = pipe, place
        self._workdir = Path(facts.pop("workdir"))
        self.id, self.attempt, self.lane = facts["id"], facts["attempt"], facts["lane"]
        self.environment, self.worker, self.slot = facts["environment"], facts["worker"], facts["slot"]
        #: The run has not ended: what a thread that it left behind logs later is not the next run's.
        self.under_way = logs
        self.log = JobLog(facts, self._keep)
        #: A run that loses its lease is killed, so one that goes on has it.
        self.lost = False

    @property
    def workdir(self) -> Path:
        """A private temporary directory, made on first use, removed after the run."""
        self._workdir.mkdir(mode=0o700, exist_ok=True)
        return self._workdir

    def _keep(self, *line: Any) -> None:
        if self.under_way:
            self._pipe.send(("log", (self._place, *line)))

    def progress(self, fraction: float, note: str | None = None) -> _Told:
        """Report the progress of the run; with or without ``await``."""
        self._pipe.send(("progress", (self._place, float(fraction), note_text(note))))
        return _Told()

    def spend(self, budget: str, *, wait: timedelta = timedelta(minutes=1), **amounts: float) -> _Told:
        """Take from a budget of the Mill, all of it or nothing; with or without ``await``."""
        self._pipe.send(("spend", (self._place, budget, wait, amounts)))
        kind, value = self._pipe.recv()
        if kind == "raised":
            raise value
        return _Told()

    def finish(self) -> Any:
        """Not here: the process has no connection of the engine's."""
        raise RowmillError(
            'job.finish() needs the engine\'s connection, which a handler with isolation="process" does not have',
            hint="return the columns to set, or write with a connection of the handler's own",
        )

    def step(self, *_: Any, **__: Any) -> Any:
        """Not here: the process has no connection of the engine's."""
        raise RowmillError(
            'job.step and job.spawn need the engine\'s connection, which a handler with isolation="process" lacks',
            hint="spawn isolated tasks from one that is not isolated",
        )

    spawn = joined = results = step


class _Told:
    def __await__(self) -> Any:
        return
        yield


def importable(lane: Lane) -> None:
    """Refuse a handler that another process could not find."""
    if any("<locals>" in getattr(handler, "__qualname__", "<locals>") for handler in lane.handlers):
        raise DeclarationError(
            f'lane {lane.name!r}: isolation="process" needs a handler that another process can import',
            hint="declare the lane at the top of a module, not inside a function",
        )


def find(modules: list[str], name: str) -> tuple[Lane, Any]:
    """The lane of that name among the modules' globals, and the mill whose resources it uses."""
    imported = [importlib.import_module("__mp_main__" if module == "__main__" else module) for module in modules]
    values = [value for module in imported for value in vars(module).values()]
    for value in values:
        lanes = getattr(value, "lanes", None)
        if isinstance(lanes, dict) and isinstance(lanes.get(name), Lane):
            return lanes[name], value
    for value in values:
        if isinstance(value, Lane) and value.name == name:
            return value, None
    where = ", ".join(map(repr, modules))
    raise AppError(f"cannot find the lane {name!r} in module {where}", hint="declare it at the top of the module")


def _serve(pipe: Connection, modules: list[str], name: str, path: list[str]) -> None:
    """The child's main: jobs in, answers out, until the pipe closes."""
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        asyncio.run(_serve_jobs(pipe, modules, name))
    os._exit(0)


def _end_with(parent: int) -> None:
    """A run whose parent is gone can no longer be settled: stop, so that it does not overlap with the next one."""
    with contextlib.suppress(OSError, AttributeError):  # Linux tells it at once
        gone = select.poll()
        gone.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() == parent:
            gone.poll()
    while os.getppid() == parent:
        time.sleep(_ALIVE)
    os._exit(1)


async def _serve_jobs(connection: Connection, modules: list[str], name: str) -> None:
    pipe = Pipe(connection)
    lane, mill = find(modules, name)
    resources = Resources(getattr(mill, "resources", {}))
    loop = asyncio.get_running_loop()
    pipe.send(("ready", None))
    while True:
        facts = await loop.run_in_executor(None, pipe.recv)
        tracer, trace = mill.events.tracer if mill is not None else None, facts.pop("trace")
        jobs = [IsolatedJob(one, pipe, place, facts["logs"]) for place, one in enumerate(facts["jobs"])]
        job: Any = list(jobs) if facts["chunk"] else jobs[0]
        try:
            given = await resources.get(lane.policy(jobs[0].__getitem__).resources())
            with tracer.within(trace) if tracer is not None and trace else contextlib.nullcontext():
                result = lane.handler(job, **given)
                result = await result if inspect.isawaitable(result) else result
                answer: tuple[str, Any] = ("returned", in_order(result, job, jobs) if facts["chunk"] else result)
        except Exception as error:
            answer = ("raised", error)
        for one in jobs:
            one.under_way = False
        pipe.send(_portable(answer))


def _portable(answer: tuple[str, Any]) -> tuple[str, Any]:
    """An answer that survives the pipe: what cannot be pickled is told by its name and text."""
    _, value = answer
    try:
        copy = pickle.loads(pickle.dumps(value))
        if not isinstance(value, Outcome) or vars(copy) == vars(value):
            return answer
    except Exception:
        pass
    if isinstance(value, BaseException):
        return "raised", RuntimeError(f"{type(value).__name__}: {value}")
    return "raised", _unsendable(value)


def _unsendable(value: Any) -> Exception:
    """Why an answer cannot leave its process: the column at fault, where it is one of a dict."""
    columns = value.columns if isinstance(value, Done) else value
    for column, part in columns.items() if type(columns) is dict else ():
        try:
            pickle.dumps(part)
        except Exception:
            return no_data(part, f"column {column!r}")
    return TypeError(f"the handler returned a {type(value).__name__} that cannot leave its process")
