"""What the log says of a batch, in one process; ``test_processes`` reads the lines themselves."""

from __future__ import annotations

import pytest

from apps.enrichment import mill
from apps.enrichment.tests.conftest import App
from apps.standins import sites
from apps.standins.internet import Internet
from rowmill import Event


async def test_batches_durations_counts_and_the_domains_that_fail_most_are_told(
    app: App, net: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11: batch_claimed_count, job_duration_ms, success_count, fail_count, top failing domains."""
    net.default = sites.page()
    net.sites |= {f"bad{n}.example": sites.refusing(500) for n in range(7)}
    urls = [f"https://bad{n}.example/{each}" for n in range(7) for each in range(1 + (n < 2))]
    await app.imported(*urls, "https://fine.example/")
    told: list[Event] = []
    monkeypatch.setattr(mill.events, "_subscribers", [*mill.events._subscribers, told.append])
    monkeypatch.setattr("rowmill.engine.counters._SUMMARY_EVERY", 1e9)  # one at the end, however long it takes
    await app.kit.drain("enrich")

    def fields(name: str, field: str) -> list[object]:
        return [event.fields[field] for event in told if event.name == name and event.fields["lane"] == "enrich"]

    assert sum(fields("batch_claimed", "batch_claimed_count")) == 10  # type: ignore[arg-type]
    assert all(took >= 0 for took in fields("job_failed", "job_duration_ms"))  # type: ignore[operator]
    assert len(fields("job_failed", "job_duration_ms")) == 9
    assert (fields("lane_summary", "success_count"), fields("lane_summary", "fail_count")) == ([1], [9])
    (domains,) = fields("top_failing_domains", "domains")
    assert isinstance(domains, dict)
    assert len(domains) == 5, "the five that fail most"
    assert {name: count for name, count in domains.items() if count > 1} == {"bad0.example": 2, "bad1.example": 2}
