"""The identity of a worker's process, and whether this host's kernel still has it. Linux only; unknown elsewhere."""

from __future__ import annotations

import contextlib
import functools
import os

_GONE = ("Z", "X", "x")  # states in /proc: a zombie, or dead


@functools.cache
def _identity_of(pid: int) -> str | None:
    try:
        started = _started(pid)
    except OSError:
        return None
    return f"{_kernel()} {pid} {started}" if started is not None and _kernel() is not None else None


def process_identity() -> str | None:
    """The identity of this process, unique over all hosts: boot, namespaces, pid and start time. None: not on Linux."""
    return _identity_of(os.getpid())


@functools.cache
def _kernel() -> str | None:
    """The running kernel and its pid and time namespaces: within them, a pid and a start time identify one process.

    None also if /proc shows the processes of another namespace.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespaces = [str(os.stat("/proc/self/ns/pid").st_ino)]
        with contextlib.suppress(FileNotFoundError):  # before Linux 5.6
            namespaces.append(str(os.stat("/proc/self/ns/time").st_ino))
        return f"{boot} {'-'.join(namespaces)}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if it is a zombie."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].decode().split()
    return None if words[0] in _GONE else words[19]


def process_is_gone(identity: str | None) -> bool:
    """Whether the process ran on this host and is gone. False if that is unknown."""
    kernel = _kernel()
    if identity is None or kernel is None or not identity.startswith(f"{kernel} "):
        return False
    _boot, _namespaces, pid, started = identity.split()
    try:
        return _started(int(pid)) != started
    except (FileNotFoundError, ProcessLookupError):
        return not _exists(int(pid))
    except OSError:  # no file can be opened any more, or not this one
        return False


def _exists(pid: int) -> bool:
    """Whether the process exists. With hidepid, /proc hides the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def same_kernel(one: str | None, other: str | None) -> bool:
    """Whether each of two processes can see if the other one exists."""
    return one is not None and other is not None and one.split()[:2] == other.split()[:2]
