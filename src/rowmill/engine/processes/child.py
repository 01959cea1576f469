"""A worker process under a supervisor: its orders, its connection to the supervisor, and its exit.

The connection is a socket. A child reports its results over it, and learns which other child has died. When its
supervisor is gone, the connection ends, and the child stops on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import RowmillError
from ...events import Event, to_log
from ..recovery.liveness import DeadWorker
from ..shutdown import RECYCLE
from ..worker import Worker

#: Seconds that a child may take beyond its grace period to write its last outcomes.
MARGIN = 10.0
CRASHED = 70  # exit code: an error of the engine itself


@dataclass(frozen=True)
class Orders:
    """What a supervisor passes to a child: its id, its predecessor, and the socket."""

    worker_id: str
    incarnation: str
    replaces: str | None
    line: int
    #: The file with the rows that this process runs, and those that the previous process was running when it died.
    flight: int

    def text(self) -> str:
        """The orders for the child's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Orders:
        """Parse the output of ``text``."""
        return cls(**json.loads(text))


class SupervisorPipe:
    """The child's end of the socket to its supervisor."""

    def __init__(self, number: int) -> None:
        self._socket = socket.socket(fileno=number)
        self._socket.set_inheritable(False)  # a process that a handler starts must not keep the socket open

    def tell(self, **words: Any) -> None:
        """Send a message. Never waits: a paused supervisor must not delay the work."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(words).encode() + b"\n", socket.MSG_DONTWAIT)

    def watch(self, died: Callable[[DeadWorker], None], orphaned: Callable[[], None], patience: float) -> None:
        """Call ``died`` for every other child that is reported dead, and ``orphaned`` when the supervisor is gone.

        After that, no supervisor can end a child that does not stop, and its heartbeat would hold its rows forever. So
        the child ends itself after ``patience`` seconds.
        """

        def wait() -> None:
            with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
                for line in lines:
                    with contextlib.suppress(ValueError):  # ignore a report that was cut off
                        words = json.loads(line)
                        died(DeadWorker(words["id"], words["incarnation"], frozenset(words["running"])))
            orphaned()
            time.sleep(patience)
            os._exit(CRASHED)

        threading.Thread(target=wait, name="rowmill-line", daemon=True).start()


def serve(make: Callable[[], Worker], line: SupervisorPipe, flight: int) -> int:
    """Run a child and return its exit code. Errors are sent to the supervisor, which prints them."""
    try:
        os.set_inheritable(flight, False)
        worker = make()
        worker.keep_running_marks(flight)
        return asyncio.run(_serve(worker, line))
    except RowmillError as error:
        line.tell(error={"kind": type(error).__name__, "message": error.message, "hint": error.hint})
        _end_without_threads(1)
        return 1
    except Exception as error:
        to_log(Event("worker_crashed", logging.ERROR, {"pid": os.getpid()}), error)
        _leave(CRASHED)
        raise


async def _serve(worker: Worker, line: SupervisorPipe) -> int:
    loop = asyncio.get_running_loop()
    asked = False

    def stop() -> None:
        nonlocal asked
        asked = True
        worker.stop()

    def alone() -> None:
        # A lost supervisor is not a second stop request: a child that is already shutting down continues as before.
        if not asked:
            stop()
            worker.events.emit(
                "supervisor_gone",
                logging.WARNING,
                worker=worker.id,
                hint="the supervisor process died; this worker stops",
            )

    def orphaned() -> None:
        loop.call_soon_threadsafe(alone)

    def died(dead: DeadWorker) -> None:
        loop.call_soon_threadsafe(worker.take_over, dead)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    worker.expendable = True
    line.watch(died, orphaned, worker.grace + MARGIN)
    worker.counters.told = lambda counters: line.tell(
        counts={
            "done": counters.completed,
            "failed": counters.failures,
            "dead": counters.died,
            "canceled": counters.canceled,
            "left": counters.left,
        }
    )
    rest_collector()
    await worker.run()
    if worker.recycling:
        _leave(RECYCLE)
    line.tell(ended=True, held_back=worker.held_back)
    if any(slots.unstoppable for slots in worker.slots.values()):
        _leave(0)
    _end_without_threads(0)
    return 0


def rest_collector() -> None:
    """Tune garbage collection for a process that only runs a worker.

    Objects loaded so far are frozen, so that no collection scans them again. A collection runs once in a few batches
    instead of several times in each.
    """
    gc.freeze()
    gc.set_threshold(10_000)


def _leave(code: int) -> None:
    """Exit now: a handler's thread that never ends would keep the process alive."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _end_without_threads(code: int, patience: float = 2.0) -> None:
    """Exit with this code even if handlers have left threads running.

    At its exit Python waits for every thread that is not a daemon. Threads get ``patience`` seconds to end.
    """

    def wait() -> None:
        time.sleep(patience)
        me = (threading.main_thread(), threading.current_thread())
        left = [thread.name for thread in threading.enumerate() if thread not in me and not thread.daemon]
        if left:
            hint = "a handler left threads running; make them daemon threads, or join them before it returns"
            to_log(Event("threads_left", logging.WARNING, {"pid": os.getpid(), "threads": left, "hint": hint}))
            _leave(code)

    threading.Thread(target=wait, name="rowmill-exit", daemon=True).start()
