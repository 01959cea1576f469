"""Traces, as the in-memory exporter of the real SDK gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from databases import Db
from farm import JOBS
from rowmill import Dead, Mill, fixed
from rowmill.otel import measure, trace

STATES: dict[str, Any] = {
    "ready": {"status": "queued"}, "running": {"status": "running"}, "done": {"status": "done"},
    "dead": {"status": "dead"},
}  # fmt: skip


class Traces:
    """A provider of one test's own."""

    def __init__(self) -> None:
        self.provider, self.exporter = TracerProvider(), InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.users = self.provider.get_tracer("user")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def traces() -> Iterator[Traces]:
    found = Traces()
    yield found
    found.provider.shutdown()


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def span_id(span: ReadableSpan) -> int:
    return span.get_span_context().span_id


async def test_a_job_is_linked_from_where_it_was_enqueued_to_where_it_ran(db: Db, traces: Traces) -> None:
    """C11: enqueue, claim, run, settle; the handler sees its own arguments and no others."""
    mill, got = Mill(db.url), []
    trace(mill, traces.provider)

    @mill.task
    async def send(to: str, **more: int) -> None:
        got.append((to, more))
        with traces.users.start_as_current_span("users own"):
            pass

    with traces.users.start_as_current_span("request"):
        await send.enqueue("a", n=1)
    await mill.enqueue_many([send.call("b"), send.call("c")])
    await mill.close()
    await mill.worker(drain=True).run()
    assert sorted(got) == [("a", {"n": 1}), ("b", {}), ("c", {})]
    enqueued, many = traces.named("enqueue send")
    assert parent(enqueued) == span_id(traces.one("request"))
    assert enqueued.kind is SpanKind.PRODUCER
    assert many.attributes is not None
    assert many.attributes["rowmill.count"] == 2
    runs = traces.named("run default")
    links = [link.context.span_id for run in runs for link in run.links]
    assert sorted(links) == sorted([span_id(enqueued), span_id(many), span_id(many)])
    assert {parent(run) for run in runs} == {None}
    assert {run.attributes["rowmill.outcome"] for run in runs if run.attributes} == {"done"}
    assert {parent(own) for own in traces.named("users own")} == {span_id(run) for run in runs}
    assert sum(s.attributes["rowmill.count"] for s in traces.named("claim default") if s.attributes) == 3  # type: ignore[misc]
    assert sum(s.attributes["rowmill.count"] for s in traces.named("settle default") if s.attributes) == 3  # type: ignore[misc]


async def test_the_users_spans_are_inside_the_run_in_a_thread_too(db: Db, traces: Traces) -> None:
    """C11: a plain function runs elsewhere, its spans belong to its run all the same; what fails shows, scrubbed."""
    db.execute(JOBS[db.dialect])
    db.execute("insert into jobs (note) values ('fine')")
    db.execute("insert into jobs (note) values ('bad')")
    mill = Mill({"prod": db.url})
    trace(mill, traces.provider)

    @mill.lane("jobs", name="read", max_attempts=1, backoff=fixed(td(0)), **STATES)
    def read(job: Any) -> None:
        with traces.users.start_as_current_span("users own"):
            if job["note"] == "bad":
                raise ConnectionError("no answer from 10.0.0.1 for ada@example.org")

    await mill.worker(drain=True, worker_id="w-1").run()
    runs = {run.attributes["rowmill.id"]: run for run in traces.named("run read") if run.attributes}
    assert {parent(own) for own in traces.named("users own")} == {span_id(run) for run in runs.values()}
    fine, bad = runs["1"], runs["2"]
    assert fine.attributes is not None
    assert {name: fine.attributes[f"rowmill.{name}"] for name in ("lane", "environment", "attempt", "worker")} == {
        "lane": "read", "environment": "prod", "attempt": 1, "worker": "w-1",
    }  # fmt: skip
    assert fine.status.status_code is not StatusCode.ERROR
    assert bad.status.status_code is StatusCode.ERROR
    assert bad.status.description == "ConnectionError: no answer from [address] for [email]"
    assert bad.attributes is not None
    assert bad.attributes["error.type"] == "ConnectionError"
    assert bad.attributes["rowmill.outcome"] == "dead"


async def test_a_chunk_is_one_span_that_is_linked_to_each_of_its_jobs(db: Db, traces: Traces) -> None:
    """Issue 23: a span for each call; the jobs were enqueued in several traces."""
    mill = Mill(db.url)
    trace(mill, traces.provider)

    @mill.task(chunk=8, max_attempts=1)
    async def send(numbers: list[int]) -> None:
        with traces.users.start_as_current_span("users own"):
            if 3 in numbers:
                raise ValueError("no answer for ada@example.org")

    await send.enqueue_many([(n,) for n in (1, 2)])
    await send.enqueue(3)
    await mill.close()
    await mill.worker(drain=True).run()
    enqueued = [span_id(span) for span in traces.named("enqueue send")]
    whole, *parts = traces.named("run send")
    assert sorted(link.context.span_id for link in whole.links) == sorted(enqueued)
    assert whole.attributes is not None
    assert (whole.attributes["rowmill.count"], whole.attributes["error.type"]) == (3, "ValueError")
    assert whole.status.description == "ValueError: no answer for [email]"
    assert parent(whole) is None
    assert {parent(own) for own in traces.named("users own")} == {span_id(run) for run in (whole, *parts)}
    assert [run.status.status_code for run in parts].count(StatusCode.ERROR) < len(parts)


async def test_the_users_spans_are_inside_the_run_in_a_process_too(
    lite: Db, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11: the process exports for itself, and has done so when it answers."""
    monkeypatch.setenv("ROWMILL_DATABASE_URL", lite.url)
    monkeypatch.setenv("SPANS", str(tmp_path / "spans"))
    import traced_app

    lite.execute(JOBS["sqlite"])
    lite.execute("insert into jobs (note) values ('fine')")
    await traced_app.mill.worker(drain=True).run()
    spans = {span["name"]: span for span in map(json.loads, (tmp_path / "spans").read_text().splitlines())}
    run, own = spans["run apart"], spans["users own"]
    assert own["parent_id"] == run["context"]["span_id"]
    assert own["context"]["trace_id"] == run["context"]["trace_id"]
    assert {"claim apart", "settle apart"} <= set(spans)


async def test_what_a_job_spawns_is_linked_to_it(lite: Db, traces: Traces) -> None:
    """C11: also chains and batches carry their trace; and a job without one runs."""
    mill = Mill(lite.url)
    trace(mill, traces.provider)

    @mill.task
    async def child(n: int) -> int:
        return n

    @mill.task
    async def mother(job: Any) -> None:
        await job.spawn(child.call(1), child.call(2))

    await mother.enqueue()
    await mill.chain(child.call(3), child.call(4))
    await mill.batch([child.call(5)], child.call(6))
    await mill.close()
    lite.execute("insert into rowmill_jobs (task, args) values ('child', '{\"n\": 7}')")
    await mill.worker(drain=True).run()
    links = [len(run.links) for run in traces.named("run default")]
    assert sorted(links) == [0, *[1] * 8]
    runs = [run for run in traces.named("run default") if run.attributes]
    mothers = {span_id(run) for run in runs if run.attributes and run.attributes["rowmill.id"] == "1"}
    (spawned,) = [span for span in traces.named("enqueue child") if parent(span) in mothers]
    assert spawned.attributes is not None
    assert spawned.attributes["rowmill.count"] == 2


async def test_nothing_that_was_done_is_untold_when_a_worker_has_stopped(lite: Db) -> None:
    """C11: spans leave in batches in the background; the last of them are flushed."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=60_000))
    lite.execute(JOBS["sqlite"])
    lite.execute("insert into jobs (note) values ('fine')")
    mill = Mill(lite.url)
    trace(mill, provider)

    @mill.lane("jobs", name="read", **STATES)
    async def read(job: Any) -> None:
        raise Dead("no")

    await mill.worker(drain=True).run()
    assert {span.name for span in exporter.get_finished_spans()} == {"run read", "claim read", "settle read"}
    provider.shutdown()


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("value", "continued"),
    [
        (f"00-{TRACE_ID}-00f067aa0ba902b7-01", True),
        ("garbage", False),
        ("00-" + "0" * 32 + "-00-01", False),
        (None, False),
    ],
)
async def test_a_run_continues_the_trace_that_wrote_its_row(
    db: Db, traces: Traces, value: str | None, continued: bool
) -> None:
    """A malformed value is ignored, and the row is worked on all the same."""
    db.execute(
        "create table pages (id integer primary key, status text, worker text, claimed_at timestamp, traceparent text)"
    )
    db.execute("insert into pages (id, status, traceparent) values (1, 'queued', ?)", value)
    mill = Mill(db.url)
    trace(mill, traces.provider)

    @mill.lane("pages", max_attempts=1, **STATES)
    async def fetch(job: Any) -> None: ...

    await mill.worker(drain=True).run()
    span = traces.one("run fetch")
    assert (f"{span.get_span_context().trace_id:032x}" == TRACE_ID) is continued
    assert (parent(span) == 0x00F067AA0BA902B7) is continued
    assert db.value("select status from pages") == "done"


async def test_spans_have_the_attributes_of_the_messaging_conventions(db: Db, traces: Traces) -> None:
    """Issue 25, point 3: tools that know the conventions find system, destination, operation, message and error."""
    db.execute(JOBS[db.dialect])
    db.execute("insert into jobs (note) values ('bad')")
    mill = Mill({"prod": db.url})
    trace(mill, traces.provider)

    @mill.lane("jobs", name="read", max_attempts=1, **STATES)
    async def read(job: Any) -> None:
        raise LookupError("gone")

    @mill.task
    async def send(to: str) -> None: ...

    await mill.enqueue_many([send.call("a"), send.call("b")])
    await mill.close()
    await mill.worker(drain=True, worker_id="w-1").run()

    def told(span: ReadableSpan) -> dict[str, Any]:
        return {name.removeprefix("messaging."): value for name, value in (span.attributes or {}).items()
                if name.startswith(("messaging.", "error."))}  # fmt: skip

    assert told(traces.one("enqueue send")) == {
        "system": "rowmill", "operation.name": "enqueue", "operation.type": "send", "destination.name": "default",
        "batch.message_count": 2,
    }  # fmt: skip
    assert told(traces.one("run read")) == {
        "system": "rowmill", "operation.name": "run", "operation.type": "process", "destination.name": "read",
        "message.id": "1", "client.id": "w-1", "error.type": "LookupError",
    }  # fmt: skip
    for verb, kind in (("claim", "receive"), ("settle", "settle")):
        assert told(traces.one(f"{verb} read")) == {
            "system": "rowmill", "operation.name": verb, "operation.type": kind, "destination.name": "read",
            "batch.message_count": 1,
        }  # fmt: skip


async def test_metrics_have_the_instruments_of_the_messaging_conventions(db: Db) -> None:
    """Issue 25, point 3: what was claimed, how long runs took, how they ended; flushed when the worker stops."""
    db.execute(JOBS[db.dialect])
    for note in ("fine", "fine", "bad"):
        db.execute("insert into jobs (note) values (?)", note)
    mill, reader = Mill({"prod": db.url}), InMemoryMetricReader()
    provider = MeterProvider([reader])
    measure(mill, provider)

    @mill.lane("jobs", name="read", max_attempts=2, backoff=fixed(td(0)), **STATES)
    async def read(job: Any) -> None:
        if job["note"] == "bad":
            raise LookupError("gone")

    await mill.worker(drain=True).run()
    found = reader.get_metrics_data()
    assert found is not None
    points: dict[str, list[Any]] = {
        metric.name: list(metric.data.data_points)
        for resource in found.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics
    }  # fmt: skip
    provider.shutdown()
    (claimed,) = points["messaging.client.consumed.messages"]
    assert claimed.value == 4
    assert dict(claimed.attributes) == {
        "messaging.system": "rowmill", "messaging.operation.name": "claim", "messaging.operation.type": "receive",
        "messaging.destination.name": "read", "rowmill.environment": "prod",
    }  # fmt: skip
    runs = {point.attributes.get("error.type"): point.count for point in points["messaging.process.duration"]}
    assert runs == {None: 2, "transient": 2}
    outcomes = {point.attributes["rowmill.outcome"]: point.value for point in points["rowmill.outcomes"]}
    assert outcomes == {"done": 2, "retry": 1, "dead": 1}
