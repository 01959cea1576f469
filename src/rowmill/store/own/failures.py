"""``rowmill_failures``: every failed run, for a limited time.

The row has the current state. This table has the history: what happened before, and how often.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bounded_text import bounded, tail
from ..database import Database, Run
from ..dialect import iso_time
from . import schema
from .fingerprint import fingerprint, shape

#: How many days a failure is kept, and how many failures at most.
DAYS, MOST = 30, 20_000
#: The most families that are shown, the latest seen first; and how much of a message and of a traceback is kept.
FAMILIES, MESSAGE, TRACEBACK = 200, 2000, 4000
_FIELDS = (("lane", "text"), ("row_id", "text"), ("attempt", "integer"), ("worker", "text"), ("outcome", "text"),
           ("class", "text"), ("fingerprint", "text"), ("message", "text"), ("traceback", "text"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed run, or a claim that was taken back.

    ``outcome``: retry, dead, swept, canceled, or blocked (still running). ``word``: the class of the failure:
    transient, permanent, rate or poison. ``ago``: how many seconds ago it happened, if it is not written at once.
    """

    lane: str
    row_id: str
    attempt: int | None
    worker: str | None
    outcome: str
    word: str | None
    message: str
    traceback: str | None = None
    ago: float = 0.0

    def value(self, encoding: str) -> dict[str, Any]:
        """The failure as it is stored in a database with this encoding."""
        return {
            "ago": self.ago, "lane": self.lane, "row_id": self.row_id, "attempt": self.attempt, "worker": self.worker,
            "outcome": self.outcome, "class": self.word, "fingerprint": fingerprint(self.message),
            "message": bounded(self.message, MESSAGE, encoding),
            "traceback": None if self.traceback is None else tail(self.traceback, TRACEBACK, encoding),
        }  # fmt: skip


@dataclass(slots=True)
class Family:
    """Failures of one lane with the same text except for their values. Times are ISO text, by the database's clock."""

    environment: str
    lane: str
    fingerprint: str
    #: Their text, without the values.
    shape: str
    #: The class of the latest one; None if unknown.
    word: str | None
    #: How many failures are recorded, and how many rows they concern.
    count: int
    rows: int
    #: Further dead rows with the same error, found in a sample of the lane's table.
    unrecorded: int
    first_seen: str | None
    last_seen: str | None
    #: Failures per bucket of time, the latest last.
    buckets: list[int]
    #: The latest failure, with its id, message and traceback.
    example: dict[str, Any]
    #: Dead rows with this error, found in the same sample; None: no error column, or no sample.
    dead: int | None = None
    #: The lane has more dead rows than the sample, so ``dead`` is a lower bound.
    dead_at_least: bool = False

    def value(self) -> dict[str, Any]:
        """The family as plain values, for scripts."""
        document = {name: getattr(self, name) for name in self.__slots__}
        return {("class" if name == "word" else name): value for name, value in document.items()}


class Failures:
    """The failures of one environment."""

    def __init__(self, database: Database) -> None:
        self.database, self.sql = database, database.sql
        self.table = database.own("rowmill_failures")

    async def exists(self) -> bool:
        """Whether the table exists."""
        return await self.database.read(lambda run: schema.exists(self.database, run, "rowmill_failures"))

    # -- what the engine writes

    async def add(self, failures: Sequence[Failure]) -> None:
        """Record failures, all in one statement."""
        sql = self.sql
        source = sql.json_rows(sql.mark(1), [("ago", "double precision"), *_FIELDS])
        at, taken = sql.later(f"-{sql.json_field('ago')}"), ", ".join(sql.json_field(name) for name, _ in _FIELDS)
        text = f"insert into {self.table} (at, {self._names()}) select {at}, {taken} from {source}"
        # In a thread: fingerprinting a long message takes milliseconds, and the event loop has to serve runs.
        encoding = self.database.encoding
        document = await asyncio.to_thread(lambda: json.dumps([failure.value(encoding) for failure in failures]))
        await self.database.write(lambda run: run(text, (document,)))

    async def prune(self, days: float = DAYS, most: int = MOST) -> None:
        """Delete failures that are too old or too many. Ids only grow, so the limit needs no count."""
        last = f"(select coalesce(max(id), 0) from {self.table})"
        text = f"delete from {self.table} where {self._before(days * 86400)} or id <= {last} - {most}"
        await self.database.write(lambda run: run(text, ()))

    def _before(self, seconds: float) -> str:
        return f"at < {self.sql.later(f'-{seconds:.3f}')}"

    # -- what an operator reads

    async def of_row(self, lane: str, row_id: str, limit: int = 50) -> list[dict[str, Any]]:
        """The failures of one row, the latest first."""
        marks = self.sql.marks(2)
        text = (
            f"select id, at, {self._names()} from {self.table} where lane = {marks[0]} and row_id = {marks[1]}"
            f" order by id desc limit {limit}"
        )
        return [self._shown(row) for row in await self._read(text, (lane, row_id))]

    async def members(self, lane: str, family: str) -> list[str]:
        """The ids of the rows whose latest failure belongs to this family."""
        marks, table = self.sql.marks(2), self.table
        text = f"""select distinct f.row_id from {table} f
where f.lane = {marks[0]} and f.fingerprint = {marks[1]} and not exists (
  select 1 from {table} later
  where later.lane = f.lane and later.row_id = f.row_id and later.id > f.id and later.fingerprint <> f.fingerprint)"""
        return [row[0] for row in await self._read(text, (lane, family))]

    async def recorded(self, lanes: Sequence[str], row_ids: Sequence[str]) -> set[str]:
        """Which of these rows have a recorded failure, in any of these lanes."""
        (lane, row), among = self.sql.marks(2, kind=""), self.sql.among
        text = f"select row_id from {self.table} where lane {among(lane)} and row_id {among(row)}"
        return {row[0] for row in await self._read(text, (self.sql.list_value(lanes), self.sql.list_value(row_ids)))}

    async def families(
        self, environment: str, lanes: Sequence[str], *, hours: float = 24.0, buckets: int = 24
    ) -> list[Family]:
        """Failures of the last hours by lane and fingerprint, the latest seen first."""
        first_mark = self.sql.mark(1, kind="")
        recent = f"not ({self._before(hours * 3600)}) and lane {self.sql.among(first_mark)}"
        # Group by row first, then by family: count(distinct) would sort all failures.
        rows = f"""select lane, fingerprint, count(*) as n, min(at) as first, max(at) as last, max(id) as id
  from {self.table} where {recent} group by lane, fingerprint, row_id"""
        grouped = f"""select lane, fingerprint, sum(n), count(*), min(first), max(last), max(id)
from ({rows}) x group by lane, fingerprint order by max(id) desc limit {FAMILIES}"""
        width = hours * 3600 / buckets
        back = self.sql.whole(f"{self.sql.age('at')} / {width}")
        counted = f"""select lane, fingerprint, {back}, count(*)
from {self.table} where {recent} group by 1, 2, 3"""
        latest = f"select id, at, {self._names()} from {self.table} where id {self.sql.among(first_mark, 'bigint')}"

        def verb(run: Run) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
            lanes_given = (self.sql.list_value(lanes),)
            groups = run(grouped, lanes_given)
            if not groups:
                return [], [], []
            return groups, run(counted, lanes_given), run(latest, (self.sql.list_value([row[6] for row in groups]),))

        groups, counts, examples = await self.database.read(verb)
        shown = {row[0]: self._shown(row) for row in examples}
        columns: dict[tuple[str, str], list[int]] = {}
        for lane, family, back, number in counts:
            bucket = min(max(buckets - 1 - int(back), 0), buckets - 1)
            columns.setdefault((lane, family), [0] * buckets)[bucket] += number
        listed = []
        for lane, family, number, of_rows, first, last, example in groups:
            seen = shown.get(example, {})
            listed.append(
                Family(
                    environment, lane, family, shape(seen.get("message", "")), seen.get("class"), int(number),
                    of_rows, 0, iso_time(first), iso_time(last), columns.get((lane, family), [0] * buckets), seen,
                )
            )  # fmt: skip
        return listed

    # -- output

    def _names(self) -> str:
        return ", ".join(name for name, _ in _FIELDS)

    async def _read(self, text: str, values: Sequence[Any]) -> Sequence[Any]:
        return await self.database.read(lambda run: run(text, values))

    def _shown(self, row: Sequence[Any]) -> dict[str, Any]:
        names = ("id", "at", *(name for name, _ in _FIELDS))
        values = dict(zip(names, row, strict=True))
        return {**values, "at": iso_time(values["at"])}
