"""Expiry: rows that were not started in time end, in bounded batches, beside the sweep.

The claim skips a row from the moment it expires; this only writes its end. Running rows are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import Refused, Unserved
from ..database import Run
from .claim import Expired, HookFailed
from .end_hooks import ending
from .refused_rows import write_rows
from .row_keys import Key, Placeholders
from .statements import EXPIRED

if TYPE_CHECKING:
    from .lane_store import LaneStore


async def expire(store: LaneStore, text: str, most: int) -> list[Expired]:
    """End up to ``most`` expired rows, with the lane's ``on_settled`` in the same transaction."""
    # Read first: if nothing has expired, SQLite's write lock stays free for other workers.
    if not await _find(store, 1):
        return []

    def verb(run: Run) -> list[Key]:
        return [tuple(row) for row in run(text, ())]

    try:
        if not store.lane.settled_hooks:
            keys = await store.database.write(verb)
        else:
            keys = await ending(store, verb, lambda keys: keys, "canceled", EXPIRED)
    except Unserved:
        raise
    except (Refused, HookFailed):
        return await _singly(store, await _find(store, most))
    return [Expired(_id(key)) for key in keys]


async def _find(store: LaneStore, most: int) -> list[Key]:
    statements = store.statements
    key = statements.names(store.binding.key)
    text = f"select {key} from {statements.table} where {statements.expired()} limit {most}"
    return [tuple(row) for row in await store.database.read(lambda run: run(text, ()))]


async def _singly(store: LaneStore, keys: list[Key]) -> list[Expired]:
    """End each row in its own transaction, so that one that fails, or whose hook fails, does not block the others."""
    statements, expired = store.statements, []
    for key in keys:
        verb = write_rows(store, statements.expired_set(), Placeholders(store.binding), statements.expired(), [key])
        ended = [key]
        try:
            try:
                hooks = bool(store.lane.settled_hooks)
                written = await (
                    ending(store, verb, lambda written, ended=ended: ended if written else [], "canceled", EXPIRED)  # type: ignore[misc]
                    if hooks
                    else store.database.write(verb)
                )
            except HookFailed:
                written = await store.database.write(verb)
        except Unserved:
            raise
        except Refused as error:
            store.passed.add(key)
            expired.append(Expired(_id(key), error.message))
        else:
            expired += [Expired(_id(key))] if written else []
    return expired


def _id(key: Key) -> object:
    return key[0] if len(key) == 1 else key
