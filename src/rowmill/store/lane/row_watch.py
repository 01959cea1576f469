"""What the fleet remembers about single rows, in tables of its own.

``rowmill_sightings``: rows that run and tell no time, with the time at which a worker first saw them running.
``rowmill_suspects``: rows that were taken back from a dead worker, and how often: one of them may have killed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..database import Run
from .row_keys import Key, written

if TYPE_CHECKING:
    from .lane_store import LaneStore

_FORGET = timedelta(days=7)


class RowWatch:
    """The remembered rows of one lane."""

    def __init__(self, store: LaneStore) -> None:
        self._store = store
        database = store.database
        self._sightings, self._suspects = database.own("rowmill_sightings"), database.own("rowmill_suspects")
        postgres = database.dialect.name == "postgresql"
        self._lane, self._ids = ("$1::text", "$2::text") if postgres else ("?1", "?2")
        # The ids come as one JSON document.
        listed = f"jsonb_array_elements_text({self._ids}::jsonb) as s(value)" if postgres else f"json_each({self._ids})"
        self._listed = f"(select value from {listed})"

    @classmethod
    async def open(cls, store: LaneStore) -> RowWatch | None:
        """None where the role may not write the tables: it may have been made before they were."""
        watched = cls(store)
        if store.database.dialect.name == "postgresql":
            may = " and ".join(
                f"has_table_privilege('{table}', '{verb}')"
                for table in (watched._sightings, watched._suspects)
                for verb in ("select", "insert", "update", "delete")
            )
            if not (await store.database.read(lambda run: run(f"select {may}", ())))[0][0]:
                return None
        return watched

    def _values(self, keys: Iterable[Any] = ()) -> tuple[str, str]:
        return self._store.lane.name, json.dumps([_text(key) for key in keys])

    async def seen_running(self, keys: Sequence[Key], lease: timedelta) -> list[Key]:
        """Remember when rows that tell no time were first seen running; which of them have run for a lease.

        ``keys`` are all such rows: what else was remembered is forgotten.
        """
        say, table = self._store.statements, self._sightings
        due = f"select row_id, {say.older_own('seen_at', lease)} from {table} where lane = {self._lane}"
        lane, ids = self._values(keys)
        known = dict(await self._store.database.read(lambda run: run(due, (lane,))))
        wanted = {_text(key) for key in keys}
        if known.keys() != wanted:

            def verb(run: Run) -> None:
                run(
                    f"insert into {table} (lane, row_id, seen_at) select {self._lane}, value, {say.plain_now()}"
                    f" from {self._listed} n where true on conflict do nothing returning 1",
                    (lane, ids),
                )
                run(f"delete from {table} where lane = {self._lane} and row_id not in {self._listed} returning 1",
                    (lane, ids))  # fmt: skip

            await self._store.database.transact(verb)
        return [key for key in keys if known.get(_text(key))]

    def suspect(self, run: Run, keys: Sequence[Any]) -> None:
        """Remember rows that were taken back, in the transaction that does so."""
        if keys:
            say, table = self._store.statements, self._suspects
            run(
                f"insert into {table} (lane, row_id, swept_at) select {self._lane}, value, {say.plain_now()}"
                f" from {self._listed} n where true"
                f" on conflict (lane, row_id) do update set reclaims = {table}.reclaims + 1,"
                " swept_at = excluded.swept_at returning 1",
                self._values(keys),
            )

    async def suspects(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Which of these rows were taken back from a dead worker, and how often."""
        find = f"select row_id, reclaims from {self._suspects} where lane = {self._lane} and row_id in {self._listed}"
        known = dict(await self._store.database.read(lambda run: run(find, self._values(keys))))
        return {key: known[text] for key in keys if (text := _text(key)) in known} if known else {}

    async def clear(self, keys: Sequence[Key]) -> None:
        """These rows have run to an end: they kill nobody. And what was not heard of for long is forgotten."""
        old = self._store.statements.older_own("swept_at", _FORGET)
        text = (
            f"delete from {self._suspects} where lane = {self._lane} and (row_id in {self._listed} or {old})"
            " returning 1"
        )
        await self._store.database.write(lambda run: run(text, self._values(keys)))


def _text(key: Any) -> str:
    return written(key[0] if isinstance(key, tuple) and len(key) == 1 else key)
