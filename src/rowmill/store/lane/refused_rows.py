"""Rows that the database refuses to change: because of a trigger, a constraint, or a counter at the end of its type.

One such row would make the claim of its whole batch fail, forever. So after a refused claim the rows are tried one by
one, in transactions that are rolled back. A row that is refused on its own is set aside as dead. If the table refuses
that too, the lane skips the row for a while. Rows that are only refused together with others (a unique index on running
rows) wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import Refused, Unserved
from ..database import Run
from ..dialect import dialect_named
from .binding import Binding
from .claim import HookFailed
from .end_hooks import ending
from .row_keys import Key, Placeholders, among

if TYPE_CHECKING:
    from .lane_store import LaneStore

REFUSED_CLAIM = "the database refused the claim: "
#: Ready rows that are tried after a refused claim, and how many refused rows one search looks for.
_TRIED, _FOUND = 1000, 20
#: The most rows that a lane skips, and for how many seconds: the first time, and at most.
MOST, _PAUSE, _LONGEST = 1000, 60.0, 600.0
#: The same times for a row that waits for another one to end.
_WAITS, _WAITS_LONGEST = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that cannot be claimed. ``dead``: it was set aside; otherwise it is skipped."""

    id: Any
    error: str
    dead: bool


@dataclass(frozen=True, slots=True)
class _Passed:
    until: float
    pause: float
    waits: bool


class RefusedRows:
    """Rows of one lane that this worker skips for a while."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._rows: dict[Key, _Passed] = {}
        #: Incremented when the set of rows changes: statements that list them are then rendered again.
        self.version = 0
        self._expires = float("inf")

    def add(self, key: Key, *, in_the_way: bool = False) -> bool:
        """Skip this row. Returns whether it is new. ``in_the_way``: only until another row has ended."""
        last = self._rows.get(key)
        if last is None and len(self._rows) >= MOST:
            return False
        first, longest = (_WAITS, _WAITS_LONGEST) if in_the_way else (_PAUSE, _LONGEST)
        pause = first if last is None or last.waits != in_the_way else min(2 * last.pause, longest)
        self._rows[key] = _Passed(time.monotonic() + pause, pause, in_the_way)
        self._changed()
        return last is None

    def expire(self, now: float) -> None:
        """Try rows again whose time is over."""
        if now >= self._expires:
            self._changed()

    def next_time(self) -> float:
        """When the next row is tried again."""
        return self._expires

    def _changed(self) -> None:
        now = time.monotonic()
        # A row that is tried again stays in memory for a while, so that its next pause is longer.
        self._rows = {key: row for key, row in self._rows.items() if now < row.until + 2 * row.pause}
        self._expires = min((row.until for row in self._rows.values() if row.until > now), default=float("inf"))
        self.version += 1

    def condition(self, prefix: str = "", *, waiting: bool = True) -> str:
        """SQL that is true for all other rows, to append to a condition; empty if no row is skipped.

        ``waiting``: also skip rows that only wait for another row to end.
        """
        now = time.monotonic()
        keys = [key for key, row in self._rows.items() if row.until > now and (waiting or not row.waits)]
        if not keys:
            return ""
        quote = self._binding.dialect.identifier_preparer.quote
        names = ", ".join(prefix + str(quote(column)) for column in self._binding.key)
        listed = ", ".join(f"({', '.join(map(self._literal, self._binding.key, key))})" for key in keys)
        return f" and ({names}) not in ({listed})"

    def _literal(self, column: str, value: Any) -> str:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return repr(value)
        sql = dialect_named(self._binding.dialect.name)
        return sql.literal(value, self._binding.sql_types.get(column, ""))


async def set_aside(store: LaneStore) -> tuple[list[RefusedRow], bool]:
    """After a refused claim: set aside or skip the rows that cannot be claimed. Returns them, and whether any exist."""
    refused_rows: list[RefusedRow] = []
    refused = await refused_claims(store)
    if refused and not store.claims_work:
        raise refused[0][1]  # the database seems to refuse every claim, so the rows are not the cause
    for key, error in refused:
        id = key[0] if len(key) == 1 else key
        reason = store.error_text(f"{REFUSED_CLAIM}{error.message}")
        if error.in_the_way:
            store.passed.add(key, in_the_way=True)
        elif not isinstance(error, Unserved) and await _end(store, key, reason):
            refused_rows.append(RefusedRow(id, reason, dead=True))
        elif store.passed.add(key):
            refused_rows.append(RefusedRow(id, reason, dead=False))
    return refused_rows, bool(refused)


async def refused_claims(store: LaneStore, tried: int = _TRIED) -> list[tuple[Key, Refused]]:
    """Return the rows, among the first ready ones, that cannot be claimed, each with the database's error."""
    say = store.statements
    text = f"select {say.names(store.binding.key)} from {say.table} where {say.ready()} order by {say.order()}"
    rows = await store.database.read(lambda run: run(f"{text} limit {tried}", ()))
    keys = [tuple(row) for row in rows]
    refused = await _refused(store, keys, _FOUND)
    if not store.claims_work and _FOUND <= len(refused) < len(keys):
        await _refused(store, keys[-1:], 1)  # if the last row can be claimed, the others are the cause
    return refused


async def _refused(store: LaneStore, keys: list[Key], most: int) -> list[tuple[Key, Refused]]:
    """Return the rows among these that cannot be claimed, each tried on its own."""
    if not keys or most <= 0:
        return []
    try:
        store.claims_work |= await try_claim(store, keys)
    except Refused as error:
        if len(keys) == 1:
            return [(keys[0], error)]
        half = len(keys) // 2
        refused = await _refused(store, keys[:half], most)
        return refused + await _refused(store, keys[half:], most - len(refused))
    return []


async def try_claim(store: LaneStore, keys: Sequence[Key]) -> bool:
    """Claim those of these rows that are ready, and roll back. Returns whether any was ready.

    Raises Refused if the database refuses one.
    """
    say, marks = store.statements, Placeholders(store.binding)
    verb = write_rows(store, say.claim_set(marks.add(store.worker)), marks, say.ready(), keys)

    def trial(run: Run) -> int:
        if deferred := store.database.sql.check_deferred:
            run(deferred, ())
        return verb(run)

    return bool(await store.database.trial(trial))


async def _end(store: LaneStore, key: Key, reason: str) -> bool:
    """End a ready row as dead, with the lane's hooks. Returns False if refused or no longer ready."""
    marks = Placeholders(store.binding)
    error = marks.add(reason) if "error" in store.binding.roles else "null"
    verb = write_rows(store, store.statements.settle_set("dead", error, "null"), marks, store.statements.ready(), [key])
    try:
        if store.lane.settled_hooks:
            return bool(await ending(store, verb, lambda written: [key] if written else [], "dead", reason))
        return bool(await store.database.write(verb))
    except (Refused, HookFailed):
        return False


def write_rows(
    store: LaneStore, written: Mapping[str, str], marks: Placeholders, condition: str, keys: Sequence[Key]
) -> Callable[[Run], int]:
    """Write rows by key if a condition still holds and they are not locked. Returns how many were written."""
    say = store.statements
    text = say.write_rows(written, f"{among(say, keys, marks)} and {condition}")
    return lambda run: len(run(text, marks.given()))
