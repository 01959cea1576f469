"""Each worker's own temporary directory: empty when a worker starts, whatever became of the one before it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rowmill.events import Event

#: Directories of this process, with the descriptor whose lock says that it lives.
_taken: dict[Path, int] = {}


def own_directory(root: Path) -> Callable[[Event], None]:
    """A subscriber: as soon as the worker has its id, all that this process puts in a temporary place goes to
    ``root/<id>``. A worker that was killed cannot clean up; the next one of its name does, before its first document.
    """

    def take(event: Event) -> None:
        if event.name == "worker_started":
            tempfile.tempdir = str(taken(root, event.fields["worker"]))

    return take


def taken(root: Path, worker: str) -> Path:
    """The worker's directory, and what was left in it gone. One that a live process has (a worker of the same name
    over another database) is let alone: the next takes ``<id>.2``.
    """
    return next(filter(_ours, (root / (f"{worker}.{n}" if n > 1 else worker) for n in itertools.count(1))))


def _ours(directory: Path) -> bool:
    """Whether this process has it: since before, or from now on, and then it is emptied."""
    if directory in _taken:
        return True
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    _taken[directory] = lock
    for left in directory.iterdir():
        with contextlib.suppress(OSError):
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return True
