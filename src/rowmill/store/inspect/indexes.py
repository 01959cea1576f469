"""The indexes that a lane's statements walk, one place for all of them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ..gates.gate_binding import key_phrase
from ..lane.binding import Binding
from ..lane.statements import Statements

_LONGEST = 63  # of a name in PostgreSQL, in bytes


@dataclass(frozen=True)
class NeededIndex:
    """An index that a statement of a lane needs: what it is ordered by, over which rows, and what it is good for."""

    purpose: str
    order: str
    predicate: str
    why: str
    #: The order in which the statement wants its rows, as ORDER BY has it; empty where any will do.
    sort: str = ""

    def name(self, lane: str, table: str) -> str:
        """A name that tells what it is, and changes with what it holds: a changed lane gets a new index."""
        digest = hashlib.sha256(f"{table}|{lane}|{self.order}|{self.predicate}".encode()).hexdigest()[:8]
        word = re.sub(r"[^a-z0-9]+", "_", lane.lower()).strip("_") or "lane"
        return f"rowmill_{word[: _LONGEST - 19 - len(self.purpose)]}_{self.purpose}_{digest}"


def needed(binding: Binding, say: Statements) -> list[NeededIndex]:
    """What the claim and the sweep of a lane walk; one with gates by key walks their keys."""
    gated = for_gates(binding, say)
    return gated or [_ready(binding, say), _running(binding, say)]


def _ready(binding: Binding, say: Statements) -> NeededIndex:
    """In the claim's order, over the rows that the state alone makes ready; the due time is checked inside it."""
    order = say.order()
    due = binding.roles.get("run_after")
    if due is not None and due not in [column for column, _ in binding.order]:
        order += f", {say.name(due)}"
    predicate = say.ready_state()
    if binding.lane.dead is None and (counter := binding.counter):
        # Spent rows stay ready by their state: the counter keeps them out of the index, too.
        predicate += f" and coalesce({say.name(counter)}, 0) < {say.exhausted()}"
    return NeededIndex(
        "ready", order, predicate, "the claim takes its rows from it, however large the table", say.order()
    )


def _running(binding: Binding, say: Statements) -> NeededIndex:
    """Over the rows being worked on, by the time of their claim: it grows, so that entries come one behind the other,
    where those of a random key go all over the index. By the key where renewals move that time: each would write to
    all indexes.
    """
    claimed = binding.roles.get("claimed_at") if binding.renew != "claimed_at" else None
    order = say.name(claimed) if claimed else say.names(binding.key)
    return NeededIndex("running", order, say.running(), "the sweep and the counts find running rows by it")


def for_gates(binding: Binding, say: Statements) -> list[NeededIndex]:
    """What a lane's gates need: the ready rows of each key in the claim's order, and running rows by key."""
    keys = list(dict.fromkeys(group.by.strip() for group in binding.lane.groups if group.by is not None))
    if not keys:
        return []
    phrases = [key_phrase(binding, say, key) for key in keys]
    ready, sort = _ready(binding, say), ", ".join([*phrases, say.order()])
    turns = NeededIndex(
        "turns",
        ", ".join([*phrases, ready.order]),
        ready.predicate,
        f"the claim takes the rows of each {' and '.join(keys)} in turn from it",
        sort,
    )
    held = [
        NeededIndex(f"held{i or ''}", phrase, say.running(), f"gates count by it how many of a {key} are running")
        for i, (key, phrase) in enumerate(zip(keys, phrases, strict=True))
    ]
    return [turns, *held]


def in_words(need: NeededIndex, say: Statements, name: str, *, concurrently: bool = False) -> str:
    """The statement that makes an index."""
    how = say.sql.concurrently if concurrently else ""
    order = say.sql.index_order(need.order)
    return f"create index {how}{say.name(name)} on {say.table} ({order}) where {need.predicate}"
