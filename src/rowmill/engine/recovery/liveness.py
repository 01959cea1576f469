"""Who is alive: which other workers are dead or seem to be, so that their rows need not wait for a lease.

A death is *known* where a supervisor reports it, or where the kernel of this host has no such process any more. It is
*presumed* on PostgreSQL: every worker holds an advisory lock on the session on which it listens. Where that lock is
missing for the Mill's ``suspicion``, and the worker has missed a heartbeat by as long, its rows are taken back, too.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...store.own.workers import Peer

_GONE = ("Z", "X", "x")  # states in /proc: a zombie, or dead


@dataclass(frozen=True, slots=True)
class DeadWorker:
    """A worker process that is known or presumed to be dead."""

    id: str
    incarnation: str
    #: The marks of the rows that it was running; None: not known, so any of its rows may have been.
    running: frozenset[int] | None = None
    #: When it was last heard of, where its death is presumed: a later sign of life proves it alive.
    seen_at: str | None = None
    #: Another worker declared it dead, and may have failed before it gave the rows back.
    declared: bool = False


@functools.cache
def _identity_of(pid: int) -> str | None:
    started = _started(pid)
    return f"{_kernel()} {pid} {started}" if started is not None and _kernel() is not None else None


def process_identity() -> str | None:
    """This process, unlike any other on any host: boot, process namespace, pid and start time. None: not on Linux."""
    return _identity_of(os.getpid())


@functools.cache
def _kernel() -> str | None:
    """The running kernel and the process namespace: within them a pid means one process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process started, in ticks since the boot; None where there is no such process, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None
    return None if words[0] in _GONE else words[19]


def process_is_gone(identity: str | None) -> bool:
    """The process of this identity ran on this host and is not there any more. False where that cannot be known."""
    kernel = _kernel()
    if identity is None or kernel is None or not identity.startswith(f"{kernel} "):
        return False
    _boot, _namespace, pid, started = identity.split()
    return _started(int(pid)) != started


class Peers:
    """The other workers of one environment, and since when each of them seems to be dead."""

    def __init__(self, suspicion: float | None, beat_every: float) -> None:
        #: Seconds for which a worker's lock must be missing; None: a missing lock says nothing.
        self.suspicion = suspicion
        #: Seconds between two heartbeats of a live worker: until the next one is late, silence says nothing.
        self._beat_every = beat_every
        self._known: list[Peer] = []
        self._gone: set[str] = set()
        #: Since when (monotonic) the lock of a worker is missing, by incarnation.
        self._missing: dict[str, float] = {}
        #: When (monotonic) the first of them may be presumed dead.
        self._presumed_at = math.inf
        #: Dead workers at the last look whose rows were not given back yet.
        self._unfinished: set[str] = set()

    def update(self, peers: Sequence[Peer], session_age: float | None) -> list[DeadWorker]:
        """What the workers table tells now; who is presumed dead by it.

        ``session_age``: for how many seconds this worker has held its own lock. After a restart or a failover of the
        server, or where somebody ended every session, all locks are missing at once: a worker without an old
        session suspects nobody.
        """
        self._known, self._presumed_at, now = list(peers), math.inf, time.monotonic()
        if self.suspicion is None or session_age is None or session_age < self.suspicion:
            self._missing = {}
            return []
        missing = [peer for peer in peers if peer.lock_missing]
        self._missing = {peer.incarnation: self._missing.get(peer.incarnation, now) for peer in missing}
        dead = []
        for peer in missing:
            lock_left = self.suspicion - (now - self._missing[peer.incarnation])
            silence_left = self._beat_every + self.suspicion - peer.silent_for
            if (left := max(lock_left, silence_left)) <= 0:
                dead.append(DeadWorker(peer.id, peer.incarnation, seen_at=peer.seen_at))
            else:
                self._presumed_at = min(self._presumed_at, now + left)
        return dead

    @property
    def suspects(self) -> bool:
        """Somebody's lock is missing: look again soon."""
        return bool(self._missing)

    def pause(self, longest: float) -> float:
        """Seconds until the next look: at most ``longest``, and no later than a suspect may be presumed dead."""
        return min(longest, self._presumed_at - time.monotonic())

    def find_unfinished(self, peers: Sequence[Peer]) -> list[DeadWorker]:
        """Dead workers whose rows nobody has given back, at two looks one after the other.

        The worker that declared them dead has the time between the two looks. It may have died or lost the database.
        """
        dead = [peer for peer in peers if peer.dead]
        again = [
            DeadWorker(peer.id, peer.incarnation, declared=True)
            for peer in dead
            if peer.incarnation in self._unfinished
        ]
        self._unfinished = {peer.incarnation for peer in dead}
        return again

    def find_gone(self) -> list[DeadWorker]:
        """Workers whose process this host's kernel does not have any more, at two looks one after the other.

        A supervisor reports such a death, too, and knows which rows ran. The second look leaves it time for that.
        """
        gone = {peer.incarnation: peer for peer in self._known if process_is_gone(peer.process)}
        dead = [DeadWorker(peer.id, peer.incarnation) for key, peer in gone.items() if key in self._gone]
        self._gone = set(gone) - {one.incarnation for one in dead}
        self._known = [peer for peer in self._known if peer.incarnation not in {one.incarnation for one in dead}]
        return dead
