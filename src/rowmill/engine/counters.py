"""What this process has done: counts per lane, told as events, each thing once."""

from __future__ import annotations

import logging
import os
import time
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..declare import retry
from ..events import Events, logger
from ..store.gates.gate_learning import BreakerChange
from ..store.lane.claim import Claim, Settlement, Swept
from ..store.lane.refused_rows import RefusedRow
from ..store.own.minutes_table import BOUNDS, TIMES
from .lane_state import LaneState

_SUMMARY_EVERY = 10.0
_STDLIB = os.path.dirname(os.__file__)
#: What a kind of settlement counts as in the table of minutes.
_COUNTED = {"done": "done", "retry": "retried", "dead": "dead", "snooze": "snoozed", "canceled": "canceled"}


def raised_at(error: BaseException | None) -> str | None:
    """Where an exception was raised, in the user's own code where it passed through it: ``shop.py:12 in price``."""
    if error is None or error.__traceback__ is None:
        return None
    return users_line(traceback.extract_tb(error.__traceback__))


def users_line(frames: traceback.StackSummary) -> str | None:
    """The innermost line of the user's own code: ``shop.py:12 in price``."""
    engine = os.path.dirname(os.path.dirname(__file__))
    own = [f for f in frames if not f.filename.startswith(engine) and "site-packages" not in f.filename]
    own = [f for f in own if not f.filename.startswith(_STDLIB)] or own
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else None


class Counters:
    """Counts of a worker. ``died`` and ``losses`` are what a drain's exit code looks at."""

    def __init__(self, events: Events, worker: str) -> None:
        self.events, self.worker = events, worker
        self.completed = self.failures = self.losses = self.died = self.left = 0
        self.lanes: dict[str, Counter[str]] = {}
        self._told: dict[str, Counter[str]] = {}
        self._at = time.monotonic()
        #: What was done since it was last taken, by environment and lane, for the table of minutes.
        self._minutes: dict[str, dict[str, Counter[str]]] = {}
        #: Called whenever the counts have moved, so that they may outlive a process that is killed.
        self.told: Callable[[Counters], None] = lambda tally: None

    def _lane(self, held: LaneState) -> Counter[str]:
        return self.lanes.setdefault(held.store.lane.name, Counter())

    def _minute(self, held: LaneState) -> Counter[str]:
        lanes = self._minutes.setdefault(held.store.binding.environment, {})
        return lanes.setdefault(held.store.lane.name, Counter())

    def take(self, environment: str) -> dict[str, Counter[str]]:
        """What the lanes of an environment did since the last time."""
        return self._minutes.pop(environment, {})

    def give_back(self, environment: str, counts: Mapping[str, Counter[str]]) -> None:
        """What was taken could not be written: it counts for the next time."""
        lanes = self._minutes.setdefault(environment, {})
        for lane, numbers in counts.items():
            lanes.setdefault(lane, Counter()).update(numbers)

    def claimed(self, held: LaneState, count: int) -> None:
        """A batch was claimed."""
        self._minute(held)["started"] += count
        self._lane(held)["batch_claimed_count"] += count
        self.events.emit(
            "batch_claimed", logging.DEBUG, worker=self.worker, lane=held.store.lane.name,
            environment=held.store.binding.environment, batch_claimed_count=count,
        )  # fmt: skip

    def leave(self) -> None:
        """A drain ends, and rows are running that show neither who holds them nor since when."""
        self.left = 1
        self.told(self)

    def settled(self, held: LaneState, settlements: Sequence[Settlement]) -> None:
        """Outcomes were written."""
        self._count(held, settlements)
        detailed = logger.isEnabledFor(logging.DEBUG) or self.events.observed
        for settlement in settlements if detailed else [s for s in settlements if s.kind != "done"]:
            if settlement.kind in ("retry", "dead", "canceled"):
                self._write_down(held, settlement)
            if settlement.kind in ("retry", "dead"):
                self._emit("job_failed", logging.WARNING, held, settlement)
            elif detailed and settlement.kind != "release":
                self._emit("job_settled", logging.DEBUG, held, settlement)
        self.told(self)

    def _count(self, held: LaneState, settlements: Sequence[Settlement]) -> None:
        lane, minute = self._lane(held), self._minute(held)
        kinds = Counter([settlement.kind for settlement in settlements])
        durations = [settlement.duration for settlement in settlements if settlement.kind != "release"]
        took = int(sum(durations) * 1e6)
        lane.update(kinds)
        lane["job_duration_us"] += took
        lane["success_count"] += kinds["done"]
        lane["fail_count"] += kinds["retry"] + kinds["dead"]
        self.completed += kinds["done"]
        self.failures += kinds["retry"] + kinds["dead"]
        self.died += kinds["dead"]
        minute["started"] -= kinds.pop("release", 0)  # they were not, after all
        minute.update({_COUNTED.get(kind, kind): count for kind, count in kinds.items()})
        minute["run_us"] += took
        minute.update([TIMES[bisect_left(BOUNDS, duration)] for duration in durations])

    @staticmethod
    def _write_down(held: LaneState, settlement: Settlement) -> None:
        if held.failures is not None and settlement.error is not None:
            held.failures.settled(settlement)

    def _emit(self, name: str, level: int, held: LaneState, settlement: Settlement) -> None:
        claim = settlement.claim
        fields: dict[str, Any] = {
            "worker": self.worker,
            "lane": claim.lane,
            "environment": claim.environment,
            "id": claim.id,
            "attempt": claim.attempt,
            "outcome": settlement.kind,
            "job_duration_ms": round(settlement.duration * 1000, 1),
        }
        if settlement.error is not None:
            fields["error"] = settlement.error
        if settlement.kind in ("retry", "dead"):
            fields["class"] = settlement.word or retry.PERMANENT
        if place := raised_at(settlement.cause):
            fields["at"] = place
        if settlement.cause is not None and logger.isEnabledFor(logging.DEBUG):
            fields["traceback"] = "".join(traceback.format_exception(settlement.cause))
        if settlement.delay is not None and "run_after" in held.store.binding.roles:
            fields["again_in"] = round(settlement.delay.total_seconds(), 1)
        self.events.emit(name, level, cause=settlement.cause, **fields)

    def turned(self, held: LaneState, turned: BreakerChange) -> None:
        """A breaker opened, or closed again."""
        self.events.emit(
            "breaker_opened" if turned.opened else "breaker_closed",
            logging.WARNING if turned.opened else logging.INFO,
            worker=self.worker, lane=held.store.lane.name, environment=held.store.binding.environment,
            by=turned.dim, key=turned.key, streak=turned.streak,
        )  # fmt: skip

    def lost(self, held: LaneState, claim: Claim) -> None:
        """An outcome was dropped: its claim was no longer this worker's."""
        self.losses += 1
        self._minute(held)["lost"] += 1
        self._lane(held)["lost_count"] += 1
        self.events.emit(
            "claim_lost", logging.WARNING, worker=self.worker, lane=claim.lane, environment=claim.environment,
            id=claim.id, hint="the row was taken back: its lease ran out, or somebody released, canceled or deleted it",
        )  # fmt: skip

    def stuck(self, held: LaneState, settlement: Settlement, words: str) -> None:
        """An outcome was given up, because the database takes none for its row, which stays running."""
        if held.failures is not None:
            held.failures.refused(held.store.lane.name, settlement.claim.id, settlement.claim.worker, words)
        self._lane(held)["stuck"] += 1
        self.leave()

    def refused(self, held: LaneState, row: RefusedRow) -> None:
        """A row may not be claimed: it was set aside as dead, or is passed over."""
        lane, environment = held.store.lane.name, held.store.binding.environment
        if held.failures is not None:
            held.failures.refused(lane, row.id, None, row.error, dead=row.dead)
        self.died += row.dead
        if row.dead:
            self._minute(held)["dead"] += 1
        self._lane(held)["refused"] += 1
        self.told(self)
        hint = "it is dead now" if row.dead else "it stays as it is and is passed over"
        self.events.emit(
            "row_refused", logging.ERROR, worker=self.worker, lane=lane, environment=environment, id=row.id,
            error=row.error, dead=row.dead, hint=f"{hint}; mend the row or what refuses it, then rowmill retry",
        )  # fmt: skip

    def swept(self, held: LaneState, row: Swept) -> None:
        """A row was taken back; its previous holder is named."""
        if row.refused and not row.poison:
            where = {"lane": held.store.lane.name, "environment": held.store.binding.environment}
            self.events.emit("sweep_refused", logging.ERROR, worker=self.worker, **where, id=row.id, error=row.refused)
            return
        self.died += row.poison
        self.told(self)
        if held.failures is not None:
            held.failures.swept(held.store.lane.name, row)
        self._lane(held)["poisoned" if row.poison else "swept"] += 1
        self._minute(held)["dead" if row.poison else "swept"] += 1
        self.events.emit(
            "row_poisoned" if row.poison else "row_swept",
            logging.ERROR if row.poison else logging.WARNING,
            worker=self.worker,
            lane=held.store.lane.name,
            environment=held.store.binding.environment,
            id=row.id,
            previous_worker=row.worker,
            **({"error": row.refused} if row.refused else {}),
        )

    def summarise(self, now: float, *, last: bool = False) -> None:
        """Every ten seconds, and at the end: what each lane did since."""
        if now - self._at < _SUMMARY_EVERY and not last:
            return
        self._at = now
        for name, counts in self.lanes.items():
            new = counts - self._told.get(name, Counter())
            self._told[name] = Counter(counts)
            runs = new["success_count"] + new["fail_count"]
            if not new:
                continue
            self.events.emit(
                "lane_summary",
                worker=self.worker,
                lane=name,
                batch_claimed_count=new["batch_claimed_count"],
                success_count=new["success_count"],
                fail_count=new["fail_count"],
                lost_count=new["lost_count"],
                job_duration_ms=round(new["job_duration_us"] / 1000 / runs, 1) if runs else None,
            )
