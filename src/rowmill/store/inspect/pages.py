"""Rows page by page, filtered by any column, in a bounded time however large the table.

Pages follow the key, newest first. Each page starts after the last key of the previous one: no offset, no sort. A
filter that matches few rows would still read the whole table. If a page takes too long, it is read in ranges of keys
instead. The walk stops when its time is up, and returns how far it got.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ...errors import Busy, DeclarationError, did_you_mean
from ..lane.row_keys import Key, Placeholders, parse, written
from .lane_view import LaneView, Row

#: The operators of a filter.
OPERATORS = {
    "eq": "is", "ne": "is not", "has": "contains", "lt": "is below", "gt": "is above", "null": "is empty",
    "set": "is not empty",
}  # fmt: skip
SIZE = 50
#: Seconds for a page in one query, for a page in ranges, and for one range: the target and the limit.
_AT_ONCE, _BUDGET, _AIM, _ONE = 0.1, 0.08, 0.03, 1.0
#: Rows in the first range, and in the longest. With a key that does not follow the table's order, each row costs a
#: page.
_RANGE, _LONGEST = 1_000, 200_000


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on one column."""

    column: str
    operator: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows a page shows, and where it starts."""

    state: str | None = None
    filters: tuple[Filter, ...] = ()
    #: Text to find in any text column, or in the id.
    search: str = ""
    #: The key of the last row of the previous page, or of the last row that it read.
    after: str | None = None
    oldest_first: bool = False
    #: Read in ranges from the start, because the previous page had to.
    ranges: bool = False
    size: int = SIZE


@dataclass(frozen=True, slots=True)
class Page:
    """Rows, and the key after which the next page starts; None: this is the last page."""

    rows: list[Row]
    after: str | None
    ranges: bool = False
    #: How many rows were read, if the page was read in ranges.
    looked_at: int | None = None


async def page(view: LaneView, wanted: Wanted) -> Page:
    """Return one page of rows."""
    walk = _Walk(view, wanted)
    if not wanted.ranges:
        try:
            return walk.page(await walk.rows(None, wanted.size + 1, _AT_ONCE))
        except Busy:  # few rows match, so read in ranges
            pass
    return await walk.ranges()


class _Walk:
    def __init__(self, view: LaneView, wanted: Wanted) -> None:
        self.view, self.wanted, self.statements, self.binding = view, wanted, view.statements, view.binding
        self.keys = self.statements.names(self.binding.key)
        self.start: Key | None = parse(self.binding, wanted.after) if wanted.after is not None else None
        self.further = [f.column for f in wanted.filters if f.column in self.binding.columns]

    def order(self) -> str:
        way = "" if self.wanted.oldest_first else " desc"
        return ", ".join(f"{self.statements.name(column)}{way}" for column in self.binding.key)

    def _beyond(self, key: Key, marks: Placeholders, *, included: bool = False) -> str:
        sign = (">" if self.wanted.oldest_first else "<") + ("=" if included else "")
        return f"({self.keys}) {sign} {marks.key(key)}"

    def _tests(self, marks: Placeholders) -> list[str]:
        view, wanted = self.view, self.wanted
        tests = [f"({view.need(wanted.state) if wanted.state else view.any_state()})"]
        tests[0] += self.statements.shard()
        tests += [self._filter(given, marks) for given in wanted.filters]
        if wanted.search:
            tests.append(self._search(wanted.search, marks))
        return tests

    def _text(self, column: str) -> str:
        return f"cast({self.statements.name(column)} as text)"

    def _contains(self, column: str, mark: str) -> str:
        return f"{self._text(column)} {self.view.sql.like} {mark} escape '\\'"

    def _filter(self, given: Filter, marks: Placeholders) -> str:
        if given.column not in self.binding.columns:
            raise DeclarationError(
                f"table {self.binding.table.fullname!r} has no column {given.column!r}",
                hint=did_you_mean(given.column, self.binding.columns),
            )
        name = self.statements.name(given.column)
        match given.operator:
            case "null":
                return f"{name} is null"
            case "set":
                return f"{name} is not null"
            case "has":
                return self._contains(given.column, marks.add(f"%{_escaped(given.value)}%"))
            case "eq" | "ne" | "lt" | "gt":
                sign = {"eq": "=", "ne": self.view.sql.is_distinct, "lt": "<", "gt": ">"}[given.operator]
                if isinstance(self.binding.table.c[given.column].type, sa.JSON):  # json has no order, and no equality
                    return f"{self._text(given.column)} {sign} {marks.add(given.value)}"
                return f"{name} {sign} {marks.add(given.value, given.column)}"
            case _:
                raise DeclarationError(
                    f"there is no filter {given.operator!r}", hint=did_you_mean(given.operator, OPERATORS)
                )

    def _search(self, text: str, marks: Placeholders) -> str:
        mark = marks.add(f"%{_escaped(text)}%")
        columns = self.binding.table.c
        parts = [
            self._contains(c, mark) for c in self.binding.columns if isinstance(columns[c].type, (sa.String, sa.Enum))
        ]
        try:
            key = parse(self.binding, text)
        except DeclarationError:
            key = None
        if key is not None:
            parts.append(f"({self.keys}) = {marks.key(key)}")
        return f"({' or '.join(parts)})" if parts else "1 = 0"

    async def rows(self, end: Key | None, limit: int, seconds: float) -> list[Row]:
        """Rows after the current position, up to and including ``end``."""
        marks = Placeholders(self.binding)
        tests = self._tests(marks)
        if self.start is not None:
            tests.append(self._beyond(self.start, marks))
        if end is not None:
            other = "<=" if self.wanted.oldest_first else ">="
            tests.append(f"({self.keys}) {other} {marks.key(end)}")
        rest = f"where {' and '.join(tests)} order by {self.order()} limit {limit}"
        return await self.view.select(rest, marks, seconds, self.further)

    def page(self, rows: list[Row], **more: Any) -> Page:
        """Make a page of these rows. There is a next page if there are more rows than fit."""
        if len(rows) > self.wanted.size:
            rows = rows[: self.wanted.size]
            return Page(rows, written(rows[-1].id), **more)
        return Page(rows, None, **more)

    async def ranges(self) -> Page:
        """Read ranges of keys while they are quick, until the page is full or the time is up."""
        began, length, rows, looked = time.monotonic(), _RANGE, list[Row](), 0
        while True:
            since = time.monotonic()
            end = await self._end(length)
            try:
                rows += await self.rows(end, self.wanted.size + 1 - len(rows), _ONE)
            except Busy:
                if length <= 100:
                    raise
                length //= 8
                continue
            looked += length
            if len(rows) > self.wanted.size:
                return self.page(rows, ranges=True, looked_at=looked)
            if end is None:
                return Page(rows, None, True, looked)
            self.start = end
            if time.monotonic() - began > _BUDGET:
                return Page(rows, written(end if len(end) > 1 else end[0]), True, looked)
            took = max(time.monotonic() - since, 0.001)
            length = int(min(max(length * min(_AIM / took, 8.0), 100), _LONGEST))

    async def _end(self, length: int) -> Key | None:
        """The last key of a range; None: the table ends first."""
        marks = Placeholders(self.binding)
        tests = [self._beyond(self.start, marks)] if self.start is not None else []
        tests += [shard[5:]] if (shard := self.statements.shard()) else []
        test = f"where {' and '.join(tests)} " if tests else ""
        text = (
            f"select {self.keys} from {self.statements.table} {test}order by {self.order()} limit 1 offset {length - 1}"
        )
        rows = await self.view.ask(text, marks, 2.0)
        return tuple(rows[0]) if rows else None


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
