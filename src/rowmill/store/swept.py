"""A sweep: all stale rows in one transaction, with the lane's ``on_settled`` for those that end; row by row where that
was refused, so that one row that may not go back holds no other up.

A unique index on waiting rows (one pending job per key) is enough: while a row ran, another was queued in its place.
Such a row ends as dead, with the database's words.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..claim import Swept
from ..errors import Refused, Unserved
from .database import Run
from .ended import ending
from .keys import Marks
from .passed_over import write_rows
from .settled import HookFailed
from .statements import POISONED

if TYPE_CHECKING:
    from .base import LaneStore


NOT_BACK = "the database would not take it back: "
_WORDS = POISONED.strip("'")  # it is SQL


async def sweep(
    store: LaneStore, verb: Callable[[Run], list[Swept]], lease: timedelta, most: int, *, look: bool = False
) -> list[Swept]:
    """Take back up to ``most`` stale rows by the dialect's own ``verb``. ``look``: see first whether there is one."""
    hooks = bool(store.lane.settled_hooks)
    # An idle sweep takes neither SQLite's write lock from those who work, nor a connection for a hook's writes.
    if (look or hooks) and not await _stale(store, lease, 1):
        return []
    try:
        if not hooks:
            return await store.database.write(verb)
        return await ending(store, verb, lambda swept: [_key(row.id) for row in swept if row.poison], "dead", _WORDS)
    except Unserved:
        raise
    except (Refused, HookFailed):
        return await _singly(store, lease, most)


async def _stale(store: LaneStore, lease: timedelta, most: int) -> Any:
    """Stale rows: who held each, whether it is poison, and its key."""
    say, binding = store.statements, store.binding
    worker = say.name(binding.roles["worker"]) if "worker" in binding.roles else "null"
    told = f"{worker}, {say.poison() or '0'}, {say.names(binding.key)}"
    find = f"select {told} from {say.table} where {_condition(store, lease)} limit {most}"
    return await store.database.read(lambda run: run(find, ()))


def _condition(store: LaneStore, lease: timedelta) -> str:
    say = store.statements
    return f"{say.running()} and {say.stale(lease, say.table + '.')}{say.not_passed()}"


async def _singly(store: LaneStore, lease: timedelta, most: int) -> list[Swept]:
    """Each in a transaction of its own."""
    say, stale = store.statements, _condition(store, lease)
    swept = []
    for holder, poison, *parts in await _stale(store, lease, most):
        key = parts[0] if len(parts) == 1 else tuple(parts)
        refused = None
        try:
            if not poison:
                if await store.database.write(
                    write_rows(store, say.sweep_set()[0], Marks(store.binding), stale, [_key(key)])
                ):
                    swept.append(Swept(key, holder, False))
                continue
        except Unserved:
            raise
        except Refused as error:
            refused = f"{NOT_BACK}{error.message}"
        swept += await _end(store, holder, stale, key, refused)
    return swept


async def _end(store: LaneStore, holder: Any, stale: str, key: Any, refused: str | None) -> list[Swept]:
    """One row ends as dead, with the hook; without, where the hook is what failed."""

    def verb() -> Callable[[Run], bool]:
        marks = Marks(store.binding)
        known = "error" in store.binding.roles
        said = marks.add(store.error_text(refused)) if refused and known else None
        return write_rows(store, store.statements.sweep_set(said)[1], marks, stale, [_key(key)])

    try:
        if not store.lane.settled_hooks:
            written = await store.database.write(verb())
        else:
            try:
                ended = [_key(key)]
                words = refused or _WORDS
                written = await ending(store, verb(), lambda written: ended if written else [], "dead", words)
            except HookFailed as failed:
                why = f"on_settled failed: {type(failed.error).__name__}: {failed.error}"
                refused = f"{refused or _WORDS} ({why})"
                written = await store.database.write(verb())
    except Unserved:
        raise
    except Refused as error:
        store.passed.add(_key(key))
        return [Swept(key, holder, False, error.message)]
    return [Swept(key, holder, True, store.error_text(refused) if refused else None)] if written else []


def _key(id: Any) -> tuple[Any, ...]:
    return id if isinstance(id, tuple) else (id,)
