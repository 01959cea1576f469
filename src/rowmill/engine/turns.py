"""The fair order of environments: they take turns at a worker's free slots, so that a busy one starves no other."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import DeclarationError, RowmillError, WorkerIdTaken
from ..store.lane.claim import Claim, Settlement

if TYPE_CHECKING:
    from .environment import Environment
    from .lane_state import LaneState
    from .worker import Worker

_OPENING = 16  # environments that are opened at once
_SLOW = 0.5  # seconds after which a claim without a reply keeps no slots from other environments
_SHORTEST = 0.001  # seconds that a run counts for at least
_LAST = 2.0  # seconds for visits that are under way when the worker stops
_FIRST_LOOKS = 5.0  # seconds that the first round waits at most until every environment was looked at


@dataclass(frozen=True)
class FairOrder:
    """How a worker serves its environments in turns."""

    #: The weight of an environment: one of weight 2 gets twice the slot time of one of weight 1.
    weight: Callable[[str], float]


class Turns:
    """Gives free slots to environments by weighted fair queueing.

    Each environment has a tag, the slot time that it has used divided by its weight. The one with the lowest tag comes
    first. One that had nothing to do starts at the lowest tag of the others: it saves up nothing.

    Every environment is visited in a task of its own, so one that is slow or does not answer delays no other.
    """

    def __init__(self, worker: Worker, order: FairOrder) -> None:
        self._worker, self._weight = worker, order.weight
        self._visits: dict[Environment, asyncio.Task[None]] = {}
        self._since: dict[Environment, float] = {}
        self._tags: dict[Environment, float] = {}
        #: The lowest tag of those that had rows at the last look.
        self._served = 0.0
        #: Environments that may have ready rows.
        self._contenders: set[Environment] = set()
        self._contending_weight = 1.0
        #: How many rows are asked for in claims without a reply, by lane.
        self._asked: dict[str, int] = {}
        self._wrong: dict[Environment, DeclarationError] = {}
        #: The tag that each environment had before its last claim, and the lowest tag of those that have rows: nobody
        #: gets further ahead of it than by one claim.
        self._before: dict[Environment, float] = {}
        self._lowest = math.inf

    @property
    def busy(self) -> bool:
        """Some environment is being looked at."""
        return bool(self._visits)

    def may_start(self, environment: Environment, now: float) -> bool:
        """Whether to look at this environment now."""
        return not self.has_to_wait(environment) and self._worker.wanted(environment, now)

    def has_to_wait(self, environment: Environment) -> bool:
        """It is being looked at, others come first, or enough are being opened. The end of a visit wakes the worker."""
        # What runs took replaces the estimate, so the tag may be lower than before the last claim.
        ahead = min(self._before.get(environment, 0.0), self._tag(environment)) > self._lowest
        return ahead or environment in self._visits or (not environment.opened and self._opening >= _OPENING)

    @property
    def _opening(self) -> int:
        return sum(not environment.opened for environment in self._visits)

    async def start(self, now: float) -> None:
        """Visit environments that may have work, those that had least first."""
        worker, environments = self._worker, self._worker.environments
        self._contenders = {*(one for one in environments if self._worker.wanted(one, now)), *self._visits}
        have_rows = [one for one in self._contenders if one.opened and not one.idle and not self._is_slow(one, now)]
        self._lowest = min(map(self._tag, have_rows), default=math.inf)
        if have_rows:
            self._served = max(self._served, self._lowest)
        wanted = [environment for environment in self._contenders if self.may_start(environment, now)]
        self._contending_weight = sum(self._weight(environment.name) for environment in self._contenders) or 1.0
        for environment in sorted(wanted, key=self._tag):
            if not self.has_to_wait(environment):
                self._visit(environment, self._serve(environment))
        for environment in environments:
            if environment not in self._visits and environment.may_rest(now, worker.rest_after):
                self._visit(environment, environment.sleep() if environment.sleeps else environment.rest())
        if not self._worker.started.is_set() and self._visits:
            await asyncio.wait(self._visits.values(), timeout=_FIRST_LOOKS, return_when=asyncio.FIRST_COMPLETED)

    def _visit(self, environment: Environment, step: object) -> None:
        task = self._visits[environment] = asyncio.create_task(self._visited(environment, step))
        self._since[environment] = time.monotonic()
        slow = asyncio.get_running_loop().call_later(_SLOW, self._worker.wake)  # others need not wait for it any more
        task.add_done_callback(lambda _: self._left(environment, slow))

    def _left(self, environment: Environment, slow: asyncio.TimerHandle) -> None:
        slow.cancel()
        self._visits.pop(environment, None)
        self._worker.wake()

    def _is_slow(self, environment: Environment, now: float) -> bool:
        return environment in self._visits and now - self._since[environment] >= _SLOW

    def _tag(self, environment: Environment) -> float:
        return self._tags.setdefault(environment, self._served)

    def forget(self, environment: Environment) -> None:
        """An environment was removed."""
        for known in (self._tags, self._before, self._since):
            known.pop(environment, None)
        self._wrong.pop(environment, None)

    async def idle(self, environment: Environment) -> None:
        """Wait until an environment is not being looked at."""
        if (visit := self._visits.get(environment)) is not None:
            await asyncio.wait([visit])

    async def stop(self, *, wait: bool) -> None:
        """Let visits end, and cancel those that take long. Rows whose claim got no reply are found by the shutdown."""
        visits = list(self._visits.values())
        if visits and wait:
            await asyncio.wait(visits, timeout=_LAST)
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)

    # -- one environment

    async def _visited(self, environment: Environment, step: object) -> None:
        worker = self._worker
        try:
            await worker.guarded(environment, step, tells_all=True)  # type: ignore[arg-type]
            self._wrong.pop(environment, None)
        except DeclarationError as error:
            # One wrong environment must not stop the others. If all are wrong at the start, the declaration is.
            pause = round(environment.failed(), 1)
            self._wrong[environment] = error
            fields = {"environment": environment.name, "error": error.message, "retry_in": pause}
            if len(self._wrong) == len(worker.environments) and not any(e.opened for e in worker.environments):
                worker.fail(error)
            else:
                worker.events.emit("environment_wrong", logging.ERROR, **fields)
        except WorkerIdTaken as error:
            worker.fail(error)
        except RowmillError as error:
            if worker.drain:
                worker.fail(error)
            else:
                raise
        except Exception as error:
            worker.fail(error)

    async def _serve(self, environment: Environment) -> None:
        """Open the environment if it has work, and claim its share."""
        worker = self._worker
        if not environment.opened:
            # A drain must see every environment: what is left there may be waiting for another worker.
            if not await environment.has_work() and not worker.drain:
                return
            if worker.stopping:
                return
            await worker.open(environment)
        environment.above = []
        tag = max(self._tag(environment), self._served if environment.idle else 0.0)
        self._tags[environment] = tag
        before = environment.claimed
        await worker.claim_from(environment)
        environment.idle = environment.claimed == before and not any(one.more for one in environment.lane_states)

    def _charge(self, lane_state: LaneState, rows: int) -> None:
        """Rows were claimed: they will use up so much slot time."""
        if not rows:
            return
        environment = lane_state.environment
        environment.claimed += rows
        environment.worked_at = time.monotonic()
        estimated = rows * max(lane_state.run_seconds or lane_state.slots.took, _SHORTEST)
        lane_state.estimated_seconds += estimated
        lane_state.estimated_rows += rows
        self._before[environment] = tag = self._tag(environment)
        self._tags[environment] = tag + estimated / self._weight(environment.name)

    def ran(self, lane_state: LaneState, ended: Sequence[Settlement]) -> None:
        """Runs have ended: what they took replaces the estimate."""
        environment, rows = lane_state.environment, len(ended)
        environment.worked_at = time.monotonic()
        took = sum(settlement.duration for settlement in ended)
        mean = took / rows
        lane_state.run_seconds = 0.7 * lane_state.run_seconds + 0.3 * mean if lane_state.run_seconds else mean
        estimated = lane_state.estimated_seconds * min(rows / max(lane_state.estimated_rows, 1), 1.0)
        lane_state.estimated_seconds -= estimated
        lane_state.estimated_rows = max(lane_state.estimated_rows - rows, 0)
        self._tags[environment] = self._tag(environment) + (took - estimated) / self._weight(environment.name)

    # -- how much

    def alone(self, environment: Environment) -> bool:
        """No other environment may have ready rows."""
        return not self._contenders - {environment}

    async def claim(self, lane_state: LaneState, count: int) -> list[Claim]:
        """Claim so many rows. Their slots are kept for them meanwhile."""
        replied = self._asking(lane_state, count)
        try:
            claims = await lane_state.store.claim(count)
        finally:
            replied()
        self._charge(lane_state, len(claims))
        return claims

    def share(self, lane_state: LaneState, room: int, prefetch: int) -> int:
        """How many rows this environment may claim now: its part, by weight, of what could be started."""
        environment = lane_state.environment
        room -= self._asked.get(lane_state.name, 0)
        most = lane_state.slots.most
        if room + prefetch <= 0:
            return 0
        if self.alone(environment):
            # With work at hand, small claims would only cost round trips.
            ask = min(room + prefetch, most)
            return 0 if lane_state.slots.stocked and ask < most // 2 else ask
        part = self._weight(environment.name) / max(self._contending_weight, self._weight(environment.name))
        ask = min(math.ceil((room + prefetch) * part), most)
        # What waits in the buffer of the lane is as good as running: its own part of it is enough.
        return 0 if room <= 0 and lane_state.slots.buffered else ask

    def _asking(self, lane_state: LaneState, count: int) -> Callable[[], None]:
        """Keep slots for rows that are being claimed: until the returned function is called, or the reply is late."""
        name, kept = lane_state.name, [count]
        self._asked[name] = self._asked.get(name, 0) + count

        def done() -> None:
            late.cancel()
            count, kept[0] = kept[0], 0
            self._asked[name] -= count
            if count:
                self._worker.wake()

        late = asyncio.get_running_loop().call_later(_SLOW, done)
        return done
