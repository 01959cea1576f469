"""A queue on PostgreSQL: the plain end of a run, which is nearly all of them, written by the shortest statement.

Done, with nothing to write beside it: rows of one claim have the same worker, time and count, so their keys are all
that differs, and one array says it. Unlike in a user's table no other statement of rowmill's waits for several of these
rows, so none has to be locked and skipped first: the update itself re-checks the fence on the row it locks.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from ...clock import Clock
from ..database import Database, Run
from ..dialect import utc
from ..lane.binding import Binding
from ..lane.claim import Settlement, fences
from ..lane.column_readers import Reader, unreadable
from ..lane.postgres import PostgresLane
from ..lane.postgres_statements import MOST, PostgresStatements
from ..lane.sqlite import SqliteLane
from ..postgres_database import SingleStatement
from ..unreadable_values import Unreadable

_READ_LATER = ("args", "history")


class QueueStatements(PostgresStatements):
    """What a queue says: as any lane, and JSON comes as text, to be read where it is used."""

    def claim(self, most: int = MOST, *, bounded: bool = False) -> str:
        """The rows as the update comes upon them: kept and put in order by the server they would take a tenth more."""
        return f"{self._picking(most, bounded)}\n{self._taking(self.shown())}"

    def shown(self) -> str:
        return ", ".join(self.name(c) + ("::text" if c in _READ_LATER else "") for c in self.binding.taken)

    def settle_done(self, *, compare: bool = True) -> str:
        """$1 the keys of rows that have the rest of their fence in common: $2 worker, $3 time, $4 count."""
        return f"""with written as (
  update {self.table} t set
    {self.assignments(self.settle_set("done", "null", "0"))}
  where t.id = any($1::bigint[]) and {self.fence("t", "$3::timestamptz", "$4::int", "$2::text")}
  returning t.id
)
select array_agg(id) from written"""


class QueueLane(PostgresLane):
    """The verbs over ``rowmill_jobs``."""

    _say = QueueStatements

    async def _claim(self, count: int, bound: tuple[Any, ...] | None) -> Sequence[Any]:
        rows = await super()._claim(count, bound)
        try:
            return sorted(rows, key=self._place)
        except TypeError:  # a time without end or beginning comes without a zone, and compares with no other
            return sorted(rows, key=lambda row: [_comparable(v) for v in self._place(row)])

    @functools.cached_property
    def _place(self) -> Callable[[Sequence[Any]], Any]:
        """A row's place in the queue's order: of columns that compare here as they do on the server."""
        return operator.itemgetter(*(self._at[column] for column, _ in self.binding.order))

    def reader(self, column: str) -> Reader:
        return _json_at(self._at[column], column) if column in _READ_LATER else super().reader(column)

    def settling(self, group: Sequence[Settlement], *, compare: bool = True) -> Callable[[Run], set[int]]:
        if group[0].kind != "done" or group[0].columns:
            return super().settling(group, compare=compare)
        text = self._text("done", self.statements.settle_done)
        known, places = fences([settlement.claim for settlement in group])
        positions: list[dict[int, int]] = [{} for _ in known]
        for position, (place, settlement) in enumerate(zip(places, group, strict=True)):
            positions[place][settlement.claim.key[0]] = position
        each = [
            SingleStatement(text, (list(alike), self.worker, at, attempts), functools.partial(_written, alike))
            for (at, attempts), alike in zip(known, positions, strict=True)
        ]
        return each[0] if len(each) == 1 else lambda run: set[int]().union(*[one(run) for one in each])


#: The lane over a user's table, and the one over rowmill's own.
_LANES: dict[str, tuple[type[PostgresLane | SqliteLane], type[PostgresLane | SqliteLane]]] = {
    "postgresql": (PostgresLane, QueueLane),
    "sqlite": (SqliteLane, SqliteLane),
}


def store_for(
    binding: Binding, database: Database, clock: Clock, worker: str, incarnation: str, gates: bool = False
) -> PostgresLane | SqliteLane:
    """The verbs over a lane that is bound already."""
    user_lane, own_lane = _LANES[database.dialect.name]
    return (own_lane if binding.lane.own else user_lane)(binding, database, clock, worker, incarnation, gates)


def _comparable(value: Any) -> Any:
    """A value of the order that compares with every other of its column; one that Python cannot hold comes last."""
    if isinstance(value, Unreadable):
        return True, str(value)
    return False, utc(value) if isinstance(value, datetime) else value


def _written(alike: dict[int, int], rows: Sequence[Any]) -> set[int]:
    """Which settlements were written, by position: of those whose rows have these ids."""
    ids = rows[0][0] or ()
    return set(alike.values() if len(ids) == len(alike) else [alike[id] for id in ids])


def _json_at(at: int, column: str) -> Reader:
    """From a claim it comes as text; from other statements as what the text says, and neither column is ever a text."""
    decoder: Any = json.JSONDecoder()
    scan = decoder.scan_once  # without what looks for white space around it

    def read(row: Sequence[Any]) -> Any:
        value = row[at]
        if not isinstance(value, str):
            return value
        try:
            return scan(value, 0)[0]
        except (ValueError, RecursionError) as error:
            raise unreadable(column, Unreadable(value, str(error) or type(error).__name__)) from None

    return read
