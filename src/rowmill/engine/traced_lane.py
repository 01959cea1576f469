"""A lane's verbs with a word to the tracer, where there is one. Without one nothing of this is in the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..declare.trace_context import TRACE
from ..store import LaneStore
from ..store.lane.claim import Claim, Report, Settlement
from .lane_state import LaneState
from .tracing import Carrier, Tracer


def trace_held(held: LaneState, tracer: Tracer) -> None:
    """From now on what is done here is traced: runs, claims and settles. Claims that find nothing are worth no span."""
    store, held.tracer = held.store, tracer
    claim, settle = store.claim, store.settle
    where = store.lane.name, store.binding.environment

    async def traced_claim(most: int) -> list[Claim]:
        began = time.time_ns()
        claims = await claim(most)
        if claims:
            tracer.wrote("claim", *where, began, len(claims))
        return claims

    async def traced_settle(batch: Sequence[Settlement]) -> Report:
        began = time.time_ns()
        report = await settle(batch)
        tracer.wrote("settle", *where, began, len(report.written) + len(report.refused))
        return report

    store.claim, store.settle = traced_claim, traced_settle  # type: ignore[method-assign, assignment]


def kept_with(store: LaneStore, claim: Claim) -> Carrier | None:
    """The trace that a job of rowmill's own table carries."""
    if not store.lane.own:
        return None
    args: Any = store.value(claim.row, "args")
    found = args.get(TRACE) if isinstance(args, dict) else None
    return found if isinstance(found, dict) else None
