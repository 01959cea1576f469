"""Events: the engine emits them, and logs, metrics and views subscribe to them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

logger = logging.getLogger("rowmill")


@dataclass(frozen=True, slots=True)
class Event:
    """One event: a name, its fields, and the level of its log line."""

    name: str
    level: int = logging.INFO
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: The exception behind a failure, for those who can show one; no field, and so on no log line.
    cause: BaseException | None = None


Subscriber = Callable[[Event], None]
#: Events that count rows of a lane: the counter's name, what it counts, and the field with the number of rows; without
#: one, an event is about one row. Prometheus and OpenTelemetry count them.
ROW_COUNTS = {
    "claim_lost": ("lost", "Outcomes dropped: the claim was lost", ""),
    "rows_expired": ("expired", "Rows not started in time", "expired_count"),
    "rows_woken": ("woken", "Waiting rows whose condition is true", "woken_count"),
    "waits_timed_out": ("timed_out", "Rows dead after their wait", "timed_out_count"),
    "inputs_changed": ("inputs_changed", "Runs whose inputs changed meanwhile", "changed_count"),
    "inputs_kept_changing": ("inputs_kept_changing", "Outcomes final although inputs changed", "settled_count"),
    "row_swept": ("swept", "Rows taken back from their holder", ""),
    "row_poisoned": ("poisoned", "Rows dead as poison", ""),
    "rows_given_back": ("given_back", "Rows of dead workers given back before their lease ended", "count"),
}


class Events:
    """Passes events to subscribers. A subscriber that raises is logged once, and never stops the work."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = [to_log]
        self._broken: set[int] = set()
        #: The tracer, if there is one. Used when a worker starts and when calls are enqueued.
        self.tracer: Any = None
        #: A subscriber other than the log wants an event for every run, also for successful ones.
        self.observed = False

    def subscribe(self, subscriber: Subscriber, *, detailed: bool = True) -> Subscriber:
        """Call ``subscriber(event)`` for every event from now on. Without ``detailed``, claims and successful runs may
        be left out, and cost nothing.
        """
        self._subscribers.append(subscriber)
        self.observed = self.observed or detailed
        return subscriber

    def emit(self, name: str, level: int = logging.INFO, *, cause: Any = None, **fields: Any) -> None:
        """Send an event to all subscribers. ``cause``: the exception behind it."""
        event = Event(name, level, fields, cause)
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:
                if id(subscriber) not in self._broken:
                    self._broken.add(id(subscriber))
                    logger.exception(
                        "a subscriber to rowmill's events raised an error; further errors of it are not logged"
                    )


def to_log(event: Event, traceback: BaseException | None = None) -> None:
    """Write a log line: the log is a subscriber like any other.

    The message has the fields in it, for formatters of the application's own; the record has ``event`` and ``fields``.
    """
    if logger.isEnabledFor(event.level):
        extra = {"event": event.name, "fields": event.fields}
        logger.log(event.level, "%s%s", event.name, _Words(event.fields), extra=extra, exc_info=traceback)


class _Words:
    """Fields as text, formatted only if a line is written."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return "".join(f" {name}={_word(value)}" for name, value in self._fields.items() if name != "traceback")


class _Lines(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        event = getattr(record, "event", None) or record.getMessage()
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        at = datetime.fromtimestamp(record.created, UTC)
        if self.as_json:
            # Not "at": a failure's own field of that name says where in the code it was raised.
            entry = {"time": at.isoformat(), "level": record.levelname.lower(), "event": event, **fields}
            return json.dumps(entry, default=str)
        line = f"{at:%H:%M:%S} {record.levelname.lower():<7} {event:<16}{_Words(fields)}".rstrip()
        return f"{line}\n{fields['traceback']}" if "traceback" in fields else line


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return json.dumps(text) if " " in text and not text.startswith(("{", "[")) else text


def configure_logs(form: str = "console", level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send rowmill's events to a stream, as ``console`` lines or as ``json``, once, whatever the root logger does."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Lines(form == "json"))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def ensure_logs() -> None:
    """``configure_logs()``, unless the process has set up logging of its own. Python's last resort would show warnings
    alone.
    """
    if not logger.hasHandlers():
        configure_logs()
