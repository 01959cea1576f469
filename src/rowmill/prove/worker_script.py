"""What a worker does in a schedule: the verbs of the engine's store, in an order that the seed decides.

It keeps to the engine's own rules: what it holds it settles once; an outcome whose reply was lost is sent again; after
a claim whose reply was lost it looks for rows that carry its mark; a row that was not renewed is read before it is
given up. Now and then it dies, and a new process takes its place; others are told of it, and take its rows over.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ..declare.outcome import Cancel, Dead, Release, Retry, Snooze, Wait
from ..engine.chunks import ChunkRun
from ..engine.counters import Counters
from ..engine.execute import Execution, decide
from ..engine.lane_state import LaneState
from ..engine.resources import Resources
from ..errors import Busy, Unreachable
from ..events import Events
from ..ops.row_actions import Operator, Selection
from ..store import LaneStore, set_gates
from ..store.gates import pauses
from ..store.gates.gate_binding import BoundGates
from ..store.inspect.lane_view import LaneView
from ..store.lane.claim import Claim, Settlement
from ..store.lane.row_keys import Placeholders
from ..store.lane.statements import INCARNATION
from ..store.lane.sweep import take_over
from ..store.lane.waits import WaitingRows
from .commit_checks import NEVER, WAIT, CommitChecks, Key, ObservedClaim, shown
from .schedules import DIE, Actor, Broken, Died, Schedule
from .stepped_postgres import SteppedPostgres
from .stepped_sqlite import SteppedSqlite

#: Tries again at once, as often as the engine: but nobody else moves meanwhile, so it need not wait.
_AT_ONCE = (0.0, 0.0, 0.0)
Verb = Callable[[], Coroutine[Any, Any, None]]


class ScriptedWorker:
    """One worker of a schedule."""

    def __init__(
        self,
        actor: Actor,
        store: LaneStore,
        watch: CommitChecks,
        dims: Sequence[BoundGates],
        dead: list[tuple[str, str]] | None,
        beside: Callable[[str], Coroutine[Any, Any, Any]],
        edited: str | None = None,
    ) -> None:
        assert isinstance(store.database, (SteppedPostgres, SteppedSqlite))
        self.actor, self.store, self.watch, self.dims = actor, store, watch, dims
        self.database = store.database
        self.schedule: Schedule | None = None
        self.held: list[Claim] = []
        self._outcomes: list[Settlement] = []
        self._reply_lost = self._moved = False
        self._lives, self._opened_at = 0, store.opened_at
        #: The dead processes of all workers, by id and incarnation; None: there is no workers table to write to.
        self._dead = dead if "worker" in store.binding.roles else None
        self._beside, self._edited = beside, edited
        self._id, self._presumed_dead = actor.name, False
        store.locked_pauses = _AT_ONCE
        self._operator = Operator(LaneView(store, has_workers_table=False))  # type: ignore[arg-type]
        self._operator.pause = 0.0

    async def begin(self, schedule: Schedule | None) -> None:
        """A new schedule: nothing is left of the one before."""
        self.schedule = self.database.schedule = schedule
        self.store.opened_at = self._opened_at
        self.held, self._outcomes, self._lives = [], [], 0
        await self._start()

    async def _start(self) -> None:
        """A process starts, under the id of the one before or under its own."""
        self._reply_lost = self._moved = False
        store, id = self.store, self.actor.name
        if (
            self._lives
            and self.schedule is not None
            and (store.binding.incarnated or self.schedule.random.random() < 0.5)
        ):
            id = f"{self.actor.name}~{self._lives}"
        store.sign(id)
        self._id = id.partition(INCARNATION)[0] if store.binding.incarnated else id
        await self.is_heard_of()
        store.forget_bound()
        if store.waits is not None:
            store.waits = WaitingRows(store)
        if self.dims:
            set_gates(store, self.dims)
            if (forget := getattr(store.gated, "_forget_at", None)) is not None:
                store.gated._forget_at = forget + 1e9  # type: ignore[union-attr]
        if self._lives:
            await self.database.connect()
            if column := store.binding.fence_time:  # what carries its mark and is older was another's, of the same id
                store.opened_at = (await self.database.aside(f"select {store.statements.now(column)}"))[0][0]

    async def live(self) -> None:
        """A few verbs, one after the other."""
        assert self.schedule is not None
        for _ in range(self.schedule.random.randint(3, 7)):
            name, verb = self._choose()
            try:
                if await self.schedule.point(self.actor, "next", name) == DIE:
                    raise Died
                await verb()
            except Died:
                await self.database.drop()
                await self._die()
                self._lives += 1
                self.held, self._outcomes = [], []
                await self._start()
            except Busy:
                pass

    async def _die(self) -> None:
        self.watch.died(self.store.worker if "worker" in self.store.binding.roles else self.actor.name)
        if self._dead is not None and self.schedule is not None:
            await self._register("dead")
            self._dead.append((self._id, str(self._lives)))

    async def _register(self, state: str) -> None:
        """As the workers table would have it."""
        if self._dead is None or self.schedule is None:
            return
        now, table = self.database.sql.now, self.store.statements.workers
        await self._beside(
            f"insert into {table} (id, incarnation, host, pid, lanes, started_at, seen_at, state)"
            f" values ('{self._id}', '{self._lives}', '', 0, '[]', {now}, {now}, '{state}')"
            " on conflict (id) do update set incarnation = excluded.incarnation, state = excluded.state"
        )

    # -- what it may do next

    def _choose(self) -> tuple[str, Verb]:
        assert self.schedule is not None
        chance = self.schedule.random
        verbs: list[tuple[float, str, Verb]] = [(1.0, "sweeps", self.sweep)]
        if self.store.waits is not None:
            verbs.append((1.0, "checks waiting rows", self.look))
        if self.store.binding.expires:
            verbs.append((1.0, "ends expired rows", self.expire))
        if self._dead:
            id, incarnation = chance.choice(self._dead)
            started = chance.random() < 0.5
            name = f"takes over from {id} (start {incarnation})"
            verbs.append((2.0, name, lambda: self.take_over(id, incarnation, started)))
        if self._dead is not None:
            heard = (1.0, "shows a sign of life again", self.is_heard_of)
            verbs.append(heard if self._presumed_dead else (0.5, "is presumed dead", self.is_presumed_dead))
        count = chance.randint(1, 3)
        if self._reply_lost:
            verbs.append((6.0, "looks for rows that it claimed", self.recover))
        else:
            verbs.append((1.5 if self.held else 6.0, f"claims {count}", lambda: self.claim(count)))
        if self._outcomes:
            verbs.append((6.0, "settles again", self.settle))
        elif self.held:
            some = [claim for claim in self.held if chance.random() < 0.7] or self.held[:1]
            ends = [self._end(claim) for claim in some] if self.store.lane.chunk is None else self._chunk_ends(some)
            listed = ", ".join(f"{shown(s.claim.key)} as {s.kind}" for s in ends)
            verbs.append((6.0, f"settles {listed}", lambda: self.settle(ends)))
            if self.store.binding.renew != "none":
                verbs.append((2.0, "renews", self.renew))
        key = chance.choice(sorted(self.watch.rows, key=str))
        verbs.append((0.4, f"cancels {shown(key)}", lambda: self.cancel(key)))
        if self._edited is not None:
            value = chance.choice(["a", "b"])
            verbs.append((3.0, f"edits {shown(key)} to {value}", lambda: self.edit(key, value)))
        if self.store.statements.gates is not None:
            paused = self.watch.paused is not None
            verbs.append((0.4, "resumes" if paused else "pauses", self.resume if paused else self.pause))
        _, name, verb = chance.choices(verbs, [weight for weight, _, _ in verbs])[0]
        return name, verb

    def _end(self, claim: Claim) -> Settlement:
        return decide(self.store, claim, self._ended())

    def _ended(self) -> Any:
        """What a handler returned or raised."""
        assert self.schedule is not None
        ends: list[Any] = [None, RuntimeError("failed"), Retry("again"), Snooze(timedelta(seconds=30)), Dead("dead"),
                Cancel("canceled"), Release()]  # fmt: skip
        chances = [8, 3, 1, 2, 1, 1, 2]
        if self.store.waits is not None:
            ends += [Wait(until, timeout=WAIT) for until in (NEVER, self._soon())]
            chances += [1, 1]
        (ended,) = self.schedule.random.choices(ends, chances)
        return ended

    def _chunk_ends(self, claims: Sequence[Claim]) -> list[Settlement]:
        """The ends of claims that the handler of a chunk worked on, as the engine makes them of its answers: a mapping
        or a list, with rows that are left out, and rows that fail every call in which they are.
        """
        assert self.schedule is not None
        chance = self.schedule.random
        ends = {claim.key: self._ended() for claim in claims}
        wanted = {claim.key: decide(self.store, claim, ends[claim.key]).kind for claim in claims}
        failing = {claim.key for claim in claims if chance.random() < 0.15}
        missing = {claim.key for claim in claims if chance.random() < 0.15}
        failed = {claim.key: decide(self.store, claim, RuntimeError("failed")).kind for claim in claims}
        execution = Execution(LaneState(self.store, Counters(Events(), self._id)), Resources({}), ThreadPoolExecutor)
        run = ChunkRun(execution, execution.plan(claims[0]), claims, self._id, "slot")
        over: list[Settlement] = []
        while run.parts:
            jobs = run.begin()
            answers = {job.id: ends[job._claim.key] for job in jobs}
            answer: Any = [answers[job.id] for job in jobs]
            if any(job._claim.key in failing for job in jobs):
                answer = RuntimeError("failed")
            elif any(job._claim.key in missing for job in jobs):
                answer = {job.id: answers[job.id] for job in reversed(jobs) if job._claim.key not in missing}
            over += [settlement for _, settlement in run.end(answer) if settlement is not None]
        for settlement in over:
            key = settlement.claim.key
            if settlement.kind != (failed if key in failing | missing else wanted)[key]:
                raise Broken(
                    f"{self.actor.name} settles row {shown(key)} as {settlement.kind}, which is another row's outcome"
                )
        if len({settlement.claim.key for settlement in over}) != len(claims):
            raise Broken(f"{self.actor.name} has {len(over)} outcomes for {len(claims)} rows of a chunk")
        return over

    def _soon(self) -> str:
        """A condition that waiting makes true: the next look finds it so."""
        return f"{self.store.statements.name(self.store.binding.roles['run_after'])} is not null"

    def done(self) -> list[Settlement]:
        """All that it holds, well ended."""
        return [decide(self.store, claim, None) for claim in self.held]

    # -- the verbs

    async def claim(self, count: int) -> None:
        doing = self.watch.announce(self.actor, "claim")
        self.store.forget_bound()
        try:
            claims = await self.store.claim(count)
        except Unreachable:
            self._reply_lost = self.store.marked
            return
        if len(claims) != len(doing.taken):
            raise Broken(f"{self.actor.name} got {len(claims)} rows, but claimed {len(doing.taken)}")
        self._hold(claims, doing.taken)

    def _hold(self, claims: list[Claim], holds: Iterable[ObservedClaim], *, again: bool = False) -> None:
        holder = self.store.worker if "worker" in self.store.binding.roles else self.actor.name
        self.watch.adopt(claims, holder, holds, again=again)
        keys = {claim.key for claim in claims}
        self._drop(lambda claim: claim.key in keys)  # a row that came back: the older run has lost it
        self.held += {claim.key: claim for claim in claims}.values()

    def _drop(self, test: Callable[[Claim], bool]) -> None:
        self.held = [claim for claim in self.held if not test(claim)]
        self._outcomes = [outcome for outcome in self._outcomes if not test(outcome.claim)]

    async def recover(self) -> None:
        self.watch.announce(self.actor, "recover")
        try:
            claims = await self.store.mine()
        except Unreachable:
            return
        self._reply_lost = False
        held = {claim.key for claim in self.held}
        self._hold([claim for claim in claims if claim.key not in held], self.watch.holds.values(), again=True)

    async def settle(self, ends: Sequence[Settlement] = ()) -> None:
        # What is held no longer was lost meanwhile: its outcome is not sent.
        known = {id(claim) for claim in self.held}
        self._outcomes += [s for s in ends if id(s.claim) in known]
        batch = list(self._outcomes)
        if not batch:
            return
        ending = {s.claim.key: (s.kind, self.watch.hold_of(s.claim)) for s in batch}
        waits = {s.claim.key: s.wait is not None and s.wait.until == NEVER for s in batch}
        self.watch.announce(self.actor, "settle", ends=ending, waits=waits)
        with suppress(Unreachable):
            report = await self.store.settle(batch)
            self.watch.told(self.actor, report)
            over = {id(s.claim) for s in (*report.written, *report.lost)}
            self._drop(lambda claim: id(claim) in over)
            if self.store.gate_learning is not None:
                self.watch.announce(self.actor, "note")
                await self.store.gate_learning.note(report.written)

    async def renew(self, actor: Actor | None = None, store: LaneStore | None = None) -> None:
        actor, store = actor or self.actor, store or self.store
        claims = list(self.held)
        if not claims:
            return
        self.watch.announce(actor, "renew", renews={c.key: self.watch.hold_of(c) for c in claims})
        try:
            if self._moved:
                await store.adopt(claims)
                self._moved = False
            renewed = {id(claim) for claim in await store.renew(claims)}
            missing = [claim for claim in claims if id(claim) not in renewed]
            holds = await store.still_held(missing) if missing else []
        except Unreachable:
            self._moved = store.binding.renew == "claimed_at"
            return
        lost = {id(claim) for claim, held in zip(missing, holds, strict=True) if not held}
        for claim in missing:
            hold = self.watch.hold_of(claim)
            if id(claim) in lost and hold is not None and hold.ended is None:
                raise Broken(f"{actor.name} gave up row {shown(claim.key)}, but still holds it")
        self._drop(lambda claim: id(claim) in lost)

    async def sweep(self) -> None:
        self.watch.announce(self.actor, "sweep")
        with suppress(Unreachable):
            await self.store.sweep(self.store.lane.lease)

    async def look(self) -> None:
        """Wake rows whose condition is true, and end those whose time is over."""
        if self.store.waits is None:
            return
        self.watch.announce(self.actor, "look")
        with suppress(Unreachable):
            ended = await self.store.waits.look()
            if ended.refused:
                raise Broken(f"{self.actor.name} looks: {ended.refused[0][1]}")

    async def expire(self) -> None:
        """End rows that were not started in time."""
        self.watch.announce(self.actor, "expire")
        with suppress(Unreachable):
            await self.store.expire()

    async def is_presumed_dead(self) -> None:
        """Others miss its lock and its heartbeats. It lives, and goes on."""
        assert self._dead is not None
        self._presumed_dead = True
        self.watch.presumed_dead(self.store.worker)
        await self._register("dead")
        self._dead.append((self._id, str(self._lives)))

    async def is_heard_of(self) -> None:
        """Its heartbeat arrives: from now on nobody may take over from it, whatever was found before."""
        self._presumed_dead = False
        await self._register("idle")
        self.watch.heard_of(self.store.worker)

    async def take_over(self, id: str, incarnation: str, started: bool) -> None:
        self.watch.announce(self.actor, "take over", started=started)
        with suppress(Unreachable):
            await take_over(self.store, id, incarnation, lambda _: started)

    async def cancel(self, key: Key) -> None:
        self.watch.announce(self.actor, "cancel")
        with suppress(Unreachable):
            async for _ in self._operator.cancel(Selection(("ready", "waiting", "running"), (key,)), "by hand"):
                pass

    async def release(self) -> None:
        """By hand, what nobody can know to be abandoned."""
        self.watch.announce(self.actor, "release")
        async for _ in self._operator.release(Selection(("running",))):
            pass

    async def edit(self, key: Key, value: str) -> None:
        """Another program writes an input of a row, even while a worker holds it."""
        self.watch.announce(self.actor, "edit")
        statements, marks = self.store.statements, Placeholders(self.store.binding)
        written = {str(self._edited): statements.literal(str(self._edited), value)}
        which = f"({statements.names(self.store.binding.key)}) = {marks.key(key)}"
        text = f"update {statements.table} set {statements.assignments(written)} where {which}"
        with suppress(Unreachable):
            await self.database.transact(lambda run: run(text, marks.given()))

    async def pause(self) -> None:
        self.watch.announce(self.actor, "pause")
        with suppress(Unreachable):
            await pauses.pause(self.database, self.store.clock, self._lane, None, None)
            self.watch.paused = self.watch.commits

    async def resume(self) -> None:
        self.watch.announce(self.actor, "resume")
        self.watch.paused = None
        try:
            with suppress(Unreachable):
                await pauses.resume(self.database, self.store.clock, self._lane)
        finally:
            self.watch.paused = None

    @property
    def _lane(self) -> pauses.Target:
        return pauses.Target(self.store.lane.name)


class ScriptedHeartbeat:
    """Renews what a worker holds, from a connection of its own, while the worker is at something else."""

    def __init__(self, actor: Actor, store: LaneStore, of: ScriptedWorker) -> None:
        self.actor, self.store, self.of = actor, store, of

    async def live(self) -> None:
        schedule = self.of.schedule
        assert schedule is not None
        for _ in range(schedule.random.randint(1, 4)):
            if await schedule.point(self.actor, "next", "renews") == DIE:
                return
            self.store.worker = self.of.store.worker
            try:
                await self.of.renew(self.actor, self.store)
            except (Died, Busy):
                return
