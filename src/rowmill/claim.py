"""A claim: the hold of one worker on one row, with a lease. And what a run's end writes to that row."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any


@dataclass(slots=True, eq=False)
class Claim:
    """One hold on one row. Renewal, settling and release all require it still to be as it is written here.

    ``row`` is what the claim statement returned, undecoded. ``worker``, ``claimed_at`` and ``attempts`` are the
    fence: the values the row had when this claim took it, as the database returned them.
    """

    lane: str
    environment: str
    key: tuple[Any, ...]
    row: Any
    worker: str | None
    claimed_at: Any
    attempts: int | None
    attempt: int
    limit: int
    taken: float = field(default_factory=time.monotonic)
    #: When the lease was last known to hold, by this process's monotonic clock.
    renewed: float = field(default_factory=time.monotonic)
    lost: bool = False
    #: The key of each group of gates that let it through.
    gates: Mapping[str, str] | None = None

    @property
    def id(self) -> Any:
        """The row's key: a value, or a tuple for a composite key."""
        return self.key[0] if len(self.key) == 1 else self.key


#: No columns beside the outcome's own.
NOTHING: Mapping[str, Any] = MappingProxyType({})
#: The ways a row may be written at the end of a claim. Final rows keep their worker and times; the others lose them.
FINAL = ("done", "dead", "canceled")
KINDS = (*FINAL, "retry", "snooze", "release")


@dataclass(slots=True, eq=False)
class Settlement:
    """What is to be written for one claim, once, and only where the claim still holds."""

    claim: Claim
    kind: str
    columns: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    error: str | None = None
    delay: timedelta | None = None
    #: Sent before, and the reply was lost: it may already stand.
    unsure: bool = False
    #: Settled with the lane's ``on_settled`` hooks; not where those are what failed.
    hooked: bool = True
    duration: float = 0.0
    #: The exception behind a failure, for the log: where it was raised is not for the row.
    cause: BaseException | None = None
    #: What kind of failure it was (transient, permanent, rate); None where the run says nothing of its gates' keys.
    word: str | None = None
    #: The other side asked to be left alone for so long: for everybody, where a gate knows by which key.
    closes: timedelta | None = None
    #: Its gates have heard of it.
    heard: bool = False


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
