"""A sweep takes back all stale rows in one transaction, with the lane's ``on_settled`` for those that end.

If the database refuses that, it goes row by row, so that one refused row does not block the others. A unique index on
waiting rows (one pending job per key) can cause a refusal: while a row ran, another one was queued in its place. Such a
row ends as dead, with the database's message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import Refused, Unserved
from ..database import Run
from .claim import HookFailed, Swept
from .end_hooks import ending
from .refused_rows import write_rows
from .row_keys import Key, Placeholders
from .row_watch import BACKS_OFF
from .statements import INCARNATION, POISONED

if TYPE_CHECKING:
    from .lane_store import LaneStore


NOT_BACK = "the database would not take it back: "
_MOST, _CHUNK = 10_000, 500  # a dead worker's rows that are given back in one call, and in one statement
#: The error of a row that ends because it was taken back too often.
TAKEN_BACK = POISONED.strip("'")  # it is an SQL literal


async def sweep(
    store: LaneStore, verb: Callable[[Run], list[Swept]], lease: timedelta, most: int, *, look: bool = False
) -> list[Swept]:
    """Take back up to ``most`` stale rows with the dialect's ``verb``. ``look``: check first whether there is one."""
    swept = await _sweep(store, verb, lease, most, look)
    return swept + await _sweep_timeless(store, lease, most)


async def _sweep(
    store: LaneStore, verb: Callable[[Run], list[Swept]], lease: timedelta, most: int, look: bool
) -> list[Swept]:
    hooks = bool(store.lane.settled_hooks)
    stale = _running(store, store.statements.stale, lease)
    # An idle sweep takes neither SQLite's write lock nor a connection for a hook's writes.
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


class TakenOver(NamedTuple):
    """What was taken back of a dead worker's rows."""

    #: How many rows were released, because they had not started.
    released: int
    swept: list[Swept]
    #: No row is left to be taken back. Somebody may have locked one, or there are more than one call takes.
    done: bool


async def take_over(
    store: LaneStore,
    worker: str,
    incarnation: str,
    started: Callable[[Key], bool],
    *,
    succeeds: bool = False,
    claims: bool = False,
) -> TakenOver:
    """Take back the rows of a dead worker. Rows that it had not started are released without counting an attempt.

    ``succeeds``: this worker has taken the id and, unless it ``claims`` already, has claimed nothing yet. Any other
    worker checks that the workers table still declares the dead worker dead.
    """
    statements = store.statements
    column, at = store.binding.roles["worker"], store.binding.fence_time
    name = f"{worker}{INCARNATION}{incarnation}" if store.binding.incarnated else worker
    mine = f"{statements.running()} and {statements.name(column)} = {statements.literal(column, name)}"
    if not succeeds:
        quoted = [store.database.sql.literal(value, "text") for value in (worker, incarnation)]
        mine += (
            f" and exists (select 1 from {statements.workers} w"
            f" where w.id = {quoted[0]} and w.incarnation = {quoted[1]} and w.state = 'dead')"
        )
        if at:  # exclude rows that a successor with the same id has claimed since
            mine += f" and {statements.name(at)} <= {statements.now(at)}"
    elif claims and at:  # exclude the rows that it has claimed itself
        mine += f" and {statements.name(at)} < {_as_literal(store.opened_at)}"
    rows = sorted(await _find(store, mine, _MOST), key=lambda row: str(row[2:]))  # a seed of prove repeats it
    started_rows = [row for row in rows if started(tuple(row[2:]))]
    not_started = [row for row in rows if not started(tuple(row[2:]))]
    released, ended = await _release(store, not_started, mine)
    if started_rows and store.watched is not None and "run_after" not in store.binding.roles:
        # These rows have no run_after column that could delay them, so rows that may kill their process wait for the
        # lease.
        counts = await store.watched.suspects([tuple(row[2:]) for row in started_rows])
        started_rows = [row for row in started_rows if counts.get(tuple(row[2:]), 0) < BACKS_OFF - 1]
    swept = await _singly(store, started_rows, mine, at_once=True)
    left = len(not_started) - released - len(ended) + len(started_rows) - len(swept)
    return TakenOver(released, ended + swept, done=not left and len(rows) < _MOST)


def _as_literal(value: Any) -> str:
    """A time as a claim's column holds it, as SQL."""
    return repr(value) if isinstance(value, (int, float)) else f"'{value}'"


async def _release(store: LaneStore, rows: Sequence[Any], mine: str) -> tuple[int, list[Swept]]:
    """Release rows that had not started, one by one if the database refuses the statement for all."""
    released, swept = 0, list[Swept]()
    for i in range(0, len(rows), _CHUNK):
        chunk = rows[i : i + _CHUNK]
        keys = [tuple(row[2:]) for row in chunk]
        release = store.statements.settle_set("release", "null", "null")
        try:
            released += await store.database.write(write_rows(store, release, Placeholders(store.binding), mine, keys))
        except Unserved:
            raise
        except Refused as error:
            if len(chunk) == 1:
                (holder, _, *parts), refused = chunk[0], f"{NOT_BACK}{error.message}"
                swept += await _end(store, holder, mine, parts[0] if len(parts) == 1 else tuple(parts), refused)
                continue
            for row in chunk:
                count, ended = await _release(store, [row], mine)
                released, swept = released + count, swept + ended
    return released, swept


async def _sweep_timeless(store: LaneStore, lease: timedelta, most: int) -> list[Swept]:
    """Take back running rows without a timestamp: another program's claim wrote none, or someone cleared it.

    They are taken back one lease after a worker first saw them running, or at once if that time cannot be stored.
    """
    timeless = _running(store, store.statements.timeless, lease)
    rows = await _find(store, timeless, most)
    if store.watched is not None:
        due = set(await store.watched.seen_running([tuple(row[2:]) for row in rows], lease))
        rows = [row for row in rows if tuple(row[2:]) in due]
    return await _singly(store, rows, timeless) if rows else []


async def _find(store: LaneStore, condition: str, most: int) -> Any:
    """Rows to take back, each with its worker, whether it is poison, and its key."""
    statements, binding = store.statements, store.binding
    worker = statements.name(binding.roles["worker"]) if "worker" in binding.roles else "null"
    columns = f"{worker}, {statements.poison() or '0'}, {statements.names(binding.key)}"
    find = f"select {columns} from {statements.table} where {condition} limit {most}"
    return await store.database.read(lambda run: run(find, ()))


def _running(store: LaneStore, test: Callable[[timedelta, str], str], lease: timedelta) -> str:
    statements = store.statements
    return f"{statements.running()} and {test(lease, statements.table + '.')}{statements.not_passed()}"


async def _singly(store: LaneStore, rows: Any, stale: str, *, at_once: bool = False) -> list[Swept]:
    """Take back each row in its own transaction, if it has not changed."""
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
    """End one row as dead, with the hook, or without it if the hook is what failed."""

    def verb() -> Callable[[Run], int]:
        marks = Placeholders(store.binding)
        known = "error" in store.binding.roles
        error = marks.add(store.error_text(refused)) if refused and known else None
        return write_rows(store, store.statements.sweep_set(error)[1], marks, stale, [_key(key)])

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
