"""The worker: claim, dispatch, settle. One loop over environments in order and lanes by priority, strictly.

A round settles what has ended and, where something may be ready and there is room for it, claims from the top
down. Between rounds the worker waits: for a run to end, for a wake-up, or for the next poll.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..claim import Claim, Report, Settlement
from ..clock import Clock
from ..errors import Busy, DatabaseError, DeclarationError, Refused, Unreachable, WorkerIdTaken
from ..events import Events
from ..lane import Lane
from ..store import Database, probe
from .execute import Execution, unhooked
from .foreman import Foreman
from .held import Held
from .isolate import importable
from .job import Job
from .place import Crew, Place
from .resources import Resource, Resources
from .slots import AUTO_BATCH, Capacity, Slots
from .tally import Tally
from .tasks import TaskExecution
from .traced import trace_held
from .wake import Bell

_BATCH, _BACKLOG = 1000, 2000  # outcomes per statement, and unwritten ones before claiming stops
_LOCKED_AGAIN, _STUCK_AGAIN, _REST, _NO_RUN_AFTER = 0.5, 10.0, 10.0, 1.0


class Worker:
    """One worker process's engine. ``run`` works until stopped, or, draining, until nothing is ready or running."""

    def __init__(
        self,
        environments: Sequence[tuple[str, Database]],
        lanes: Sequence[Lane],
        *,
        resources: dict[str, Resource] | None = None,
        events: Events | None = None,
        clock: Clock | None = None,
        worker_id: str | None = None,
        incarnation: str | None = None,
        replaces: str | None = None,
        concurrency: int | None = None,
        drain: bool = False,
        grace: float = 30.0,
        register: bool = True,
        expendable: bool = False,
    ) -> None:
        self.id = worker_id or f"unified-worker-{uuid.uuid4()}"
        self.incarnation = incarnation or uuid.uuid4().hex[:8]
        self.events = events or Events()
        self.drain, self.grace = drain, grace
        #: The process is the worker's own: it may be ended when nothing else helps, and is then started again.
        self.expendable = expendable
        self.bell = Bell()
        self.resources = Resources(resources or {})
        self.capacity = Capacity(concurrency)
        self.tally = Tally(self.events, self.id)
        ordered = sorted(lanes, key=lambda lane: lane.priority)
        self.slots = {lane.name: Slots(lane, self.capacity, self._ended, self.crashed, self.id) for lane in ordered}
        self.places = [Place(name, db, [ln for ln in ordered if ln.serves(name)]) for name, db in environments]
        self._foreman = Foreman(self)
        self._crew = Crew(
            self.events,
            clock or Clock(),
            self.tally,
            self._foreman.snapshot,
            self._lost_in_thread,
            self.bell.ring,
            self._foreman.end_if_hung,
            register,
            replaces,
        )
        #: Where a drain ended before all was done: rows that are paused without end, by environment and lane.
        self.held_back: list[dict[str, Any]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._started = self.stopping = self.hurried = self.recycling = False
        self._later: list[tuple[float, Held, Settlement]] = []
        self._above: list[Held] = []
        self._where: dict[int, Place] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._crash: BaseException | None = None
        self._under_way: asyncio.Future[None] | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self.ticked = time.monotonic()
        #: It has looked everywhere once: what is wrong with a declaration was told by then.
        self.started = asyncio.Event()
        for lane in ordered:
            self.resources.check(lane.resources(), f"lane {lane.name!r}")
            if lane.isolation == "process":
                importable(lane)

    # -- life

    async def run(self) -> Tally:
        """Work. Returns what was done."""
        self._loop = asyncio.get_running_loop()
        self._tick()
        try:
            while not self.stopping:
                await self._round_or_stop()
                self._started = True
                self.started.set()
                if self._crash is not None:
                    raise self._crash
                if self.drain and await self._foreman.drained():
                    break
                if not self.stopping:
                    await self.bell.wait(self._pause())
            await self._foreman.wind_down()
        finally:
            await self._foreman.close()
            if self._ticking is not None:
                self._ticking.cancel()
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
        return self.tally

    def _tick(self) -> None:
        """A sign that the loop is not blocked, for the heartbeat thread to see."""
        self.ticked = time.monotonic()
        if self._loop is not None:
            self._ticking = self._loop.call_later(0.5, self._tick)

    async def _round_or_stop(self) -> None:
        """A round; a second stop does not wait for the statement that is under way."""
        self._under_way = asyncio.ensure_future(self._round())
        try:
            await self._under_way
        except asyncio.CancelledError:
            if not self.hurried:
                raise

    def stop(self) -> None:
        """First call: claim nothing more, let runs finish. Second call: at once."""
        self.hurried = self.stopping
        self.stopping = True
        if self.hurried and self._under_way is not None:
            self._under_way.cancel()
        self.bell.ring()

    # -- a round

    async def _round(self) -> None:
        now = time.monotonic()
        for place in self.places:
            place.fall_due(now)
        self.retry_later(now)
        self.settle_all()
        self._foreman.watch(now)
        if self.stopping or not any(self._wanted(place, now) for place in self.places):
            return
        self._above = []
        # All are opened before the first row is claimed anywhere: what is wrong is told before anything is done.
        new = [place for place in self.places if not place.opened and time.monotonic() >= place.retry_at]
        await asyncio.gather(*(self._guarded(place, self._open(place)) for place in new))
        for place in self.places:
            # All above it are looked at too: nothing below may start while something above is ready.
            if time.monotonic() >= place.retry_at:
                await self._guarded(place, self._take(place))

    async def _guarded(self, place: Place, step: Coroutine[Any, Any, None]) -> None:
        """An environment that is away does not stop the others; it is tried again, and again later."""
        try:
            await step
            place.served()
        except (DeclarationError, WorkerIdTaken) as error:
            # At the start that is for the user to mend; but one that comes back wrong must not end the others' work.
            if not self._started:
                raise
            place.failed()
            self.events.emit("environment_wrong", logging.ERROR, environment=place.name, error=str(error))
        except DatabaseError as error:
            if self.drain and not place.opened and not isinstance(error, Busy):
                raise
            if isinstance(error, Unreachable):
                place.lost(self._crew)
                self.events.emit("environment_down", logging.ERROR, environment=place.name, error=error.message)
                return
            name = "statement_refused" if isinstance(error, Refused) else "environment_busy"
            pause = round(place.failed(), 1)
            self.events.emit(name, logging.ERROR, environment=place.name, error=error.message, retry_in=pause)

    def _wanted(self, place: Place, now: float) -> bool:
        """Whether a look is worth a statement now."""
        if now < place.retry_at:
            return False
        if not place.opened or place.look or now >= place.next_poll:
            return True
        return any(held.more and self._ask(held) > 0 for held in place.held)

    async def _open(self, place: Place) -> None:
        await place.open(self._crew)
        for held in place.held:
            kind = TaskExecution if held.store.lane.own else Execution
            execution = kind(held, self.resources, self._thread_pool)
            if self.events.tracer is not None:
                trace_held(held, self.events.tracer)
            self.slots[held.store.lane.name].executions[id(held)] = execution
            self._where[id(held)] = place

    async def _take(self, place: Place) -> None:
        """Claim what is ready, from the lane of highest priority down, as far as there is room."""
        if not place.opened or self._overtaken():
            return
        place.looked()
        for held in place.held:
            if claims := await self.recover(held):
                self.slots[held.store.lane.name].put(held, claims)
        open_to = [held for held in place.held if self._ask(held) > 0]
        for held in place.held:
            held.more = held not in open_to  # not looked at: there may be some
        if len(open_to) > 1:
            ready = await probe(place.database, [held.store for held in open_to])
            open_to = [held for held in open_to if held.store in ready]
        for held in place.held:
            if held in open_to and not self._overtaken():
                await self._claim_or_rest(place, held)
            elif held in open_to:
                held.more = True
            self._above.append(held)

    def _overtaken(self) -> bool:
        """Room has come up, while this round went down, for a lane above that has more: the next round is for it."""
        return any(held.more and self._ask(held) > 0 for held in self._above)

    def _ask(self, held: Held) -> int:
        """How many rows to take now: what can start, and, for the topmost lane, a little more to have at hand."""
        if held.rests_until > time.monotonic() or len(held.outcomes) > _BACKLOG:
            return 0  # what has ended is written before more is begun
        slots = self.slots[held.store.lane.name]
        room = slots.room()
        if held.gates is not None:
            room -= held.gates.occupied(len(held.outcomes))
        if not self._may_fetch_ahead(held):
            return max(room, 0)
        most = slots.lane.batch or AUTO_BATCH
        ask = min(room + slots.ahead(), most)
        # With work at hand, small claims would only cost round trips.
        return 0 if slots.buffered and ask < most // 2 else max(ask, 0)

    def _may_fetch_ahead(self, held: Held) -> bool:
        """Only where nothing is higher, so that nothing can be kept waiting, and where waiting rows are renewed; and
        never through a gate, whose key a waiting row would take up.
        """
        first = self.places[0].held
        return bool(first) and first[0] is held and held.store.binding.renew != "none" and held.gates is None

    async def _claim(self, held: Held) -> None:
        slots = self.slots[held.store.lane.name]
        wanted = self._ask(held)
        most = slots.lane.batch or AUTO_BATCH
        if wanted > 0 and slots.lane.backfills is not None and slots.lane.backfill_pace is not None:
            rows, time_ = slots.lane.backfill_pace
            wanted, held.rests_until = min(wanted, rows), time.monotonic() + time_.total_seconds()
        while wanted > 0:
            ask = min(wanted, most)
            claims = await held.store.claim(ask)
            held.more = len(claims) == ask
            if held.gates is not None:
                held.gates.held_back = not held.more
            if claims:
                self._forget_older(held, claims)
                held.add(claims)
                self.tally.claimed(held, len(claims))
                slots.put(held, claims)
            if not held.more:
                break
            wanted -= ask

    async def _claim_or_rest(self, place: Place, held: Held) -> None:
        """A lane whose claim the database refuses does not stop the others."""
        try:
            await self._claim(held)
            held.refused = None
        except Refused as error:
            held.rests_until, held.refused = time.monotonic() + _REST, error.message
            self.events.emit(
                "statement_refused", logging.ERROR, environment=place.name, lane=held.store.lane.name,
                error=error.message, retry_in=_REST, hint="rowmill sql shows the statement",
            )  # fmt: skip
        except (Unreachable, asyncio.CancelledError):
            held.unsure = held.store.marked
            raise

    async def recover(self, held: Held) -> list[Claim]:
        """After a lost reply: rows that were claimed for us all the same are ours."""
        if not held.unsure:
            return []
        # A lane beside this one on the same table may hold rows that look the same.
        beside = [
            o for o in self._where[id(held)].held if o.store.binding.table.fullname == held.store.binding.table.fullname
        ]
        # As of before the question: what is settled while the answer is on its way shows in it as still running.
        known = {claim.key for other in beside for claim in other.all()}
        found = await held.store.mine()
        claims = [c for c in found if c.key not in known and not any(other.find(c.key) for other in beside)]
        held.unsure = False
        held.add(claims)
        self.tally.claimed(held, len(claims))
        return claims

    def _forget_older(self, held: Held, claims: list[Claim]) -> None:
        """A row this process still works on, that came back to it: the older run has lost it."""
        for claim in claims if len(held) else ():
            older = held.find(claim.key)
            if older is not None:
                self._lost(held, older)

    def _thread_pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            count = sum(slots.lane.concurrency for slots in self.slots.values())
            self._threads = ThreadPoolExecutor(min(count, self.capacity.limit), "rowmill-handler")
        return self._threads

    # -- the end of a run

    def _ended(self, held: Held, claim: Claim, job: Job, settlement: Settlement | None) -> None:
        if claim.lost and job.finished is None:
            held.drop([claim])
            self.tally.lost(held, claim)
        elif settlement is not None:
            held.outcomes.append(settlement)
            self._settle_soon(held)
        elif job.finished is not None:  # and stands, even if a renewal that came too late took it for lost
            self.tally.settled(held, [job.finished])
            if held.gates is not None:
                held.gates.ended([job.finished])
                self._settle_soon(held)
            self._follow(held, [job.finished])
        self.bell.ring()

    def crashed(self, error: BaseException) -> None:
        """The engine itself failed: better gone, and started again, than holding rows that nobody works on."""
        self._crash = error
        self.bell.ring()

    def _lost_in_thread(self, held: Held, claim: Claim) -> None:
        claim.lost = True  # a handler that looks, sees it at once, even while the loop is blocked
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._lost, held, claim)

    def _lost(self, held: Held, claim: Claim) -> None:
        if held.find(claim.key) is claim:
            claim.lost = True
            held.drop([claim])
            self.slots[claim.lane].lose(claim)

    # -- settle

    def settle_all(self) -> None:
        """Write what has ended, everywhere."""
        for place in self.places:
            for held in place.held:
                self._settle_soon(held)

    def _settle_soon(self, held: Held) -> None:
        """Write what has ended, beside the next claim; what ends while that is under way makes the next batch."""
        place = self._where[id(held)]
        if held.unwritten and held.settling is None and time.monotonic() >= place.retry_at:
            held.settling = asyncio.create_task(self._settle_held(place, held))

    async def _settle_held(self, place: Place, held: Held) -> None:
        try:
            while held.unwritten and time.monotonic() >= place.retry_at:
                await self._guarded(place, self._settle(place, held))
        except Exception as error:
            self.crashed(error)
        finally:
            held.settling = None
            self.bell.ring()

    def unsettled(self) -> bool:
        """Whether some outcome is not written yet."""
        waiting = any(held.unwritten or held.settling for place in self.places for held in place.held)
        return waiting or bool(self._later)

    async def _settle(self, place: Place, held: Held) -> None:
        batch, held.outcomes = held.outcomes[:_BATCH], held.outcomes[_BATCH:]
        if held.gates is not None:
            held.gates.on_the_way = len(batch)
        try:
            await self._write(place, held, batch)
        finally:
            if held.gates is not None:
                held.gates.on_the_way = 0
        if held.gates is not None:
            ended = bool(held.gates.unheard)
            for turned in await held.gates.tell():
                self.tally.turned(held, turned)
            place.look = place.look or (ended and held.gates.held_back)

    async def _write(self, place: Place, held: Held, batch: list[Settlement]) -> None:
        for settlement in batch:
            if settlement.claim.lost:
                self.tally.lost(held, settlement.claim)
        batch = [settlement for settlement in batch if not settlement.claim.lost]
        claims = [settlement.claim for settlement in batch]
        if not batch:
            return
        await held.begin_settle(claims)
        try:
            report = await held.store.settle(batch)
        except BaseException:
            held.outcomes[:0] = batch
            raise
        finally:
            held.end_settle(claims)
        self._account(place, held, report)

    def _account(self, place: Place, held: Held, report: Report) -> None:
        """What became of a batch: counted, and what could not be written yet is kept for later."""
        ended = [*report.written, *report.refused]
        held.drop([settlement.claim for settlement in (*ended, *report.lost)])
        self.tally.settled(held, ended)
        if held.gates is not None:
            held.gates.ended(ended)
        self._follow(held, ended)
        for settlement in ended:
            place.will_be_due(settlement)
        for settlement in report.lost:
            self.tally.lost(held, settlement.claim)
        now = time.monotonic()
        if "run_after" not in held.store.binding.roles and ended and not any(s.kind == "done" for s in ended):
            # Nothing in the table keeps these rows back: without a pause they would be claimed again at once, for ever.
            delays = [s.delay.total_seconds() for s in ended if s.delay is not None]
            held.rests_until = now + min(max(delays, default=0.0), _NO_RUN_AFTER)
        self._later += [(now + _LOCKED_AGAIN, held, settlement) for settlement in report.locked]
        for settlement, words in report.stuck:
            self._later.append((now + _STUCK_AGAIN, held, settlement))
            self.events.emit(
                "settle_refused", logging.ERROR, lane=held.store.lane.name, id=settlement.claim.id,
                outcome=settlement.kind, error=words, hint="the table does not take this state; it is tried again",
            )  # fmt: skip
        for settlement, error in report.unhooked:
            held.outcomes.append(unhooked(held.store, settlement, error))
            self.bell.ring()

    @staticmethod
    def _follow(held: Held, ended: list[Settlement]) -> None:
        """Jobs of rowmill's own table have ended: others may have waited for them."""
        if held.follow is not None and ended:
            held.follow.settled(held.store.binding.columns, ended)

    def retry_later(self, now: float) -> None:
        """Outcomes that could not be written, because somebody had the row locked, are tried again."""
        ripe = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, held, settlement in ripe:
            held.outcomes.append(settlement)

    # -- time

    def _pause(self) -> float:
        """Until the next thing that is known to come."""
        now = time.monotonic()
        times = [place.next_time() for place in self.places] + [entry[0] for entry in self._later]
        if any(self._wanted(place, now) for place in self.places):
            times.append(now)
        if self.drain:
            times.append(now + 0.2)
        if any(slots.busy for slots in self.slots.values()):
            times.append(now + 1.0)
        return min(times) - now
