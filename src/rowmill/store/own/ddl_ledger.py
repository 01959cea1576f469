"""``rowmill_ddl``: a record of what migrate added to the user's tables, so that exactly that can be removed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..database import Database, Run
from . import schema

BEGUN, MADE = "begun", "made"
_COLUMNS = "id, position, kind, relation, name, value, made, undo, state"


@dataclass(frozen=True)
class Record:
    """One addition: a column, an index, a storage parameter, a statistics target."""

    kind: str
    relation: str
    name: str
    made: str
    undo: str
    #: The value that was set, if the addition has one.
    value: str = ""
    state: str = MADE
    position: int = 0

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.relation}:{self.name}"


class Ledger:
    """The records of one environment."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.table = database.own("rowmill_ddl")
        self._marks = database.sql.marks(9, kind="")

    async def records(self) -> list[Record]:
        """All additions, in the order in which they were made; empty if the table is missing."""

        def verb(run: Run) -> Sequence[Record]:
            if not schema.exists(self.database, run, "rowmill_ddl"):
                return []
            rows = run(f"select {_COLUMNS} from {self.table} order by position", ())
            return [Record(row[2], row[3], row[4], row[6], row[7], row[5], row[8], row[1]) for row in rows]

        return list(await self.database.read(verb))

    def write(self, run: Run, record: Record) -> None:
        """Record one addition, in the transaction that makes it."""
        top = run(f"select coalesce(max(position), 0) + 1 from {self.table}", ())[0][0]
        marks = ", ".join(self._marks)
        values = (record.id, int(top), record.kind, record.relation, record.name, record.value, record.made,
                  record.undo, record.state)  # fmt: skip
        run(
            f"insert into {self.table} ({_COLUMNS}) values ({marks})"
            " on conflict (id) do update set value = excluded.value, made = excluded.made, undo = excluded.undo,"
            " state = excluded.state",
            values,
        )

    def erase(self, run: Run, record: Record) -> None:
        """Delete one record, in the transaction that removes the addition."""
        run(f"delete from {self.table} where id = {self._marks[0]}", (record.id,))
