"""Which other workers are dead or seem to be, so that their rows need not wait for a lease.

A death is *known* if a supervisor reports it, or if this host's kernel no longer has the process. It is *presumed* on
PostgreSQL: every worker holds an advisory lock on its listening session. If that lock is missing for the Mill's
``suspicion``, and the worker's heartbeat is late by as much, its rows are taken back, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...store.own.process_identity import process_is_gone
from ...store.own.workers import Peer


@dataclass(frozen=True, slots=True)
class DeadWorker:
    """A worker process that is known or presumed to be dead."""

    id: str
    incarnation: str
    #: The marks of the rows that it was running; None: unknown, so it may have run any of its rows.
    running: frozenset[int] | None = None
    #: Its last heartbeat, if its death is presumed: a later heartbeat proves that it is alive.
    seen_at: str | None = None
    #: Another worker declared it dead, and may have failed before it gave the rows back.
    declared: bool = False


class Peers:
    """The other workers of one environment, and since when each of them seems dead."""

    def __init__(self, suspicion: float | None, beat_every: float) -> None:
        #: Seconds for which a worker's lock must be missing; None: a missing lock means nothing.
        self.suspicion = suspicion
        #: Seconds between two heartbeats of a live worker. Until the next one is late, silence means nothing.
        self._beat_every = beat_every
        self._known: list[Peer] = []
        self._gone: set[str] = set()
        #: Since when (monotonic) a worker's lock is missing, by incarnation.
        self._missing: dict[str, float] = {}
        #: When (monotonic) the first of these may be presumed dead.
        self._presumed_at = math.inf
        #: Dead workers at the last check whose rows were not given back yet.
        self._unfinished: set[str] = set()

    def update(self, peers: Sequence[Peer], session_age: float | None) -> list[DeadWorker]:
        """Read the workers table. Returns the workers that are now presumed dead.

        ``session_age``: for how many seconds this worker has held its own lock. After a restart or a failover of the
        server, or if someone ended every session, all locks are missing at once. So a worker without an old session
        suspects no other worker.
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
        """Whether a worker's lock is missing, so that the next check should come soon."""
        return bool(self._missing)

    def pause(self, longest: float) -> float:
        """Seconds until the next check: at most ``longest``, and no later than a suspect may be presumed dead."""
        return min(longest, self._presumed_at - time.monotonic())

    def find_unfinished(self, peers: Sequence[Peer]) -> list[DeadWorker]:
        """Dead workers whose rows nobody has given back, at two checks in a row.

        The worker that declared them dead has the time between the two checks to do it. It may have died or lost the
        database.
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
        """Workers whose process this host's kernel no longer has, at two checks in a row.

        A supervisor also reports such a death, and knows which rows were running. The second check leaves it time for
        that.
        """
        gone = {peer.incarnation: peer for peer in self._known if process_is_gone(peer.process)}
        dead = [DeadWorker(peer.id, peer.incarnation) for key, peer in gone.items() if key in self._gone]
        self._gone = set(gone) - {one.incarnation for one in dead}
        self._known = [peer for peer in self._known if peer.incarnation not in {one.incarnation for one in dead}]
        return dead
