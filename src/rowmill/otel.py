"""Traces and metrics for OpenTelemetry: ``rowmill.otel.trace(mill)``, ``rowmill.otel.measure(mill)``.

Needs the extra ``otel``, and an SDK of the application's. Attributes and instruments have the names of the semantic
conventions for messaging, beside rowmill's own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .engine.tracing import Carrier
from .errors import DeclarationError
from .events import ROW_COUNTS, Event
from .mill import Mill
from .scrub import scrubbed
from .store.lane.claim import Settlement

try:
    from opentelemetry import context
    from opentelemetry import metrics as metrics_api
    from opentelemetry import trace as api
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.propagate import extract, inject
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:  # pragma: no cover - the extra is there in the tests
    raise DeclarationError("rowmill.otel needs opentelemetry-api", hint="pip install 'rowmill[otel]'") from error

_TRACE_CONTEXT = TraceContextTextMapPropagator()
FLUSH = 5000  # milliseconds
#: The buckets that the conventions advise, and longer ones: runs may take an hour.
SECONDS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


def _messaging(operation: str, kind: str, destination: str | None, **more: Any) -> dict[str, Any]:
    """The attributes of the semantic conventions for messaging."""
    attributes = {
        "messaging.system": "rowmill",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": destination,
    } | {f"messaging.{name}": value for name, value in more.items()}
    return {name: value for name, value in attributes.items() if value is not None}


def trace(mill: Mill, provider: TracerProvider | None = None) -> None:
    """Trace this Mill: spans for enqueue, claim, run and settle. A run's span is the current one inside its handler,
    wherever that runs, so that your own spans are its children; it is linked to the span that enqueued its job. Where a
    lane has the role ``traceparent``, the run continues the trace that wrote the row.

    ``provider``: else the global one. What has not left yet when a worker stops, or when a handler's process answers,
    is flushed.
    """
    tracer = _Tracer(provider)
    mill.events.tracer = tracer
    mill.events.subscribe(tracer.stopped, detailed=False)


def measure(mill: Mill, provider: MeterProvider | None = None) -> None:
    """Measure what this Mill's workers do in this process: rows claimed, run times, outcomes, claims that were lost.

    ``provider``: else the global one. It is flushed when a worker stops.
    """
    mill.on_event(_Meter(provider))


class _Meter:
    def __init__(self, provider: MeterProvider | None) -> None:
        self._provider = provider
        meter = metrics_api.get_meter("rowmill", meter_provider=provider)
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Rows claimed, to be run"
        )
        self._duration = meter.create_histogram(
            "messaging.process.duration", "s", "How long runs took", explicit_bucket_boundaries_advisory=SECONDS
        )
        self._outcomes = meter.create_counter("rowmill.outcomes", "{row}", "Outcomes written")
        self._counted = {
            event: meter.create_counter(f"rowmill.{name}", "{row}", about)
            for event, (name, about, _) in ROW_COUNTS.items()
        }
        self._dead = meter.create_counter("rowmill.workers.dead", "{worker}", "Workers found dead by others")

    def __call__(self, event: Event) -> None:
        fields = event.fields
        where = {"rowmill.environment": fields.get("environment")}
        match event.name:
            case "job_settled" | "job_failed":
                outcome = fields["outcome"]
                failed = outcome in ("retry", "dead")
                error = {"error.type": fields.get("class") or outcome} if failed else {}
                attributes = _messaging("run", "process", fields["lane"]) | where | error
                self._duration.record(fields["job_duration_ms"] / 1000, attributes)
                self._outcomes.add(1, {"rowmill.lane": fields["lane"], **where, "rowmill.outcome": outcome})
            case "batch_claimed":
                attributes = _messaging("claim", "receive", fields["lane"]) | where
                self._consumed.add(fields["batch_claimed_count"], attributes)
            case "worker_dead":
                self._dead.add(1, where)
            case "worker_stopped":
                self._flush()
            case name if name in self._counted:
                self._counted[name].add(fields.get(ROW_COUNTS[name][2], 1), {"rowmill.lane": fields["lane"], **where})

    def _flush(self) -> None:
        provider: Any = self._provider or metrics_api.get_meter_provider()
        if hasattr(provider, "force_flush"):
            provider.force_flush(FLUSH)


class _Tracer:
    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self._tracer = api.get_tracer("rowmill", tracer_provider=provider)

    @contextlib.contextmanager
    def enqueue(self, tasks: Sequence[str], queues: Sequence[str]) -> Iterator[Carrier]:
        names = list(dict.fromkeys(tasks))
        name = f"enqueue {names[0]}" if len(names) == 1 else "enqueue"
        # The conventions count a batch only where there may be several.
        many = len(tasks) if len(tasks) > 1 else None
        attributes: dict[str, Any] = {"rowmill.tasks": names, "rowmill.count": len(tasks)}
        destination = queues[0] if len(set(queues)) == 1 else None
        attributes |= _messaging("enqueue", "send", destination, **{"batch.message_count": many})
        with self._tracer.start_as_current_span(name, kind=SpanKind.PRODUCER, attributes=attributes):
            yield self.here()

    @contextlib.contextmanager
    def run(
        self, facts: Mapping[str, Any], enqueued: Carrier | None, wrote_row: Carrier | None = None
    ) -> Iterator[Callable[[Settlement | None], None]]:
        linked = api.get_current_span(extract(enqueued)).get_span_context() if enqueued else None
        with self._tracer.start_as_current_span(
            f"run {facts['lane']}",
            # The run of a job is nobody's child: the caller that enqueued it is long gone, and linked. A run of a row
            # with a traceparent continues the trace that wrote the row; one that cannot be read is ignored.
            _TRACE_CONTEXT.extract(wrote_row, context.Context()) if wrote_row else context.Context(),
            SpanKind.CONSUMER,
            {f"rowmill.{name}": value for name, value in facts.items() if value is not None} | _conventional(facts),
            [Link(linked)] if linked is not None and linked.is_valid else [],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:

            def ended(settlement: Settlement | None) -> None:
                if settlement is None:
                    return
                span.set_attribute("rowmill.outcome", settlement.kind)
                if settlement.kind in ("retry", "dead"):
                    if settlement.cause is not None:
                        span.set_attribute("error.type", type(settlement.cause).__qualname__)
                    span.set_status(Status(StatusCode.ERROR, scrubbed(settlement.error or "")))

            yield ended

    @contextlib.contextmanager
    def chunk(
        self, facts: Mapping[str, Any], enqueued: Sequence[Carrier], wrote_rows: Sequence[Carrier]
    ) -> Iterator[Callable[[BaseException | None], None]]:
        contexts = [extract(carrier, context.Context()) for carrier in enqueued]
        contexts += [_TRACE_CONTEXT.extract(carrier, context.Context()) for carrier in wrote_rows]
        spans = [api.get_current_span(each).get_span_context() for each in contexts]
        linked = {(span.trace_id, span.span_id): span for span in spans if span.is_valid}
        attributes = {f"rowmill.{name}": value for name, value in facts.items() if value is not None}
        counted = {"batch.message_count": facts["count"], "client.id": facts.get("worker")}
        with self._tracer.start_as_current_span(
            f"run {facts['lane']}",
            # A span has one parent, and the rows of a chunk come from many traces: all of them are linked.
            context.Context(),
            SpanKind.CONSUMER,
            attributes | _messaging("run", "process", facts["lane"], **counted),
            [Link(span) for span in linked.values()],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:

            def ended(error: BaseException | None) -> None:
                if error is not None:
                    span.set_attribute("error.type", type(error).__qualname__)
                    span.set_status(Status(StatusCode.ERROR, scrubbed(f"{type(error).__name__}: {error}")))

            yield ended

    def wrote(self, verb: str, lane: str, environment: str, began: int, rows: int) -> None:
        attributes: dict[str, Any] = {"rowmill.lane": lane, "rowmill.environment": environment, "rowmill.count": rows}
        kind = {"claim": "receive"}.get(verb, verb)
        attributes |= _messaging(verb, kind, lane, **{"batch.message_count": rows})
        span = self._tracer.start_span(
            f"{verb} {lane}", context.Context(), SpanKind.CLIENT, attributes, start_time=min(began, time.time_ns())
        )
        span.end()

    def here(self) -> Carrier:
        carrier: dict[str, str] = {}
        inject(carrier)
        return carrier

    @contextlib.contextmanager
    def within(self, carrier: Carrier) -> Iterator[None]:
        token = context.attach(extract(carrier))
        try:
            yield
        finally:
            context.detach(token)
            self._flush()

    def stopped(self, event: Event) -> None:
        if event.name == "worker_stopped":
            self._flush()

    def _flush(self) -> None:
        provider: Any = self._provider or api.get_tracer_provider()
        if hasattr(provider, "force_flush"):  # the API alone has nothing to flush
            provider.force_flush(FLUSH)


def _conventional(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A run, in the words of the conventions."""
    id = facts.get("id")
    return _messaging(
        "run", "process", facts["lane"],
        **{"message.id": None if id is None else str(id), "client.id": facts.get("worker")},
    )  # fmt: skip
