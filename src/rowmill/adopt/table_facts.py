"""The facts of a survey: the evidence for a proposal. Plain values, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import plural


def rows(number: int, counted: bool) -> str:
    """A number of rows in words; an estimate is rounded and marked."""
    if not number:
        return "no rows" if counted else "no rows seen"
    if not counted and number > 99:
        number = round(number, 2 - len(str(number)))
    return ("" if counted else "about ") + plural.counted(number, "row")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column."""

    name: str
    #: What it holds, as far as a proposal has to know: text, enum, int, bool, time or other.
    kind: str
    sql_type: str = ""
    nullable: bool = True
    #: The default as a plain value, where it is one.
    default: Any = None
    has_default: bool = False
    #: Computed by the database: nobody can write it.
    generated: bool = False
    #: All values it may hold, where a type, a constraint or a foreign key says so.
    allowed: tuple[Any, ...] = ()
    #: What limits the values, in words.
    allowed_by: str = ""
    #: What values mean, from a table they refer to or from the column's comment.
    meanings: Mapping[Any, str] = field(default_factory=dict)
    #: Values in the predicates of partial indexes.
    indexed_values: tuple[Any, ...] = ()
    length: int | None = None
    comment: str | None = None
    #: The table that the column refers to.
    refers_to: str | None = None
    #: Values that were seen, with the number of their rows, as far as it is known.
    seen: Mapping[Any, int] = field(default_factory=dict)
    #: Whether the rows were counted; otherwise the numbers are estimates.
    counted: bool = True

    def rows_of(self, value: Any) -> str:
        """How many rows have a value: ``44,000 rows``, ``about 44,000 rows``, ``no rows``."""
        return rows(self.seen.get(value, 0), self.counted)

    def shown(self, value: Any) -> str:
        """A value with the word that it means: ``3 'parsed'``."""
        word = self.meanings.get(value)
        return "NULL" if value is None else repr(value) if word is None else f"{value!r} {word!r}"


@dataclass(frozen=True, kw_only=True)
class Index:
    """One index. ``columns`` are those it is ordered by; an expression is None."""

    name: str
    columns: tuple[str | None, ...]
    predicate: str | None = None
    valid: bool = True
    unique: bool = False


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """One table."""

    dialect: str
    schema: str | None
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    #: Rows, estimated on a large table.
    rows: int = 0
    exact: bool = True
    #: Whether the number of rows was counted; every row may still not have been looked at.
    counted: bool = True
    #: How many rows were sampled, and how.
    looked_at: int = 0
    how: str = ""
    #: For each value of a state column: the share of its rows in which another column is filled in.
    filled: Mapping[str, Mapping[Any, Mapping[str, float]]] = field(default_factory=dict)
    indexes: tuple[Index, ...] = ()
    #: Triggers that run when a row is updated.
    update_triggers: tuple[str, ...] = ()
    partitioned: bool = False

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)

    def bare(self, name: str) -> str:
        """A column's name without a prefix that all columns have: ``lg_stat`` is ``stat``."""
        prefix = name.partition("_")[0] + "_"
        shared = len(self.columns) > 2 and all(column.name.startswith(prefix) for column in self.columns)
        return name.removeprefix(prefix) if shared else name

    @property
    def fullname(self) -> str:
        """Schema and name, as people write them."""
        return f"{self.schema}.{self.name}" if self.schema else self.name
