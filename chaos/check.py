"""The check: what became of every row, from three accounts that know nothing of each other.

What was added (the feeder), what was run (the handlers' own files), and what was written: a ledger that a trigger keeps
of every claim, outcome and sweep, in the transaction that makes it. The words: docs/explanation/chaos.md.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .records import Run

KINDS = ("lost", "doubled", "stale", "stuck")


@dataclass(frozen=True)
class Entry:
    """One change of a row, as the trigger saw it. ``held_by``, ``held_since`` and ``beat_at`` are from before it."""

    row: int
    was: str
    now: str
    held_by: str | None = None
    held_since: float | None = None
    beat_at: float | None = None
    worker: str | None = None
    outcome: str | None = None
    swept: bool = False
    by_hand: bool = False
    at: float = 0.0


@dataclass(frozen=True)
class Row:
    """A row at the end."""

    status: str
    outcome: str | None
    what: str = "plain"


@dataclass
class Verdict:
    """What was found. All of ``KINDS`` must be 0."""

    rows: int = 0
    runs: int = 0
    #: Runs that went on after their lease had run out while another had the row: they may, but must not write.
    outlived: int = 0
    swept: int = 0
    #: Rows taken back from a worker that nobody had killed.
    from_living: int = 0
    by_hand: int = 0
    found: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def say(self, kind: str, row: int, words: str) -> None:
        self.found[kind].append(f"row {row}: {words}")

    def count(self, kind: str) -> int:
        """Rows, each once, however much is wrong with it."""
        return len({words.split(":")[0] for words in self.found[kind]})

    @property
    def clean(self) -> bool:
        return not any(self.found.values())


def check(
    added: Collection[int],
    rows: Mapping[int, Row],
    ledger: Iterable[Entry],
    runs: Iterable[Run],
    effects: Mapping[int, int],
    lease: float,
    killed: Mapping[str, float] | None = None,
) -> Verdict:
    """The verdict over one bout. ``killed``: when workers were killed, by name, in the time of the ledger: from then on
    their rows may be taken before the lease is over.
    """
    verdict = Verdict(rows=len(added))
    entries: dict[int, list[Entry]] = defaultdict(list)
    for entry in ledger:
        entries[entry.row].append(entry)
    by_row: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_row[run.row].append(run)
        verdict.runs += 1
    for row in added:
        _Row(verdict, row, entries[row], by_row[row], lease, killed or {}).check(rows.get(row), effects.get(row, 0))
    for row in rows.keys() - set(added):
        verdict.say("doubled", row, "nobody added it")
    return verdict


class _Row:
    """One row's way through the ledger."""

    def __init__(
        self,
        verdict: Verdict,
        row: int,
        entries: list[Entry],
        runs: list[Run],
        lease: float,
        killed: Mapping[str, float],
    ) -> None:
        self._verdict, self._row, self._entries, self._runs, self._lease = verdict, row, entries, runs, lease
        self._killed = killed
        self._named = {run.name: run for run in runs}

    def _say(self, kind: str, words: str) -> None:
        self._verdict.say(kind, self._row, words)

    def check(self, last: Row | None, effects: int) -> None:
        hand: Entry | None = None
        outcomes = 0
        for entry in self._entries:
            if hand is not None:
                self._say("stale", f"{entry.now} by {entry.worker} over what was written by hand")
            if entry.by_hand:
                hand = entry
                self._verdict.by_hand += 1
            elif entry.now == "running":
                self._claimed(entry)
            elif entry.now == "done":
                outcomes += 1
                self._done(entry)
            else:
                self._back(entry)
        if outcomes > 1:
            self._say("doubled", f"{outcomes} outcomes were recorded")
        self._last(last, hand, outcomes)
        self._effects(last, hand, effects)
        self._overlaps()

    def _claimed(self, entry: Entry) -> None:
        if entry.was != "queued":
            self._say("doubled", f"claimed by {entry.worker} while {entry.held_by} held it ({entry.was})")

    def _done(self, entry: Entry) -> None:
        run = self._named.get(entry.outcome or "")
        if run is None or not run.came_to_end:
            self._say("lost", f"done, but no run came to its end: {entry.outcome}")
        elif entry.was != "running" or not _by(run, entry):
            self._say("stale", f"the outcome of an earlier claim of {run.worker} over {entry.was} of {entry.held_by}")

    def _back(self, entry: Entry) -> None:
        if not entry.swept:
            ended = [run for run in self._runs if _by(run, entry)]
            if ended and all(run.how == "done" for run in ended):
                self._say("stale", f"sent back from {entry.held_by}, whose run was done")
            return
        self._verdict.swept += 1
        silent = self._lease if entry.beat_at is None else entry.at - entry.beat_at
        dead = entry.at >= self._killed.get(entry.held_by or "", math.inf) - 0.002  # SQLite's times have three digits
        self._verdict.from_living += not dead
        if silent < self._lease - 0.002 and not dead:
            self._say("doubled", f"taken from {entry.held_by} {silent:.3f} s after its last sign of life")

    def _last(self, last: Row | None, hand: Entry | None, outcomes: int) -> None:
        if last is None:
            if hand is None or hand.now != "deleted":
                self._say("lost", "it is gone")
        elif hand is not None:
            if hand.now == "deleted" or (last.status, last.outcome) != (hand.now, hand.outcome):
                self._say("stale", f"written by hand as {hand.now} {hand.outcome}, and is {last.status} {last.outcome}")
        elif last.status != "done":
            self._say("stuck", f"still {last.status}")
        elif not outcomes:
            self._say("lost", "done, and no outcome was recorded")

    def _effects(self, last: Row | None, hand: Entry | None, effects: int) -> None:
        if effects > 1:
            self._say("doubled", f"what its finish block writes is there {effects} times")
        if last is not None and hand is None and last.what == "finish" and last.status == "done" and not effects:
            self._say("lost", "done, without what its finish block writes")

    def _overlaps(self) -> None:
        """Two runs at once: the earlier claim must have been lost, by its lease or by somebody's hand."""
        runs = sorted(self._runs, key=lambda run: run.since)
        for number, later in enumerate(runs):
            for earlier in runs[:number]:
                if max(earlier.start, later.start) >= min(earlier.end, later.end):
                    continue
                ends = [entry for entry in self._entries if entry.was == "running" and _by(earlier, entry)]
                if any(entry.swept or entry.by_hand for entry in ends):
                    self._verdict.outlived += 1
                else:
                    self._say("doubled", f"run at once by {earlier.worker} and {later.worker}, both by their lease")


def _by(run: Run, entry: Entry) -> bool:
    """Whether the claim that an entry ended is the run's own. SQLite's times have three digits."""
    return run.worker == entry.held_by and entry.held_since is not None and abs(run.since - entry.held_since) < 0.0015


def totals(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Over several bouts."""
    sums: Counter[str] = Counter()
    for verdict in verdicts:
        sums.update({kind: verdict.count(kind) for kind in KINDS})
        sums.update(rows=verdict.rows, runs=verdict.runs, outlived=verdict.outlived, swept=verdict.swept)
    return sums
