"""The indexes that a lane's statements need."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ..gates.gate_binding import key_phrase
from ..lane.binding import Binding
from ..lane.statements import Statements

_LONGEST = 63  # the longest name in PostgreSQL, in bytes


@dataclass(frozen=True)
class NeededIndex:
    """An index that a statement of a lane needs: its order, its rows, and its purpose."""

    purpose: str
    order: str
    predicate: str
    why: str
    #: The order of the statement's rows, as in ORDER BY; empty if any order will do.
    sort: str = ""

    def name(self, lane: str, table: str) -> str:
        """A name that describes the index and changes with its definition, so a changed lane gets a new index."""
        digest = hashlib.sha256(f"{table}|{lane}|{self.order}|{self.predicate}".encode()).hexdigest()[:8]
        word = re.sub(r"[^a-z0-9]+", "_", lane.lower()).strip("_") or "lane"
        return f"rowmill_{word[: _LONGEST - 19 - len(self.purpose)]}_{self.purpose}_{digest}"


def needed(binding: Binding, statements: Statements) -> list[NeededIndex]:
    """The indexes for the claim and the sweep of a lane. A lane with gates by key also needs one by that key.

    They are for the rows of all shards: the shard is the first column, not a condition.
    """
    statements = statements.unsharded()
    gated = for_gates(binding, statements)
    return gated or [_ready(binding, statements), _running(binding, statements)]


def _ready(binding: Binding, statements: Statements) -> NeededIndex:
    """In the claim's order, over the rows with a ready state. The due time is checked inside the index."""
    order = _order(binding, statements)
    predicate = statements.ready_state()
    if binding.lane.dead is None and (counter := binding.counter):
        # Rows with no attempts left keep the ready state, so the index also excludes them by the counter.
        predicate += f" and coalesce({statements.name(counter)}, 0) < {statements.exhausted()}"
    return NeededIndex(
        "ready",
        _within_shard(binding, statements, order),
        predicate,
        "lets claims find ready rows fast on a large table",
        statements.order(),
    )


def _order(binding: Binding, statements: Statements) -> str:
    due = binding.roles.get("run_after")
    behind = [statements.name(due)] if due is not None and due not in [column for column, _ in binding.order] else []
    return ", ".join([statements.order(), *behind])


def _within_shard(binding: Binding, statements: Statements, order: str) -> str:
    """An order within each of the lane's shards; a column that stands in it already is not repeated."""
    names = [statements.name(column) for column in binding.shard if column not in [c for c, _ in binding.order[:1]]]
    return ", ".join([*names, order])


def _running(binding: Binding, statements: Statements) -> NeededIndex:
    """Over the running rows, by the time of their claim, or by the key if renewals change that time.

    New entries by time go to the end of the index; entries by a random key go to all its pages. But a renewal that
    changes an indexed column writes to every index of the table.
    """
    claimed = binding.roles.get("claimed_at") if binding.renew != "claimed_at" else None
    order = statements.name(claimed) if claimed else statements.names(binding.key)
    return NeededIndex("running", order, statements.running(), "lets sweeps and counts find running rows fast")


def for_gates(binding: Binding, statements: Statements) -> list[NeededIndex]:
    """The indexes for a lane's gates: the ready rows of each key in the claim's order, and running rows by key."""
    keys = list(dict.fromkeys(group.by.strip() for group in binding.lane.groups if group.by is not None))
    if not keys:
        return []
    phrases = [key_phrase(binding, statements, key) for key in keys]
    ready, sort = _ready(binding, statements), ", ".join([*phrases, statements.order()])
    turns = NeededIndex(
        "turns",
        _within_shard(binding, statements, ", ".join([*phrases, _order(binding, statements)])),
        ready.predicate,
        f"lets claims find the next rows of each {' and '.join(keys)} fast",
        sort,
    )
    held = [
        NeededIndex(
            f"held{i or ''}", phrase, statements.running(), f"lets gates count the running rows of each {key} fast"
        )
        for i, (key, phrase) in enumerate(zip(keys, phrases, strict=True))
    ]
    return [turns, *held]


def in_words(need: NeededIndex, statements: Statements, name: str, *, concurrently: bool = False) -> str:
    """The statement that creates an index."""
    how = statements.sql.concurrently if concurrently else ""
    order = statements.sql.index_order(need.order)
    return f"create index {how}{statements.name(name)} on {statements.table} ({order}) where {need.predicate}"
