"""An application whose handler runs in a process of its own, and sends its spans to a file from there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from rowmill import Mill
from rowmill.otel import trace


class ToFile(SpanExporter):
    """One line for every span."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with open(os.environ["SPANS"], "a") as file:
            for span in spans:
                file.write(json.dumps(json.loads(span.to_json())) + "\n")
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ToFile()))
mill = Mill()
trace(mill, provider)


@mill.lane(
    "jobs",
    name="apart",
    ready={"status": "queued"},
    running={"status": "running"},
    done={"status": "done"},
    dead={"status": "dead"},
    isolation="process",
)
def apart(job: Any) -> None:
    with provider.get_tracer("user").start_as_current_span("users own"):
        pass
