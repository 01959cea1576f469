"""Events as lines of a log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

import farm
from databases import Db
from rowmill import Cancel, Mill, configure_logs
from rowmill.events import Events, logger


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    handlers, level = logger.handlers[:], logger.level
    stream = io.StringIO()
    configure_logs("json", logging.INFO, stream)
    yield stream
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_a_failures_line_tells_both_when_and_where_it_was(lines: io.StringIO) -> None:
    """C11: the place in the code does not take the place of the time."""
    events = Events()
    events.emit("job_failed", logging.WARNING, error="no page", at="app.py:7 in work")
    told = json.loads(lines.getvalue())
    assert told["at"] == "app.py:7 in work"
    assert abs(datetime.fromisoformat(told["time"]).timestamp() - datetime.now().timestamp()) < 60
    assert (told["level"], told["event"], told["error"]) == ("warning", "job_failed", "no page")


@pytest.mark.parametrize(
    ("canceled", "event", "level", "counts"),
    [(None, "job_failed", "warning", (1, 1, 0)), ({"status": "canceled"}, "job_settled", "info", (0, 0, 1))],
)
async def test_a_canceled_run_is_logged_with_its_reason_and_counted(
    db: Db, lines: io.StringIO, canceled: Any, event: str, level: str, counts: tuple[int, int, int]
) -> None:
    """D1: a lane without a state for canceled rows shows them as dead, and says so."""

    async def work(job: Any) -> None:
        raise Cancel("not wanted")

    db.execute(farm.JOBS[db.dialect])
    db.insert("jobs", [{"status": "queued"}])
    mill = Mill(db.url)
    states: dict[str, Any] = {state: {"status": state} for state in ("running", "done", "dead")}
    mill.lane("jobs", name="jobs", ready={"status": "queued"}, canceled=canceled, **states)(work)
    tally = await mill.worker(drain=True).run()
    assert (tally.failures, tally.died, tally.canceled) == counts
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    (line,) = [each for each in told if each["event"] in ("job_failed", "job_settled")]
    assert (line["event"], line["level"], line["outcome"], line["error"]) == (event, level, "canceled", "not wanted")
    (summary,) = [each for each in told if each["event"] == "lane_summary"]
    assert (summary["fail_count"], summary["canceled_count"]) == (counts[0], counts[2])


def test_an_applications_own_formatter_shows_what_it_was_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """E8: the message alone tells the row and the reason; the event's name and fields are attributes of the record."""
    with caplog.at_level(logging.INFO, "rowmill"):
        Events().emit("job_failed", logging.WARNING, id=7, error="no page")
        Events().emit("worker_idle")
    assert caplog.messages == ['job_failed id=7 error="no page"', "worker_idle"]
    assert caplog.records[0].event == "job_failed"  # type: ignore[attr-defined]
    assert caplog.records[0].fields == {"id": 7, "error": "no page"}  # type: ignore[attr-defined]
