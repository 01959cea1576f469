"""Rows that the database will not let be changed: a trigger, a constraint, a counter at the end of its type.

One such row would refuse the claim of its whole batch, for ever. The rows of a refused claim are tried one by one, in
transactions that are rolled back. A row that is refused by itself is set aside as dead; where the table refuses that
too, the lane passes it over for a while. Rows that are refused only beside others (a unique index on running rows)
wait.
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
#: Ready rows that are tried when a claim was refused, and refused ones that are looked for at a time.
_TRIED, _FOUND = 1000, 20
#: Rows that a lane passes over at most, and for how long in seconds, at first and at most.
MOST, _PAUSE, _LONGEST = 1000, 60.0, 600.0
#: The same for a row that waits for another one to end.
_WAITS, _WAITS_LONGEST = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that may not be claimed. ``dead``: it was set aside; otherwise it is passed over."""

    id: Any
    error: str
    dead: bool


@dataclass(frozen=True, slots=True)
class _Passed:
    until: float
    pause: float
    waits: bool


class RefusedRows:
    """Rows of one lane that this worker leaves alone for a while."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._rows: dict[Key, _Passed] = {}
        #: Changes with the set of rows: statements that name them are made again.
        self.version = 0
        self._expires = float("inf")

    def add(self, key: Key, *, in_the_way: bool = False) -> bool:
        """Pass this row over; whether it is the first time. ``in_the_way``: only until another row has ended."""
        last = self._rows.get(key)
        if last is None and len(self._rows) >= MOST:
            return False
        first, longest = (_WAITS, _WAITS_LONGEST) if in_the_way else (_PAUSE, _LONGEST)
        pause = first if last is None or last.waits != in_the_way else min(2 * last.pause, longest)
        self._rows[key] = _Passed(time.monotonic() + pause, pause, in_the_way)
        self._changed()
        return last is None

    def expire(self, now: float) -> None:
        """Rows whose time is over are tried again."""
        if now >= self._expires:
            self._changed()

    def next_time(self) -> float:
        """When a row is tried again."""
        return self._expires

    def _changed(self) -> None:
        now = time.monotonic()
        # A row that is not passed over now is remembered for a while, so that its next pause is longer.
        self._rows = {key: row for key, row in self._rows.items() if now < row.until + 2 * row.pause}
        self._expires = min((row.until for row in self._rows.values() if row.until > now), default=float("inf"))
        self.version += 1

    def condition(self, prefix: str = "", *, waiting: bool = True) -> str:
        """SQL that is true for all other rows, to be added to a condition; empty where none is passed over.
        ``waiting``: also those that only wait for another row to end.
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
    """After a refused claim: end or pass over the ready rows that may not be claimed. Whether there was any at all."""
    found: list[RefusedRow] = []
    refused = await refused_claims(store)
    if refused and not store.claims_work:
        raise refused[0][1]  # as far as is known, the database refuses every claim: the rows are not at fault
    for key, error in refused:
        id = key[0] if len(key) == 1 else key
        said = store.error_text(f"{REFUSED_CLAIM}{error.message}")
        if error.in_the_way:
            store.passed.add(key, in_the_way=True)
        elif not isinstance(error, Unserved) and await _end(store, key, said):
            found.append(RefusedRow(id, said, dead=True))
        elif store.passed.add(key):
            found.append(RefusedRow(id, said, dead=False))
    return found, bool(refused)


async def refused_claims(store: LaneStore, tried: int = _TRIED) -> list[tuple[Key, Refused]]:
    """Which of the first ready rows may not be claimed, each with the database's answer."""
    say = store.statements
    text = f"select {say.names(store.binding.key)} from {say.table} where {say.ready()} order by {say.order()}"
    rows = await store.database.read(lambda run: run(f"{text} limit {tried}", ()))
    keys = [tuple(row) for row in rows]
    refused = await _refused(store, keys, _FOUND)
    if not store.claims_work and _FOUND <= len(refused) < len(keys):
        await _refused(store, keys[-1:], 1)  # the last one may show that others can be claimed
    return refused


async def _refused(store: LaneStore, keys: list[Key], most: int) -> list[tuple[Key, Refused]]:
    """Which of these rows may not be claimed, each by itself."""
    if not keys or most <= 0:
        return []
    try:
        store.claims_work |= await try_claim(store, keys)
    except Refused as error:
        if len(keys) == 1:
            return [(keys[0], error)]
        half = len(keys) // 2
        found = await _refused(store, keys[:half], most)
        return found + await _refused(store, keys[half:], most - len(found))
    return []


async def try_claim(store: LaneStore, keys: Sequence[Key]) -> bool:
    """Claim these rows as far as they are ready, and roll that back; whether any was. Raises Refused where the database
    refuses one.
    """
    say, marks = store.statements, Placeholders(store.binding)
    verb = write_rows(store, say.claim_set(marks.add(store.worker)), marks, say.ready(), keys)

    def trial(run: Run) -> int:
        if deferred := store.database.sql.check_deferred:
            run(deferred, ())
        return verb(run)

    return bool(await store.database.trial(trial))


async def _end(store: LaneStore, key: Key, said: str) -> bool:
    """End a ready row as dead, with the lane's hooks; False where that is refused, or the row is ready no more."""
    marks = Placeholders(store.binding)
    error = marks.add(said) if "error" in store.binding.roles else "null"
    verb = write_rows(store, store.statements.settle_set("dead", error, "null"), marks, store.statements.ready(), [key])
    try:
        if store.lane.settled_hooks:
            return bool(await ending(store, verb, lambda written: [key] if written else [], "dead", said))
        return bool(await store.database.write(verb))
    except (Refused, HookFailed):
        return False


def write_rows(
    store: LaneStore, written: Mapping[str, str], marks: Placeholders, condition: str, keys: Sequence[Key]
) -> Callable[[Run], int]:
    """Write rows by key, where a condition still holds and nobody else has them locked; how many were written."""
    say = store.statements
    text = say.write_rows(written, f"{among(say.names(store.binding.key), keys, marks)} and {condition}")
    return lambda run: len(run(text, marks.given()))
