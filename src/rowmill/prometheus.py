"""Metrics for Prometheus: what the workers of a process do, and how the lanes stand. Needs the extra ``prometheus``."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .declare.budget import Limit
from .errors import DeclarationError, RowmillError, Unreachable
from .events import ROW_COUNTS, Event
from .mill import Mill
from .store import Database
from .store.gates.budgets import spent
from .store.inspect.gauges import gauges
from .store.inspect.lane_view import LaneView, view_lane
from .store.own.workers import WorkersTable

try:
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.exposition import start_http_server
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector
except ImportError as error:  # pragma: no cover - the extra is there in the tests
    raise DeclarationError(
        "rowmill.prometheus needs prometheus-client", hint="pip install 'rowmill[prometheus]'"
    ) from error

CONTENT_TYPE = CONTENT_TYPE_LATEST
_WHERE = ("lane", "environment")
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_PATIENCE = 10.0
#: Events that end a wait, and how: one counter has both.
_WAITS = {"rows_woken": "true", "waits_timed_out": "timeout"}
_counters: weakref.WeakKeyDictionary[Any, RunCounters] = weakref.WeakKeyDictionary()


class RunCounters:
    """The counters of one registry: made once, however many Mills are observed."""

    def __init__(self, registry: Any) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"rowmill_{name}", about, labels, registry=registry)

        self.claims = counter("claims", "Rows claimed", *_WHERE)
        self.outcomes = counter("outcomes", "Outcomes written", *_WHERE, "outcome")
        self.seconds = Histogram(
            "rowmill_run_seconds", "How long runs took", _WHERE, buckets=_SECONDS, registry=registry
        )
        self.waits = counter("waits_ended", "Waiting rows whose condition is true, or that timed out", *_WHERE, "how")
        self.dead = counter("workers_dead", "Workers found dead by others", "environment")
        self.rows = {
            event: counter(name, about, *_WHERE)
            for event, (name, about, _) in ROW_COUNTS.items()
            if event not in _WAITS
        }

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if event.name == "worker_dead":
            self.dead.labels(fields["environment"]).inc()
            return
        if event.name not in ("job_settled", "job_failed", "batch_claimed", *ROW_COUNTS):
            return
        where = fields["lane"], fields["environment"]
        if event.name == "batch_claimed":
            self.claims.labels(*where).inc(fields["batch_claimed_count"])
        elif event.name in ROW_COUNTS:
            number = fields.get(ROW_COUNTS[event.name][2], 1)
            how = _WAITS.get(event.name)
            (self.waits.labels(*where, how) if how else self.rows[event.name].labels(*where)).inc(number)
        else:
            self.outcomes.labels(*where, fields["outcome"]).inc()
            self.seconds.labels(*where).observe(fields["job_duration_ms"] / 1000)


def observe(mill: Mill, registry: Any = REGISTRY) -> None:
    """Count what this Mill's workers do in this process: claims, outcomes, run times, lost claims, sweeps."""
    if registry not in _counters:
        _counters[registry] = RunCounters(registry)
    mill.on_event(_counters[registry])


class Standing:
    """How a Mill's lanes stand in its databases, asked at every collection; bounded, however big the tables are.

    An environment that does not answer is told as ``rowmill_up 0``, and does not hold up the others.
    """

    def __init__(self, mill: Mill, environments: Iterable[str] | None = None) -> None:
        self._mill, self._environments = mill, None if environments is None else list(environments)
        self._databases: list[tuple[str, Database]] | None = None
        self._views: dict[tuple[str, str], LaneView] = {}
        self._asking = asyncio.Lock()

    async def collect(self) -> list[GaugeMetricFamily]:
        """The gauges, as prometheus-client has them."""
        up = GaugeMetricFamily("rowmill_up", "The environment's database answers", labels=["environment"])
        rows = GaugeMetricFamily("rowmill_rows", "Rows by state, counted up to 10,000", labels=[*_WHERE, "state"])
        oldest = GaugeMetricFamily("rowmill_oldest_ready_seconds", "Age of the oldest ready row", labels=_WHERE)
        held_keys = GaugeMetricFamily("rowmill_held_keys", "Keys that a gate holds back", labels=[*_WHERE, "by"])
        workers = GaugeMetricFamily("rowmill_workers", "Workers, by what they do", labels=["environment", "state"])
        waits = GaugeMetricFamily(
            "rowmill_gate_wait_seconds", "Until the last held key opens again", labels=[*_WHERE, "by"]
        )
        silence = GaugeMetricFamily(
            "rowmill_stuck_seconds", "Since the last sign of life of the row that is stuck longest", labels=_WHERE
        )
        of_budget = ["budget", "unit", "period_seconds", "environment"]
        used = GaugeMetricFamily("rowmill_budget_used", "Spent within the period", labels=of_budget)
        limits = GaugeMetricFamily("rowmill_budget_limit", "What may be spent within the period", labels=of_budget)
        async with self._asking:
            if self._databases is None:
                self._databases = self._mill.databases(self._environments)
            answers = await asyncio.gather(*(self._ask(*place) for place in self._databases))
        for environment, samples, states, budgets in answers:
            up.add_metric([environment], float(samples is not None))
            for lane, gauge in samples or []:
                for state, number in gauge.rows.items():
                    rows.add_metric([lane, environment, state], number)
                if gauge.oldest_ready is not None:
                    oldest.add_metric([lane, environment], gauge.oldest_ready)
                for by, number in gauge.held_keys.items():
                    held_keys.add_metric([lane, environment, by], number)
                for by, seconds in gauge.longest_wait.items():
                    waits.add_metric([lane, environment, by], seconds)
                silence.add_metric([lane, environment], gauge.longest_silence)
            for state, number in states.items():
                workers.add_metric([environment, state], number)
            for budget, limit, amount in budgets:
                labels = [budget, limit.unit, f"{limit.seconds:g}", environment]
                used.add_metric(labels, amount)
                limits.add_metric(labels, limit.most)
        return [up, rows, oldest, held_keys, waits, silence, used, limits, workers]

    async def _ask(
        self, name: str, database: Database
    ) -> tuple[str, list[tuple[str, Any]] | None, dict[str, int], list[tuple[str, Limit, float]]]:
        budgets: list[tuple[str, Limit, float]] = []
        samples: list[tuple[str, Any]] = []
        states: dict[str, int] = {}
        try:
            async with asyncio.timeout(_PATIENCE):
                for lane in self._mill.lanes.values():
                    if not lane.serves(name):
                        continue
                    try:
                        if (name, lane.name) not in self._views:
                            view = await view_lane(lane, name, database, self._mill.clock)
                            self._views[name, lane.name] = view
                        samples.append((lane.name, await gauges(self._views[name, lane.name])))
                    except Unreachable:
                        raise
                    except RowmillError:
                        continue  # a lane without its table: its numbers are missing, the others' are not
                workers = WorkersTable(database)
                if await workers.exists():
                    states = {"busy": 0, "idle": 0, "dead": 0}
                    for worker in await workers.all():
                        if worker["state"] != "stopped":
                            states[worker["state"] if worker["alive"] else "dead"] += 1
                # One that all environments share is told for the environment that holds it.
                mine = [budget for budget in self._mill.budgets.values() if budget.shared in (None, name)]
                budgets = await spent(database, self._mill.clock, mine)
        except (RowmillError, TimeoutError):
            return name, None, {}, []
        return name, samples, states, budgets

    async def exposition(self, registry: Any = REGISTRY) -> bytes:
        """All metrics as text: how the lanes stand, and what is counted in this process. For a page of your own, with
        ``CONTENT_TYPE``; ``rowmill serve`` has one.
        """
        standing = CollectorRegistry()
        standing.register(_Fixed(await self.collect()))
        return generate_latest(standing) + generate_latest(registry)

    async def close(self) -> None:
        """Close the connections."""
        for _, database in self._databases or ():
            await database.close()
        self._databases, self._views = None, {}


class _Fixed(Collector):
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families


class _Live(Collector):
    """Asks from the server's thread what only the event loop can answer."""

    def __init__(self, standing: Standing, loop: asyncio.AbstractEventLoop) -> None:
        self._standing, self._loop = standing, loop

    def collect(self) -> Iterable[Any]:
        if not self._loop.is_running():
            return []
        asked = asyncio.run_coroutine_threadsafe(self._standing.collect(), self._loop)
        try:
            return asked.result(_PATIENCE * 1.5)
        except TimeoutError:
            asked.cancel()
            return []

    def describe(self) -> Iterable[Any]:
        return []


def listen(standing: Standing, port: int, host: str, folder: str) -> tuple[int, Callable[[], None]]:
    """Serve /metrics from a thread: how the lanes stand, and what worker processes have counted in ``folder``.

    Returns the port, and what ends it. Call it inside the event loop that is to ask the databases.
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    registry.register(_Live(standing, asyncio.get_running_loop()))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise RowmillError(
            f"cannot listen on {host}:{port} for metrics: {error.strerror or error}", hint="another --metrics-port"
        ) from error

    def end() -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()
        thread.join(5)
        server.server_close()

    return server.server_port, end
