"""A sweep: all stale rows in one transaction, with the lane's ``on_settled`` for those that end; row by row where that
was refused, so that one row that may not go back holds no other up.

A unique index on waiting rows (one pending job per key) is enough: while a row ran, another was queued in its place.
Such a row ends as dead, with the database's words.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...errors import Refused, Unserved
from ..database import Run
from .claim import HookFailed, Swept
from .end_hooks import ending
from .refused_rows import write_rows
from .row_keys import Key, Placeholders
from .statements import INCARNATION, POISONED

if TYPE_CHECKING:
    from .lane_store import LaneStore


NOT_BACK = "the database would not take it back: "
_MOST, _CHUNK = 10_000, 500  # rows of a dead worker that are given back at once, and in one statement
#: Why a row ends that was taken back too often.
TAKEN_BACK = POISONED.strip("'")  # it is SQL


async def sweep(
    store: LaneStore, verb: Callable[[Run], list[Swept]], lease: timedelta, most: int, *, look: bool = False
) -> list[Swept]:
    """Take back up to ``most`` stale rows by the dialect's own ``verb``. ``look``: see first whether there is one."""
    swept = await _sweep(store, verb, lease, most, look)
    return swept + await _sweep_timeless(store, lease, most)


async def _sweep(
    store: LaneStore, verb: Callable[[Run], list[Swept]], lease: timedelta, most: int, look: bool
) -> list[Swept]:
    hooks = bool(store.lane.settled_hooks)
    stale = _running(store, store.statements.stale, lease)
    # An idle sweep takes neither SQLite's write lock from those who work, nor a connection for a hook's writes.
    if (look or hooks) and not await _find(store, stale, 1):
        return []

    def remembered(run: Run) -> list[Swept]:
        swept = verb(run)
        if store.watched is not None:
            store.watched.suspect(run, [row.id for row in swept if not row.poison])
        return swept

    try:
        if not hooks:
            return await store.database.transact(remembered)
        return await ending(
            store, remembered, lambda swept: [_key(row.id) for row in swept if row.poison], "dead", TAKEN_BACK
        )
    except Unserved:
        raise
    except (Refused, HookFailed):
        return await _singly(store, await _find(store, stale, most), stale)


async def take_over(
    store: LaneStore, worker: str, incarnation: str, started: Callable[[Key], bool], *, succeeds: bool = False
) -> tuple[int, list[Swept]]:
    """Take back what a dead worker held; how many rows were released, and what was swept.

    Rows that it had not started are released: that counts for nothing. ``succeeds``: this worker has taken the id, and
    has claimed nothing yet. Anybody else goes by the workers table, where the dead worker must still be called dead.
    """
    say = store.statements
    column = store.binding.roles["worker"]
    name = f"{worker}{INCARNATION}{incarnation}" if store.binding.incarnated else worker
    mine = f"{say.running()} and {say.name(column)} = {say.literal(column, name)}"
    if not succeeds:
        quoted = [store.database.sql.literal(value, "text") for value in (worker, incarnation)]
        mine += (
            f" and exists (select 1 from {say.workers} w where w.id = {quoted[0]} and w.incarnation = {quoted[1]}"
            " and w.state = 'dead')"
        )
        if at := store.binding.fence_time:  # not what a successor of the same id has claimed since this was sent
            mine += f" and {say.name(at)} <= {say.now(at)}"
    rows = await _find(store, mine, _MOST)
    begun = [row for row in rows if started(tuple(row[2:]))]
    keys = [tuple(row[2:]) for row in rows if not started(tuple(row[2:]))]
    release = say.settle_set("release", "null", "null")
    released = 0
    for i in range(0, len(keys), _CHUNK):
        released += await store.database.write(
            write_rows(store, release, Placeholders(store.binding), mine, keys[i : i + _CHUNK])
        )
    return released, await _singly(store, begun, mine, at_once=True)


async def _sweep_timeless(store: LaneStore, lease: timedelta, most: int) -> list[Swept]:
    """Running rows that tell no time: another program's claim may write none, or a hand has emptied the columns.

    They are taken back a lease after a worker first saw them running; at once where nothing can remember that.
    """
    timeless = _running(store, store.statements.timeless, lease)
    rows = await _find(store, timeless, most)
    if store.watched is not None:
        due = set(await store.watched.seen_running([tuple(row[2:]) for row in rows], lease))
        rows = [row for row in rows if tuple(row[2:]) in due]
    return await _singly(store, rows, timeless) if rows else []


async def _find(store: LaneStore, condition: str, most: int) -> Any:
    """Rows to take back: who held each, whether it is poison, and its key."""
    say, binding = store.statements, store.binding
    worker = say.name(binding.roles["worker"]) if "worker" in binding.roles else "null"
    told = f"{worker}, {say.poison() or '0'}, {say.names(binding.key)}"
    find = f"select {told} from {say.table} where {condition} limit {most}"
    return await store.database.read(lambda run: run(find, ()))


def _running(store: LaneStore, test: Callable[[timedelta, str], str], lease: timedelta) -> str:
    say = store.statements
    return f"{say.running()} and {test(lease, say.table + '.')}{say.not_passed()}"


async def _singly(store: LaneStore, rows: Any, stale: str, *, at_once: bool = False) -> list[Swept]:
    """Each in a transaction of its own, if it still is as it was found."""
    swept = []
    for holder, poison, *parts in rows:
        key = parts[0] if len(parts) == 1 else tuple(parts)
        refused = None
        try:
            if not poison:
                if await store.database.transact(_back(store, stale, key, at_once)):
                    swept.append(Swept(key, holder, False))
                continue
        except Unserved:
            raise
        except Refused as error:
            refused = f"{NOT_BACK}{error.message}"
        swept += await _end(store, holder, stale, key, refused)
    return swept


def _back(store: LaneStore, stale: str, key: Any, at_once: bool) -> Callable[[Run], bool]:
    write = write_rows(store, store.statements.sweep_set()[0], Placeholders(store.binding), stale, [_key(key)])

    def verb(run: Run) -> bool:
        written = write(run)
        if written and store.watched is not None:
            store.watched.suspect(run, [key], at_once=at_once)
        return bool(written)

    return verb


async def _end(store: LaneStore, holder: Any, stale: str, key: Any, refused: str | None) -> list[Swept]:
    """One row ends as dead, with the hook; without, where the hook is what failed."""

    def verb() -> Callable[[Run], int]:
        marks = Placeholders(store.binding)
        known = "error" in store.binding.roles
        said = marks.add(store.error_text(refused)) if refused and known else None
        return write_rows(store, store.statements.sweep_set(said)[1], marks, stale, [_key(key)])

    try:
        if not store.lane.settled_hooks:
            written = await store.database.write(verb())
        else:
            try:
                ended = [_key(key)]
                words = refused or TAKEN_BACK
                written = await ending(store, verb(), lambda written: ended if written else [], "dead", words)
            except HookFailed as failed:
                why = f"on_settled failed: {type(failed.error).__name__}: {failed.error}"
                refused = f"{refused or TAKEN_BACK} ({why})"
                written = await store.database.write(verb())
    except Unserved:
        raise
    except Refused as error:
        store.passed.add(_key(key))
        return [Swept(key, holder, False, error.message)]
    return [Swept(key, holder, True, store.error_text(refused) if refused else None)] if written else []


def _key(id: Any) -> tuple[Any, ...]:
    return id if isinstance(id, tuple) else (id,)
