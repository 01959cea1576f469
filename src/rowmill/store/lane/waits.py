"""``rowmill_waits``: rows that wait for a condition over their own columns, which anybody's UPDATE may bring about.

A waiting row is ready, with a due time that lies ahead, so no claim takes it. A look makes rows due whose condition is
true, and ends those whose time is over. The due time is also the fence: a row that was given another one, by an
operator or by anybody's SQL, waits no more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ...errors import Refused, Unserved
from ..database import Run
from ..dialect import utc
from .claim import Claim, HookFailed, WaitCondition
from .end_hooks import ending
from .row_keys import Key, Placeholders, among, written

if TYPE_CHECKING:
    from ..database import Database
    from .lane_store import LaneStore

#: What a row that will be dead at its timeout is given beyond it: the look ends it, and if no worker looks for so long,
#: the row is claimed, and does not wait forever.
MARGIN = timedelta(days=1)
#: Rows that one look finds for each condition, and that one transaction writes. After a condition failed: rows that are
#: looked at, and statements that do so.
MOST, _STEP, _APART, _TRIES = 1000, 100, 10_000, 200
#: Conditions that are remembered because the database takes them.
_USABLE = 1000


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """What a row waits for: the condition, until when, what then (``dead`` or ``run``), and seconds since and until."""

    until: str
    until_at: datetime
    then: str
    since: float
    left: float


@dataclass(slots=True)
class EndedWaits:
    """What one look did. ``refused``: conditions that the database could not ask, with its words and, where it is one
    row's fault, the row's id.
    """

    woken: list[Any] = field(default_factory=list)
    timed_out: list[Any] = field(default_factory=list)
    refused: list[tuple[str, str, Any]] = field(default_factory=list)
    #: Rows were waiting when it began.
    waiting: bool = False


def waiting_values(claim: Claim, wait: WaitCondition) -> dict[str, Any]:
    """What is remembered of a row that begins to wait."""
    return {
        "_seconds": wait.timeout.total_seconds(),
        "_then": wait.then,
        "_id": written(claim.id),
        "_condition": wait.until,
    }


async def lanes_with_waits(database: Database) -> set[str]:
    """The lanes that have waiting rows: one statement for all lanes of an environment."""
    text = f"select distinct lane from {database.own('rowmill_waits')}"
    return {row[0] for row in await database.read(lambda run: run(text, ()))}


class WaitingRows:
    """The waiting rows of one lane."""

    def __init__(self, store: LaneStore) -> None:
        self._store = store
        self.table = store.database.own("rowmill_waits")
        self._lane, self._second = store.database.sql.marks(2)
        #: Conditions that the database takes.
        self._usable: set[str] = set()

    @classmethod
    async def open(cls, store: LaneStore) -> WaitingRows | None:
        """None where nothing could hold a row back, or the role may not write the table."""
        if store.lane.own or "run_after" not in store.binding.roles:
            return None
        waits = cls(store)
        may = store.database.sql.may_write(waits.table)
        return waits if (await store.database.read(lambda run: run(f"select {may}", ())))[0][0] else None

    async def look(self) -> EndedWaits:
        """Make rows due whose condition is true; end those whose time is over, up to ``MOST`` for each condition."""
        ended, waiting = EndedWaits(), await self._conditions()
        ended.waiting = bool(waiting)
        for condition, timed_out in waiting:
            await self._wake(condition, ended)
            if timed_out:
                await self._time_out(condition, ended)
        return ended

    async def any_over(self) -> bool:
        """Whether a look would find something to do."""
        for condition, timed_out in await self._conditions():
            try:
                if timed_out or await self._find(condition, self._store.statements.at_now(condition)):
                    return True
            except Refused:
                continue
        return False

    async def _conditions(self) -> Sequence[Any]:
        """What rows wait for, and whether some of them have waited too long."""
        over = f"on_timeout = 'dead' and until_at <= {self._store.statements.plain_now()}"
        text = f"select condition, max(case when {over} then 1 else 0 end) from {self.table} where lane = {self._lane}"
        lane = (self._store.lane.name,)
        return await self._store.database.read(lambda run: run(f"{text} group by condition order by 1", lane))

    async def _wake(self, condition: str, ended: EndedWaits) -> None:
        try:
            keys = await self._find(condition, self._store.statements.at_now(condition))
        except Refused:
            self._usable.discard(condition)
            if (error := await self.unusable(condition)) is not None:  # the table has changed
                ended.refused.append((condition, error.message, None))
                return
            keys = await self._find_apart(condition, ended)
        column = self._store.binding.roles["run_after"]
        due = {column: self._store.statements.now(column)}
        ended.woken += await self._write(keys, due, condition, ended, None)

    async def _time_out(self, condition: str, ended: EndedWaits) -> None:
        store, say = self._store, self._store.statements
        reason = store.error_text(timed_out_words(condition))
        also = f"_w.on_timeout = 'dead' and _w.until_at <= {say.plain_now()}"
        keys = await self._find(condition, "1 = 1", also)
        dead = say.settle_set("dead", say.sql.literal(reason, "text"), "null")
        ended.timed_out += await self._write(keys, dead, condition, ended, reason)

    async def _find(self, condition: str, holds: str, also: str = "1 = 1") -> list[Key]:
        say = self._store.statements
        quoted = say.sql.literal(condition, "text")
        text = say.find_waiting(self.table, f"_w.condition = {quoted} and {also}", holds, MOST)
        return [tuple(row) for row in await self._store.database.read(lambda run: run(text, ()))]

    async def unusable(self, condition: str) -> Refused | None:
        """What the database says to a condition over this table, without looking at a row; None: it takes it.

        Raises Unserved where it would not even read the table: then the condition is not at fault.
        """
        if condition in self._usable:
            return None
        say = self._store.statements
        binding = self._store.binding
        rows = f"select {say.names(binding.columns)} from {say.whole_table()} limit 0"
        table = f"select 1 from ({rows}) {say.name(binding.table.name)}"
        try:
            await self._store.database.read(lambda run: run(f"{table} where ({say.at_now(condition)})", ()))
        except Refused as error:
            await self._store.database.read(lambda run: run(table, ()))
            return error
        if len(self._usable) < _USABLE:
            self._usable.add(condition)
        return None

    async def _find_apart(self, condition: str, ended: EndedWaits) -> list[Key]:
        """The condition failed for one of the rows: halve them until those for which it fails stand alone."""
        quoted = self._store.statements.sql.literal(condition, "text")
        text = f"select row_id from {self.table} where lane = {self._lane} and condition = {quoted} limit {_APART}"
        lane = (self._store.lane.name,)
        ids = [row[0] for row in await self._store.database.read(lambda run: run(text, lane))]
        keys: list[Key] = []
        parts = [ids[: len(ids) // 2], ids[len(ids) // 2 :]]
        for _ in range(_TRIES):
            if not parts or len(keys) >= MOST:
                break
            if not (part := parts.pop()):
                continue
            listed = ", ".join(self._store.statements.sql.literal(id, "text") for id in part)
            try:
                holds = self._store.statements.at_now(condition)
                keys += await self._find(condition, holds, f"_w.row_id in ({listed})")
            except Unserved:
                raise
            except Refused as refused:
                if len(part) == 1:
                    ended.refused.append((condition, refused.message, part[0]))
                else:
                    parts += [part[: len(part) // 2], part[len(part) // 2 :]]
        return keys[:MOST]

    async def _write(
        self, keys: Sequence[Key], values: dict[str, str], condition: str, ended: EndedWaits, reason: str | None
    ) -> list[Any]:
        """Write rows that still wait, and forget that they did; their ids. One that may not be written holds no other
        up. ``reason``: they are dead, and the lane's hooks hear of it.
        """
        if len(keys) > _STEP or not keys:
            parts = [keys[at : at + _STEP] for at in range(0, len(keys), _STEP)]
            return [id for part in parts for id in await self._write(part, values, condition, ended, reason)]
        try:
            return [_id(key) for key in await self._written(keys, values, reason)]
        except Unserved:
            raise
        except (Refused, HookFailed) as error:
            if len(keys) > 1:
                return [id for key in keys for id in await self._write([key], values, condition, ended, reason)]
            words = error.message if isinstance(error, Refused) else f"on_settled failed: {error}"
            ended.refused.append((condition, words, _id(keys[0])))
            return []

    async def _written(self, keys: Sequence[Key], values: dict[str, str], reason: str | None) -> list[Key]:
        store, say, marks = self._store, self._store.statements, Placeholders(self._store.binding)
        these = among(say, keys, marks)
        waits = say.still_waits(self.table, [written(_id(key)) for key in keys])
        test = f"{these} and {say.ready_state()} and {waits}{say.not_passed()}"
        texts, given = say.write_step(values, test, MOST), marks.given()
        listed = store.database.sql.json_texts(self._second)
        over = (
            f"delete from {self.table} where lane = {self._lane} and row_id in (select value from {listed}) returning 1"
        )

        def verb(run: Run) -> list[Key]:
            rows, *_ = [run(text, given) for text in texts]
            done = [tuple(row) for row in rows]
            run(over, (store.lane.name, json.dumps([written(_id(key)) for key in done])))
            return done

        if reason is None or not store.lane.settled_hooks:
            return await store.database.transact(verb)
        return await ending(store, verb, lambda done: done, "dead", reason)

    async def forget(self) -> None:
        """Forget rows that wait no more: they have ended, or were given another time."""
        any_waits = f"select 1 from {self.table} where lane = {self._lane} limit 1"
        lane = (self._store.lane.name,)
        if await self._store.database.read(lambda run: run(any_waits, lane)):
            text = f"{self._store.statements.waits_no_more(self.table)} returning 1"
            await self._store.database.write(lambda run: run(text, ()))

    async def facts(self, key: Key) -> WaitFacts | None:
        """What a row waits for, or waited for last; None where it does not."""
        store, say = self._store, self._store.statements
        marks = Placeholders(store.binding)
        this = among(say, [key], marks)
        lane, id = (say.sql.literal(text, "text") for text in (store.lane.name, written(_id(key))))
        since, left = (say.sql.seconds(*times) for times in ((say.plain_now(), "since"), ("until_at", say.plain_now())))
        due = f"select {say.due_text()} from {say.table} where {this}"
        text = f"select condition, until_at, on_timeout, {since}, {left} from {self.table}"
        text += f" where lane = {lane} and row_id = {id} and due = ({due})"
        rows = await store.database.read(lambda run: run(text, marks.given()))
        if not rows:
            return None
        until, at, then, *seconds = rows[0]
        return WaitFacts(until, utc(at), then, *map(float, seconds))


def timed_out_words(condition: str) -> str:
    """Why a row is dead whose wait was over."""
    return f"the wait timed out: {condition}"


def _id(key: Key) -> Any:
    return key[0] if len(key) == 1 else key
