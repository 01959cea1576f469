"""Checks every commit, and what each worker believes. The rules that must never be broken are here.

The watch reads the lane's rows after each commit, before anybody else goes on, and compares them with what it saw
before. It knows who committed and which verb that was; the rest it takes from the rows, never from the engine's word.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ..clock import Clock
from ..declare.states import FINAL, overlaps
from ..store import LaneStore
from ..store.gates.gate_binding import BoundGates
from ..store.lane.claim import Claim, Report
from .schedules import Actor, Broken

Key = tuple[Any, ...]
_COUNTERS = ("attempts", "failures", "reclaims")
#: What each end of a run does to the counters of its row.
_COUNTED = {
    "done": (0, 0, 0), "dead": (0, 1, 0), "canceled": (0, 0, 0), "retry": (0, 1, 0), "snooze": (-1, 0, 0),
    "wait": (-1, 0, 0), "release": (-1, 0, 0), "stale": (-1, 0, 0),
}  # fmt: skip
_SLACK = timedelta(seconds=2)
#: For how long rows of a schedule wait, and a condition that never is true.
WAIT, NEVER = timedelta(seconds=30), "1 = 0"


@dataclass(eq=False)
class ObservedClaim:
    """One claim as seen in the rows."""

    key: Key
    holder: str
    #: The last sign of life: the time that had passed by then, moved and real.
    shift: timedelta
    real: float
    ended: str | None = None
    #: The process that made it has died.
    orphaned: bool = False
    #: The row's inputs as its worker has them; and whether they were others at some time since.
    inputs: tuple[Any, ...] = ()
    edited: bool = False


@dataclass
class ActorVerb:
    """What an actor is doing: a verb, and for a settlement the outcome of each claim."""

    verb: str = ""
    shift: timedelta = timedelta(0)
    ends: Mapping[Key, tuple[str, ObservedClaim | None]] = field(default_factory=dict)
    renews: Mapping[Key, ObservedClaim | None] = field(default_factory=dict)
    #: Of a settlement: rows that wait for what never is true.
    waits: Mapping[Key, bool] = field(default_factory=dict)
    began: int = 0
    #: Where it takes over from a dead worker: whether that one had begun its rows.
    started: bool = True
    #: What it was seen to claim, in order: a claim of several statements may take a row, lose it and take it again.
    taken: list[ObservedClaim] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """One row after a commit."""

    state: str
    worker: str | None
    counts: tuple[int | None, ...]
    #: Every column that tells the holder's life.
    signs: tuple[Any, ...]
    gates: tuple[Any, ...]
    #: What the work depends on.
    inputs: tuple[Any, ...]
    #: It may not be started after ``CommitChecks.expires``.
    expires: bool = False


class CommitChecks:
    """The rows of one lane."""

    def __init__(self, store: LaneStore, dims: Sequence[BoundGates], clock: Clock) -> None:
        self.store, self.dims, self.clock = store, dims, clock
        self.rows: dict[Key, Seen] = {}
        self.holds: dict[Key, ObservedClaim] = {}
        self.doing: dict[Actor, ActorVerb] = {}
        self.commits = 0
        #: The claim of a worker, as the hold that the watch saw. By the object: a worker may have had the row before.
        self._holds: dict[int, tuple[Claim, ObservedClaim]] = {}
        #: By which commit the lane was paused; None: it is not.
        self.paused: int | None = None
        #: Live workers that were presumed dead: by which commit each was heard of again; None: not yet.
        self._presumed: dict[str, int | None] = {}
        #: After how long a row expires that does; and when the schedule began.
        self.expires, self._began = timedelta(0), 0.0
        #: Rows that wait for what never is true: the time, moved and real, at which their worker set out to say so.
        self._waiting: dict[Key, tuple[timedelta, float]] = {}
        self.claims = self.outcomes = self.swept = self.lost = self.taken_from_presumed = self.timed_out = 0
        self.expired = 0

    # -- what is read

    def text(self) -> str:
        """SQL for all rows: key, state, worker, counters, signs of life, the gates' keys."""
        statements, lane, roles = self.store.statements, self.store.lane, self.store.binding.roles
        cases = [f"when {statements.running()} then 'running'", f"when {statements.final(lane.done)} then 'done'"]
        cases += [f"when {statements.final(lane.canceled)} then 'canceled'"] if lane.canceled else []
        cases += [f"when {statements.final(lane.dead)} then 'dead'"] if lane.dead else []
        cases += [f"when {statements.final(lane.expired)} then 'canceled'"] if lane.expired else []
        again = statements.condition(self.store.binding.retry_values)
        idle = f"({statements.ready_state()} or {again})"
        if not lane.dead and (counter := self.store.binding.counter):
            cases.append(
                f"when {idle} and coalesce({statements.name(counter)}, 0) >= {statements.exhausted()} then 'dead'"
            )
        cases.append(f"when {idle} then 'ready'")
        columns = [f"case {' '.join(cases)} else 'unknown' end"]
        columns += [statements.name(roles[r]) if r in roles else "null" for r in ("worker", *_COUNTERS)]
        columns += [statements.name(roles[role]) for role in ("heartbeat_at", "claimed_at") if role in roles]
        columns += [str(dim.phrase) for dim in self.dims if dim.phrase is not None]
        own = f"({statements.name(roles['expires_at'])} is not null)" if "expires_at" in roles else "(1 = 0)"
        columns += ["(1 = 1)" if lane.expires_after is not None else own]
        columns += [statements.name(column) for column in lane.inputs]
        where = f" where queue = {statements.literal('queue', lane.name)}" if lane.own else ""
        return f"select {statements.names(self.store.binding.key)}, {', '.join(columns)} from {statements.table}{where}"

    def read(self, rows: Sequence[Any]) -> dict[Key, Seen]:
        """The rows of ``text``."""
        width, signs = (
            len(self.store.binding.key),
            sum(r in self.store.binding.roles for r in ("heartbeat_at", "claimed_at")),
        )
        by_key = {}
        for row in rows:
            state, worker, *rest = row[width:]
            ends = len(rest) - len(self.store.lane.inputs)
            by_key[tuple(row[:width])] = Seen(
                state, worker, tuple(rest[:3]), tuple(rest[3 : 3 + signs]), tuple(rest[3 + signs : ends - 1]),
                tuple(rest[ends:]), bool(rest[ends - 1]),
            )  # fmt: skip
        return by_key

    def begin(self, rows: Sequence[Any]) -> None:
        """The rows that a schedule starts with."""
        self.rows, self.commits, self.paused = self.read(rows), 0, None
        self.holds, self.doing, self._holds, self._presumed = {}, {}, {}, {}
        self._waiting, self._began = {}, time.monotonic()
        if odd := [key for key, row in self.rows.items() if row.state != "ready"]:
            raise Broken(f"row {shown(odd[0])} is {self.rows[odd[0]].state} before anything has happened")

    # -- what an actor says it is about to do

    def announce(self, actor: Actor, verb: str, **more: Any) -> ActorVerb:
        """From here on the actor's commits are this verb's."""
        self.doing[actor] = doing = ActorVerb(verb, self.clock.shift, began=self.commits, **more)
        return doing

    def hold_of(self, claim: Claim) -> ObservedClaim | None:
        """The hold that a worker's claim stands for."""
        known = self._holds.get(id(claim))
        return known[1] if known else None

    def adopt(
        self, claims: Sequence[Claim], holder: str, holds: Iterable[ObservedClaim], *, again: bool = False
    ) -> None:
        """A worker was told that these are its claims, and these are the holds that it may mean. ``again``: it read the
        rows once more, as they are now.
        """
        left = list(holds)
        for claim in claims:
            hold = next((hold for hold in left if hold.key == claim.key), None)
            if hold is not None:
                left.remove(hold)
            if hold is None or hold.holder != holder:
                held = f"{hold.holder} holds it" if hold else "nobody holds it"
                raise Broken(f"{holder} was given row {shown(claim.key)}, and {held}")
            if again:
                hold.inputs, hold.edited = self.rows[claim.key].inputs, False
            self._holds[id(claim)] = (claim, hold)

    # -- what a commit shows

    def commit(self, actor: Actor, rows: Sequence[Any]) -> None:
        """Check a commit: its actor may only change rows that it holds or may take."""
        self.commits += 1
        before, self.rows = self.rows, self.read(rows)
        doing = self.doing.get(actor, ActorVerb())
        if lost := before.keys() - self.rows.keys():
            raise Broken(f"row {shown(min(lost, key=str))} disappeared after {actor.name} did: {doing.verb}")
        if new := self.rows.keys() - before.keys():
            raise Broken(f"row {shown(min(new, key=str))} appeared from nowhere after {actor.name} did: {doing.verb}")
        for key, now in self.rows.items():
            if now != before[key]:
                self._changed(actor, doing, key, before[key], now)
        self._limits()

    def _changed(self, actor: Actor, doing: ActorVerb, key: Key, was: Seen, now: Seen) -> None:
        what = f"row {shown(key)}: {actor.name}, {doing.verb}"
        hold = self.holds.get(key)
        if doing.verb == "edit" and now == replace(was, inputs=now.inputs):
            if hold is not None:
                hold.edited = True
            return
        if now.inputs != was.inputs:
            raise Broken(f"{what}: its inputs were {was.inputs} and now are {now.inputs}")
        if was.state in FINAL:
            raise Broken(f"{what}: it was {was.state}, which is final, and now it is {now.state}")
        if doing.verb == "claim":
            self._claimed(what, doing, key, hold, was, now)
        elif key in doing.ends and doing.verb == "settle":
            kind, mine = doing.ends[key]
            self._settled(what, kind, key, hold, mine, was, now, doing)
        elif key in doing.renews and doing.verb == "renew" and now.state == was.state == "running":
            if hold is None or hold is not doing.renews[key]:
                raise Broken(f"{what}: renewed without its claim; {_held(hold)}")
            hold.shift, hold.real = doing.shift, time.monotonic()
        elif doing.verb == "sweep" and was.state == "running" and now.state in ("ready", "dead"):
            self._swept(what, doing, key, hold, was, now)
        elif doing.verb == "take over" and was.state == "running" and now.state in ("ready", "dead"):
            self._taken_over(what, doing, key, hold, was, now)
        elif doing.verb == "release" and was.state == "running" and now.state == "ready":
            self._end(key, "released by hand")
        elif doing.verb == "look" and was.state == "ready" and now.state in self._ends("dead"):
            self._timed_out(what, key, was, now)
        elif doing.verb == "expire" and was.state == "ready" and now.state in self._ends("canceled"):
            self._expired(what, key, was, now)
        elif doing.verb == "cancel" and now.state in self._ends("canceled"):
            self._end(key, "canceled")
        else:
            raise Broken(f"{what}: it was {was.state} and now is {now.state}")

    def _claimed(self, what: str, doing: ActorVerb, key: Key, hold: ObservedClaim | None, was: Seen, now: Seen) -> None:
        if hold is not None:
            raise Broken(f"{what}: claimed while {hold.holder} holds it")
        if was.state != "ready" or now.state != "running":
            raise Broken(f"{what}: claimed from {was.state} to {now.state}")
        if self.paused is not None and self.paused <= doing.began:
            raise Broken(f"{what}: claimed while the lane is paused")
        if self._waits_still(key):
            raise Broken(f"{what}: claimed while the condition it waits for is false")
        if was.expires and doing.shift > self.expires:
            raise Broken(f"{what}: claimed after it expired")
        self._waiting.pop(key, None)
        self._count(what, was, now, (1, 0, 0))
        holder = now.worker if "worker" in self.store.binding.roles else what.split(": ")[1].split(",")[0]
        self.holds[key] = ObservedClaim(key, str(holder), doing.shift, time.monotonic(), inputs=now.inputs)
        doing.taken.append(self.holds[key])
        self.claims += 1

    def _settled(
        self,
        what: str,
        kind: str,
        key: Key,
        hold: ObservedClaim | None,
        mine: ObservedClaim | None,
        was: Seen,
        now: Seen,
        doing: ActorVerb,
    ) -> None:
        if hold is None or hold is not mine:
            raise Broken(f"{what}: an outcome ({kind}) was recorded without its claim; {_held(hold)}")
        if self.store.statements.compares(kind):
            if now.state == "ready" and hold.edited:
                kind = "stale"
            elif was.inputs != hold.inputs:
                raise Broken(f"{what}: settled as {kind} for inputs {hold.inputs}, but they are {was.inputs}")
        if now.state not in self._ends(kind):
            raise Broken(f"{what}: settled as {kind}, but it is {now.state}")
        if self.store.lane.dead is not None or kind not in ("dead", "canceled", "retry"):
            self._count(what, was, now, _COUNTED[kind])
        self._end(key, kind)
        self.outcomes += 1
        if doing.waits.get(key):
            self._waiting[key] = doing.shift, time.monotonic()

    def _waits_still(self, key: Key) -> bool:
        """It waits for what never is true, and its time is not over."""
        if key not in self._waiting:
            return False
        shift, real = self._waiting[key]
        return self.clock.shift - shift + timedelta(seconds=time.monotonic() - real) + _SLACK < WAIT

    def _timed_out(self, what: str, key: Key, was: Seen, now: Seen) -> None:
        if key not in self._waiting or self._waits_still(key):
            raise Broken(f"{what}: ended before its wait was over")
        if self.store.lane.dead is not None:
            self._count(what, was, now, _COUNTED["dead"])
        del self._waiting[key]
        self.timed_out += 1

    def _expired(self, what: str, key: Key, was: Seen, now: Seen) -> None:
        passed = self.clock.shift + timedelta(seconds=time.monotonic() - self._began) + _SLACK
        if not was.expires or passed < self.expires:
            raise Broken(f"{what}: ended before it expired")
        self._count(what, was, now, (0, 0, 0))
        self._waiting.pop(key, None)
        self.expired += 1

    def _ends(self, kind: str) -> set[str]:
        """The states that a row may be seen in after an end of this kind: two ends may look the same."""
        lane = self.store.lane
        if kind not in FINAL:
            return {"ready", "dead"} if kind == "retry" else {"ready"}
        looks = {"done": lane.done, "dead": lane.dead, "canceled": lane.canceled or lane.dead}
        mine = looks[kind]
        return {kind, "dead"} if mine is None else {s for s, look in looks.items() if look and overlaps(look, mine)}

    def _swept(self, what: str, doing: ActorVerb, key: Key, hold: ObservedClaim | None, was: Seen, now: Seen) -> None:
        lease = self.store.lane.lease
        if hold is None:
            raise Broken(f"{what}: swept, but no worker held it")
        passed = doing.shift - hold.shift + timedelta(seconds=time.monotonic() - hold.real) + _SLACK
        if passed < lease and not self.store.needs_workers_table:
            raise Broken(f"{what}: swept {passed.total_seconds():.0f} s after a sign of life; the lease is {lease}")
        if now.state == "ready":
            self._count(what, was, now, (0, 0, 1))
        self._end(key, "swept")
        self.swept += 1

    def _taken_over(
        self, what: str, doing: ActorVerb, key: Key, hold: ObservedClaim | None, was: Seen, now: Seen
    ) -> None:
        if hold is None or not (hold.orphaned or self._was_presumed_dead(hold.holder, doing)):
            raise Broken(f"{what}: taken from a live worker; {_held(hold)}")
        self.taken_from_presumed += not hold.orphaned
        if now.state == "ready":
            self._count(what, was, now, (0, 0, 1) if doing.started else _COUNTED["release"])
        self._end(key, "swept")
        self.swept += 1

    def _was_presumed_dead(self, holder: str, doing: ActorVerb) -> bool:
        """When the verb began, or since."""
        heard = self._presumed.get(holder, -1)
        return heard is None or heard >= doing.began

    def presumed_dead(self, holder: str) -> None:
        """A live worker is called dead in the workers table: what it holds may be taken over."""
        self._presumed[holder] = None

    def heard_of(self, holder: str) -> None:
        """It gave a sign of life, or a successor has its id: a verb that begins now may take nothing from it."""
        if self._presumed.get(holder, -1) is None:
            self._presumed[holder] = self.commits

    def died(self, holder: str) -> None:
        """A process has died: what it holds now is nobody's."""
        for hold in self.holds.values():
            hold.orphaned = hold.orphaned or hold.holder == holder

    def _count(self, what: str, was: Seen, now: Seen, by: tuple[int, int, int]) -> None:
        roles = self.store.binding.roles
        columns = [roles[role] for role in _COUNTERS if role in roles]
        several = len(set(columns)) < len(columns)  # one column counts for two: what it shows is the sum
        own = self.store.binding.state_columns()  # a state may set a counter: done={"status": "done", "attempts": 0}
        for role, old, new, step in zip(_COUNTERS, was.counts, now.counts, by, strict=True):
            if role in roles and roles[role] not in own and not several and (new or 0) != max((old or 0) + step, 0):
                raise Broken(f"{what}: {role} went from {old} to {new}")

    def _end(self, key: Key, how: str) -> None:
        hold = self.holds.pop(key, None)
        if hold is not None:
            hold.ended = how

    def _limits(self) -> None:
        keyed = [dim for dim in self.dims if dim.phrase is not None]
        for dim in self.dims:
            limit = dim.group.concurrency.limit if dim.group.concurrency is not None else None
            if limit is None:
                continue
            running: dict[Any, int] = {}
            for row in self.rows.values():
                key = row.gates[keyed.index(dim)] if dim in keyed else ""
                if row.state == "running" and key is not None:
                    running[key] = running.get(key, 0) + 1
            for key, n in running.items():
                if n > limit:
                    raise Broken(f"{n} rows of key {key!r} run at once; its limit is {limit}")

    # -- what a worker was told

    def told(self, actor: Actor, report: Report) -> None:
        """A worker was told what became of its settlements."""
        for settlement in report.written:
            hold = self.hold_of(settlement.claim)
            if settlement.reply_lost and (settlement.kind not in FINAL or "worker" not in self.store.binding.roles):
                continue  # the row is as this end would have left it; a sweep leaves it so, too
            # Two ends may look the same: without the reply nobody can tell which of them stands.
            same = self._ends(settlement.kind) if settlement.reply_lost else {settlement.kind}
            if hold is None or hold.ended not in same:
                ended = hold.ended if hold else "nothing is known of it"
                row = shown(settlement.claim.key)
                raise Broken(
                    f"{actor.name} was told that row {row} is settled as {settlement.kind}, but it was: {ended}"
                )
        for settlement in report.lost:
            hold = self.hold_of(settlement.claim)
            self.lost += 1
            if hold is None or hold.ended is None:
                raise Broken(
                    f"{actor.name} was told that row {shown(settlement.claim.key)} is lost, but it still holds it"
                )
        if report.stuck or report.refused:
            words = [words for _, words in report.stuck] or [str(s.error) for s in report.refused]
            raise Broken(f"the database refused an outcome: {words[0]}")


def shown(key: Key) -> str:
    return str(key[0] if len(key) == 1 else key)


def _held(hold: ObservedClaim | None) -> str:
    return f"{hold.holder} holds the row" if hold else "nobody holds the row"
