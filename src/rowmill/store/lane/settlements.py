"""What is settled: as one statement can write it, as a column can hold it, and as ``on_settled`` sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...errors import DatabaseError, Refused
from .claim import Claim, Settlement

if TYPE_CHECKING:
    from .lane_store import LaneStore

ERROR_LENGTH = 2000


class HookFailed(Exception):
    """A lane's ``on_settled`` raised; the transaction around it was rolled back."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Settled:
    """One settled row as ``on_settled`` sees it: its columns as claimed, and how its run ended."""

    __slots__ = ("_settlement", "_store")

    def __init__(self, store: LaneStore, settlement: Settlement) -> None:
        self._store, self._settlement = store, settlement

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
        """done, retry, snooze, dead, canceled or release."""
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
    found: dict[tuple[str, tuple[str, ...]], list[Settlement]] = {("done", ()): plain} if plain else {}
    for settlement in batch if len(plain) < len(batch) else ():
        if settlement.kind != "done" or settlement.columns:
            found.setdefault((settlement.kind, tuple(sorted(settlement.columns))), []).append(settlement)
    return list(found.values())


def fences(claims: Sequence[Claim]) -> tuple[list[tuple[Any, Any]], list[int]]:
    """The times and counts by which claims are known, each once, and which of these each claim has."""
    places: dict[tuple[Any, Any], int] = {}
    found, last, place = [], None, 0
    for claim in claims:
        # Those of one claim mostly follow each other, and to compare two times is cheaper than to hash one.
        if last is None or claim.claimed_at != last.claimed_at or claim.attempts != last.attempts:
            last, place = claim, places.setdefault((claim.claimed_at, claim.attempts), len(places))
        found.append(place)
    return list(places), found


def bounded(text: str, most: int = ERROR_LENGTH, encoding: str = "utf-8") -> str:
    """Text that any column of a database of this encoding takes: no NUL, no lone surrogates, not longer than useful."""
    clean = text.replace("\x00", "\\x00").encode(encoding, "replace").decode(encoding)
    return clean if len(clean) <= most else clean[: most - 1] + "…".encode(encoding, "replace").decode(encoding)


def tail(text: str, most: int, encoding: str = "utf-8") -> str:
    """The end of a text, bounded likewise: of a traceback, where it was raised."""
    clean = bounded(text, 4 * len(text) + 1, encoding)
    return clean if len(clean) <= most else "…".encode(encoding, "replace").decode(encoding) + clean[1 - most :]
