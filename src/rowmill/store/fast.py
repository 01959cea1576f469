"""A queue on PostgreSQL: the plain end of a run, which is nearly all of them, written by the shortest statement.

Done, with nothing to write beside it: rows of one claim have the same worker, time and count, so their keys are all
that differs, and one array says it. Unlike in a user's table no other statement of rowmill's waits for several of these
rows, so none has to be locked and skipped first: the update itself re-checks the fence on the row it locks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..claim import Settlement
from .database import Run
from .postgres import PostgresLane
from .postgres_statements import PostgresStatements
from .readers import Reader

_READ_LATER = ("args", "history")


class QueueStatements(PostgresStatements):
    """What a queue says: as any lane, and JSON comes as text, to be read where it is used."""

    def shown(self) -> str:
        return ", ".join(self.name(c) + ("::text" if c in _READ_LATER else "") for c in self.binding.taken)


class QueueLane(PostgresLane):
    """The verbs over ``rowmill_jobs``."""

    _say = QueueStatements

    def reader(self, column: str) -> Reader:
        return _json_at(self._at[column]) if column in _READ_LATER else super().reader(column)

    def _done(self) -> str:
        say = self.statements
        return f"""update {say.table} t set
    {say.assignments(say.settle_set("done", "null", "0"))}
where t.id = any($1::bigint[]) and {say.fence("t", "$3::timestamptz", "$4::int", "$2::text")}
returning t.id"""

    def settle_group(self, run: Run, group: Sequence[Settlement]) -> set[int]:
        if group[0].kind != "done" or group[0].columns:
            return super().settle_group(run, group)
        text = self._text("done", self._done)
        alike: dict[tuple[Any, Any], dict[int, int]] = {}
        at = attempts = positions = None
        for position, settlement in enumerate(group):
            claim = settlement.claim
            # Those of one claim mostly follow each other, and to compare two times is cheaper than to hash one.
            if positions is None or claim.claimed_at != at or claim.attempts != attempts:
                at, attempts = claim.claimed_at, claim.attempts
                positions = alike.setdefault((at, attempts), {})
            positions[claim.key[0]] = position
        written = set()
        for (at, attempts), positions in alike.items():
            rows = run(text, (list(positions), self.worker, at, attempts))
            written |= {positions[row[0]] for row in rows}
        return written


def _json_at(at: int) -> Reader:
    """From a claim it comes as text; from other statements as what the text says, and neither column is ever a text."""
    parse = json.JSONDecoder().raw_decode

    def read(row: Sequence[Any]) -> Any:
        value = row[at]
        return parse(value)[0] if isinstance(value, str) else value

    return read
