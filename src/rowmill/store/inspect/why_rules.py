"""Why a row is not running: from facts to reasons. No I/O; whatever a gate holds back is asked of the gate's own words.

All times are seconds: ``since`` ago, ``wait`` from now. A wait of ``inf`` ends only when somebody acts; None is not
known, because it depends on how long others run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...declare.gates import Group
from ...plural import counted, plural
from ..gates.rules import Allowed, GateState, allowances, rate_in_force
from ..lane.waits import WaitFacts

INF = math.inf
_ERROR = 200  # characters of an error that a reason quotes


@dataclass(frozen=True, slots=True)
class Runner:
    """A running row, and who has it."""

    id: str
    worker: str | None
    seconds: float | None

    def __str__(self) -> str:
        return f"{self.id} ({self.worker})" if self.worker else self.id


@dataclass(frozen=True, slots=True)
class GateFacts:
    """One group of gates, as the row meets it."""

    group: Group
    key: str
    state: GateState
    running: int
    #: Running rows of this key by live worker, where a gate asks for each process; none: no worker is known.
    by_process: Mapping[str, int] = field(default_factory=dict)
    runners: tuple[Runner, ...] = ()
    now: float = 0.0

    @property
    def name(self) -> str:
        """``domain example.org``"""
        return f"{self.group.by} {self.key}" if self.group.by is not None else "the lane"


@dataclass(frozen=True, slots=True)
class SharedFacts:
    """The lane's rate over all environments: its limit, how many starts count now, and until when it is used up."""

    n: int
    seconds: float
    used: float = 0.0
    wait: float = 0.0
    #: Why that is not known.
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PauseFacts:
    """A pause that is about this row."""

    kind: str
    name: str
    reason: str | None
    since: float | None
    left: float


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker that serves, or served, the lane."""

    id: str
    alive: bool
    silent_for: float
    #: Its runs in this lane, and in all.
    here: int = 0
    runs: int = 0
    #: How many runs it may have in all; None: no limit of its own.
    at_once: int | None = None
    #: Seconds since its process began.
    up_for: float | None = None
    #: What shows that it is dead or seems to be; None: it seems to live.
    evidence: str | None = None
    #: Seconds until another worker has taken back what it held, where that does not wait for the lease.
    taken_back_within: float | None = None


@dataclass(frozen=True, slots=True)
class LockFacts:
    """Somebody's transaction has the row locked."""

    who: str | None = None
    since: float | None = None


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """All that decides whether a row runs, and when. The defaults are a row that nothing holds back."""

    environment: str
    lane: str
    #: running, done, dead, canceled, exhausted (no state says dead), open (ready, waiting or excluded), or None: no
    #: state.
    state: str | None = "open"
    found: bool = True
    #: The parts of the lane's ready condition that do not hold.
    fails: tuple[str, ...] = ()
    #: The condition that it waits for, what then (``dead`` or ``run``), and seconds since and until.
    wait: WaitFacts | None = None
    ages: Mapping[str, float | None] = field(default_factory=dict)
    worker: str | None = None
    error: str | None = None
    silent_for: float | None = None
    stuck: bool = False
    #: Seconds since a worker first saw it running, where the row itself shows no time.
    seen_for: float | None = None
    lease: float = 300.0
    sweep_every: float = 60.0
    attempts: int | None = None
    limit: int | None = None
    untouched_for: float = 0.0
    where: str = ""
    #: What another lane over the same table makes of it, where it is in no state of this one.
    elsewhere: str | None = None
    #: It is in one of the lane's ``ignore_states``: which.
    ignored: str | None = None
    served: bool = True
    served_in: tuple[str, ...] = ()
    pauses: tuple[PauseFacts, ...] = ()
    gates: tuple[GateFacts, ...] = ()
    shared: SharedFacts | None = None
    #: None: there is no table that would tell.
    workers: tuple[WorkerFacts, ...] | None = ()
    slots: int = 1
    above: tuple[str, ...] = ()
    locked: LockFacts | None = None
    #: The database's words where it would refuse the claim of this row.
    refused: str | None = None
    #: Runs one after the other whose outcome was not final because its inputs changed, and since when.
    stale_runs: int = 0
    stale_since: float = 0.0
    inputs: tuple[str, ...] = ()
    #: Ready rows that go before it; -1: more than were counted.
    ahead: int | None = 0

    @property
    def live(self) -> list[WorkerFacts]:
        """Workers that serve the lane and have been heard of."""
        return [worker for worker in self.workers or () if worker.alive]


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that holds a row back, or says where it is."""

    code: str
    text: str
    since: float | None = None
    wait: float | None = None


@dataclass(frozen=True, slots=True)
class WhyAnswer:
    """Why, the decisive reason first. ``state``: none, running, stuck, done, dead, canceled, exhausted, excluded,
    ignored, elsewhere, held or ready. ``wait``: seconds until it should run; 0: at the next claim; None: not known;
    infinite: not by itself.
    """

    state: str
    reasons: tuple[Reason, ...]
    wait: float | None = None


#: What is asked first when nothing else decides. A reason without an end goes before all others.
_ORDER = ("refused", "attempts", "expires_at", "ready", "version", "where", "not_served", "environment_paused",
          "lane_paused", "key_paused", "no_worker", "wait", "run_after", "untouched_for", "closed", "breaker",
          "concurrency", "process_concurrency", "probe", "rate", "shared_rate", "pace", "capacity", "above",
          "locked", "line")  # fmt: skip
_BY_RUNS = (
    "concurrency",
    "process_concurrency",
    "probe",
    "rate",
    "shared_rate",
    "pace",
    "capacity",
    "above",
    "locked",
    "line",
)


def why(facts: RowFacts) -> WhyAnswer:
    """Everything that holds the row back."""
    if not facts.found:
        return WhyAnswer("none", (Reason("no_row", "no row has this id"),), INF)
    match facts.state:
        case "running":
            answer = _running(facts)
            return replace(answer, reasons=(*answer.reasons, *_stale(facts)))
        case "done":
            return WhyAnswer("done", (Reason("done", "it has finished", _ended(facts)),))
        case "dead" | "canceled":
            text, quoted = ("it was canceled", ": ")
            if facts.state == "dead":
                text, quoted = ("it will not be retried", "; its last error: ")
            text += f"{quoted}{facts.error}" if facts.error else ""
            return WhyAnswer(facts.state, (Reason(facts.state, text, _ended(facts), INF),), INF)
        case None if facts.ignored:
            text = f"the lane ignores this state: {facts.ignored} (ignore_states)"
            return WhyAnswer("ignored", (Reason("ignored", text, None, INF),), INF)
        case None:
            text = "it matches no state of this lane" + (f": {facts.elsewhere}" if facts.elsewhere else "")
            return WhyAnswer("elsewhere", (Reason("no_state", text, None, INF),), INF)
        case _:
            return _open(facts)


def _stale(facts: RowFacts) -> Iterable[Reason]:
    """What happened to its last runs; that holds nothing back."""
    if facts.stale_runs:
        its = "the last run was" if facts.stale_runs == 1 else f"the last {facts.stale_runs:,} runs were"
        text = f"{' or '.join(facts.inputs)} changed while {its} under way, so the outcome was not final"
        yield Reason("inputs_changed", text, facts.stale_since, 0.0)


def _ended(facts: RowFacts) -> float | None:
    return next((age for role in ("finished_at", "updated_at") if (age := facts.ages.get(role)) is not None), None)


def _running(facts: RowFacts) -> WhyAnswer:
    by = f" on {facts.worker}" if facts.worker else ""
    since = facts.ages.get("claimed_at")
    sweep = Reason("sweep", f"the next sweep takes it back; sweeps run about every {span(facts.sweep_every)}")
    nobody = list(_no_worker(facts)) if facts.workers is not None and not facts.live else []
    if not facts.stuck:
        sign = f", last heartbeat {span(facts.silent_for)} ago" if facts.silent_for is not None else ""
        text = f"it is running{by}{sign}, lease {span(facts.lease)}"
        if (gone := _gone(facts)) is None:
            return WhyAnswer("running", (Reason("running", text, since),))
        if (within := _taken_back_within(facts)) is not None:
            text = f"it was running{by}, but {gone}; another worker takes it back within {span(within)}"
            return WhyAnswer("running", (Reason("running", text, since, within),), within)
        left = max(facts.lease - (facts.silent_for or 0.0), 0.0)
        text = f"it was running{by}, but {gone}; a sweep takes it back when its lease of {span(facts.lease)} expires,"
        text += f" in about {span(left)}"
        due = INF if nobody else left + facts.sweep_every
        return WhyAnswer("running", (Reason("running", text, since), *(nobody or [sweep])), due)
    silent = "no heartbeat" + (f" for {span(facts.silent_for)}" if facts.silent_for is not None else "")
    text = f"its worker{f' {facts.worker}' if facts.worker else ''} sent {silent}, and its lease is {span(facts.lease)}"
    if _timeless(facts):
        text = f"it is running{by}, but shows neither a claim time nor a heartbeat"
        sweep = Reason("sweep", f"a worker takes it back {span(facts.lease)} (the lease) after it first sees it")
    if (within := _taken_back_within(facts)) is not None:
        text += f"; {_gone(facts)}, so another worker takes it back within {span(within)}"
        return WhyAnswer("stuck", (Reason("stuck", text, since, within),), within)
    wait = INF if nobody else _until_swept(facts)
    return WhyAnswer("stuck", (Reason("stuck", text, since, wait), *(nobody or [sweep])), wait)


def _timeless(facts: RowFacts) -> bool:
    """The row shows no time at all: it counts when a worker first saw it running."""
    return facts.silent_for is None and facts.ages.get("claimed_at") is None


def _until_swept(facts: RowFacts) -> float | None:
    """Seconds until a sweep must have taken a stuck row back; None: that time is over."""
    silent = facts.silent_for if facts.silent_for is not None else facts.ages.get("claimed_at")
    if silent is None:
        silent = facts.seen_for if facts.seen_for is not None else -facts.sweep_every  # the next sweep sees it
    left = facts.lease + facts.sweep_every - silent
    return left if left > 0 else None


def _holder(facts: RowFacts) -> WorkerFacts | None:
    return next((worker for worker in facts.workers or () if worker.id == facts.worker), None)


def _taken_back_within(facts: RowFacts) -> float | None:
    """Seconds until another worker has taken the row back from its dead holder; None: it waits for its lease."""
    holder = _holder(facts)
    return None if holder is None else holder.taken_back_within


def _gone(facts: RowFacts) -> str | None:
    """What shows that the holder is gone although the lease still runs; None where nothing does."""
    if (same := _holder(facts)) is None:
        return None
    if same.evidence is not None:
        seems = "is dead" if not same.alive else "seems to be dead"
        return f"{same.id} {seems}: {same.evidence} (last seen {span(same.silent_for)} ago)"
    if facts.silent_for is None:
        return None
    # The process that has the holder's name now is younger than the row's last sign of life: it is another one.
    younger = same.up_for is not None and same.up_for < facts.silent_for
    return "that worker has restarted since" if younger else None


def _open(facts: RowFacts) -> WhyAnswer:
    reasons = [*_unready(facts), *_pauses(facts), *_gates(facts), *_shared(facts), *_serving(facts)]
    ready = not facts.fails and facts.state == "open"
    if ready:
        reasons += _in_line(facts)
    reasons.sort(key=_weight)
    holding = [reason for reason in reasons if reason.code not in ("line", "above")]
    if ready:
        reasons.append(_place(facts))
    reasons += _stale(facts)
    waits = [reason.wait for reason in (holding if holding else reasons)]
    wait = (
        None
        if any(w is None for w in waits) and INF not in waits
        else max((w for w in waits if w is not None), default=0.0)
    )
    state = "held" if holding else "ready"
    if {"attempts", "where"} & set(facts.fails):
        state = "exhausted" if "attempts" in facts.fails else "excluded"
    return WhyAnswer(state, tuple(reasons), wait)


def _shared(facts: RowFacts) -> Iterable[Reason]:
    """The rate over all environments."""
    if (shared := facts.shared) is None:
        return
    if shared.error is not None:
        text = f"the database that holds the lane's shared rate does not answer: {shared.error}"
        yield Reason("shared_rate", text, None, None)
    elif shared.wait > 0:
        text = f"the lane's shared rate is used up: {shared.n:,} starts in {span(shared.seconds)} in all environments"
        yield Reason("shared_rate", text, None, shared.wait)


def _weight(reason: Reason) -> tuple[int, float, int]:
    """Without an end, then by time the longest first, then what depends on others' runs."""
    rank = _ORDER.index(reason.code)
    if reason.wait == INF or reason.code in ("where", "ready"):
        return 0, 0.0, rank
    if reason.code in _BY_RUNS:
        return 2, 0.0, rank
    return 1, -(reason.wait or 0.0), rank


def _unready(facts: RowFacts) -> Iterable[Reason]:
    age = facts.ages.get
    if "attempts" in facts.fails:
        used = f"{facts.attempts} of {facts.limit}" if facts.limit is not None else str(facts.attempts)
        yield Reason(
            "attempts",
            f"it has used all its attempts ({used}), and the lane declares no dead state",
            age("updated_at"),
            INF,
        )
    if "state" in facts.fails:
        yield Reason(
            "ready", "it is waiting for its retry, but the lane's ready condition is not true for it", None, None
        )
    if "where" in facts.fails:
        yield Reason("where", f"the lane's where condition is not true for it: {facts.where}", None, None)
    if "expires_at" in facts.fails:
        text = "it expired before it was started; the next sweep ends it"
        yield Reason("expires_at", f"{text}, within {span(facts.sweep_every)}", age("expires_at"), INF)
    if "version" in facts.fails:
        yield Reason("version", "it already has the lane's version", None, None)
    changed = age("updated_at") if age("updated_at") is not None else age("created_at")
    if "run_after" in facts.fails:
        due = age("run_after")
        if facts.wait is not None:
            then = "then it is dead" if facts.wait.then == "dead" else "then it runs anyway"
            text = f"waits for {facts.wait.until} until {facts.wait.until_at:%Y-%m-%d %H:%M} UTC; {then}"
            yield Reason("wait", text, facts.wait.since, None if facts.wait.left > 0 else facts.sweep_every)
        elif due is None:
            yield Reason("run_after", "scheduled for never: run_after is infinite", changed, INF)
        else:
            text = f"scheduled: due in {span(max(-due, 0.0))}" + _last_error(facts)
            yield Reason("run_after", text, changed, max(-due, 0.0))
    if "untouched_for" in facts.fails:
        left = max(facts.untouched_for - (age("updated_at") or 0.0), 0.0)
        yield Reason(
            "untouched_for", f"it must stay unchanged for {span(facts.untouched_for)} first (untouched_for)",
            age("updated_at"), left,
        )  # fmt: skip


def _last_error(facts: RowFacts) -> str:
    """The first line of the error that a waiting row shows: that is what it waits after."""
    line = next(iter((facts.error or "").strip().splitlines()), "")
    return f"; its last error: {line[:_ERROR]}{'...' if len(line) > _ERROR else ''}" if line else ""


def _pauses(facts: RowFacts) -> Iterable[Reason]:
    for pause in facts.pauses:
        text = f"{pause.name} is paused" + (f": {pause.reason}" if pause.reason else "")
        yield Reason(f"{pause.kind}_paused", text, pause.since, pause.left)


def _gates(facts: RowFacts) -> Iterable[Reason]:
    for gate in facts.gates:
        for allowed in _held(gate):
            if (reason := _gate(facts, gate, allowed)) is not None:
                yield reason


def _held(gate: GateFacts) -> list[Allowed]:
    """The gates of a group that let nothing through; a limit of each process only where no live one has room."""

    def closed(mine: int) -> list[Allowed]:
        return [a for a in allowances(gate.group, gate.state, gate.running, mine) if a.most <= 0]

    tries = [closed(mine) for mine in gate.by_process.values()] or [closed(0)]
    return min(tries, key=len)


def _gate(facts: RowFacts, gate: GateFacts, allowed: Allowed) -> Reason | None:
    group, state = gate.group, gate.state
    ahead = max(facts.ahead or 0, 0)
    listed = ", ".join(map(str, gate.runners)) + (", ..." if gate.running > len(gate.runners) else "")
    youngest = min((r.seconds for r in gate.runners if r.seconds is not None), default=None)
    match allowed.why:
        case "paused":
            return None  # told with the pauses, which know since when and why
        case "closed":
            return Reason("closed", f"{gate.name}: the other side asked to wait (Retry-After)", None, allowed.wait)
        case "concurrency":
            assert group.concurrency is not None
            most = state.most if state.most is not None else group.concurrency.limit
            if most <= 0:
                return Reason("concurrency", f"{gate.name}: its concurrency limit was set to 0", None, INF)
            return Reason(
                "concurrency",
                f"{gate.name}: concurrency limit reached, {gate.running} of {most} running: {listed}",
                youngest,
            )
        case "concurrency of this process":
            assert group.process is not None
            return Reason(
                "process_concurrency", f"{gate.name}: concurrency limit reached, {group.process.limit} running in every"
                f" worker process: {listed}", youngest,
            )  # fmt: skip
        case "breaker":
            assert group.breaker is not None
            since = group.breaker.cooldown.total_seconds() - (allowed.wait or 0.0)
            text = f"{gate.name}: circuit open after {counted(state.streak, 'failure')} in a row"
            return Reason("breaker", text, since if since >= 0 else None, allowed.wait)
        case "breaker's probe":
            text = f"{gate.name}: circuit half open, and its one probe is running: {listed}"
            return Reason("probe", text, youngest)
        case "rate":
            force = rate_in_force(group.rate, state) if group.rate is not None else None
            if allowed.wait is None or force is None:
                return Reason("rate", f"{gate.name}: its rate limit is 0, so nothing starts", None, INF)
            text = f"{gate.name}: rate limited, next start in {span(allowed.wait)}"
            if ahead:
                text += f"; {counted(ahead, 'row')} of the same key {plural(ahead, 'is', 'are')} ahead of it"
            return Reason("rate", text, max(state.elapsed, 0.0) or None, allowed.wait + ahead / force[0])
        case _:
            assert group.pace is not None
            text = f"the lane is at its pace limit: {counted(group.pace.n, 'start')} per {span(group.pace.seconds)}"
            turns = ahead // group.pace.n * group.pace.seconds
            return Reason("pace", text, None, (allowed.wait or 0.0) + turns)


def _serving(facts: RowFacts) -> Iterable[Reason]:
    if not facts.served:
        others = f"; it is declared for {', '.join(facts.served_in)}" if facts.served_in else ""
        yield Reason(
            "not_served",
            f"lane {facts.lane!r} is not declared for environment {facts.environment!r}{others}",
            None,
            INF,
        )
    elif facts.workers is not None and not facts.live:
        yield from _no_worker(facts)


def _no_worker(facts: RowFacts) -> Iterable[Reason]:
    last = min(facts.workers or (), key=lambda worker: worker.silent_for, default=None)
    text = "no live worker serves the lane" + (f"; the last one was {last.id}" if last else "")
    yield Reason("no_worker", text, last.silent_for if last else None, INF)


def _in_line(facts: RowFacts) -> Iterable[Reason]:
    live = facts.live
    full = [w for w in live if w.here >= facts.slots or (w.at_once is not None and w.runs >= w.at_once)]
    if live and len(full) == len(live):
        names = ", ".join(f"{w.id} ({w.runs} running)" for w in full[:3]) + (", ..." if len(full) > 3 else "")
        yield Reason("capacity", f"all slots are busy: {names}")
    if facts.refused is not None:
        yield Reason("refused", f"the database refuses the claim of this row: {facts.refused}", None, INF)
    if facts.above:
        yield Reason("above", f"rows of higher priority are ready: {', '.join(facts.above)}")
    if facts.locked is not None:
        who = f" ({facts.locked.who})" if facts.locked.who else ""
        yield Reason("locked", f"another transaction has locked it{who}", facts.locked.since)


def _place(facts: RowFacts) -> Reason:
    since = ready_for(facts.ages)
    where = "of its key" if any(gate.group.by is not None for gate in facts.gates) else "of the lane"
    if facts.ahead is None:
        text = "it is ready"
    elif facts.ahead < 0:
        text = f"it is ready; more than 1,000 rows {where} are ahead of it"
    elif facts.ahead == 0:
        text = f"it is ready, and first in line {where}"
    else:
        are = plural(facts.ahead, "is", "are")
        text = f"it is ready; {counted(facts.ahead, 'row')} {where} {are} ahead of it"
    return Reason("line", text, since, 0.0 if facts.ahead == 0 else None)


def ready_for(ages: Mapping[str, float | None]) -> float | None:
    """How long a ready row has been ready: since its run_after, or since its creation where that is later."""
    return min((age for role in ("run_after", "created_at") if (age := ages.get(role)) is not None), default=None)


def span(seconds: float | None) -> str:
    """A duration in one unit, as people say it."""
    if seconds is None:
        return ""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
