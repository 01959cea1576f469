"""Who goes on, at every point: a schedule, decided by a seed.

An actor (a worker, or its heartbeat) stops before each statement and each commit, and waits for its turn. At any time
one of them moves; all others stand still or wait for a lock in the database. So a seed says all there is to say, and
the same seed gives the same schedule again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

from ..clock import Clock

#: More steps than any schedule has that comes to an end.
_MOST = 3000
#: Seconds after which a statement that has not come back is looked at: it may wait for a lock.
_PROBE, _AGAIN, _PATIENCE = 0.02, 0.001, 20.0

#: What may happen at a turn: go on; the process is gone; the connection is gone, before the commit or just after it.
GO, DIE, CUT, UNHEARD = "go", "die", "cut", "unheard"


class Died(BaseException):
    """The actor's process is gone, with all that it knew."""


class Broken(Exception):
    """Something that must never happen has happened."""


class Actor:
    """A session with the database, and where it stands."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Waits for its turn: at a point of this kind, about to do this.
        self.turn: asyncio.Future[str] | None = None
        self.where, self.what = "", ""
        #: In a statement that waits for somebody else's lock.
        self.blocked = False
        self.over = False
        #: Its turn has come, and it has said nothing to the database since.
        self.fresh = False
        self.pid = 0

    @property
    def moving(self) -> bool:
        return not (self.over or self.blocked or self.turn is not None)


class Schedule:
    """One order of events, made up as it goes on."""

    def __init__(
        self,
        seed: int,
        clock: Clock,
        moves: Sequence[timedelta],
        blocked: Callable[[Sequence[int]], Awaitable[set[int]]] | None = None,
        *,
        faults: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.clock, self.moves, self.faults = clock, moves, faults
        self.steps: list[str] = []
        self.waits = 0
        self._blocked = blocked
        self._actors: list[Actor] = []
        self._stirred = asyncio.Event()
        self._failed: BaseException | None = None
        #: A transaction has ended, and with it its locks.
        self.freed = False
        #: Who holds SQLite's write lock.
        self.writer: Actor | None = None

    async def point(self, actor: Actor, where: str, what: str) -> str:
        """Stop here until it is this actor's turn. What happens then."""
        if where == "send" and actor.fresh:
            actor.fresh = False
            return GO
        actor.where, actor.what = where, what
        actor.turn = asyncio.get_running_loop().create_future()
        self._stirred.set()
        return await actor.turn

    async def run(self, lives: Sequence[tuple[Actor, Callable[[], Coroutine[Any, Any, None]]]]) -> None:
        """Let them all live to their ends."""
        self._actors = [actor for actor, _ in lives]
        tasks = [asyncio.ensure_future(self._live(actor, life)) for actor, life in lives]
        try:
            for _ in range(_MOST):
                await self._quiet()
                if self._failed is not None:
                    raise self._failed
                if all(actor.over for actor in self._actors):
                    return
                self._step()
            raise Broken(f"no end after {_MOST} steps")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _live(self, actor: Actor, life: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await life()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failed = self._failed or error
        finally:
            actor.over = True
            self._stirred.set()

    async def _quiet(self) -> None:
        """Until everybody stands, or waits for a lock that another one has."""
        loop = asyncio.get_running_loop()
        ends, wait = loop.time() + _PATIENCE, _PROBE
        while True:
            if self.freed:  # the lock was released just now
                self.freed = False
                for actor in self._actors:
                    if actor.blocked:
                        actor.blocked, wait = False, _AGAIN
            if not any(actor.moving for actor in self._actors):
                if self._failed is None and self._stuck():
                    raise Broken("a deadlock: every worker waits for another one's lock")
                return
            self._stirred.clear()
            timer = loop.call_later(wait, self._stirred.set)
            await self._stirred.wait()
            timer.cancel()
            moving = [actor for actor in self._actors if actor.moving and actor.pid]
            if self._blocked is not None and moving and loop.time() > timer.when():
                wait = _PROBE
                waiting = await self._blocked([actor.pid for actor in moving])
                # While one of them moves, what it does may set the others free.
                if all(actor.pid in waiting for actor in self._actors if actor.moving):
                    for actor in moving:
                        actor.blocked = actor.moving
                        self.waits += actor.blocked
            if loop.time() > ends:
                raise Broken(
                    f"{', '.join(a.name for a in self._actors if a.moving)} did not come back in {_PATIENCE} s"
                )

    def _stuck(self) -> bool:
        left = [actor for actor in self._actors if not actor.over]
        return bool(left) and all(actor.blocked for actor in left)

    def _step(self) -> None:
        """Let one of them go on, or time pass."""
        chance = self.random
        ready = [a for a in self._actors if a.turn is not None and not (a.where == "locked" and self.writer)]
        # A statement that is about to be sent has the time in it already.
        sent = any(actor.turn is not None and actor.where in ("send", "locked") for actor in self._actors)
        if self.moves and not sent and chance.random() < 0.07:
            by = chance.choice(self.moves)
            self.clock.advance(by)
            self.steps.append(f"time: {by.total_seconds():g} s pass")
            return
        actor = chance.choice(ready)
        happens = self._fault(actor.where) if self.faults else GO
        told = {GO: "", DIE: ", and is killed", CUT: ", and is cut off", UNHEARD: ", and is cut off after it"}[happens]
        self.steps.append(f"{actor.name}: {actor.what}{told}")
        turn, actor.turn = actor.turn, None
        actor.fresh = actor.where == "next"
        assert turn is not None
        turn.set_result(happens)

    def _fault(self, where: str) -> str:
        roll = self.random.random()
        if where == "inside":
            return GO
        if where == "commit":
            return UNHEARD if roll < 0.04 else CUT if roll < 0.07 else DIE if roll < 0.10 else GO
        return DIE if roll < 0.02 else CUT if roll < 0.03 and where == "send" else GO
