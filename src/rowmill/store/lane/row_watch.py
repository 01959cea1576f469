"""What all workers remember about single rows, in two tables.

``rowmill_sightings``: running rows without a timestamp, with the time at which a worker first saw them running.
``rowmill_suspects``: rows that were taken back from a dead worker, and how often: one of them may have killed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..database import Run
from .refused_rows import write_rows
from .row_keys import Key, Placeholders, written

if TYPE_CHECKING:
    from .lane_store import LaneStore

_FORGET = timedelta(days=7)
#: The number of reclaims from which on a row waits before it is ready again; the wait in seconds, the first time and at
#: most.
BACKS_OFF, BACKOFF, LONGEST_BACKOFF = 3, 5.0, 60.0
_JUST_OVER = 2.0  # seconds after its end for which such a wait still counts


class RowWatch:
    """The remembered rows of one lane."""

    def __init__(self, store: LaneStore) -> None:
        self._store = store
        database = store.database
        self._sightings, self._suspects = database.own("rowmill_sightings"), database.own("rowmill_suspects")
        self._lane, ids = database.sql.marks(2)
        # The ids are sent as one JSON document.
        self._listed = f"(select value from {database.sql.json_texts(ids)})"

    @classmethod
    async def open(cls, store: LaneStore) -> RowWatch | None:
        """Open the tables. Returns None if the role may not write to them: it may be older than they are."""
        watched = cls(store)
        may = " and ".join(map(store.database.sql.may_write, (watched._sightings, watched._suspects)))
        return watched if (await store.database.read(lambda run: run(f"select {may}", ())))[0][0] else None

    def _values(self, keys: Iterable[Any] = ()) -> tuple[str, str]:
        return self._store.lane.name, json.dumps([_text(key) for key in keys])

    async def seen_running(self, keys: Sequence[Key], lease: timedelta) -> list[Key]:
        """Record when rows without a timestamp were first seen running. Returns those that have run for a lease.

        ``keys`` are all such rows; the records of other rows are deleted.
        """
        statements, table = self._store.statements, self._sightings
        due = f"select row_id, {statements.older_own('seen_at', lease)} from {table} where lane = {self._lane}"
        lane, ids = self._values(keys)
        known = dict(await self._store.database.read(lambda run: run(due, (lane,))))
        wanted = {_text(key) for key in keys}
        if known.keys() != wanted:

            def verb(run: Run) -> None:
                run(
                    f"insert into {table} (lane, row_id, seen_at) select {self._lane}, value, {statements.plain_now()}"
                    f" from {self._listed} n where true on conflict do nothing returning 1",
                    (lane, ids),
                )
                run(f"delete from {table} where lane = {self._lane} and row_id not in {self._listed} returning 1",
                    (lane, ids))  # fmt: skip

            await self._store.database.transact(verb)
        return [key for key in keys if known.get(_text(key))]

    def suspect(self, run: Run, keys: Sequence[Any], *, at_once: bool = False) -> None:
        """Record rows that were taken back, in the same transaction.

        ``at_once``: before their lease expired. Then a row waits from its third reclaim on, longer each time. Otherwise
        a row that kills its process would use up its reclaims within seconds.
        """
        if not keys:
            return
        statements, table = self._store.statements, self._suspects
        counted = run(
            f"insert into {table} (lane, row_id, swept_at) select {self._lane}, value, {statements.plain_now()}"
            f" from {self._listed} n where true"
            f" on conflict (lane, row_id) do update set reclaims = {table}.reclaims + 1,"
            " swept_at = excluded.swept_at returning row_id, reclaims",
            self._values(keys),
        )
        column = self._store.binding.roles.get("run_after")
        counts = {text: count for text, count in counted if count >= BACKS_OFF}
        if not at_once or column is None or not counts:
            return
        for count in set(counts.values()):
            seconds = _wait(count)
            again = [key if isinstance(key, tuple) else (key,) for key in keys if counts.get(_text(key)) == count]
            later = {column: statements.later(column, str(seconds))}
            marks, still = Placeholders(self._store.binding), f"not ({statements.running()})"
            write_rows(self._store, later, marks, still, again)(run)

    async def backs_off(self) -> bool:
        """Whether some row was taken back so often that it waits before it is ready again.

        A drain asks this after it has asked for ready rows: a wait that ended between the two questions counts, too.
        """
        if "run_after" not in self._store.binding.roles:
            return False
        age = self._store.database.sql.age("swept_at")
        text = f"select reclaims, {age} from {self._suspects} where lane = {self._lane} and reclaims >= {BACKS_OFF}"
        recent = f"{text} order by swept_at desc limit 100"
        rows = await self._store.database.read(lambda run: run(recent, (self._store.lane.name,)))
        return any(float(seconds) < _wait(reclaims) + _JUST_OVER for reclaims, seconds in rows)

    async def suspects(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Which of these rows were taken back from a dead worker, and how often."""
        find = f"select row_id, reclaims from {self._suspects} where lane = {self._lane} and row_id in {self._listed}"
        known = dict(await self._store.database.read(lambda run: run(find, self._values(keys))))
        return {key: known[text] for key in keys if (text := _text(key)) in known} if known else {}

    async def clear(self, keys: Sequence[Key]) -> None:
        """Delete the records of these rows, because their runs have ended. Also deletes old records."""
        old = self._store.statements.older_own("swept_at", _FORGET)
        text = (
            f"delete from {self._suspects} where lane = {self._lane} and (row_id in {self._listed} or {old})"
            " returning 1"
        )
        await self._store.database.write(lambda run: run(text, self._values(keys)))


def _wait(reclaims: int) -> float:
    """The seconds that a row waits after this many reclaims."""
    return min(BACKOFF * 2.0 ** (reclaims - BACKS_OFF), LONGEST_BACKOFF)


def _text(key: Any) -> str:
    return written(key[0] if isinstance(key, tuple) and len(key) == 1 else key)
