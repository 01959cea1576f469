"""A claim: the hold of one worker on one row, with a lease. A settlement: what the run's end writes to that row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from ...errors import DatabaseError, Refused


@dataclass(frozen=True, slots=True)
class Holder:
    """What all claims of one lane in one place by one worker have in common.

    A table may be altered while claims are held: each claim's row is read by the columns it was claimed with.
    """

    lane: str
    environment: str
    #: As the worker column has it; None where the lane has no such column.
    worker: str | None
    #: What reads a column of the row, by the column's name; and each column's position in it.
    readers: Mapping[str, Callable[[Any], Any]]
    at: Mapping[str, int]
    #: The shard of a lane that has several, where the claim was made in it.
    bucket: Any = None


class Claim:
    """A worker's claim of one row. Renewal, settling and release require that the row is still as written here.

    ``row`` is what the claim statement returned, undecoded. ``worker``, ``claimed_at`` and ``attempts`` are the
    fence: the values the row had when this claim took it, as the database returned them.
    """

    # Defaults that most claims never change are on the class, so that a claim is created fast.
    lost = False
    #: The key of each group of gates that let it through.
    gates: Mapping[str, str] | None = None
    #: The row's inputs as it was claimed with: their fingerprint or values. None: the lane has none.
    inputs: Any = None
    #: What its run has logged, by the engine's class for that. None: nothing.
    lines: Any = None

    def __init__(
        self,
        holder: Holder,
        key: tuple[Any, ...],
        row: Any,
        claimed_at: Any,
        attempts: int | None,
        attempt: int,
        taken: float,
    ) -> None:
        self.holder, self.key, self.row = holder, key, row
        self.claimed_at, self.attempts, self.attempt = claimed_at, attempts, attempt
        #: ``renewed``: when the lease was last known to hold, by this process's monotonic clock.
        self.taken = self.renewed = taken

    @property
    def id(self) -> Any:
        """The row's key: a value, or a tuple for a composite key."""
        return self.key[0] if len(self.key) == 1 else self.key

    @property
    def lane(self) -> str:
        """The lane's name."""
        return self.holder.lane

    @property
    def environment(self) -> str:
        """Where the row is."""
        return self.holder.environment

    @property
    def worker(self) -> str | None:
        """The worker that holds the claim, as in the worker column."""
        return self.holder.worker


#: No columns beside the outcome's own.
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WaitCondition:
    """What a row waits for, for how long, and what then: ``dead``, or ``run``."""

    until: str
    timeout: timedelta
    then: str


class Settlement:
    """What is to be written for one claim, once, and only where the claim still holds."""

    # Defaults that a plain outcome does not set are on the class, so that it is created fast.
    columns: Mapping[str, Any] = NOTHING
    error: str | None = None
    delay: timedelta | None = None
    #: What kind of failure it was (transient, permanent, rate); None where the run says nothing of its gates' keys.
    word: str | None = None
    #: The other side asked to be left alone for so long: for everybody, where a gate knows by which key; or, on
    #: request, for the whole lane.
    closes: timedelta | None = None
    closes_lane = False
    #: What the row waits for, where that is how the run ended.
    wait: WaitCondition | None = None
    #: Sent before, and the reply was lost: it may already stand.
    reply_lost = False
    #: Settled with the lane's ``on_settled`` hooks; not where those are what failed.
    hooked = True
    duration = 0.0
    #: The exception behind a failure, for the log: where it was raised is not for the row.
    cause: BaseException | None = None
    #: How often the database has refused to write it at all.
    refusals = 0
    #: Its gates have heard of it.
    heard = False
    #: The row's inputs had changed, and it is settled all the same: they have done so for too long.
    kept_changing = False

    def __init__(
        self,
        claim: Claim,
        kind: str,
        *,
        columns: Mapping[str, Any] | None = None,
        error: str | None = None,
        delay: timedelta | None = None,
        word: str | None = None,
        closes: timedelta | None = None,
    ) -> None:
        self.claim, self.kind = claim, kind
        if columns is not None:
            self.columns = columns
        if error is not None:
            self.error = error
        if delay is not None:
            self.delay = delay
        if word is not None:
            self.word = word
        if closes is not None:
            self.closes = closes

    def go_stale(self, *, write: bool) -> None:
        """The row's inputs changed during the run: no end of it, and the row is ready again."""
        if self.kind == "done":
            self.word = ""  # the run itself went well, for those who learn from that
        if not (write and self.kind == "done"):
            self.columns = NOTHING
        self.kind, self.delay = "stale", timedelta(0)


@dataclass(slots=True)
class Report:
    """What became of a batch of settlements."""

    written: list[Settlement] = field(default_factory=list)
    #: The claim no longer held: nothing was written.
    lost: list[Settlement] = field(default_factory=list)
    #: Still ours, but somebody else has the row locked: try again.
    locked: list[Settlement] = field(default_factory=list)
    #: The database would not take the values: settled as failed, with the database's words.
    refused: list[Settlement] = field(default_factory=list)
    #: The database would not even take the bare outcome (a constraint on the state): not written, with its words.
    stuck: list[tuple[Settlement, str]] = field(default_factory=list)
    #: The lane's own ``on_settled`` raised: nothing was written.
    unhooked: list[tuple[Settlement, BaseException]] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Take in another report."""
        for name in ("written", "lost", "locked", "refused", "stuck", "unhooked"):
            getattr(self, name).extend(getattr(other, name))


@dataclass(slots=True)
class Changed:
    """Settlements that were not written because their rows' inputs changed: the row goes ``back``, or its outcome is
    ``final`` all the same, because the inputs have kept changing for too long.
    """

    back: list[Settlement]
    final: list[Settlement]

    def add(self, settlement: Settlement, *, final: bool, write: bool) -> None:
        """Take one in, as it is to be written now. ``write``: with the columns that its run returned."""
        if final:
            settlement.kept_changing = True
            self.final.append(settlement)
        else:
            settlement.go_stale(write=write)
            self.back.append(settlement)


@dataclass(frozen=True, slots=True)
class Swept:
    """A row whose lease ran out and that was taken back, or, where it is poison, ended as dead.

    ``refused``: the database's words where it could not go back. Such a row is dead, too; if even that was refused,
    ``poison`` is False and the row stays as it is.
    """

    id: Any
    worker: str | None
    poison: bool
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Expired:
    """A row that ended because it expired before it was started; ``refused``: the database's words where it may not."""

    id: Any
    refused: str | None = None


class HookFailed(Exception):
    """A lane's ``on_settled`` raised; the transaction around it was rolled back."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Settled:
    """One settled row as ``on_settled`` sees it: its columns as claimed, and how its run ended."""

    __slots__ = ("_settlement",)

    def __init__(self, settlement: Settlement) -> None:
        self._settlement = settlement

    def __getitem__(self, column: str) -> Any:
        if column in self._settlement.columns:
            return self._settlement.columns[column]
        claim = self._settlement.claim
        return claim.holder.readers[column](claim.row)

    @property
    def id(self) -> Any:
        """The row's key."""
        return self._settlement.claim.id

    @property
    def outcome(self) -> str:
        """done, retry, snooze, wait, dead, canceled, release, or stale: not final, as inputs of the row changed."""
        return self._settlement.kind

    @property
    def error(self) -> str | None:
        """The error text, where the run failed."""
        return self._settlement.error

    @property
    def attempt(self) -> int:
        """Which attempt it was."""
        return self._settlement.claim.attempt


@contextmanager
def encoding() -> Iterator[None]:
    """A value that cannot even be put into words for the database is refused like one that it would not take."""
    try:
        yield
    except DatabaseError:
        raise
    except Exception as error:
        raise Refused(f"it cannot be encoded: {type(error).__name__}: {error}") from error


def groups(batch: Sequence[Settlement]) -> list[list[Settlement]]:
    """Settlements that one statement can write: the same kind, the same columns, each row once."""
    plain = [settlement for settlement in batch if settlement.kind == "done" and not settlement.columns]
    grouped: dict[tuple[str, ...], list[Settlement]] = {("done",): plain} if plain else {}
    for settlement in batch if len(plain) < len(batch) else ():
        if settlement.kind != "done" or settlement.columns:
            until = [settlement.wait.until] if settlement.wait is not None else []
            grouped.setdefault((settlement.kind, *sorted(settlement.columns), *until), []).append(settlement)
    return list(grouped.values())


def fences(claims: Sequence[Claim]) -> tuple[list[tuple[Any, Any]], list[int]]:
    """The times and counts by which claims are known, each once, and which of these each claim has."""
    places: dict[tuple[Any, Any], int] = {}
    of_claims, last, place = [], None, 0
    for claim in claims:
        # Those of one claim mostly follow each other, and to compare two times is cheaper than to hash one.
        if last is None or claim.claimed_at != last.claimed_at or claim.attempts != last.attempts:
            last, place = claim, places.setdefault((claim.claimed_at, claim.attempts), len(places))
        of_claims.append(place)
    return list(places), of_claims
