"""One lane in one environment, as one worker serves it: its claims, its unwritten outcomes, its counts and events."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..declare import retry
from ..errors import DatabaseError, ResourceFailed
from ..events import logger
from ..store import LaneStore
from ..store.gates.gate_learning import BreakerChange
from ..store.lane.claim import Claim, Expired, Settlement, Swept
from ..store.lane.refused_rows import RefusedRow
from ..store.lane.waits import EndedWaits
from ..store.own.minutes import BOUNDS, TIMES
from .counters import Counters, raised_at, users_traceback
from .records.run_log import RunLines, RunLogWriter
from .recovery.running_marks import salt
from .tracing import Tracer

if TYPE_CHECKING:
    from .environment import Environment
    from .execute import Execution
    from .joins import Joins
    from .records.failure_log import FailureLog
    from .shared_rate import ControlDatabases
    from .slots import Slots

#: What a kind of settlement counts as in the table of minutes.
_COUNTED = {
    "done": "done",
    "retry": "retried",
    "dead": "dead",
    "snooze": "snoozed",
    "wait": "snoozed",
    "canceled": "canceled",
    "stale": "stale",
}

#: Ids that an event about many rows names at most.
_NAMED = 10
#: A renewal is late when the last one is older than this fraction of the lease, or so many beats.
_LATE = (3, 1.5)


class LaneState:
    """The state of one lane in one environment. The event loop and the heartbeat thread share its claims.

    Where renewal moves the fence itself (``renew="claimed_at"``), a claim is never renewed and settled at the same
    time: the second statement would compare with a ``claimed_at`` that the first has changed.
    """

    #: Set when the worker opens the environment.
    environment: Environment
    slots: Slots
    execution: Execution

    def __init__(self, store: LaneStore, counters: Counters) -> None:
        self.counters, self.events = counters, counters.events
        self._bind(store)
        self.moving = store.binding.renew == "claimed_at"
        #: Distinguishes the running marks of this table's rows from those of other tables.
        self.salt = salt(store.binding.environment, store.binding.table.fullname)
        #: Runs that have ended and are not written yet.
        self.outcomes: list[Settlement] = []
        #: The task that writes them; one at a time, so that what ends meanwhile makes the next batch.
        self.settling: asyncio.Task[None] | None = None
        #: Where the lane has gates: outcomes that are written and that the gates have not learned from yet, and how
        #: many outcomes are being written or learned from now.
        self.unlearned: list[Settlement] = []
        self.learning = 0
        #: In fair order: how long a run takes here, smoothed (0: not known), and what was estimated for the rows that
        #: are claimed and have not ended.
        self.run_seconds, self.estimated_seconds, self.estimated_rows = 0.0, 0.0, 0
        #: The last claim brought fewer rows than asked for: a run that ends may let others pass the gates.
        self.held_back = False
        #: More rows may be ready than were asked for.
        self.more = False
        #: The reply to a claim was lost: rows may be ours without our knowing.
        self.reply_lost = False
        #: No claim before then (monotonic): the last was refused, or the table has no run_after to keep retries back.
        self.paused_until = 0.0
        self.refused: str | None = None
        #: Why the handler's resources could not be opened, and how many seconds the lane waits before the next try.
        self.unopened: ResourceFailed | None = None
        self.open_pause = 0.0
        #: No settling before then (monotonic), and the backoff: the table or a privilege does not fit the statement.
        self.settle_again, self.settle_pause = 0.0, 0.0
        #: When the last renewal that went well was sent (monotonic), by the heartbeat thread's own connection; -inf: it
        #: has none. The error of the last one, where that failed.
        self.beat_at = -math.inf
        self.beat_error: DatabaseError | None = None
        #: The table was altered: look at it again before the next claim.
        self.altered = False
        #: Lets parent jobs go on when their children have ended; only for queues.
        self.joins: Joins | None = None
        #: Where failures are written down.
        self.failures: FailureLog | None = None
        #: Where the logs of its runs are kept; None: nowhere. And whether a run has logged anything.
        self.run_logs: RunLogWriter | None = None
        self.logged = False
        #: The databases that hold the budgets of all environments; None: in a test, each environment holds its own.
        self.controls: ControlDatabases | None = None
        #: Traces what is done with it, where tracing is on.
        self.tracer: Tracer | None = None
        #: Claims whose outcome was sent, by a batch or by ``job.finish``; by identity. That a renewal no longer finds
        #: the row running may only mean that the commit was faster than its reply, or that the reply was lost: the
        #: settling asks the row whether the outcome stands.
        self.ending: set[int] = set()
        #: The claims held, by key.
        self.claims: dict[tuple[Any, ...], Claim] = {}
        #: Conditions of waiting rows that the database could not ask at the last look.
        self._refused_waits: set[tuple[str, str, Any]] = set()
        self._renewing: set[int] = set()
        self._settling: set[int] = set()
        #: Claims whose renewal got no reply, so that ``claimed_at`` may have changed. By identity.
        self._fence_unknown: set[int] = set()
        self._lock = threading.Lock()

    def _bind(self, store: LaneStore) -> None:
        self.store = store
        #: Its gates, if it has any, count what runs and nothing else: rows may be prefetched through them.
        self.only_limits = store.gate_learning is None or all(group.only_limits for group in store.lane.groups)
        self.only_limits = self.only_limits and store.lane.shared_rate is None
        #: Seconds after which the last renewal is too old to claim more; infinite where nothing is renewed.
        self._late = math.inf
        if store.binding.renew != "none" and store.lane.heartbeat is not None:
            self._late = max(store.lane.lease / _LATE[0], store.lane.heartbeat * _LATE[1]).total_seconds()

    def rebind(self, store: LaneStore) -> None:
        """Use the table as it is now. Claims that are held keep the columns they were claimed with."""
        store.sign(self.store.worker)
        store.opened_at = self.store.opened_at
        self._bind(store)
        self.altered, self.paused_until, self.settle_again, self.settle_pause = False, 0.0, 0.0, 0.0

    @property
    def name(self) -> str:
        """The lane's name."""
        return self.store.lane.name

    @property
    def unwritten(self) -> bool:
        """Something has ended that is not written yet, or that the gates have not learned from."""
        return bool(self.outcomes or self.unlearned)

    @property
    def occupied(self) -> int:
        """Free slots that are kept until the gates have learned how these runs ended: the next start depends on it."""
        learns = self.store.gate_learning is not None and self.store.gate_learning.decides
        return len(self.outcomes) + len(self.unlearned) + self.learning if learns else 0

    @property
    def beats(self) -> bool:
        """Leases are being renewed. Where they are not, nothing more is claimed: it would run out under its handler."""
        return time.monotonic() - self.beat_at <= self._late

    # -- the claims held

    def drop(self, claims: Sequence[Claim]) -> None:
        """Forget claims that are settled or lost."""
        for claim in claims:
            if self.claims.get(claim.key) is claim:
                del self.claims[claim.key]
        dropped = [id(claim) for claim in claims]
        self.ending.difference_update(dropped)
        if self.moving:
            self._settling.difference_update(dropped)
            self._fence_unknown.difference_update(dropped)

    def all(self) -> list[Claim]:
        """All claims held at this moment."""
        return list(self.claims.values())

    def begin_renewal(self) -> list[Claim]:
        """The claims to renew now; with a moving fence, not those that are being settled."""
        if not self.moving:
            return self.all()
        with self._lock:
            claims = [claim for claim in self.all() if id(claim) not in self._settling]
            self._renewing = {id(claim) for claim in claims}
            return claims

    def end_renewal(self) -> None:
        """The renewal's answer is in."""
        with self._lock:
            self._renewing = set()

    def renewal_unanswered(self, claims: Sequence[Claim]) -> None:
        """A renewal of these was not answered: a moving fence may have moved all the same."""
        if self.moving:
            self._fence_unknown.update([id(claim) for claim in claims])

    async def find_fences(self, store: LaneStore, claims: Sequence[Claim]) -> None:
        """Re-read ``claimed_at`` after a renewal whose reply was lost."""
        if astray := [claim for claim in claims if id(claim) in self._fence_unknown]:
            await store.adopt(astray)
            self._fence_unknown.difference_update([id(claim) for claim in astray])

    async def begin_settle(self, claims: Sequence[Claim]) -> None:
        """With a moving fence: wait until none of these is being renewed, block new renewals, and know the fence."""
        if not self.moving:
            return
        with self._lock:
            self._settling |= {id(claim) for claim in claims}
        while any(id(claim) in self._renewing for claim in claims):  # noqa: ASYNC110 - the other side is a thread
            await asyncio.sleep(0.005)
        await self.find_fences(self.store, claims)

    def end_settle(self, claims: Sequence[Claim]) -> None:
        """Settled or not: what is still held may be renewed again."""
        if not self.moving:
            return
        with self._lock:
            self._settling -= {id(claim) for claim in claims}

    # -- what runs log

    def lines(self, claim: Claim) -> RunLines:
        """Where the lines of a run are kept until its outcome stands."""
        with self._lock:
            self.logged = True
            if claim.lines is None:
                claim.lines = RunLines()
            lines: RunLines = claim.lines
            return lines

    def _log_run(self, claim: Claim, outcome: str) -> None:
        """A run has ended, and its row shows how: its log is written soon."""
        keep = self.store.lane.keep_logs
        if self.run_logs is not None and keep is not None and claim.lines is not None:
            self.run_logs.ended(claim, self.counters.worker, outcome, keep)
            claim.lines = None

    # -- count and emit what happened to rows, each thing once

    def emit(self, name: str, level: int = logging.INFO, **fields: Any) -> None:
        """Tell that something happened in this lane."""
        where = {"lane": self.name, "environment": self.store.binding.environment}
        self.events.emit(name, level, **({"worker": self.counters.worker} | where | fields))

    def _count(self, name: str, count: int = 1) -> None:
        self.counters.lanes.setdefault(self.name, Counter())[name] += count

    @property
    def _minute(self) -> Counter[str]:
        lanes = self.counters.minutes.setdefault(self.store.binding.environment, {})
        return lanes.setdefault(self.name, Counter())

    def claimed(self, claims: Sequence[Claim]) -> None:
        """A batch was claimed: held from now on."""
        self.claims.update({claim.key: claim for claim in claims})
        self._minute["started"] += len(claims)
        self._count("batch_claimed_count", len(claims))
        if self._detailed:
            self.emit("batch_claimed", logging.DEBUG, batch_claimed_count=len(claims))

    def settled(self, settlements: Sequence[Settlement]) -> None:
        """Outcomes were written."""
        self._count_settled(settlements)
        for settlement in settlements if self.logged else ():
            self._log_run(settlement.claim, settlement.kind)
        detailed = self._detailed
        for settlement in settlements if detailed else [s for s in settlements if s.kind != "done"]:
            if settlement.kind in ("retry", "dead", "canceled"):
                self._record_failure(settlement)
            if settlement.kind in ("retry", "dead") or (settlement.kind == "canceled" and self._cancels_to_dead):
                self._emit_settled("job_failed", logging.WARNING, settlement)
            elif isinstance(settlement.cause, ResourceFailed) and settlement.delay is not None:
                self.not_opened(settlement.cause, settlement.delay.total_seconds())
            elif settlement.kind == "canceled":
                self._emit_settled("job_settled", logging.INFO, settlement)
            elif detailed and settlement.kind != "release":
                self._emit_settled("job_settled", logging.DEBUG, settlement)
        if self.store.lane.inputs:
            self._emit_changed(settlements)
        if self.counters.told is not None:
            self.counters.told(self.counters)

    def _emit_changed(self, settlements: Sequence[Settlement]) -> None:
        """Tell of rows whose inputs changed during their runs."""
        back = [s.claim.id for s in settlements if s.kind == "stale"]
        if back:
            self.emit("inputs_changed", logging.INFO, changed_count=len(back), ids=back[:_NAMED])
        final = [s.claim.id for s in settlements if s.kept_changing]
        if final:
            self._count("kept_changing", len(final))
            hint = "they changed for as long as settle_after allows, so these rows' outcomes are final all the same"
            self.emit("inputs_kept_changing", logging.WARNING, settled_count=len(final), ids=final[:_NAMED], hint=hint)

    @property
    def _detailed(self) -> bool:
        """A log or a subscriber wants to hear of every run, also of those that went well."""
        return self.events.observed or logger.isEnabledFor(logging.DEBUG)

    @property
    def _cancels_to_dead(self) -> bool:
        """A lane without a state for canceled rows shows them as dead, so they count and are logged as failed."""
        return self.store.lane.canceled is None

    def _count_settled(self, settlements: Sequence[Settlement]) -> None:
        counters, minute = self.counters, self._minute
        lane = counters.lanes.setdefault(self.name, Counter())
        kinds = Counter([settlement.kind for settlement in settlements])
        dead, canceled = kinds["dead"], kinds["canceled"]
        if self._cancels_to_dead:
            dead, canceled = dead + canceled, 0
        durations = [settlement.duration for settlement in settlements if settlement.kind != "release"]
        took = int(sum(durations) * 1e6)
        lane.update(kinds)
        lane["job_duration_us"] += took
        lane["success_count"] += kinds["done"]
        lane["fail_count"] += kinds["retry"] + dead
        lane["canceled_count"] += canceled
        counters.completed += kinds["done"]
        counters.failures += kinds["retry"] + dead
        counters.died += dead
        counters.canceled += canceled
        minute["started"] -= kinds.pop("release", 0)  # a released row was not started
        minute.update({_COUNTED.get(kind, kind): count for kind, count in kinds.items()})
        minute["run_us"] += took
        minute.update([TIMES[bisect_left(BOUNDS, duration)] for duration in durations])

    def _record_failure(self, settlement: Settlement) -> None:
        if self.failures is not None and settlement.error is not None:
            self.failures.settled(settlement)

    def _emit_settled(self, name: str, level: int, settlement: Settlement) -> None:
        claim = settlement.claim
        fields: dict[str, Any] = {
            "id": claim.id,
            "attempt": claim.attempt,
            "outcome": settlement.kind,
            "job_duration_ms": round(settlement.duration * 1000, 1),
        }
        if settlement.error is not None:
            fields["error"] = settlement.error
        if name == "job_failed":
            fields["class"] = settlement.word or retry.PERMANENT
        if line := raised_at(settlement.cause):
            fields["at"] = line
        if settlement.cause is not None and settlement.cause.__traceback__ and logger.isEnabledFor(logging.DEBUG):
            fields["traceback"] = users_traceback(settlement.cause)
        if settlement.delay is not None and "run_after" in self.store.binding.roles:
            fields["again_in"] = round(settlement.delay.total_seconds(), 1)
        self.emit(name, level, cause=settlement.cause, **fields)

    def breaker_changed(self, change: BreakerChange) -> None:
        """A breaker opened, or closed again."""
        name, level = ("breaker_opened", logging.WARNING) if change.opened else ("breaker_closed", logging.INFO)
        self.emit(name, level, by=change.dim, key=change.key, streak=change.streak)

    def not_opened(self, error: ResourceFailed, retry_in: float) -> None:
        """A resource cannot be opened: the lane waits for it, and its rows stay as they are."""
        hint = {"hint": error.hint} if error.hint else {}
        self.emit(
            "resource_failed", logging.ERROR, error=error.message, retry_in=retry_in, cause=error.__cause__, **hint
        )

    def lost(self, claim: Claim) -> None:
        """An outcome was dropped: its claim was no longer this worker's."""
        self._log_run(claim, "lost")
        self.counters.losses += 1
        self._minute["lost"] += 1
        self._count("lost_count")
        hint = "the lease expired, or the row was released, canceled or deleted; the outcome is dropped"
        self.emit("claim_lost", logging.WARNING, id=claim.id, hint=hint)

    def stuck(self, settlement: Settlement, words: str) -> None:
        """An outcome was given up, because the database takes none for its row, which stays running."""
        self._log_run(settlement.claim, "refused")
        if self.failures is not None:
            self.failures.refused(self.name, settlement.claim.id, settlement.claim.worker, words)
        self._count("stuck")
        self.counters.leave()

    def row_refused(self, row: RefusedRow) -> None:
        """A row may not be claimed: it was set aside as dead, or is passed over."""
        if self.failures is not None:
            self.failures.refused(self.name, row.id, None, row.error, dead=row.dead)
        self.counters.died += row.dead
        if row.dead:
            self._minute["dead"] += 1
        self._count("refused")
        self.counters.tell()
        hint = "the row is dead" if row.dead else "the row is skipped and stays as it is"
        hint = f"{hint}; fix the row, or the trigger or constraint, then rowmill retry"
        self.emit("row_refused", logging.ERROR, id=row.id, error=row.error, dead=row.dead, hint=hint)

    def expired(self, rows: Sequence[Expired]) -> None:
        """Rows ended because they were not started in time: counted as canceled, and as expired."""
        for row in rows:
            if row.refused is not None:
                self.emit("expiry_refused", logging.ERROR, id=row.id, error=row.refused)
        count = sum(row.refused is None for row in rows)
        if not count:
            return
        self.counters.canceled += count
        self._count("canceled_count", count)
        self._count("expired_count", count)
        self._minute["canceled"] += count
        self.counters.tell()
        ids = [row.id for row in rows if row.refused is None][:_NAMED]
        self.emit("rows_expired", logging.INFO, expired_count=count, ids=ids)

    def waits_ended(self, ended: EndedWaits) -> None:
        """Rows whose condition is true are due; those that waited too long are dead."""
        if ended.woken:
            self._count("woken_count", len(ended.woken))
            self.emit("rows_woken", logging.INFO, woken_count=len(ended.woken), ids=ended.woken[:_NAMED])
        if ended.timed_out:
            count = len(ended.timed_out)
            self.counters.died += count
            self.counters.failures += count
            self._count("fail_count", count)
            self._count("dead", count)
            self._minute["dead"] += count
            self.counters.tell()
            self.emit("waits_timed_out", logging.WARNING, timed_out_count=count, ids=ended.timed_out[:_NAMED])
        known, self._refused_waits = self._refused_waits, set(ended.refused)
        for until, error, id in self._refused_waits - known:
            where = {} if id is None else {"id": id}
            hint = "the row waits until its timeout; fix its columns, or use rowmill retry or rowmill cancel"
            self.emit("wait_refused", logging.ERROR, until=until, error=error, hint=hint, **where)

    def swept(self, row: Swept) -> None:
        """A row was taken back; its previous holder is named."""
        if row.refused and not row.poison:
            self.emit("sweep_refused", logging.ERROR, id=row.id, error=row.refused)
            return
        self.counters.died += row.poison
        self.counters.tell()
        if self.failures is not None:
            self.failures.swept(self.name, row)
        self._count("poisoned" if row.poison else "swept")
        self._minute["dead" if row.poison else "swept"] += 1
        name, level = ("row_poisoned", logging.ERROR) if row.poison else ("row_swept", logging.WARNING)
        self.emit(name, level, id=row.id, previous_worker=row.worker, **({"error": row.refused} if row.refused else {}))
