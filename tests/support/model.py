"""The oracle of tests/prove/test_model.py: rows, claims and gates as rowmill promises them, in memory and in hours.

Written from the promises, not from the engine: nothing of ``rowmill`` is imported. Where an order is left open (which
key has its turn) the oracle says what is allowed, and follows what was done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

#: Hours. Time moves by whole ones, and nothing falls due at one: what is due never hangs on how long a step took.
LEASE, BACKOFF, COOLDOWN, TOKEN = 5.5, 1.5, 3.5, 1.7
#: After so many runs in a row whose inputs changed, the outcome is final; runs so far apart are not in a row.
BOUND, APART = 2, 24
LIMIT, RECLAIMS = 2, 1
#: How long a row waits for its condition, and how much later a claim may take it that nobody has ended then.
TIMEOUT, MARGIN = 2.5, 24
FINAL = ("done", "dead", "canceled")
EXPIRED = "expired: it was not started in time"
POISONED = "taken back too often: its worker died or stopped renewing in every run"


@dataclass(frozen=True)
class Gates:
    """The gates of a lane: by site, and for the whole lane."""

    concurrency: int | None = None
    whole: int | None = None
    breaker: int | None = None
    burst: int | None = None

    @property
    def any(self) -> bool:
        return self != Gates()


@dataclass
class Row:
    """A row, as all of its columns should be. ``claim`` is the number of the one live claim on it."""

    id: int
    site: str | None
    due: float
    state: str = "queued"
    worker: str | None = None
    attempts: int = 0
    failures: int = 0
    reclaims: int = 0
    claimed: float | None = None
    beat: float | None = None
    error: str | None = None
    result: str | None = None
    finished: bool = False
    claim: int | None = None
    #: What the work depends on, and what its claim returned of that; runs in a row for which these differed.
    body: str = ""
    seen: str = ""
    stale: int = 0
    stale_at: float = -math.inf
    #: What rows wait for is true.
    approved: bool = False
    #: Until when it waits, what then, and when it is due: given another time it waits no more.
    waits: tuple[float, str, float] | None = None
    #: From then on it is not started.
    expires: float = math.inf
    #: Where it is, of a lane that is served shard by shard: only there it has a place in the order.
    shard: int = 0

    def back(self, state: str) -> None:
        """To where it can be claimed; nobody holds it."""
        self.state, self.claim = state, None
        self.worker = self.claimed = self.beat = None

    def end(self, state: str, error: str | None = None) -> None:
        """To its end; who held it stays readable."""
        self.state, self.claim, self.finished = state, None, True
        self.error = error if error is not None else self.error


@dataclass
class Gate:
    """What a site's gates remember."""

    streak: int = 0
    open_until: float = -math.inf
    closed_until: float = -math.inf
    tokens: float = math.inf
    filled: float = 0.0


@dataclass(frozen=True)
class End:
    """How a run ended: the outcome's kind, and what it says to row and gates."""

    kind: str
    text: str | None = None
    delay: float = 0.0
    #: What a breaker takes it for: success (""), a failure, or nothing (None).
    word: str | None = None
    closes: bool = False


@dataclass
class Oracle:
    """All there is. ``counts``: the table has counters of its own for failures and reclaims."""

    gates: Gates = field(default_factory=Gates)
    counts: bool = True
    #: The lane has inputs.
    inputs: bool = False
    states: tuple[str, str] = ("queued", "failed")
    now: float = 0.0
    rows: dict[int, Row] = field(default_factory=dict)
    by_site: dict[str, Gate] = field(default_factory=dict)
    #: Until when: a site, the lane (None) or the environment ("").
    paused: dict[str | None, float] = field(default_factory=dict)

    # -- what may be claimed

    def gate(self, site: str) -> Gate:
        """The site's gates, as full as they are now."""
        gate = self.by_site.setdefault(site, Gate())
        if self.gates.burst is not None:
            gate.tokens = min(self.gates.burst, gate.tokens + (self.now - gate.filled) / TOKEN)
            gate.filled = self.now
        return gate

    def running(self, site: str | None = None) -> int:
        return sum(r.state == "running" and (site is None or r.site == site) for r in self.rows.values())

    def ready(self, site: str | None) -> list[int]:
        """The site's rows that wait to be claimed."""
        rows = [r for r in self.rows.values() if r.site == site and r.state in self.states]
        return [r.id for r in rows if r.due <= self.now < r.expires]

    def place(self, id: int) -> float:
        """Where a row stands in the lane's order: by its number, or, in rowmill's own table, by when it is due."""
        return id if self.counts else self.rows[id].due

    def is_paused(self, target: str | None) -> bool:
        return self.paused.get(target, -math.inf) > self.now

    def allowed(self, site: str | None) -> float:
        """How many more rows of a site its own gates let start."""
        if site is None:
            return math.inf
        gate, running = self.gate(site), self.running(site)
        if self.is_paused(site) or gate.closed_until > self.now:
            return 0
        found = [math.inf]
        if self.gates.concurrency is not None:
            found.append(self.gates.concurrency - running)
        if self.gates.breaker is not None and gate.streak >= self.gates.breaker:
            found.append(0 if gate.open_until > self.now else 1 - running)
        if self.gates.burst is not None:
            found.append(math.floor(gate.tokens))
        return max(min(found), 0)

    def room(self) -> float:
        """How many more rows the lane as a whole lets start."""
        if self.is_paused(None) or self.is_paused(""):
            return 0
        return math.inf if self.gates.whole is None else max(self.gates.whole - self.running(), 0)

    # -- the verbs

    def claimed(self, worker: str, count: int, claims: dict[int, int]) -> None:
        """A claim took these rows (by id, the claim's number): whether it might, and whether it took what it could."""
        sites = {self.rows[id].site for id in claims} | {r.site for r in self.rows.values()}
        room = self.room()
        assert len(claims) <= min(count, room), "more than asked for, or than the lane lets start"
        spare = len(claims) < min(count, room)
        for site in sorted(sites, key=str):
            ready, allowed = self.ready(site), self.allowed(site)
            taken = [id for id in claims if self.rows[id].site == site]
            assert set(taken) <= set(ready), f"{site}: not ready"
            for shard in {self.rows[id].shard for id in taken}:
                places = [[self.place(id) for id in ids if self.rows[id].shard == shard] for ids in (taken, ready)]
                left = sorted(set(places[1]) - set(places[0]))
                assert max(places[0]) <= min(left, default=math.inf), f"{site}: out of order"
            assert len(taken) <= allowed, f"{site}: over its limit"
            assert not spare or len(taken) == min(len(ready), allowed), f"{site}: held back by nothing"
        for id, number in claims.items():
            row = self.rows[id]
            row.state, row.worker, row.claim, row.attempts = "running", worker, number, row.attempts + 1
            row.claimed = row.beat = self.now
            row.seen = row.body
            if row.site is not None and self.gates.burst is not None:
                self.by_site[row.site].tokens -= 1

    def attempt(self, id: int) -> int:
        """Which attempt a run of this row is."""
        return self.rows[id].failures + 1 if self.counts else self.rows[id].attempts

    def holds(self, id: int, number: int) -> bool:
        return id in self.rows and self.rows[id].claim == number

    def renewed(self, id: int) -> None:
        self.rows[id].beat = self.now

    def is_stale(self, id: int, attempt: int, end: End) -> bool:
        """An end computed from inputs that are not the row's any more is not final, so often in a row."""
        row, last = self.rows[id], end.kind == "retry" and attempt >= LIMIT
        runs = row.stale if self.now - row.stale_at < APART else 0
        return self.inputs and (end.kind in FINAL or last) and row.body != row.seen and runs < BOUND

    def settled(self, id: int, attempt: int, end: End) -> None:
        """The outcome of a claim that holds."""
        row, kind = self.rows[id], end.kind
        if self.is_stale(id, attempt, end):
            row.back(self.states[0])
            row.attempts = max(row.attempts - 1, 0)
            row.stale = row.stale + 1 if self.now - row.stale_at < APART else 1
            row.stale_at = self.now
            return
        if kind == "retry" and attempt >= LIMIT:
            kind = "dead"
        if kind in FINAL:
            row.stale = 0
        if kind == "done":
            row.end("done")
            row.result = end.text if end.text is not None else row.result
        elif kind in FINAL:
            row.end(kind, end.text)
        else:
            row.back(self.states[-1] if kind == "retry" else self.states[0])
            if kind == "retry":
                row.error = end.text
            else:
                row.attempts = max(row.attempts - 1, 0)
            if kind == "wait":
                row.due, row.waits = self.now, None
                if not row.approved:
                    row.due += TIMEOUT + (MARGIN if end.text == "dead" else 0)
                    row.waits = self.now + TIMEOUT, str(end.text), row.due
            elif kind != "release":
                row.due = self.now + end.delay
        if kind in ("retry", "dead"):
            row.failures += 1

    def learned(self, site: str | None, end: End) -> None:
        """What the gates make of a run's end, whether or not its claim still held when it failed."""
        if site is None:
            return
        gate = self.gate(site)
        if end.closes and self.gates.any:
            gate.closed_until = max(gate.closed_until, self.now + end.delay)
        if self.gates.breaker is None or end.word is None:
            return
        if not end.word:
            gate.streak, gate.open_until = 0, -math.inf
            return
        gate.streak += 1
        if gate.streak >= self.gates.breaker and not gate.open_until > self.now:
            gate.open_until = self.now + COOLDOWN

    def swept(self) -> dict[int, bool]:
        """Take back what gives no sign of life; which rows, and which of them were poison."""
        found = {}
        for row in self.rows.values():
            if row.state != "running" or row.beat is None or row.beat >= self.now - LEASE:
                continue
            ended = row.failures + row.reclaims + 1 if self.counts else row.attempts
            found[row.id] = ended > LIMIT + RECLAIMS
            row.reclaims += 1
            if found[row.id]:
                row.end("dead", POISONED)
            else:
                row.back(self.states[0])
        return found

    def looked(self) -> tuple[set[int], set[int]]:
        """Waiting rows that are due now, because their condition is true, and those that are dead: they timed out."""
        woken, dead = set(), set()
        for row in self.rows.values():
            if row.waits is None or row.state not in self.states or row.due != row.waits[2]:
                continue
            until, then, _ = row.waits
            if row.approved:
                woken.add(row.id)
                row.due = self.now
            elif then == "dead" and until <= self.now:
                dead.add(row.id)
                row.failures += 1
                row.end("dead", "the wait timed out: approved = 1")
                row.worker = None
        return woken, dead

    def forgotten(self) -> None:
        """Rows that have ended, or were given another time, wait no more, even if that time comes again by chance."""
        for row in self.rows.values():
            if row.waits is not None and (row.state in FINAL or row.due != row.waits[2]):
                row.waits = None

    def expired(self) -> set[int]:
        """Rows that were not started in time, whatever they wait for: they end."""
        over = {r.id for r in self.rows.values() if r.state in self.states and r.expires <= self.now}
        for id in over:
            self.rows[id].end("canceled", EXPIRED)
        return over

    # -- what an operator does

    def cancel(self, id: int, reason: str) -> bool:
        row = self.rows[id]
        if row.state in FINAL:
            return False
        row.end("canceled", reason)
        return True

    def release(self, id: int) -> bool:
        row = self.rows[id]
        if row.state != "running":
            return False
        row.back(self.states[0])
        row.attempts = max(row.attempts - 1, 0)
        return True

    def retry(self, id: int) -> bool:
        row = self.rows[id]
        if row.state != "dead":
            return False
        self.rows[id] = replace(row, attempts=0, failures=0, reclaims=0, due=self.now, finished=False, expires=math.inf)
        self.rows[id].back(self.states[0])
        return True

    @property
    def over(self) -> bool:
        return all(row.state in FINAL for row in self.rows.values())
