"""A schedule decides which actor moves at every point. A seed decides the schedule.

An actor (a worker, or its heartbeat) stops before each statement and each commit, and waits for its turn. Only one
actor moves at a time; all others are stopped or wait for a lock in the database. So the seed determines everything: the
same seed gives the same schedule again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

from ..clock import Clock

#: More steps than any schedule needs to finish.
_MOST = 3000
#: Seconds after which a statement that has not returned is checked: it may wait for a lock.
_PROBE, _AGAIN, _PATIENCE = 0.02, 0.001, 20.0

#: What may happen at a turn: continue; the process dies; the connection is lost, before the commit or just after it.
GO, DIE, CUT, UNHEARD = "go", "die", "cut", "unheard"


class Died(BaseException):
    """The actor's process was killed, and its memory is lost."""


class Broken(Exception):
    """A rule was broken."""


class Actor:
    """An actor: a session with the database, and the point that it has reached."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Resolved at this actor's turn. ``where`` is the kind of point, ``what`` the step that comes next.
        self.turn: asyncio.Future[str] | None = None
        self.where, self.what = "", ""
        #: Inside a statement that waits for another actor's lock.
        self.blocked = False
        self.over = False
        #: Its turn has come, and it has not sent a statement since.
        self.fresh = False
        self.pid = 0

    @property
    def moving(self) -> bool:
        return not (self.over or self.blocked or self.turn is not None)


class Schedule:
    """One order of events, decided while it runs."""

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
        #: A transaction has ended and released its locks.
        self.freed = False
        #: The actor that holds SQLite's write lock.
        self.writer: Actor | None = None

    async def point(self, actor: Actor, where: str, what: str) -> str:
        """Wait for this actor's turn and return what happens at it."""
        if where == "send" and actor.fresh:
            actor.fresh = False
            return GO
        actor.where, actor.what = where, what
        actor.turn = asyncio.get_running_loop().create_future()
        self._stirred.set()
        return await actor.turn

    async def run(self, lives: Sequence[tuple[Actor, Callable[[], Coroutine[Any, Any, None]]]]) -> None:
        """Run all actors until they finish. Raises Broken if they never do."""
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
            raise Broken(f"the schedule did not end after {_MOST} steps")
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
        """Wait until every actor is stopped at a point or waits for a lock."""
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
                # While one actor moves, its statement may release the locks that the others wait for.
                if all(actor.pid in waiting for actor in self._actors if actor.moving):
                    for actor in moving:
                        actor.blocked = actor.moving
                        self.waits += actor.blocked
            if loop.time() > ends:
                raise Broken(
                    f"{', '.join(a.name for a in self._actors if a.moving)} did not return within {_PATIENCE} s"
                )

    def _stuck(self) -> bool:
        left = [actor for actor in self._actors if not actor.over]
        return bool(left) and all(actor.blocked for actor in left)

    def _step(self) -> None:
        """Let one actor continue, or advance the clock."""
        chance = self.random
        ready = [a for a in self._actors if a.turn is not None and not (a.where == "locked" and self.writer)]
        # A statement that is about to be sent already contains the time.
        sent = any(actor.turn is not None and actor.where in ("send", "locked") for actor in self._actors)
        if self.moves and not sent and chance.random() < 0.07:
            by = chance.choice(self.moves)
            self.clock.advance(by)
            self.steps.append(f"clock: {by.total_seconds():g} s pass")
            return
        actor = chance.choice(ready)
        happens = self._fault(actor.where) if self.faults else GO
        ending = {
            GO: "",
            DIE: ", and is killed",
            CUT: ", and loses its connection",
            UNHEARD: ", and loses its connection after it",
        }[happens]
        self.steps.append(f"{actor.name}: {actor.what}{ending}")
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
