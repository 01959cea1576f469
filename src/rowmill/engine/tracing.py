"""What the engine asks of somebody who traces it, and how a trace travels with a job. ``rowmill.otel`` answers it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..declare.call import Call
from ..declare.trace_context import TRACE
from ..store import LaneStore
from ..store.lane.claim import Claim, Report, Settlement

if TYPE_CHECKING:
    from .lane_state import LaneState

#: A trace's context as text, by name: what is kept with a job, and given to a process.
Carrier = Mapping[str, str]


class Tracer(Protocol):
    """Somebody who traces."""

    def enqueue(self, tasks: Sequence[str], queues: Sequence[str]) -> AbstractContextManager[Carrier]:
        """Around the enqueueing of jobs of these tasks, into these queues: what is to be kept with each of them."""

    def run(
        self, facts: Mapping[str, Any], enqueued: Carrier | None, wrote_row: Carrier | None = None
    ) -> AbstractContextManager[Callable[[Settlement | None], None]]:
        """Around a run, with what was kept with its job, or the trace that wrote its row. Is told how it ended, where
        something is to be written.
        """

    def chunk(
        self, facts: Mapping[str, Any], enqueued: Sequence[Carrier], wrote_rows: Sequence[Carrier]
    ) -> AbstractContextManager[Callable[[BaseException | None], None]]:
        """Around one call for several rows, with what was kept with their jobs, and the traces that wrote them. Is told
        the error with which the call ended, if it did.
        """

    def wrote(self, verb: str, lane: str, environment: str, began: int, rows: int) -> None:
        """A claim or a settle took so many rows; ``began`` in nanoseconds since 1970."""

    def here(self) -> Carrier:
        """The context at this moment, for a process that goes on with it."""

    def within(self, carrier: Carrier) -> AbstractContextManager[None]:
        """In that process: around what it does."""


@contextmanager
def enqueued(tracer: Tracer | None, calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
    """Around the enqueueing of calls: the same, with the trace that each is to carry."""
    if tracer is None or not calls:
        yield calls
        return
    with tracer.enqueue([call.task.name for call in calls], [call.task.queue for call in calls]) as carrier:
        yield [replace(call, args={**call.args, TRACE: dict(carrier)}) for call in calls]


def trace_lane(lane_state: LaneState, tracer: Tracer) -> None:
    """From now on what is done here is traced: runs, claims and settles. Claims that find nothing are worth no span."""
    store, lane_state.tracer = lane_state.store, tracer
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


def wrote_row(store: LaneStore, claim: Claim) -> Carrier | None:
    """The trace that wrote a row of the user's own table, where the lane has the role ``traceparent``."""
    column = store.binding.roles.get("traceparent")
    value = claim.row[claim.holder.at[column]] if column and column in claim.holder.at else None
    return {"traceparent": value} if isinstance(value, str) else None


def kept_with(store: LaneStore, claim: Claim) -> Carrier | None:
    """The trace that a job of rowmill's own table carries."""
    if not store.lane.own:
        return None
    args: Any = store.value(claim.row, "args")
    carrier = args.get(TRACE) if isinstance(args, dict) else None
    return carrier if isinstance(carrier, dict) else None
