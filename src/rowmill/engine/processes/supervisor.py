"""The supervisor starts worker processes, restarts them when they die, and stops them gracefully.

Each child is spawned in its own session. So Ctrl-C in a terminal reaches only the supervisor, and processes that a dead
child leaves behind can be ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from ... import errors
from ...errors import AppError, DeclarationError, RowmillError, WorkerIdTaken
from ...events import Events
from ..recovery.running_marks import running_now
from ..shutdown import RECYCLE
from .child import CRASHED, MARGIN, Orders

_RESTART = (0.5, 30.0)  # seconds before a dead child is restarted: first, and at most
_SETTLED = 60.0  # a child that lived this long did not die because of its start
USERS_MISTAKES = (DeclarationError, AppError, WorkerIdTaken)


class WorkerProcess:
    """One worker id, and its current process."""

    def __init__(self, worker_id: str) -> None:
        self.id = worker_id
        self.incarnation = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.crashes = 0
        #: done, failed, dead: totals of all the processes that had this id.
        self.counts: Counter[str] = Counter()
        self.error: RowmillError | None = None
        #: Rows that a drain left because they are paused without end, by environment and lane.
        self.held_back: list[dict[str, Any]] = []
        self._ended = False
        self._counted: dict[str, int] = {}
        self._line: socket.socket | None = None
        self._unread = b""
        #: The file with the rows that its processes run, kept from one process to the next.
        self._flight: IO[bytes] | None = None

    def start(self, command: Sequence[str], **options: Any) -> None:
        """Start a new process with this id. It knows its predecessor, and may take the id from it."""
        followed, self.incarnation = self.incarnation or None, uuid.uuid4().hex[:8]
        self._ended, self.error, self._counted, self._unread = False, None, {}, b""
        self._flight = self._flight or tempfile.TemporaryFile()  # noqa: SIM115 - closed with the supervisor
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        orders = Orders(self.id, self.incarnation, followed, theirs.fileno(), self._flight.fileno())
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                self.process = subprocess.Popen(
                    [*command, "--child", orders.text()],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[orders.line, orders.flight],
                    start_new_session=True,
                    **options,
                )
            undo.pop_all()
        self._line = ours
        asyncio.get_running_loop().add_reader(ours, self._listen)

    def running(self) -> list[int]:
        """The marks of the rows that its last process was running when it ended."""
        return sorted(running_now(self._flight.fileno()) or ()) if self._flight is not None else []

    def tell(self, **words: Any) -> None:
        """Send a message to its process. Never waits: a message that the process cannot take now is dropped."""
        if self.process is not None and self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(json.dumps(words).encode() + b"\n")

    def close(self) -> None:
        """Close the file with the running rows: no process will be started again."""
        if self._flight is not None:
            self._flight.close()

    def _listen(self) -> None:
        assert self._line is not None
        with contextlib.suppress(OSError):
            while data := self._line.recv(65536):
                self._unread += data
            asyncio.get_running_loop().remove_reader(self._line)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def _hear(self, words: dict[str, Any]) -> None:
        if counts := words.get("counts"):
            self.counts.update({name: counts[name] - self._counted.get(name, 0) for name in counts})
            self._counted = counts
        if error := words.get("error"):
            kind = getattr(errors, error["kind"], RowmillError)
            self.error = kind(error["message"], hint=error["hint"])
        self._ended = self._ended or bool(words.get("ended"))
        self.held_back = words.get("held_back") or self.held_back

    def gone(self) -> tuple[int, bool]:
        """Handle the end of its process. Returns the exit code, and whether it ended normally."""
        assert self.process is not None
        assert self._line is not None
        self._listen()
        asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()
        if not self._ended:
            # Browsers, isolated handlers: processes that a dead worker started must not continue with rows that others
            # will get.
            self.signal(signal.SIGKILL, group=True)
        code, self.process = self.process.wait(), None
        return code, self._ended and code == 0

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or to its whole process group. It is not reaped before ``gone``."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.process.pid, number)


class Supervisor:
    """Keeps one process per worker id alive until it ends by itself, reports a user's mistake, or ``stop`` is called.

    ``command`` starts a child; its orders are added as ``--child``. An error of a ``final`` kind is not retried: all
    children are stopped. Further options are passed to the start of the processes.
    """

    def __init__(
        self,
        command: Sequence[str],
        ids: Sequence[str],
        *,
        grace: float,
        events: Events,
        final: tuple[type[RowmillError], ...] = USERS_MISTAKES,
        **options: Any,
    ) -> None:
        self.children = [WorkerProcess(worker_id) for worker_id in ids]
        self.grace, self.events = grace, events
        #: How often ``stop`` was called.
        self.stops = 0
        #: Why all were stopped, if it was a user's mistake.
        self.error: RowmillError | None = None
        self._command, self._options, self._final = command, options, final
        #: Some had to be killed: their rows wait for the lease.
        self.killed = False
        self._stopping = asyncio.Event()
        self._threads = ThreadPoolExecutor(len(ids), "rowmill-child")
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def counts(self) -> Counter[str]:
        """done, failed and dead of all children, as far as they reported.

        A child that is killed between a commit and its report leaves that batch uncounted.
        """
        return sum((child.counts for child in self.children), Counter())

    @property
    def held_back(self) -> list[dict[str, Any]]:
        """Rows that the drain left because they are paused without end, each lane once."""
        lanes = {(left["environment"], left["lane"]): left for child in self.children for left in child.held_back}
        return list(lanes.values())

    async def run(self) -> None:
        """Run until all children have ended."""
        try:
            await asyncio.gather(*(self._keep(child) for child in self.children))
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
            self._signal(signal.SIGKILL, group=True)
            for child in self.children:
                child.close()
            self._threads.shutdown(wait=False)

    def stop(self) -> None:
        """First call: stop claiming, let runs finish within the grace period. Second: stop at once. Third: kill."""
        self.stops += 1
        self._stopping.set()
        if self.stops > 2:
            self._kill()
            return
        patience = self.grace if self.stops == 1 else 0.0
        self._signal(signal.SIGTERM)
        if any(child.process is not None for child in self.children):
            again = "a second signal stops at once" if self.stops == 1 else "a second signal kills the workers"
            self.events.emit("stopping", grace=patience, hint=again)
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(patience + MARGIN, self._kill)

    def _kill(self) -> None:
        for child in self.children:
            if child.process is not None:
                self.killed = True
                self.events.emit("process_killed", logging.WARNING, worker=child.id, pid=child.process.pid)
        self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: signal.Signals, *, group: bool = False) -> None:
        for child in self.children:
            child.signal(number, group=group)

    async def _keep(self, child: WorkerProcess) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            code, well = await self._live(child)
            if well or self._stopping.is_set():
                self.events.emit("process_ended", logging.DEBUG, worker=child.id, how=_how(code))
                # One that was asked to stop before it could listen had claimed nothing yet.
                self.killed = self.killed or not (well or code == -signal.SIGTERM)
                return
            if isinstance(child.error, self._final):
                self.error = child.error
                self.stop()
                return
            if time.monotonic() - began >= _SETTLED:
                child.crashes = 0
            pause = 0.0 if code == RECYCLE else min(_RESTART[0] * 2.0**child.crashes, _RESTART[1])
            child.crashes += code != RECYCLE
            self.events.emit(
                "process_died", logging.WARNING, worker=child.id, how=_how(code), restart_in=pause,
                **({"error": child.error.message} if child.error else {}),
            )  # fmt: skip
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _live(self, child: WorkerProcess) -> tuple[int, bool]:
        try:
            child.start(self._command, **self._options)
        except OSError as error:  # no memory, or too many processes: this may pass
            child.error = RowmillError(f"no process could be started: {error}")
            return CRASHED, False
        assert child.process is not None
        self.events.emit("process_started", logging.DEBUG, worker=child.id, pid=child.process.pid)
        await asyncio.get_running_loop().run_in_executor(self._threads, _until_dead, child.process)
        code, well = child.gone()
        if not well:
            self._report_death(child)
        return code, well

    def _report_death(self, dead: WorkerProcess) -> None:
        """Report a death to the other children: one of them gives the rows back before a successor has started."""
        for child in self.children:
            if child is not dead:
                child.tell(id=dead.id, incarnation=dead.incarnation, running=dead.running())


def _until_dead(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end without reaping if the system can: until then no other process gets its id or its group's."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()


def _how(code: int) -> str:
    if code == RECYCLE:
        return "recycled"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
