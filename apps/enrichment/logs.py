"""What the log says beyond the engine's own events (batch_claimed_count, job_duration_ms, success_count, fail_count):
which domains fail most, with every summary of the lane.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from rowmill import Event, Job

from .mill import mill

MOST = 5


class Failing:
    """Failures by domain since the last summary of this process."""

    def __init__(self) -> None:
        self._domains: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def note(self, job: Job) -> None:
        """A run is about to fail; it counts when that is written."""
        self._domains[str(job.id)] = job["domain"]

    def hear(self, event: Event) -> None:
        """Count failures that were written; with a summary, say where they were."""
        if event.fields.get("lane") != "enrich":
            return
        if event.name == "job_failed":
            self._counts[self._domains.pop(str(event.fields["id"]), "?")] += 1
        elif event.name == "claim_lost":
            self._domains.pop(str(event.fields["id"]), None)
        elif event.name == "lane_summary" and self._counts:
            counts, self._counts = self._counts, Counter()
            told: dict[str, Any] = {"worker": event.fields.get("worker"), "lane": "enrich"}
            mill.events.emit("top_failing_domains", logging.INFO, **told, domains=dict(counts.most_common(MOST)))


failing = Failing()
mill.on_event(failing.hear)
