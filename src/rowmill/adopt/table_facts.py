"""What a look at a live table found: the evidence that a proposal rests on. Plain values, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    #: Who says so, in words.
    allowed_by: str = ""
    #: What values mean, from a table they refer to or from the column's comment.
    meanings: Mapping[Any, str] = field(default_factory=dict)
    #: Values that stand in the predicates of partial indexes.
    indexed_values: tuple[Any, ...] = ()
    length: int | None = None
    comment: str | None = None
    #: The table that the column refers to.
    refers_to: str | None = None
    #: Values that were seen, with how many rows of the table have them, as far as is known.
    seen: Mapping[Any, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Index:
    """One index. ``columns`` are those it is ordered by; an expression stands as None."""

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
    #: How many rows were looked at, and how they came.
    looked_at: int = 0
    how: str = ""
    #: For a state column, by value: the share of its rows in which another column is filled in.
    filled: Mapping[str, Mapping[Any, Mapping[str, float]]] = field(default_factory=dict)
    indexes: tuple[Index, ...] = ()
    #: Triggers that run when a row is updated.
    update_triggers: tuple[str, ...] = ()
    partitioned: bool = False

    def column(self, name: str) -> Column | None:
        """A column by its name."""
        return next((column for column in self.columns if column.name == name), None)

    @property
    def fullname(self) -> str:
        """Schema and name, as people write them."""
        return f"{self.schema}.{self.name}" if self.schema else self.name
