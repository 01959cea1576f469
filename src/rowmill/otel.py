"""Traces for OpenTelemetry: ``rowmill.otel.trace(mill)``. Needs the extra ``otel``, and an SDK of the application's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .engine.tracing import Carrier
from .errors import DeclarationError
from .events import Event
from .mill import Mill
from .scrub import scrubbed
from .store.lane.claim import Settlement

try:
    from opentelemetry import context
    from opentelemetry import trace as api
    from opentelemetry.propagate import extract, inject
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:  # pragma: no cover - the extra is there in the tests
    raise DeclarationError("rowmill.otel needs opentelemetry-api", hint="pip install 'rowmill[otel]'") from error

_TRACE_CONTEXT = TraceContextTextMapPropagator()
FLUSH = 5000  # milliseconds


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


class _Tracer:
    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self._tracer = api.get_tracer("rowmill", tracer_provider=provider)

    @contextlib.contextmanager
    def enqueue(self, tasks: Sequence[str]) -> Iterator[Carrier]:
        names = list(dict.fromkeys(tasks))
        name = f"enqueue {names[0]}" if len(names) == 1 else "enqueue"
        told: dict[str, Any] = {"rowmill.tasks": names, "rowmill.count": len(tasks)}
        with self._tracer.start_as_current_span(name, kind=SpanKind.PRODUCER, attributes=told):
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
            {f"rowmill.{name}": value for name, value in facts.items() if value is not None},
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

    def wrote(self, verb: str, lane: str, environment: str, began: int, rows: int) -> None:
        told: dict[str, Any] = {"rowmill.lane": lane, "rowmill.environment": environment, "rowmill.count": rows}
        span = self._tracer.start_span(
            f"{verb} {lane}", context.Context(), SpanKind.CLIENT, told, start_time=min(began, time.time_ns())
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
