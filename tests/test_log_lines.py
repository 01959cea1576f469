"""Events as lines of a log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from rowmill import configure_logs
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
