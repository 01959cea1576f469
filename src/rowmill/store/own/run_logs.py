"""``rowmill_run_logs``: what handlers logged through ``job.log``, one row for each run that logged something."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...errors import DatabaseError
from ...scrub import scrubbed
from ..database import Database
from ..dialect import utc
from . import schema

#: Of one run the last lines are kept: how many at most, and how many bytes of each and of all.
LINES, LINE_BYTES, RUN_BYTES = 200, 2000, 32_000
#: How many runs of one row are kept, how many runs in all, and how many one statement deletes.
RUNS, MOST, PRUNE = 5, 50_000, 1000
_BETWEEN = " … "
_FIELDS = (("lane", "text"), ("row_id", "text"), ("attempt", "integer"), ("worker", "text"), ("outcome", "text"),
           ("dropped", "integer"), ("lines", "text"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a run, as its handler wrote it. ``at``: when, by this process's monotonic clock."""

    at: float
    level: str
    text: str
    #: Secrets were taken out of it already.
    clean: bool = False
    #: Which row it is about, in a chunk.
    row_id: str | None = None


@dataclass(frozen=True, slots=True)
class RunLog:
    """What one run logged. ``outcome``: how it ended, as its outcome was written; ``lost`` where it was dropped."""

    lane: str
    row_id: str
    attempt: int
    worker: str
    outcome: str
    #: When its outcome stood, by the monotonic clock, and for how long the log is kept.
    ended: float
    keep: timedelta
    lines: Sequence[Line]
    #: Lines before these that did not fit.
    dropped: int

    def value(self, now: float) -> dict[str, Any]:
        """The log as it is stored: without secrets, and within its bounds."""
        kept: list[list[Any]] = []
        room = RUN_BYTES
        for line in reversed(self.lines):
            text = cut(line.text if line.clean else scrubbed(line.text), LINE_BYTES)
            room -= len(text.encode())
            if room < 0 or len(kept) == LINES:
                break
            kept.append([round(self.ended - line.at, 3), line.level, text, line.row_id])
        return {
            "ago": round(now - self.ended, 3), "keep": self.keep.total_seconds(), "lane": self.lane,
            "row_id": self.row_id, "attempt": self.attempt, "worker": self.worker, "outcome": self.outcome,
            "dropped": self.dropped + len(self.lines) - len(kept), "lines": json.dumps(kept[::-1]),
        }  # fmt: skip


def cut(text: str, most: int) -> str:
    """A text of so many bytes at most: of a longer one the beginning and the end."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= most:
        return raw.decode()
    half = (most - len(_BETWEEN.encode())) // 2
    return raw[:half].decode("utf-8", "ignore") + _BETWEEN + raw[-half:].decode("utf-8", "ignore")


class RunLogs:
    """The logs of runs in one environment."""

    def __init__(self, database: Database) -> None:
        self.database, self.sql = database, database.sql
        self.table = database.own("rowmill_run_logs")
        self._names = ", ".join(name for name, _ in _FIELDS)

    async def exists(self) -> bool:
        """Whether the table exists."""
        return await self.database.read(lambda run: schema.exists(self.database, run, "rowmill_run_logs"))

    # -- what the engine writes

    async def add(self, logs: Sequence[RunLog], now: float) -> None:
        """Keep the logs of some runs, all in one statement; then of each row only those of its last runs."""
        # In a thread: redaction takes a part of a millisecond for each line, and the event loop has to serve runs.
        document = await asyncio.to_thread(lambda: json.dumps([log.value(now) for log in logs]))
        sql = self.sql
        source = sql.json_rows(sql.mark(1), [("ago", "double precision"), ("keep", "double precision"), *_FIELDS])
        at, until = (sql.later(f"{sign}{sql.json_field(name)}") for sign, name in (("-", "ago"), ("", "keep")))
        taken = ", ".join(sql.json_field(name) for name, _ in _FIELDS)
        text = f"insert into {self.table} (at, kept_until, {self._names}) select {at}, {until}, {taken} from {source}"
        await self.database.write(lambda run: run(text, (document,)))
        with contextlib.suppress(DatabaseError):  # the logs are kept; a repeated write would keep them twice
            await self.database.write(lambda run: run(self._trim(source), (document,)))

    def _trim(self, source: str) -> str:
        rows = f"select {self.sql.json_field('lane')}, {self.sql.json_field('row_id')} from {source}"
        numbered = (
            f"select id, row_number() over (partition by lane, row_id order by id desc) as n from {self.table}"
            f" where (lane, row_id) in ({rows})"
        )
        return self._delete(f"id in (select id from ({numbered}) x where n > {RUNS})")

    async def prune(self) -> None:
        """Delete what is past its retention, and the oldest logs if there are too many, in small steps."""
        last = f"(select coalesce(max(id), 0) from {self.table})"
        # Ids only grow, so the limit needs no count.
        for test in (f"kept_until < {self.sql.now}", f"id <= {last} - {MOST}"):
            text = f"{self._delete(test, PRUNE)} returning id"
            deleted = PRUNE
            while deleted == PRUNE:
                deleted = len(await self.database.write(lambda run, text=text: run(text, ())))  # type: ignore[misc]

    def _delete(self, test: str, most: int | None = None) -> str:
        limit = "" if most is None else f" limit {most}"
        chosen = f"select id from {self.table} where {test}{limit}{self.sql.lock_to_delete}"
        return f"delete from {self.table} where id in ({chosen})"

    # -- what an operator reads

    async def of_row(self, lane: str, row_id: str) -> list[dict[str, Any]]:
        """The logs of one row's runs, the last run first. Times are ISO text, by the database's clock."""
        marks = self.sql.marks(2)
        text = (
            f"select at, {self._names} from {self.table} where lane = {marks[0]} and row_id = {marks[1]}"
            f" order by id desc limit {RUNS}"
        )
        rows = await self.database.read(lambda run: run(text, (lane, row_id)))
        return [_shown(number, *row) for number, row in enumerate(rows, 1)]


def _shown(
    number: int, at: Any, lane: str, row_id: str, attempt: int, worker: str, outcome: str, dropped: int, lines: str
) -> dict[str, Any]:
    ended = utc(at)
    return {
        "run": number, "at": ended.isoformat(timespec="milliseconds"), "attempt": attempt, "worker": worker,
        "outcome": outcome, "dropped": dropped,
        "lines": [
            {
                "at": (ended - timedelta(seconds=before)).isoformat(timespec="milliseconds"), "level": level,
                "text": text, "id": about,
            }
            for before, level, text, about in json.loads(lines)
        ],
    }  # fmt: skip
