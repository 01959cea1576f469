"""Tests a user's lane: copies it, interleaves workers, and kills real worker processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock
from ..declare.lane import Lane
from ..errors import DeclarationError, RowmillError
from ..migrate.schema_copy import copied
from ..mill import Mill
from ..store import Binding, Database, bind, store_for
from ..store.lane.reflect import add_constraints, table_name
from .chaos import Chaos, ChaosResult
from .interleave import Interleaver, InterleaveResult
from .sample_rows import Parent, SampleRows

Tell = Callable[[str], None]
#: Keys of a gate in the chaos run. With only two keys most workers would be idle.
_KEYS = 5


@dataclass(frozen=True)
class ProofSettings:
    """How much to test."""

    reference: str
    schedules: int = 300
    seconds: float = 6.0
    first: int = 1
    #: Run only the schedule with this seed.
    seed: int | None = None
    on: str | None = None
    given: dict[str, str] = field(default_factory=dict)


@dataclass
class ProofResult:
    """The results of one lane."""

    lane: Lane
    environment: str
    table: str = ""
    promises: list[str] = field(default_factory=list)
    tried: InterleaveResult | None = None
    survived: ChaosResult | None = None
    #: Why the lane could not be tested.
    error: RowmillError | None = None

    @property
    def held(self) -> bool:
        """Whether every test passed."""
        broken = self.tried is not None and self.tried.broken is not None
        return self.error is None and not broken and (self.survived is None or self.survived.held)


async def prove(
    mill: Mill, lane: Lane, environment: str, database: Database, terms: ProofSettings, tell: Tell
) -> ProofResult:
    """Test one lane of a Mill with the schema of one environment."""
    proved = ProofResult(lane, environment)
    try:
        await _prove(mill, proved, database, terms, tell)
    except RowmillError as error:
        proved.error = error
    return proved


async def _prove(mill: Mill, proved: ProofResult, database: Database, terms: ProofSettings, tell: Tell) -> None:
    lane = proved.lane
    database.needs_sessions("a trial needs sessions of its own")
    tables: Sequence[tuple[str | None, str]] = []
    texts, parents = [repr(lane.gates)], list[Parent]()
    if not lane.own:
        tables = [table_name(lane.table, database.dialect.name)]
        binding = await bind(lane, proved.environment, database)
        await database.reflect(lambda c: add_constraints(c, binding.table))
        texts.append(store_for(binding, database, Clock(), "", "").statements.ready())
        parents = _parents(binding, texts)
    tell("copying its table")
    async with copied(database, tables, texts, terms.on) as url:
        seeds = [terms.seed] if terms.seed is not None else range(terms.first, terms.first + terms.schedules)
        if terms.schedules or terms.seed is not None:
            tell(f"interleaving {len(seeds):,} schedules")
            async with Interleaver(lane, url, SampleRows(terms.given, parents=parents), mill.schema) as interleaver:
                proved.table = interleaver.binding.table.fullname
                proved.promises = _promises(interleaver.binding)
                proved.tried = await interleaver.try_seeds(seeds)
        if terms.seed is None and terms.seconds and (proved.tried is None or proved.tried.broken is None):
            tell(f"killing its workers for {terms.seconds:g} s")
            made = SampleRows(terms.given, _KEYS, parents)
            chaos = Chaos(terms.reference, lane, url, made, mill.schema, seed=terms.first)
            proved.survived = await chaos.run(terms.seconds)


def _parents(binding: Binding, texts: Sequence[str]) -> list[Parent]:
    """The columns that refer to a table that the lane's condition or its gates read."""
    words = set(re.findall(r"\w+", " ".join(texts)))
    parents = []
    for key in binding.table.foreign_keys:
        *schema, table, referred = key.target_fullname.split(".")
        if table in words and table != binding.table.name:
            parents.append(Parent(key.parent.name, schema[0] if schema else None, table, referred))
    return sorted(parents, key=lambda parent: parent.column)


def _promises(binding: Binding) -> list[str]:
    """The rules that are checked for this lane."""
    lane, own = binding.lane, binding.state_columns()
    counted = [r for r in ("attempts", "failures", "reclaims") if r in binding.roles and binding.roles[r] not in own]
    shared = len({binding.roles[r] for r in counted}) < len(counted)
    promises = ["one live claim per row", "no outcome without its claim", "every row comes to its end"]
    promises += [f"{', '.join(counted)} as counted"] if counted and not shared else []
    for group in lane.groups:
        if group.concurrency is not None:
            by = f" by {group.label}" if group.by else ""
            promises.append(f"at most {group.concurrency.limit} running{by}")
    return promises


def provable(mill: Mill, names: Sequence[str] | None) -> list[Lane]:
    """The lanes that can be tested. A backfill is left out: it is its live lane again."""
    chosen = [lane for lane in mill.select(names) if lane.backfills is None]
    if not chosen:
        raise DeclarationError(
            "a backfill is tested together with its lane",
            hint="use the lane's own name, without -backfill",
        )
    return chosen


def value(proved: ProofResult) -> dict[str, Any]:
    """The result as plain values, for scripts."""
    return {
        "environment": proved.environment,
        "lane": proved.lane.name,
        "table": proved.table,
        "held": proved.held,
        "promises": proved.promises,
        "interleaver": proved.tried.value() if proved.tried else None,
        "chaos": vars(proved.survived) if proved.survived else None,
        "error": None if proved.error is None else {"message": proved.error.message, "hint": proved.error.hint},
    }
